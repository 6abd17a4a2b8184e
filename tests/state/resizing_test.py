"""Tests of `resize_state`: state on another number of shards."""

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
from harness import assert_same
import modes
import shard_transforms as st
from shard_transforms import cross_shard_mean
from shard_transforms import drop_stale
from shard_transforms import guard
from shard_transforms import init_state
from shard_transforms import resize_state
from shard_transforms import shard_state
from shard_transforms import shard_update
from shard_transforms import tower_reduce
from shard_transforms import unshard_state
from shard_transforms.state_rules import Rule

AXIS = modes.AXIS
SPIKES = st.SpikeRule(max_stds=3, window=2)
# Rows of a call are divided evenly among 8 or 4 shards.
CALLS, ROWS, TOWERS = 6, 24, 3


def adam(rate=0.1):
  # With a tiny `eps`, Adam would hide a wrong scale of the gradients.
  return optax.adam(rate, eps=1.0)


def averaged(inner):
  return optax.chain(cross_shard_mean(AXIS), inner)


def spiked(state, last_spike):
  """Returns the state of a spike rule that has counted spikes."""
  norm = state.spikes.statistics['norm']
  return replaced(
      state.spikes,
      statistics={'norm': norm._replace(mean=norm.mean + 7)},
      spike_count=5,
      last_spike=last_spike,
  )


def copying():
  """Returns a transformation whose state is a copy of the parameters."""
  return optax.GradientTransformation(
      lambda params: jax.tree.map(jnp.copy, params),
      lambda updates, state, params=None: (updates, state),
  )


def replaced(state, **fields):
  """Returns the state with new values in the placement of the old values."""

  def place(like, x):
    x = np.asarray(x, like.dtype)
    sharding = getattr(like, 'sharding', None)
    return jax.device_put(x, sharding) if sharding else x

  for name, value in fields.items():
    placed = jax.tree.map(place, getattr(state, name), value)
    state = state._replace(**{name: placed})
  return state


def state_of(tx, params, num_shards):
  return init_state(tx, params, modes.mesh(num_shards))


def saved(tx, params, num_shards, **fields):
  """Returns a state of zeros, except for these fields, as NumPy arrays."""
  state = state_of(tx, jax.eval_shape(lambda: params), num_shards)
  state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), state)
  return replaced(state, **fields)


def two_axes(shape):
  devices, kinds = jax.devices()[: np.prod(shape)], (AxisType.Auto,) * 2
  return jax.make_mesh(shape, (AXIS, 'model'), kinds, devices=devices)


