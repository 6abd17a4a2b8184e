"""Tests of `coordinate_median` and `trimmed_mean` against NumPy."""

import itertools

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

import cases
import lying_shards
import modes
import shard_transforms as st
from shard_transforms import contrib

AXIS = modes.AXIS
MEDIAN = contrib.coordinate_median(AXIS)


def trimmed(values, num_trimmed):
  kept = np.sort(values, axis=0)[num_trimmed : len(values) - num_trimmed]
  return kept.mean(0)


class OrderStatisticsTest(parameterized.TestCase):

  @cases.parameters(8, 5, fast='5')
  def test_equals_numpy(self, num_shards):
    updates = lying_shards.tree(num_shards)

    for tx, expected in (
        (MEDIAN, lambda x: np.median(x, 0)),
        (contrib.trimmed_mean(AXIS, 1), lambda x: trimmed(x, 1)),
        (contrib.trimmed_mean(AXIS, 0), lambda x: trimmed(x, 0)),
    ):
      found = lying_shards.aggregated(
          tx, 'shard_map', updates, num_shards=num_shards
      )
      for name, x in updates.items():
        np.testing.assert_allclose(found[name][0], expected(x), rtol=3e-6)
      chex.assert_trees_all_equal(
          found, jax.tree.map(lambda x: np.stack([x[0]] * num_shards), found)
      )

  def test_shards_of_weight_zero_are_left_out(self):
    weight = np.float32([3, 0, 1, 0, 2, 1, np.nan, 0.5])
    updates = lying_shards.tree()
    lies = jax.tree.map(lambda x: x.copy(), updates)
    for x in lies.values():
      x[[1, 3]] = np.nan
    left = jax.tree.map(lambda x: x[[0, 2, 4, 5, 7]], updates)

    for tx, expected in (
        (MEDIAN, lambda x: np.median(x, 0)),
        (contrib.trimmed_mean(AXIS, 1), lambda x: trimmed(x, 1)),
        # Trimming stops when one of the five values is left.
        (contrib.trimmed_mean(AXIS, 3), lambda x: np.median(x, 0)),
    ):
      found = lying_shards.aggregated(tx, 'shard_map', lies, weight)
      for name, x in left.items():
        np.testing.assert_allclose(found[name][0], expected(x), rtol=3e-6)

  def test_without_any_weight_the_update_is_zero(self):
    updates = {'w': np.full([8, 3], np.nan, np.float32)}

    for tx in MEDIAN, contrib.trimmed_mean(AXIS, 2):
      found = lying_shards.aggregated(
          tx, 'shard_map', updates, np.zeros(8, np.float32)
      )
      np.testing.assert_array_equal(found['w'], np.zeros([8, 3]))

  def test_three_faulty_shards_of_eight_are_bounded_by_the_others(self):
    good = np.random.default_rng(1).normal(size=(8, 2)).astype('float32')
    liars = [
        list(subset)
        for size in (1, 2, 3)
        for subset in itertools.combinations(range(8), size)
    ]
    # One element for each subset, each kind of fault, and each correct value.
    values = np.repeat(good[:, None, None], len(liars), axis=1)
    values = np.repeat(values, len(lying_shards.LIES) + 1, axis=2)
    for i, subset in enumerate(liars):
      for j, lie in enumerate(lying_shards.LIES.values()):
        values[subset, i, j] = lie
      mixed = list(lying_shards.LIES.values())[: len(subset)]
      values[subset, i, -1] = np.float32(mixed)[:, None]
    weight = np.ones(8, np.float32)

    found = {
        name: lying_shards.aggregated(tx, 'shard_map', values, weight)[0]
        for name, tx in (
            ('median', MEDIAN),
            ('trimmed', contrib.trimmed_mean(AXIS, 3)),
        )
    }

    for i, subset in enumerate(liars):
      others = np.delete(good, subset, axis=0)
      for x in found.values():
        self.assertTrue(np.all(x[i] >= others.min(0)), subset)
        self.assertTrue(np.all(x[i] <= others.max(0)), subset)
      # The bound of the paper: the order statistics of the correct shards.
      rank = len(subset)
      low, high = np.sort(others, 0)[[3 - rank, len(others) - 4 + rank]]
      self.assertTrue(np.all(found['median'][i] >= low), subset)
      self.assertTrue(np.all(found['median'][i] <= high), subset)

  def test_nan_is_left_out_of_each_element(self):
    updates = np.random.default_rng(0).normal(size=(8, 9)).astype('float32')
    for num_nan in range(9):
      updates[:num_nan, num_nan] = np.nan

    for tx, expected in (
        (MEDIAN, np.median),
        (
            contrib.trimmed_mean(AXIS, 2),
            lambda x: trimmed(x, min(2, (len(x) - 1) // 2)),
        ),
    ):
      found = lying_shards.aggregated(tx, 'shard_map', updates)[0]
      wanted = [expected(updates[n:, n]) for n in range(8)] + [0]
      np.testing.assert_allclose(found, wanted, rtol=3e-6)

  def test_one_shard_is_the_exact_identity(self):
    updates = np.float32([[1e-40, -0.0, np.nan, -np.inf, 3.3]])

    for tx in MEDIAN, contrib.trimmed_mean(AXIS, 0):
      found = lying_shards.aggregated(tx, 'shard_map', updates, None, 1)
      np.testing.assert_array_equal(
          found.view(np.uint32), updates.view(np.uint32)
      )

  def test_equal_values_keep_their_bits(self):
    value = np.float32([3e38, -3e38, 2e-38, 0.1, np.inf])
    updates = {'w': np.stack([value] * 8)}

    found = lying_shards.aggregated(MEDIAN, 'shard_map', updates)

    np.testing.assert_array_equal(found['w'], updates['w'])

  @cases.parameters(0, 1)
  def test_sends_the_bytes_of_an_all_reduce(self, num_trimmed):
    grads = [jax.ShapeDtypeStruct((8 * 4096,), jnp.float32)] * 3
    grads.append(jax.ShapeDtypeStruct((16,), jnp.float32))
    sent = {}
    for name, tx in {
        'mean': st.cross_shard_mean(AXIS),
        'median': MEDIAN,
        'trimmed': contrib.trimmed_mean(AXIS, num_trimmed),
    }.items():
      report = st.monitoring.communication_report(
          lambda u, tx=tx: tx.update(u, tx.init(u))[0],
          grads,
          axis_sizes={AXIS: 8},
      )
      sent[name] = report.total_bytes
      if name != 'mean':
        self.assertEqual(
            {c.primitive for c in report.collectives},
            {'all_to_all', 'all_gather'},
        )

    self.assertEqual(set(sent.values()), {sent['mean']})

  @cases.parameters((4, 2), (2, 5))
  def test_refuses_to_trim_half_of_the_shards(self, num_shards, num_trimmed):
    tx = contrib.trimmed_mean(AXIS, num_trimmed)

    with self.assertRaisesRegex(
        ValueError, rf'`num_trimmed` .* of the {num_shards} shards, got'
    ):
      lying_shards.aggregated(
          tx, 'shard_map', {'w': np.ones([num_shards, 3])}, None, num_shards
      )

  @cases.parameters((-1, ValueError), (1.5, TypeError), (True, TypeError))
  def test_refuses_a_bad_number(self, num_trimmed, error):
    with self.assertRaisesRegex(error, '`num_trimmed` must be'):
      contrib.trimmed_mean(AXIS, num_trimmed)

  @cases.parameters(*range(1, 9, 2), 8)
  def test_sorts_all_zeros_and_ones(self, num_shards):
    # This suffices by the 0-1 principle of sorting networks.
    rows = np.array(list(itertools.product((0.0, 1.0), repeat=num_shards))).T

    found = lying_shards.aggregated(
        MEDIAN, 'vmap', rows.astype('float32'), num_shards=num_shards
    )

    np.testing.assert_array_equal(found[0], np.median(rows, axis=0))
