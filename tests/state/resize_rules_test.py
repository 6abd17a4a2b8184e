"""Whole states are tested in resizing_test."""

from absl.testing import parameterized
import jax
from jax.sharding import PartitionSpec as P
import numpy as np

import cases
import modes
from shard_transforms._src.state import row_resizing
from shard_transforms.state_rules import Rule


def target(shape, spec=P(modes.AXIS), num_shards=4):
  sharding = jax.NamedSharding(modes.mesh(num_shards), spec)
  return jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding)


class RowsTest(parameterized.TestCase):

  @cases.product(num_shards=(2, 3, 4, 6, 7), dtype=(np.float32, np.int32))
  def test_a_mean_over_shards_stays(self, num_shards, dtype):
    old = np.arange(0, 840, 210).astype(dtype)
    new = target((num_shards,), num_shards=num_shards)

    merged = row_resizing.apply_rule(Rule(resize='mean'), 'leaf', old, new)

    self.assertEqual(merged.dtype, dtype)
    np.testing.assert_allclose(merged.mean(), old.mean(), rtol=1e-6)

  @cases.product(num_shards=(1, 3, 6), dtype=(np.float32, np.int32))
  def test_an_average_is_in_each_row(self, num_shards, dtype):
    old = np.arange(0, 840, 210).astype(dtype)
    new = target((num_shards,), num_shards=num_shards)
    weighted = Rule(resize='average', row_weights=np.array([0, 1, 0, 2]))
    unknown = Rule(resize='average', row_weights=np.zeros(4))

    for rule, want in (
        (Rule(resize='average'), 315),
        (unknown, 315),
        (weighted, 490),
    ):
      averaged = row_resizing.apply_rule(rule, 'leaf', old, new)

      self.assertEqual(averaged.dtype, dtype)
      np.testing.assert_array_equal(averaged, [want] * num_shards)

  @cases.product(num_shards=(2, 3, 8), dtype=(np.float32, np.int32))
  def test_each_row_gets_an_equal_share_of_the_sum(self, num_shards, dtype):
    old = np.arange(0, 840, 210).astype(dtype)
    new = target((num_shards,), num_shards=num_shards)
    weighted = Rule(resize='share', row_weights=np.array([1, 0, 0, 1]))

    for rule, total in ((Rule(resize='share'), 1260), (weighted, 630)):
      shared = row_resizing.apply_rule(rule, 'leaf', old, new)

      self.assertEqual(shared.dtype, dtype)
      want = np.full(num_shards, total / num_shards)
      np.testing.assert_allclose(shared, np.rint(want), atol=0.5)
      if dtype == np.float32:
        np.testing.assert_allclose(shared.sum(), total, rtol=1e-6)

  def test_an_average_is_of_finite_rows_and_keeps_their_bits(self):
    # Of which the mean would be rounded.
    alike = np.full((3, 2), 0.1)
    some = np.float32([[1, np.nan], [2, 4], [4, 8]])
    none = np.full((3, 2), np.nan, np.float32)
    rule = Rule(resize='average')

    averaged = [
        row_resizing.apply_rule(rule, 'leaf', old, target((4, 2)))
        for old in (alike, some, none)
    ]

    np.testing.assert_array_equal(averaged[0], [alike[0]] * 4)
    np.testing.assert_array_equal(averaged[1], [[3, 6]] * 4)
    self.assertTrue(np.isnan(averaged[2]).all())

  def test_gives_the_reason_of_a_state(self):
    old = np.ones((8, 2), np.float32)
    rule = Rule(resize='refuse', reason='{name} is of these shards.')

    with self.assertRaisesRegex(ValueError, r'^\.m is of these shards\.$'):
      row_resizing.apply_rule(rule, '.m', old, target((4, 2)))
