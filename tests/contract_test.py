"""The contract of all transformations: one table, and one test per invariant.

A new transformation is a new row of `ROWS`.
"""

from collections.abc import Callable
import functools
import itertools
import tempfile
from typing import Any, Literal, NamedTuple

from absl.testing import parameterized
import chex
from flax import serialization
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import orbax.checkpoint
import pytest

import cases
import modes
import shard_transforms
from shard_transforms import clip_by_global_norm
from shard_transforms import contrib
from shard_transforms import cross_shard_mean
from shard_transforms import cross_shard_sum
from shard_transforms import drop_stale
from shard_transforms import guard
from shard_transforms import monitoring
from shard_transforms import reduce_stacked_towers
from shard_transforms import shard_update
from shard_transforms import tower_reduce
from shard_transforms.contrib import compensate_delay
from shard_transforms.contrib import delay_updates
from shard_transforms.contrib import local_updates
from shard_transforms.contrib import master_weights
from shard_transforms.contrib import reproducible
from shard_transforms.contrib import scale_by_staleness
from shard_transforms.contrib import track_noise_scale
from shard_transforms.contrib import trimmed_mean
from shard_transforms.contrib.compression import cast
from shard_transforms.contrib.compression import compressed_mean
from shard_transforms.contrib.compression import power_sgd
from shard_transforms.monitoring import track_divergence

AXIS = modes.AXIS
SHARDS, TOWERS, CALLS = 4, 3, 6
FLOAT32_TOLERANCE = 1e-6
MESH = functools.partial(modes.mesh, SHARDS)
SPIKES = shard_transforms.SpikeRule(
    max_norm=1e9, max_stds=1e9, window=2, record_spikes=True, on_spike='clip'
)

# With a tiny `eps`, Adam would hide a wrong scale of what it is given.
ADAM = optax.adam(0.1, eps=1.0)
SGD = optax.sgd(0.1, momentum=0.9)


def mean_of_shards(updates, num_towers):
  del num_towers
  return updates.mean(0)


def sum_of_shards(updates, num_towers):
  del num_towers
  return updates.sum(0)


def mean_of_stacked_towers(updates, num_towers):
  del num_towers
  return updates.mean((0, 2))


def mean_of_windows(updates, num_towers):
  """Returns the mean of a window in its last call, and zeros before."""
  num_shards, num_calls, *shape = updates.shape
  windows = updates.reshape(
      num_shards, num_calls // num_towers, num_towers, *shape
  )
  means = np.zeros(updates.shape[1:], updates.dtype)
  means[num_towers - 1 :: num_towers] = windows.mean((0, 2))
  return means


def delayed_mean(updates, num_towers):
  """Returns the means over shards, `num_towers - 1` calls later."""
  zeros = np.zeros((num_towers - 1, *updates.shape[2:]), updates.dtype)
  return np.concatenate([zeros, updates.mean(0)])[: updates.shape[1]]


def in_each_call(aggregate):
  """Applies a function of the updates of all shards to those of each call."""

  def expected(updates, num_towers):
    del num_towers
    return np.stack([aggregate(x) for x in updates.swapaxes(0, 1)])

  return expected


class Row(NamedTuple):
  """A transformation and its properties for the tests.

  Attributes:
    build: Takes an inner transformation and a number of towers; returns the
      transformation around the inner one, or a chain of both.
    reduction: The function that reduces over shards, and whose name is in the
      error if updates are already reduced. Without one, the tests put
      `cross_shard_mean` before the transformation.
    expected: Takes updates [shards, calls, ...], or [shards, calls, towers,
      ...] if towers are stacked, and the number of towers; returns the
      correct results [calls, ...].
    towers: How the towers of a step arrive.
    extra_args: The extra arguments that `update` uses.
    inner_runs: When the inner transformation runs.
    inner_params: The parameters that the inner transformation receives: whole
      leaves, the slices of a shard, or the leaves that a shard owns.
    init_needs_axis: Whether `init` must be called in a mapped function.
    keeps_params: Whether its state has parameters, so that `update` must be
      given those to which the last updates were applied.
    tolerance: The largest relative error. If it is not that of float32, updates
      are positive: a sum that nearly cancels would have a larger error.
  """

  build: Callable[[optax.GradientTransformation, int], Any]
  reduction: str | None = None
  expected: Callable[[np.ndarray, int], np.ndarray] = mean_of_shards
  towers: Literal['one', 'in turn', 'stacked'] = 'one'
  extra_args: tuple[str, ...] = ('weight',)
  inner_runs: Literal['in each call', 'in each window'] = 'in each call'
  inner_params: Literal['whole', 'slices', 'owned'] = 'whole'
  init_needs_axis: bool = False
  keeps_params: bool = False
  tolerance: float = FLOAT32_TOLERANCE


# Properties that several rows share.
WINDOWS: dict[str, Any] = dict(
    towers='in turn', expected=mean_of_windows, inner_runs='in each window'
)
STACKED: dict[str, Any] = dict(
    towers='stacked', expected=mean_of_stacked_towers
)
STALE: dict[str, Any] = dict(extra_args=('weight', 'local_step'))
DELAYED: dict[str, Any] = dict(extra_args=(), expected=delayed_mean)


def _with_current_params(tx):
  """Returns `tx` with the current parameters as `read_params`."""

  def update_fn(updates, state, params=None, **extra_args):
    return tx.update(updates, state, params, read_params=params, **extra_args)

  return optax.GradientTransformationExtraArgs(tx.init, update_fn)


def _by_parts(aggregate):
  """Applies a function to the real and imaginary parts of complex leaves."""

  def parts(x):
    if np.iscomplexobj(x):
      return aggregate(x.real) + 1j * aggregate(x.imag)
    return aggregate(x)

  return parts


def _adasum(x):
  while len(x) > 1:
    x = np.stack([_pair(*pair) for pair in zip(x[::2], x[1::2], strict=True)])
  return x[0]


def _pair(a, b):
  dot = np.sum(a * b.conj()).real
  squares = [np.sum(x * x.conj()).real for x in (a, b)]
  along = [dot / (2 * square) if square else 0 for square in squares]
  return (1 - along[0]) * a + (1 - along[1]) * b


def _signs(x):
  return np.where(2 * np.sum(x < 0, axis=0) > len(x), -1, 1).astype(x.dtype)


def _link(*links, **options):
  """Returns the row of transformations in a chain before the inner one."""
  return Row(lambda inner, n: optax.chain(*links, inner), **options)


