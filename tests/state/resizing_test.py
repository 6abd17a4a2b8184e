"""State resized to another number of shards loses nothing."""

from collections.abc import Callable
import functools
import os
import pathlib
import subprocess
import sys
from typing import Any, NamedTuple

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

import cases
import declared_state
import modes
import shard_transforms
from shard_transforms import cross_shard_mean
from shard_transforms import cross_shard_sum
from shard_transforms import drop_stale
from shard_transforms import guard
from shard_transforms import init_state
from shard_transforms import resize_state
from shard_transforms import shard_update
from shard_transforms import tower_reduce
from shard_transforms.state_rules import Rule

AXIS = modes.AXIS
SPIKES = shard_transforms.SpikeRule(max_stds=3, window=2)
# Rows of a call are divided evenly among 8, 4, 3 or 1 shards.
CALLS, ROWS, TOWERS = 6, 24, 3
RATE, B1, B2, EPS = 0.1, 0.9, 0.999, 1.0


def adam(rate=RATE):
  # With a tiny `eps`, Adam would hide a wrong scale of what it is given.
  return optax.adam(rate, B1, B2, eps=EPS)


def averaged(inner):
  return optax.chain(cross_shard_mean(AXIS), inner)


def towers(inner, **kwargs):
  return tower_reduce(TOWERS, inner, axis_name=AXIS, **kwargs)


def spiked(state, last_spike):
  """Returns the spikes of a guard that has seen some."""
  statistics = state.spikes.statistics
  return replaced(
      state.spikes,
      statistics=statistics._replace(mean=statistics.mean + 7),
      spike_count=5,
      last_spike=last_spike,
  )


class Row(NamedTuple):
  """A transformation around Adam.

  Attributes:
    build: Makes it.
    extra: Which extra arguments `update` is given.
    towers: Of how many calls a step is.
    reduction: How it reduces shards.
    factor: What the updates are, in those of Adam.
  """

  build: Callable[[], optax.GradientTransformationExtraArgs]
  extra: tuple[str, ...] = ()
  towers: int = 1
  reduction: str | None = None
  factor: float = 1.0


TABLE = {
    'towers': Row(
        lambda: towers(averaged(adam())), towers=TOWERS, reduction='mean'
    ),
    'summed shards': Row(
        lambda: towers(optax.chain(cross_shard_sum(AXIS), adam())),
        towers=TOWERS,
        reduction='sum',
    ),
    'guard in drop_stale in towers': Row(
        lambda: towers(
            drop_stale(
                2,
                guard(shard_update(adam(), AXIS), AXIS, on_bad='exclude'),
                axis_name=AXIS,
            )
        ),
        extra=('weight', 'local_step'),
        towers=TOWERS,
    ),
    'shard_update in wrappers of Optax': Row(
        lambda: optax.chain(
            optax.masked(wrapped(), lambda p: jax.tree.map(lambda _: True, p)),
            optax.scale(0.5),
        ),
        towers=TOWERS,
        factor=0.5,
    ),
}


def wrapped():
  """Returns `shard_update`, with a wrapper of Optax inside and two around."""

  def inject(rate):
    inner = shard_update(optax.MultiSteps(adam(rate), TOWERS), AXIS)
    return optax.partition({'all': inner}, 'all')

  return optax.inject_hyperparams(inject)(rate=RATE)


def params_of():
  """Returns leaves that are cut evenly, with padding, in bits, and not."""
  return {
      'padded': np.linspace(-2, 1, 15, dtype=np.float32).reshape(3, 5, 1),
      'few': np.float32([1, -1, 2]),
      'half': np.linspace(-1, 1, 10).reshape(2, 5).astype(jnp.bfloat16),
      'scalar': np.float32(0.5),
  }


def gradients():
  """Returns those of single rows [calls, rows, ...], small integers."""
  rng = np.random.default_rng(0)
  return jax.tree.map(
      lambda p: rng.integers(-9, 10, (CALLS, ROWS, *p.shape)).astype(p.dtype),
      params_of(),
  )


def valid_rows():
  """Returns which rows count [calls, rows]; of some shards, none does."""
  valid = np.random.default_rng(1).integers(0, 2, (CALLS, ROWS))
  valid[:, :3] = 0
  valid[1::2, 9:18] = 0
  return valid.astype(np.float32)


