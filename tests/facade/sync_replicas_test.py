import threading
import types

from absl.testing import parameterized
import chex
import jax.numpy as jnp
import numpy as np

import cases
from shard_transforms import facade


def run_workers(*workers):
  """Runs functions in threads, and returns the errors that they raised."""
  errors = []

  def run(worker):
    try:
      worker()
    except Exception as error:
      errors.append(error)

  threads = [threading.Thread(target=run, args=[w]) for w in workers]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(timeout=120)
  return errors


class SyncReplicasOptimizerTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.graph = self.enterContext(facade.Graph().as_default())
    self.w = facade.Variable(np.zeros(4, np.float32), name='w')
    self.global_step = facade.get_or_create_global_step()

  def optimizer(self, *args, inner=None, timeout=60.0, **kwargs):
    inner = inner or facade.GradientDescentOptimizer(1.0)
    opt = facade.SyncReplicasOptimizer(inner, *args, **kwargs)
    opt.timeout_secs = timeout
    return opt

  def worker(self, opt, last_step, gradient):
    """Returns a worker that goes on until the last step."""

    def run():
      with self.graph.as_default():
        # A bound on the rounds, most of which backup workers may lose.
        for _ in range(1_000):
          step = int(self.global_step)
          if step >= last_step:
            return
          grad = jnp.asarray(gradient(step), jnp.float32)
          opt.minimize(
              lambda grad=grad: jnp.sum(self.w * grad), self.global_step
          )

    return run

  @cases.parameters(facade.GradientDescentOptimizer, facade.AdamOptimizer)
  def test_replicas_in_step_train_as_one_of_their_mean(self, make_inner):
    rng = np.random.default_rng(0)
    grads = rng.standard_normal([3, 5, 4]).astype(np.float32)
    opt = self.optimizer(3, inner=make_inner(0.1))

    errors = run_workers(
        *(self.worker(opt, 5, lambda i, own=own: own[i]) for own in grads)
    )

    self.assertEmpty(errors)
    self.assertEqual(int(self.global_step), 5)
    with facade.Graph().as_default():
      alone = facade.Variable(np.zeros(4, np.float32), name='w')
      inner = make_inner(0.1)
      for grad in grads.mean(0):
        inner.apply_gradients([(grad, alone)])
    chex.assert_trees_all_close(
        self.w.value(), alone.value(), rtol=1e-5, atol=1e-6, strict=True
    )

  def test_backup_replicas_are_dropped(self):
    opt = self.optimizer(2, total_num_replicas=4)

    errors = run_workers(
        *(self.worker(opt, 10, lambda _, i=i: np.eye(4)[i]) for i in range(4))
    )

    # Each step takes the mean of two gradients, whose elements sum up to 1.
    self.assertEmpty(errors)
    self.assertEqual(int(self.global_step), 10)
    self.assertAlmostEqual(float(self.w.value().sum()), -10.0, places=4)

  def test_fewer_replicas_hand_in_several_gradients(self):
    opt = self.optimizer(4, total_num_replicas=2)

    errors = run_workers(
        *(self.worker(opt, 3, lambda _, i=i: np.eye(4)[i]) for i in range(2))
    )

    self.assertEmpty(errors)
    self.assertEqual(int(self.global_step), 3)
    chex.assert_trees_all_close(
        self.w.value().sum(), jnp.float32(-3.0), rtol=1e-6
    )

  def test_gradients_of_an_earlier_step_are_dropped(self):
    opt = self.optimizer(1, total_num_replicas=2, timeout=5.0)
    late = opt.compute_gradients(lambda: jnp.sum(self.w) * 100)

    def fast():
      with self.graph.as_default():
        opt.minimize(lambda: jnp.sum(self.w), self.global_step)

    self.assertEmpty(run_workers(fast))
    opt.apply_gradients(late, self.global_step)

    self.assertEqual(int(self.global_step), 1)
    chex.assert_trees_all_equal(self.w.value(), -jnp.ones(4), strict=True)

  def test_a_worker_does_not_wait_for_ever(self):
    opt = self.optimizer(2, timeout=0.1)

    with self.assertRaisesRegex(
        TimeoutError, 'not over within .*fewer than 2 gradients'
    ):
      opt.minimize(lambda: jnp.sum(self.w), self.global_step)
    self.assertEqual(int(self.global_step), 0)

  def test_one_replica_is_the_inner_optimizer_and_compiles(self):
    opt = self.optimizer(1, inner=facade.MomentumOptimizer(0.1, 0.9))

    @facade.function
    def step():
      return opt.minimize(lambda: jnp.sum(self.w**2 + self.w), self.global_step)

    self.assertEqual([int(step()) for _ in range(3)], [1, 2, 3])
    with facade.Graph().as_default():
      alone = facade.Variable(np.zeros(4, np.float32), name='w')
      inner = facade.MomentumOptimizer(0.1, 0.9)
      of_inner = facade.function(
          lambda: inner.minimize(lambda: jnp.sum(alone**2 + alone))
      )
      for _ in range(3):
        of_inner()
    chex.assert_trees_all_equal(self.w.value(), alone.value(), strict=True)
    self.assertEqual(opt.get_slot_names(), ['momentum'])
    self.assertEqual(opt.variables(), [opt.get_slot(self.w, 'momentum')])
    self.assertEqual(opt.get_name(), 'sync_replicas')

  def test_several_replicas_cannot_meet_in_a_trace(self):
    opt = self.optimizer(2)

    with self.assertRaisesRegex(ValueError, 'threads cannot wait'):
      facade.function(
          lambda: opt.minimize(lambda: jnp.sum(self.w), self.global_step)
      )()

  def test_inside_a_tower_optimizer(self):
    def model_fn(features, mode):
      opt = facade.TowerOptimizer(self.optimizer(1))
      train_op = opt.minimize(
          lambda: jnp.sum(self.w * features[0]), self.global_step
      )
      return facade.EstimatorSpec(mode, loss=0.0, train_op=train_op)

    step = facade.replicate_model_fn(model_fn, devices=['/cpu:0'] * 2)
    spec = step(jnp.array([[1.0] * 4, [3.0] * 4]), mode='train')

    chex.assert_trees_all_equal(self.w.value(), -2 * jnp.ones(4), strict=True)
    self.assertEqual(int(spec.train_op), 1)

  def test_outside_of_a_tower_optimizer_is_an_error(self):
    with self.assertRaisesRegex(ValueError, r'TowerOptimizer\(SyncReplicas'):
      self.optimizer(
          1, inner=facade.TowerOptimizer(facade.GradientDescentOptimizer(1.0))
      )

  def test_averages_variables_after_each_step(self):
    calls = []
    averages = types.SimpleNamespace(
        apply=lambda variables: calls.append(
            [float(v.value()[0]) for v in variables]
        )
    )
    opt = self.optimizer(
        1, variable_averages=averages, variables_to_average=[self.w]
    )
    for _ in range(2):
      opt.minimize(lambda: jnp.sum(self.w), self.global_step)

    self.assertEqual(calls, [[-1.0], [-2.0]])

  def test_workers_must_have_the_same_variables(self):
    other = facade.Variable(0.0)
    opt = self.optimizer(2, timeout=0.1)
    late = self.optimizer(2, timeout=0.1)
    # What a worker withdraws when its time is over is no longer in the way.
    for variable in (self.w, other):
      with self.assertRaises(TimeoutError):
        opt.apply_gradients(
            [(jnp.ones(variable.shape), variable)], self.global_step
        )
    late._round.calls.append([(jnp.ones(4), self.w)])

    with self.assertRaisesRegex(ValueError, 'of the same variables'):
      late.apply_gradients([(1.0, other)], self.global_step)

  @parameterized.named_parameters(
      ('zero', ValueError, '`replicas_to_aggregate`', [0], {}),
      ('float', TypeError, '`replicas_to_aggregate`', [1.5], {}),
      ('total', ValueError, '`total_num_replicas`', [1, 0], {}),
      (
          'averages',
          ValueError,
          'must come together',
          [1],
          {'variables_to_average': []},
      ),
      (
          'name',
          ValueError,
          'Must specify the optimizer name',
          [1],
          {'name': ''},
      ),
  )
  def test_refuses(self, error, message, args, kwargs):
    with self.assertRaisesRegex(error, message):
      self.optimizer(*args, **kwargs)

  def test_missing_global_step(self):
    with self.assertRaisesRegex(
        ValueError, '`global_step` of `SyncReplicas.*belongs to a step'
    ):
      self.optimizer(1).minimize(lambda: jnp.sum(self.w))