def _reduction(name, tx, **options):
  """Returns the row of a reduction in a chain before the inner one."""
  return _link(tx, reduction=name, **options)


def _mean(inner):
  return optax.chain(cross_shard_mean(AXIS), inner)


ROWS = {
    'cross_shard_mean': _reduction('cross_shard_mean', cross_shard_mean(AXIS)),
    'reproducible.cross_shard_mean': _reduction(
        'reproducible.cross_shard_mean', reproducible.cross_shard_mean(AXIS)
    ),
    'reproducible.cross_shard_sum': _reduction(
        'reproducible.cross_shard_sum',
        reproducible.cross_shard_sum(AXIS),
        expected=sum_of_shards,
    ),
    # Numbers of towers are powers of two.
    'reproducible.tower_reduce': Row(
        lambda inner, n: reproducible.tower_reduce(1, inner, AXIS),
        reduction='reproducible.tower_reduce',
        init_needs_axis=True,
    ),
    'reproducible.sharded_tower_reduce': Row(
        lambda inner, n: reproducible.sharded_tower_reduce(1, inner, AXIS),
        reduction='reproducible.sharded_tower_reduce',
        inner_params='slices',
        init_needs_axis=True,
    ),
    'cross_shard_sum': _reduction(
        'cross_shard_sum', cross_shard_sum(AXIS), expected=sum_of_shards
    ),
    'shard_update': Row(
        lambda inner, n: shard_update(inner, AXIS),
        reduction='shard_update',
        inner_params='slices',
        init_needs_axis=True,
    ),
    'owned_update': Row(
        lambda inner, n: contrib.owned_update(inner, AXIS),
        reduction='owned_update',
        inner_params='owned',
        init_needs_axis=True,
    ),
    'tower_reduce': Row(lambda inner, n: tower_reduce(n, inner), **WINDOWS),
    'tower_reduce_in_chain': Row(
        lambda inner, n: optax.chain(tower_reduce(n), inner),
        **WINDOWS | dict(inner_runs='in each call'),
    ),
    'tower_reduce_per_shard': Row(
        lambda inner, n: tower_reduce(n, _mean(inner), axis_name=AXIS),
        reduction='tower_reduce',
        init_needs_axis=True,
        **WINDOWS,
    ),
    'reduce_stacked_towers': Row(
        lambda inner, n: reduce_stacked_towers(n, inner), **STACKED
    ),
    'reduce_stacked_towers_in_chain': Row(
        lambda inner, n: optax.chain(reduce_stacked_towers(n), inner), **STACKED
    ),
    'reduce_stacked_towers_per_shard': Row(
        lambda inner, n: reduce_stacked_towers(n, _mean(inner)),
        reduction='cross_shard_mean',
        **STACKED,
    ),
    'drop_stale': Row(lambda inner, n: drop_stale(2, inner), **STALE),
    'drop_stale_in_chain': _link(drop_stale(2), **STALE),
    'drop_stale_per_shard': Row(
        lambda inner, n: drop_stale(2, _mean(inner), axis_name=AXIS),
        reduction='drop_stale',
        **STALE,
    ),
    'scale_by_staleness': _link(scale_by_staleness('inverse'), **STALE),
    'scale_by_staleness_per_shard': Row(
        lambda inner, n: scale_by_staleness(
            'exponential', _mean(inner), rate=2.0, axis_name=AXIS
        ),
        reduction='scale_by_staleness',
        **STALE,
    ),
    'compensate_delay': _link(
        _with_current_params(compensate_delay(2.0, decay=0.9))
    ),
    'compensate_delay_per_shard': _link(
        _with_current_params(compensate_delay(2.0, decay=0.9, axis_name=AXIS)),
        cross_shard_mean(AXIS),
        reduction='compensate_delay',
        init_needs_axis=True,
    ),
    # Shards start each step with the same parameters, because a round has only
    # one step.
    'local_updates': Row(
        lambda inner, n: local_updates(
            optax.sgd(1.0), _mean(inner), AXIS, every=1
        ),
        reduction='local_updates',
        init_needs_axis=True,
        keeps_params=True,
    ),
    'master_weights': Row(
        lambda inner, n: master_weights(inner), keeps_params=True
    ),
    'shard_update_of_master_weights': Row(
        lambda inner, n: shard_update(master_weights(inner), AXIS),
        reduction='shard_update',
        inner_params='slices',
        init_needs_axis=True,
        keeps_params=True,
    ),
    'delay_updates': Row(
        lambda inner, n: optax.chain(delay_updates(n - 1), inner), **DELAYED
    ),
    'delay_updates_per_shard': Row(
        lambda inner, n: optax.chain(
            delay_updates(n - 1, axis_name=AXIS), _mean(inner)
        ),
        reduction='delay_updates',
        init_needs_axis=True,
        **DELAYED,
    ),
    'guard': Row(lambda inner, n: guard(inner, spikes=SPIKES)),
    'guard_per_shard': Row(
        lambda inner, n: guard(_mean(inner), AXIS, spikes=SPIKES),
        reduction='guard',
        init_needs_axis=True,
    ),
    'guard_that_excludes': Row(
        lambda inner, n: guard(
            _mean(inner), AXIS, on_bad='exclude', min_shards=1
        ),
        reduction='guard',
        init_needs_axis=True,
    ),
    'tower_reduce_of_guard_of_shard_update': Row(
        lambda inner, n: tower_reduce(
            n,
            guard(shard_update(inner, AXIS), AXIS, on_bad='exclude'),
            axis_name=AXIS,
        ),
        reduction='tower_reduce',
        inner_params='slices',
        init_needs_axis=True,
        **WINDOWS,
    ),
    'compressed_mean': _reduction(
        'compressed_mean',
        compressed_mean(AXIS, cast('float32'), min_elements=3),
        init_needs_axis=True,
    ),
    'power_sgd': _reduction(
        'power_sgd', power_sgd(AXIS, 2, min_ratio=1), init_needs_axis=True
    ),
    'clip_by_global_norm': _link(clip_by_global_norm(1e9)),
    'adasum': _reduction(
        'adasum',
        contrib.adasum(AXIS),
        expected=in_each_call(_adasum),
        # The last bit of a leaf of 16 bits.
        tolerance=1e-2,
    ),
    'coordinate_median': _reduction(
        'coordinate_median',
        contrib.coordinate_median(AXIS),
        expected=in_each_call(_by_parts(lambda x: np.median(x, axis=0))),
    ),
    'trimmed_mean': _reduction('trimmed_mean', contrib.trimmed_mean(AXIS, 0)),
    'majority_vote': _reduction(
        'majority_vote',
        contrib.majority_vote(AXIS),
        expected=in_each_call(_by_parts(_signs)),
    ),
    'track_noise_scale': _reduction(
        'track_noise_scale', track_noise_scale(AXIS)
    ),
    'track_divergence': _link(
        cross_shard_mean(AXIS),
        track_divergence(AXIS, every=2),
        reduction='cross_shard_mean',
    ),
}
# Arguments that must be Python values.
STATIC_ARGS = (
    (tower_reduce, 'num_towers', dict(num_towers=3)),
    (reduce_stacked_towers, 'num_towers', dict(num_towers=3)),
    (drop_stale, 'staleness', dict(staleness=3)),
    (delay_updates, 'steps', dict(steps=3)),
    (trimmed_mean, 'num_trimmed', dict(axis_name=AXIS, num_trimmed=1)),
    (track_divergence, 'every', dict(axis_name=AXIS, every=3)),
)
# Documented fields of states: counters, and a weight.
FIELDS = {
    'TowerReduceState': ('tower_count', 'total_weight', 'oldest_local_step'),
    'DropStaleState': ('global_step', 'stale_count', 'stale_shard_count'),
    'ScaleByStalenessState': ('global_step',),
    'GuardState': (
        *('num_updates', 'skipped_count', 'consecutive_skipped'),
        *('bad_shard_count', 'last_bad_step', 'max_consecutive'),
    ),
}