def expected_params(row):
  """Returns what Adam makes of the mean over the rows of each step."""
  rows = gradients()
  valid = valid_rows() if 'weight' in row.extra else np.ones((CALLS, ROWS))
  divided = row.reduction != 'sum'

  def train(param, rows):
    x, mu, nu = np.float64(param), 0.0, 0.0
    rows = np.float64(rows).reshape(CALLS, ROWS, -1)
    for step in range(CALLS // row.towers):
      window = slice(row.towers * step, row.towers * (step + 1))
      total = np.einsum('tr,trx->x', valid[window], rows[window])
      total = total.reshape(x.shape)
      g = total / (valid[window].sum() if divided else row.towers)
      mu, nu = B1 * mu + (1 - B1) * g, B2 * nu + (1 - B2) * g**2
      scales = 1 - B1 ** (step + 1), 1 - B2 ** (step + 1)
      direction = mu / scales[0] / (np.sqrt(nu / scales[1]) + EPS)
      x = x - row.factor * RATE * direction
    return x.astype(param.dtype)

  return jax.tree.map(train, params_of(), rows)


@functools.cache
def step_of(name, num_shards):
  """Returns the transformation of a row, and a step on so many shards."""
  row = TABLE[name]
  tx = row.build()
  mesh = modes.mesh(num_shards)
  specs = shard_transforms.state_specs(tx, params_of(), mesh)

  def one_shard(params, state, rows, valid, number):
    extra_args = {}
    divisor = 1 if row.reduction == 'sum' else len(valid)
    if 'weight' in row.extra:
      extra_args['weight'] = valid.sum()
      divisor = jnp.maximum(valid.sum(), 1)
      rows = jax.tree.map(
          lambda x: x * jnp.expand_dims(valid, range(1, x.ndim)), rows
      )
    if 'local_step' in row.extra:
      extra_args['local_step'] = number // row.towers
    grads = jax.tree.map(
        lambda x, p: (x.astype(jnp.float32).sum(0) / divisor).astype(p.dtype),
        rows,
        params,
    )
    updates, state = tx.update(grads, state, params, **extra_args)
    return optax.apply_updates(params, updates), state

  mapped = jax.shard_map(
      one_shard,
      mesh=mesh,
      in_specs=(P(), specs, P(AXIS), P(AXIS), P()),
      out_specs=(P(), specs),
  )
  return tx, jax.jit(mapped)


def train(name, sizes):
  """Returns the parameters after calls on that many shards each."""
  row, rows, valid = TABLE[name], gradients(), valid_rows()
  params, state = params_of(), None
  for call, num_shards in enumerate(sizes):
    (tx, step), mesh = step_of(name, num_shards), modes.mesh(num_shards)
    if not call:
      state = init_state(tx, params, mesh)
    elif num_shards != sizes[call - 1]:
      params = jax.device_get(params)
      state = resize_state(state, tx, params, mesh, reduction=row.reduction)
    # As the step returns them, or it is compiled twice.
    params = jax.device_put(params, jax.NamedSharding(mesh, P()))
    own = jax.tree.map(lambda x, i=call: x[i], rows)
    params, state = step(params, state, own, valid[call], np.int32(call))
    # Calls that queue up on virtual devices can abort in JAX 0.10.
    jax.block_until_ready(params)
  return jax.device_get(params)


def assert_close(actual, expected):
  chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)

  def check(path, x, y):
    tolerance = 2e-2 if x.dtype == jnp.bfloat16 else 2e-6
    np.testing.assert_allclose(
        np.float32(x),
        np.float32(y),
        rtol=tolerance,
        atol=tolerance,
        err_msg=jax.tree_util.keystr(path),
    )

  jax.tree.map_with_path(check, actual, expected)


def assert_same(actual, expected):
  """Asserts the same tree, kinds, bits and shardings."""
  chex.assert_trees_all_equal_structs(actual, expected)
  chex.assert_trees_all_equal(
      jax.device_get(actual), jax.device_get(expected), strict=True
  )
  places = [jax.tree.map(on_devices, tree) for tree in (actual, expected)]
  assert places[0] == places[1], places


def on_devices(leaf):
  """Returns which part of a leaf each device has."""
  parts = leaf.sharding.devices_indices_map(leaf.shape)
  return sorted((d.id, str(part)) for d, part in parts.items())


def copying():
  """Returns a transformation whose state are the parameters."""
  return optax.GradientTransformation(
      lambda params: jax.tree.map(jnp.copy, params),
      lambda updates, state, params=None: (updates, state),
  )


def replaced(state, **fields):
  """Returns the state with other values, where the old ones are."""

  def place(like, x):
    x = np.asarray(x, like.dtype)
    sharding = getattr(like, 'sharding', None)
    return jax.device_put(x, sharding) if sharding else x

  old = {field: getattr(state, field) for field in fields}
  return state._replace(
      **{
          field: jax.tree.map(place, old[field], value)
          for field, value in fields.items()
      }
  )


