"""The contract of all transformations: one table, and one test a promise.

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

import cases
import modes
import shard_transforms
from shard_transforms import aggregators
from shard_transforms import clip_by_global_norm
from shard_transforms import compensate_delay
from shard_transforms import cross_shard_mean
from shard_transforms import cross_shard_sum
from shard_transforms import delay_updates
from shard_transforms import drop_stale
from shard_transforms import guard
from shard_transforms import local_updates
from shard_transforms import monitoring
from shard_transforms import owners
from shard_transforms import reduce_towers
from shard_transforms import reproducible
from shard_transforms import scale_by_staleness
from shard_transforms import shard_update
from shard_transforms import tower_reduce
from shard_transforms.aggregators import trimmed_mean
from shard_transforms.compression import cast
from shard_transforms.compression import compressed_mean
from shard_transforms.compression import power_sgd
from shard_transforms.monitoring import track_divergence
from shard_transforms.monitoring import track_noise_scale

AXIS = modes.AXIS
SHARDS, TOWERS, CALLS = 8, 3, 6
SPIKES = shard_transforms.SpikeRule(
    max_norm=1e9, max_stds=1e9, window=2, record_spikes=True, on_spike='clip'
)

# With a tiny `eps`, Adam would hide a wrong scale of what it is given.
ADAM = optax.adam(0.1, eps=1.0)
SGD = optax.sgd(0.1, momentum=0.9)


class Row(NamedTuple):
  """A transformation and what the tests must know about it.

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
      the row is called after.
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
  """Returns what treats real and imaginary parts of complex leaves alone."""

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
  """Returns the row of a reduction, or several, before what they give to."""
  return Row(
      lambda inner, n: optax.chain(*links, inner),
      per_shard=True,
      chained=True,
      **options,
  )


def _mean(inner):
  return optax.chain(cross_shard_mean(AXIS), inner)


