"""The effect of rules is tested with the functions that use them."""

from absl.testing import absltest
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np

import modes
from shard_transforms._src.base import state_rules
from shard_transforms.state_rules import MetricRule
from shard_transforms.state_rules import ResizeRule


class ResizeRuleTest(absltest.TestCase):

  def test_keeps_by_default(self):
    self.assertEqual(ResizeRule(), ResizeRule('keep'))

  def test_refuses_an_unknown_kind(self):
    with self.assertRaisesRegex(ValueError, "`kind` must be one of .*'median'"):
      ResizeRule('median')


class MetricRuleTest(absltest.TestCase):

  def test_is_the_same_on_all_shards_by_default(self):
    self.assertEqual(MetricRule(), MetricRule('same'))

  def test_refuses_an_unknown_kind(self):
    with self.assertRaisesRegex(ValueError, "`kind` must be one of .*'median'"):
      MetricRule('median')


class AddressableTest(absltest.TestCase):

  def test_pieces_say_where_they_start(self):
    x = np.arange(16).reshape(8, 2)
    sharding = jax.NamedSharding(modes.mesh(4), P(modes.AXIS))

    pieces = list(state_rules.parts_here(jax.device_put(x, sharding)))

    self.assertEqual([start for start, _ in pieces], [0, 2, 4, 6])
    np.testing.assert_array_equal(
        np.concatenate([piece for _, piece in pieces]), x
    )

  def test_an_array_of_numpy_is_one_piece(self):
    ((start, piece),) = state_rules.parts_here(np.arange(3))

    self.assertEqual(start, 0)
    np.testing.assert_array_equal(piece, [0, 1, 2])

  def test_largest_of_all_pieces(self):
    sharding = jax.NamedSharding(modes.mesh(4), P(modes.AXIS))

    self.assertEqual(state_rules.largest_here(np.int32(3)), 3)
    self.assertEqual(
        state_rules.largest_here(
            jax.device_put(jnp.array([1, 9, 4, 2]), sharding)
        ),
        9,
    )
