import inspect

from absl.testing import parameterized
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import cases
import facade_cases
from shard_transforms import facade

W = facade_cases.W
MADE = facade_cases.OPTIMIZERS

MINIMIZE = (
    '(self, loss, global_step=None, var_list=None, gate_gradients=1,'
    ' aggregation_method=None, colocate_gradients_with_ops=False, name=None,'
    ' grad_loss=None, *, return_loss=False, has_aux=False)'
)
COMPUTE_GRADIENTS = (
    '(self, loss, var_list=None, gate_gradients=1, aggregation_method=None,'
    ' colocate_gradients_with_ops=False, grad_loss=None, *,'
    ' return_loss=False, has_aux=False)'
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
        ' outputs_from_all_shards=True, *, infeed_queue=None,'
        ' device_assignment=None, name=None)'
    ),
}

WRAPPERS = {
    'clip_gradients_by_norm': lambda x: facade.clip_gradients_by_norm(x, 1.0),
    'cross_shard': facade.CrossShardOptimizer,
    'drop_stale': lambda x: facade.DropStaleGradientOptimizer(x, 1),
    'sync_replicas': lambda x: facade.SyncReplicasOptimizer(x, 1),
    'tower': facade.TowerOptimizer,
    'tower of a function': lambda x: facade.TowerOptimizer(lambda: x),
}


def signature(of):
  """Returns a signature without its types."""
  found = inspect.signature(of)
  parameters = [
      p.replace(annotation=inspect.Parameter.empty)
      for p in found.parameters.values()
  ]
  return str(inspect.Signature(parameters))


class MinimizeTest(facade_cases.OptimizerTest):

  @cases.product(name=tuple(MADE), compiled=(False, True))
  @pytest.mark.slow_after(2)
  def test_is_compute_and_apply_gradients(self, name, compiled):
    def loss():
      return jnp.sum(self.w**2) * self.b

    def in_two(opt):
      return opt.apply_gradients(opt.compute_gradients(loss), self.step)

    start = facade.get_values([self.w, self.b, self.step])
    results = []
    for run in lambda opt: opt.minimize(loss, self.step), in_two:
      facade.set_values([self.w, self.b, self.step], start)
      opt = MADE[name]()
      returned = [
          self.run_step(lambda run=run, opt=opt: run(opt), compiled)
          for _ in range(2)
      ]
      results.append((returned, facade.get_values([self.w, self.b, self.step])))

    self.assert_equal(*results)
    self.assert_equal(results[0][0], [jnp.int32(1), jnp.int32(2)])

  def test_hands_everything_on(self):
    opt = facade.GradientDescentOptimizer(1.0)

    returned = opt.minimize(
        lambda w: w**2,
        global_step=self.step,
        var_list=[self.w],
        gate_gradients=facade.Optimizer.GATE_GRAPH,
        aggregation_method=facade.AggregationMethod.ADD_N,
        colocate_gradients_with_ops=True,
        name='train',
        grad_loss=np.float32([0.5, 0.25]),
    )

    self.assert_equal(returned, jnp.int32(1))
    self.assert_equal(self.w.value(), jnp.float32([0, 1]))

  def test_returns_none_without_a_global_step(self):
    self.assertIsNone(MADE['adam']().minimize(lambda: self.b**2))
    self.assert_equal(self.step.value(), jnp.int32(0))

  def test_needs_a_loss_that_reads_a_variable(self):
    with self.assertRaisesRegex(
        ValueError, r"No gradients.*: \['w:0', 'b:0'\]. The loss must read"
    ):
      MADE['adam']().minimize(lambda: jnp.float32(1))

    self.assertLen(facade.global_variables(), 3)

  @cases.parameters(3, -1, 'GATE_OP', None)
  def test_refuses_another_gate(self, gate):
    with self.assertRaisesRegex(ValueError, '`gate_gradients` must be one of'):
      MADE['adam']().minimize(lambda: self.b, gate_gradients=gate)

  def test_a_subclass_that_overrides_nothing_changes_nothing(self):
    class Mine(facade.Optimizer):
      pass

    with self.assertRaisesRegex(
        NotImplementedError, 'Mine must define `_apply_dense'
    ):
      Mine(False, 'mine').minimize(lambda: self.b**2, self.step)

    self.assert_equal(self.step.value(), jnp.int32(0))


class SignaturesTest(parameterized.TestCase):

  @cases.parameters(*SIGNATURES.items())
  def test_signature(self, name, expected):
    self.assertEqual(signature(getattr(facade, name)), expected)

  def test_signatures_of_methods(self):
    for name, expected in (
        ('minimize', MINIMIZE),
        ('compute_gradients', COMPUTE_GRADIENTS),
        (
            'apply_gradients',
            '(self, grads_and_vars, global_step=None, name=None)',
        ),
        ('get_slot', '(self, var, name)'),
        ('get_slot_names', '(self)'),
        ('get_name', '(self)'),
        ('variables', '(self)'),
    ):
      for kind in facade.Optimizer, facade.AdamOptimizer:
        self.assertEqual(signature(getattr(kind, name)), expected)


class WrappersTest(parameterized.TestCase):

  @cases.product(wrap=WRAPPERS, opt=[optax.sgd(0.1), None])
  def test_refuse_what_is_no_optimizer(self, wrap, opt):
    with self.assertRaisesRegex(TypeError, r'facade\.OptaxOptimizer'):
      WRAPPERS[wrap](opt)
