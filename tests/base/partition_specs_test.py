from absl.testing import parameterized
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from shard_transforms._src.base import partition_specs


class SpecsTest(parameterized.TestCase):
  # What types and specs say of slices is tested through `global_norm`.

  @parameterized.parameters(
      (P(), ()),
      (P(None, None), ()),
      (P('a', None, 'b'), ('a', 'b')),
      (P(('a', 'b'), 'c'), ('a', 'b', 'c')),
  )
  def test_knows_the_axes_of_a_spec(self, spec, expected):
    self.assertEqual(partition_specs.axes_of(spec), set(expected))

  def test_a_head_stands_for_all_below(self):
    tree = {'a': {'x': 1, 'y': [2, 3]}, 'b': 4, 'c': None}

    per_leaf = partition_specs.per_leaf(
        {'a': P('m'), 'b': P(), 'c': P('m')}, tree
    )

    self.assertEqual(
        per_leaf, {'a': {'x': P('m'), 'y': [P('m')] * 2}, 'b': P(), 'c': None}
    )
    self.assertTrue(partition_specs.is_spec(per_leaf['b']))
    self.assertFalse(partition_specs.is_spec(('m',)))

  def test_no_axis_slices_nothing(self):
    self.assertEqual(
        partition_specs.sliced_axes([jnp.ones(2)] * 2, (), None, 'caller'),
        [(), ()],
    )