def names_of_rows(condition):
  return tuple(name for name, row in ROWS.items() if condition(row))


MAIN_ROWS = ('cross_shard_mean', 'guard', 'shard_update', 'tower_reduce')
WITH_REDUCTION = names_of_rows(lambda row: row.reduction)
WITHOUT_PARAMS = names_of_rows(lambda row: not row.keeps_params)


class ProbeState(NamedTuple):
  """The arguments of the last call of a probe.

  Attributes:
    params: The parameters.
    value: The extra argument `value`.
    num_calls: The number of calls so far.
  """

  params: Any
  value: jax.Array
  num_calls: jax.Array


def probe():
  """Returns a transformation that records its arguments."""

  def init_fn(params):
    zero = jnp.zeros([], jnp.int32)
    return ProbeState(jax.tree.map(jnp.zeros_like, params), zero, zero)

  def update_fn(updates, state, params=None, *, value, **extra_args):
    del extra_args
    return updates, ProbeState(params, value, state.num_calls + 1)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def odd_params():
  """Returns leaves of all kinds that a tree of parameters may have."""
  return {
      'scalar': jnp.float32(1),
      'matrix': jnp.ones((2, 5), jnp.float32),
      'half': jnp.ones(3, jnp.bfloat16),
      'complex': jnp.ones(2, jnp.complex64),
      'zero-sized': jnp.ones((0, 4), jnp.float32),
      'empty': {},
      'none': None,
      'masked': optax.MaskedNode(),
  }


def plain_params():
  return {'w': jnp.linspace(-1, 1, 5, dtype='float32'), 'b': jnp.float32(0.5)}


def shard_data(row, params, seed=0):
  """Returns gradients [shards, calls, ...] like `params`.

  They are integers, so that all but the matrix has an exact mean.
  """
  rng = np.random.default_rng(seed)
  lead = (SHARDS, CALLS) + ((TOWERS,) if row.towers == 'stacked' else ())

  def draw(param):
    positive = row.tolerance > FLOAT32_TOLERANCE
    least = 1 if positive else -9
    integers = TOWERS * rng.integers(least, 10, (*lead, *param.shape))
    if param.ndim == 2 and not positive:
      return rng.normal(size=integers.shape).astype(param.dtype)
    return np.asarray(integers, param.dtype)

  return jax.tree.map(draw, params)


def expected_updates(row, data, num_towers=TOWERS):
  """Returns the updates [calls, ...] of each call for the inner identity."""

  def expected(x):
    wide = np.asarray(x, np.complex128 if np.iscomplexobj(x) else np.float64)
    return row.expected(wide, num_towers).astype(x.dtype)

  return jax.tree.map(expected, data)


def calls_of_inner(row):
  """Returns for each call whether the inner transformation runs in it."""
  calls = np.arange(1, CALLS + 1)
  return calls % (TOWERS if row.inner_runs == 'in each window' else 1) == 0


def with_reduction(row, inner, num_towers=TOWERS):
  """Returns the transformation of a row, after a mean if it does not reduce."""
  tx = row.build(inner, num_towers)
  return tx if row.reduction else _mean(tx)


def extra_args_of(row, call):
  """Returns the extra arguments of a call without stale updates."""
  return {'local_step': call} if 'local_step' in row.extra_args else {}


def types_of(tree):
  """Returns what a call must not change of each leaf: its abstract value."""
  return jax.tree.map(lambda x: (jnp.shape(x), x.dtype, x.weak_type), tree)


def on_all_shards(tree):
  return jax.tree.map(lambda x: np.stack([x] * SHARDS), tree)


def slices_of(param):
  """Returns the slices [shards, ...] that shards keep of a parameter."""
  if not param.ndim or not param.size:
    return on_all_shards(param)
  # All elements as one row, because the dimensions are short.
  row = np.reshape(param, (*(1,) * (param.ndim - 1), -1))
  end = [(0, -size % SHARDS * (size > 1)) for size in row.shape]
  return np.stack(np.split(np.pad(row, end), SHARDS, -1))


def in_all_calls(params):
  return jax.tree.map(lambda x: np.stack([x] * CALLS), params)


class Calls(NamedTuple):
  """The calls of a transformation on all shards.

  Attributes:
    updates: The results [shards, calls, ...].
    inner: The `ProbeState` of the inner transformation, [shards, calls, ...].
    types_before: The types of the state before a call.
    types_after: The types of the state after a call.
  """

  updates: Any
  inner: ProbeState
  types_before: Any
  types_after: Any


def update_rows(txs, states, number, params, updates):
  """Calls the transformations of several rows, each with its own updates.

  Returns the results and the states by the names of rows.
  """
  results, new_states = {}, {}
  for name, tx in txs.items():
    try:
      results[name], new_states[name] = tx.update(
          updates[name],
          states[name],
          params,
          value=10 * number,
          **extra_args_of(ROWS[name], number),
      )
    except Exception as error:
      error.add_note(f'In the row {name!r}.')
      raise
  return results, new_states


