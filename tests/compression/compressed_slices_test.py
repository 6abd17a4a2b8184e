from absl.testing import parameterized
import jax.numpy as jnp

import cases
from shard_transforms import compression
from shard_transforms._src.compression import compressed_slices
from shard_transforms._src.reduction import reduction_options
from shard_transforms._src.reduction import sharded_reduction


class CompressedSlicesTest(parameterized.TestCase):
  # What is sent is tested through `compressed_shard_update`.

  @cases.parameters(
      (jnp.zeros((2, 4)), True),
      (jnp.zeros(1), True),
      (jnp.zeros([]), False),
      (jnp.zeros((0, 3)), False),
      (jnp.zeros(8, jnp.complex64), False),
      (None, False),
  )
  def test_compresses_real_leaves_that_are_cut(self, leaf, expected):
    axes = ('data',)
    slices = compressed_slices.CompressedSlices(
        reduction_options.ReductionOptions('tx', 'mean', axes),
        0,
        0,
        compression.scaled_sign(),
        'residual',
        1,
        sharded_reduction.ShardedReduction('tx', 'mean', axes),
        None,
    )

    self.assertEqual(slices.compresses(leaf), expected)
