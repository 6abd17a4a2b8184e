"""`function`, `tf.cond`, and the order of lines in a step."""

import jax
import jax.numpy as jnp
import numpy as np

import cases
import graphs
from shard_transforms import facade
from shard_transforms.facade import tf

X = np.float32([1, -2, 3])
W = np.float32([4, 5, 6])


class StepTest(graphs.GraphTest):

  def setUp(self):
    super().setUp()
    self.w = tf.Variable(W, name='w')
    self.num_traces = 0

  def momentum_step(self):
    opt = tf.train.MomentumOptimizer(0.1, 0.9)

    @facade.function
    def step(x):
      self.num_traces += 1
      return opt.minimize(
          lambda: jnp.mean((self.w - x) ** 2),
          tf.train.get_or_create_global_step(),
          [self.w],
      )

    return step


class FunctionTest(StepTest):

  def test_reads_and_writes_variables(self):
    mean = tf.Variable(1.0, trainable=False)

    @facade.function
    def step(x, *, scale):
      with tf.control_dependencies([mean.assign(jnp.mean(x['x']))]):
        self.w.assign_add(scale * mean * x['x'])
      return {'w': self.w, 'sum': jnp.sum(x['v'])}

    for start in W, 2 * W:
      self.w.assign(start)
      returned = step({'x': X, 'v': self.w}, scale=3.0)
      expected = start + 3 * np.mean(X) * X
      self.assert_close(returned, {'w': expected, 'sum': start.sum()})
      self.assert_equal(self.w.value(), returned['w'])
      self.assert_holds(mean, jnp.mean(X))

  def test_compiled_eager_and_nested_steps_are_equal(self):
    actual = []
    for mode in 'plain', 'compiled', 'nested':
      with tf.Graph().as_default():
        self.w = tf.Variable(W, name='w')
        inner = self.momentum_step()

        def step(x, inner=inner, mode=mode):
          for _ in range(2):
            count = (inner.__wrapped__ if mode == 'plain' else inner)(x)
          self.w.assign_add(x)
          return count

        step = facade.function(step) if mode == 'nested' else step
        counts = [int(step(X)) for _ in range(2)]
        actual.append(self.values())
      self.assertEqual(counts, [2, 4])

    for values in actual[1:]:
      self.assert_close(values, actual[0])

  def test_traces_twice_at_the_first_call_and_once_for_new_shapes(self):
    step = self.momentum_step()
    counts = []

    for x in X, X, X[:1], X:
      step(x)
      counts.append(self.num_traces)

    self.assertEqual(counts, [2, 2, 3, 3])
    self.assertEqual([*self.values()], ['global_step', 'w', 'w/Momentum'])
    self.assertEqual(int(tf.train.get_global_step()), 4)

  @cases.parameters(False, True)
  def test_restored_values_do_not_recompile(self, assigned):
    step = self.momentum_step()
    step(X)
    variables = tf.global_variables()
    saved = facade.get_values(variables)
    compiled = graphs.compilations(self)
    if assigned:
      self.w.assign(X)
    else:
      facade.set_values(variables, jax.tree.map(np.asarray, saved))
    compiled.clear()
    step(X)

    self.assertEqual(self.num_traces, 2)
    self.assertEqual(compiled, [])

  def test_optimizers_created_inside_keep_their_slots(self):
    def step(x):
      for rate in 0.1, 0.2:
        opt = tf.train.MomentumOptimizer(rate, 0.9)
        with tf.control_dependencies([None]):  # One after the other.
          opt.minimize(lambda: jnp.sum(self.w * x), var_list=[self.w])
      return opt.get_slot(self.w, 'momentum')

    inner = facade.function(step)

    @facade.function
    def compiled(x):  # Each counts its own optimizers.
      tf.train.AdagradOptimizer(0.0).minimize(lambda: self.w, var_list=[self.w])
      return inner(x)

    moments = [compiled(X) for _ in range(3)]
    names = [*self.values()]
    facade.function(step)(X)

    self.assertEqual(names, ['w', 'w/Adagrad', 'w/Momentum', 'w/Momentum_1'])
    for moment, factor in zip(moments, (1, 1.9, 2.71), strict=True):
      self.assert_close(moment, factor * X)
    # Functions do not share what they make.
    self.assertLen(tf.global_variables(), 6)

  @cases.parameters(False, True)
  def test_may_be_a_loss(self, compiled):
    loss = facade.function(lambda: jnp.sum(self.w**2) / 2)
    opt = tf.train.GradientDescentOptimizer(0.5)

    for _ in range(2):
      graphs.mapped(lambda: opt.minimize(loss), None, compiled)()

    self.assert_holds(self.w, jnp.float32([1, 1.25, 1.5]))
    self.assert_equal(loss(), jnp.float32((1 + 1.25**2 + 1.5**2) / 2))

  @cases.parameters(False, True)
  def test_an_exception_changes_nothing(self, is_first):
    fails = []

    @facade.function
    def step(x):
      self.w.assign_add(x)
      tf.train.get_or_create_global_step().assign_add(1)
      if fails:
        raise KeyError
      return self.w

    if not is_first:
      step(X)
    before = self.w.value()
    fails.append(True)
    # Of another dtype, to be traced once more.
    with self.assertRaises(KeyError):
      step(X.astype(np.float16))

    self.assert_equal(self.w.value(), before)
    self.assertEqual(int(tf.train.get_global_step()), not is_first)
    fails.clear()
    self.assert_equal(step(X), before + X)

  def test_other_shapes_may_create_more_variables(self):
    @facade.function
    def step(x):
      name = 'vector' if x.ndim else 'scalar'
      v = tf.get_variable(name, x.shape, initializer=jnp.ones)
      return v.assign_add(x)

    self.assert_equal(step(np.float32(2)), jnp.float32(3))
    self.assert_equal(step(X), jnp.asarray(1 + X))
    self.assert_equal(step(np.float32(2)), jnp.float32(5))

  def test_a_reduction_over_cpu_devices_waits_for_the_previous_call(self):
    opt = facade.CrossShardOptimizer(tf.train.GradientDescentOptimizer(0.1))

    def computation(x):
      slow = jax.lax.fori_loop(0, 2_000_000, lambda i, y: y + i, x.sum())
      return opt.minimize(lambda: jnp.sum(self.w * jnp.cos(slow)))

    step = graphs.mapped(computation, 2)
    step(np.ones((2, 3), np.float32))
    first = self.w.value()

    step(np.ones((2, 3), np.float32))

    self.assertTrue(first.is_ready())

  def test_new_variables_in_each_trace_raise(self):
    @facade.function
    def step():
      self.num_traces += 1
      name = f'w{self.num_traces}'
      tf.get_variable(name, initializer=lambda: 1.0).assign(2.0)

    with self.assertRaisesRegex(RuntimeError, 'step.*new variables'):
      step()

  def test_a_method_is_compiled_for_each_object(self):
    traces = []

    class Trainer:

      def __init__(self, rate):
        self.w = tf.Variable(0.0)
        self.opt = tf.train.GradientDescentOptimizer(rate)

      @facade.function
      def step(self, x):
        traces.append(1)
        self.opt.minimize(lambda: self.w * x, var_list=[self.w])

    trainers = [Trainer(0.5), Trainer(0.25)]
    for _ in range(3):
      for trainer in trainers:
        trainer.step(2.0)

    self.assertEqual([float(t.w) for t in trainers], [-3.0, -1.5])
    self.assertLen(traces, 4)
    self.assertIsInstance(Trainer.step, type(trainers[0].step))


