"""Gradients: `compute_gradients`, `tf.gradients`, and pairs of gradients."""

import jax
import jax.numpy as jnp
import numpy as np

import cases
import graphs
from shard_transforms import facade
from shard_transforms.facade import tf

W = np.float32([1, 2, 4])
X = np.float32([3, -1, 2])


class DifferentiationTest(graphs.GraphTest):

  def setUp(self):
    super().setUp()
    self.w = tf.Variable(W, name='w')
    self.b = tf.Variable(0.5, name='b')
    self.opt = graphs.sgd(0.1)

  def grads(self, loss, var_list=None, **kwargs):
    pairs = self.opt.compute_gradients(loss, var_list, **kwargs)
    return {variable.op.name: grad for grad, variable in pairs}

  def dot(self):
    return jnp.sum(self.w * X) * self.b


class ComputeGradientsTest(DifferentiationTest):

  def test_differentiates_a_loss_of_no_arguments(self):
    grads = self.grads(self.dot)

    self.assert_equal(grads, {'w': jnp.asarray(0.5 * X), 'b': jnp.float32(9)})
    self.assert_holds(self.w, W)

  def test_differentiates_a_loss_of_the_values(self):
    def loss(b, w):
      self.assertIsInstance(b, jax.Array)
      return jnp.sum(w * X) * b

    for loss_fn in loss, lambda *values: loss(*values):
      grads = self.grads(loss_fn, iter([self.b, self.w]))
      self.assertEqual([*grads], ['b', 'w'])
      self.assert_equal(grads, {'b': jnp.float32(9), 'w': jnp.asarray(0.5 * X)})
    # It may read the variables as well, and have defaults.
    grads = self.grads(lambda b, scale=2.0: scale * b * self.b, self.b)
    self.assert_equal(grads, {'b': jnp.float32(2)})

  @cases.parameters(False, True)
  def test_gives_none_where_the_loss_does_not_read(self, compiled):
    tf.Variable(1.0, trainable=False)

    def grads():
      unread = self.grads(lambda: self.b**2)
      return unread, self.grads(lambda: self.b**2 + 0 * self.w[0])

    unread, zero = (facade.function(grads) if compiled else grads)()

    self.assert_equal(unread, {'w': None, 'b': jnp.float32(1)})
    self.assert_equal(zero, {'w': jnp.zeros(3), 'b': jnp.float32(1)})

  def test_default_variables_include_those_created_by_the_loss(self):
    def loss():
      return tf.get_variable('new', initializer=lambda: 3.0) ** 2

    grads = self.grads(loss)

    self.assert_equal(grads, {'w': None, 'b': None, 'new': jnp.float32(6)})
    with tf.Graph().as_default():
      self.opt.minimize(loss)
      self.assert_close(self.values(), {'new': np.float32(2.4)})

  @cases.parameters((None, 1), (3.0, 3), (X, X))
  def test_sums_the_elements_of_the_loss(self, grad_loss, factor):
    grads = self.grads(lambda: self.w**2, self.w, grad_loss=grad_loss)

    self.assert_equal(grads, {'w': jnp.asarray(2 * W * factor)})

  def test_assignments_of_the_loss_take_effect(self):
    mean = tf.Variable(0.0, trainable=False)

    def loss():
      mean.assign_add(jnp.sum(self.w))
      return mean * self.b

    grads = self.grads(loss)

    # The loss is that of the value which it has assigned itself.
    self.assert_equal(grads, {'w': jnp.full(3, 0.5), 'b': jnp.float32(7)})
    self.assert_holds(mean, 7.0)

  @cases.parameters(False, True)
  def test_a_loss_that_fails_changes_nothing(self, compiled):
    def loss():
      self.b.assign(2.0)
      raise KeyError

    def step():
      self.opt.minimize(loss)

    with self.assertRaises(KeyError):
      (facade.function(step) if compiled else step)()

    self.assert_holds(self.b, 0.5)