def state_of(tx, params, num_shards):
  return init_state(tx, params, modes.mesh(num_shards))


def saved(tx, params, num_shards, **fields):
  """Returns a state as from a checkpoint, of zeros and of these fields."""
  params = jax.eval_shape(lambda: params)
  state = jax.tree.map(
      lambda x: np.zeros(x.shape, x.dtype), state_of(tx, params, num_shards)
  )
  return replaced(state, **fields) if fields else state


def mesh_of(shape):
  """Returns a mesh of hosts and cores."""
  return jax.make_mesh(
      shape,
      ('hosts', 'cores'),
      (AxisType.Auto,) * 2,
      devices=jax.devices()[: np.prod(shape)],
  )


def bits_of(leaf):
  return np.array(jax.random.key_data(leaf) if is_key(leaf) else leaf)


def spoiled(leaf):
  return jax.random.split(leaf)[0] if is_key(leaf) else leaf * 2 + 1


def is_key(leaf):
  return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


class TrainingTest(parameterized.TestCase):
  """Training on another number of shards goes on as if it never had another."""

  @cases.parameters(*TABLE)
  def test_goes_on_on_other_numbers_of_shards(self, name):
    sizes = [3, 8, 3, 1, 8, 8] if name == 'towers' else [8, 8, 4, 4, 8, 8]

    params = train(name, sizes)

    assert_close(params, expected_params(TABLE[name]))


# Over eight shards: evenly cut, with padding, on some shards none, one element.
SHAPES = ((4, 6), (3, 5, 1), (71,), (3,), (1,), (1, 17))
LEAVES = [
    *(
        np.arange(1, 1 + np.prod(x), dtype=np.float32).reshape(x)
        for x in SHAPES
    ),
    np.arange(10).astype(jnp.bfloat16),
    np.arange(10, dtype=np.complex64) * 1j,
    np.arange(10, dtype=np.int32),
    np.zeros((0, 3), np.float32),
    np.float32(3),
    None,
]


class CutTest(parameterized.TestCase):
  """The slices of `shard_update`."""

  @cases.parameters((8, 3), (1, 8))
  def test_slices_are_as_if_cut_there(self, before, after):
    tx = shard_update(copying(), AXIS)
    state = state_of(tx, LEAVES, before)

    resized = resize_state(state, tx, LEAVES, modes.mesh(after))
    # The state may be of NumPy, and parameters may be shapes.
    given = jax.device_get(state), tx, jax.eval_shape(lambda: LEAVES)
    of_numpy = resize_state(*given, modes.mesh(after))

    assert_same(resized, state_of(tx, LEAVES, after))
    assert_same(of_numpy, resized)

  @cases.parameters(
      {'axes': ('hosts', 'cores'), 'before': (1, 2), 'after': (2, 3)},
      {'axes': 'cores', 'before': (2, 4), 'after': (4, 2)},
  )
  def test_slices_are_cut_over_several_axes(self, axes, before, after):
    tx = shard_update(copying(), axes)
    params = jnp.arange(1.0, 18.0)
    state = init_state(tx, params, mesh_of(before))

    resized = resize_state(state, tx, params, mesh_of(after))

    assert_same(resized, init_state(tx, params, mesh_of(after)))

  @cases.parameters(
      {'shape': (16,), 'before': 8, 'other': (24,), 'after': 4},
      {'shape': (4, 4), 'before': 8, 'other': (16,), 'after': 4},
      {'shape': (4, 4), 'before': 1, 'other': (2, 8), 'after': 1},
      {'shape': (2, 3, 5), 'before': 1, 'other': (5, 6), 'after': 8},
      {'shape': (1,), 'before': 1, 'other': (), 'after': 4},
  )
  def test_refuses_slices_of_other_leaves(self, shape, before, other, after):
    tx = shard_update(copying(), AXIS)
    state = state_of(tx, [jnp.zeros(shape)], before)

    with self.assertRaisesRegex(
        ValueError,
        r'`state` must be made by .* these parameters, got the shape'
        r' \(.*\) at \.inner_state\[0\], which does not go into',
    ):
      resize_state(state, tx, [jnp.zeros(other)], modes.mesh(after))

  @cases.parameters(
      # Each would fit alone, on 8 and on 88 shards.
      ([(64,), (9, 9)], [(60,), (3, 3)]),
      ([(512,), (2, 5)], [(5,), (2, 5)]),
  )
  def test_refuses_slices_that_no_mesh_gives(self, shapes, others):
    tx = shard_update(copying(), AXIS)
    state = jax.device_get(state_of(tx, list(map(jnp.zeros, shapes)), 8))

    with self.assertRaisesRegex(ValueError, 'that no number of shards gives'):
      resize_state(state, tx, list(map(jnp.zeros, others)), modes.mesh(4))


