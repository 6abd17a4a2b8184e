"""Mistakes that would train wrongly in silence are refused."""

import threading

from absl.testing import parameterized
import chex
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import cases
from shard_transforms import facade


def run_threads(*functions):
  errors = []

  def run(function):
    try:
      function()
    except Exception as error:
      errors.append(error)

  threads = [threading.Thread(target=run, args=[f]) for f in functions]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(timeout=120)
  return errors


class CachedByJaxTest(parameterized.TestCase):
  """JAX caches traces, but the variables that a function reads change."""

  def setUp(self):
    super().setUp()
    self.enterContext(facade.Graph().as_default())
    self.w = facade.Variable(1.0, name='w')

  def bodies(self):
    """Returns functions of a number, made once, that multiply by `w`."""

    def times(x):
      return self.w * x

    def body(c, _):
      return (c * self.w, None)

    return {
        'scan': lambda x: lax.scan(body, x, None, 1)[0],
        'cond': lambda x: lax.cond(x > 0, times, times, x),
        'checkpoint': jax.checkpoint(times),
        'jit': jax.jit(times),
        'map': lambda x: lax.map(times, jnp.stack([x]))[0],
    }

  @cases.parameters('scan', 'cond', 'checkpoint', 'jit', 'map')
  def test_sees_new_values_in_later_calls(self, name):
    net = self.bodies()[name]
    step = facade.function(net)

    for value in (1.0, 10.0):
      self.w.assign(value)
      self.assertEqual(float(step(2.0)), 2 * value)

  @cases.parameters('scan', 'cond', 'checkpoint', 'jit', 'map')
  def test_sees_what_was_assigned_in_the_same_call(self, name):
    net = self.bodies()[name]

    @facade.function
    def step(x):
      before = net(x)
      self.w.assign(10.0)
      return before, net(x)

    before, after = step(2.0)
    self.assertEqual([float(before), float(after)], [2, 20])

  @cases.parameters('scan', 'cond', 'checkpoint', 'jit', 'map')
  def test_trains_what_was_computed_before(self, name):
    net = self.bodies()[name]
    opt = facade.GradientDescentOptimizer(0.1)

    @facade.function
    def step(x):
      before = net(x)
      for _ in range(2):
        opt.minimize(lambda: net(x))
      return before

    step(2.0)
    step(2.0)

    self.assertAlmostEqual(float(self.w), 1 - 4 * 0.1 * 2, places=6)

  @cases.parameters('scan', 'cond', 'checkpoint', 'jit', 'map')
  def test_functions_share_what_they_call(self, name):
    net = self.bodies()[name]
    opt = facade.GradientDescentOptimizer(0.1)
    predict = facade.function(net)
    train = facade.function(lambda x: opt.minimize(lambda: net(x)))

    outputs = []
    for _ in range(2):
      outputs.append(float(predict(1.0)))
      train(1.0)

    chex.assert_trees_all_close(outputs, [1.0, 0.9], rtol=1e-6)

  def test_a_variable_of_another_graph(self):
    with facade.Graph().as_default():
      v = facade.Variable(1.0)

    def body(c, x):
      return (c + v * x, None)

    step = facade.function(lambda xs: lax.scan(body, 0.0, xs)[0])

    for value in (1.0, 10.0):
      v.assign(value)
      self.assertEqual(float(step(jnp.ones(3))), 3 * value)

  def test_a_variable_that_is_made_inside(self):
    block = jax.checkpoint(
        lambda x: facade.get_variable('v', [], initializer=jnp.ones) * x
    )
    opt = facade.GradientDescentOptimizer(0.1)
    step = facade.function(lambda x: opt.minimize(lambda: block(x)))

    step(2.0)
    step(2.0)

    v = facade.get_variable('v')
    self.assertAlmostEqual(float(v), 1 - 2 * 0.2, places=6)

  @cases.parameters('scan', 'cond', 'checkpoint', 'jit', 'map')
  def test_is_refused_without_a_function(self, name):
    net = self.bodies()[name]

    with self.assertRaisesRegex(ValueError, r'must not be read.*facade\.funct'):
      net(jnp.float32(2))

  @cases.parameters(
      lambda w: lax.cond(True, lambda: w.assign(5.0), lambda: w.value()),
      lambda w: lax.scan(lambda c, _: (c, w.assign(c)), 1.0, None, 3),
      lambda w: jax.vmap(w.assign)(jnp.ones(3)),
      lambda w: jax.jit(w.assign)(2.0),
  )
  def test_an_assignment_that_jax_would_do_once(self, assign):
    for run in (assign, facade.function(lambda: assign(self.w))):
      with self.assertRaisesRegex(ValueError, 'must not be (assigned|read)'):
        run(self.w) if run is assign else run()
    self.assertEqual(float(self.w), 1.0)

  def test_an_update_in_a_loop_of_jax(self):
    opt = facade.GradientDescentOptimizer(0.1)

    @facade.function
    def step():
      return lax.fori_loop(
          0, 3, lambda _, x: x + (opt.minimize(lambda: self.w * x) or 0), 1.0
      )

    with self.assertRaisesRegex(ValueError, 'Variables must not be assigned'):
      step()
    self.assertEqual(float(self.w), 1.0)


class ContextTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.enterContext(facade.Graph().as_default())
    self.w = facade.Variable(0.0, name='w')

  def test_a_function_knows_the_number_of_shards(self):
    opt = facade.CrossShardOptimizer(facade.GradientDescentOptimizer(1.0))
    compute = facade.function(
        lambda: [g for g, _ in opt.compute_gradients(lambda: self.w * 8.0)]
    )

    grads = []
    for num_shards in (2, 4):
      with facade.shard_context(num_shards):
        grads += map(float, compute())

    self.assertEqual(grads, [4.0, 2.0])
    with self.assertRaisesRegex(ValueError, 'inside a shard context'):
      compute()

  def test_a_function_in_towers_is_part_of_each(self):
    opt = facade.TowerOptimizer(facade.GradientDescentOptimizer(1.0))
    update = facade.function(lambda x: opt.minimize(lambda: self.w * x))
    update(1.0)

    def model_fn(features):
      update(features[0])
      return facade.EstimatorSpec('train')

    step = facade.replicate_model_fn(model_fn, devices=['/cpu:0'] * 2)
    step(jnp.array([1.0, 3.0]))

    self.assertEqual(float(self.w), -1 - 2.0)

  @cases.parameters(1, 2)
  def test_variables_that_each_call_would_make_anew(self, num_towers):
    def model_fn(features):
      facade.Variable(1.0)
      return facade.EstimatorSpec(None)

    step = facade.replicate_model_fn(model_fn, devices=['/cpu:0'] * num_towers)
    with self.assertRaisesRegex(ValueError, r'facade\.get_variable'):
      step(jnp.zeros(2))
    with self.assertRaisesRegex(ValueError, r'facade\.get_variable'):
      facade.shard(lambda: facade.Variable(1.0), num_shards=num_towers)
    self.assertLen(facade.global_variables(), 1)

  def test_one_optimizer_in_two_graphs(self):
    opt = facade.AdamOptimizer(0.1)
    opt.apply_gradients([(1.0, self.w)])
    with facade.Graph().as_default():
      v = facade.Variable(0.0, name='v')

    with self.assertRaisesRegex(ValueError, 'an optimizer for each graph'):
      opt.apply_gradients([(1.0, v)])
    self.assertEqual(float(v), 0.0)


