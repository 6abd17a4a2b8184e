import threading
from unittest import mock

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

import cases
from shard_transforms import facade
from shard_transforms.facade import shards

X = np.float32([1, -2, 3])


class StepTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.enterContext(facade.Graph().as_default())
    self.w = facade.Variable(np.float32([4, 5, 6]), name='w')
    self.num_traces = 0

  def assert_equal(self, actual, expected):
    chex.assert_trees_all_equal(actual, expected, strict=True)

  def momentum_step(self):
    opt = facade.MomentumOptimizer(0.1, 0.9)

    @facade.function
    def step(x):
      self.num_traces += 1
      return opt.minimize(
          lambda: jnp.mean((self.w - x) ** 2),
          facade.get_or_create_global_step(),
          [self.w],
      )

    return step


class FunctionTest(StepTest):

  def test_reads_and_writes_variables(self):
    mean = facade.Variable(1.0, trainable=False)

    @facade.function
    def step(x, *, scale):
      mean.assign(jnp.mean(x))
      self.w.assign_add(scale * mean * x)
      return {'w': self.w, 'sum': jnp.sum(self.w), 'x': x}

    returned = step(X, scale=3.0)

    expected = np.float32([4, 5, 6]) + 3 * np.mean(X) * X
    chex.assert_trees_all_close(
        returned,
        {'w': expected, 'sum': expected.sum(), 'x': X},
        rtol=1e-6,
        strict=True,
    )
    self.assert_equal(self.w.value(), returned['w'])
    self.assert_equal(mean.value(), jnp.mean(X))

  def test_sees_what_was_assigned_between_calls(self):
    step = facade.function(lambda: 2 * self.w)
    step()

    self.w.assign(X)

    self.assert_equal(step(), jnp.asarray(2 * X))

  def test_is_the_same_as_without_it(self):
    step = self.momentum_step()
    for _ in range(3):
      step(X)
    compiled = facade.get_values(facade.global_variables())

    with facade.Graph().as_default():
      self.w = facade.Variable(np.float32([4, 5, 6]), name='w')
      step = self.momentum_step()
      for _ in range(3):
        step.__wrapped__(X)

      chex.assert_trees_all_close(
          compiled,
          facade.get_values(facade.global_variables()),
          rtol=1e-6,
          strict=True,
      )

  def test_traces_twice_at_the_first_call_and_never_again(self):
    step = self.momentum_step()

    counts = []
    for _ in range(4):
      step(X)
      counts.append(self.num_traces)

    self.assertEqual(counts, [2, 2, 2, 2])

  @cases.parameters('saved', 'saved as NumPy', 'assigned')
  def test_restored_values_compile_nothing(self, how):
    step = self.momentum_step()
    step(X)
    variables = facade.global_variables()
    saved = facade.get_values(variables)
    compiled = []

    def listen(event, duration, **kwargs):
      del duration, kwargs
      compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    self.addCleanup(jax.monitoring.unregister_event_duration_listener, listen)
    if how == 'assigned':
      self.w.assign(X)
    else:
      given = saved if how == 'saved' else jax.tree.map(np.asarray, saved)
      facade.set_values(variables, given)
    compiled.clear()
    step(X)

    self.assertEqual(self.num_traces, 2)
    self.assertEqual([e for e in compiled if 'compile' in e], [])

  def test_new_shapes_keep_the_slots(self):
    step = self.momentum_step()
    step(X)
    names = [v.name for v in facade.global_variables()]

    step(X[:1])

    self.assertEqual(self.num_traces, 3)
    self.assertEqual([v.name for v in facade.global_variables()], names)
    self.assertEqual(int(facade.get_global_step()), 2)

  def test_an_optimizer_made_inside_keeps_its_slots(self):
    @facade.function
    def step(x):
      for rate in 0.1, 0.2:
        opt = facade.MomentumOptimizer(rate, 0.9)
        opt.minimize(lambda: jnp.sum(self.w * x), var_list=[self.w])
      return opt.get_slot(self.w, 'momentum')

    steps = [step(X) for _ in range(3)]

    names = [v.name for v in facade.global_variables()]
    self.assertEqual(names, ['w:0', 'w/Momentum:0', 'w/Momentum_1:0'])
    for moment, factor in zip(steps, (1, 1.9, 2.71), strict=True):
      chex.assert_trees_all_close(moment, factor * X, rtol=1e-6, strict=True)

  def test_functions_do_not_share_what_they_make(self):
    def step():
      opt = facade.MomentumOptimizer(0.1, 0.9)
      opt.minimize(lambda: jnp.sum(self.w), var_list=[self.w])

    for _ in range(2):
      facade.function(step)()

    self.assertLen(facade.global_variables(), 3)

  def test_writes_inside_a_loss_are_kept(self):
    mean = facade.Variable(1.0, trainable=False, name='mean')
    opt = facade.GradientDescentOptimizer(0.5)

    @facade.function
    def step(x):
      def loss():
        mean.assign(0.5 * mean + 0.5 * jnp.mean(x))
        return jnp.sum((self.w - x) * mean)

      opt.minimize(loss)

    step(X + 2)
    step(X + 2)

    mean_of_x = np.mean(X + 2)
    first, second = 0.5 + 0.5 * mean_of_x, 0.25 + 0.75 * mean_of_x
    self.assertAlmostEqual(float(mean), second, places=5)
    chex.assert_trees_all_close(
        self.w.value(),
        np.float32([4, 5, 6]) - np.float32(0.5 * (first + second)),
        rtol=1e-6,
        strict=True,
    )

  def test_may_be_called_inside_another(self):
    inner = self.momentum_step()

    @facade.function
    def outer(x):
      for _ in range(2):
        step = inner(x)
      self.w.assign_add(x)
      return step

    steps = [outer(X) for _ in range(2)]
    nested = facade.get_values(facade.global_variables())

    self.assert_equal(steps, [jnp.int32(2), jnp.int32(4)])
    with facade.Graph().as_default():
      self.w = facade.Variable(np.float32([4, 5, 6]), name='w')
      alone = self.momentum_step()
      for _ in range(2):
        alone(X)
        alone(X)
        self.w.assign_add(X)
      chex.assert_trees_all_close(
          nested,
          facade.get_values(facade.global_variables()),
          rtol=1e-6,
          strict=True,
      )

  @cases.parameters(False, True)
  def test_may_be_a_loss(self, compiled):
    loss = facade.function(lambda: jnp.sum(self.w**2) / 2)
    opt = facade.GradientDescentOptimizer(0.5)

    def step():
      opt.minimize(loss)

    for _ in range(2):
      (facade.function(step) if compiled else step)()

    self.assert_equal(self.w.value(), jnp.float32([1, 1.25, 1.5]))
    self.assert_equal(loss(), jnp.float32((1 + 1.25**2 + 1.5**2) / 2))

  @cases.parameters(jax.jit, jax.grad)
  def test_refuses_to_leak_out_of_a_trace_around_it(self, transform):
    step = facade.function(lambda x: jnp.sum(self.w.assign_add(x)))

    with self.assertRaisesRegex(ValueError, "'w:0' must not be assigned"):
      transform(step)(X)

    self.assert_equal(self.w.value(), jnp.float32([4, 5, 6]))

  def test_an_exception_changes_nothing(self):
    fails = []

    @facade.function
    def step(x):
      self.w.assign_add(x)
      facade.get_or_create_global_step().assign_add(1)
      if fails:
        raise KeyError
      return self.w

    step(X)
    before = facade.get_values(facade.global_variables())
    fails.append(True)

    # Of another dtype, to be traced once more.
    with self.assertRaises(KeyError):
      step(X.astype(np.float16))

    self.assert_equal(facade.get_values(facade.global_variables()), before)
    fails.clear()
    self.assert_equal(step(X), before['w'] + X)

  def test_an_exception_in_the_first_call_changes_nothing(self):
    @facade.function
    def step():
      self.w.assign(X)
      raise KeyError

    with self.assertRaises(KeyError):
      step()

    self.assert_equal(self.w.value(), jnp.float32([4, 5, 6]))

  def test_takes_variables_and_trees_as_arguments(self):
    @facade.function
    def step(tree):
      return tree['w'] + tree['x']

    self.assert_equal(step({'w': self.w, 'x': X}), jnp.float32([4, 5, 6]) + X)

  def test_variables_that_only_some_shapes_need_may_come_later(self):
    @facade.function
    def step(x):
      if x.ndim:
        return facade.get_variable('vector', initializer=lambda: X).assign_add(
            x
        )
      return facade.get_variable('scalar', initializer=lambda: 1.0).assign_add(
          x
      )

    self.assert_equal(step(np.float32(2)), jnp.float32(3))
    self.assert_equal(step(X), jnp.asarray(2 * X))
    self.assert_equal(step(np.float32(2)), jnp.float32(5))

  def test_runs_in_the_graph_that_it_was_made_in(self):
    step = self.momentum_step()

    with facade.Graph().as_default():
      step(X)

      self.assertEqual(facade.global_variables(), [])
    self.assertEqual(int(facade.get_global_step()), 1)

  def test_a_call_that_sums_over_cpu_devices_waits_for_the_one_before(self):
    opt = facade.CrossShardOptimizer(facade.GradientDescentOptimizer(0.1))

    def computation(x):
      slow = jax.lax.fori_loop(0, 2_000_000, lambda i, y: y + i, x.sum())
      return opt.minimize(lambda: jnp.sum(self.w * jnp.cos(slow)))

    step = facade.function(
        lambda x: facade.shard(computation, [x], num_shards=2)
    )
    step(np.ones((2, 3), np.float32))
    first = self.w.value()

    step(np.ones((2, 3), np.float32))

    self.assertTrue(first.is_ready())

  def test_threads_may_call_it(self):
    opt = facade.GradientDescentOptimizer(0.5, use_locking=True)
    start = threading.Barrier(4)

    @facade.function
    def step(x):
      opt.minimize(
          lambda: jnp.sum(self.w * x),
          facade.get_or_create_global_step(),
          [self.w],
      )

    def work():
      start.wait()
      for _ in range(25):
        step(X)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()

    self.assertEqual(int(facade.get_global_step()), 100)
    self.assert_equal(self.w.value(), jnp.float32([4, 5, 6]) - 50 * X)

  @cases.parameters(3, 'step', None)
  def test_refuses_what_is_no_function(self, fn):
    with self.assertRaisesRegex(TypeError, '`fn` must be a function, got'):
      facade.function(fn)

  @mock.patch.object(shards, 'MAX_TRACES', 3)
  def test_refuses_to_make_new_variables_in_each_trace(self):
    @facade.function
    def step():
      self.num_traces += 1
      facade.get_variable(
          f'w{self.num_traces}', initializer=lambda: 1.0
      ).assign(2.0)

    with self.assertRaisesRegex(RuntimeError, 'step.*new variables'):
      step()