ROWS = {
    'cross_shard_mean': Row(
        lambda inner, n: _mean(inner), per_shard=True, chained=True
    ),
    'reproducible.mean': _link(
        reproducible.mean(AXIS),
    ),
    'reproducible.sum': _link(
        reproducible.sum(AXIS),
        factor=SHARDS,
    ),
    # Numbers of towers are powers of two.
    'reproducible.towers': Row(
        lambda inner, n: reproducible.towers(1, inner, AXIS),
        per_shard=True,
        keeps=True,
    ),
    'reproducible.sharded_towers': Row(
        lambda inner, n: reproducible.sharded_towers(1, inner, AXIS),
        per_shard=True,
        cuts=True,
    ),
    'cross_shard_sum': _link(
        cross_shard_sum(AXIS),
        factor=SHARDS,
    ),
    'shard_update': Row(
        lambda inner, n: shard_update(inner, AXIS),
        per_shard=True,
        cuts=True,
    ),
    'owners': Row(
        lambda inner, n: owners.owned_update(inner, AXIS),
        per_shard=True,
        refuser='owned_update',
        cuts=True,
        owns=True,
    ),
    'tower_reduce_of_shard_update': Row(
        lambda inner, n: tower_reduce(
            n, shard_update(inner, AXIS), axis_name=AXIS
        ),
        towers='in turn',
        per_shard=True,
        refuser='tower_reduce',
        cuts=True,
    ),
    'drop_stale_of_shard_update': Row(
        lambda inner, n: drop_stale(
            2, shard_update(inner, AXIS), axis_name=AXIS
        ),
        takes_local_step=True,
        per_shard=True,
        refuser='drop_stale',
        cuts=True,
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
        refuser='tower_reduce',
    ),
    'tower_reduce_in_chain_per_shard': Row(
        lambda inner, n: optax.chain(
            tower_reduce(n, axis_name=AXIS), _mean(inner)
        ),
        towers='in turn',
        chained=True,
        per_shard=True,
        refuser='tower_reduce',
    ),
    'reduce_towers': Row(
        lambda inner, n: reduce_towers(n, inner), towers='stacked'
    ),
    'reduce_towers_in_chain': Row(
        lambda inner, n: optax.chain(reduce_towers(n), inner),
        towers='stacked',
        chained=True,
    ),
    'reduce_towers_per_shard': Row(
        lambda inner, n: reduce_towers(n, _mean(inner)),
        towers='stacked',
        per_shard=True,
        refuser='cross_shard_mean',
    ),
    'drop_stale': Row(
        lambda inner, n: drop_stale(2, inner), takes_local_step=True
    ),
    'drop_stale_in_chain': Row(
        lambda inner, n: optax.chain(drop_stale(2), inner),
        takes_local_step=True,
        chained=True,
    ),
    'drop_stale_per_shard': Row(
        lambda inner, n: drop_stale(2, _mean(inner), axis_name=AXIS),
        takes_local_step=True,
        per_shard=True,
        refuser='drop_stale',
    ),
    'scale_by_staleness': Row(
        lambda inner, n: optax.chain(scale_by_staleness('inverse'), inner),
        takes_local_step=True,
        chained=True,
    ),
    'scale_by_staleness_per_shard': Row(
        lambda inner, n: scale_by_staleness(
            'exponential', _mean(inner), rate=2.0, axis_name=AXIS
        ),
        takes_local_step=True,
        per_shard=True,
        refuser='scale_by_staleness',
    ),
    'compensate_delay': Row(
        lambda inner, n: optax.chain(
            _of_present(compensate_delay(2.0, decay=0.9)), inner
        ),
        chained=True,
    ),
    'compensate_delay_per_shard': Row(
        lambda inner, n: optax.chain(
            _of_present(compensate_delay(2.0, decay=0.9, axis_name=AXIS)),
            _mean(inner),
        ),
        per_shard=True,
        chained=True,
        refuser='compensate_delay',
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
        refuser='delay_updates',
        keeps=True,
        delays=True,
    ),
    'tower_reduce_of_drop_stale': Row(
        lambda inner, n: tower_reduce(n, drop_stale(2, inner)),
        takes_local_step=True,
        towers='in turn',
    ),
    'tower_reduce_of_drop_stale_per_shard': Row(
        lambda inner, n: tower_reduce(
            n, drop_stale(2, _mean(inner), axis_name=AXIS), axis_name=AXIS
        ),
        takes_local_step=True,
        towers='in turn',
        per_shard=True,
        refuser='tower_reduce',
    ),
    'guard': Row(lambda inner, n: guard(inner, spikes=SPIKES)),
    'guard_per_shard': Row(
        lambda inner, n: guard(_mean(inner), AXIS, spikes=SPIKES),
        per_shard=True,
        refuser='guard',
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
        compressed_mean(AXIS, cast('float32'), min_elements=3),
        keeps=True,
    ),
    'power_sgd': _link(
        power_sgd(AXIS, 2, min_ratio=1),
        keeps=True,
    ),
    'clip_by_global_norm': Row(
        lambda inner, n: optax.chain(clip_by_global_norm(1e9), inner),
        chained=True,
    ),
    'adasum': _link(
        aggregators.adasum(AXIS),
        aggregate=_adasum,
        positive=True,
        # The last bit of a leaf of 16 bits.
        tolerance=1e-2,
    ),
    'coordinate_median': _link(
        aggregators.coordinate_median(AXIS),
        aggregate=_by_parts(lambda x: np.median(x, axis=0)),
    ),
    'trimmed_mean': _link(
        aggregators.trimmed_mean(AXIS, 0),
    ),
    'majority_vote': _link(
        aggregators.majority_vote(AXIS),
        aggregate=_by_parts(_signs),
    ),
    'track_noise_scale': _link(
        track_noise_scale(AXIS),
    ),
    'track_divergence': _link(
        cross_shard_mean(AXIS),
        track_divergence(AXIS, every=2),
        refuser='cross_shard_mean',
    ),
}
# Arguments that must be Python values.
STATIC_ARGS = (
    (tower_reduce, 'num_towers', dict(num_towers=3)),
    (reduce_towers, 'num_towers', dict(num_towers=3)),
    (drop_stale, 'staleness', dict(staleness=3)),
    (delay_updates, 'steps', dict(steps=3)),
    (trimmed_mean, 'num_trimmed', dict(axis_name=AXIS, num_trimmed=1)),
    (track_divergence, 'every', dict(axis_name=AXIS, every=3)),
)
TOWER_FIELDS = {
    'tower': jnp.int32,
    'total_weight': jnp.float32,
    'oldest_local_step': jnp.int32,
}
STALE_FIELDS = {
    'global_step': jnp.int32,
    'stale_count': jnp.int32,
    'stale_shard_count': jnp.int32,
}
GUARD_FIELDS = {
    'num_updates': jnp.int32,
    'skipped_count': jnp.int32,
    'consecutive_skipped': jnp.int32,
    'bad_shard_count': jnp.int32,
    'last_bad_step': jnp.int32,
    'max_consecutive': jnp.int32,
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
EACH_ROW_AND_MODE = tuple(itertools.product(EACH_OF_ANY_PARAMS, modes.NAMES))


class ProbeState(NamedTuple):
  """What a probe was given in its last call.

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


def gradient(row):
  """Returns a function whose gradient is the data, taken for each shard."""

  def loss(params, data):
    products = jax.tree.map(lambda p, d: jnp.sum(p * d).real, params, data)
    return sum(jax.tree.leaves(jax.tree.map(jnp.float32, products)))

  def grad(params, data):
    return shard_transforms.value_and_grad(loss, AXIS)(params, data)[1]

  return jax.vmap(grad, (None, 0)) if row.towers == 'stacked' else grad


def whole(row, inner, num_towers=TOWERS):
  """Returns a transformation of updates that differ between shards."""
  tx = row.build(inner, num_towers)
  return tx if row.per_shard else _mean(tx)


def extra_args_of(row, call):
  """Returns the extra arguments of a call, none of them too old."""
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


def params_of_call(params, call):
  return jax.tree.map(lambda p: p + jnp.asarray(call, p.dtype), params)


def outcome(row, mode, params, data):
  """Runs all calls of a row around a probe, in a scan inside a mapping.

  Returns:
    The updates [shards, calls, ...], the states of the probe, and the kinds of
    the leaves of the state before and after a call.
  """
  tx = whole(row, probe())
  grad = gradient(row)
  traced = {}

  def fn(shared, own):
    params, calls = shared

    def one_call(state, inputs):
      call, data = inputs
      updates, new_state = tx.update(
          grad(params, data),
          state,
          params_of_call(params, call),
          value=10 * call,
          **extra_args_of(row, call),
      )
      traced.update(before=kinds(state), after=kinds(new_state))
      seen = optax.tree_utils.tree_get(new_state, 'ProbeState')
      return new_state, (updates, seen)

    return lax.scan(one_call, tx.init(params), (calls, own))[1]

  shared = (params, jnp.arange(CALLS, dtype=jnp.int32))
  updates, seen = jax.device_get(modes.map_shards(mode, fn)(shared, data))
  return updates, seen, traced['before'], traced['after']


def run_calls(row, txs, mode, data, num_shards=SHARDS):
  """Returns the updates [shards, calls, ...] of each for `plain_params`."""
  grad = gradient(row)

  def fn(shared, own):
    params, numbers = shared

    def call(tx, state, inputs):
      number, data = inputs
      extra_args = extra_args_of(row, number)
      updates, state = tx.update(
          grad(params, data), state, params, **extra_args
      )
      return state, updates

    return {
        name: lax.scan(
            functools.partial(call, tx), tx.init(params), (numbers, own)
        )[1]
        for name, tx in txs.items()
    }

  shared = (plain_params(), jnp.arange(CALLS, dtype=jnp.int32))
  mapped = modes.map_shards(mode, fn, num_shards)
  return jax.device_get(mapped(shared, data))


# Each takes a row and its transformation, and gives what is around it.
COMBINATORS = {
    'none': lambda row, tx: tx,
    'chain': lambda row, tx: optax.chain(
        optax.identity(), tx, optax.scale(2.0)
    ),
    'masked': lambda row, tx: optax.masked(tx, {'w': True, 'b': False}),
    'partition': lambda row, tx: optax.partition(
        {'tx': tx, 'frozen': optax.set_to_zero()}, {'w': 'tx', 'b': 'frozen'}
    ),
    'around inject_hyperparams': lambda row, tx: whole(
        row, optax.inject_hyperparams(optax.sgd)(learning_rate=0.5)
    ),
    'inject_hyperparams': lambda row, tx: optax.inject_hyperparams(
        lambda learning_rate: whole(row, optax.sgd(learning_rate))
    )(learning_rate=0.5),
}


class Run(NamedTuple):
  """A row with Adam inside, and its step, which donates what it is given.

  Attributes:
    tx: The transformation.
    start: Gives parameters and state.
    step: Takes parameters, state, the data of a call and its number; gives
      parameters and state.
    data: Gradients [shards, calls, ...], or [calls, ...] of their means.
  """

  tx: optax.GradientTransformationExtraArgs
  start: Callable[[], Any]
  step: Callable[..., Any]
  data: Any


@functools.cache
def run_of(name, inner=ADAM):
  """Returns the run of a row, outside of a mapping where it needs none."""
  row = ROWS[name]
  tx = row.build(inner, TOWERS)

  def step(params, state, updates, number):
    extra_args = extra_args_of(row, number)
    updates, state = tx.update(updates, state, params, **extra_args)
    return optax.apply_updates(params, updates), state

  data = shard_data(row, plain_params())
  if not row.per_shard:
    data = jax.tree.map(lambda x: x.mean(0), data)

    def start():
      params = plain_params()
      return params, tx.init(params)

    return Run(tx, start, jax.jit(step, donate_argnums=(0, 1)), data)

  mesh = modes.mesh()
  specs = shard_transforms.state_specs(tx, plain_params(), mesh)

  def one_shard(params, state, updates, number):
    updates = jax.tree.map(lambda x: x[0], updates)
    return step(params, state, updates, number)

  mapped = jax.shard_map(
      one_shard,
      mesh=mesh,
      in_specs=(P(), specs, P(AXIS), P()),
      out_specs=(P(), specs),
  )

  def start():
    params = jax.device_put(plain_params(), jax.NamedSharding(mesh, P()))
    return params, shard_transforms.init_state(tx, params, mesh)

  return Run(tx, start, jax.jit(mapped, donate_argnums=(0, 1)), data)


def data_of(name, call):
  axis = 1 if ROWS[name].per_shard else 0
  return jax.tree.map(lambda x: x.take(call, axis), run_of(name).data)


def own_data(name):
  """Returns the data of the first call of the first shard."""
  row = ROWS[name]
  return jax.tree.map(lambda x: x[0, 0], shard_data(row, plain_params()))


def continue_run(name, params, state, calls):
  """Returns parameters and state after more calls."""
  for call in calls:
    params, state = run_of(name).step(
        params, state, data_of(name, call), jnp.int32(call)
    )
    # Calls that queue up on virtual devices can abort in JAX 0.10.
    jax.block_until_ready(params)
  return params, state


@functools.cache
def straight(name):
  """Returns parameters and state after all calls."""
  return jax.device_get(continue_run(name, *run_of(name).start(), range(CALLS)))


# Within a window of towers.
HALF = 4


def halfway(name):
  return continue_run(name, *run_of(name).start(), range(HALF))


def placed_like(tree, like):
  return jax.tree.map(lambda x, y: jax.device_put(x, y.sharding), tree, like)


class MappedTest(parameterized.TestCase):
  """Promises in every mode, on leaves of every kind."""

  @cases.parameters(*EACH_ROW_AND_MODE)
  def test_keeps_its_promises(self, name, mode):
    row = ROWS[name]
    params = odd_params()
    data = shard_data(row, params)
    runs = np.flatnonzero(runs_inner(row))

    updates, seen, kinds_before, kinds_after = outcome(row, mode, params, data)

    with self.subTest('gives the mean over shards and towers'):
      expected = on_shards(expected_updates(row, data))
      chex.assert_trees_all_equal_shapes_and_dtypes(updates, expected)
      tolerance = row.tolerance
      chex.assert_trees_all_close(
          updates, expected, rtol=tolerance, atol=tolerance
      )
    with self.subTest('gives the same bits on all shards'):
      bits = jax.tree.map(lambda x: x.view(np.uint8), updates)
      of_first = on_shards(jax.tree.map(lambda x: x[0], bits))
      chex.assert_trees_all_equal(bits, of_first, strict=True)
    with self.subTest('keeps the tree, shapes and dtypes of updates'):
      of_call = jax.tree.map(lambda x: x[0, 0], updates)
      chex.assert_trees_all_equal_structs(of_call, params)
      chex.assert_trees_all_equal_shapes_and_dtypes(of_call, params)
    with self.subTest('keeps the tree, shapes and dtypes of state'):
      self.assertEqual(kinds_before, kinds_after)
    with self.subTest('runs the inner transformation once a step'):
      num_calls = np.cumsum(runs_inner(row))
      np.testing.assert_array_equal(seen.num_calls, [num_calls] * SHARDS)
    with self.subTest('hands on extra arguments'):
      values = seen.seen_value[:, runs]
      np.testing.assert_array_equal(values, [10 * runs] * SHARDS)
    if row.owns:
      return
    with self.subTest('hands on parameters'):
      chex.assert_trees_all_equal_structs(seen.seen_params, params)
      for call in runs:
        actual = jax.tree.map(lambda x, i=call: x[:, i], seen.seen_params)
        expected = params_of_call(params, call)
        expected = jax.tree.map(
            cut_in_numpy if row.cuts else on_shards, expected
        )
        chex.assert_trees_all_equal(actual, expected, strict=True)

  @cases.parameters(*EACH_ROW_AND_MODE)
  def test_is_the_inner_transformation_at_one_shard_and_tower(self, name, mode):
    row = ROWS[name]
    # Exact products, so that it does not matter how the compiler fuses them.
    inner = optax.sgd(0.5, momentum=0.5)
    rng = np.random.default_rng(1)
    data = jax.tree.map(
        lambda x: np.float32(rng.normal(size=(1, CALLS, *x.shape))),
        plain_params(),
    )
    given = data
    if row.towers == 'stacked':
      given = jax.tree.map(lambda x: x[:, :, None], data)

    txs = {'whole': whole(row, inner, 1)}
    updates = run_calls(row, txs, mode, given, num_shards=1)['whole']

    state = inner.init(plain_params())
    for call in range(CALLS):
      at_call = jax.tree.map(lambda x, call=call: x[0, call], data)
      if row.aggregate is not None:
        at_call = jax.tree.map(lambda x: row.aggregate(x[None]), at_call)
      expected, state = inner.update(at_call, state)
      actual = jax.tree.map(lambda x, call=call: x[0, call], updates)
      chex.assert_trees_all_equal(actual, expected, strict=True)


class CombinatorTest(parameterized.TestCase):
  """Promises inside the combinators of Optax."""

  @cases.parameters(*EACH_OF_ANY_PARAMS)
  def test_works_in_combinators(self, name):
    row = ROWS[name]
    tx = whole(row, optax.sgd(0.5))
    data = shard_data(row, plain_params())

    # One program for all of them compiles several times as fast.
    txs = {key: make(row, tx) for key, make in COMBINATORS.items()}
    found = run_calls(row, txs, 'shard_map', data)

    alone = found['none']
    expected = {
        'none': alone,
        'chain': jax.tree.map(lambda x: 2 * x, alone),
        'masked': {'w': alone['w'], 'b': data['b']},
        'partition': {'w': alone['w'], 'b': np.zeros_like(data['b'])},
        'around inject_hyperparams': alone,
        'inject_hyperparams': alone,
    }
    for combinator in COMBINATORS:
      with self.subTest(combinator):
        chex.assert_trees_all_equal(
            found[combinator], expected[combinator], strict=True
        )

  @cases.parameters(*STATIC_ARGS)
  def test_injects_arguments_that_are_named_static(self, factory, name, kwargs):
    tx = optax.inject_hyperparams(factory, static_args=(name,))(**kwargs)

    state = tx.init(plain_params())

    self.assertEmpty(state.hyperparams)

  @cases.parameters(*STATIC_ARGS)
  def test_refuses_injected_arguments_that_are_static(
      self, factory, name, kwargs
  ):
    tx = optax.inject_hyperparams(factory)(**kwargs)

    with self.assertRaisesRegex(TypeError, f'`{name}` .*static_args'):
      tx.init(plain_params())


class StateTest(parameterized.TestCase):
  """Promises about state between steps."""

  @cases.parameters(*ROWS)
  def test_steps_donate_parameters_and_state(self, name):
    params, state = run_of(name).start()

    for call in range(CALLS):
      given = jax.tree.leaves((params, state))
      params, state = continue_run(name, params, state, [call])
      for leaf in given:
        self.assertTrue(leaf.is_deleted())

    chex.assert_trees_all_equal(
        jax.device_get((params, state)), straight(name), strict=True
    )

  @cases.parameters(*ROWS)
  def test_trains_as_the_inner_transformation_on_the_means(self, name):
    row = ROWS[name]
    updates = expected_updates(row, shard_data(row, plain_params()))

    params, _ = straight(name)

    expected = plain_params()
    state = ADAM.init(expected)
    for call in np.flatnonzero(runs_inner(row)):
      at_call = jax.tree.map(lambda x, call=call: x[call], updates)
      step, state = ADAM.update(at_call, state)
      expected = optax.apply_updates(expected, step)
    chex.assert_trees_all_close(params, expected, rtol=2e-6, atol=2e-6)

  @cases.parameters(*ROWS)
  def test_state_has_the_documented_fields(self, name):
    row = ROWS[name]
    fields = TOWER_FIELDS if row.towers == 'in turn' else {}
    fields = fields | (STALE_FIELDS if 'drop_stale' in name else {})
    fields = fields | (
        {'global_step': jnp.int32} if row.takes_local_step else {}
    )
    fields = fields | (GUARD_FIELDS if row.guards else {})

    _, state = run_of(name).start()

    for field, dtype in fields.items():
      value = optax.tree_utils.tree_get(state, field)
      self.assertEqual((field, value.dtype), (field, dtype))
      self.assertIn(value.shape, [(), (SHARDS,)])

  def assert_continues(self, name, params, state):
    after = continue_run(name, params, state, range(HALF, CALLS))
    chex.assert_trees_all_equal(
        jax.device_get(after), straight(name), strict=True
    )

  @cases.parameters(*ROWS)
  def test_continues_from_the_bytes_of_flax(self, name):
    if ROWS[name].owns:
      # flax knows no static nodes; see docs/sharded_optimizer.md.
      serialization.register_serialization_state(
          owners.Place, lambda place: {}, lambda place, _: place, override=True
      )
    params, state = halfway(name)
    _, fresh = run_of(name).start()

    # These are the bytes of the state dict.
    saved = serialization.to_bytes(state)
    restored = serialization.from_bytes(fresh, saved)

    self.assertEqual(jax.tree.structure(restored), jax.tree.structure(state))
    chex.assert_trees_all_equal(restored, state, strict=True)
    self.assert_continues(name, params, placed_like(restored, state))

  @cases.parameters(*ROWS)
  def test_continues_from_a_checkpoint_of_orbax(self, name):
    params, state = halfway(name)
    target = jax.tree.map(orbax.checkpoint.utils.to_shape_dtype_struct, state)

    with (
        tempfile.TemporaryDirectory() as folder,
        orbax.checkpoint.StandardCheckpointer() as checkpointer,
    ):
      checkpointer.save(f'{folder}/state', state)
      checkpointer.wait_until_finished()
      restored = checkpointer.restore(f'{folder}/state', target)

    self.assertEqual(jax.tree.structure(restored), jax.tree.structure(state))
    self.assert_continues(name, params, restored)

  @cases.parameters(*ROWS)
  def test_makes_state_of_abstract_parameters(self, name):
    tx, start, *_ = run_of(name)
    _, state = start()
    abstract = jax.eval_shape(plain_params)

    if ROWS[name].per_shard:
      described = shard_transforms.init_state(tx, abstract, modes.mesh())
      shardings = jax.tree.map(lambda x: x.sharding, state)
      self.assertEqual(jax.tree.map(lambda x: x.sharding, described), shardings)
    else:
      described = jax.eval_shape(tx.init, abstract)

    chex.assert_trees_all_equal_structs(described, state)
    chex.assert_trees_all_equal_shapes_and_dtypes(described, state)
    if name in EACH_UNMAPPED_INIT:
      alone = tx.init(abstract)
      chex.assert_trees_all_equal(alone, tx.init(plain_params()), strict=True)

  @cases.product(name=ROWS, setting=modes.SETTINGS)
  def test_keeps_types_under_each_setting_of_jax(self, name, setting):
    run = run_of(name, SGD)
    params = plain_params()
    updates, number = data_of(name, 0), jnp.int32(0)

    def types():
      if ROWS[name].per_shard:
        abstract = jax.eval_shape(lambda: params)
        state = shard_transforms.init_state(run.tx, abstract, modes.mesh())
      else:
        state = jax.eval_shape(run.tx.init, params)
      after = jax.eval_shape(run.step, params, state, updates, number)
      numbers = jax.eval_shape(monitoring.metrics, after[1])
      return kinds((params, state)), kinds(after), kinds(numbers)

    expected = types()
    with modes.SETTINGS[setting]():
      found = types()

    self.assertEqual(found, expected)
    self.assertEqual(found[0], found[1])

  @cases.parameters(*ROWS)
  def test_an_error_changes_nothing(self, name):
    run = run_of(name)
    params, state = halfway(name)
    before = jax.device_get((params, state))
    wrong = jax.tree.map(lambda x: x.astype(np.int32), data_of(name, HALF))

    with self.assertRaisesRegex(TypeError, r"`updates` of .* at \['b'\]"):
      run.step(params, state, wrong, jnp.int32(HALF))

    chex.assert_trees_all_equal(
        jax.device_get((params, state)), before, strict=True
    )
    self.assert_continues(name, params, state)


class RefusalTest(parameterized.TestCase):
  """Mistakes that every transformation refuses while tracing."""

  @cases.product(name=ROWS, dtype=('int32', 'bool'))
  def test_refuses_leaves_without_a_gradient(self, name, dtype):
    run = run_of(name)
    wrong = {**data_of(name, 0)}
    wrong['b'] = wrong['b'].astype(dtype)

    with self.assertRaisesRegex(
        TypeError, rf"`updates` of .* got {dtype}\[.*\] at \['b'\]"
    ):
      jax.eval_shape(run.step, *run.start(), wrong, jnp.int32(0))

  @cases.parameters(*EACH_PER_SHARD)
  def test_refuses_an_axis_that_is_not_bound(self, name):
    row, tx = ROWS[name], run_of(name).tx

    with self.assertRaisesRegex(
        NameError, "needs the mapped axis 'data'.*on_mesh"
    ):
      state = tx.init(plain_params())
      tx.update(own_data(name), state, **extra_args_of(row, 0))

  @cases.parameters(*EACH_PER_SHARD)
  def test_refuses_an_axis_of_another_mesh(self, name):
    row, tx = ROWS[name], run_of(name).tx
    mesh = jax.make_mesh((SHARDS,), ('other',))

    def fn(params):
      extra_args = extra_args_of(row, 0)
      return tx.update(own_data(name), tx.init(params), **extra_args)

    mapped = jax.shard_map(fn, mesh=mesh, in_specs=P(), out_specs=P())

    with self.assertRaisesRegex(
        NameError, r"axis 'data', which is not bound .*\('other',\)"
    ):
      jax.eval_shape(mapped, plain_params())

  @cases.parameters(*EACH_PER_SHARD)
  def test_refuses_a_gradient_that_jax_has_summed(self, name):
    row = ROWS[name]
    refuser = row.refuser or name

    def loss(params, data):
      return jnp.sum(params['w'] * data['w']) + params['b'] * data['b']

    grad = jax.grad(loss)
    if row.towers == 'stacked':
      grad = jax.vmap(grad, (None, 0))

    for num_towers in {1, TOWERS} if row.towers == 'in turn' else {TOWERS}:
      with self.assertRaisesRegex(
          ValueError,
          rf"`{refuser}` .* over 'data', got \['b'\] .* already reduced"
          '.*per_shard',
      ):
        tx = row.build(optax.identity(), num_towers)
        self.trace_first_call(row, tx, grad)

  @cases.parameters(
      # This one refuses all sums in `inner`.
      *(x for x in EACH_PER_SHARD if x != 'reproducible.sharded_towers')
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

    with self.assertRaisesRegex(TypeError, '`local_step` of .* got None'):
      self.trace_first_call(row, whole(row, optax.identity()), gradient(row))

  def trace_first_call(self, row, tx, grad):
    def fn(params, data):
      return tx.update(
          grad(params, data), tx.init(params), params, **extra_args_of(row, 0)
      )

    data = shard_data(row, plain_params())
    first_call = jax.tree.map(lambda x: x[:, 0], data)
    mapped = modes.map_shards('shard_map', fn)
    jax.eval_shape(mapped, plain_params(), first_call)