ZEROS = np.zeros(2, np.float32)
# What may stand around a window, and gives it weights.
GATES = {
    'none': lambda tx: tx,
    'guard': lambda tx: guard(tx, AXIS, on_bad='exclude'),
    'drop_stale': lambda tx: drop_stale(2, tx, axis_name=AXIS),
    'scale_by_staleness': lambda tx: shard_transforms.scale_by_staleness(
        'inverse', tx, axis_name=AXIS
    ),
}


class WindowTest(parameterized.TestCase):
  """What `tower_reduce` has collected, and what `guard` has seen."""

  @parameterized.named_parameters(
      ('of two', 8, 4, [(0, 1), (2, 3), (4, 5), (6, 7)]),
      ('of three or two', 8, 3, [(0, 1, 2), (3, 4, 5), (6, 7)]),
      ('of all', 8, 1, [tuple(range(8))]),
      ('of none', 3, 8, [(0,), (1,), (2,), (), (), (), (), ()]),
  )
  def test_shards_are_merged(self, before, after, parts):
    tx = tower_reduce(
        4, guard(averaged(optax.identity()), AXIS), axis_name=AXIS
    )
    params = jnp.zeros((2, 3))
    rng = np.random.default_rng(0)
    total = rng.integers(-9, 9, (before, 2, 3)).astype(np.float32)
    weight = np.arange(before, dtype=np.float32)
    step = rng.integers(0, 99, before)
    bad = rng.integers(-1, 9, before)
    state = state_of(tx, params, before)
    state = replaced(
        state,
        tower=2,
        total=total,
        total_weight=weight,
        oldest_local_step=step,
        inner_state=replaced(state.inner_state, last_bad_step=bad),
    )

    resized = resize_state(state, tx, params, modes.mesh(after))

    def merged(combine, values, empty):
      return [combine(values[list(p)], axis=0) if p else empty for p in parts]

    zeros, never = np.zeros((2, 3)), np.iinfo(np.int32).max
    expected = state_of(tx, params, after)
    expected = replaced(
        expected,
        tower=2,
        total=np.stack(merged(np.sum, total, zeros)),
        total_weight=np.stack(merged(np.sum, weight, 0)),
        oldest_local_step=np.stack(merged(np.min, step, never)),
        inner_state=replaced(
            expected.inner_state,
            last_bad_step=np.stack(merged(np.max, bad, -1)),
        ),
    )
    assert_same(resized, expected)

  @cases.parameters(
      ('mean', [0, 1, 2, 3, 4, 5, 6, 7], [0.5, 2.5, 4.5, 6.5]),
      ('mean', [3, 6, 9], [8, 16, 24, 0, 0, 0, 0, 0]),
      ('sum', [0, 1, 2, 3, 4, 5, 6, 7], [28]),
      ('sum', [3, 6, 9], [3, 6, 9, 0, 0, 0, 0, 0]),
  )
  def test_window_without_weights_is_merged(self, reduction, before, after):
    tx = tower_reduce(4, averaged(optax.identity()), axis_name=AXIS)
    state = saved(
        tx,
        np.float32(0),
        len(before),
        tower=3,
        total=before,
        total_weight=np.full(len(before), 3),
    )

    resized = resize_state(
        state, tx, np.float32(0), modes.mesh(len(after)), reduction=reduction
    )

    np.testing.assert_array_equal(resized.total, after)
    np.testing.assert_array_equal(resized.total_weight, [3] * len(after))

  @cases.parameters(
      ('sum', 'none', 'mean', 8),
      ('sum', 'none', 'weighted', 1),
      ('sum', 'guard', 'mean', 2),
      ('sum', 'drop_stale', 'weighted', 2),
      ('sum', 'scale_by_staleness', 'mean', 2),
      ('mean', 'guard', 'mean', 2),
  )
  def test_a_weighted_window_ends_with_the_same_mean(
      self, kind, gate, reduction, after
  ):
    inner = averaged(optax.identity())
    tx = tower_reduce(2, inner, axis_name=AXIS, reduction=kind)
    total = np.float32([[0, 1], [6, 8], [18, 21], [36, 40]])
    given = {'tower': 1, 'total': total, 'total_weight': np.arange(1, 5)}
    state = saved(tx, ZEROS, 4, **given)
    tx = GATES[gate](tx)
    if gate != 'none':
      state = saved(tx, ZEROS, 4, inner_state=state)

    resized = resize_state(
        state, tx, ZEROS, modes.mesh(after), reduction=reduction
    )

    specs = shard_transforms.state_specs(tx, ZEROS, modes.mesh(after))

    def last(state, weight):
      zeros = shard_transforms.per_shard(ZEROS, AXIS)
      return tx.update(zeros, state, weight=weight[0], local_step=0)[0]

    last = jax.shard_map(
        last, mesh=modes.mesh(after), in_specs=(specs, P(AXIS)), out_specs=P()
    )
    updates = jax.jit(last)(resized, np.ones(after, np.float32))
    divisor = 4 if kind == 'sum' else 1 + 2 + 3 + 4 + after
    np.testing.assert_allclose(updates, total.sum(0) / divisor, rtol=1e-6)

  def test_counters_of_drop_stale_are_copied(self):
    tx = drop_stale(2, averaged(optax.identity()), axis_name=AXIS)
    counts = {'global_step': 5, 'stale_count': 3, 'stale_shard_count': 17}

    resized = resize_state(
        saved(tx, ZEROS, 8, **counts), tx, ZEROS, modes.mesh(3)
    )

    self.assertEqual(jax.tree.leaves(resized), [5, 3, 17])

  def test_guard_that_needs_several_shards_is_resized(self):
    inner = shard_update(copying(), AXIS)
    tx = guard(inner, AXIS, on_bad='exclude', min_shards=3, spikes=SPIKES)
    state = state_of(tx, jnp.arange(9.0), 8)
    last_spike = np.arange(8)[:, None]
    state = replaced(state, bad_shard_count=4, spikes=spiked(state, last_spike))

    resized = resize_state(state, tx, jnp.arange(9.0), modes.mesh(4))

    expected = state_of(tx, jnp.arange(9.0), 4)
    spikes = expected.spikes._replace(
        spike_count=resized.spikes.spike_count,
        last_spike=np.array([[1], [3], [5], [7]], np.int32),
    )
    assert_same(resized, replaced(expected, bad_shard_count=4, spikes=spikes))
    self.assertEqual(resized.spikes.spike_count, 5)

  def test_a_window_with_weights_of_one_keeps_them(self):
    tx = tower_reduce(2, averaged(optax.identity()), axis_name=AXIS)
    ones = {'total_weight': np.ones(8), 'total': np.ones((8, 2))}
    state = saved(tx, ZEROS, 8, tower=1, **ones)

    resized = resize_state(
        state, tx, ZEROS, modes.mesh(3), reduction='weighted'
    )

    np.testing.assert_array_equal(resized.total_weight, [3, 3, 2])
    np.testing.assert_array_equal(resized.total[:, 0], [3, 3, 2])

  @cases.parameters({'tower': 0, 'after': 4}, {'tower': 3, 'after': 8})
  def test_reduction_is_not_needed(self, tower, after):
    tx = tower_reduce(4, averaged(optax.identity()), axis_name=AXIS)
    state = saved(tx, ZEROS, 8, tower=tower, total_weight=np.full(8, tower))

    resized = resize_state(state, tx, ZEROS, modes.mesh(after))

    self.assertEqual(resized.tower, tower)
    np.testing.assert_array_equal(resized.total_weight, [tower] * after)

  @cases.parameters(
      # Weights that are numbers of towers, and others.
      ('mean', 3, [3] * 8, {}, "or 'weighted', got None.* at .total"),
      ('sum', 1, range(8), {}, 'or is summed, at .total'),
      ('mean', 0, [0] * 8, {'reduction': 'max'}, "`reduction` .*'max'"),
      ('mean', 0, [0] * 8, {'params': np.zeros(3)}, 'got the shape .8, 2. at'),
  )
  def test_refuses_a_window(self, kind, tower, weights, changes, message):
    inner = averaged(optax.identity())
    tx = tower_reduce(4, inner, axis_name=AXIS, reduction=kind)
    state = saved(tx, ZEROS, 8, tower=tower, total_weight=weights)
    given = {'params': ZEROS, 'mesh': modes.mesh(4)} | changes

    with self.assertRaisesRegex(ValueError, message):
      resize_state(state, tx, **given)

  def test_refuses_a_window_of_other_parameters_without_an_axis(self):
    tx = tower_reduce(4, optax.sgd(0.1))
    state, params = saved(tx, np.zeros((4, 2)), 8), np.zeros((6, 2))

    for specs in P(), P(AXIS):
      with self.assertRaisesRegex(
          ValueError, r'`state` .* got the shape \(4, 2\) at \.total'
      ):
        resize_state(state, tx, params, modes.mesh(3), in_specs=specs)


