"""`shard`: optimizers and variables inside, groups of shards, contexts."""

import chex
import jax
import jax.numpy as jnp
import numpy as np

import cases
import graphs
from shard_transforms import facade
from shard_transforms.facade import tf

X = graphs.X
GROUPS = np.array([[0, 1], [2, 3]])
sgd = graphs.sgd


class ShardTest(graphs.GraphTest):

  @cases.parameters(1, 2, 4)
  def test_splits_inputs_and_concatenates_outputs(self, num_shards):
    x = np.arange(48.0, dtype=np.float32).reshape(3, 4, 4)

    out = facade.shard(
        lambda x, y: (x['x'], jnp.concatenate([x['x'], y], axis=1)),
        [{'x': x, 'unused': [x[0]]}, x],
        num_shards,
        input_shard_axes=[1, -2],
        outputs_from_all_shards=[num_shards < 4, True],
    )

    parts = np.split(x, num_shards, axis=1)
    every = np.concatenate([np.concatenate([p, p], axis=1) for p in parts])
    first = parts[0] if num_shards == 4 else np.concatenate(parts)
    self.assert_equal(out, [first, every])

  def test_outputs_may_be_one_array_or_none(self):
    self.assertLen(facade.shard(lambda x: x, [X], 4), 1)
    self.assertEqual(facade.shard(lambda: None, num_shards=4), [])
    self.assert_equal(
        facade.shard(lambda x: x.sum(), [X], 4), [jnp.float32([6, 22, 38, 54])]
    )

  def test_runs_on_assigned_devices(self):
    devices = jax.devices()[3:5]

    (out,) = facade.shard(lambda x: x, [X], 2, device_assignment=devices)

    self.assertEqual(out.sharding.device_set, set(devices))

  def test_accepts_an_input_on_another_mesh(self):
    mesh = jax.make_mesh((4,), ('data',))
    x = jax.device_put(X, jax.NamedSharding(mesh, jax.P('data')))

    self.assert_equal(facade.shard(lambda x: 2 * x, [x], 4), [2 * X])

  def test_compiles_once_in_a_function(self):
    w = tf.Variable(1.0, name='w')
    calls = []

    def computation(x):
      calls.append(1)
      opt = facade.CrossShardOptimizer(tf.train.MomentumOptimizer(1.0, 0.5))
      opt.minimize(lambda: jnp.mean(w * x))

    step = graphs.mapped(computation, 4)
    step(np.ones(4, np.float32))
    step(np.ones(4, np.float32))

    # To find its variables, and to compile it.
    self.assertLen(calls, 2)
    # None is compiled for what the variables are before they lie on the mesh.
    self.assertLessEqual(step._run._cache_size(), 2)
    # The optimizer of the computation keeps its slots.
    self.assertEqual(float(w), 1 - 2.5)
    self.assertEqual([*self.values()], ['w', 'w/Momentum'])

  def test_may_assign_other_variables_for_other_shapes(self):
    w, b = tf.Variable(1.0), tf.Variable(1.0)
    step = graphs.mapped(
        lambda x: (w if x.size > 1 else b).assign(3 * w + b), 4
    )

    for size in (8, 4, 8):
      step(np.ones(size, np.float32))

    self.assertEqual((float(w), float(b)), (25, 13))

  @cases.parameters(False, True)
  def test_is_differentiated_in_a_loss(self, compiled):
    w = tf.Variable(2.0)

    def loss(x):
      return jnp.sum(facade.shard(lambda x: w * x, [x], 4)[0])

    graphs.train(sgd(), loss, compiled=compiled)

    self.assert_holds(w, 2.0 - 120)

  def test_a_function_in_a_context_uses_its_number_of_shards(self):
    w = tf.Variable(0.0)
    opt = facade.CrossShardOptimizer(sgd())
    compute = facade.function(
        lambda: [g for g, _ in opt.compute_gradients(lambda: w * 8.0)]
    )

    def elsewhere():  # Another thread is in no context.
      facade.shard(lambda: None, num_shards=2)

    grads = []
    for num_shards in (2, 4):
      with self.assertRaises(KeyError), facade.shard_context(num_shards):
        self.assertEmpty(graphs.run_threads(elsewhere))
        grads += map(float, compute())
        raise KeyError

    self.assertEqual(grads, [4, 2])
    with self.assertRaisesRegex(ValueError, 'outside of a shard context'):
      compute()

  def test_accepts_axes_of_other_maps(self):
    w = tf.Variable(0.0)
    opt = facade.CrossShardOptimizer(sgd(0.5))

    def gradient(x):
      with facade.shard_context(4, 'i'):
        ((grad, _),) = opt.compute_gradients(lambda: jnp.mean(w * x))
      return grad

    grads = jax.vmap(gradient, axis_name='i')(X.reshape(4, 4))

    self.assert_close(grads.sum(), jnp.float32(7.5))


