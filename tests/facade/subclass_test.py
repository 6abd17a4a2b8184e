"""Optimizers of programs: subclasses of `Optimizer`, inside and outside."""

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

import cases
import facade_cases
from shard_transforms import facade

X = np.arange(16, dtype=np.float32)
IN_TURN = ['/cpu:0'] * 4
AT_ONCE = [f'/device:CPU:{i}' for i in range(4)]


def setUpModule():
  chex.assert_devices_available(8, 'cpu')


class Heavy(facade.Optimizer):
  """Momentum by the protocol; counts updates in a variable of its own."""

  def __init__(self, learning_rate, use_locking=False, name='Heavy'):
    super().__init__(use_locking, name)
    self._lr = learning_rate

  def _create_slots(self, var_list):
    first = min(var_list, key=lambda v: v.name)
    self._create_non_slot_variable(0, 'updates', first)
    for v in var_list:
      self._zeros_slot(v, 'ball', self._name)

  def _prepare(self):
    self._lr_t = self._call_if_callable(self._lr)

  def _apply_dense(self, grad, var):
    ball = self.get_slot(var, 'ball').assign(
        0.5 * self.get_slot(var, 'ball') + grad
    )
    return var.assign_sub(self._lr_t * ball)

  def _finish(self, update_ops, name_scope):
    self._get_non_slot_variable('updates').assign_add(len(update_ops))


class Resource(Heavy):
  """Overrides the method for the other kind of variables."""

  def _resource_apply_dense(self, grad, var):
    return super()._apply_dense(grad, var)


class Public(facade.Optimizer):
  """Momentum as BERT's optimizer does it, in `apply_gradients`."""

  def __init__(self, learning_rate):
    super().__init__(False, 'Public')
    self._lr = learning_rate

  def apply_gradients(self, grads_and_vars, global_step=None, name=None):
    for grad, var in grads_and_vars:
      if grad is None:
        continue
      ball = facade.get_variable(
          f'{var.op.name}/ball',
          var.shape,
          jnp.float32,
          jnp.zeros,
          trainable=False,
      )
      new = 0.5 * ball + grad
      var.assign(var - self._lr * new)
      ball.assign(new)
    if global_step is not None:
      global_step.assign_add(1)


class Doubled(facade.Optimizer):
  """A wrapper of a program, which doubles gradients."""

  def __init__(self, opt):
    super().__init__(False, 'Doubled')
    self._opt = opt

  def compute_gradients(self, *args, **kwargs):
    return self._opt.compute_gradients(*args, **kwargs)

  def apply_gradients(self, grads_and_vars, global_step=None, name=None):
    doubled = [(None if g is None else 2.0 * g, v) for g, v in grads_and_vars]
    return self._opt.apply_gradients(doubled, global_step, name)


class Conditional(facade.Optimizer):
  """A wrapper that does not call the constructor, as Tensor2Tensor has it."""

  def __init__(self, opt):
    self._opt = opt

  def compute_gradients(self, loss, var_list=None, **kwargs):
    return self._opt.compute_gradients(loss, var_list, **kwargs)

  def apply_gradients(self, grads_and_vars, global_step=None, name=None):
    return self._opt.apply_gradients(grads_and_vars, global_step, name)


class DoubledSgd(facade.GradientDescentOptimizer):

  def apply_gradients(self, grads_and_vars, global_step=None, name=None):
    doubled = [(2.0 * g, v) for g, v in grads_and_vars]
    return super().apply_gradients(doubled, global_step, name)


class DoubledLoss(facade.GradientDescentOptimizer):

  def compute_gradients(self, loss, *args, **kwargs):
    return super().compute_gradients(lambda: 2.0 * loss(), *args, **kwargs)


class DoubledEach(facade.GradientDescentOptimizer):

  def _apply_dense(self, grad, var):
    return super()._apply_dense(2.0 * grad, var)


class DoubledResource(facade.GradientDescentOptimizer):

  def _resource_apply_dense(self, grad, var):
    return super()._resource_apply_dense(2.0 * grad, var)


def drop_stale(opt):
  return facade.DropStaleGradientOptimizer(opt, 1)


def sync_replicas(opt):
  return facade.SyncReplicasOptimizer(opt, 1)


