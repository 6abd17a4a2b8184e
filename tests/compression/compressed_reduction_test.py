from absl.testing import parameterized
import jax
import jax.numpy as jnp

import cases
import modes
from shard_transforms import compression
from shard_transforms._src.compression import compressed_reduction

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


class SplitTest(parameterized.TestCase):
  # The mean itself is tested through `compressed_mean` and `power_sgd`.

  def test_parts_are_of_leaves_that_are_there(self):
    tree = [3, None, 8, 1, 9]

    split = compressed_reduction.Split.of(tree, lambda x: x > 5)

    self.assertEqual(split.parts(tree), ([8, 9], [3, 1]))
    self.assertEqual(split.replace(tree, [0, 2], [5, 7]), [5, None, 0, 7, 2])