class KeepState(NamedTuple):
  """State of `keep`: the last update of each shard, with an axis of shards."""

  kept: Any


def keep():
  def init_fn(params):
    return KeepState(shard_transforms.per_shard(params, AXIS)[None])

  def update_fn(updates, state, params=None):
    del state, params
    return updates, KeepState(updates[None])

  return optax.GradientTransformation(init_fn, update_fn)


class CopyTest(parameterized.TestCase):
  """What is copied, how it is given, and what is refused."""

  def test_reads_nothing_of_the_parameters_but_their_shapes(self):
    params = jnp.zeros(3)
    state = state_of(optax.trace(0.9), params, 8)
    params.delete()

    resized = resize_state(state, optax.trace(0.9), params, modes.mesh(4))

    np.testing.assert_array_equal(resized.trace, np.zeros(3))

  @cases.parameters((3, False), (8, False), (8, True))
  def test_each_shard_has_a_key(self, num_shards, is_shared):
    tx = shard_transforms.local_updates(
        optax.add_noise(0.1, 0.5, jax.random.key(3)),
        cross_shard_mean(AXIS),
        AXIS,
        every=4,
    )
    state = state_of(tx, jnp.zeros(2), 4)
    before = jnp.stack([jax.random.key(3)] * 4)
    if not is_shared:
      before = jax.random.split(jax.random.key(3), 4)
      state = optax.tree_utils.tree_set(state, rng_key=before)

    resized = resize_state(state, tx, jnp.zeros(2), modes.mesh(num_shards))

    after = jax.random.key_data(optax.tree_utils.tree_get(resized, 'rng_key'))
    before = jax.random.key_data(before)
    np.testing.assert_array_equal(after[:4], before[:num_shards])
    num_keys = len({tuple(key) for key in after.tolist()})
    self.assertEqual(num_keys, 1 if is_shared else num_shards)

  def test_old_state_stays_when_the_new_one_is_donated(self):
    tx = optax.chain(
        shard_update(copying(), AXIS),
        optax.add_noise(0.1, 0.5, jax.random.key(3)),
        optax.trace(0.9),
    )
    params = jnp.arange(4096.0)
    state = state_of(tx, params, 8)
    before = jax.tree.map(bits_of, state)
    resized = resize_state(state, tx, params, modes.mesh())

    spoil = jax.jit(lambda s: jax.tree.map(spoiled, s), donate_argnums=0)
    jax.block_until_ready(spoil(resized))

    chex.assert_trees_all_equal(jax.tree.map(bits_of, state), before)

  def test_new_state_stays_when_the_old_one_is_overwritten(self):
    tx = optax.trace(0.9)
    # JAX keeps the memory of some arrays of NumPy, by where they lie.
    params = [jnp.ones(4096)] * 20
    state = jax.tree.map(np.array, state_of(tx, params, 8))
    resized = resize_state(state, tx, params, modes.mesh(4))

    for leaf in jax.tree.leaves(state):
      leaf[:] = -1

    self.assertTrue(all((x == 0).all() for x in jax.tree.leaves(resized)))

  def test_state_sharded_like_parameters_is_copied(self):
    tx = towers(averaged(adam()))
    params, specs = {'w': jnp.arange(24.0).reshape(4, 6)}, {'w': P('model')}
    mesh, other = (
        jax.make_mesh(shape, (AXIS, 'model'), (AxisType.Auto,) * 2)
        for shape in ((4, 2), (2, 4))
    )
    state = init_state(tx, params, mesh, in_specs=specs)
    state = replaced(state, total={'w': np.arange(96.0).reshape(4, 4, 6)})

    resized = resize_state(state, tx, params, other, in_specs=specs)

    expected = init_state(tx, params, other, in_specs=specs)
    total = np.arange(96.0).reshape(2, 2, 4, 6).sum(1)
    assert_same(resized, replaced(expected, total={'w': total}))
    self.assertEqual(resized.total['w'].sharding.spec, P(AXIS, 'model'))

  @cases.parameters(
      # The slices have the same shapes.
      {'before': (4, 2), 'after': (2, 4), 'shape': (8, 6)},
      {'before': (1, 2), 'after': (4, 2), 'shape': (8, 6)},
      # The parts of the parameter are padded.
      {'before': (1, 2), 'after': (4, 2), 'shape': (6, 5), 'refused': True},
  )
  def test_slices_of_sharded_parameters(
      self, before, after, shape, refused=False
  ):
    tx = shard_update(copying(), AXIS)
    specs = P('model')
    params = jnp.arange(float(np.prod(shape))).reshape(shape)
    mesh, other = (
        jax.make_mesh(
            shape,
            (AXIS, 'model'),
            (AxisType.Auto,) * 2,
            devices=jax.devices()[: np.prod(shape)],
        )
        for shape in (before, after)
    )
    state = init_state(tx, params, mesh, in_specs=specs)
    there = init_state(tx, params, other, in_specs=specs)

    if not refused:
      resized = resize_state(state, tx, params, other, in_specs=specs)
      assert_same(resized, there)
      return
    with self.assertRaisesRegex(
        ValueError,
        r'`in_specs` must not shard .*`shard_update`, got .* for \.inner_state',
    ):
      resize_state(state, tx, params, other, in_specs=specs)

  def test_names_what_it_cannot_carry_over(self):
    tx = optax.chain(keep(), optax.sgd(0.1))
    state = state_of(tx, jnp.zeros(3), 8)

    with self.assertRaisesRegex(
        ValueError,
        r'must have a rule.* \(8, 3\) instead of \(4, 3\) at \[0\]\.kept',
    ):
      resize_state(state, tx, jnp.zeros(3), modes.mesh(4))

  def test_copies_what_it_does_not_know_to_as_many_shards(self):
    tx = keep()
    state = state_of(tx, jnp.arange(3.0), 8)

    resized = resize_state(state, tx, jnp.zeros(3), modes.mesh())

    assert_same(resized, state)

  def test_refuses_state_of_others(self):
    params = {'w': np.zeros(3, np.float32)}
    state = saved(averaged(adam()), params, 8)
    raw = {'inner_state': [{'mu': np.zeros((8, 1))}]}

    for given, tx, others, got in (
        (state, optax.sgd(0.1), params, 'the tree'),
        (state, adam(), {'v': params['w']}, 'the tree'),
        (state, adam(), {'w': np.zeros(4)}, r'\(3,\) at .*mu'),
        (state, adam(), {'w': np.zeros((3, 1))}, r'\(3,\) at'),
        ({}, adam(), params, 'the tree'),
        (raw, adam(), params, 'the tree'),
    ):
      with self.assertRaisesRegex(
          ValueError, f'`state` .* by this .* these parameters, got .*{got}'
      ):
        resize_state(given, averaged(tx), others, modes.mesh(4))

  def test_refuses_another_dtype(self):
    with self.assertRaisesRegex(
        TypeError, r'`state` .* got float64 instead of float32 at \.trace\[0\]'
    ):
      resize_state(
          optax.TraceState([np.zeros(3)]),
          optax.trace(0.9),
          [np.zeros(3, np.float32)],
          modes.mesh(4),
      )


