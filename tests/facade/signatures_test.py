"""Signatures and constants are those of TensorFlow 1.15."""

import inspect

from absl.testing import parameterized

import cases
from shard_transforms import facade

OPTIONS = "use_locking=False, name='{}'"
SIGNATURES = {
    'GradientDescentOptimizer': f'learning_rate, {OPTIONS}',
    'MomentumOptimizer': (
        f'learning_rate, momentum, {OPTIONS}, use_nesterov=False'
    ),
    'AdamOptimizer': (
        f'learning_rate=0.001, beta1=0.9, beta2=0.999, epsilon=1e-08, {OPTIONS}'
    ),
    'AdagradOptimizer': (
        f'learning_rate, initial_accumulator_value=0.1, {OPTIONS}'
    ),
    'RMSPropOptimizer': (
        'learning_rate, decay=0.9, momentum=0.0, epsilon=1e-10,'
        " use_locking=False, centered=False, name='{}'"
    ),
    'FtrlOptimizer': (
        'learning_rate, learning_rate_power=-0.5,'
        ' initial_accumulator_value=0.1, l1_regularization_strength=0.0,'
        f' l2_regularization_strength=0.0, {OPTIONS}, accum_name=None,'
        ' linear_name=None, l2_shrinkage_regularization_strength=0.0'
    ),
    'AdadeltaOptimizer': (
        f'learning_rate=0.001, rho=0.95, epsilon=1e-08, {OPTIONS}'
    ),
    'LARSOptimizer': (
        'learning_rate, momentum=0.9, weight_decay=0.0001, eeta=0.001,'
        " epsilon=0.0, name='LARSOptimizer', skip_list=None, use_nesterov=False"
    ),
    'AdamWOptimizer': (
        'weight_decay, learning_rate=0.001, beta1=0.9, beta2=0.999,'
        f' epsilon=1e-08, {OPTIONS}'
    ),
    'OptaxOptimizer': f'tx, {OPTIONS}',
    'CrossShardOptimizer': (
        "opt, reduction='weighted_mean', name='CrossShardOptimizer',"
        ' group_assignment=None'
    ),
    'TowerOptimizer': 'optimizer_or_optimizer_fn',
    'DropStaleGradientOptimizer': f'opt, staleness, {OPTIONS}',
    'SyncReplicasOptimizer': (
        'opt, replicas_to_aggregate, total_num_replicas=None,'
        ' variable_averages=None, variables_to_average=None,'
        " use_locking=False, name='sync_replicas'"
    ),
    'replicate_model_fn': (
        "model_fn, loss_reduction='weighted_sum_by_nonzero_weights',"
        ' devices=None'
    ),
    'shard': (
        'computation, inputs=None, num_shards=1, input_shard_axes=None,'
        ' outputs_from_all_shards=True, *, infeed_queue=None,'
        ' device_assignment=None, name=None'
    ),
}
METHODS = {
    'minimize': (
        'self, loss, global_step=None, var_list=None, gate_gradients=1,'
        ' aggregation_method=None, colocate_gradients_with_ops=False,'
        ' name=None, grad_loss=None, *, return_loss=False, has_aux=False'
    ),
    'compute_gradients': (
        'self, loss, var_list=None, gate_gradients=1, aggregation_method=None,'
        ' colocate_gradients_with_ops=False, grad_loss=None, *,'
        ' return_loss=False, has_aux=False'
    ),
    'apply_gradients': 'self, grads_and_vars, global_step=None, name=None',
    'get_slot': 'self, var, name',
    'get_slot_names': 'self',
    'get_name': 'self',
    'variables': 'self',
}
CONSTANTS = {
    'Reduction': {
        'NONE': 'none',
        'SUM': 'weighted_sum',
        'SUM_OVER_BATCH_SIZE': 'weighted_sum_over_batch_size',
        'MEAN': 'weighted_mean',
        'SUM_BY_NONZERO_WEIGHTS': 'weighted_sum_by_nonzero_weights',
        'SUM_OVER_NONZERO_WEIGHTS': 'weighted_sum_by_nonzero_weights',
    },
    'AggregationMethod': {
        'ADD_N': 0,
        'DEFAULT': 0,
        'EXPERIMENTAL_TREE': 1,
        'EXPERIMENTAL_ACCUMULATE_N': 2,
    },
    'ModeKeys': {'TRAIN': 'train', 'EVAL': 'eval', 'PREDICT': 'infer'},
    'Optimizer': {'GATE_NONE': 0, 'GATE_OP': 1, 'GATE_GRAPH': 2},
    'GraphKeys': {
        'GLOBAL_VARIABLES': 'variables',
        **{
            name.upper(): name
            for name in (
                *('trainable_variables', 'global_step', 'local_variables'),
                *('losses', 'moving_average_variables', 'summaries'),
                *('regularization_losses', 'train_op', 'update_ops'),
            )
        },
    },
}


def signature(of):
  """Returns a signature without its types."""
  parameters = [
      p.replace(annotation=inspect.Parameter.empty)
      for p in inspect.signature(of).parameters.values()
  ]
  return str(inspect.Signature(parameters))[1:-1]


class SignaturesTest(parameterized.TestCase):

  @cases.parameters(*SIGNATURES)
  def test_signature(self, name):
    expected = SIGNATURES[name].format(name.removesuffix('Optimizer'))
    self.assertEqual(signature(getattr(facade, name)), expected)

  @cases.parameters(*METHODS)
  def test_signature_of_methods(self, name):
    for kind in facade.Optimizer, facade.AdamOptimizer:
      self.assertEqual(signature(getattr(kind, name)), METHODS[name])

  @cases.parameters(*CONSTANTS)
  def test_constants(self, name):
    members = vars(getattr(facade, name)).items()

    self.assertEqual({n: v for n, v in members if n.isupper()}, CONSTANTS[name])

  def test_all_reductions_are_valid(self):
    keys = set(CONSTANTS['Reduction'].values())

    self.assertCountEqual(facade.Reduction.all(), keys)
    for key in keys:
      facade.Reduction.validate(key)
