from unittest import mock

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import thresholds
from shard_transforms._src.reduction import bucketing

# Of all ranks, none like its neighbour, and more than one buffer holds.
SHAPES = [(), (1,), (3, 5), (7,), (2, 1, 4)] * 9


def _leaves(shapes, dtype=np.float32):
  """Returns arrays in which no number comes twice."""
  ends = np.cumsum([int(np.prod(shape)) for shape in shapes])
  return [
      np.arange(end - np.prod(shape), end).astype(dtype).reshape(shape)
      for end, shape in zip(ends, shapes, strict=True)
  ]


def _measured(between_processes=False):
  """Returns the steps in which leaves are packed on CPU devices."""
  with mock.patch.object(
      axes_lib, 'between_processes', return_value=between_processes
  ):
    return thresholds.measured().buffers


def _of(num_bytes):
  """Returns one step, in buffers of up to so many bytes."""
  return (thresholds.Level(num_bytes, num_bytes),)


CPU, PROCESSES = _measured(), _measured(between_processes=True)


def _map_doubled(leaves, keys, levels):
  """Doubles the leaves; returns the arrays and keys that were sent as well."""
  sent = []

  def double(array, key):
    sent.append((array, key))
    return 2 * array

  return bucketing.map_packed(double, leaves, keys, levels), sent


def _sent(leaves, levels):
  """Returns the arrays that are sent of leaves with one key."""
  sent = _map_doubled(leaves, [0] * len(leaves), levels)[1]
  return [array for array, _ in sent]


