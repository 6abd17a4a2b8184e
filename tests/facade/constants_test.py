from absl.testing import parameterized

import cases
from shard_transforms import facade


def members(kind):
  return {n: v for n, v in vars(kind).items() if n.isupper()}


class ConstantsTest(parameterized.TestCase):

  # The values of TensorFlow 1.15, which code may have written down.
  @cases.parameters(
      (
          facade.Reduction,
          {
              'NONE': 'none',
              'SUM': 'weighted_sum',
              'SUM_OVER_BATCH_SIZE': 'weighted_sum_over_batch_size',
              'MEAN': 'weighted_mean',
              'SUM_BY_NONZERO_WEIGHTS': 'weighted_sum_by_nonzero_weights',
              'SUM_OVER_NONZERO_WEIGHTS': 'weighted_sum_by_nonzero_weights',
          },
      ),
      (
          facade.AggregationMethod,
          {
              'ADD_N': 0,
              'DEFAULT': 0,
              'EXPERIMENTAL_TREE': 1,
              'EXPERIMENTAL_ACCUMULATE_N': 2,
          },
      ),
      (
          facade.ModeKeys,
          {'TRAIN': 'train', 'EVAL': 'eval', 'PREDICT': 'infer'},
      ),
      (
          facade.GraphKeys,
          {
              'GLOBAL_VARIABLES': 'variables',
              'TRAINABLE_VARIABLES': 'trainable_variables',
              'GLOBAL_STEP': 'global_step',
              'LOCAL_VARIABLES': 'local_variables',
              'LOSSES': 'losses',
              'MOVING_AVERAGE_VARIABLES': 'moving_average_variables',
              'REGULARIZATION_LOSSES': 'regularization_losses',
              'SUMMARIES': 'summaries',
              'TRAIN_OP': 'train_op',
              'UPDATE_OPS': 'update_ops',
          },
      ),
  )
  def test_have_the_values_of_tensorflow(self, kind, expected):
    self.assertEqual(members(kind), expected)

  def test_all_reductions_are_valid(self):
    self.assertCountEqual(
        facade.Reduction.all(), set(members(facade.Reduction).values())
    )
    for key in facade.Reduction.all():
      facade.Reduction.validate(key)

  @cases.parameters('mean', 'MEAN', '', None)
  def test_others_are_not(self, key):
    with self.assertRaisesRegex(
        ValueError, f'Invalid Reduction: {key!r}. Use one of'
    ):
      facade.Reduction.validate(key)