def probes_in(states):
  return {
      name: optax.tree_utils.tree_get(state, 'ProbeState')
      for name, state in states.items()
  }


def run_calls(txs, mode, updates, params, num_shards=SHARDS):
  """Runs all calls of several rows, in one program.

  One program for all rows is traced and compiled several times as fast.

  Args:
    txs: Transformations around probes, by the names of rows.
    mode: One of `modes.NAMES`.
    updates: Updates [shards, calls, ...] by the names of rows.
    params: The parameters of each call, [calls, ...].
    num_shards: The size of the axis.

  Returns:
    A `Calls` for each name.
  """
  run = plain_calls if mode in modes.PLAIN else mapped_calls
  return run(txs, mode, updates, params, num_shards)


def mapped_calls(txs, mode, updates, params, num_shards):
  """Runs all calls in one scan in a mapped function."""
  types_before, types_after = {}, {}

  def one_call(states, inputs):
    types_before.update({k: types_of(x) for k, x in states.items()})
    updates, states = update_rows(txs, states, *inputs)
    types_after.update({k: types_of(x) for k, x in states.items()})
    return states, (updates, probes_in(states))

  def run_all(params, updates):
    first = jax.tree.map(lambda x: x[0], params)
    states = {name: tx.init(first) for name, tx in txs.items()}
    numbers = jnp.arange(CALLS, dtype=jnp.int32)
    return lax.scan(one_call, states, (numbers, params, updates))[1]

  mapped = modes.map_shards(mode, run_all, num_shards)
  results, probes = jax.device_get(mapped(params, updates))
  return {
      name: Calls(
          results[name], probes[name], types_before[name], types_after[name]
      )
      for name in txs
  }


def plain_calls(txs, mode, updates, params, num_shards):
  """Runs call by call under plain `jax.jit`."""
  mesh = modes.plain_mesh(mode, num_shards)
  txs = {name: shard_transforms.on_mesh(tx, mesh) for name, tx in txs.items()}

  @jax.jit
  def one_call(states, number, params, updates):
    stacked = {
        name: shard_transforms.Stacked(x, (AXIS,))
        for name, x in updates.items()
    }
    return update_rows(txs, states, number, params, stacked)

  calls = []
  with jax.set_mesh(mesh):
    params = modes.place(params, mesh)
    first = jax.tree.map(lambda x: x[0], params)
    states = {name: tx.init(first) for name, tx in txs.items()}
    types_before = {name: types_of(state) for name, state in states.items()}
    for i in range(CALLS):
      of_call = jax.tree.map(lambda x, i=i: x[:, i], updates)
      results, states = jax.block_until_ready(
          one_call(
              states,
              modes.place(np.int32(i), mesh),
              jax.tree.map(lambda x, i=i: x[i], params),
              modes.place(of_call, mesh, AXIS),
          )
      )
      calls.append(modes.stack_shards((results, probes_in(states))))
  results, probes = jax.tree.map(lambda *x: np.stack(x, 1), *calls)
  return {
      name: Calls(
          results[name],
          probes[name],
          types_before[name],
          types_of(states[name]),
      )
      for name in txs
  }


def weighted_call(txs, params, updates, weight):
  """Returns the updates [shards, ...] of the first call of several rows.

  Args:
    txs: Transformations of one tower, by the names of rows.
    params: The parameters.
    updates: A tree [shards, ...].
    weight: How much each shard counts.
  """

  def run_all(params, inputs):
    updates, weight = inputs
    stacked = jax.tree.map(lambda x: x[None], updates)
    results = {}
    for name, tx in txs.items():
      row = ROWS[name]
      try:
        results[name], _ = tx.update(
            stacked if row.towers == 'stacked' else updates,
            tx.init(params),
            params,
            weight=weight[None] if row.towers == 'stacked' else weight,
            **extra_args_of(row, np.int32(0)),
        )
      except Exception as error:
        error.add_note(f'In the row {name!r}.')
        raise
    return results

  mapped = modes.map_shards('shard_map', run_all, SHARDS)
  return jax.device_get(mapped(params, (updates, weight)))


def nested(row):
  """Returns the row, with gradient descent inside, in combinators of Optax.

  The row transforms the leaf 'w', 'b' is frozen and 'free' is masked.
  """

  def around(learning_rate):
    inner = optax.inject_hyperparams(optax.sgd)(learning_rate=learning_rate)
    tx = optax.partition(
        {'tx': with_reduction(row, inner), 'frozen': optax.set_to_zero()},
        {'w': 'tx', 'b': 'frozen', 'free': optax.MaskedNode()},
    )
    mask = {'w': True, 'b': True, 'free': False}
    return optax.chain(optax.identity(), optax.masked(tx, mask))

  tx = optax.inject_hyperparams(around)(learning_rate=0.5)
  return optax.chain(tx, optax.scale(2.0))


class Run(NamedTuple):
  """A row with an inner transformation, outside of a mapping if it needs none.

  Attributes:
    tx: The transformation.
    step: Takes parameters, state, the data of a call and its number; gives
      parameters and state.
    data: Gradients [shards, calls, ...], or [calls, ...] of their means.
  """

  tx: optax.GradientTransformationExtraArgs
  step: Callable[..., Any]
  data: Any


@functools.cache
def run_of(name, inner=ADAM):
  row = ROWS[name]
  tx = row.build(inner, TOWERS)

  def step(params, state, updates, number):
    extra_args = extra_args_of(row, number)
    updates, state = tx.update(updates, state, params, **extra_args)
    return optax.apply_updates(params, updates), state

  def one_shard(params, state, updates, number):
    updates = jax.tree.map(lambda x: x[0], updates)
    return step(params, state, updates, number)

  data = shard_data(row, plain_params())
  if not row.reduction:
    return Run(tx, step, jax.tree.map(lambda x: x.mean(0), data))

  mesh = MESH()
  specs = shard_transforms.state_specs(tx, plain_params(), mesh)
  mapped = jax.shard_map(
      one_shard,
      mesh=mesh,
      in_specs=(P(), specs, P(AXIS), P()),
      out_specs=(P(), specs),
  )
  return Run(tx, mapped, data)


def start_of(name):
  """Returns parameters and state at first."""
  tx, params = run_of(name).tx, plain_params()
  if not ROWS[name].reduction:
    return params, tx.init(params)
  params = jax.device_put(params, jax.NamedSharding(MESH(), P()))
  return params, shard_transforms.init_state(tx, params, MESH())