def in_shards(opt, loss, step, num_steps=1):
  """Trains on four shards, or one if the optimizer does not reduce."""
  num = 4 if isinstance(opt, facade.CrossShardOptimizer) else 1

  @facade.function
  def train(x):
    facade.shard(
        lambda x: opt.minimize(lambda: loss(x), step), [x], num_shards=num
    )

  for _ in range(num_steps):
    train(X)


def in_towers(devices, compiled):
  """Returns a function that trains in four towers."""

  def run(opt, loss, step, num_steps=1):
    def model_fn(features, mode):
      train_op = opt.minimize(lambda: loss(features), step)
      return facade.EstimatorSpec(mode, loss=0.0, train_op=train_op)

    towers = facade.replicate_model_fn(model_fn, devices=devices)

    def train(x):
      return towers(x, mode='train').loss

    train = facade.function(train) if compiled else train
    for _ in range(num_steps):
      train(X)

  return run


def in_one(opt, loss, step, num_steps=1):
  for _ in range(num_steps):
    opt.minimize(lambda: loss(X), step)


# A wrapper, and how to train with it.
WRAPPERS = {
    'bare': (lambda opt: opt, in_one),
    'bare_in_function': (lambda opt: opt, in_shards),
    'cross_shard': (facade.CrossShardOptimizer, in_shards),
    'tower_alone': (facade.TowerOptimizer, in_one),
    'towers_in_turn': (facade.TowerOptimizer, in_towers(IN_TURN, True)),
    'towers_at_once': (facade.TowerOptimizer, in_towers(AT_ONCE, True)),
    'towers_in_turn_eager': (facade.TowerOptimizer, in_towers(IN_TURN, False)),
    'drop_stale': (drop_stale, in_one),
    'drop_stale_in_function': (drop_stale, in_shards),
    'sync_replicas': (sync_replicas, in_one),
    'sync_replicas_in_towers': (
        lambda opt: facade.TowerOptimizer(sync_replicas(opt)),
        in_towers(IN_TURN, True),
    ),
}


