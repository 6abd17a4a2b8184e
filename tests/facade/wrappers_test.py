import inspect
import tempfile

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import pytest

import cases
from shard_transforms import facade

# Around an optimizer, each with a way to run a step of it.
WRAPPERS = {
    'bare': lambda opt: opt,
    'cross_shard': facade.CrossShardOptimizer,
    'tower': facade.TowerOptimizer,
    'drop_stale': lambda opt: facade.DropStaleGradientOptimizer(opt, 0),
    'sync_replicas': lambda opt: facade.SyncReplicasOptimizer(opt, 1),
    'tower_of_sync_replicas': lambda opt: facade.TowerOptimizer(
        facade.SyncReplicasOptimizer(opt, 1)
    ),
    'drop_stale_of_cross_shard': lambda opt: facade.DropStaleGradientOptimizer(
        facade.CrossShardOptimizer(opt), 0
    ),
}

MINIMIZE = (
    '(self, loss, global_step=None, var_list=None, gate_gradients=1,'
    ' aggregation_method=None, colocate_gradients_with_ops=False, name=None,'
    ' grad_loss=None)'
)
COMPUTE_GRADIENTS = (
    '(self, loss, var_list=None, gate_gradients=1, aggregation_method=None,'
    ' colocate_gradients_with_ops=False, grad_loss=None)'
)

# As in TensorFlow 1.15.
SIGNATURES = {
    'CrossShardOptimizer': (
        "(opt, reduction='weighted_mean', name='CrossShardOptimizer',"
        ' group_assignment=None)'
    ),
    'TowerOptimizer': '(optimizer_or_optimizer_fn)',
    'DropStaleGradientOptimizer': (
        "(opt, staleness, use_locking=False, name='DropStaleGradient')"
    ),
    'SyncReplicasOptimizer': (
        '(opt, replicas_to_aggregate, total_num_replicas=None,'
        ' variable_averages=None, variables_to_average=None,'
        " use_locking=False, name='sync_replicas')"
    ),
    'replicate_model_fn': (
        "(model_fn, loss_reduction='weighted_sum_by_nonzero_weights',"
        ' devices=None)'
    ),
    'shard': (
        '(computation, inputs=None, num_shards=1, input_shard_axes=None,'
        ' outputs_from_all_shards=True, output_shard_axes=None,'
        ' infeed_queue=None, device_assignment=None, name=None)'
    ),
}


def signature(of):
  """Returns a signature without its types."""
  found = inspect.signature(of)
  parameters = [
      p.replace(annotation=inspect.Parameter.empty)
      for p in found.parameters.values()
  ]
  return str(inspect.Signature(parameters))


class WrappersTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.enterContext(facade.Graph().as_default())
    self.w = facade.Variable([1.0, -2.0], name='w')
    self.global_step = facade.get_or_create_global_step()

  def steps(self, wrap, number=3, saved=None):
    """Trains on, from saved values if there are any; returns all values."""
    with facade.Graph().as_default():
      w = facade.Variable([1.0, -2.0], name='w')
      global_step = facade.get_or_create_global_step()
      opt = wrap(facade.AdamOptimizer(0.1))

      @facade.function
      def step():
        with facade.shard_context(1):
          opt.minimize(lambda: jnp.sum(w**3), global_step)

      if saved is not None:
        step.build()
        facade.set_values(facade.global_variables(), saved)
      for _ in range(number):
        step()
      return jax.device_get(facade.get_values(facade.global_variables()))

  # A gate is a `lax.cond`, in which XLA rounds Adam's arithmetic otherwise.
  @cases.parameters(*(n for n in WRAPPERS if 'drop_stale' not in n))
  @pytest.mark.slow_after(2)
  def test_one_shard_or_tower_has_the_bits_of_the_inner_optimizer(self, name):
    bare = self.steps(WRAPPERS['bare'])
    wrapped = self.steps(WRAPPERS[name])

    chex.assert_trees_all_equal(
        {key: wrapped[key] for key in bare}, bare, strict=True
    )

  @cases.parameters(*WRAPPERS)
  @pytest.mark.slow_after(2)
  def test_resumes_to_the_bit_through_orbax(self, name):
    saved = self.steps(WRAPPERS[name], 2)
    folder = self.enterContext(tempfile.TemporaryDirectory())
    with ocp.StandardCheckpointer() as checkpointer:
      checkpointer.save(f'{folder}/step', saved)
      checkpointer.wait_until_finished()
      restored = checkpointer.restore(f'{folder}/step')

    resumed = self.steps(WRAPPERS[name], 1, restored)

    chex.assert_trees_all_equal(
        resumed, self.steps(WRAPPERS[name], 3), strict=True
    )

  @cases.parameters(*WRAPPERS)
  def test_lists_all_its_variables(self, name):
    opt = WRAPPERS[name](facade.AdamOptimizer(0.1))

    with facade.shard_context(1):
      opt.minimize(lambda: jnp.sum(self.w**2), self.global_step)

    listed = {v for v in opt.variables()} | {self.w, self.global_step}
    self.assertEqual(listed, set(facade.global_variables()))
    names = [v.name for v in opt.variables()]
    self.assertEqual(names, sorted(names))

  @cases.parameters(*WRAPPERS)
  def test_returns_the_global_step_or_the_drops(self, name):
    opt = WRAPPERS[name](facade.GradientDescentOptimizer(0.1))
    drops = 'drop_stale' in name

    with facade.shard_context(1):
      out = opt.minimize(lambda: jnp.sum(self.w**2), self.global_step)
      self.assertEqual(int(out), 0 if drops else 1)
      if not drops and 'sync' not in name:
        self.assertIsNone(opt.minimize(lambda: jnp.sum(self.w**2)))

  @cases.parameters(*WRAPPERS)
  def test_is_an_optimizer_of_the_same_face(self, name):
    opt = WRAPPERS[name](facade.MomentumOptimizer(0.1, 0.9))

    self.assertIsInstance(opt, facade.Optimizer)
    self.assertEqual((opt.GATE_NONE, opt.GATE_OP, opt.GATE_GRAPH), (0, 1, 2))
    self.assertIsNone(opt.get_slot(self.w, 'momentum'))
    self.assertEqual(opt.get_slot_names(), [])
    with facade.shard_context(1):
      opt.minimize(lambda: jnp.sum(self.w**2), self.global_step)
    self.assertEqual(opt.get_slot_names(), ['momentum'])
    self.assertEqual(opt.get_slot(self.w, 'momentum').name, 'w/Momentum:0')
    self.assertIsNone(opt.get_slot(self.w, 'no_such_slot'))

  @cases.parameters(*WRAPPERS)
  def test_refuses_a_wrong_gate(self, name):
    opt = WRAPPERS[name](facade.MomentumOptimizer(0.1, 0.9))

    with (
        facade.shard_context(1),
        self.assertRaisesRegex(ValueError, '`gate_gradients` must be one of'),
    ):
      opt.compute_gradients(lambda: jnp.sum(self.w), gate_gradients=7)

  @cases.parameters(
      facade.CrossShardOptimizer,
      lambda opt, name: facade.DropStaleGradientOptimizer(opt, 0, name=name),
      lambda opt, name: facade.SyncReplicasOptimizer(opt, 1, name=name),
  )
  def test_refuses_an_empty_name(self, make):
    with self.assertRaisesRegex(ValueError, 'Must specify the optimizer name'):
      make(facade.AdamOptimizer(), name='')


class SignaturesTest(parameterized.TestCase):

  @cases.parameters(*SIGNATURES.items())
  def test_signature(self, name, expected):
    self.assertEqual(signature(getattr(facade, name)), expected)

  def test_signatures_of_methods(self):
    self.assertEqual(signature(facade.Optimizer.minimize), MINIMIZE)
    self.assertEqual(
        signature(facade.Optimizer.compute_gradients), COMPUTE_GRADIENTS
    )
    self.assertEqual(
        signature(facade.Optimizer.apply_gradients),
        '(self, grads_and_vars, global_step=None, name=None)',
    )
    for name, expected in (
        ('get_slot', '(self, var, name)'),
        ('get_slot_names', '(self)'),
        ('get_name', '(self)'),
        ('variables', '(self)'),
    ):
      self.assertEqual(signature(getattr(facade.Optimizer, name)), expected)
