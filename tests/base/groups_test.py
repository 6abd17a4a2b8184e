import functools
import re

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

import cases
import modes
import one_device
import shard_transforms

FACTORIES = {
    'mean': shard_transforms.cross_shard_mean,
    'sum': shard_transforms.cross_shard_sum,
}

# Of 8 shards, by what is special about each.
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
  tx = shard_transforms.cross_shard_sum('data', groups=groups)

  def reduce(x):
    return tx.update(x, tx.init(x))[0]

  return jax.vmap(reduce, axis_name='data')(jnp.arange(float(num_shards)))


class PartitionTest(parameterized.TestCase):

  @cases.product(
      factory=tuple(FACTORIES.values()),
      wrong=(
          ([[0, 1], [1, 2]], 'ids in more than one place [1]'),
          ([[0, 0], [1, 2]], 'ids in more than one place [0]'),
          ([[0, 1], [0, 1]], 'ids in more than one place [0, 1]'),
          ([[0, 1], [-1, 2]], 'negative ids [-1]'),
          ([[0, 1], [3, 5]], 'gaps (too large for 4 ids: [5]) at the ids [2]'),
          ([[1, 2]], 'gaps (too large for 2 ids: [2]) at the ids [0]'),
      ),
  )
  def test_refuses_what_is_no_partition(self, factory, wrong):
    groups, problem = wrong

    with self.assertRaisesRegex(
        ValueError,
        '`groups` must hold every id from 0 to the number of shards minus 1'
        f' exactly once, got {re.escape(f"{problem} in {groups}")}',
    ):
      factory('data', groups=groups)

  @cases.product(
      factory=tuple(FACTORIES.values()),
      groups=([], [[]], [[0, 1], []], ((), (0,))),
  )
  def test_refuses_empty_groups(self, factory, groups):
    with self.assertRaisesRegex(
        ValueError, '`groups` must not be empty nor hold an empty group'
    ):
      factory('data', groups=groups)

  @cases.product(
      factory=tuple(FACTORIES.values()),
      groups=([[0, 1], [2]], ((0,), (2, 1, 3)), [[0, 1, 2], [3, 4], [5]]),
  )
  def test_refuses_groups_of_different_sizes(self, factory, groups):
    with self.assertRaisesRegex(
        ValueError,
        f'`groups` must be of one size, got {re.escape(repr(groups))}',
    ):
      factory('data', groups=groups)

  @cases.product(
      factory=tuple(FACTORIES.values()),
      groups=(
          3,
          'ab',
          [0, 1],
          ['01'],
          {0: [1]},
          {(0, 1)},
          [[0, 1], 2],
          iter([]),
      ),
  )
  def test_refuses_what_is_not_nested(self, factory, groups):
    with self.assertRaisesRegex(
        TypeError, '`groups` must be a sequence of sequences of shard ids, got'
    ):
      factory('data', groups=groups)

  def test_refuses_an_array_of_one_dimension(self):
    with self.assertRaisesRegex(TypeError, 'must be a sequence of sequences'):
      shard_transforms.cross_shard_mean('data', groups=np.arange(8))

  @cases.parameters(
      ([[0, 1.0]], '1.0'),
      ([[False, True]], 'False'),
      ([[0, '1']], "'1'"),
      ([[0, None]], 'None'),
      ([[[0], [1]]], r'\[0\]'),
  )
  def test_refuses_ids_that_are_no_integers(self, groups, wrong):
    with self.assertRaisesRegex(
        TypeError, f'`groups` must hold integer shard ids, got {wrong} in'
    ):
      shard_transforms.cross_shard_sum('data', groups=groups)

  @cases.parameters(float, bool)
  def test_refuses_arrays_that_do_not_hold_integers(self, dtype):
    groups = np.array([[0, 1]], dtype)

    with self.assertRaisesRegex(TypeError, 'must hold integer shard ids'):
      shard_transforms.cross_shard_sum('data', groups=groups)

  @cases.parameters(
      (9, r'9 shards of the axis, but the ids \[8\] are missing'),
      (6, r'6 shards of the axis, but the ids \[6, 7\] are no shards'),
  )
  def test_refuses_an_axis_of_another_size(self, num_shards, problem):
    with self.assertRaisesRegex(
        ValueError, f'`groups` must be a partition of the {problem}'
    ):
      _sum_by_group(PARTITIONS['strided'], num_shards)

  @cases.parameters(*FACTORIES.values())
  def test_refuses_groups_over_two_axes(self, factory):
    with self.assertRaisesRegex(
        ValueError,
        r"`groups` must come with one axis, got \('host', 'core'\)",
    ):
      factory(('host', 'core'), groups=[[0, 1]])

  @cases.parameters(
      list,
      tuple,
      np.array,
      lambda groups: [np.array(group) for group in groups],
      lambda groups: tuple(tuple(map(np.int64, group)) for group in groups),
      lambda groups: [range(0, 8, 2), range(1, 8, 2)],
      lambda groups: np.array(groups, np.uint8),
  )
  def test_takes_sequences_of_any_kind(self, kind):
    groups = kind([[0, 2, 4, 6], [1, 3, 5, 7]])

    sums = _sum_by_group(groups)

    np.testing.assert_array_equal(sums, np.tile([12.0, 16.0], 4))