# Two processes with a device each; the state of one lives in both.
WORKER = """
import jax, jax.numpy as jnp, numpy as np, optax
import shard_transforms as st
st.launch.join_processes()
mesh = jax.make_mesh((2,), ('data',), (jax.sharding.AxisType.Auto,))
tx = st.shard_update(optax.trace(0.9), 'data')
params = jnp.zeros(5)
state = st.ShardUpdateState(optax.TraceState(np.arange(5, dtype=np.float32)))
resized = st.resize_state(state, tx, params, mesh)
full = st.full_state(resized, tx, params, mesh)
assert full.inner_state.trace.is_fully_replicated
assert np.asarray(full.inner_state.trace).tolist() == [0, 1, 2, 3, 4]
for tx2 in tx, st.owners.owned_update(optax.trace(0.9), 'data'):
  params2 = {'a': np.ones((4, 2), 'float32'), 'b': np.ones(2, 'float32')}
  state2 = st.init_state(tx2, params2, mesh)
  full2 = st.full_state(state2, tx2, params2, mesh)
  a = full2.inner_state.trace['a']
  assert a.shape == (4, 2) and a.addressable_data(0).shape == (2, 2), a
  full2 = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s))(full2)
  placed = st.place_state(full2, tx2, params2, mesh)
  assert jax.tree.structure(placed) == jax.tree.structure(state2)
  again = st.full_state(placed, tx2, params2, mesh)
  ones = jax.jit(lambda s: jax.tree.map(lambda x: (x == 1).all(), s))(again)
  assert all(map(bool, jax.tree.leaves(ones))), ones
own = np.asarray(resized.inner_state.trace.addressable_data(0))
assert own.tolist() == [[0, 1, 2], [3, 4, 0]][jax.process_index()], own
copy = st.resize_state(
    jax.device_put(optax.TraceState(params), jax.NamedSharding(mesh, jax.P())),
    optax.trace(0.9), params, mesh)
assert copy.trace.is_fully_replicated
try:
  st.resize_state(resized, tx, params, mesh)
except ValueError as error:
  print(f'Refused: {error}')
"""


