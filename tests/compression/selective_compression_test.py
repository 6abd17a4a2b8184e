from absl.testing import absltest
import jax

from shard_transforms._src.compression import selective_compression


class SelectiveCompressionTest(absltest.TestCase):
  # The mean itself is tested through `compressed_mean` and `power_sgd`.

  def test_chooses_positions_of_leaves_that_are_there(self):
    found = selective_compression.choose([3, None, 8, 1, 9], lambda x: x > 5)

    self.assertEqual(found, ([2, 4], [0, 3]))

  def test_turns_fields_of_leaves_into_trees(self):
    treedef = jax.tree.structure({'a': 0, 'b': (0, 0)})

    found = selective_compression.by_field(
        treedef, [(1, 2), None, (3, 4)], num_fields=2
    )

    self.assertEqual(
        found, [{'a': 1, 'b': (None, 3)}, {'a': 2, 'b': (None, 4)}]
    )
