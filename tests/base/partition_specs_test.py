from absl.testing import parameterized
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import cases
from shard_transforms._src.base import partition_specs


class SpecsTest(parameterized.TestCase):
  # What types and specs say of slices is tested through `global_norm`.

  @cases.parameters(
      (P(), ()),
      (P(None, None), ()),
      (P('a', None, 'b'), ('a', 'b')),
      (P(('a', 'b'), 'c'), ('a', 'b', 'c')),
  )
  def test_knows_the_axes_of_a_spec(self, spec, expected):
    self.assertEqual(partition_specs.axes_of(spec), set(expected))

  def test_knows_a_spec(self):
    self.assertTrue(partition_specs.is_spec(P()))
    self.assertFalse(partition_specs.is_spec(('m',)))

  def test_no_axis_slices_nothing(self):
    self.assertEqual(
        partition_specs.sliced_axes([jnp.ones(2)] * 2, (), None, 'caller'),
        [(), ()],
    )