class TrainingTest(parameterized.TestCase):
  """Training continues on another number of shards as on one device."""

  PARAMS = {
      'padded': np.linspace(-2, 1, 15, dtype=np.float32).reshape(3, 5, 1),
      'scalar': np.float32(0.5),
  }

  @pytest.mark.thorough
  def test_resizing_gates_in_an_unfinished_window(self):
    inner = guard(shard_update(adam(), AXIS), AXIS, on_bad='exclude')
    inner = drop_stale(2, inner, axis_name=AXIS)
    valid = np.random.default_rng(1).integers(0, 2, (CALLS, ROWS))
    # No row of some shards counts.
    valid[:, :3] = valid[1::2, 9:18] = 0

    tx = tower_reduce(TOWERS, inner, axis_name=AXIS)
    self.assert_goes_on(tx, valid.astype(np.float32))

  @pytest.mark.thorough
  def test_resizing_inside_and_around_wrappers_of_optax(self):
    def inject(rate):
      inner = shard_update(optax.MultiSteps(adam(rate), TOWERS), AXIS)
      return optax.partition({'all': inner}, 'all')

    tx = optax.masked(
        optax.inject_hyperparams(inject)(rate=0.1),
        lambda p: jax.tree.map(lambda _: True, p),
    )
    self.assert_goes_on(tx, np.ones((CALLS, ROWS), np.float32))

  def assert_goes_on(self, tx, valid):
    # Small integers, of single rows [calls, rows, ...].
    rng = np.random.default_rng(0)
    shape = CALLS, ROWS
    rows = jax.tree.map(
        lambda p: rng.integers(-9, 10, shape + p.shape), self.PARAMS
    )

    def weighted(x, valid):
      total = np.tensordot(valid, x, valid.ndim)
      return np.float32(total / max(valid.sum(), 1))

    @functools.cache
    def step_on(num_shards):
      specs = st.state_specs(tx, self.PARAMS, modes.mesh(num_shards))

      def step(params, state, own, call):
        grads, weight = jax.tree.map(lambda x: x[0], own)
        updates, state = tx.update(
            grads, state, params, weight=weight, local_step=call // TOWERS
        )
        return optax.apply_updates(params, updates), state

      mapped = jax.shard_map(
          step,
          mesh=modes.mesh(num_shards),
          in_specs=(P(), specs, P(AXIS), P()),
          out_specs=(P(), specs),
      )
      return jax.jit(mapped)

    params, before = self.PARAMS, 8
    state = state_of(tx, params, before)
    # The shards are merged within one window, and split within the next one.
    for call, after in enumerate((8, 8, 4, 4, 8, 8)):
      if after != before:
        state = resize_state(state, tx, self.PARAMS, modes.mesh(after))
      params = jax.device_put(
          jax.device_get(params), jax.NamedSharding(modes.mesh(after), P())
      )
      shards = np.split(valid[call], after)
      own = jax.tree.map(
          lambda x, call=call, shards=shards: np.stack(
              list(map(weighted, np.split(x[call], len(shards)), shards))
          ),
          rows,
      )
      given = own, np.stack([x.sum() for x in shards])
      params, state = step_on(after)(params, state, given, np.int32(call))
      before = after

    expected, alone = self.PARAMS, adam().init(self.PARAMS)
    update = jax.jit(adam().update)
    for i in range(0, CALLS, TOWERS):
      here = slice(i, i + TOWERS)
      grads = jax.tree.map(lambda x, i=here: weighted(x[i], valid[i]), rows)
      updates, alone = update(grads, alone)
      expected = optax.apply_updates(expected, updates)
    chex.assert_trees_all_close(
        jax.device_get(params), jax.device_get(expected), rtol=2e-6, atol=2e-6
    )


