import threading

from absl.testing import absltest
from absl.testing import parameterized
import chex
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import cases
import shard_transforms
from shard_transforms import facade
from shard_transforms.facade import workers


class DropStaleGradientOptimizerTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.enterContext(facade.Graph().as_default())
    self.w = facade.Variable([3.0, -1.0], name='w')
    self.global_step = facade.get_or_create_global_step()

  def wrapped(self, staleness, opt=None, **kwargs):
    opt = opt or facade.GradientDescentOptimizer(1.0)
    return facade.DropStaleGradientOptimizer(opt, staleness, **kwargs)

  def gradients(self, opt, scale=1.0):
    return opt.compute_gradients(lambda: scale * jnp.sum(self.w))

  @cases.parameters(
      (0, 0, True), (0, 1, False), (2, 2, True), (2, 3, False), (-1, 0, False)
  )
  def test_applies_what_is_fresh_enough(self, staleness, age, applies):
    opt = self.wrapped(staleness)
    pairs = self.gradients(opt)
    self.global_step.assign_add(age)

    count = opt.apply_gradients(pairs, self.global_step)

    self.assertEqual(int(count), not applies)
    self.assertEqual(int(self.global_step), age + applies)
    expected = np.array([3.0, -1.0], np.float32) - applies
    chex.assert_trees_all_equal(self.w.value(), expected, strict=True)

  @cases.parameters(False, True)
  def test_has_the_bits_of_the_functional_path(self, compiled):
    opt = self.wrapped(1, facade.MomentumOptimizer(0.1, 0.9))
    tx = shard_transforms.drop_stale(1, optax.sgd(0.1, momentum=0.9))
    params = {'w': self.w.value()}
    state = tx.init(params)
    rng = np.random.default_rng(0)

    def update(params, state, grad, local_step):
      updates, state = tx.update(
          {'w': grad}, state, params, local_step=local_step
      )
      return optax.apply_updates(params, updates), state

    def apply_gradients(grad):
      return opt.apply_gradients([(grad, self.w)], self.global_step)

    compute = opt.compute_gradients
    if compiled:
      update = jax.jit(update)
      apply_gradients = facade.function(apply_gradients)
      compute = facade.function(
          lambda loss=None: [
              g for g, _ in opt.compute_gradients(lambda: jnp.sum(self.w))
          ]
      )
    for age in (0, 1, 2, 0, 3, 1):
      compute(lambda: jnp.sum(self.w)) if not compiled else compute()
      local_step = state.global_step
      state = state._replace(global_step=state.global_step + age)
      self.global_step.assign_add(age)
      grad = rng.standard_normal(2, np.float32)

      params, state = update(params, state, grad, local_step)
      count = apply_gradients(grad)

      slot = opt.get_slot(self.w, 'momentum')
      chex.assert_trees_all_equal(
          (self.w.value(), self.global_step.value(), count, slot.value()),
          (
              params['w'],
              state.global_step,
              state.stale_count,
              optax.tree_utils.tree_get(state, 'trace')['w'],
          ),
          strict=True,
      )
    self.assertEqual(int(opt.stale_counter), 2)

  def test_a_dropped_gradient_leaves_every_bit(self):
    opt = self.wrapped(0, facade.AdamOptimizer(0.1))
    opt.apply_gradients(self.gradients(opt), self.global_step)
    before = jax.device_get(facade.get_values(facade.global_variables()))
    pairs = self.gradients(opt, scale=jnp.nan)
    self.global_step.assign_add(1)

    opt.apply_gradients(pairs, self.global_step)

    after = jax.device_get(facade.get_values(facade.global_variables()))
    expected = before | {
        'global_step': before['global_step'] + 1,
        'stale_counter': before['stale_counter'] + 1,
    }
    chex.assert_trees_all_equal(after, expected)

  def test_records_the_step_before_the_loss_is_evaluated(self):
    opt = self.wrapped(0)

    def loss():
      # Another worker updates while this one computes.
      self.global_step.assign_add(1)
      return jnp.sum(self.w)

    self.assertEqual(int(opt.minimize(loss, self.global_step)), 1)

  def test_the_oldest_of_several_recorded_steps_counts(self):
    opt = self.wrapped(0)
    self.gradients(opt)
    self.global_step.assign_add(1)
    pairs = self.gradients(opt)

    self.assertEqual(int(opt.apply_gradients(pairs, self.global_step)), 1)

    # What was recorded before the last update counts no longer.
    pairs = self.gradients(opt)
    self.assertEqual(int(opt.apply_gradients(pairs, self.global_step)), 1)

  def test_a_recorded_step_counts_for_every_update_that_follows(self):
    v = facade.Variable(0.0)
    opt = self.wrapped(0)
    pairs = opt.compute_gradients(lambda: jnp.sum(self.w) + v)

    counts = [
        int(opt.apply_gradients([pair], self.global_step)) for pair in pairs
    ]

    self.assertEqual(counts, [0, 1])

  def test_each_thread_records_its_own_steps(self):
    opt = self.wrapped(0)
    self.gradients(opt)
    self.global_step.assign_add(1)
    counts = []

    def worker(graph):
      with graph.as_default():
        pairs = self.gradients(opt)
        counts.append(int(opt.apply_gradients(pairs, self.global_step)))

    thread = threading.Thread(target=worker, args=[facade.get_default_graph()])
    thread.start()
    thread.join()

    self.assertEqual(counts, [0])

  def test_in_a_function_what_was_not_computed_is_dropped(self):
    opt = self.wrapped(5)

    @facade.function
    def step(grad):
      return opt.apply_gradients([(grad, self.w)], self.global_step)

    self.assertEqual(int(step(jnp.ones(2))), 1)
    chex.assert_trees_all_equal(self.w.value(), jnp.array([3.0, -1.0]))

  def test_wrappers_of_one_optimizer_share_the_counter(self):
    inner = facade.GradientDescentOptimizer(1.0)
    first, second = self.wrapped(-1, inner), self.wrapped(-1, inner)
    other = self.wrapped(-1)

    for opt in (first, second, other):
      opt.apply_gradients(self.gradients(opt), self.global_step)

    counts = [int(opt.stale_counter) for opt in (first, second, other)]
    self.assertEqual(counts, [2, 2, 1])
    self.assertEqual(first.stale_counter.name, 'stale_counter:0')
    self.assertEqual(other.stale_counter.name, 'stale_counter_1:0')

  def test_fraction_of_drops(self):
    opt = self.wrapped(0)
    for age in (0, 1, 1, 1):
      pairs = self.gradients(opt)
      self.global_step.assign_add(age)
      opt.apply_gradients(pairs, self.global_step)
    self.global_step.assign(1)

    self.assertEqual(float(opt.stale_fraction(self.global_step)), 0.75)

  def test_variables_hold_all_that_has_to_be_saved(self):
    opt = self.wrapped(0, facade.AdamOptimizer(0.1))
    opt.apply_gradients(self.gradients(opt), self.global_step)

    self.assertEqual(
        [v.op.name for v in opt.variables()],
        ['beta1_power', 'beta2_power', 'stale_counter', 'w/Adam', 'w/Adam_1'],
    )

  @pytest.mark.slow
  def test_resumes_to_the_bit_after_drops(self):
    def run(saved, ages):
      with facade.Graph().as_default():
        w = facade.Variable([3.0, -1.0], name='w')
        global_step = facade.get_or_create_global_step()
        opt = self.wrapped(1, facade.AdamOptimizer(0.1))
        compute = facade.function(
            lambda: [g for g, _ in opt.compute_gradients(lambda: jnp.sum(w**2))]
        )
        apply = facade.function(
            lambda grad: opt.apply_gradients([(grad, w)], global_step)
        )
        if saved is not None:
          apply.build(jnp.zeros(2))
          facade.set_values(facade.global_variables(), saved)
        for age in ages:
          (grad,) = compute()
          global_step.assign_add(age)
          apply(grad)
        values = facade.get_values(facade.global_variables())
        return flax.serialization.msgpack_restore(
            flax.serialization.msgpack_serialize(jax.device_get(values))
        )

    ages = [0, 2, 1, 0, 3, 2, 0]
    expected = run(None, ages)
    for stop in range(1, len(ages)):
      resumed = run(run(None, ages[:stop]), ages[stop:])
      chex.assert_trees_all_equal(resumed, expected, strict=True)

  def test_minimize_in_a_function(self):
    opt = self.wrapped(0)

    @facade.function
    def step():
      return opt.minimize(lambda: jnp.sum(self.w), self.global_step)

    self.assertEqual([int(step()) for _ in range(3)], [0, 0, 0])
    self.assertEqual(int(self.global_step), 3)

  def test_around_a_cross_shard_optimizer(self):
    opt = self.wrapped(
        0, facade.CrossShardOptimizer(facade.GradientDescentOptimizer(1.0))
    )

    def computation(x, age):
      pairs = opt.compute_gradients(lambda: jnp.sum(self.w * x))
      self.global_step.assign_add(age[0])
      return opt.apply_gradients(pairs, self.global_step)

    # The global step is the same on all shards, so the age has to be too.
    @facade.function
    def step(x, age):
      def of_shard(x):
        return computation(x, age)

      return facade.shard(of_shard, [x], 4, outputs_from_all_shards=False)

    for age, count in ((0, 0), (1, 1), (0, 1)):
      (counted,) = step(jnp.arange(4.0), jnp.array([age]))
      self.assertEqual(int(counted), count)
    chex.assert_trees_all_equal(
        self.w.value(), jnp.array([3.0, -1.0]) - 2 * 1.5, strict=True
    )

  def test_missing_global_step(self):
    opt = self.wrapped(0)

    with self.assertRaisesRegex(ValueError, '`global_step`.*must be'):
      opt.minimize(lambda: jnp.sum(self.w))
    with self.assertRaisesRegex(ValueError, '`global_step`.*must be'):
      opt.apply_gradients(self.gradients(opt))
    with (
        facade.Graph().as_default(),
        self.assertRaisesRegex(ValueError, 'get_or_create_global_step'),
    ):
      self.gradients(opt)

  def test_apply_before_compute(self):
    with self.assertRaisesRegex(ValueError, 'must come before'):
      self.wrapped(0).apply_gradients([(jnp.ones(2), self.w)], self.global_step)

  @cases.parameters(1.5, '1', None, True)
  def test_refuses_a_staleness_that_is_no_integer(self, staleness):
    with self.assertRaisesRegex(TypeError, '`staleness` must be an integer'):
      self.wrapped(staleness)

  def test_refuses_an_optimizer_that_gathers(self):
    with self.assertRaisesRegex(TypeError, 'TowerOptimizer.*outside'):
      self.wrapped(1, facade.TowerOptimizer(facade.AdamOptimizer()))


