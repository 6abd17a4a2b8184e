from absl.testing import parameterized
import chex
import jax.numpy as jnp
import numpy as np

import cases
from shard_transforms._src.base import counters


class CountersTest(parameterized.TestCase):

  @cases.parameters(
      (0, 1, 1),
      (5, 0, 5),
      (5, 3.0, 8),
      (5, np.True_, 6),
      (5, False, 5),
      (counters.MAX - 1, 1, counters.MAX),
      (counters.MAX, 1, counters.MAX),
      (counters.MAX - 2, 8, counters.MAX),
  )
  def test_counts_up_to_the_largest_int32(self, counter, number, expected):
    counted = counters.add(jnp.int32(counter), jnp.asarray(number))

    chex.assert_trees_all_equal(counted, jnp.int32(expected), strict=True)