class SlicesTest(parameterized.TestCase):
  """The slices of `shard_update`."""

  def test_resized_slices_equal_newly_created_slices(self):
    # On eight shards, leaves are divided evenly or with padding, and some
    # shards have only padding.
    shapes = (4, 6), (3, 5, 1), (71,), (3,), (1,), (1, 17)
    params = [
        *(1 + np.arange(np.prod(x), dtype='f').reshape(x) for x in shapes),
        np.arange(10).astype(jnp.bfloat16),
        np.arange(10, dtype=np.complex64) * 1j,
        np.arange(10, dtype=np.int32),
        np.zeros((0, 3), np.float32),
        np.float32(3),
        None,
    ]
    tx = shard_update(copying(), AXIS)
    state = state_of(tx, params, 8)

    resized = resize_state(state, tx, params, modes.mesh(3))
    shapes = jax.eval_shape(lambda: params)
    of_shapes = resize_state(state, tx, shapes, modes.mesh(3))

    assert_same(resized, state_of(tx, params, 3))
    assert_same(of_shapes, resized)
    with self.assertRaisesRegex(TypeError, '`mesh` must be a `jax.sharding'):
      resize_state(state, tx, params, AXIS)

  @cases.parameters(
      (8, [(4, 4)], [(16,)], r'\(.*\) instead of \(.*\) at .*\[0\]'),
      (1, [(2, 3, 5)], [(5, 6)], r'\(.*\) instead of \(.*\) at .*\[0\]'),
      (1, [(1,)], [()], r'\(.*\) instead of \(.*\) at .*\[0\]'),
  )
  def test_refuses_slices_of_other_leaves(self, before, shapes, others, words):
    tx = shard_update(copying(), AXIS)
    state = jax.device_get(state_of(tx, list(map(np.zeros, shapes)), before))

    message = f'`state` was not created by .* these parameters: .*{words}'
    with self.assertRaisesRegex(ValueError, message):
      resize_state(state, tx, list(map(np.zeros, others)), modes.mesh(4))

  @cases.parameters('numpy', 'other axis')
  def test_slices_without_their_mesh_are_resized_in_two_steps(self, where):
    tx, params = shard_update(copying(), AXIS), np.arange(9.0, dtype='f')
    old_mesh = modes.mesh(8)
    state = jax.device_get(state_of(tx, params, 8))
    if where == 'other axis':
      mesh = jax.make_mesh((8,), ('rows',))
      state = jax.device_put(state, jax.NamedSharding(mesh, P('rows')))

    message = (
        r'`resize_state` got slices at \.inner_state .* Call `unshard_state\('
        r'jax\.device_get\(state\), old_tx, params, old_mesh\)`.* `shard_state`'
    )
    with self.assertRaisesRegex(ValueError, message):
      resize_state(state, tx, params, modes.mesh(4))
    saved = unshard_state(jax.device_get(state), tx, params, old_mesh)
    resized = shard_state(saved, tx, params, modes.mesh(4))

    assert_same(resized, state_of(tx, params, 4))

  def test_slices_move_to_a_mesh_with_another_axis(self):
    old_tx, tx = shard_update(copying(), AXIS), shard_update(copying(), 'rows')
    params = np.arange(9.0, dtype='f')
    state = state_of(old_tx, params, 8)
    mesh = jax.make_mesh((4,), ('rows',), devices=jax.devices()[:4])

    with self.assertRaisesRegex(ValueError, 'the transformation for its axes'):
      resize_state(state, tx, params, mesh)
    state = jax.device_get(state)
    saved = unshard_state(state, old_tx, params, modes.mesh(8))
    moved = shard_state(saved, tx, params, mesh)

    assert_same(moved, init_state(tx, params, mesh))

  def test_slices_are_resized_while_the_new_mesh_is_set(self):
    tx, params = shard_update(copying(), AXIS), np.arange(9.0, dtype='f')
    state = state_of(tx, params, 8)
    mesh = modes.mesh(4)

    with jax.set_mesh(mesh):
      resized = resize_state(state, tx, params, mesh)

    assert_same(resized, state_of(tx, params, 4))

  @cases.parameters(
      # The slices have the same shapes.
      ((4, 2), (2, 4), (8, 6), None),
      # The parts of the parameter are padded.
      ((1, 2), (4, 2), (6, 5), r'`in_specs` shards .* for \.inner_state'),
  )
  def test_resizing_slices_of_sharded_parameters(
      self, before, after, shape, words
  ):
    tx = shard_update(copying(), AXIS)
    params = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    mesh, other = map(two_axes, (before, after))
    state = init_state(tx, params, mesh, in_specs=P('model'))
    there = init_state(tx, params, other, in_specs=P('model'))

    if words is None:
      resized = resize_state(state, tx, params, other, in_specs=P('model'))
      assert_same(resized, there)
      return
    with self.assertRaisesRegex(ValueError, words):
      resize_state(state, tx, params, other, in_specs=P('model'))


ZEROS = np.zeros(2, np.float32)
# Gates that pass weights to a window.
GATES = {
    'none': lambda tx: tx,
    'guard': lambda tx: guard(tx, AXIS, on_bad='exclude'),
    'drop_stale': lambda tx: drop_stale(2, tx, axis_name=AXIS),
    'scale_by_staleness': lambda tx: st.contrib.scale_by_staleness(
        'inverse', tx, axis_name=AXIS
    ),
}


