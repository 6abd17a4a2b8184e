from absl.testing import absltest

from shard_transforms._src.compression import selective_compression


class SelectiveCompressionTest(absltest.TestCase):
  # The mean itself is tested through `compressed_mean` and `power_sgd`.

  def test_chooses_positions_of_leaves_that_are_there(self):
    found = selective_compression.choose([3, None, 8, 1, 9], lambda x: x > 5)

    self.assertEqual(found, ([2, 4], [0, 3]))