@functools.cache
def like_of(name):
  """Returns shapes, dtypes and shardings of parameters and state."""
  return jax.tree.map(
      orbax.checkpoint.utils.to_shape_dtype_struct, start_of(name)
  )


def data_of(name, call):
  axis = 1 if ROWS[name].reduction else 0
  return jax.tree.map(lambda x: x.take(call, axis), run_of(name).data)


def placed(trees):
  """Returns parameters and state by rows on devices, as steps give them."""
  shardings = {
      name: jax.tree.map(lambda x: x.sharding, like_of(name)) for name in trees
  }
  return jax.device_put(trees, shardings)


@functools.partial(jax.jit, donate_argnums=0)
def one_call(trees, data, number):
  """Returns parameters and state by rows after a call of each."""
  return {
      name: run_of(name).step(*trees[name], data[name], number)
      for name in trees
  }


def train_calls(trees, calls):
  """Returns parameters and state by rows after some calls, on devices.

  Raises:
    AssertionError: If a call leaves a buffer of its arguments.
  """
  trees = placed(trees)
  for call in calls:
    data = {name: data_of(name, call) for name in trees}
    donated = jax.tree.leaves(trees)
    # Calls that queue up on virtual devices can abort in JAX 0.10.
    trees = jax.block_until_ready(one_call(trees, data, np.int32(call)))
    if not all(leaf.is_deleted() for leaf in donated):
      raise AssertionError(f'The call {call} does not use donated buffers.')
  return trees


class TwoHalves(NamedTuple):
  """A training that was saved on the way.

  Attributes:
    at_half: Parameters and state after `HALF` calls, by the names of rows.
    params: The parameters after all calls, by the names of rows.
  """

  at_half: dict[str, Any]
  params: dict[str, Any]


@functools.cache
def trained_in_two_halves(kind):
  """Returns the training of all rows of one of `STATE_KINDS`."""
  start = {name: start_of(name) for name in STATE_KINDS[kind]}
  half = train_calls(start, range(HALF))
  # Copies, because the buffers are donated.
  at_half = jax.tree.map(np.array, half)
  return TwoHalves(at_half, params_of(train_calls(half, range(HALF, CALLS))))


def params_of(trees):
  return {name: params for name, (params, _) in jax.device_get(trees).items()}


def from_bytes(state):
  """Returns the state that flax restores from the bytes of a state."""
  # flax does not support static nodes; see docs/sharded_optimizer.md.
  serialization.register_serialization_state(
      contrib.Place, lambda place: {}, lambda place, _: place, override=True
  )
  # The bytes of flax are those of the state dict.
  zeros = jax.tree.map(np.zeros_like, state)
  return serialization.from_bytes(zeros, serialization.to_bytes(state))


@jax.jit
def train_inner(updates):
  """Returns the parameters from the inner transformation without a wrapper."""

  def step(carry, updates):
    params, state = carry
    updates, state = ADAM.update(updates, state)
    return (optax.apply_updates(params, updates), state), ()

  start = plain_params(), ADAM.init(plain_params())
  return lax.scan(step, start, updates)[0][0]


# Within a window of towers.
HALF = 4
# Rows whose steps are one program.
STATE_KINDS = {
    'slices': names_of_rows(
        lambda row: row.reduction and row.inner_params != 'whole'
    ),
    'per shard': names_of_rows(
        lambda row: row.init_needs_axis and row.inner_params == 'whole'
    ),
    'replicated': names_of_rows(
        lambda row: row.reduction and not row.init_needs_axis
    ),
    'without an axis': names_of_rows(lambda row: not row.reduction),
}


class InEachMode:
  """Promises in a mode, on leaves of every kind.

  Attributes:
    mode: How shards are mapped.
    left_out: Kinds of leaves that take long to compile. Where JAX does not
      track types, one mode with most of them is enough.
  """

  mode: str
  left_out = ('complex', 'half', 'zero-sized')

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    cls.params = {
        k: x for k, x in odd_params().items() if k not in cls.left_out
    }
    # Rows that do not use the axis are the same in all modes.
    cls.rows = {
        name: ROWS[name]
        for name in WITHOUT_PARAMS
        if ROWS[name].reduction or cls.mode == 'shard_map'
    }
    cls.updates = {
        name: shard_data(row, cls.params) for name, row in cls.rows.items()
    }
    # Each call has other parameters.
    cls.params_of_calls = jax.tree.map(
        lambda p: np.stack([p + jnp.asarray(i, p.dtype) for i in range(CALLS)]),
        cls.params,
    )
    cls.calls = run_calls(
        {k: with_reduction(row, probe()) for k, row in cls.rows.items()},
        cls.mode,
        cls.updates,
        cls.params_of_calls,
    )

  def test_updates_equal_the_expected_reduction(self):
    for name, row in self.rows.items():
      calls = self.calls[name]
      with self.subTest(name):
        expected = on_all_shards(expected_updates(row, self.updates[name]))
        chex.assert_trees_all_equal_shapes_and_dtypes(calls.updates, expected)
        chex.assert_trees_all_close(
            calls.updates, expected, rtol=row.tolerance, atol=row.tolerance
        )

  def test_updates_have_the_same_bits_on_all_shards(self):
    for name, calls in self.calls.items():
      with self.subTest(name):
        bits = jax.tree.map(lambda x: x.view(np.uint8), calls.updates)
        of_first = on_all_shards(jax.tree.map(lambda x: x[0], bits))
        chex.assert_trees_all_equal(bits, of_first, strict=True)

  def test_updates_keep_the_tree_shapes_and_dtypes(self):
    for name, calls in self.calls.items():
      with self.subTest(name):
        of_call = jax.tree.map(lambda x: x[0, 0], calls.updates)
        chex.assert_trees_all_equal_structs(of_call, self.params)
        chex.assert_trees_all_equal_shapes_and_dtypes(of_call, self.params)

  def test_state_keeps_the_tree_shapes_and_dtypes(self):
    for name, calls in self.calls.items():
      with self.subTest(name):
        self.assertEqual(calls.types_before, calls.types_after)

  def test_inner_runs_once_per_step(self):
    for name, row in self.rows.items():
      calls = self.calls[name]
      with self.subTest(name):
        num_calls = np.cumsum(calls_of_inner(row))
        np.testing.assert_array_equal(
            calls.inner.num_calls, [num_calls] * SHARDS
        )

  def test_inner_receives_extra_arguments(self):
    for name, row in self.rows.items():
      calls = self.calls[name]
      with self.subTest(name):
        numbers = np.flatnonzero(calls_of_inner(row))
        np.testing.assert_array_equal(
            calls.inner.value[:, numbers], [10 * numbers] * SHARDS
        )

  def test_inner_receives_the_parameters(self):
    places = {'whole': on_all_shards, 'slices': slices_of}
    for name, row in self.rows.items():
      calls = self.calls[name]
      if row.inner_params == 'owned':
        # `owned_update_test.py` has tests of these.
        continue
      with self.subTest(name):
        numbers = np.flatnonzero(calls_of_inner(row))
        place = places[row.inner_params]
        actual = jax.tree.map(lambda x, i=numbers: x[:, i], calls.inner.params)
        expected = jax.tree.map(
            lambda x, i=numbers, place=place: np.stack(
                [place(of_call) for of_call in x[i]], 1
            ),
            self.params_of_calls,
        )
        chex.assert_trees_all_equal(actual, expected, strict=True)