class WindowTest(parameterized.TestCase):
  """The unfinished window of `tower_reduce`, and the counters of `guard`."""

  @cases.parameters(
      (8, 3, [[0, 1, 2], [3, 4, 5], [6, 7]]), (3, 5, [[0], [1], [2], [], []])
  )
  def test_windows_of_merged_shards_are_combined(self, before, after, parts):
    inner = guard(averaged(optax.identity()), AXIS)
    tx = tower_reduce(4, inner, axis_name=AXIS)
    params = jnp.zeros((2, 3))
    rng = np.random.default_rng(0)
    total = rng.integers(-9, 9, (before, 2, 3)).astype(np.float32)
    weight = np.arange(before, dtype=np.float32)
    step = rng.integers(0, 99, before)
    bad = rng.integers(-1, 9, before)

    def state_with(num_shards, last_bad_step, *fields):
      state = state_of(tx, params, num_shards)
      inner = replaced(state.inner_state, last_bad_step=last_bad_step)
      names = 'total', 'total_weight', 'oldest_local_step'
      fields = dict(zip(names, fields, strict=True))
      return replaced(state, tower_count=2, **fields, inner_state=inner)

    state = state_with(before, bad, total, weight, step)
    resized = resize_state(state, tx, params, modes.mesh(after))

    def merged(combine, x, empty=0):
      none = np.full(x.shape[1:], empty)
      return np.stack([combine(x[p], axis=0) if p else none for p in parts])

    sums = merged(np.sum, total), merged(np.sum, weight)
    oldest = merged(np.min, step, np.iinfo(np.int32).max)
    bad = merged(np.max, bad, -1)
    assert_same(resized, state_with(after, bad, *sums, oldest))

  @cases.parameters(
      ('mean', [0, 1, 2, 3, 4, 5, 6, 7], [0.5, 2.5, 4.5, 6.5], 3),
      ('mean', [3, 6, 9], [8, 16, 24, 0, 0, 0, 0, 0], 3),
      ('sum', [0, 1, 2, 3, 4, 5, 6, 7], [28], 3),
      ('sum', [3, 6, 9], [3, 6, 9, 0, 0, 0, 0, 0], 3),
      # Weights that look like numbers of towers, and windows whose result does
      # not depend on `reduction`.
      ('weighted', [1, 2, 3, 4, 5, 6, 7, 8], [6, 15, 15], [9, 9, 6]),
      (None, [0] * 8, [0] * 4, 0),
      (None, [1, 2, 3], [1, 2, 3], 3),
  )
  def test_window_without_weights_is_merged(self, how, before, after, weights):
    tx = tower_reduce(4, averaged(optax.identity()), axis_name=AXIS)
    tower, params = 3 if any(before) else 0, np.float32(0)
    given = dict(total=before, total_weight=np.full(len(before), tower))
    state = saved(tx, params, len(before), tower_count=tower, **given)

    mesh = modes.mesh(len(after))
    resized = resize_state(state, tx, params, mesh, reduction=how)

    self.assertEqual(resized.tower_count, tower)
    np.testing.assert_array_equal(resized.total, after)
    weights = np.broadcast_to(weights, len(after))
    np.testing.assert_array_equal(resized.total_weight, weights)

  @cases.parameters(
      ('sum', 'none', 'mean', 8),
      ('sum', 'none', 'mean', 1),
      ('sum', 'guard', 'mean', 2),
      ('sum', 'drop_stale', 'weighted', 2),
      ('sum', 'scale_by_staleness', 'mean', 2),
      ('mean', 'guard', 'mean', 2),
      fast='2',
  )
  def test_a_weighted_window_ends_with_the_same_mean(
      self, kind, gate, how, after
  ):
    inner = averaged(optax.identity())
    tx = tower_reduce(2, inner, axis_name=AXIS, reduction=kind)
    # The first shard has no weight yet.
    total = np.float32([[0, 0], [6, 8], [18, 21], [36, 40]])
    given = {'tower_count': 1, 'total': total, 'total_weight': np.arange(4)}
    state = saved(tx, ZEROS, 4, **given)
    tx = GATES[gate](tx)
    if gate != 'none':
      state = saved(tx, ZEROS, 4, inner_state=state)

    mesh = modes.mesh(after)
    resized = resize_state(state, tx, ZEROS, mesh, reduction=how)

    specs = st.state_specs(tx, ZEROS, mesh)

    def last(state, weight):
      zeros = st.per_shard(ZEROS, AXIS)
      return tx.update(zeros, state, weight=weight[0], local_step=0)[0]

    specs = dict(in_specs=(specs, P(AXIS)), out_specs=P())
    last = jax.shard_map(last, mesh=mesh, **specs)
    given = np.full(after, gate != 'none', np.float32)
    updates = jax.jit(last)(resized, given)
    divisor = 4 if kind == 'sum' else 1 + 2 + 3 + after
    np.testing.assert_allclose(updates, total.sum(0) / divisor, rtol=1e-6)
    window = resized if gate == 'none' else resized.inner_state
    self.assertEqual(np.sum(window.total_weight), 1 + 2 + 3)

  def test_guard_that_needs_several_shards_is_resized(self):
    inner = shard_update(copying(), AXIS)
    tx = guard(inner, AXIS, on_bad='exclude', min_shards=3, spikes=SPIKES)
    state = state_of(tx, jnp.arange(9.0), 8)
    last_spike = {'norm': np.arange(8)}
    state = replaced(state, bad_shard_count=4, spikes=spiked(state, last_spike))

    resized = resize_state(state, tx, jnp.arange(9.0), modes.mesh(4))

    expected = state_of(tx, jnp.arange(9.0), 4)
    spikes = expected.spikes._replace(
        spike_count=resized.spikes.spike_count,
        last_spike={'norm': np.array([1, 3, 5, 7], np.int32)},
    )
    assert_same(resized, replaced(expected, bad_shard_count=4, spikes=spikes))
    self.assertEqual(resized.spikes.spike_count, 5)

  def test_norms_of_reduced_updates_are_kept(self):
    # They depend on the global batch, and not on the number of shards.
    tx = averaged(guard(optax.identity(), spikes=SPIKES))
    state = state_of(tx, ZEROS, 8)
    state = (state[0], replaced(state[1], spikes=spiked(state[1], {'norm': 2})))

    resized = resize_state(state, tx, ZEROS, modes.mesh(4))

    norm, expected = (x[1].spikes.statistics['norm'] for x in (resized, state))
    chex.assert_trees_all_equal(*jax.device_get((norm, expected)))

  @cases.parameters(
      # Weights that are numbers of towers, and others.
      (
          'mean',
          3,
          [3] * 8,
          {},
          "window at .total .*reduction.*'sum' and 'weighted'",
      ),
      ('sum', 1, range(8), {}, 'at .total .* or has `reduction=.sum.`'),
      ('mean', 0, [0] * 8, {'reduction': 'max'}, "`reduction` .*'max'"),
      (
          'mean',
          0,
          [0] * 8,
          {'params': ZEROS[:1]},
          'got the shape .8, 2. instead of',
      ),
  )
  def test_refuses_windows_that_cannot_be_resized(
      self, kind, tower, weights, changes, message
  ):
    inner = averaged(optax.identity())
    tx = tower_reduce(4, inner, axis_name=AXIS, reduction=kind)
    state = saved(tx, ZEROS, 8, tower_count=tower, total_weight=weights)
    given = {'params': ZEROS, 'mesh': modes.mesh(4)} | changes

    with self.assertRaisesRegex(ValueError, message):
      resize_state(state, tx, **given)


