from absl.testing import parameterized
import numpy as np

import cases
from shard_transforms._src.reduction import exchanges


class SmallIntegersTest(parameterized.TestCase):

  @cases.product(num_values=(8, 4, 2), lead=((), (3,), (2, 3)))
  def test_unpacks_what_is_packed(self, num_values, lead):
    most = 2 ** (8 // num_values)
    values = np.random.default_rng(0).integers(0, most, (*lead, 48))

    packed = exchanges.pack_integers(values, num_values)

    self.assertEqual(packed.shape, (*lead, 48 // num_values))
    self.assertEqual(packed.dtype, np.uint8)
    found = exchanges.unpack_integers(packed, num_values)
    np.testing.assert_array_equal(found, values)