def _loss(params, x):
  return jnp.sum(params['w'] * x) + params['b'] * x[0]


@functools.cache
def _reduced(mode, weighted):
  """Returns the reductions of a gradient over the groups of each partition."""
  names = WEIGHTED if weighted else tuple(PARTITIONS)
  transformations = {
      kind: {name: make('data', groups=PARTITIONS[name]) for name in names}
      for kind, make in FACTORIES.items()
  }

  def shard(params, own):
    x, weight = own
    grad = shard_transforms.value_and_grad(_loss, modes.AXIS)
    _, grads = grad(params, x)
    weight = weight if weighted else None

    def reduce(tx):
      return tx.update(grads, tx.init(params), weight=weight)[0]

    return jax.tree.map(reduce, transformations, is_leaf=_is_transformation)

  params = {'w': jnp.ones(5), 'b': jnp.float32(2)}
  # A NaN shows where a shard of weight zero is not left out.
  data = np.where(WEIGHTS[:, None] > 0, DATA, np.nan) if weighted else DATA
  return modes.map_shards(mode, shard)(params, (data, WEIGHTS))


def _is_transformation(node):
  return isinstance(node, optax.GradientTransformation)


def _expected(kind, name, weights):
  """Returns what each shard gets."""
  out = np.zeros((8, 5))
  divisor = 1 if kind == 'sum' else None
  for group in map(list, PARTITIONS[name]):
    out[group] = one_device.reduced(DATA[group], weights[group], divisor)
  return {'w': out, 'b': out[:, 0]}


class GroupsTest(parameterized.TestCase):

  def assert_close(self, actual, expected):
    expected = jax.tree.map(np.float32, expected)
    chex.assert_trees_all_close(actual, expected, rtol=1e-6, strict=True)

  @cases.product(
      mode=modes.MODES, kind=tuple(FACTORIES), name=tuple(PARTITIONS)
  )
  def test_each_group_reduces_among_itself(self, mode, kind, name):
    reduced = _reduced(mode, weighted=False)[kind][name]

    self.assert_close(reduced, _expected(kind, name, np.ones(8)))

  @cases.product(mode=modes.MODES, kind=tuple(FACTORIES), name=WEIGHTED)
  def test_each_group_reduces_by_its_weights(self, mode, kind, name):
    reduced = _reduced(mode, weighted=True)[kind][name]

    self.assert_close(reduced, _expected(kind, name, WEIGHTS))

  @cases.product(mode=modes.MODES, name=('strided', 'unordered'))
  def test_a_nan_stays_in_its_group(self, mode, name):
    tx = shard_transforms.cross_shard_sum('data', groups=PARTITIONS[name])

    def shard(w, x):
      grad = shard_transforms.value_and_grad(lambda w: jnp.sum(w * x), 'data')
      return tx.update(grad(w)[1], tx.init(w))[0]

    x = DATA.copy()
    x[1] = np.nan

    updates = modes.map_shards(mode, shard)(jnp.ones(5), x)

    group = next(group for group in PARTITIONS[name] if 1 in group)
    poisoned = np.isnan(updates).all(1)
    np.testing.assert_array_equal(poisoned, np.isin(np.arange(8), group))
    others = np.delete(np.arange(8), group)
    expected = _expected('sum', name, np.ones(8))['w']
    np.testing.assert_array_equal(updates[others], expected[others])
