"""What `resize_state` makes of whole states is in resizing_test."""

from absl.testing import parameterized
import jax
from jax.sharding import PartitionSpec as P
import numpy as np

import modes
from shard_transforms._src.state import resize_rules


def target(shape, spec=P(modes.AXIS), num_shards=4):
  sharding = jax.NamedSharding(modes.mesh(num_shards), spec)
  return jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding)


class RowsTest(parameterized.TestCase):

  @parameterized.parameters(
      (np.sum, 0, 3, [3, 12, 13]),
      (np.max, -1, 3, [2, 5, 7]),
      (np.min, 9, 3, [0, 3, 6]),
      (np.sum, 0, 8, [0, 1, 2, 3, 4, 5, 6, 7]),
  )
  def test_merges_neighbours(self, combine, empty, num_shards, expected):
    old = np.arange(8, dtype=np.float32)
    new = target((num_shards,), num_shards=num_shards)

    merged = resize_rules.merge(combine, empty, 'leaf', old, new)

    np.testing.assert_array_equal(merged, expected)
    self.assertEqual(merged.dtype, old.dtype)

  def test_adds_empty_rows(self):
    old = np.ones((3, 2), np.float32)

    merged = resize_rules.merge(np.max, -1, 'leaf', old, target((4, 2)))

    np.testing.assert_array_equal(merged, [[1, 1]] * 3 + [[-1, -1]])

  @parameterized.parameters(('mean', 0.5), ('sum', 1.0))
  def test_keeps_what_a_reduction_makes_of_rows(self, reduction, factor):
    old = np.arange(8, dtype=np.float32)

    merged = resize_rules.merge_unweighted(reduction, 'leaf', old, target((4,)))

    np.testing.assert_array_equal(merged, factor * np.float32([1, 5, 9, 13]))

  def test_cuts_anew(self):
    old = np.arange(16, dtype=np.float32).reshape(8, 1, 2)

    cut = resize_rules.cut_anew('leaf', old, target((4, 1, 4)))

    np.testing.assert_array_equal(cut.ravel(), range(16))

  @parameterized.parameters(
      (resize_rules.cut_anew, (8, 1, 2), (4, 1, 5)),
      (resize_rules.cut_anew, (8, 2, 2), (4, 1, 8)),
      (resize_rules.refuse, (8, 2), (4, 3)),
      (lambda *leaf: resize_rules.merge(np.sum, 0, *leaf), (8, 2), (4, 3)),
  )
  def test_names_what_is_of_other_parameters(self, rule, old, new):
    with self.assertRaisesRegex(ValueError, r'made by .* at the leaf, which'):
      rule('the leaf', np.ones(old, np.float32), target(new))

  def test_names_what_it_does_not_know(self):
    old = np.ones((8, 2), np.float32)

    with self.assertRaisesRegex(ValueError, 'must know what .* at the leaf'):
      resize_rules.refuse('the leaf', old, target((4, 2)))