class GradientsOfAnotherKindTest(parameterized.TestCase):
  """Integers, truth values and complex numbers are no gradients of floats."""

  def setUp(self):
    super().setUp()
    self.enterContext(facade.Graph().as_default())
    self.w = facade.Variable(1.0, name='w')
    self.v = facade.Variable(2.0, name='v')
    self.step = facade.get_or_create_global_step()

  def optimizers(self, name):
    """Returns an inner optimizer, and what goes around it."""
    inner = {
        'adagrad': lambda: facade.AdagradOptimizer(0.1),
        'ftrl': lambda: facade.FtrlOptimizer(0.1),
        'gradient_descent': lambda: facade.GradientDescentOptimizer(0.1),
        'momentum': lambda: facade.MomentumOptimizer(0.1, 0.9),
        'optax': lambda: facade.OptaxOptimizer(optax.sgd(0.1, momentum=0.9)),
        'rms_prop': lambda: facade.RMSPropOptimizer(0.1),
    }.get(name, lambda: facade.AdamOptimizer(0.1))()
    wrap = {
        'cross_shard': facade.CrossShardOptimizer,
        'drop_stale': lambda opt: facade.DropStaleGradientOptimizer(opt, 0),
        'sync_replicas': lambda opt: facade.SyncReplicasOptimizer(opt, 1),
        'tower': facade.TowerOptimizer,
    }.get(name, lambda opt: opt)
    return inner, wrap(inner)

  @cases.product(
      name=(
          *('adagrad', 'adam', 'ftrl', 'gradient_descent', 'momentum'),
          *('optax', 'rms_prop'),
          *('cross_shard', 'drop_stale', 'sync_replicas', 'tower'),
      ),
      compiled=(False, True),
  )
  @pytest.mark.slow_after(3)
  def test_change_nothing(self, name, compiled):
    inner, opt = self.optimizers(name)

    def step(grad):
      with facade.shard_context(1):
        opt.compute_gradients(lambda: self.w * self.v)
        opt.apply_gradients([(1.0, self.v), (grad, self.w)], self.step)

    def values():
      return facade.get_values([self.w, self.v, self.step, *inner.variables()])

    before = values()
    for grad in (jnp.int32(1), jnp.bool_(1), jnp.complex64(1)):
      with self.assertRaisesRegex(TypeError, f'got {grad.dtype} for w:0'):
        (facade.function(step) if compiled else step)(grad)
      chex.assert_trees_all_equal(values(), before, strict=True)
    self.assertEqual(inner.get_slot_names(), [])

    (facade.function(step) if compiled else step)(jnp.float32(1))
    self.assertEqual(int(self.step), 1)
    self.assertLess(float(self.w), 1)

  def test_change_nothing_among_shards(self):
    inner, opt = self.optimizers('cross_shard')

    with self.assertRaisesRegex(TypeError, 'got int32 for w:0'):
      facade.shard(
          lambda x: opt.apply_gradients([(x[0], self.w)], self.step),
          [jnp.arange(8)],
          num_shards=8,
      )

    self.assertEqual([float(self.w), int(self.step)], [1, 0])
    self.assertEqual(inner.get_slot_names(), [])

  @cases.parameters(
      (['/cpu:0', '/cpu:0'],), (['/device:CPU:0', '/device:CPU:1'],)
  )
  def test_change_nothing_among_towers(self, devices):
    inner, opt = self.optimizers('tower')

    def model_fn(features, labels, mode):
      opt.apply_gradients([(features[0], self.v)])
      opt.apply_gradients([(labels[0], self.w)], self.step)
      return facade.EstimatorSpec(mode, loss=0.0)

    towers = facade.replicate_model_fn(model_fn, devices=devices)
    with self.assertRaisesRegex(TypeError, 'got int32 for w:0'):
      towers(jnp.ones(2), jnp.arange(2), facade.ModeKeys.TRAIN)

    self.assertEqual([float(self.w), float(self.v), int(self.step)], [1, 2, 0])
    self.assertIsNone(inner.get_slot(self.w, 'm'))

  def test_are_not_handed_in_for_others(self):
    inner = facade.GradientDescentOptimizer(1.0)
    opt = facade.SyncReplicasOptimizer(inner, 2, total_num_replicas=1)

    with self.assertRaisesRegex(TypeError, 'got int32 for w:0'):
      opt.apply_gradients([(jnp.int32(5), self.w)], self.step)
    for _ in range(2):
      opt.apply_gradients([(0.5, self.w)], self.step)

    self.assertEqual([float(self.w), int(self.step)], [0.5, 1])


class ValuesTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.enterContext(facade.Graph().as_default())

  def test_a_buffer_that_is_used_again(self):
    # Whether JAX goes on using a buffer depends on where it lies.
    for _ in range(20):
      buffer = np.zeros(1_000_000, np.float32)
      w = facade.Variable(buffer)
      buffer[:] = 7
      self.assertEqual(float(w.value().max()), 0)

      buffer = np.ones(1_000_000, np.float32)
      w.assign(buffer)
      buffer[:] = 8
      self.assertEqual(float(w.value().max()), 1)

  def test_numbers_that_would_wrap_around(self):
    for start, value in ((np.uint8(0), 300), (0, np.int64(2**40))):
      counter = facade.Variable(start, trainable=False)
      with self.assertRaisesRegex(ValueError, 'The value of .* must fit'):
        counter.assign(value)
      self.assertEqual(int(counter), 0)

  def test_complex_numbers(self):
    w = facade.Variable(1 + 1j)
    v = facade.Variable(1.0, name='v')
    opt = facade.GradientDescentOptimizer(0.1)

    with self.assertRaisesRegex(
        ValueError, 'Invalid type complex64 .*take real variables'
    ):
      opt.minimize(lambda: jnp.abs(w.value()) ** 2, var_list=[w])
    with self.assertRaisesRegex(TypeError, 'floating-point.*complex64 for v:0'):
      opt.apply_gradients([(1 + 2j, v)])

  def test_two_variables_of_one_name(self):
    found = []
    for _ in range(2):
      with facade.Graph().as_default():
        found.append(facade.Variable(1.0, name='w'))

    with self.assertRaisesRegex(ValueError, "Two variables have the name 'w'"):
      facade.get_values(found)
    with self.assertRaisesRegex(ValueError, "Two variables have the name 'w'"):
      facade.set_values(found, {'w': 5.0})

  def test_keys_of_random_numbers_are_saved_as_numbers(self):
    def train(saved=None):
      with facade.Graph().as_default():
        w = facade.Variable(np.zeros(3, np.float32), name='w')
        opt = facade.OptaxOptimizer(
            optax.chain(optax.add_noise(0.1, 0.5, key=jax.random.key(0)))
        )
        step = facade.function(lambda: opt.minimize(lambda: jnp.sum(w)))
        if saved is not None:
          step.build()
          facade.set_values(facade.global_variables(), saved)
        for _ in range(2):
          step()
        values = facade.get_values(facade.global_variables())
        return jax.device_get(values)

    first = train()
    for value in first.values():
      self.assertTrue(np.issubdtype(value.dtype, np.number))
    second = train(first)

    self.assertFalse(np.array_equal(first['w'], second['w']))
    chex.assert_trees_all_equal(train(first), second)

  def test_an_update_that_fails_changes_nothing(self):
    changes = optax.GradientTransformation(
        lambda params: jnp.zeros([], jnp.int32),
        lambda updates, state, params: (updates, state + 0.5),
    )
    w = facade.Variable(1.0, name='w')

    with self.assertRaisesRegex(TypeError, 'must be int32'):
      facade.OptaxOptimizer(changes).apply_gradients([(1.0, w)])
    self.assertEqual(float(w), 1.0)

  def test_a_state_that_mixes_variables(self):
    a = facade.Variable(1.0, name='a')
    b = facade.Variable([1.0, 1.0, 1.0], name='b')
    opt = facade.OptaxOptimizer(optax.flatten(optax.sgd(0.1, momentum=0.9)))
    opt.apply_gradients([(1.0, a)])

    with self.assertRaisesRegex(ValueError, 'Always update the same variables'):
      opt.apply_gradients([(jnp.ones(3), b)])
    chex.assert_trees_all_equal(b.value(), jnp.ones(3))

  def test_a_loss_that_fails_records_no_step(self):
    w = facade.Variable(0.0)
    global_step = facade.get_or_create_global_step()
    opt = facade.DropStaleGradientOptimizer(
        facade.GradientDescentOptimizer(1.0), 0
    )

    def fails():
      raise KeyError

    with self.assertRaises(KeyError):
      opt.minimize(fails, global_step)
    global_step.assign_add(1)

    self.assertEqual(int(opt.minimize(lambda: w * 1.0, global_step)), 0)


class ThreadsTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.graph = self.enterContext(facade.Graph().as_default())
    self.w = facade.Variable(0.0, name='w')
    self.global_step = facade.get_or_create_global_step()

  def in_graph(self, function):
    def run():
      with self.graph.as_default():
        function()

    return run

  def test_locking_holds_in_towers(self):
    inner = facade.GradientDescentOptimizer(1.0)

    def worker():
      opt = facade.DropStaleGradientOptimizer(inner, 100, use_locking=True)

      def model_fn(features):
        facade.TowerOptimizer(opt).minimize(
            lambda: -jnp.mean(features) * self.w, self.global_step
        )
        return facade.EstimatorSpec('train')

      step = facade.replicate_model_fn(model_fn, devices=['/cpu:0'] * 2)
      for _ in range(5):
        step(jnp.ones(2))

    errors = run_threads(*[self.in_graph(worker)] * 4)

    self.assertEmpty(errors)
    self.assertEqual(int(self.global_step), 20)
    self.assertEqual(float(self.w), 20.0)

  @cases.parameters(
      lambda opt: opt, facade.CrossShardOptimizer, facade.TowerOptimizer
  )
  def test_locking_of_the_innermost_optimizer_holds(self, wrap):
    # Several optimizers of one variable: TensorFlow 1 locked the variable.
    def worker():
      opt = wrap(facade.GradientDescentOptimizer(1.0, use_locking=True))
      for _ in range(50):
        with facade.shard_context(1):
          opt.apply_gradients([(-1.0, self.w)])

    errors = run_threads(*[self.in_graph(worker)] * 4)

    self.assertEmpty(errors)
    self.assertEqual(float(self.w), 200.0)

  def test_replicas_in_towers_meet(self):
    opt = facade.SyncReplicasOptimizer(facade.GradientDescentOptimizer(1.0), 2)
    opt.timeout_secs = 60.0

    def worker(value):
      def run():
        def model_fn(features):
          train_op = facade.TowerOptimizer(opt).minimize(
              lambda: -jnp.mean(features) * self.w, self.global_step
          )
          return facade.EstimatorSpec('train', train_op=train_op)

        step = facade.replicate_model_fn(model_fn, devices=['/cpu:0'] * 2)
        step(jnp.full(2, value))

      return self.in_graph(run)

    errors = run_threads(worker(2.0), worker(3.0))

    self.assertEmpty(errors)
    self.assertEqual(float(self.w), 2.5)
    self.assertEqual(int(self.global_step), 1)

  def test_a_compiled_gradient_of_an_earlier_step_is_dropped(self):
    opt = facade.SyncReplicasOptimizer(
        facade.GradientDescentOptimizer(1.0), 1, total_num_replicas=2
    )
    opt.timeout_secs = 60.0
    compute = facade.function(
        lambda: [g for g, _ in opt.compute_gradients(lambda: 100 * self.w)]
    )
    (late,) = compute()
    fast = self.in_graph(
        lambda: opt.minimize(lambda: self.w * 1.0, self.global_step)
    )

    self.assertEmpty(run_threads(fast))
    opt.apply_gradients([(late, self.w)], self.global_step)

    self.assertEqual(float(self.w), -1.0)
    self.assertEqual(int(self.global_step), 1)

  def test_an_error_of_the_worker_that_applies_reaches_all(self):
    def fails(variables):
      raise KeyError('average')

    opt = facade.SyncReplicasOptimizer(
        facade.GradientDescentOptimizer(1.0),
        2,
        variable_averages=type('Averages', (), {'apply': staticmethod(fails)}),
        variables_to_average=[self.w],
    )
    opt.timeout_secs = 60.0
    worker = self.in_graph(
        lambda: opt.minimize(lambda: self.w * 1.0, self.global_step)
    )

    errors = run_threads(worker, worker)

    self.assertEqual({type(e) for e in errors}, {KeyError, RuntimeError})


class OrderTest(parameterized.TestCase):

  def test_cross_shard_around_drop_stale(self):
    with facade.Graph().as_default():
      w = facade.Variable(0.0)
      global_step = facade.get_or_create_global_step()
      opt = facade.CrossShardOptimizer(
          facade.DropStaleGradientOptimizer(
              facade.GradientDescentOptimizer(1.0), 0
          )
      )

      @facade.function
      def step(x, age):
        def computation(x):
          pairs = opt.compute_gradients(lambda: jnp.sum(w * x))
          global_step.assign_add(age)
          return opt.apply_gradients(pairs, global_step)

        return facade.shard(computation, [x], 4, outputs_from_all_shards=False)[
            0
        ]

      counts = [int(step(jnp.arange(4.0), age)) for age in (0, 1, 0)]

    self.assertEqual(counts, [0, 1, 1])
    self.assertEqual(float(w), -2 * 1.5)