class MapPackedTest(parameterized.TestCase):

  @pytest.mark.slow
  def test_between_processes_all_of_a_kind_travels_together(self):
    leaves = _leaves([*SHAPES, (300, 1000), *100 * [(40_000,)], (5,)])
    leaves[1::3] = [x.astype(jnp.bfloat16) for x in leaves[1::3]]
    keys = [x.dtype for x in leaves]

    results, sent = _map_doubled(leaves, keys, PROCESSES)

    self.assertCountEqual([a.dtype for a, _ in sent], set(keys))
    self.assertEqual(sum(a.size for a, _ in sent), sum(x.size for x in leaves))
    chex.assert_trees_all_equal(results, [2 * x for x in leaves], strict=True)

  def test_between_processes_buffers_are_bounded(self):
    leaves = [np.zeros(2**20, np.float32)] * 40  # 160 MiB in leaves of 4.

    sizes = [a.nbytes for a in _sent(leaves, PROCESSES)]

    self.assertEqual(sizes, [64 * 2**20, 64 * 2**20, 32 * 2**20])

  @cases.parameters((), _of(64), _of(10**9), CPU, PROCESSES)
  @pytest.mark.slow_after(4)
  def test_rows_are_packed_side_by_side(self, *levels):
    shapes = [(3, *shape) for shape in SHAPES]
    leaves = list(map(jnp.asarray, _leaves(shapes)))

    results = bucketing.map_packed(
        lambda rows, _: rows[1],
        leaves,
        [0] * len(leaves),
        levels,
        num_rows=3,
    )

    chex.assert_trees_all_equal(results, [x[1] for x in leaves], strict=True)

  @cases.parameters((), _of(64), _of(10**9), CPU, PROCESSES)
  @pytest.mark.slow_after(4)
  def test_rows_come_of_what_is_packed(self, *levels):
    leaves = list(map(jnp.asarray, _leaves(SHAPES)))

    results = bucketing.map_packed(
        lambda row, _: jnp.stack([row, 2 * row]),
        leaves,
        [0] * len(leaves),
        levels,
        growth=2,
    )

    expected = [jnp.stack([x, 2 * x]) for x in leaves]
    chex.assert_trees_all_equal(results, expected, strict=True)

  @cases.parameters((), _of(1), _of(28), _of(64), _of(10**9), CPU, PROCESSES)
  @pytest.mark.slow_after(3)
  def test_results_are_those_of_each_leaf_alone(self, *levels):
    leaves = _leaves(SHAPES)
    leaves[1::3] = _leaves(SHAPES[1::3], jnp.bfloat16)
    leaves[2::3] = _leaves(SHAPES[2::3], np.complex64)

    results, _ = _map_doubled(leaves, [x.dtype for x in leaves], levels)

    chex.assert_trees_all_equal(results, [2 * x for x in leaves], strict=True)

  @cases.parameters(_of(64), _of(10**9), CPU)
  def test_a_buffer_holds_leaves_of_one_key(self, *levels):
    keys = ['ab'[i % 2] for i in range(len(SHAPES))]
    leaves = [
        np.full(shape, ord(key), np.float32)
        for shape, key in zip(SHAPES, keys, strict=True)
    ]

    _, sent = _map_doubled(leaves, keys, levels)

    self.assertLess(len(sent), len(leaves))
    for array, key in sent:
      chex.assert_trees_all_equal(np.unique(array), np.float32([ord(key)]))

  @cases.parameters(_of(64), _of(100), _of(10**9), CPU)
  def test_buffers_keep_the_order_of_the_leaves(self, *levels):
    leaves = _leaves(SHAPES)

    sent = _sent(leaves, levels)

    self.assertLess(len(sent), len(leaves))
    chex.assert_trees_all_equal(
        np.concatenate([np.ravel(array) for array in sent]),
        np.concatenate([leaf.ravel() for leaf in leaves]),
        strict=True,
    )

  @cases.product(num_bytes=(61, 64, 100), itemsize=(2, 4))
  @pytest.mark.slow_after(1)
  def test_a_buffer_holds_no_more_than_its_size(self, num_bytes, itemsize):
    leaves = _leaves(SHAPES, f'float{8 * itemsize}')

    sizes = [array.nbytes for array in _sent(leaves, _of(num_bytes))]

    self.assertLess(len(sizes), len(leaves))
    self.assertLessEqual(max(sizes), num_bytes)

  def test_leaves_may_fill_a_buffer_to_the_last_byte(self):
    leaves = _leaves([(5,), (2, 4), (3,)])

    sizes = [array.size for array in _sent(leaves, _of(64))]

    self.assertEqual(sizes, [16])

  @cases.parameters((), _of(1), _of(4))
  def test_no_leaf_is_smaller_than_a_buffer_this_small(self, *levels):
    leaves = _leaves(SHAPES)

    for leaf, array in zip(leaves, _sent(leaves, levels), strict=True):
      self.assertIs(array, leaf)

  def test_a_leaf_of_the_size_of_a_buffer_travels_as_it_is(self):
    leaves = _leaves([(2,), (4, 4), (3,), (5, 5)])

    whole_1, whole_2, buffer = sorted(
        _sent(leaves, _of(64)), key=lambda array: -array.ndim
    )

    self.assertIs(whole_1, leaves[1])
    self.assertIs(whole_2, leaves[3])
    chex.assert_trees_all_equal(
        buffer, jnp.concatenate([leaves[0], leaves[2]]), strict=True
    )

  def test_a_small_leaf_without_company_travels_as_it_is(self):
    leaves = _leaves([(2, 3), (1, 2)])

    _, sent = _map_doubled(leaves, ['a', 'b'], _of(10**9))

    self.assertIs(sent[0][0], leaves[0])
    self.assertIs(sent[1][0], leaves[1])

  def test_no_leaves_are_no_results(self):
    self.assertEqual(_map_doubled([], [], CPU), ([], []))

  @cases.parameters(_of(10**9), CPU)
  def test_a_buffer_holds_at_most_32_leaves(self, *levels):
    counts = [array.size for array in _sent(_leaves([()] * 999), levels)]

    self.assertLessEqual(max(counts), 32)
    self.assertEqual(sum(counts), 999)

  @cases.parameters(
      ([(1_000,)] * 200, 7),
      # Four such leaves fill a buffer.
      ([(8_000,)] * 40, 10),
      ([(8_192,)] * 40, 40),
      ([(30_000,)] * 200, 200),
  )
  def test_packs_only_what_gains_by_it(self, shapes, num_sent):
    leaves = [np.zeros(shape, np.float32) for shape in shapes]

    self.assertLen(_sent(leaves, CPU), num_sent)

  def test_layout_follows_from_shapes_alone(self):
    sizes = []

    def record(array, key):
      del key
      sizes.append(array.size)
      return array

    jax.eval_shape(
        lambda leaves: bucketing.map_packed(record, leaves, [0] * 45, CPU),
        _leaves(SHAPES),
    )

    chex.assert_trees_all_equal(
        sizes, [array.size for array in _sent(_leaves(SHAPES), CPU)]
    )
