"""Tests of groups: invalid partitions, and separate reductions."""

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

import cases
import modes
import one_device
import shard_transforms as st

FACTORIES = {'mean': st.cross_shard_mean, 'sum': st.cross_shard_sum}

# Partitions of 8 shards, by their special feature.
PARTITIONS = {
    'in_order': [[0, 1, 2, 3], [4, 5, 6, 7]],
    'strided': [[0, 4], [1, 5], [2, 6], [3, 7]],
    'unordered': [[7, 2, 0, 5], [3, 6, 4, 1]],
    'singletons': [[3], [1], [2], [0], [4], [7], [6], [5]],
    'one_for_all': [[0, 1, 2, 3, 4, 5, 6, 7]],
}
WEIGHTED = ('unordered', 'strided')

# Small integers, so that sums are exact. The group of 2 and 6 has no weight.
DATA = np.random.default_rng(0).integers(-99, 99, (8, 5)).astype(np.float32)
WEIGHTS = np.array([3, 1, 0, 5, 0, 2, 0, 4], np.float32)


def _sum_by_group(groups, num_shards=8):
  """Returns the sums of 0, 1, 2 ... over the groups."""
  tx = st.cross_shard_sum('data', groups=groups)

  def reduce(x):
    return tx.update(x, tx.init(x))[0]

  return jax.vmap(reduce, axis_name='data')(jnp.arange(float(num_shards)))


SEQUENCES = 'be a sequence of sequences of shard ids, got'


class PartitionTest(parameterized.TestCase):

  @cases.parameters(
      ([], ValueError, 'contain at least one shard'),
      ([[0, 1], [2]], ValueError, r'have the same size, got \[\[0, 1\], \[2'),
      (3, TypeError, SEQUENCES),
      ({0: [1]}, TypeError, SEQUENCES),
      (np.arange(8), TypeError, SEQUENCES),
      ([[0, 1], [1, 2]], ValueError, r'but the ids \[1, 3\] are'),
      ([[0, 1], [-1, 2]], ValueError, r'but the ids \[-1, 3\] are'),
      (
          [[0, 1], [3, 5]],
          ValueError,
          r'0 to 3 exactly once, but the ids \[2, 5\] are',
      ),
  )
  def test_refuses_invalid_partitions(self, groups, error, words):
    for factory in FACTORIES.values():
      with self.assertRaisesRegex(error, f'`groups` must .*{words}'):
        factory('data', groups=groups)

  @cases.parameters(([[0, 1.0]], 1, '1.0'), ([[False, True]], 0, 'False'))
  def test_refuses_shard_ids_that_are_not_integers(self, groups, j, got):
    words = rf'`groups\[0\]\[{j}\]` must be an integer, got {got}'
    for factory in FACTORIES.values():
      with self.assertRaisesRegex(TypeError, words):
        factory('data', groups=groups)

  @cases.parameters(
      (9, r'9 shards of the axis, but the ids \[8\] are missing'),
      (6, r'6 shards of the axis, but the ids \[6, 7\] are not shards'),
  )
  def test_refuses_an_axis_of_another_size(self, num_shards, problem):
    with self.assertRaisesRegex(
        ValueError, f'`groups` must be a partition of the {problem}'
    ):
      _sum_by_group(PARTITIONS['strided'], num_shards)

  def test_refuses_groups_over_two_axes(self):
    with self.assertRaisesRegex(
        ValueError, r"`groups` .* one axis, .* several, \('host', 'core'\)"
    ):
      FACTORIES['mean'](('host', 'core'), groups=[[0, 1]])

  def test_accepts_sequences_of_any_type(self):
    groups = [[0, 2, 4, 6], [1, 3, 5, 7]]
    kinds = [
        groups,
        np.array(groups, np.uint8),
        [np.array(group) for group in groups],
        (range(0, 8, 2), range(1, 8, 2)),
    ]

    sums = jax.jit(lambda: [_sum_by_group(kind) for kind in kinds])()

    np.testing.assert_array_equal(sums, [np.tile([12.0, 16.0], 4)] * 4)


def _loss(params, x):
  return jnp.sum(params['w'] * x) + params['b'] * x[0]


def _reduced(mode, weighted):
  """Returns the reductions of a gradient over the groups of each partition."""
  names = WEIGHTED if weighted else tuple(PARTITIONS)
  transformations = {
      kind: {name: make('data', groups=PARTITIONS[name]) for name in names}
      for kind, make in FACTORIES.items()
  }

  def shard(params, own):
    x, weight = own
    grad = st.value_and_grad(_loss, modes.AXIS)
    _, grads = grad(params, x)
    weight = weight if weighted else None

    def reduce(tx):
      return tx.update(grads, tx.init(params), weight=weight)[0]

    return jax.tree.map(reduce, transformations, is_leaf=_is_transformation)

  params = {'w': jnp.ones(5, jnp.float32), 'b': jnp.float32(2)}
  # A NaN shows if a shard of weight zero is not excluded.
  data = np.where(WEIGHTS[:, None] > 0, DATA, np.nan) if weighted else DATA
  return modes.map_shards(mode, shard)(params, (data, WEIGHTS))


def _is_transformation(node):
  return isinstance(node, optax.GradientTransformation)


def _expected(kind, name, weights):
  """Returns the result on each shard."""
  out = np.zeros((8, 5))
  divisor = 1 if kind == 'sum' else None
  for group in map(list, PARTITIONS[name]):
    out[group] = one_device.reduced(DATA[group], weights[group], divisor)
  return {'w': out, 'b': out[:, 0]}


class GroupsTest(parameterized.TestCase):

  def assert_close(self, actual, expected):
    expected = jax.tree.map(np.float32, expected)
    chex.assert_trees_all_close(actual, expected, rtol=1e-6, strict=True)

  @cases.parameters(
      *((mode, True) for mode in modes.MAPPED),
      ('shard_map', False),
      fast='shard_map',
  )
  def test_each_group_reduces_separately(self, mode, weighted):
    weights = WEIGHTS if weighted else np.ones(8)

    for kind, by_name in _reduced(mode, weighted).items():
      for name, reduced in by_name.items():
        with self.subTest(f'{kind} {name}'):
          self.assert_close(reduced, _expected(kind, name, weights))
