"""`tf.train.Optimizer`: its methods, subclasses, wrappers and slots."""

import tempfile

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

import cases
import graphs
from shard_transforms import facade
from shard_transforms.facade import tf

W, X, IN_TURN = graphs.W, graphs.X, graphs.IN_TURN
GROUPS = [[0, 1], [2, 3]]
MADE, WRAPPERS = graphs.OPTIMIZERS, graphs.WRAPPERS
sgd, drop_stale = graphs.sgd, graphs.drop_stale


class Heavy(tf.train.Optimizer):
  """Momentum by the protocol; counts updates in a separate variable."""

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


class Public(tf.train.Optimizer):
  """Momentum as BERT's optimizer does it, in `apply_gradients`."""

  def __init__(self, learning_rate):
    super().__init__(False, 'Public')
    self._lr = learning_rate

  def apply_gradients(self, grads_and_vars, global_step=None, name=None):
    for grad, var in grads_and_vars:
      if grad is None:
        continue
      name = f'{var.op.name}/Heavy'
      ball = tf.get_variable(
          name, var.shape, jnp.float32, jnp.zeros, trainable=False
      )
      new = 0.5 * ball + grad
      var.assign(var - self._lr * new)
      ball.assign(new)
    if global_step is not None:
      global_step.assign_add(1)


class Doubled(tf.train.Optimizer):
  """A wrapper of a program, which doubles gradients.

  As Tensor2Tensor has it, it does not call the constructor.
  """

  def __init__(self, opt):
    self._opt = opt

  def compute_gradients(self, loss, var_list=None, **kwargs):
    return self._opt.compute_gradients(loss, var_list, **kwargs)

  def apply_gradients(self, grads_and_vars, global_step=None, name=None):
    doubled = [(None if g is None else 2.0 * g, v) for g, v in grads_and_vars]
    return self._opt.apply_gradients(doubled, global_step, name)


class DoubledSgd(tf.train.GradientDescentOptimizer):

  def apply_gradients(self, grads_and_vars, global_step=None, name=None):
    doubled = [(2.0 * g, v) for g, v in grads_and_vars]
    return super().apply_gradients(doubled, global_step, name)


class DoubledEach(tf.train.GradientDescentOptimizer):

  def _apply_dense(self, grad, var):
    return super()._apply_dense(2.0 * grad, var)


class DoubledResource(tf.train.GradientDescentOptimizer):

  def _resource_apply_dense(self, grad, var):
    return super()._resource_apply_dense(2.0 * grad, var)