class ShardMapTest(InEachMode, parameterized.TestCase):
  mode = 'shard_map'
  left_out = ()


@pytest.mark.thorough
class VmapTest(InEachMode, parameterized.TestCase):
  mode = 'vmap'
  left_out = ('complex',)


@pytest.mark.thorough
class PmapTest(InEachMode, parameterized.TestCase):
  mode = 'pmap'


@pytest.mark.thorough
class UncheckedShardMapTest(InEachMode, parameterized.TestCase):
  mode = 'shard_map_unchecked'


@pytest.mark.thorough
class JitTest(InEachMode, parameterized.TestCase):
  mode = 'jit'


@pytest.mark.thorough
class ExplicitJitTest(InEachMode, parameterized.TestCase):
  mode = 'jit_explicit'


class ValuesTest(parameterized.TestCase):
  """Promises about values: weights, 64 bits, and a single shard."""

  def test_a_shard_of_weight_zero_does_not_count(self):
    params = {'w': plain_params()['w']}
    txs = {
        name: ROWS[name].build(optax.identity(), 1) for name in WITH_REDUCTION
    }
    weight = np.arange(SHARDS, dtype=np.float32)

    def updates_with(number):
      rng = np.random.default_rng(3)
      updates = jax.tree.map(
          lambda x: rng.random((SHARDS, *x.shape), np.float32) + 1, params
      )
      for leaf in jax.tree.leaves(updates):
        leaf[0] = number
      return weighted_call(txs, params, updates, weight)

    actual, expected = updates_with(np.nan), updates_with(1.5)

    for name in txs:
      with self.subTest(name):
        chex.assert_tree_all_finite(actual[name])
        chex.assert_trees_all_equal(actual[name], expected[name], strict=True)

  @pytest.mark.thorough
  def test_weights_multiply_64_bit_leaves_in_64_bits(self):
    # These ignore the size of a weight, or round to 32 bits.
    without = 'adasum', 'coordinate_median', 'trimmed_mean', 'majority_vote'
    names = set(WITH_REDUCTION).difference(without, ['compressed_mean'])
    txs = {name: ROWS[name].build(optax.identity(), 1) for name in names}
    rng = np.random.default_rng(3)
    weight = rng.random(SHARDS) + 0.1
    updates = {'w': rng.normal(size=(SHARDS, 5))}
    updates['complex'] = updates['w'] * (1 + 2j)
    params = jax.tree.map(lambda x: np.zeros_like(x[0]), updates)

    with jax.enable_x64(True):
      results = weighted_call(txs, params, updates, weight)

    for name in names:
      is_sum = ROWS[name].expected is sum_of_shards
      total = 1 if is_sum else weight.sum()
      expected = jax.tree.map(lambda x, n=total: weight @ x / n, updates)
      with self.subTest(name):
        chex.assert_trees_all_close(
            results[name], on_all_shards(expected), rtol=1e-13, strict=True
        )

  @pytest.mark.thorough
  def test_equals_inner_with_one_shard_and_tower(self):
    # Exact products, so that fusion by the compiler does not matter.
    inner = optax.sgd(0.5, momentum=0.5)
    rng = np.random.default_rng(1)
    first = {'w': plain_params()['w']}
    data = {'w': np.float32(rng.normal(size=(1, CALLS, *first['w'].shape)))}
    rows = {name: ROWS[name] for name in WITHOUT_PARAMS}
    updates = {
        name: jax.tree.map(lambda x: x[:, :, None], data)
        if row.towers == 'stacked'
        else data
        for name, row in rows.items()
    }
    txs = {
        name: with_reduction(row, optax.chain(probe(), inner), 1)
        for name, row in rows.items()
    }
    params = in_all_calls(first)

    @jax.jit
    def run_inner(updates):
      state = inner.init(first)
      return lax.scan(lambda s, x: inner.update(x, s)[::-1], state, updates)[1]

    calls = run_calls(txs, 'shard_map', updates, params, num_shards=1)

    for name, row in rows.items():
      # Compiled or not, its products are exact.
      expected = run_inner(expected_updates(row, updates[name], 1))
      with self.subTest(name):
        actual = jax.tree.map(lambda x: x[0], calls[name].updates)
        chex.assert_trees_all_equal(
            actual, jax.device_get(expected), strict=True
        )


class CombinatorTest(parameterized.TestCase):
  """Promises inside the combinators of Optax."""

  @pytest.mark.thorough
  def test_works_in_combinators(self):
    params = {**plain_params(), 'free': jnp.ones(2, jnp.float32)}
    rows = {name: ROWS[name] for name in WITHOUT_PARAMS}
    txs = {name: nested(row) for name, row in rows.items()}
    data = {name: shard_data(row, params) for name, row in rows.items()}

    calls = run_calls(txs, 'shard_map', data, in_all_calls(params))

    for name, row in rows.items():
      means = on_all_shards(expected_updates(row, {'w': data[name]['w']}))
      expected = {
          'w': -means['w'],
          'b': np.zeros_like(data[name]['b']),
          'free': 2 * data[name]['free'],
      }
      with self.subTest(name):
        chex.assert_trees_all_close(
            calls[name].updates,
            expected,
            rtol=row.tolerance,
            atol=row.tolerance,
        )

  @cases.parameters(*STATIC_ARGS)
  def test_supports_injected_static_arguments(self, factory, name, kwargs):
    tx = optax.inject_hyperparams(factory, static_args=(name,))(**kwargs)
    self.assertEmpty(tx.init(plain_params()).hyperparams)

    tx = optax.inject_hyperparams(factory)(**kwargs)
    with self.assertRaisesRegex(TypeError, f'`{name}` .*static_args'):
      tx.init(plain_params())


