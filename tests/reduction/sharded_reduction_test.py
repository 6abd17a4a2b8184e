"""Reduce-scatter and all-gather of trees: parts, the whole, and bytes."""

from unittest import mock

from absl.testing import parameterized
import chex
import jax
import numpy as np

import cases
import modes
import reductions
import shard_transforms as st
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.reduction import collectives
from shard_transforms._src.reduction import leaf_sums
from shard_transforms._src.reduction import sharded_reduction

WEIGHT = np.array([3, 1, 0, 5, 1, 2, 7, 4], np.float32)


def whole_and_sharded(kind='mean', **options):
  args = 'caller', kind, (modes.AXIS,)
  return (
      leaf_sums.Reduction(*args, **options),
      sharded_reduction.ShardedReduction(*args, **options),
  )


def grads_of(params, data):
  grad = st.value_and_grad(reductions.loss, modes.AXIS)
  return grad(params, data)[1]


class ShardedReductionTest(parameterized.TestCase):

  @cases.parameters(*modes.MAPPED, fast='shard_map')
  def test_slices_of_all_shards_are_the_whole(self, mode):
    def shard(params, own):
      data, weight = own
      grads = grads_of(params, data)
      results = []
      for groups in None, reductions.GROUPS:
        whole, sharded = whole_and_sharded(groups=groups)
        slices = sharded.scatter(grads, weight)
        results.append((whole(grads, weight), sharded.gather(slices, grads)))
      return results

    results = modes.map_shards(mode, shard)(
        reductions.make_params(), (reductions.make_params((8,)), WEIGHT)
    )

    for expected, joined in results:
      # The sum is in another order.
      chex.assert_trees_all_close(joined, expected, rtol=1e-2, atol=1e-2)
      chex.assert_trees_all_equal_shapes_and_dtypes(joined, expected)

  @cases.parameters(*modes.MAPPED, fast='shard_map')
  def test_columns_and_then_rows_of_shards_give_the_same_slices(self, mode):
    shapes = {'large': (128, 96), 'row': (3, 5), 'small': (9,), 'scalar': ()}
    params = {name: np.ones(shape, 'f') for name, shape in shapes.items()}
    # The order of a sum of small integers does not matter.
    data = {
        name: (np.arange(8 * x.size, dtype='f') % 7).reshape(8, *x.shape)
        for name, x in params.items()
    }

    def slices():
      _, sharded = whole_and_sharded()
      return modes.map_shards(
          mode, lambda params, own: sharded.scatter(grads_of(params, own))
      )(params, data)

    expected = slices()
    with (
        mock.patch.object(axes_lib, 'platform', lambda: 'tpu'),
        mock.patch.object(collectives, '_LEAST_SHARDS', 8),
        mock.patch.object(
            *(collectives, '_scatter_in_two'),
            wraps=collectives._scatter_in_two,
        ) as scatter,
    ):
      found = slices()

    chex.assert_trees_all_equal(found, expected, strict=True)
    # JAX has no groups of a `vmap`.
    self.assertEqual(scatter.called, mode != 'vmap')

  @cases.parameters(*modes.MAPPED)
  def test_columns_that_are_not_tiles_are_in_the_same_slices(self, mode):
    # Large enough to be sent along its columns, 40 or 128 for each shard.
    for num_columns in 320, 1024:
      params = np.ones((129, num_columns), 'f')
      # The order of a sum of small integers does not matter.
      data = (np.arange(8 * params.size, dtype='f') % 7).reshape(8, 129, -1)

      def slices(params=params, data=data):
        _, sharded = whole_and_sharded()
        return modes.map_shards(
            mode, lambda params, own: sharded.scatter(grads_of(params, own))
        )(params, data)

      expected = slices()
      with (
          mock.patch.object(axes_lib, 'platform', lambda: 'tpu'),
          mock.patch.object(
              *(collectives, 'scatter_along'),
              wraps=collectives.scatter_along,
          ) as scatter,
      ):
        slices_on_tpus = slices()

      chex.assert_trees_all_equal(slices_on_tpus, expected, strict=True)
      (leaf, *_), _ = scatter.call_args
      self.assertEqual(leaf.ndim, 3 if num_columns == 320 else 2)

  @cases.product(groups=(None, reductions.GROUPS))
  def test_each_shard_has_its_part_of_the_elements(self, groups):
    _, sharded = whole_and_sharded('sum', groups=groups)
    x = np.arange(24.0).reshape(8, 3, 1) * np.ones(5)
    members = [range(8)] if groups is None else groups
    rank = {i: rank for group in members for rank, i in enumerate(group)}

    own = modes.map_shards(
        'shard_map', lambda _, x: (sharded.scatter(x), sharded.own(x))
    )(0, x)

    for group in members:
      # Both dimensions are short: all elements are one row.
      end = [(0, 0), (0, -15 % len(group))]
      summed = x[list(group)].sum(0)
      for i in group:
        for part, whole in zip(own, (summed, x[i]), strict=True):
          row = np.pad(whole.reshape(1, 15), end)
          slices = np.split(row, len(group), 1)
          np.testing.assert_array_equal(part[i], slices[rank[i]])

  def test_sends_slices_once_and_scalars_whole(self):
    _, sharded = whole_and_sharded()
    params = {'w': np.ones((3, 5)), 'v': np.ones(7), 'b': np.ones(())}

    def shard(params, data):
      grads = grads_of(params, data)
      return sharded.gather(sharded.scatter(grads), grads)

    sent = reductions.count_sent(
        modes.map_shards('shard_map', shard),
        params,
        jax.tree.map(lambda x: np.stack([x] * 8), params),
    )

    self.assertEqual(sent, {'reduce_scatter': 1, 'all_gather': 1, 'psum': 1})