class WrappersTest(graphs.GraphTest):

  @cases.parameters(*WRAPPERS, fast=['bare', 'drop_stale', 'towers'])
  def test_overridden_methods_are_used_by_wrappers(self, name):
    wrap, where = WRAPPERS[name]
    opts = [
        *(
            wrap(optimizer_class(1.0))
            for optimizer_class in (DoubledSgd, DoubledEach)
        ),
        wrap(DoubledResource(1.0)),
        *(
            wrap(Doubled(optimizer_class(0.25)))
            for optimizer_class in (Heavy, Resource, Public)
        ),
        wrap(tf.train.AdamOptimizer(0.1)),
    ]
    variables = [tf.Variable(0.0, name=f'w{i}') for i in range(len(opts))]
    step = tf.train.get_or_create_global_step()

    def train(x):  # The gradients are 7.5.
      for opt, w in zip(opts, variables, strict=True):
        train_op = opt.minimize(lambda w=w: jnp.mean(w * x), step, [w])
      return train_op

    run = graphs.mapped(train, where)
    run(X)
    run(X)

    values = self.values()
    # Without them, -7.5 in each step.
    self.assertEqual([values[f'w{i}'] for i in range(3)], [-30] * 3)
    # The balls are 15 and 22.5.
    for i in range(3, 6):
      self.assertEqual(values[f'w{i}'], -0.25 * (15 + 22.5))
      self.assertEqual(values[f'w{i}/Heavy'], 22.5)
    self.assertEqual([values['updates'], values['updates_1']], [2, 2])
    adam = {
        'beta1_power': 0.9**3,
        'beta2_power': 0.999**3,
        'w6/Adam': 7.5 * (1 - 0.9**2),
        'w6/Adam_1': 7.5**2 * (1 - 0.999**2),
    }
    for key, value in (adam | {'w6': -0.2}).items():
      np.testing.assert_allclose(values[key], value, rtol=1e-4, err_msg=key)
    self.assertEqual(values['global_step'], 2 * len(opts))
    actual = [v.op.name for v in opts[-1].variables()]
    counters = [n for n in actual if n.startswith('stale_counter')]
    self.assertLen(counters, 'drop_stale' in name)
    self.assertEqual(actual, sorted([*adam, *counters]))
    slot = opts[-1].get_slot(variables[-1], 'm')
    self.assertEqual(slot.name, 'w6/Adam:0')
    self.assertIsNone(opts[-1].get_slot(variables[-1], 'other'))

  @cases.parameters(
      (lambda opt: facade.TowerOptimizer(drop_stale(opt)), IN_TURN),
      (lambda opt: facade.CrossShardOptimizer(opt, group_assignment=GROUPS), 4),
      fast='4',
  )
  def test_resumes_bit_for_bit_through_orbax(self, wrap, where):
    def run(times, saved=None):
      with tf.Graph().as_default():
        w = tf.Variable(0.5, name='w')
        step = tf.train.get_or_create_global_step()
        opt = wrap(tf.train.AdamOptimizer(0.1))
        run = graphs.mapped(
            lambda x: opt.minimize(lambda: jnp.mean(jnp.sin(w * x)), step),
            where,
        )
        if saved is not None:
          run.build(X)
          facade.set_values(tf.global_variables(), saved)
        for _ in range(times):
          run(X)
        return self.values()

    folder = self.enterContext(tempfile.TemporaryDirectory())
    with ocp.StandardCheckpointer() as checkpointer:
      checkpointer.save(f'{folder}/step', run(2))
      checkpointer.wait_until_finished()
      restored = checkpointer.restore(f'{folder}/step')

    self.assert_equal(run(1, restored), run(3))

  @cases.parameters(*WRAPPERS)
  def test_gradients_of_another_dtype_raise(self, name):
    wrap, where = WRAPPERS[name]
    w, b = tf.Variable(0.0, name='w'), tf.Variable(0.0, name='b')
    step = tf.train.get_or_create_global_step()
    inner = tf.train.AdamOptimizer(0.1)
    opt = wrap(inner)

    def apply(x):
      opt.compute_gradients(lambda: w * b)
      pairs = [(jnp.mean(x), b), (jnp.int32(1), w)]
      return opt.apply_gradients(pairs, step)

    with self.assertRaisesRegex(TypeError, 'w:0 has the dtype int32'):
      graphs.mapped(apply, where, compiled=False)(X)
    self.assertEqual([float(w), float(b), int(step)], [0, 0, 0])
    self.assertEqual(inner.get_slot_names(), [])

  def test_variables_of_a_program_differ_between_groups(self):
    w = tf.Variable(0.0, name='w')
    opt = facade.CrossShardOptimizer(Public(0.5), group_assignment=GROUPS)

    graphs.train(opt, lambda x: jnp.mean(w * x), where=4, times=2)

    means = jnp.float32([3.5, 3.5, 11.5, 11.5])
    ball = tf.get_variable('w/Heavy')
    self.assert_equal(ball.shard_values(), 1.5 * means)
    self.assert_equal(w.shard_values(), -0.5 * 2.5 * means)

  @cases.parameters(
      (lambda: facade.CrossShardOptimizer(drop_stale(sgd())), 4, 2),
      (lambda: drop_stale(facade.CrossShardOptimizer(sgd())), 4, 2),
      (lambda: facade.TowerOptimizer(drop_stale(sgd())), IN_TURN, 2),
      (lambda: drop_stale(Heavy(1.0)), None, 1 + 1.5),
      (lambda: drop_stale(Public(1.0)), None, 1 + 1.5),
      fast=['4_2_0', 'None_2_5_1'],
  )
  def test_a_dropped_gradient_changes_nothing(self, make, where, factor):
    w, age = tf.Variable(0.0), tf.Variable(0, trainable=False)
    step, opt = tf.train.get_or_create_global_step(), make()

    def train(x):
      pairs = opt.compute_gradients(lambda: jnp.mean(w * x))
      step.assign_add(age)
      return opt.apply_gradients(pairs, step)

    run, counts = graphs.mapped(train, where), []
    for value in (0, 1, 0):
      age.assign(value)
      counts.append(np.ravel(run(X))[0])

    self.assertEqual(counts, [0, 1, 1])
    self.assertEqual([float(w), int(step)], [-7.5 * factor, 3])

  def test_locking_inside_drop_stale_without_locking_raises(self):
    w = tf.Variable(0.0)
    step = tf.train.get_or_create_global_step()
    locked = Doubled(sgd(use_locking=True))

    with self.assertRaisesRegex(ValueError, 'Pass `use_locking=True` there'):
      drop_stale(locked).minimize(lambda: w * 1.0, step)
    opt = drop_stale(locked, use_locking=True)
    opt.minimize(lambda: w * 1.0, step)

    self.assertEqual([float(w), int(step)], [-2, 1])