class StateTest(parameterized.TestCase):
  """Promises about state between steps."""

  @cases.parameters(*STATE_KINDS, fast='slices')
  def test_trains_as_inner_on_the_means(self, kind):
    params = trained_in_two_halves(kind).params

    for name in STATE_KINDS[kind]:
      row = ROWS[name]
      updates = expected_updates(row, shard_data(row, plain_params()))
      runs_inner = calls_of_inner(row)
      updates = jax.tree.map(lambda x, i=runs_inner: x[i], updates)
      with self.subTest(name):
        chex.assert_trees_all_close(
            params[name], train_inner(updates), rtol=2e-6, atol=2e-6
        )

  @cases.parameters(*STATE_KINDS, fast='slices')
  def test_state_is_restored_from_the_bytes_of_flax(self, kind):
    for name, (_, state) in trained_in_two_halves(kind).at_half.items():
      with self.subTest(name):
        restored = from_bytes(state)
        chex.assert_trees_all_equal(restored, state, strict=True)

  @cases.parameters(*STATE_KINDS, fast='slices')
  def test_continues_from_bytes_with_the_same_bits(self, kind):
    training = trained_in_two_halves(kind)
    trees = {
        name: (params, from_bytes(state))
        for name, (params, state) in training.at_half.items()
    }

    params = params_of(train_calls(trees, range(HALF, CALLS)))

    for name, of_row in training.params.items():
      with self.subTest(name):
        chex.assert_trees_all_equal(params[name], of_row, strict=True)

  @cases.parameters(*ROWS)
  def test_refuses_integer_gradients(self, name):
    integers = jax.tree.map(lambda x: x.astype(np.int32), data_of(name, HALF))

    with self.assertRaisesRegex(
        TypeError, r"`updates` of .* got int32\[.*\] at \['b'\]"
    ):
      jax.eval_shape(
          run_of(name).step, *like_of(name), integers, np.int32(HALF)
      )

  @pytest.mark.thorough
  def test_can_be_restored_from_an_orbax_checkpoint(self):
    states = {}
    for name in ROWS:
      # Each element has a value of its own.
      states[name] = jax.tree.map(
          lambda x: jax.device_put(
              np.arange(1, x.size + 1).reshape(x.shape).astype(x.dtype),
              x.sharding,
          ),
          like_of(name)[1],
      )
    target = jax.tree.map(orbax.checkpoint.utils.to_shape_dtype_struct, states)

    with (
        tempfile.TemporaryDirectory() as folder,
        orbax.checkpoint.StandardCheckpointer() as checkpointer,
    ):
      checkpointer.save(f'{folder}/state', states)
      checkpointer.wait_until_finished()
      restored = checkpointer.restore(f'{folder}/state', target)

    for name, state in states.items():
      with self.subTest(name):
        self.assertEqual(
            jax.tree.structure(restored[name]), jax.tree.structure(state)
        )
        chex.assert_trees_all_equal(restored[name], state, strict=True)
        places = jax.tree.map(lambda x: x.sharding, (restored[name], state))
        self.assertEqual(*places)

  def test_has_the_documented_fields(self):
    states = [like_of(name)[1] for name in ROWS]

    for kind, fields in FIELDS.items():
      states_of_kind = optax.tree_utils.tree_get_all_with_path(states, kind)
      self.assertNotEmpty(states_of_kind, kind)
      for (_, state), field in itertools.product(states_of_kind, fields):
        dtype = 'float32' if field == 'total_weight' else 'int32'
        leaf = getattr(state, field)
        self.assertEqual(leaf.dtype, dtype, field)
        self.assertIn(leaf.shape[:1], [(), (SHARDS,)], field)

  @cases.parameters(*ROWS)
  def test_init_supports_abstract_parameters(self, name):
    tx, (_, like) = run_of(name).tx, like_of(name)
    abstract = jax.eval_shape(plain_params)

    if ROWS[name].reduction:
      described = shard_transforms.init_state(tx, abstract, MESH())
      places = jax.tree.map(lambda x: x.sharding, (described, like))
      self.assertEqual(*places)
    else:
      described = jax.eval_shape(tx.init, abstract)

    chex.assert_trees_all_equal_structs(described, like)
    chex.assert_trees_all_equal_shapes_and_dtypes(described, like)
    if ROWS[name].init_needs_axis:
      with self.assertRaises(NameError):
        tx.init(abstract)
    else:
      from_types = tx.init(abstract)
      chex.assert_trees_all_equal(
          from_types, tx.init(plain_params()), strict=True
      )

  @cases.parameters(*ROWS, fast=[*MAIN_ROWS, 'compressed_mean'])
  def test_preserves_types_under_each_setting_of_jax(self, name):
    run = run_of(name, SGD)
    params = plain_params()
    updates, number = data_of(name, 0), jnp.int32(0)

    def types():
      if ROWS[name].reduction:
        abstract = jax.eval_shape(lambda: params)
        state = shard_transforms.init_state(run.tx, abstract, MESH())
      else:
        state = jax.eval_shape(run.tx.init, params)
      after = jax.eval_shape(run.step, params, state, updates, number)
      numbers = jax.eval_shape(monitoring.metrics, after[1])
      return types_of((params, state)), types_of(after), types_of(numbers)

    expected = types()
    self.assertEqual(expected[0], expected[1])
    for setting, enable in modes.SETTINGS.items():
      with self.subTest(setting), enable():
        self.assertEqual(types(), expected)

  @cases.parameters(*ROWS, fast=MAIN_ROWS)
  def test_traces_leaves_of_all_dtypes_under_strict_settings(self, name):
    row = ROWS[name]
    tx = with_reduction(row, optax.sgd(0.5, momentum=0.5))
    number, weight = np.int32(0), np.ones(SHARDS, np.float32)
    is_weighted = row.reduction and 'weight' in row.extra_args

    def call(params, inputs):
      updates, weight = inputs
      if row.towers == 'stacked':
        weight = jnp.stack([weight] * TOWERS)
      extra_args = {'weight': weight} if is_weighted else {}
      extra_args |= extra_args_of(row, number)
      return tx.update(updates, tx.init(params), params, **extra_args)[0]

    with (
        jax.enable_x64(True),
        jax.numpy_dtype_promotion('strict'),
        jax.checking_leaks(),
    ):
      params = odd_params() | {
          'wide': jnp.ones(3, jnp.float64),
          'wide complex': jnp.ones(3, jnp.complex128),
      }
      inputs = jax.tree.map(lambda x: x[:, 0], shard_data(row, params)), weight
      mapped = modes.map_shards('shard_map', call, SHARDS)
      updates = jax.eval_shape(mapped, params, inputs)

    chex.assert_trees_all_equal_shapes_and_dtypes(
        updates, on_all_shards(params)
    )


