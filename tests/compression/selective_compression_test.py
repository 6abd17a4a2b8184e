from absl.testing import absltest

from shard_transforms._src.compression import selective_compression


class SplitTest(absltest.TestCase):
  # The mean itself is tested through `compressed_mean` and `power_sgd`.

  def test_parts_are_of_leaves_that_are_there(self):
    tree = [3, None, 8, 1, 9]

    split = selective_compression.Split.of(tree, lambda x: x > 5)

    self.assertEqual(split.parts(tree), ([8, 9], [3, 1]))
    self.assertEqual(split.replace(tree, [0, 2], [5, 7]), [5, None, 0, 7, 2])