class SubclassTest(facade_cases.GraphTest):

  def train(self, name, make, num_steps=1):
    """Returns the weights after steps on a linear loss of gradient 7.5."""
    wrap, run = WRAPPERS[name]
    with facade.Graph().as_default() as graph:
      w = facade.Variable(0.0, name='w')
      step = facade.get_or_create_global_step()
      run(wrap(make()), lambda x: jnp.mean(w * x), step, num_steps)
      self.assertEqual(int(step), num_steps)
      values = facade.get_values(
          graph.get_collection(facade.GraphKeys.GLOBAL_VARIABLES)
      )
    return {key: float(x) for key, x in values.items() if 'stale' not in key}

  @cases.product(
      name=tuple(WRAPPERS),
      kind=(
          DoubledSgd,
          cases.Repeated(DoubledLoss),
          DoubledEach,
          DoubledResource,
      ),
  )
  def test_overridden_methods_are_called(self, name, kind):
    # Without them, -7.5.
    self.assertEqual(self.train(name, lambda: kind(1.0))['w'], -15)

  @cases.product(name=tuple(WRAPPERS), kind=(Heavy, Resource, Public))
  def test_an_optimizer_of_a_program_trains(self, name, kind):
    values = self.train(name, lambda: kind(0.5), num_steps=2)

    # The balls are 7.5 and 11.25.
    self.assertEqual(values['w'], -0.5 * (7.5 + 11.25))
    ball = 'w/ball' if kind is Public else 'w/Heavy'
    self.assertEqual(values[ball], 11.25)
    self.assertEqual(values.get('updates', 2), 2)

  @cases.product(name=tuple(WRAPPERS), kind=(Heavy, Public))
  def test_a_wrapper_of_a_program_stands_inside(self, name, kind):
    values = self.train(name, lambda: Doubled(kind(0.5)))

    self.assertEqual(values['w'], -7.5)

  @cases.parameters(*WRAPPERS)
  def test_a_wrapper_need_not_call_the_constructor(self, name):
    values = self.train(
        name, lambda: Conditional(facade.GradientDescentOptimizer(1.0))
    )

    self.assertEqual(values['w'], -7.5)

  def test_slots_need_the_constructor(self):
    class Careless(Heavy):

      def __init__(self):
        self._name = 'careless'

    with self.assertRaisesRegex(AttributeError, r'must call `super\(\).__init'):
      Careless().get_slot_names()

  @cases.product(
      name=('towers_in_turn', 'towers_at_once', 'drop_stale', 'sync_replicas'),
      make=(Heavy, facade.GradientDescentOptimizer),
  )
  def test_a_wrapper_of_a_program_stands_outside(self, name, make):
    wrap, run = WRAPPERS[name]
    w = facade.Variable(0.0, name='w')
    step = facade.get_or_create_global_step()

    run(Doubled(wrap(make(0.5))), lambda x: jnp.mean(w * x), step)

    self.assertEqual([float(w), int(step)], [-7.5, 1])

  def test_a_wrapper_of_a_program_stands_outside_of_shards(self):
    w = facade.Variable(0.0)
    opt = Doubled(facade.CrossShardOptimizer(Heavy(0.5)))

    facade.shard(
        lambda x: opt.minimize(lambda: jnp.mean(w * x)), [X], num_shards=4
    )

    self.assertEqual(float(w), -7.5)

  def test_its_variables_may_differ_between_groups(self):
    w = facade.Variable(0.0, name='w')
    opt = facade.CrossShardOptimizer(
        Public(0.5), group_assignment=[[0, 1], [2, 3]]
    )

    @facade.function
    def train(x):
      facade.shard(
          lambda x: opt.minimize(lambda: jnp.mean(w * x)), [x], num_shards=4
      )

    train(X)
    train(X)

    balls = facade.get_variable('w/ball').shard_values()
    chex.assert_trees_all_close(balls, 1.5 * jnp.array([3.5, 3.5, 11.5, 11.5]))
    chex.assert_trees_all_close(
        w.shard_values(), -0.5 * 2.5 * jnp.array([3.5, 3.5, 11.5, 11.5])
    )

  def test_a_shard_of_several_under_vmap(self):
    w = facade.Variable(0.0)
    opt = facade.CrossShardOptimizer(Heavy(0.5))

    def gradient(x):
      with facade.shard_context(4, 'i'):
        [(grad, _)] = opt.compute_gradients(lambda: jnp.mean(w * x))
      return grad

    grads = jax.vmap(gradient, axis_name='i')(X.reshape(4, 4))

    chex.assert_trees_all_close(grads.sum(), jnp.float32(7.5))

  @cases.parameters(Heavy, Public)
  def test_a_dropped_gradient_changes_nothing_of_it(self, kind):
    w = facade.Variable(0.0, name='w')
    step = facade.get_or_create_global_step()
    opt = facade.DropStaleGradientOptimizer(kind(0.5), 0)

    @facade.function
    def train(age):
      pairs = opt.compute_gradients(lambda: 3.0 * w)
      step.assign_add(age)
      return opt.apply_gradients(pairs, step)

    counts = [int(train(0))]
    names = [v for v in facade.global_variables() if 'stale' not in v.name]
    before = facade.get_values(names)
    counts += [int(train(1)), int(train(0))]

    self.assertEqual(counts, [0, 1, 1])
    self.assert_equal(before['w'], jnp.float32(-1.5))
    self.assertEqual([float(w), int(step)], [-1.5 - 0.5 * 4.5, 3])

  def test_reads_a_function_at_each_update(self):
    w = facade.Variable(0.0)
    step = facade.get_or_create_global_step()
    opt = Heavy(lambda: 1.0 * step)
    train = facade.function(lambda: opt.minimize(lambda: 2.0 * w, step))

    train()
    self.assertEqual(float(w), 0)
    train()

    self.assertEqual(float(w), -3)

  def test_lists_its_slots_as_tensorflow(self):
    w = facade.Variable([1.0, 2.0], name='w')
    opt = Heavy(0.5)

    opt.minimize(lambda: jnp.sum(w**2))

    self.assertEqual(opt.get_slot_names(), ['ball'])
    self.assertEqual(
        [v.name for v in opt.variables()], ['updates:0', 'w/Heavy:0']
    )
    self.assertIsNone(opt.get_slot(w, 'updates'))
    self.assertIsNone(opt._get_non_slot_variable('ball'))
    self.assertEqual(opt.get_name(), 'Heavy')

  def test_slots_may_start_anywhere(self):
    class Slots(facade.Optimizer):

      def _create_slots(self, var_list):
        for v in var_list:
          self._get_or_make_slot(v, v * 2.0, 'twice', 'Twice')
          self._get_or_make_slot_with_initializer(
              v, jnp.ones, v.shape, v.dtype, 'ones', 'Ones'
          )

      def _apply_dense(self, grad, var):
        var.assign(grad)

    w = facade.Variable([1.0, 2.0], name='w')
    opt = Slots(False, 'slots')
    train = facade.function(lambda: opt.minimize(lambda: jnp.sum(w)))

    train()
    train()

    self.assert_equal(opt.get_slot(w, 'twice').value(), jnp.float32([2, 4]))
    self.assert_equal(opt.get_slot(w, 'ones').value(), jnp.ones(2))

  @cases.parameters(False, True)
  def test_slots_may_be_made_after_the_first_step(self, compiled):
    class Late(facade.Optimizer):
      is_late = False

      def _apply_dense(self, grad, var):
        if self.is_late:
          self._zeros_slot(var, 'late', self._name).assign_add(grad)
        var.assign_sub(grad)

    w = facade.Variable([1.0, 2.0], name='w')
    opt = Late(False, 'late')

    def step(x):
      opt.minimize(lambda: jnp.sum(w * x))

    step = facade.function(step) if compiled else step
    step(np.float32(1))
    opt.is_late = True

    step(np.ones(2, np.float32))  # Of another shape, hence traced again.
    step(np.ones(2, np.float32))

    self.assert_equal(opt.get_slot(w, 'late').value(), jnp.float32([2, 2]))
    self.assert_equal(w.value(), jnp.float32([-2, -1]))

  def test_a_slot_must_not_start_from_what_a_step_computes(self):
    class Traced(facade.Optimizer):

      def _apply_dense(self, grad, var):
        self._get_or_make_slot(var, grad, 'first', 'First')

    w = facade.Variable(1.0, name='w')
    opt = Traced(False, 'traced')

    with self.assertRaisesRegex(
        ValueError, "'w/First' must be known before anything is traced"
    ):
      facade.function(lambda: opt.minimize(lambda: w**2))()
    self.assertLen(facade.global_variables(), 1)

  def test_an_error_in_the_middle_leaves_nothing_half_applied(self):
    w = facade.Variable(1.0, name='w')
    other = facade.Variable(5.0, name='other')
    step = facade.get_or_create_global_step()

    class Fails(facade.Optimizer):
      """Assigns a variable that it was not given, then fails."""

      fails = True

      def _apply_dense(self, grad, var):
        var.assign_sub(grad)
        other.assign(grad)

      def _finish(self, update_ops, name_scope):
        if self.fails:
          raise KeyError

    class FailsItself(Fails):

      def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        global_step.assign_add(1)
        for grad, var in grads_and_vars:
          self._apply_dense(grad, var)
        raise KeyError

    for opt in Fails(False, 'fails'), FailsItself(False, 'fails'):
      with self.assertRaises(KeyError):
        opt.minimize(lambda: w**2, step, [w])
      self.assertEqual([float(w), float(other), int(step)], [1, 5, 0])
    opt = Fails(False, 'works')
    opt.fails = False
    opt.minimize(lambda: w**2, step, [w])
    self.assertEqual([float(w), float(other), int(step)], [-1, 2, 1])

  def test_what_would_differ_between_the_shards_is_refused(self):
    w = facade.Variable(1.0, name='w')
    seen = facade.Variable(0.0, trainable=False, name='seen')

    class Sees(facade.GradientDescentOptimizer):

      def apply_gradients(self, grads_and_vars, global_step=None, name=None):
        pairs = list(grads_and_vars)
        seen.assign(pairs[0][0])
        return super().apply_gradients(pairs, global_step, name)

    def train(opt):
      facade.shard(
          lambda x: opt.minimize(lambda: jnp.mean(w * x)), [X], num_shards=4
      )

    train(facade.CrossShardOptimizer(Sees(0.1)))
    self.assertEqual(float(seen), 7.5)

    with self.assertRaisesRegex(ValueError, "'seen:0' would differ"):
      train(Sees(0.1))
    self.assertEqual(float(seen), 7.5)

  def test_a_transformation_of_all_gradients_has_no_update_of_one(self):
    class Mine(facade.OptaxOptimizer):

      def _apply_dense(self, grad, var):
        return super()._apply_dense(grad, var)

    w = facade.Variable(1.0)

    with self.assertRaisesRegex(TypeError, 'Mine must not override `_apply_de'):
      Mine(optax.sgd(0.1)).minimize(lambda: w**2)
    self.assertEqual(float(w), 1)

  def test_an_update_of_one_needs_the_others(self):
    w = facade.Variable(1.0)

    with self.assertRaisesRegex(ValueError, 'must be called by `apply_grad'):
      facade.AdamOptimizer()._apply_dense(jnp.ones([]), w)

  def test_slots_of_the_base_class_must_be_made(self):
    class Forgets(facade.AdamOptimizer):

      def _create_slots(self, var_list):
        pass

    w = facade.Variable(1.0, name='w')

    with self.assertRaisesRegex(ValueError, 'w:0.*must be made first'):
      Forgets().minimize(lambda: w**2)
    self.assertEqual(float(w), 1)

  def test_an_optimizer_of_a_model_function_keeps_its_slots(self):
    w = facade.Variable(0.0, name='w')

    def model_fn(features, mode):
      opt = facade.TowerOptimizer(Heavy(0.5))
      opt.minimize(lambda: jnp.mean(w * features))
      return facade.EstimatorSpec(mode, loss=0.0)

    towers = facade.replicate_model_fn(model_fn, devices=IN_TURN)
    for _ in range(2):
      towers(X, mode='train')

    self.assertEqual(float(w), -0.5 * (7.5 + 11.25))

  def test_gradients_are_dense(self):
    w = facade.Variable(1.0, name='w')
    opt = Heavy(0.5)

    for method in opt._apply_sparse, opt._resource_apply_sparse:
      with self.assertRaisesRegex(NotImplementedError, 'w:0 must be dense'):
        method(None, w)

  def test_decay_may_come_before_or_after_the_update(self):
    class Before(facade.AdamOptimizer):

      def _apply_dense(self, grad, var):
        var.assign_sub(0.25 * var)
        return super()._apply_dense(grad, var)

    class After(facade.AdamOptimizer):

      def _apply_dense(self, grad, var):
        super()._apply_dense(grad, var)
        return var.assign_sub(0.25 * var)

    ends = []
    for kind in Before, After:
      w = facade.Variable(4.0)
      v = facade.Variable(8.0)
      kind(1.0, epsilon=0.0).apply_gradients([(2.0, w), (-2.0, v)])
      ends.append([float(w), float(v)])

    chex.assert_trees_all_close(ends, [[2, 7], [2.25, 6.75]], rtol=1e-5)

  @cases.parameters(facade.TowerOptimizer, sync_replicas)
  def test_what_gathers_is_not_hidden_inside_drop_stale(self, wrap):
    w = facade.Variable(0.0)
    step = facade.get_or_create_global_step()
    opt = drop_stale(Doubled(wrap(facade.GradientDescentOptimizer(1.0))))

    def model_fn(features, mode):
      opt.minimize(lambda: jnp.mean(w * features), step)
      return facade.EstimatorSpec(mode, loss=0.0)

    towers = facade.replicate_model_fn(model_fn, devices=IN_TURN)
    with self.assertRaisesRegex(ValueError, 'must not be inside an optimizer'):
      towers(X, mode='train')
    self.assertEqual([float(w), int(step)], [0, 0])

  def test_towers_are_gathered_once(self):
    w = facade.Variable(0.0)
    inner = facade.TowerOptimizer(facade.GradientDescentOptimizer(1.0))
    opt = facade.TowerOptimizer(Doubled(inner))

    with self.assertRaisesRegex(ValueError, 'towers are gathered once'):
      in_towers(IN_TURN, False)(opt, lambda x: jnp.mean(w * x), None)
    self.assertEqual(float(w), 0)

  def test_a_lock_must_not_be_hidden_inside_drop_stale(self):
    w = facade.Variable(0.0)
    step = facade.get_or_create_global_step()
    locked = facade.GradientDescentOptimizer(1.0, use_locking=True)

    with self.assertRaisesRegex(ValueError, 'Give that one `use_locking=True`'):
      drop_stale(Doubled(locked)).minimize(lambda: w * 1.0, step)
    opt = facade.DropStaleGradientOptimizer(Doubled(locked), 0, True)
    opt.minimize(lambda: w * 1.0, step)

    self.assertEqual([float(w), int(step)], [-2, 1])


