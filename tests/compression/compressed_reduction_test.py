from absl.testing import parameterized
import jax
import jax.numpy as jnp

import cases
import modes
from shard_transforms import compression

AXIS = modes.AXIS


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
    tx = compression.compressed_mean(
        AXIS, compression.scaled_sign(), min_elements=8
    )

    state = jax.vmap(lambda _: tx.init([leaf]), axis_name=AXIS)(jnp.zeros(2))

    self.assertEqual(state.residual[0] is not None, expected)