class CrossShardOptimizerTest(graphs.GraphTest):

  @cases.parameters((tf.losses.Reduction.MEAN, 1), (tf.losses.Reduction.SUM, 4))
  def test_scales_with_grad_loss(self, reduction, factor):
    w = tf.Variable([1.0, 2.0])
    opt = facade.CrossShardOptimizer(sgd(), reduction)
    options = {'var_list': [w], 'grad_loss': jnp.float32([4, 8])}

    graphs.mapped(lambda x: opt.minimize(lambda w: w * x[:2], **options), 4)(X)

    # The means of the first two of each shard are 6 and 7.
    self.assert_holds(w, jnp.float32([1 - 24 * factor, 2 - 56 * factor]))

  def test_training_continues_on_more_shards(self):
    w = tf.Variable(0.0)
    opt = facade.CrossShardOptimizer(tf.train.MomentumOptimizer(1.0, 0.5))

    for num_shards in (2, 1, 4):
      facade.shard(
          lambda x: opt.minimize(lambda: jnp.mean(w * x)),
          [np.ones(8, np.float32)],
          num_shards,
      )

    self.assertEqual(float(w), -(1 + 1.5 + 1.75))

  def test_assignments_of_the_inner_optimizer_are_reduced(self):
    w, seen = tf.Variable(1.0, name='w'), tf.Variable(0.0, name='seen')

    class Sees(tf.train.GradientDescentOptimizer):

      def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        pairs = list(grads_and_vars)
        seen.assign(pairs[0][0])
        return super().apply_gradients(pairs, global_step, name)

    opt = facade.CrossShardOptimizer(Sees(0.1))
    graphs.train(opt, lambda x: jnp.mean(w * x) + 0 * seen, where=4)

    self.assert_holds(seen, 7.5)

  def test_groups_have_separate_values(self):
    w = tf.Variable(0.0, name='w')

    def train(inner, compiled=True):
      opt = facade.CrossShardOptimizer(inner, group_assignment=GROUPS)
      graphs.train(opt, lambda x: jnp.mean(w * x), where=4, compiled=compiled)

    train(tf.train.MomentumOptimizer(1.0, 0.5), compiled=False)
    # The means of the parts are 1.5, 5.5, 9.5 and 13.5.
    expected = jnp.float32([-3.5, -3.5, -11.5, -11.5])
    self.assert_equal(w.shard_values(), expected)

    # Reading is for one value.
    for read in (
        *(w.value, lambda: w + 1, lambda: jnp.sum(w)),
        *(lambda: np.asarray(w), lambda: w.assign_add(1.0)),
    ):
      with self.assertRaisesRegex(ValueError, 'has one value for each'):
        read()
    self.assertIn('a value per shard', repr(w))
    with self.assertRaisesRegex(ValueError, 'each of 4 shards.*used on 8'):
      facade.shard(lambda: w.value(), num_shards=8)
    other = tf.Variable(2.0)
    (out,) = facade.shard(lambda: other.value(), num_shards=8)
    self.assert_equal(out, jnp.full(8, 2.0))

    # Slots are made before; assigning makes all shards the same again.
    train(sgd())
    self.assert_equal(w.shard_values(), 2 * expected)
    with self.assertRaisesRegex(ValueError, 'Use the same optimizer'):
      train(tf.train.AdagradOptimizer(0.1))
    w.assign(1.0)
    self.assert_holds(w, 1.0)
    with self.assertRaisesRegex(ValueError, 'one value for all'):
      w.shard_values()


class CrossReplicaSumTest(graphs.GraphTest):

  @cases.parameters(
      (4, None, [24, 28, 32, 36] * 4),
      (4, GROUPS, [4, 6, 8, 10] * 2 + [20, 22, 24, 26] * 2),
      (4, GROUPS.tolist(), [4, 6, 8, 10] * 2 + [20, 22, 24, 26] * 2),
      (1, None, X),
  )
  def test_sums_over_shards_and_groups(self, num_shards, groups, expected):
    (actual,) = facade.shard(
        lambda x: tf.tpu.cross_replica_sum(x, groups), [X], num_shards
    )

    self.assert_equal(actual, jnp.float32(expected))

  def test_sums_replicated_values_once_per_shard(self):
    w = tf.Variable(2.0)

    (actual,) = facade.shard(lambda: tf.tpu.cross_replica_sum(w), num_shards=4)

    self.assert_equal(actual, jnp.full(4, 8.0))

  def test_gradients_flow_through_statistics_of_the_whole_batch(self):
    x = np.random.default_rng(0).normal(size=16).astype(np.float32)

    def train(num_shards):
      w = tf.Variable(1.5)
      opt = facade.CrossShardOptimizer(sgd(0.1))

      def computation(x):
        def loss():
          y = jnp.tanh(w * x)
          mean = tf.tpu.cross_replica_sum(jnp.mean(y)) / num_shards
          square = tf.tpu.cross_replica_sum(jnp.mean(y * y)) / num_shards
          z = (y - mean) / jnp.sqrt(square - mean * mean + 1e-3)
          return jnp.mean(jnp.sin(z) * x)

        opt.minimize(loss, var_list=[w])

      facade.shard(computation, [x], num_shards=num_shards)
      return w.value()

    one, four = train(1), train(4)
    chex.assert_trees_all_close(four, one, rtol=1e-5)
    self.assertGreater(abs(float(one) - 1.5), 1e-4)
