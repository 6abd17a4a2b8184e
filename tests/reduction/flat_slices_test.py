from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

import cases
from shard_transforms._src.reduction import flat_slices


class SlicesTest(parameterized.TestCase):

  @cases.product(shape=((9,), (3, 5), (2, 1, 4)), num_slices=(1, 2, 4, 8))
  def test_joins_what_it_has_cut(self, shape, num_slices):
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)

    cut = flat_slices.cut(x, num_slices)

    chex.assert_trees_all_equal(
        flat_slices.join(cut, x), jnp.asarray(x), strict=True
    )

  @cases.parameters(
      ((9,), 8, (8, 2)), ((3, 5), 4, (4, 1, 4)), ((2, 2, 2), 2, (2, 1, 1, 4))
  )
  def test_a_slice_keeps_the_rank(self, shape, num_slices, expected):
    cut = flat_slices.cut(np.ones(shape, np.float32), num_slices)

    self.assertEqual(cut.shape, expected)

  def test_puts_zeros_behind_the_last_element(self):
    cut = flat_slices.cut(np.arange(1, 6, dtype=np.float32), 4)

    np.testing.assert_array_equal(cut, [[1, 2], [3, 4], [5, 0], [0, 0]])

  @cases.parameters(
      ((8,), 'float32', 8, True),
      ((7,), 'float32', 8, True),
      ((), 'float32', 2, False),
      ((8,), 'bfloat16', 8, True),
      ((8,), 'complex64', 8, True),
      ((8,), 'int32', 8, False),
      ((8,), 'float32', 1, False),
      ((0, 3), 'float32', 2, False),
  )
  def test_cuts_what_has_a_gradient_and_an_axis(
      self, shape, dtype, num_slices, expected
  ):
    leaf = jax.ShapeDtypeStruct(shape, dtype)

    self.assertEqual(flat_slices.is_cut(leaf, num_slices), expected)