class KeepState(NamedTuple):
  """State of `keep`: the last update of each shard, with an axis of shards."""

  kept: Any


def keep():
  def init_fn(params):
    return KeepState(st.per_shard(params, AXIS)[None])

  def update_fn(updates, state, params=None):
    del state, params
    return updates, KeepState(updates[None])

  return optax.GradientTransformation(init_fn, update_fn)


class CopyTest(parameterized.TestCase):
  """State that is copied, and state that is refused."""

  def test_reads_only_the_shapes_of_parameters(self):
    params = jnp.zeros(3)
    state = state_of(optax.trace(0.9), params, 8)
    params.delete()

    resized = resize_state(state, optax.trace(0.9), params, modes.mesh(4))

    np.testing.assert_array_equal(resized.trace, np.zeros(3))

  @cases.parameters((3, False), (8, False), (8, True), fast='8')
  def test_each_shard_gets_a_random_key(self, num_shards, is_shared):
    noise = optax.add_noise(0.1, 0.5, jax.random.key(3))
    tx = st.contrib.local_updates(noise, cross_shard_mean(AXIS), AXIS, every=4)
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

  def test_state_sharded_like_parameters_is_copied(self):
    tx = tower_reduce(TOWERS, averaged(adam()), axis_name=AXIS)
    params, specs = np.zeros((4, 6), np.float32), P('model')
    mesh, other = map(two_axes, ((4, 2), (2, 4)))
    state = init_state(tx, params, mesh, in_specs=specs)
    state = replaced(state, total=np.arange(96).reshape(4, 4, 6))

    resized = resize_state(state, tx, params, other, in_specs=specs)

    expected = init_state(tx, params, other, in_specs=specs)
    total = np.arange(96).reshape(2, 2, 4, 6).sum(1)
    assert_same(resized, replaced(expected, total=total))
    self.assertEqual(resized.total.sharding.spec, P(AXIS, 'model'))

  def test_undeclared_state_is_copied_to_as_many_shards(self):
    state = state_of(keep(), np.arange(3.0, dtype=np.float32), 8)

    resized = resize_state(state, keep(), np.zeros(3, 'f'), modes.mesh())

    assert_same(resized, state)
    message = (
        r'\.kept has .* \(8, 3\) instead of \(4, 3\).* does not declare a rule'
    )
    with self.assertRaisesRegex(ValueError, message):
      resize_state(state, keep(), np.zeros(3, 'f'), modes.mesh(4))

  @cases.parameters(
      (adam(), optax.sgd(0.1), (3,), {}, 'the tree'),
      (adam(), adam(), (4,), {}, r'\(3,\) instead of \(4,\) at .*mu'),
      (adam(), adam(), (3, 1), {}, r'\(3,\) instead of \(3, 1\) at'),
      # Without `axis_name`, the total has no axis of shards.
      (
          tower_reduce(4),
          tower_reduce(4),
          (6,),
          {},
          r'\(3,\) instead of .* at \.total',
      ),
      (
          *(tower_reduce(4), tower_reduce(4), (6,), {'in_specs': P(AXIS)}),
          r'\(3,\) instead of .* at \.total',
      ),
  )
  def test_refuses_state_of_other_transformations_or_parameters(
      self, tx, other, shape, options, words
  ):
    state = saved(tx, np.zeros(3, np.float32), 8)

    message = f'`state` .* by this .* these parameters: got .*{words}'
    with self.assertRaisesRegex(ValueError, message):
      params = np.zeros(shape, np.float32)
      resize_state(state, other, params, modes.mesh(3), **options)

  def test_refuses_another_dtype(self):
    state, params = optax.TraceState([np.zeros(3)]), [np.zeros(3, np.float32)]

    message = r'`state` .* got float64 instead of float32 at \.trace\[0\]'
    with self.assertRaisesRegex(TypeError, message):
      resize_state(state, optax.trace(0.9), params, modes.mesh(4))


