from absl.testing import parameterized
import jax.numpy as jnp
import numpy as np

import cases
from shard_transforms._src.compression import counting as counting_lib
from shard_transforms._src.reduction import leaf_sums

X = jnp.array([1.0, 2.0])


def of(weight, total, num_shards=4):
  if weight is not None:
    weight, total = jnp.float32(weight), jnp.float32(total)
  share = leaf_sums.Share(weight, total)
  return counting_lib.Counting.of(share, num_shards)


class CountingTest(parameterized.TestCase):

  @cases.parameters((None, None, 1), (3, 6, 2), (0, 6, 0), (0, 0, 0))
  def test_weighs_for_an_unweighted_mean(self, weight, total, factor):
    found = of(weight, total).weigh(X.astype(jnp.bfloat16))

    np.testing.assert_array_equal(found, factor * X)
    self.assertEqual(found.dtype, jnp.float32)

  @cases.parameters(
      (None, None, True, True),
      (3, 6, True, True),
      (0, 6, False, True),
      (0, 0, False, False),
  )
  def test_keeps_what_does_not_count(self, weight, total, counts, any_counts):
    counting = of(weight, total)

    np.testing.assert_array_equal(counting.only(X), X if counts else 0 * X)
    np.testing.assert_array_equal(
        counting.only_of_any(X), X if any_counts else 0 * X
    )
    np.testing.assert_array_equal(counting.keep(X, -X), X if counts else -X)
    np.testing.assert_array_equal(
        counting.keep_of_any(X, -X), X if any_counts else -X
    )

  def test_nan_does_not_count_at_weight_zero(self):
    np.testing.assert_array_equal(of(0, 6).weigh(X * jnp.nan), 0)