class WorkersTest(parameterized.TestCase):
  """Workers are threads, each with its own wrapper of a shared optimizer."""

  NUM_WORKERS = 4
  NUM_STEPS = 60

  @cases.product(compiled=[False, True], staleness=[0, 1, 3])
  @pytest.mark.slow_after(1)
  def test_no_update_is_lost_and_none_applied_twice(self, compiled, staleness):
    num_steps = self.NUM_STEPS if compiled else 8
    graph = facade.Graph()
    with graph.as_default():
      w = facade.Variable(np.zeros(self.NUM_WORKERS, np.float32), name='w')
      global_step = facade.get_or_create_global_step()
      inner = facade.MomentumOptimizer(1.0, 0.0)
    accepted = np.zeros(self.NUM_WORKERS, int)
    errors = []

    def worker(i):
      opt = facade.DropStaleGradientOptimizer(
          inner, staleness, use_locking=True
      )

      def compute():
        pairs = opt.compute_gradients(lambda: -w[i])
        return [grad for grad, _ in pairs]

      def apply(grad):
        before = opt.stale_counter.value()
        after = opt.apply_gradients([(grad, w)], global_step)
        return after, before

      if compiled:
        compute, apply = facade.function(compute), facade.function(apply)
      for _ in range(num_steps):
        (grad,) = compute()
        after, before = apply(grad)
        if compiled:
          # Read in the same atomic step as the update, so exact.
          accepted[i] += int(after) == int(before)

    def run(i):
      try:
        with graph.as_default():
          worker(i)
      except Exception as error:
        errors.append(error)

    threads = [
        threading.Thread(target=run, args=[i]) for i in range(self.NUM_WORKERS)
    ]
    for thread in threads:
      thread.start()
    for thread in threads:
      thread.join()

    self.assertEmpty(errors)
    count = int(inner.slots.counter('stale_counter'))
    self.assertEqual(int(global_step) + count, self.NUM_WORKERS * num_steps)
    self.assertEqual(float(w.value().sum()), int(global_step))
    if compiled:
      np.testing.assert_array_equal(w.value(), accepted)

  def test_without_workers_in_between_nothing_is_dropped(self):
    with facade.Graph().as_default():
      w = facade.Variable(0.0)
      global_step = facade.get_or_create_global_step()
      opt = facade.DropStaleGradientOptimizer(
          facade.GradientDescentOptimizer(1.0), 0, use_locking=True
      )

      for _ in range(5):
        opt.minimize(lambda: w * 1.0, global_step)

    self.assertEqual(int(opt.stale_counter), 0)


class LocalStepTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.graph = self.enterContext(facade.Graph().as_default())
    self.local_step = workers.LocalStep()

  def test_starts_with_none(self):
    self.assertEqual(int(self.local_step.step), workers.NO_STEP)

  def test_is_in_no_collection(self):
    self.assertEmpty(facade.global_variables())

  def test_the_oldest_since_the_last_use_counts(self):
    steps = []
    for step in (5, 3, 4):
      self.local_step.record(step)
      steps.append(int(self.local_step.step))
    self.local_step.use()
    steps.append(int(self.local_step.step))
    self.local_step.record(7)
    steps.append(int(self.local_step.step))

    self.assertEqual(steps, [5, 3, 3, 3, 7])

  def test_goes_on_from_what_is_set(self):
    self.local_step.set(5)
    self.local_step.record(7)

    self.assertEqual(int(self.local_step.step), 5)

  def test_each_thread_has_its_own(self):
    self.local_step.record(5)
    seen = []

    def other():
      seen.append(int(self.local_step.step))
      self.local_step.record(1)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()

    self.assertEqual(seen, [workers.NO_STEP])
    self.assertEqual(int(self.local_step.step), 5)

  def test_is_recorded_by_what_is_compiled(self):
    record = facade.function(self.local_step.record)

    record(jnp.int32(4))
    record(jnp.int32(2))

    self.assertEqual(int(self.local_step.step), 2)
