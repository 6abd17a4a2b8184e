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
MESH = functools.partial(modes.mesh, SHARDS)
SPIKES = shard_transforms.SpikeRule(
    max_norm=1e9, max_stds=1e9, window=2, record_spikes=True, on_spike='clip'
)

# With a tiny `eps`, Adam would hide a wrong scale of what it is given.
ADAM = optax.adam(0.1, eps=1.0)
SGD = optax.sgd(0.1, momentum=0.9)


class Row(NamedTuple):
  """A transformation and its properties for the tests.

  Attributes:
    build: Takes an inner transformation and a number of towers; gives the
      transformation around the inner one, or a chain of both.
    per_shard: Whether it is given updates that differ between shards, and
      reduces them. If not, the tests reduce them before.
    towers: How the towers of a step arrive.
    chained: Whether the inner transformation runs in every call.
    takes_local_step: Whether `update` requires a local step.
    factor: What the result is, in means over all shards and towers.
    refuser: What in it refuses updates that are reduced already, if not what
      the row is called after, `_per_shard` aside.
    cuts: Whether the inner transformation sees each shard's slice of leaves.
    owns: Whether each leaf of the inner state is kept by its owner alone.
    guards: Whether it is a guard, with a value that it keeps per shard.
    keeps: Whether its state has leaves of each shard's own.
    delays: Whether the result is delayed, by one call less than towers.
    moves: Whether it keeps parameters of its own, and has to be given those
      that its updates have been applied to.
    aggregate: What it makes of the updates of all shards [shards, ...] in a
      call, if not `factor` times their mean.
    positive: Whether it is given positive updates: those that nearly cancel out
      would not have a result in few bits.
    tolerance: How far the result may be from what it is in many bits.
  """

  build: Callable[[optax.GradientTransformation, int], Any]
  per_shard: bool = False
  towers: Literal['one', 'in turn', 'stacked'] = 'one'
  chained: bool = False
  takes_local_step: bool = False
  factor: int = 1
  refuser: str = ''
  cuts: bool = False
  owns: bool = False
  guards: bool = False
  keeps: bool = False
  delays: bool = False
  moves: bool = False
  aggregate: Callable[[np.ndarray], np.ndarray] | None = None
  positive: bool = False
  tolerance: float = 1e-6


def _of_present(tx):
  """Returns a transformation of updates that come of the present parameters."""

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


def _link(*links, per_shard=True, **options):
  """Returns the row of links, by default reductions, before the inner one."""
  return Row(
      lambda inner, n: optax.chain(*links, inner),
      per_shard=per_shard,
      chained=True,
      **options,
  )


def _mean(inner):
  return optax.chain(cross_shard_mean(AXIS), inner)