class LossTest(parameterized.TestCase):
  """The loss, and what it returns besides, from the evaluation that counts."""

  def setUp(self):
    super().setUp()
    self.enterContext(facade.Graph().as_default())
    self.w = facade.Variable(1.0, name='w')
    self.mean = facade.Variable(0.0, trainable=False, name='mean')
    self.step = facade.get_or_create_global_step()

  def loss(self, x):
    h = x * self.w
    m = jnp.mean(h)
    self.mean.assign(0.9 * self.mean + 0.1 * m)
    return jnp.mean((h - m) ** 2)

  def test_its_assignments_count_once(self):
    opt = facade.GradientDescentOptimizer(0.1)
    step = facade.function(
        lambda: opt.minimize(lambda: self.loss(X), return_loss=True)
    )

    _, loss = step()

    # The second evaluation of a `before = loss()` gave 1.425.
    self.assertAlmostEqual(float(self.mean), 0.75, places=6)
    self.assertAlmostEqual(float(loss), np.var(X), places=4)

  @cases.product(
      wrap=(
          lambda opt: opt,
          cases.Repeated(Doubled),
          facade.CrossShardOptimizer,
          facade.TowerOptimizer,
          drop_stale,
          sync_replicas,
          lambda opt: facade.CrossShardOptimizer(Doubled(drop_stale(opt))),
      ),
      compiled=(False, True),
      computes=(False, True),
  )
  def test_every_optimizer_returns_it(self, wrap, compiled, computes):
    opt = wrap(facade.GradientDescentOptimizer(0.1))

    def loss():
      return self.w**2, {'twice': 2 * self.w}

    def step():
      with facade.shard_context(1):
        if not computes:
          return opt.minimize(loss, self.step, has_aux=True)[1]
        pairs, out = opt.compute_gradients(loss, has_aux=True)
        opt.apply_gradients(pairs, self.step)
        return out

    out = (facade.function(step) if compiled else step)()

    self.assertEqual(float(out[0]), 1)
    self.assertEqual(float(out[1]['twice']), 2)
    self.assertEqual(int(self.step), 1)

  def test_is_that_of_the_shard_unscaled(self):
    opt = facade.CrossShardOptimizer(facade.GradientDescentOptimizer(0.1))

    [losses] = facade.shard(
        lambda x: opt.minimize(lambda: jnp.mean(self.w * x), return_loss=True)[
            1
        ],
        [X],
        num_shards=4,
    )

    self.assertEqual(losses.tolist(), [1.5, 5.5, 9.5, 13.5])

  @cases.parameters((IN_TURN,), (AT_ONCE,))
  def test_is_that_of_the_towers(self, devices):
    def model_fn(features, mode):
      opt = facade.TowerOptimizer(facade.GradientDescentOptimizer(0.1))
      train_op, loss = opt.minimize(
          lambda: jnp.mean(self.w * features), self.step, return_loss=True
      )
      return facade.EstimatorSpec(mode, loss=loss, train_op=train_op)

    towers = facade.replicate_model_fn(model_fn, devices=devices)

    self.assertEqual(float(towers(X, mode='train').loss), 7.5)
    self.assertEqual(int(self.step), 1)

  def test_needs_a_pair_with_has_aux(self):
    opt = facade.GradientDescentOptimizer(0.1)

    with self.assertRaisesRegex(TypeError, 'must return a pair'):
      opt.minimize(lambda: self.w**2, has_aux=True)

  def test_needs_an_optimizer_that_evaluates_it(self):
    class Mine(facade.GradientDescentOptimizer):

      def compute_gradients(self, loss, *args, **kwargs):
        return [(jnp.ones([]), v) for v in facade.trainable_variables()]

    opt = Mine(0.1)

    def step():
      return opt.minimize(lambda: self.w**2, return_loss=True)

    for run in step, facade.function(step):
      with self.assertRaisesRegex(ValueError, 'must evaluate the loss'):
        run()