class MethodTest(StepTest):

  def test_a_method_is_compiled_for_each_object(self):
    traces = []

    class Trainer:

      def __init__(self, rate):
        self.w = facade.Variable(0.0)
        self.opt = facade.GradientDescentOptimizer(rate)

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


class GraphOfFunctionTest(StepTest):

  def test_runs_in_the_graph_that_it_was_made_in(self):
    with facade.Graph().as_default() as graph:
      step = facade.function(
          lambda: facade.get_variable('v', initializer=lambda: 1.0).assign_add(
              1.0
          )
      )

    results = [float(step()) for _ in range(2)]

    self.assertEqual(results, [2.0, 3.0])
    with graph.as_default():
      self.assertLen(facade.global_variables(), 1)


class BuildTest(StepTest):

  def test_makes_slots_and_changes_no_value(self):
    step = self.momentum_step()

    returned = step.build(jax.ShapeDtypeStruct([3], jnp.float32))

    self.assertIsNone(returned)
    self.assert_equal(
        facade.get_values(facade.global_variables()),
        {
            'w': jnp.float32([4, 5, 6]),
            'global_step': jnp.int32(0),
            'w/Momentum': jnp.zeros(3),
        },
    )

  def test_what_was_saved_goes_on_in_a_new_graph(self):
    step = self.momentum_step()
    for _ in range(2):
      step(X)
    saved = facade.get_values(facade.global_variables())
    step(X)
    straight = facade.get_values(facade.global_variables())

    with facade.Graph().as_default():
      self.w = facade.Variable(jnp.zeros(3), name='w')
      step = self.momentum_step()
      step.build(X)
      facade.set_values(facade.global_variables(), saved)
      step(X)

      self.assert_equal(facade.get_values(facade.global_variables()), straight)

  def test_is_no_different_for_optax(self):
    opt = facade.OptaxOptimizer(optax.adam(0.1))
    step = facade.function(lambda x: opt.minimize(lambda: jnp.sum(self.w * x)))

    step.build(X)

    self.assertEqual(
        [v.name for v in opt.variables()],
        ['count:0', 'w/Optax:0', 'w/Optax_1:0'],
    )