# Two processes with one device each; the state is sharded over both.
WORKER = """
import jax, jax.numpy as jnp, numpy as np, optax
import shard_transforms as st
st.launch.join_processes()
mesh = jax.make_mesh((2,), ('data',), (jax.sharding.AxisType.Auto,))
tx = st.shard_update(optax.trace(0.9), 'data')
params = jnp.zeros(5)
state = st.ShardUpdateState(optax.TraceState(np.arange(5, dtype=np.float32)))
resized = st.resize_state(state, tx, params, mesh)
full = st.unshard_state(resized, tx, params, mesh)
assert full.inner_state.trace.is_fully_replicated
assert np.asarray(full.inner_state.trace).tolist() == [0, 1, 2, 3, 4]
for tx2 in tx, st.contrib.owned_update(optax.trace(0.9), 'data'):
  params2 = {'a': np.ones((4, 2), 'float32'), 'b': np.ones(2, 'float32')}
  state2 = st.init_state(tx2, params2, mesh)
  full2 = st.unshard_state(state2, tx2, params2, mesh)
  a = full2.inner_state.trace['a']
  assert a.shape == (4, 2) and a.addressable_data(0).shape == (2, 2), a
  full2 = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s))(full2)
  placed = st.shard_state(full2, tx2, params2, mesh)
  assert jax.tree.structure(placed) == jax.tree.structure(state2)
  again = st.unshard_state(placed, tx2, params2, mesh)
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


# The state is only on the device of process 0.
HEALTH_WORKER = """
import jax, numpy as np, optax
import shard_transforms as st
st.launch.join_processes()
mesh = jax.sharding.Mesh(jax.devices()[:1], ('data',))
sharding = jax.NamedSharding(mesh, jax.P())
state = jax.tree.map(
    lambda x: jax.make_array_from_callback(
        x.shape, sharding, lambda _: np.asarray(x), dtype=x.dtype
    ),
    st.guard(optax.sgd(0.1)).init(np.zeros(3, 'float32')),
)
st.monitoring.check_health(state)
print(f'Process {jax.process_index()} is healthy.')
"""


class ProcessesTest(parameterized.TestCase):

  @pytest.mark.slow
  def test_refuses_state_on_other_processes(self):
    message = r'partly on other processes, at \.inner_state\.trace'
    self.assertRegex(self.run_worker(WORKER), f'got a state that is {message}')

  @pytest.mark.slow
  def test_health_is_checked_where_the_state_is(self):
    # The launcher fails if process 1 does, and prints the output of process 0.
    self.assertIn('Process 0 is healthy.', self.run_worker(HEALTH_WORKER))

  def run_worker(self, worker):
    """Runs two processes with one device each; returns what they print."""
    source = pathlib.Path(st.__file__).parents[1]
    main = (
        'import sys\nfrom shard_transforms import launch\n'
        'launch.run_processes(2, [sys.executable, "-c", sys.argv[1]])'
    )

    done = subprocess.run(
        [sys.executable, '-c', main, worker],
        # Python first searches this folder for imports.
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
    return done.stdout


class DeclaredStateTest(parameterized.TestCase):
  """Custom states that declare resize rules."""

  def resized(self, num_shards, **values):
    """Returns a custom state inside of wrappers, resized from 4 shards."""
    tx = optax.chain(
        guard(declared_state.tally(shard_update(adam(), AXIS), AXIS), AXIS),
        optax.identity(),
    )
    params = np.arange(5, dtype=np.float32)
    state = optax.tree_utils.tree_set(state_of(tx, params, 4), **values)
    state = resize_state(state, tx, params, modes.mesh(num_shards))
    return state[0].inner_state

  @parameterized.named_parameters(
      ('uneven', 3, [3, 3, 4], [4.5, 4.5, 6], [1, 3, 4], [6, 7, 8]),
      (
          *('more', 5, [1, 2, 3, 4, 0], [2.5, 5, 7.5, 10, 0]),
          *([1, 2, 3, 4, 100], [5, 6, 7, 8, 8]),
      ),
  )
  def test_each_rule_is_applied(self, num_shards, seen, rate, least, most):
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
    # The rules of inner states are applied, too.
    mu = optax.tree_utils.tree_get(state, 'mu')
    self.assertEqual(mu.shape, (num_shards * -(-5 // num_shards),))

  def test_fields_are_not_reset_on_as_many_shards(self):
    state = self.resized(4, last_norms=np.full(3, 7, np.float32))

    np.testing.assert_array_equal(state.recent['last_norms'], [7] * 3)

  @cases.parameters(
      ({'seem': Rule(resize='sum')}, ValueError, "fields .* 'seem'"),
      (
          {'seen': Rule(resize=lambda state, reduction: reduction)},
          TypeError,
          "`state_rules.Rule`, got 'sum' for 'seen'",
      ),
  )
  def test_error_names_the_invalid_rule(self, table, error, message):
    class State(NamedTuple):
      seen: jax.Array
      rules = table

    def init(params):
      del params
      return State(st.per_shard(jnp.zeros(1), AXIS))

    tx = optax.GradientTransformation(init, optax.identity().update)
    state = saved(tx, (), 4)

    with self.assertRaisesRegex(error, f'`rules` of `State` .*{message}'):
      resize_state(state, tx, (), modes.mesh(2), reduction='sum')

  @cases.parameters(([1, 2], [1, 2]), (3.0, [3, 3]), (np.zeros(3), None))
  def test_the_rows_of_a_function_are_checked(self, rows, expected):
    class State(NamedTuple):
      seen: jax.Array
      rules = {'seen': Rule(resize=lambda *_: lambda *_: rows)}

    tx = optax.GradientTransformation(
        lambda params: State(st.per_shard(jnp.zeros(1), AXIS)),
        optax.identity().update,
    )
    state = saved(tx, (), 4)

    if expected is not None:
      resized = resize_state(state, tx, (), modes.mesh(2))
      np.testing.assert_array_equal(resized.seen, expected)
      return
    with self.assertRaisesRegex(ValueError, r'\.seen .*\(2,\).*\(3,\)'):
      resize_state(state, tx, (), modes.mesh(2))