class ProcessesTest(parameterized.TestCase):

  @pytest.mark.slow
  def test_state_of_several_processes(self):
    source = pathlib.Path(shard_transforms.__file__).parents[1]
    main = (
        'import sys\nfrom shard_transforms import launch\n'
        'launch.run_processes(2, [sys.executable, "-c", sys.argv[1]])'
    )

    done = subprocess.run(
        [sys.executable, '-c', main, WORKER],
        # With a command, Python looks here first.
        cwd=source,
        env={
            **os.environ,
            'JAX_PLATFORMS': 'cpu',
            'JAX_NUM_CPU_DEVICES': '1',
            'PYTHONPATH': str(source),
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    self.assertEqual(done.returncode, 0, done.stderr)
    self.assertRegex(
        done.stdout,
        r'`state` of `resize_state` must be on this process, got a part of'
        r' \.inner_state\.trace',
    )


class DeclaredStateTest(parameterized.TestCase):
  """States outside of the library declare their own resize rules."""

  def resized(self, num_shards, **values):
    """Returns a state in a guard in a chain, begun on 4 shards."""
    tx = optax.chain(
        guard(declared_state.tally(shard_update(adam(), AXIS), AXIS), AXIS),
        optax.identity(),
    )
    params = np.arange(5, dtype=np.float32)
    state = optax.tree_utils.tree_set(saved(tx, params, 4), **values)
    state = resize_state(state, tx, params, modes.mesh(num_shards))
    return state[0].inner_state

  @parameterized.named_parameters(
      ('fewer', 2, [3, 7], [3, 7], [1, 3], [6, 8]),
      ('uneven', 3, [3, 3, 4], [4.5, 4.5, 6], [1, 3, 4], [6, 7, 8]),
      (
          'more',
          *(5, [1, 2, 3, 4, 0], [2.5, 5, 7.5, 10, 0]),
          *([1, 2, 3, 4, 100], [5, 6, 7, 8, 8]),
      ),
  )
  def test_each_rule_is_kept(self, num_shards, seen, rate, least, most):
    values = np.arange(1, 5, dtype=np.int32)

    state = self.resized(
        num_shards,
        seen=values,
        rate=2 * values.astype(np.float32),
        least=values,
        most=values + 4,
        last_norms=np.full(3, 7, np.float32),
        unit=np.full(2, 7, np.float32),
    )

    np.testing.assert_array_equal(state.seen, seen)
    np.testing.assert_array_equal(state.rate, rate)
    np.testing.assert_array_equal(state.least, least)
    np.testing.assert_array_equal(state.most, most)
    np.testing.assert_array_equal(state.recent['last_norms'], [-1] * 3)
    np.testing.assert_array_equal(state.unit, [7, 7])
    # What is inside is asked as well.
    mu = optax.tree_utils.tree_get(state, 'mu')
    self.assertEqual(mu.shape, (num_shards * -(-5 // num_shards),))

  def test_nothing_begins_anew_on_as_many_shards(self):
    state = self.resized(4, last_norms=np.full(3, 7, np.float32))

    np.testing.assert_array_equal(state.recent['last_norms'], [7] * 3)

  @cases.parameters(
      ({'seem': Rule(resize='sum')}, ValueError, "fields .* 'seem'"),
      (
          {'seen': Rule(resize=lambda state, reduction: reduction)},
          TypeError,
          "`Rule` .*'sum' for 'seen'",
      ),
  )
  def test_names_what_is_declared_wrongly(self, table, error, message):
    class State(NamedTuple):
      seen: jax.Array
      rules = table

    def init(params):
      del params
      return State(shard_transforms.per_shard(jnp.zeros(1), AXIS))

    tx = optax.GradientTransformation(init, optax.identity().update)
    state = saved(tx, (), 4)

    with self.assertRaisesRegex(error, f'`rules` of `State` .*{message}'):
      resize_state(state, tx, (), modes.mesh(2), reduction='sum')