def first_updates(name):
  """Returns the updates of the first shard in the first call."""
  row = ROWS[name]
  return jax.tree.map(lambda x: x[0, 0], shard_data(row, plain_params()))


def gradient(row):
  """Returns a function whose gradient is the data, taken for each shard."""

  def loss(params, data):
    products = jax.tree.map(lambda p, d: jnp.sum(p * d).real, params, data)
    return sum(jax.tree.leaves(jax.tree.map(jnp.float32, products)))

  def grad(params, data):
    return shard_transforms.value_and_grad(loss, AXIS)(params, data)[1]

  return jax.vmap(grad, (None, 0)) if row.towers == 'stacked' else grad


def _outer(tx):
  return local_updates(optax.sgd(0.1), tx, AXIS, every=2)


# Wrappers that check that the transformation in them reduces over the axis,
# with weights if they receive one.
RECOGNISERS = {
    'guard': lambda tx: guard(tx, AXIS, on_bad='exclude'),
    'tower_reduce': lambda tx: tower_reduce(2, tx, axis_name=AXIS),
    'drop_stale': lambda tx: drop_stale(1, tx, axis_name=AXIS),
    'scale_by_staleness': lambda tx: scale_by_staleness(
        'inverse', tx, axis_name=AXIS
    ),
    'outer of local_updates': _outer,
    'outer in a guard': lambda tx: _outer(guard(tx, AXIS, on_bad='exclude')),
}
REDUCTIONS = names_of_rows(
    lambda row: row.reduction
    and row.towers == 'one'
    and row.extra_args == ('weight',)
    and not row.keeps_params
)


class RecognitionTest(parameterized.TestCase):
  """Each wrapper supports each reduction, and requires one."""

  def trace(self, tx, mode):
    params = {f'w{i}': np.ones((4, 6), np.float32) for i in range(4)}
    params['b'] = np.float32(1)
    updates = jax.tree.map(lambda x: np.stack([x] * SHARDS), params)

    def shard(params, inputs):
      updates, weight = inputs
      extra_args = {'weight': weight, 'local_step': jnp.int32(0)}
      return tx.update(updates, tx.init(params), params, **extra_args)[0]

    mapped = modes.map_shards(mode, shard, SHARDS)
    weight = np.ones(SHARDS, np.float32)
    return jax.eval_shape(mapped, params, (updates, weight))

  # Other modes without types show the same, and `vmap` takes twice as long.
  @cases.product(
      mode=modes.MAPPED,
      name=REDUCTIONS,
      fast=['shard_map', 'shard_map_unchecked'],
  )
  @pytest.mark.slow
  def test_supports_each_reduction(self, mode, name):
    reduction = ROWS[name].build(SGD, TOWERS)

    for wrapper, wrap in RECOGNISERS.items():
      with self.subTest(wrapper):
        self.trace(wrap(reduction), mode)

  @cases.product(
      mode=modes.MAPPED,
      # The results of a guard or a window may be reduced afterwards.
      wrapper=[
          name for name in RECOGNISERS if name not in ('guard', 'tower_reduce')
      ],
  )
  def test_refuses_inner_without_a_reduction(self, mode, wrapper):
    with self.assertRaisesRegex(ValueError, 'differ between shards|must use'):
      self.trace(RECOGNISERS[wrapper](SGD), mode)


class RefusalTest(parameterized.TestCase):
  """Mistakes that every transformation refuses while tracing."""

  @cases.parameters(*WITH_REDUCTION)
  def test_refuses_an_unbound_axis(self, name):
    row, tx = ROWS[name], run_of(name).tx

    with self.assertRaisesRegex(NameError, "needs the axis 'data'.*on_mesh"):
      state = tx.init(plain_params())
      tx.update(first_updates(name), state, **extra_args_of(row, 0))

  @cases.parameters(*WITH_REDUCTION)
  def test_refuses_a_gradient_that_jax_has_summed(self, name):
    row = ROWS[name]

    def loss(params, data):
      return jnp.sum(params['w'] * data['w']) + params['b'] * data['b']

    grad = jax.grad(loss)
    if row.towers == 'stacked':
      grad = jax.vmap(grad, (None, 0))

    for num_towers in {1, TOWERS} if row.towers == 'in turn' else {TOWERS}:
      with self.assertRaisesRegex(
          ValueError,
          rf"`{row.reduction}` .* over 'data', got \['b'\] .* already reduced"
          '.*value_and_grad',
      ):
        tx = row.build(optax.identity(), num_towers)
        self.trace_first_call(row, tx, grad)

  @cases.parameters(
      # This one refuses all sums in `inner`.
      *(x for x in WITH_REDUCTION if x != 'reproducible.sharded_tower_reduce')
  )
  def test_refuses_to_reduce_twice(self, name):
    row = ROWS[name]
    tx = row.build(cross_shard_mean(AXIS), TOWERS)

    with self.assertRaisesRegex(
        ValueError, r"`cross_shard_mean` .*\['b'\] .* already reduced"
    ):
      self.trace_first_call(row, tx, gradient(row))

  @cases.parameters(*names_of_rows(lambda row: 'local_step' in row.extra_args))
  def test_refuses_to_guess_the_local_step(self, name):
    row = ROWS[name]._replace(extra_args=('weight',))

    with self.assertRaisesRegex(TypeError, '`local_step` of .* is missing'):
      self.trace_first_call(
          row, with_reduction(row, optax.identity()), gradient(row)
      )

  def trace_first_call(self, row, tx, grad):
    def fn(params, data):
      return tx.update(
          grad(params, data), tx.init(params), params, **extra_args_of(row, 0)
      )

    data = shard_data(row, plain_params())
    first_call = jax.tree.map(lambda x: x[:, 0], data)
    mapped = modes.map_shards('shard_map', fn, SHARDS)
    jax.eval_shape(mapped, plain_params(), first_call)
