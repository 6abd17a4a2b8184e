import itertools

from absl.testing import parameterized
import numpy as np

import cases
from shard_transforms._src.aggregators import sorting_network


class SortingNetworkTest(parameterized.TestCase):

  @cases.parameters(*range(1, 13))
  def test_sorts_all_zeros_and_ones_and_so_everything(self, num_rows):
    rows = np.array(list(itertools.product((0.0, 1.0), repeat=num_rows))).T
    expected = np.sort(rows, axis=0)

    for i, j in sorting_network.comparisons(num_rows):
      rows[i], rows[j] = np.minimum(rows[i], rows[j]), np.maximum(
          rows[i], rows[j]
      )

    np.testing.assert_array_equal(rows, expected)

  def test_eight_rows_take_nineteen_comparisons(self):
    self.assertLen(list(sorting_network.comparisons(8)), 19)

  @cases.parameters(1, 8, 40)
  def test_sorts_each_element_alone(self, num_rows):
    rows = np.random.default_rng(0).normal(size=(num_rows, 2, 3))
    rows = rows.astype('float32')
    rows[0, 0, 0] = np.inf

    found = sorting_network.sort(rows)

    np.testing.assert_array_equal(np.stack(found), np.sort(rows, axis=0))