class ReturnedLossTest(DifferentiationTest):
  """The loss, and what it returns besides, from the evaluation that counts."""

  @cases.parameters(
      lambda opt: opt,
      facade.CrossShardOptimizer,
      facade.TowerOptimizer,
      graphs.drop_stale,
      graphs.sync_replicas,
      lambda opt: facade.CrossShardOptimizer(graphs.drop_stale(opt)),
  )
  def test_every_optimizer_returns_it(self, wrap):
    opt, step = wrap(self.opt), tf.train.get_or_create_global_step()
    mean = tf.Variable(0.0, trainable=False)

    def loss():
      mean.assign(0.5 * mean + self.b)
      return 2 * self.b, {'four times': 4 * self.b}

    @facade.function
    def run():
      with facade.shard_context(1):
        _, first = opt.minimize(loss, step, has_aux=True)
        with tf.control_dependencies([None]):  # That follows.
          pairs, second = opt.compute_gradients(loss, has_aux=True)
        opt.apply_gradients(pairs, step)
        return first, second

    first, second = jax.device_get(run())

    # The rate is 0.1, and the gradient 2.
    np.testing.assert_allclose([first[0], second[0]], [1, 0.6], 1e-6)
    actual = [aux['four times'] for _, aux in (first, second)]
    np.testing.assert_allclose(actual, [2, 1.2], 1e-6)
    # Assignments of a loss count once.
    np.testing.assert_allclose([float(mean), int(step)], [0.55, 2], 1e-6)

  def test_returns_the_unscaled_loss_of_shards_and_towers(self):
    def loss(x):
      return jnp.mean(2 * self.b * x)

    cross = facade.CrossShardOptimizer(self.opt)
    (losses,) = graphs.mapped(
        lambda x: cross.minimize(lambda: loss(x), return_loss=True)[1], 4
    )(graphs.X)
    self.assertEqual(losses.tolist(), [1.5, 5.5, 9.5, 13.5])

    def model_fn(features, mode):
      opt = facade.TowerOptimizer(self.opt)
      train_op, out = opt.minimize(lambda: loss(features), return_loss=True)
      return tf.estimator.EstimatorSpec(mode, loss=out, train_op=train_op)

    self.b.assign(0.5)
    towers = tf.contrib.estimator.replicate_model_fn(
        model_fn, devices=graphs.IN_TURN
    )
    self.assertEqual(float(towers(graphs.X, mode='train').loss), 7.5)


class GradientsTest(DifferentiationTest):

  def setUp(self):
    super().setUp()
    self.c = tf.Variable(2.0, name='c')

  def test_returns_none_for_variables_that_are_not_read(self):
    grads = tf.gradients(self.dot, [self.w, self.c, self.b])

    expected = [jnp.asarray(0.5 * X), None, jnp.float32(9)]
    self.assert_equal(grads, expected)
    self.assert_equal(tf.gradients(self.dot, self.b), expected[2:])

  def test_sums_the_gradients_of_several_losses(self):
    losses = [lambda: jnp.sum(self.w) * self.b, lambda: 3 * self.b**2]

    plain = tf.gradients(losses, [self.b, self.c])
    weighted, values = tf.gradients(
        losses, [self.b], [2.0, np.float32(10)], return_loss=True
    )

    self.assert_equal(plain, [jnp.float32(7 + 3), None])
    self.assert_equal(weighted, [jnp.float32(14 + 30)])
    self.assertEqual([float(x) for x in values], [3.5, 0.75])

  @cases.parameters((None, 7.0), (2.0, 14.0), (np.float32([1, 0, 1]), 5.0))
  def test_multiplies_by_grad_ys(self, grad_ys, expected):
    (grad,), out = tf.gradients(
        lambda: (self.w * self.b, {'b': 4 * self.b}),
        [self.b],
        grad_ys,
        has_aux=True,
    )

    self.assertEqual(float(grad), expected)
    self.assertEqual(float(out[1]['b']), 2)

  def test_works_in_a_jax_loop_without_assignments(self):
    def body(_, x):
      return x + tf.gradients(lambda: x * self.b, [self.b])[0]

    step = facade.function(
        lambda: jax.lax.fori_loop(0, 3, body, jnp.float32(1))
    )

    self.assertEqual(float(step()), 8)

  @cases.parameters('cross_shard', 'towers')
  def test_gradients_of_shards_and_towers_are_unscaled_and_summed(self, name):
    wrap, where = graphs.WRAPPERS[name]
    opt = wrap(graphs.sgd())

    def step(x):
      grads = tf.gradients(lambda: jnp.mean(self.b * x), [self.b])
      clipped, _ = tf.clip_by_global_norm(grads, 1.0)
      opt.apply_gradients([(grads[0], self.b), (clipped[0], self.c)])

    graphs.mapped(step, where)(graphs.X)

    # Each clips its own to 1; the sum has norm 4.
    self.assert_holds(self.b, 0.5 - 30)
    self.assert_holds(self.c, 2.0 - 4)


class PairsTest(DifferentiationTest):

  def test_takes_arrays_numbers_lists_variables_and_none(self):
    for grad in (
        *(jnp.ones(3), [1.0, 1, 1], (1.0, 1, 1), tf.Variable(np.ones(3))),
        *(np.ones(3, np.float64), jnp.ones(3, jnp.bfloat16)),
    ):
      self.w.assign(W)
      graphs.sgd().apply_gradients(iter([[grad, self.w], [None, self.b]]))
      self.assert_holds(self.w, W - 1)
    graphs.sgd().apply_gradients([(2.0, self.b)])
    self.assert_holds(self.b, -1.5)
    integer = tf.Variable(1, trainable=False)
    graphs.sgd().apply_gradients([(1.0, self.b), (None, integer)])
    self.assert_holds(self.b, -2.5)