class OptimizerTest(graphs.OptimizerTest):

  def test_wrappers_forward_all_arguments(self):
    returned = sgd().minimize(
        lambda w: w**2,
        global_step=self.step,
        var_list=[self.w],
        gate_gradients=tf.train.Optimizer.GATE_GRAPH,
        aggregation_method=tf.AggregationMethod.ADD_N,
        colocate_gradients_with_ops=True,
        name='train',
        grad_loss=np.float32([0.5, 0.25]),
    )

    self.assert_equal(returned, jnp.int32(1))
    self.assert_holds(self.w, jnp.float32([0, 1]))
    self.assertIsNone(sgd().minimize(lambda: self.b**2))

  @cases.parameters(*MADE)
  def test_variables_and_slots_without_a_gradient_do_not_change(self, name):
    opt = MADE[name]()
    opt.apply_gradients([(None, self.w), (1.0, self.b)])
    unchanged = [
        self.b,
        *(opt.get_slot(self.b, n) for n in opt.get_slot_names()),
    ]
    before = facade.get_values(unchanged)
    slots = [opt.get_slot(self.w, n) for n in opt.get_slot_names()]

    opt.apply_gradients([(None, self.b), (W, self.w)])

    self.assertEqual(slots, [None] * len(slots))
    self.assert_equal(facade.get_values(unchanged), before)
    self.assertFalse(np.array_equal(self.w, W))

  def test_all_variables_share_the_powers_of_adam(self):
    opt = MADE['adam']()

    opt.apply_gradients([(W, self.w)])
    opt.apply_gradients([(1.0, self.b)])

    powers = {v.op.name: v.value() for v in opt.variables() if not v.shape}
    self.assert_equal(powers['beta1_power'], jnp.float32(0.9) ** 3)
    # Each of two optimizers has separate powers.
    other = MADE['adam']()
    other.apply_gradients([(1.0, self.b)])
    names = [x.get_slot(self.b, 'm').name for x in (opt, other)]
    self.assertEqual(names, ['b/Adam:0', 'b/Adam_2:0'])
    self.assertEmpty(set(opt.variables()) & set(other.variables()))

  def test_lists_slots_like_tensorflow(self):
    opt = Heavy(lambda: 1.0 * self.step)

    opt.minimize(lambda: jnp.sum(self.w), self.step)
    self.assert_holds(self.w, W)
    opt.minimize(lambda: jnp.sum(self.w), self.step)

    # The rate is read at each update.
    self.assert_holds(self.w, W - 1.5)
    self.assertEqual(opt.get_slot_names(), ['ball'])
    names = [v.name for v in opt.variables()]
    self.assertEqual(names, ['updates:0', 'w/Heavy:0'])
    self.assertIsNone(opt.get_slot(self.w, 'updates'))
    self.assertIsNone(opt._get_non_slot_variable('ball'))
    self.assertEqual(opt.get_name(), 'Heavy')

  def test_slots_are_created_in_the_graph_of_the_variables(self):
    with tf.Graph().as_default():
      MADE['adam']().apply_gradients([(W, self.w), (1.0, self.b)])
      self.assertEqual(tf.global_variables(), [])

    # Two powers, and two slots of each.
    self.assertLen(tf.global_variables(), 3 + 2 + 4)
    self.assertEqual(tf.trainable_variables(), [self.w, self.b])

  @cases.parameters(False, True)
  def test_slots_have_initializers_and_are_created_late(self, compiled):
    class Slots(tf.train.Optimizer):
      is_late = False

      def _create_slots(self, var_list):
        for v in var_list:
          self._get_or_make_slot(v, v * 2.0, 'twice', 'Twice')
          self._get_or_make_slot_with_initializer(
              v, jnp.ones, v.shape, v.dtype, 'ones', 'Ones'
          )

      def _apply_dense(self, grad, var):
        if self.is_late:
          self._zeros_slot(var, 'late', self._name).assign_add(grad)
        var.assign_sub(grad)

    opt = Slots(False, 'slots')
    run = graphs.mapped(
        lambda x: opt.minimize(lambda: jnp.sum(self.w * x)), None, compiled
    )
    run(np.float32(1))
    opt.is_late = True
    for _ in range(2):
      run(np.ones(2, np.float32))  # Of another shape, hence traced again.

    self.assert_holds(opt.get_slot(self.w, 'twice'), 2 * W)
    self.assert_holds(opt.get_slot(self.w, 'ones'), jnp.ones(2))
    self.assert_holds(opt.get_slot(self.w, 'late'), jnp.float32([2, 2]))
    self.assert_holds(self.w, W - 3)

  def test_an_error_during_an_update_changes_nothing(self):
    class Fails(tf.train.Optimizer):
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

    other = tf.Variable(5.0, name='other')
    for opt in Fails(False, 'fails'), FailsItself(False, 'fails'):
      with self.assertRaises(KeyError):
        opt.minimize(lambda: self.b**2, self.step, [self.b])
      values = [float(self.b), float(other), int(self.step)]
      self.assertEqual(values, [3, 5, 0])
    opt = Fails(False, 'works')
    opt.fails = False
    opt.minimize(lambda: self.b**2, self.step, [self.b])
    self.assertEqual([float(self.b), float(other)], [-3, 6])
