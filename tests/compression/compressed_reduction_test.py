from absl.testing import parameterized
import jax.numpy as jnp

import cases
from shard_transforms import compression
from shard_transforms._src.compression import compressed_reduction
from shard_transforms._src.reduction import reduction_options


class CompressedReductionTest(parameterized.TestCase):

  @cases.parameters(
      (jnp.zeros(8), True),
      (jnp.zeros((2, 4), jnp.bfloat16), True),
      (jnp.zeros(7), False),
      (jnp.zeros(80, jnp.complex64), False),
      (jnp.zeros(80, jnp.int32), False),
      (None, False),
  )
  def test_compresses_large_real_leaves(self, leaf, expected):
    reduction = compressed_reduction.CompressedReduction(
        reduction_options.ReductionOptions('tx', 'mean', ('data',)),
        0,
        0,
        compression.scaled_sign(),
        'residual',
        8,
    )

    self.assertEqual(reduction.compresses(leaf), expected)