class BuildTest(StepTest):

  def test_slots_of_equal_shapes_do_not_recompile(self):
    self.momentum_step().build(X)
    compiled = graphs.compilations(self)

    self.momentum_step().build(X)

    # It is traced, and nothing more.
    self.assertNotIn('backend_compile', ' '.join(compiled))
    self.assertEqual([*self.values()][-1], 'w/Momentum_1')

  def test_build_creates_slots_without_changing_values(self):
    step = self.momentum_step()

    returned = step.build(jax.ShapeDtypeStruct([3], jnp.float32))

    self.assertIsNone(returned)
    slot = np.zeros(3, np.float32)
    expected = {'w': W, 'global_step': np.int32(0), 'w/Momentum': slot}
    self.assert_equal(self.values(), expected)


class ControlFlowTest(graphs.OptimizerTest):

  def test_group_and_dependencies_run_in_order(self):
    seen = []

    @facade.function
    def train():
      with tf.control_dependencies([self.b.assign(2.0), None]):
        return tf.group(
            graphs.sgd(0.5).minimize(lambda: self.b * 1.0),
            self.step.assign_add(1),
            tf.no_op(),
            name='train',
        )

    self.assertIsNone(train())
    self.assert_holds(self.b, 1.5)
    self.assertEqual(int(self.step), 1)
    with tf.control_dependencies([lambda: seen.append(1)]):
      seen.append(2)
    with tf.control_dependencies(None):
      tf.group(lambda: seen.append(3), None, lambda: seen.append(4))
    self.assertEqual(seen, [1, 2, 3, 4])

  @cases.product(pred=(True, False), compiled=(True, False))
  def test_cond_assigns_like_the_selected_branch(self, pred, compiled):
    opt = tf.train.MomentumOptimizer(1.0, 0.9)

    def apply():
      step = opt.apply_gradients([(2.0, self.b)], self.step)
      with tf.control_dependencies([step]):
        return {'b': self.b.value()}

    def keep():
      self.w.assign_add(jnp.ones(2))
      return {'b': 7.0}

    step = graphs.mapped(
        lambda x: tf.cond(x, apply, keep, name='choice'), None, compiled
    )
    step(jnp.asarray(False))
    actual = step(jnp.asarray(pred))

    b = 1.0 if pred else 3.0
    self.assertEqual(float(actual['b']), b if pred else 7)
    self.assert_holds(self.b, b)
    self.assert_holds(self.w, jnp.float32([2, 3] if pred else [3, 4]))
    self.assertEqual(int(self.step), pred)
    if pred or compiled:
      self.assert_holds(opt.get_slot(self.b, 'momentum'), 2.0 * pred)

  def test_gradients_flow_through_both_branches(self):
    branches = (lambda: self.b**2, lambda: self.b * 5)
    step = facade.function(
        lambda x: graphs.sgd().minimize(lambda: tf.cond(x, *branches))
    )

    for pred, expected in (True, -3.0), (False, -8.0):
      step(pred)
      self.assert_holds(self.b, expected)


class FrameTest(graphs.OptimizerTest):
  """Other threads do not see the writes of an unfinished step."""

  def test_other_threads_and_graphs_do_not_see_it(self):
    seen = []

    @facade.function
    def step():
      assigned = self.b.assign(5.0)
      graphs.run_threads(lambda: seen.append(float(self.b)))
      return assigned

    self.assertEqual(float(step()), 5)
    self.assertEqual(set(seen), {3.0})
