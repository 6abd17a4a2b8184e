"""Tests of `majority_vote`: signs, votes, ties, and one bit per element."""

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

import cases
import lying_shards
import modes
import shard_transforms as st
from shard_transforms import contrib

AXIS = modes.AXIS
VOTE = contrib.majority_vote(AXIS)


def winners(x):
  return np.where(2 * np.sum(x < 0, axis=0) > len(x), -1, 1)


class MajorityVoteTest(parameterized.TestCase):

  @cases.parameters(('shard_map', 8), ('shard_map', 5), ('pmap', 1))
  def test_returns_the_sign_of_most_shards(self, mode, num_shards):
    updates = lying_shards.tree(num_shards)

    found = lying_shards.aggregated(VOTE, mode, updates, None, num_shards)

    for name, x in updates.items():
      for of_shard in found[name]:
        np.testing.assert_array_equal(of_shard, winners(x))

  def test_shards_of_weight_zero_have_no_vote(self):
    weight = np.float32([3, 0, 1, 0, 2, 1, np.nan, 0.5])
    updates = lying_shards.tree()

    found = lying_shards.aggregated(VOTE, 'shard_map', updates, weight)

    for name, x in updates.items():
      left = winners(x[[0, 2, 4, 5, 7]])
      np.testing.assert_array_equal(found[name], np.stack([left] * 8))

  def test_one_shard_equals_several_that_agree(self):
    update = np.float32([[1e-40, -0.0, np.nan, -np.inf, -3.3]])

    one, three = (
        lying_shards.aggregated(
            VOTE, 'shard_map', np.concatenate([update] * n), num_shards=n
        )[0]
        for n in (1, 3)
    )

    np.testing.assert_array_equal(one, three)
    np.testing.assert_array_equal(one, [1, 1, 1, -1, -1])

  def test_without_any_vote_the_update_is_zero(self):
    weight = np.zeros(8, np.float32)

    found = lying_shards.aggregated(
        VOTE, 'shard_map', lying_shards.tree(), weight
    )

    for x in found.values():
      np.testing.assert_array_equal(x, np.zeros_like(x))

  def test_zeros_nan_and_ties_are_positive(self):
    sign = np.float32([1, -1] * 4)
    updates = np.stack([0 * sign, np.nan * sign, sign, -1 - 0 * sign], axis=1)

    found = lying_shards.aggregated(VOTE, 'shard_map', updates)

    np.testing.assert_array_equal(found[0], [1, 1, 1, -1])

  def test_sends_one_bit_per_element_each_way(self):
    grads = jax.ShapeDtypeStruct((8 * 8 * 1000,), jnp.float32)

    def sent(weight):
      return st.monitoring.communication_report(
          lambda u: VOTE.update(u, VOTE.init(u), weight=weight)[0],
          grads,
          axis_sizes={AXIS: 8},
      ).total_bytes

    self.assertEqual(sent(None), 2 * 8000 * 7 / 8)
    # And one byte from each shard to each other shard, and one byte back.
    self.assertEqual(sent(1.0), 2 * (8000 * 7 / 8 + 7))