ROWS = {
    'cross_shard_mean': _link(cross_shard_mean(AXIS)),
    'reproducible.cross_shard_mean': _link(reproducible.cross_shard_mean(AXIS)),
    'reproducible.cross_shard_sum': _link(
        reproducible.cross_shard_sum(AXIS), factor=SHARDS
    ),
    # Numbers of towers are powers of two.
    'reproducible.tower_reduce': Row(
        lambda inner, n: reproducible.tower_reduce(1, inner, AXIS),
        per_shard=True,
        keeps=True,
    ),
    'reproducible.sharded_tower_reduce': Row(
        lambda inner, n: reproducible.sharded_tower_reduce(1, inner, AXIS),
        per_shard=True,
        cuts=True,
    ),
    'cross_shard_sum': _link(cross_shard_sum(AXIS), factor=SHARDS),
    'shard_update': Row(
        lambda inner, n: shard_update(inner, AXIS),
        per_shard=True,
        cuts=True,
    ),
    'owners': Row(
        lambda inner, n: contrib.owned_update(inner, AXIS),
        per_shard=True,
        refuser='owned_update',
        cuts=True,
        owns=True,
    ),
    'tower_reduce': Row(
        lambda inner, n: tower_reduce(n, inner), towers='in turn'
    ),
    'tower_reduce_in_chain': Row(
        lambda inner, n: optax.chain(tower_reduce(n), inner),
        towers='in turn',
        chained=True,
    ),
    'tower_reduce_per_shard': Row(
        lambda inner, n: tower_reduce(n, _mean(inner), axis_name=AXIS),
        towers='in turn',
        per_shard=True,
    ),
    'reduce_stacked_towers': Row(
        lambda inner, n: reduce_stacked_towers(n, inner), towers='stacked'
    ),
    'reduce_stacked_towers_in_chain': Row(
        lambda inner, n: optax.chain(reduce_stacked_towers(n), inner),
        towers='stacked',
        chained=True,
    ),
    'reduce_stacked_towers_per_shard': Row(
        lambda inner, n: reduce_stacked_towers(n, _mean(inner)),
        towers='stacked',
        per_shard=True,
        refuser='cross_shard_mean',
    ),
    'drop_stale': Row(
        lambda inner, n: drop_stale(2, inner), takes_local_step=True
    ),
    'drop_stale_in_chain': _link(
        drop_stale(2), per_shard=False, takes_local_step=True
    ),
    'drop_stale_per_shard': Row(
        lambda inner, n: drop_stale(2, _mean(inner), axis_name=AXIS),
        takes_local_step=True,
        per_shard=True,
    ),
    'scale_by_staleness': _link(
        scale_by_staleness('inverse'), per_shard=False, takes_local_step=True
    ),
    'scale_by_staleness_per_shard': Row(
        lambda inner, n: scale_by_staleness(
            'exponential', _mean(inner), rate=2.0, axis_name=AXIS
        ),
        takes_local_step=True,
        per_shard=True,
    ),
    'compensate_delay': _link(
        _of_present(compensate_delay(2.0, decay=0.9)), per_shard=False
    ),
    'compensate_delay_per_shard': _link(
        _of_present(compensate_delay(2.0, decay=0.9, axis_name=AXIS)),
        cross_shard_mean(AXIS),
        keeps=True,
    ),
    # With rounds of one step, each of which the shards begin at one place.
    'local_updates': Row(
        lambda inner, n: local_updates(
            optax.sgd(1.0),
            optax.chain(cross_shard_mean(AXIS), inner),
            AXIS,
            every=1,
        ),
        per_shard=True,
        keeps=True,
        moves=True,
    ),
    # Its copies are of the parameters of the first step.
    'master_weights': Row(lambda inner, n: master_weights(inner), moves=True),
    'shard_update_of_master_weights': Row(
        lambda inner, n: shard_update(master_weights(inner), AXIS),
        per_shard=True,
        refuser='shard_update',
        cuts=True,
        moves=True,
    ),
    'delay_updates': Row(
        lambda inner, n: optax.chain(delay_updates(n - 1), inner),
        chained=True,
        delays=True,
    ),
    'delay_updates_per_shard': Row(
        lambda inner, n: optax.chain(
            delay_updates(n - 1, axis_name=AXIS), _mean(inner)
        ),
        per_shard=True,
        chained=True,
        keeps=True,
        delays=True,
    ),
    'guard': Row(lambda inner, n: guard(inner, spikes=SPIKES)),
    'guard_per_shard': Row(
        lambda inner, n: guard(_mean(inner), AXIS, spikes=SPIKES),
        per_shard=True,
        guards=True,
    ),
    'guard_that_excludes': Row(
        lambda inner, n: guard(
            _mean(inner), AXIS, on_bad='exclude', min_shards=1
        ),
        per_shard=True,
        refuser='guard',
        guards=True,
    ),
    'tower_reduce_of_guard_of_shard_update': Row(
        lambda inner, n: tower_reduce(
            n,
            guard(shard_update(inner, AXIS), AXIS, on_bad='exclude'),
            axis_name=AXIS,
        ),
        towers='in turn',
        per_shard=True,
        refuser='tower_reduce',
        cuts=True,
        guards=True,
    ),
    'compressed_mean': _link(
        compressed_mean(AXIS, cast('float32'), min_elements=3), keeps=True
    ),
    'power_sgd': _link(power_sgd(AXIS, 2, min_ratio=1), keeps=True),
    'clip_by_global_norm': _link(clip_by_global_norm(1e9), per_shard=False),
    'adasum': _link(
        contrib.adasum(AXIS),
        aggregate=_adasum,
        positive=True,
        # The last bit of a leaf of 16 bits.
        tolerance=1e-2,
    ),
    'coordinate_median': _link(
        contrib.coordinate_median(AXIS),
        aggregate=_by_parts(lambda x: np.median(x, axis=0)),
    ),
    'trimmed_mean': _link(contrib.trimmed_mean(AXIS, 0)),
    'majority_vote': _link(
        contrib.majority_vote(AXIS), aggregate=_by_parts(_signs)
    ),
    'track_noise_scale': _link(track_noise_scale(AXIS)),
    'track_divergence': _link(
        cross_shard_mean(AXIS),
        track_divergence(AXIS, every=2),
        refuser='cross_shard_mean',
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
# Those that keep a value a shard need an axis for `init`.
EACH_UNMAPPED_INIT = tuple(
    name
    for name, row in ROWS.items()
    if not (row.cuts or row.guards or row.keeps)
    and not (row.per_shard and row.towers == 'in turn')
)
EACH_OF_ANY_PARAMS = tuple(name for name, row in ROWS.items() if not row.moves)
EACH_PER_SHARD = tuple(name for name, row in ROWS.items() if row.per_shard)
EACH_STALE = tuple(name for name, row in ROWS.items() if row.takes_local_step)


class ProbeState(NamedTuple):
  """The arguments of the last call of a probe.

  Attributes:
    seen_params: The parameters.
    seen_value: The extra argument `value`.
    num_calls: How often it was called.
  """

  seen_params: Any
  seen_value: jax.Array
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
    least = 1 if row.positive else -9
    integers = TOWERS * rng.integers(least, 10, (*lead, *param.shape))
    if param.ndim == 2 and not row.positive:
      return rng.normal(size=integers.shape).astype(param.dtype)
    return np.asarray(integers, param.dtype)

  return jax.tree.map(draw, params)


def expected_updates(row, data):
  """Returns the updates [calls, ...] of each call for the inner identity."""

  def mean(x):
    wide = np.asarray(x, np.complex128 if np.iscomplexobj(x) else np.float64)
    if row.aggregate is not None:
      return np.stack([row.aggregate(x) for x in wide.swapaxes(0, 1)])
    if row.towers == 'stacked':
      return wide.mean((0, 2))
    if row.delays:
      late = np.zeros((TOWERS - 1, *wide.shape[2:]), wide.dtype)
      return np.concatenate([late, wide.mean(0)])[:CALLS]
    if row.towers == 'one':
      return wide.mean(0)
    num_windows = CALLS // TOWERS
    windows = wide.reshape(SHARDS, num_windows, TOWERS, *x.shape[2:])
    updates = np.zeros(wide.shape[1:], wide.dtype)
    updates[TOWERS - 1 :: TOWERS] = windows.mean((0, 2))
    return updates

  return jax.tree.map(lambda x: (row.factor * mean(x)).astype(x.dtype), data)


def runs_inner(row):
  """Returns for each call whether the inner transformation runs in it."""
  calls = np.arange(1, CALLS + 1)
  waits = row.towers == 'in turn' and not row.chained
  return calls % TOWERS == 0 if waits else calls > 0


def whole(row, inner, num_towers=TOWERS):
  """Returns a transformation of updates that differ between shards."""
  tx = row.build(inner, num_towers)
  return tx if row.per_shard else _mean(tx)


def extra_args_of(row, call):
  """Returns the extra arguments of a call without stale updates."""
  return {'local_step': call} if row.takes_local_step else {}


def kinds(tree):
  """Returns the properties of each leaf that calls must keep."""
  return jax.tree.map(lambda x: (jnp.shape(x), x.dtype, x.weak_type), tree)


def on_shards(tree):
  return jax.tree.map(lambda x: np.stack([x] * SHARDS), tree)


def cut_in_numpy(param):
  """Returns the slices [shards, ...] that shards keep of a parameter."""
  if not param.ndim or not param.size:
    return on_shards(param)
  # All elements as one row, because the dimensions are short.
  row = np.reshape(param, (*(1,) * (param.ndim - 1), -1))
  end = [(0, -size % SHARDS * (size > 1)) for size in row.shape]
  return np.stack(np.split(np.pad(row, end), SHARDS, -1))


def on_calls(params):
  return jax.tree.map(lambda x: np.stack([x] * CALLS), params)


def mapped_calls(txs, mode, data, params, num_shards=SHARDS):
  """Runs all calls of several rows, in one scan inside of a mapping.

  One program for all rows is traced and compiled several times as fast.

  Args:
    txs: Transformations by the names of rows.
    mode: One of `modes.NAMES`.
    data: Updates [shards, calls, ...] by the names of rows.
    params: The parameters of each call, [calls, ...].
    num_shards: The size of the axis.

  Returns:
    By names: the updates [shards, calls, ...], the states of the probes in
    them, and the kinds of the leaves of state before and after a call.
  """
  traced = {}

  def one_call(states, inputs):
    number, params, own = inputs
    found = {}
    for name, state in states.items():
      try:
        updates, states[name] = txs[name].update(
            own[name],
            state,
            params,
            value=10 * number,
            **extra_args_of(ROWS[name], number),
        )
      except Exception as error:
        error.add_note(f'In the row {name!r}.')
        raise
      traced[name] = kinds(state), kinds(states[name])
      seen = optax.tree_utils.tree_get(states[name], 'ProbeState')
      found[name] = updates, seen
    return states, found

  def run_all(params, own):
    first = jax.tree.map(lambda x: x[0], params)
    states = {name: tx.init(first) for name, tx in txs.items()}
    numbers = jnp.arange(CALLS, dtype=jnp.int32)
    return lax.scan(one_call, states, (numbers, params, own))[1]

  if mode in modes.PLAIN:
    return plain_calls(txs, mode, data, params, num_shards)
  found = modes.map_shards(mode, run_all, num_shards)(params, data)
  found = jax.device_get(found)
  return {name: (*found[name], *traced[name]) for name in txs}


def plain_calls(txs, mode, data, params, num_shards):
  """Runs all calls as `mapped_calls` does, under plain `jax.jit`."""
  mesh = modes.plain_mesh(mode, num_shards)
  bound = {name: shard_transforms.on_mesh(tx, mesh) for name, tx in txs.items()}

  @jax.jit
  def one_call(states, number, params, own):
    updates = {}
    for name, state in states.items():
      try:
        updates[name], states[name] = bound[name].update(
            shard_transforms.Stacked(own[name], (AXIS,)),
            state,
            params,
            value=10 * number,
            **extra_args_of(ROWS[name], number),
        )
      except Exception as error:
        error.add_note(f'In the row {name!r}.')
        raise
    return updates, states

  calls = []
  with jax.set_mesh(mesh):
    params = modes.place(params, mesh)
    states = {
        name: tx.init(jax.tree.map(lambda x: x[0], params))
        for name, tx in bound.items()
    }
    before = {name: kinds(state) for name, state in states.items()}
    for i in range(CALLS):
      own = jax.tree.map(lambda x, i=i: x[:, i], data)
      updates, states = jax.block_until_ready(
          one_call(
              states,
              modes.place(np.int32(i), mesh),
              jax.tree.map(lambda x, i=i: x[i], params),
              modes.place(own, mesh, AXIS),
          )
      )
      probes = {
          name: optax.tree_utils.tree_get(state, 'ProbeState')
          for name, state in states.items()
      }
      calls.append(modes.of_shards((updates, probes)))
  updates, probes = jax.tree.map(lambda *x: np.stack(x, 1), *calls)
  return {
      name: (updates[name], probes[name], before[name], kinds(states[name]))
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

  def run_all(params, own):
    updates, weight = own
    stacked = jax.tree.map(lambda x: x[None], updates)
    found = {}
    for name, tx in txs.items():
      row = ROWS[name]
      try:
        found[name], _ = tx.update(
            stacked if row.towers == 'stacked' else updates,
            tx.init(params),
            params,
            weight=weight[None] if row.towers == 'stacked' else weight,
            **extra_args_of(row, np.int32(0)),
        )
      except Exception as error:
        error.add_note(f'In the row {name!r}.')
        raise
    return found

  mapped = modes.map_shards('shard_map', run_all, SHARDS)
  return jax.device_get(mapped(params, (updates, weight)))


@functools.cache
def odd_calls(name):
  """Returns data of leaves of all kinds, and the updates expected of it."""
  data = shard_data(ROWS[name], odd_params())
  return data, on_shards(expected_updates(ROWS[name], data))


def nested(row):
  """Returns the row, with gradient descent inside, in combinators of Optax.

  The leaf 'w' is the row's own, 'b' is frozen and 'free' is masked.
  """

  def around(learning_rate):
    inner = optax.inject_hyperparams(optax.sgd)(learning_rate=learning_rate)
    tx = optax.partition(
        {'tx': whole(row, inner), 'frozen': optax.set_to_zero()},
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
  if not row.per_shard:
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
  if not ROWS[name].per_shard:
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
  axis = 1 if ROWS[name].per_shard else 0
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


def one_step(trees, call):
  data = {name: data_of(name, call) for name in trees}
  # Calls that queue up on virtual devices can abort in JAX 0.10.
  return jax.block_until_ready(one_call(trees, data, np.int32(call)))


@jax.jit
def train_inner(updates):
  """Returns the parameters from the inner transformation without a wrapper."""

  def step(carry, updates):
    params, state = carry
    updates, state = ADAM.update(updates, state)
    return (optax.apply_updates(params, updates), state), ()

  start = plain_params(), ADAM.init(plain_params())
  return lax.scan(step, start, updates)[0][0]


# Rows whose steps are one program: on all devices, or on one.
PARTS = (
    EACH_PER_SHARD[::3],
    EACH_PER_SHARD[1::3],
    EACH_PER_SHARD[2::3],
    tuple(name for name in ROWS if name not in EACH_PER_SHARD),
)
# Within a window of towers.
HALF = 4


class MappedTest(parameterized.TestCase):
  """Promises in every mode, on leaves of every kind."""

  @cases.parameters(*modes.NAMES, fast='shard_map')
  def test_satisfies_the_contract(self, mode):
    def in_mode(tree):
      # Odd kinds take long to compile: all where types are tracked, and where
      # they are not, most in one mode.
      odd = ('complex', 'half', 'zero-sized')
      left_out = {'shard_map': (), 'vmap': odd[:1]}.get(mode, odd)
      return {k: x for k, x in tree.items() if k not in left_out}

    params = in_mode(odd_params())
    # Rows without an axis do not depend on the mode, but on its types.
    names = [
        name
        for name in EACH_OF_ANY_PARAMS
        if ROWS[name].per_shard or mode == 'shard_map'
    ]
    txs = {name: whole(ROWS[name], probe()) for name in names}
    data = {name: in_mode(odd_calls(name)[0]) for name in txs}
    numbers = np.arange(CALLS)
    of_calls = jax.tree.map(
        lambda p: np.stack([p + jnp.asarray(i, p.dtype) for i in numbers]),
        params,
    )

    found = mapped_calls(txs, mode, data, of_calls)

    for name, outcome in found.items():
      row = ROWS[name]
      runs = np.flatnonzero(runs_inner(row))
      updates, seen, kinds_before, kinds_after = outcome
      with self.subTest(f'{name} gives the mean over shards and towers'):
        expected = in_mode(odd_calls(name)[1])
        chex.assert_trees_all_equal_shapes_and_dtypes(updates, expected)
        tolerance = row.tolerance
        chex.assert_trees_all_close(
            updates, expected, rtol=tolerance, atol=tolerance
        )
      with self.subTest(f'{name} gives the same bits on all shards'):
        bits = jax.tree.map(lambda x: x.view(np.uint8), updates)
        of_first = on_shards(jax.tree.map(lambda x: x[0], bits))
        chex.assert_trees_all_equal(bits, of_first, strict=True)
      with self.subTest(f'{name} keeps the tree, shapes and dtypes of updates'):
        of_call = jax.tree.map(lambda x: x[0, 0], updates)
        chex.assert_trees_all_equal_structs(of_call, params)
        chex.assert_trees_all_equal_shapes_and_dtypes(of_call, params)
      with self.subTest(f'{name} keeps the tree, shapes and dtypes of state'):
        self.assertEqual(kinds_before, kinds_after)
      with self.subTest(f'{name} runs the inner transformation once a step'):
        num_calls = np.cumsum(runs_inner(row))
        np.testing.assert_array_equal(seen.num_calls, [num_calls] * SHARDS)
      with self.subTest(f'{name} hands on extra arguments'):
        values = seen.seen_value[:, runs]
        np.testing.assert_array_equal(values, [10 * runs] * SHARDS)
      if row.owns:
        continue
      with self.subTest(f'{name} hands on parameters'):
        place = cut_in_numpy if row.cuts else on_shards
        actual = jax.tree.map(lambda x, i=runs: x[:, i], seen.seen_params)
        expected = jax.tree.map(
            lambda x, i=runs, place=place: np.stack(list(map(place, x[i])), 1),
            of_calls,
        )
        chex.assert_trees_all_equal(actual, expected, strict=True)

  def test_a_shard_of_weight_zero_does_not_count(self):
    params = {'w': plain_params()['w']}
    txs = {
        name: row.build(optax.identity(), 1)
        for name, row in ROWS.items()
        if row.per_shard
    }
    weight = np.arange(SHARDS, dtype=np.float32)

    def of_first(number):
      rng = np.random.default_rng(3)
      updates = jax.tree.map(
          lambda x: rng.random((SHARDS, *x.shape), np.float32) + 1, params
      )
      for leaf in jax.tree.leaves(updates):
        leaf[0] = number
      return weighted_call(txs, params, updates, weight)

    found, expected = of_first(np.nan), of_first(1.5)
    for name in txs:
      with self.subTest(name):
        chex.assert_tree_all_finite(found[name])
        chex.assert_trees_all_equal(found[name], expected[name], strict=True)

  @pytest.mark.thorough
  def test_weights_multiply_64_bit_leaves_in_64_bits(self):
    rows = {
        name: row
        for name, row in ROWS.items()
        if row.per_shard and row.aggregate is None
        # It rounds to 32 bits, and it takes no weight.
        and name not in ('compressed_mean', 'trimmed_mean')
    }
    txs = {name: row.build(optax.identity(), 1) for name, row in rows.items()}
    rng = np.random.default_rng(3)
    weight = rng.random(SHARDS) + 0.1
    own = {'w': rng.normal(size=(SHARDS, 5))}
    own['complex'] = own['w'] * (1 + 2j)
    params = jax.tree.map(lambda x: np.zeros_like(x[0]), own)

    with jax.enable_x64(True):
      found = weighted_call(txs, params, own, weight)

    for name, row in rows.items():
      total = 1 if row.factor == SHARDS else weight.sum()
      expected = jax.tree.map(lambda x, n=total: weight @ x / n, own)
      with self.subTest(name):
        chex.assert_trees_all_close(
            found[name], on_shards(expected), rtol=1e-13, strict=True
        )

  @pytest.mark.thorough
  def test_equals_inner_with_one_shard_and_tower(self):
    # Exact products, so that fusion by the compiler does not matter.
    inner = optax.sgd(0.5, momentum=0.5)
    rng = np.random.default_rng(1)
    first = {'w': plain_params()['w']}
    data = {'w': np.float32(rng.normal(size=(1, CALLS, *first['w'].shape)))}
    rows = {name: ROWS[name] for name in EACH_OF_ANY_PARAMS}
    given = {
        name: jax.tree.map(lambda x: x[:, :, None], data)
        if row.towers == 'stacked'
        else data
        for name, row in rows.items()
    }
    txs = {
        name: whole(row, optax.chain(probe(), inner), 1)
        for name, row in rows.items()
    }
    params = on_calls(first)

    @jax.jit
    def run_inner(updates):
      start = inner.init(first)
      return lax.scan(lambda s, x: inner.update(x, s)[::-1], start, updates)[1]

    found = mapped_calls(txs, 'shard_map', given, params, num_shards=1)

    for name, row in rows.items():
      aggregate = row.aggregate or (lambda x: x[0])
      one = jax.tree.map(
          lambda x, f=aggregate: np.stack([f(y) for y in x.swapaxes(0, 1)]),
          data,
      )
      # Compiled or not, its products are exact.
      expected = run_inner(one)
      with self.subTest(name):
        actual = jax.tree.map(lambda x: x[0], found[name][0])
        chex.assert_trees_all_equal(
            actual, jax.device_get(expected), strict=True
        )


class CombinatorTest(parameterized.TestCase):
  """Promises inside the combinators of Optax."""

  @pytest.mark.thorough
  def test_works_in_combinators(self):
    params = {**plain_params(), 'free': jnp.ones(2, jnp.float32)}
    rows = {name: ROWS[name] for name in EACH_OF_ANY_PARAMS}
    txs = {name: nested(row) for name, row in rows.items()}
    data = {name: shard_data(row, params) for name, row in rows.items()}

    found = mapped_calls(txs, 'shard_map', data, on_calls(params))

    for name, row in rows.items():
      means = on_shards(expected_updates(row, {'w': data[name]['w']}))
      expected = {
          'w': -means['w'],
          'b': np.zeros_like(data[name]['b']),
          'free': 2 * data[name]['free'],
      }
      with self.subTest(name):
        chex.assert_trees_all_close(
            found[name][0], expected, rtol=row.tolerance, atol=row.tolerance
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

  @cases.parameters(*PARTS, fast='cross_shard_mean.*')
  def test_satisfies_the_contract_between_steps(self, *names):
    trees = {name: start_of(name) for name in names}
    for call in range(CALLS):
      if call == HALF:
        # Copies, because views would keep the buffers.
        half = jax.tree.map(np.array, trees)
      given = jax.tree.leaves(trees)
      trees = one_step(trees, call)
      for leaf in given:
        self.assertTrue(leaf.is_deleted())
    after = jax.device_get(trees)

    for name in names:
      with self.subTest(f'{name} trains as the inner one on the means'):
        self.assert_trains_as_on_the_means(name, after[name][0])
      with self.subTest(f'{name} refuses invalid gradients'):
        wrong = jax.tree.map(lambda x: x.astype(np.int32), data_of(name, HALF))
        with self.assertRaisesRegex(
            TypeError, r"`updates` of .* got int32\[.*\] at \['b'\]"
        ):
          jax.eval_shape(
              run_of(name).step, *like_of(name), wrong, np.int32(HALF)
          )
    # flax does not support static nodes; see docs/sharded_optimizer.md.
    serialization.register_serialization_state(
        contrib.Place, lambda place: {}, lambda place, _: place, override=True
    )
    # The bytes of flax are those of the state dict.
    for name, (params, state) in placed(half).items():
      fresh = jax.tree.map(np.zeros_like, state)
      restored = serialization.from_bytes(fresh, serialization.to_bytes(state))
      with self.subTest(f'{name} is restored from the bytes of flax'):
        chex.assert_trees_all_equal(restored, state, strict=True)
      half[name] = params, restored
    trees = placed(half)
    for call in range(HALF, CALLS):
      trees = one_step(trees, call)
    for name, found in jax.device_get(trees).items():
      with self.subTest(f'{name} continues after an error, from bytes'):
        chex.assert_trees_all_equal(found, after[name], strict=True)

  def assert_trains_as_on_the_means(self, name, params):
    row = ROWS[name]
    updates = expected_updates(row, shard_data(row, plain_params()))
    updates = jax.tree.map(lambda x: x[runs_inner(row)], updates)
    chex.assert_trees_all_close(
        params, train_inner(updates), rtol=2e-6, atol=2e-6
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
      found = optax.tree_utils.tree_get_all_with_path(states, kind)
      self.assertNotEmpty(found, kind)
      for (_, state), field in itertools.product(found, fields):
        dtype = 'float32' if field == 'total_weight' else 'int32'
        leaf = getattr(state, field)
        self.assertEqual(leaf.dtype, dtype, field)
        self.assertIn(leaf.shape[:1], [(), (SHARDS,)], field)

  @cases.parameters(*ROWS)
  def test_init_supports_abstract_parameters(self, name):
    tx, (_, like) = run_of(name).tx, like_of(name)
    abstract = jax.eval_shape(plain_params)

    if ROWS[name].per_shard:
      described = shard_transforms.init_state(tx, abstract, MESH())
      places = jax.tree.map(lambda x: x.sharding, (described, like))
      self.assertEqual(*places)
    else:
      described = jax.eval_shape(tx.init, abstract)

    chex.assert_trees_all_equal_structs(described, like)
    chex.assert_trees_all_equal_shapes_and_dtypes(described, like)
    if name in EACH_UNMAPPED_INIT:
      alone = tx.init(abstract)
      chex.assert_trees_all_equal(alone, tx.init(plain_params()), strict=True)

  @cases.parameters(
      *ROWS,
      fast='cross_shard_mean|guard|shard_update|tower_reduce|compressed_mean',
  )
  def test_preserves_types_under_each_setting_of_jax(self, name):
    run = run_of(name, SGD)
    params = plain_params()
    updates, number = data_of(name, 0), jnp.int32(0)

    def types():
      if ROWS[name].per_shard:
        abstract = jax.eval_shape(lambda: params)
        state = shard_transforms.init_state(run.tx, abstract, MESH())
      else:
        state = jax.eval_shape(run.tx.init, params)
      after = jax.eval_shape(run.step, params, state, updates, number)
      numbers = jax.eval_shape(monitoring.metrics, after[1])
      return kinds((params, state)), kinds(after), kinds(numbers)

    expected = types()
    self.assertEqual(expected[0], expected[1])
    for setting, enable in modes.SETTINGS.items():
      with self.subTest(setting), enable():
        self.assertEqual(types(), expected)

  @cases.parameters(
      *ROWS, fast='cross_shard_mean|guard|shard_update|tower_reduce'
  )
  def test_traces_leaves_of_all_dtypes_under_strict_settings(self, name):
    row = ROWS[name]
    tx = whole(row, optax.sgd(0.5, momentum=0.5))
    number, weight = np.int32(0), np.ones(SHARDS, np.float32)
    is_weighted = row.per_shard and not row.delays

    def call(params, own):
      updates, weight = own
      if row.towers == 'stacked':
        weight = jnp.stack([weight] * TOWERS)
      given = {'weight': weight} if is_weighted else {}
      given |= extra_args_of(row, number)
      return tx.update(updates, tx.init(params), params, **given)[0]

    with (
        jax.enable_x64(True),
        jax.numpy_dtype_promotion('strict'),
        jax.checking_leaks(),
    ):
      params = odd_params() | {
          'wide': jnp.ones(3, jnp.float64),
          'wide complex': jnp.ones(3, jnp.complex128),
      }
      own = jax.tree.map(lambda x: x[:, 0], shard_data(row, params)), weight
      mapped = modes.map_shards('shard_map', call, SHARDS)
      updates = jax.eval_shape(mapped, params, own)

    chex.assert_trees_all_equal_shapes_and_dtypes(updates, on_shards(params))


def own_data(name):
  """Returns the data of the first call of the first shard."""
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


# Wrappers that must see that what they wrap reduces over the axis, by the
# weight if they are given one.
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
REDUCTIONS = tuple(
    name
    for name, row in ROWS.items()
    if row.per_shard and row.towers == 'one' and not row.takes_local_step
    # It keeps parameters, and it is late.
    and not (row.moves or row.delays)
)


class RecognitionTest(parameterized.TestCase):
  """Each wrapper supports each reduction, and requires one."""

  def trace(self, tx, mode):
    params = {f'w{i}': np.ones((4, 6), np.float32) for i in range(4)}
    params['b'] = np.float32(1)
    own = jax.tree.map(lambda x: np.stack([x] * SHARDS), params)

    def shard(params, own):
      updates, weight = own
      extra_args = {'weight': weight, 'local_step': jnp.int32(0)}
      return tx.update(updates, tx.init(params), params, **extra_args)[0]

    mapped = modes.map_shards(mode, shard, SHARDS)
    return jax.eval_shape(mapped, params, (own, np.ones(SHARDS, np.float32)))

  @cases.product(mode=modes.MAPPED, name=REDUCTIONS)
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

  @cases.parameters(*EACH_PER_SHARD)
  def test_refuses_an_unbound_axis(self, name):
    row, tx = ROWS[name], run_of(name).tx

    with self.assertRaisesRegex(NameError, "needs the axis 'data'.*on_mesh"):
      state = tx.init(plain_params())
      tx.update(own_data(name), state, **extra_args_of(row, 0))

  @cases.parameters(*EACH_PER_SHARD)
  def test_refuses_a_gradient_that_jax_has_summed(self, name):
    row = ROWS[name]
    refuser = row.refuser or name.removesuffix('_per_shard')

    def loss(params, data):
      return jnp.sum(params['w'] * data['w']) + params['b'] * data['b']

    grad = jax.grad(loss)
    if row.towers == 'stacked':
      grad = jax.vmap(grad, (None, 0))

    for num_towers in {1, TOWERS} if row.towers == 'in turn' else {TOWERS}:
      with self.assertRaisesRegex(
          ValueError,
          rf"`{refuser}` .* over 'data', got \['b'\] .* already reduced"
          '.*value_and_grad',
      ):
        tx = row.build(optax.identity(), num_towers)
        self.trace_first_call(row, tx, grad)

  @cases.parameters(
      # This one refuses all sums in `inner`.
      *(x for x in EACH_PER_SHARD if x != 'reproducible.sharded_tower_reduce')
  )
  def test_refuses_to_reduce_twice(self, name):
    row = ROWS[name]
    tx = row.build(cross_shard_mean(AXIS), TOWERS)

    with self.assertRaisesRegex(
        ValueError, r"`cross_shard_mean` .*\['b'\] .* already reduced"
    ):
      self.trace_first_call(row, tx, gradient(row))

  @cases.parameters(*EACH_STALE)
  def test_refuses_to_guess_the_local_step(self, name):
    row = ROWS[name]._replace(takes_local_step=False)

    with self.assertRaisesRegex(TypeError, '`local_step` of .* is missing'):
      self.trace_first_call(row, whole(row, optax.identity()), gradient(row))

  def trace_first_call(self, row, tx, grad):
    def fn(params, data):
      return tx.update(
          grad(params, data), tx.init(params), params, **extra_args_of(row, 0)
      )

    data = shard_data(row, plain_params())
    first_call = jax.tree.map(lambda x: x[:, 0], data)
    mapped = modes.map_shards('shard_map', fn, SHARDS)
    jax.eval_shape(mapped, plain_params(), first_call)
