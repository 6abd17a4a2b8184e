"""Bad inputs: each raises an error with the right words, and changes nothing.

A new mistake is a new row of `CALLS`, `UPDATES` or `FACADE`; all of them go
through `assert_refused`.
"""

from collections.abc import Callable
import functools
import math
import os
import signal
import sys
from typing import Any, NamedTuple
from unittest import mock

from absl.testing import parameterized
import chex
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

import modes
from shard_transforms import clip_by_global_norm
from shard_transforms import compensate_delay
from shard_transforms import cross_shard_mean
from shard_transforms import cross_shard_sum
from shard_transforms import delay_updates
from shard_transforms import drop_stale
from shard_transforms import facade
from shard_transforms import global_norm
from shard_transforms import guard
from shard_transforms import init_state
from shard_transforms import per_shard
from shard_transforms import reduce_towers
from shard_transforms import resize_state
from shard_transforms import scale_by_staleness
from shard_transforms import shard_mean
from shard_transforms import shard_update
from shard_transforms import state_specs
from shard_transforms import tower_reduce
from shard_transforms import value_and_grad
from shard_transforms.launch import join_processes
from shard_transforms.launch import run_processes
from shard_transforms.monitoring import check_health
from shard_transforms.monitoring import hlo_wire_report
from shard_transforms.monitoring import track_divergence
from shard_transforms.monitoring import wire_report

AXIS = modes.AXIS
SHARDS, TOWERS = 8, 3
SGD = optax.sgd(0.5, momentum=0.5)
PARAMS = {'b': np.float32(1), 'w': np.ones(9, np.float32)}
MATRIX = np.ones((SHARDS, 2), np.float32)
# Abstract, because importing must not start a backend.
MESH = jax.sharding.AbstractMesh(
    (SHARDS,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,)
)


def of(factory, *args, **kwargs):
  """Returns a call, whose arguments `assert_refused` can see."""
  return functools.partial(factory, *args, **kwargs)


def on_shards(fn):
  """Maps a function of one argument over shards."""
  return jax.vmap(fn, axis_name=AXIS)


def per_shard_state():
  """Returns a transformation whose state differs between shards, unmarked."""
  return optax.GradientTransformation(
      lambda params: per_shard(params, AXIS), optax.identity().update
  )


def joining(**variables):
  """Returns the environment of a process."""
  return {f'JAX_{name.upper()}': text for name, text in variables.items()}


class Call(NamedTuple):
  """A call of a public function that is refused.

  Attributes:
    call: The call, with its arguments.
    error: What it raises.
    words: What a user would search for.
    environ: Variables of the environment.
  """

  call: functools.partial
  error: type[Exception]
  words: str
  environ: Any = ()


ONE_OR_MORE = 'must be at least 1, got'
UNBOUND = "needs the mapped axis 'data', which is not bound .*`jax.shard_map`"
CALLS = {
    # Numbers and choices.
    'fractional number of towers': Call(
        of(tower_reduce, 2.5),
        TypeError,
        '`num_towers` must be an integer, got 2.5',
    ),
    'negative number of stacked towers': Call(
        of(reduce_towers, -1), ValueError, f'`num_towers` {ONE_OR_MORE} -1'
    ),
    'array for a number of stacked towers': Call(
        of(reduce_towers, np.ones(3)), TypeError, '`num_towers` must be an int'
    ),
    'unknown reduction of towers': Call(
        of(tower_reduce, 2, reduction='max'),
        ValueError,
        "`reduction` must be 'mean' or 'sum', got 'max'",
    ),
    'unknown reduction of stacked towers': Call(
        of(reduce_towers, 2, reduction='average'),
        ValueError,
        "`reduction` must be 'mean' or 'sum', got 'average'",
    ),
    'text for staleness': Call(
        of(drop_stale, '2'), TypeError, "`staleness` must be an integer, got '2"
    ),
    'truth for staleness': Call(
        of(drop_stale, True), TypeError, '`staleness` must be an integer, got T'
    ),
    'axis of drop_stale without inner': Call(
        of(drop_stale, 2, axis_name=AXIS),
        ValueError,
        '`axis_name` of `drop_stale` must come with `inner`',
    ),
    'unknown way to scale by staleness': Call(
        of(scale_by_staleness, 'linear'),
        ValueError,
        "`kind` of `scale_by_staleness` must be 'inverse', 'exponential' or",
    ),
    'weights by age without inner': Call(
        of(scale_by_staleness, 'inverse', axis_name=AXIS),
        ValueError,
        '`inner` and `axis_name` of `scale_by_staleness` must come together',
    ),
    'negative compensation': Call(
        of(compensate_delay, -1.0),
        ValueError,
        '`lam` must not be negative, got -1.0',
    ),
    'negative delay': Call(
        of(delay_updates, -1), ValueError, '`steps` must be at least 0, got -1'
    ),
    # Axes.
    'no axis': Call(
        of(cross_shard_mean, ()), ValueError, '`axis_name` must name at least'
    ),
    'an axis twice': Call(
        of(cross_shard_sum, [AXIS, AXIS]),
        ValueError,
        '`axis_name` must name at least one axis and none twice, got',
    ),
    'None for an axis': Call(
        of(cross_shard_mean, None), TypeError, '`axis_name` must be the name of'
    ),
    'set of axes': Call(
        of(tower_reduce, 2, axis_name={AXIS}),
        TypeError,
        '`axis_name` must be the name of a mapped axis or a sequence of names',
    ),
    'None among axes': Call(
        of(drop_stale, 2, SGD, axis_name=[AXIS, None]),
        TypeError,
        '`axis_name` must be the name of a mapped axis or a sequence of names',
    ),
    # Options of reductions.
    'unknown kind of invariant leaf': Call(
        of(cross_shard_mean, AXIS, on_invariant='ignore'),
        ValueError,
        "`on_invariant` must be 'error', 'summed' or 'averaged', got 'ignore'",
    ),
    'negative size of buckets': Call(
        of(cross_shard_mean, AXIS, bucket_bytes=-1),
        ValueError,
        "`bucket_bytes` must be 'auto' or an integer of at least 0, got -1",
    ),
    'fractional size of buckets': Call(
        of(cross_shard_sum, AXIS, bucket_bytes=0.5),
        TypeError,
        "`bucket_bytes` must be 'auto' or an integer of at least 0, got 0.5",
    ),
    'text for the size of buckets': Call(
        of(shard_update, SGD, AXIS, bucket_bytes='4MiB'),
        TypeError,
        "`bucket_bytes` must be 'auto' or an integer of at least 0, got '4MiB'",
    ),
    'unknown algorithm': Call(
        of(cross_shard_mean, AXIS, algorithm='ring'),
        ValueError,
        "`algorithm` must be 'flat' or 'hierarchical', got 'ring'",
    ),
    'levels of one axis': Call(
        of(cross_shard_mean, AXIS, algorithm='hierarchical'),
        ValueError,
        'must come with two axes or more, the fast one last',
    ),
    'unknown reduction of shards': Call(
        of(shard_update, SGD, AXIS, reduction='max'),
        ValueError,
        "`reduction` must be 'mean' or 'sum', got 'max'",
    ),
    # Groups.
    'no group': Call(
        of(cross_shard_mean, AXIS, groups=[]),
        ValueError,
        '`groups` must not be empty',
    ),
    'empty group': Call(
        of(cross_shard_mean, AXIS, groups=[[0, 1], []]),
        ValueError,
        '`groups` must not be empty nor hold an empty group',
    ),
    'flat groups': Call(
        of(cross_shard_mean, AXIS, groups=[0, 1]),
        TypeError,
        '`groups` must be a sequence of sequences of shard ids',
    ),
    'groups of fractions': Call(
        of(cross_shard_mean, AXIS, groups=[[0, 0.5]]),
        TypeError,
        '`groups` must hold integer shard ids, got 0.5',
    ),
    'shard in two groups': Call(
        of(cross_shard_sum, AXIS, groups=[[0, 1], [1, 2]]),
        ValueError,
        r'exactly once, got ids in more than one place \[1\]',
    ),
    'gap between groups': Call(
        of(cross_shard_sum, AXIS, groups=[[0, 1], [3, 4]]),
        ValueError,
        r'gaps \(too large for 4 ids: \[4\]\) at the ids \[2\]',
    ),
    'negative shard in a group': Call(
        of(cross_shard_mean, AXIS, groups=[[0, -1]]),
        ValueError,
        r'got negative ids \[-1\]',
    ),
    'groups over two axes': Call(
        of(cross_shard_mean, ('hosts', 'cores'), groups=[[0, 1]]),
        ValueError,
        '`groups` must come with one axis',
    ),
    'slices for uneven groups': Call(
        of(shard_update, SGD, AXIS, groups=[[0, 1], [2]]),
        ValueError,
        '`groups` of `shard_update` must be of one size',
    ),
    # Functions of mapped values.
    'per_shard outside of a mapping': Call(
        of(per_shard, PARAMS, AXIS), NameError, f'`per_shard` {UNBOUND}'
    ),
    'no axis for per_shard': Call(
        of(per_shard, PARAMS, []), ValueError, '`axis_name` must name at least'
    ),
    'value_and_grad outside of a mapping': Call(
        of(value_and_grad(jnp.sum, AXIS), PARAMS['w']),
        NameError,
        f'`value_and_grad` {UNBOUND}',
    ),
    'dictionary of axes for value_and_grad': Call(
        of(value_and_grad, jnp.sum, {AXIS: 8}),
        TypeError,
        '`axis_name` must be the name of a mapped axis',
    ),
    'value_and_grad of a loss that is a mean already': Call(
        of(
            jax.eval_shape,
            jax.shard_map(
                value_and_grad(lambda w: lax.pmean(jnp.sum(w), AXIS), AXIS),
                mesh=MESH,
                in_specs=P(),
                out_specs=P(AXIS),
            ),
            PARAMS['w'],
        ),
        ValueError,
        "loss of `value_and_grad` must be per shard over 'data'",
    ),
    'shard_mean outside of a mapping': Call(
        of(shard_mean, PARAMS, AXIS), NameError, f'`shard_mean` {UNBOUND}'
    ),
    'weights of shard_mean as a vector': Call(
        of(
            on_shards(lambda x: shard_mean(x, AXIS, weight=np.ones(SHARDS))),
            MATRIX,
        ),
        ValueError,
        r'`weight` of `shard_mean` must have the shape \(\), got \(8,\)',
    ),
    'shard_mean of a mean': Call(
        of(
            jax.eval_shape,
            jax.shard_map(
                lambda x: shard_mean(x, AXIS),
                mesh=MESH,
                in_specs=P(),
                out_specs=P(),
            ),
            MATRIX,
        ),
        ValueError,
        r"`updates` of `shard_mean` must be per shard over 'data', got the root"
        r' \[8, 2\], typed invariant: it is already reduced',
    ),
    'init outside of a mapping': Call(
        of(tower_reduce(2, SGD, axis_name=AXIS).init, PARAMS),
        NameError,
        f'`tower_reduce` {UNBOUND}.*`shard_transforms.init_state`',
    ),
    'init on slices outside of a mapping': Call(
        of(shard_update(SGD, AXIS).init, PARAMS),
        NameError,
        f'`shard_update` {UNBOUND}',
    ),
    'slices for what looks across elements': Call(
        of(
            on_shards(shard_update(optax.clip_by_global_norm(1.0), AXIS).init),
            MATRIX.repeat(SHARDS, axis=1),
        ),
        ValueError,
        '`inner` of `shard_update` must treat each element .* alone',
    ),
    # Placement.
    'state on a mesh without the axis': Call(
        of(state_specs, tower_reduce(2, SGD, axis_name='rows'), PARAMS, MESH),
        NameError,
        r"the mapped axis 'rows', which is not bound here .*\('data',\)",
    ),
    'state without an axis of shards': Call(
        of(state_specs, per_shard_state(), PARAMS, MESH),
        ValueError,
        r"leading dimension of length 1.*got the shape \(\) at \['b'\]",
    ),
    'no axis left for state per shard': Call(
        of(init_state, SGD, MATRIX, MESH, in_specs=P(AXIS), per_shard=True),
        ValueError,
        '`per_shard` must be False where `in_specs` uses all axes',
    ),
    # Reports.
    'report of no function': Call(
        of(wire_report, 3), TypeError, '`fn` must be a function, got 3'
    ),
    'report with a list of sizes': Call(
        of(wire_report, jnp.sum, MATRIX, axis_sizes=[(AXIS, 8)]),
        TypeError,
        '`axis_sizes` must be a mapping such as',
    ),
    'report over an axis of no shards': Call(
        of(wire_report, jnp.sum, MATRIX, axis_sizes={AXIS: 0}),
        ValueError,
        f"`axis_sizes` {ONE_OR_MORE} 0 for 'data'",
    ),
    'report over a fractional axis': Call(
        of(wire_report, jnp.sum, MATRIX, axis_sizes={AXIS: 1.5}),
        TypeError,
        '`axis_sizes` must be an integer, got 1.5',
    ),
    'report of a function of one shard': Call(
        of(wire_report, functools.partial(shard_mean, axis_name=AXIS), MATRIX),
        NameError,
        "`fn` of `wire_report` .*'data'.*give its size",
    ),
    'report of a compiled program with sizes': Call(
        of(wire_report, jnp.sum, MATRIX, axis_sizes={AXIS: 8}, compiled=True),
        ValueError,
        '`axis_sizes` must be left out where a compiled program is read',
    ),
    'report of a compiled program on another mesh': Call(
        of(
            wire_report,
            jnp.sum,
            MATRIX,
            compiled=True,
            mesh=jax.sharding.AbstractMesh((4,), (AXIS,)),
        ),
        ValueError,
        '`mesh` must have the 1 devices of the program, got 4',
    ),
    'report of another text': Call(
        of(hlo_wire_report, 'module @jit_step {}'),
        ValueError,
        '`text` must hold an `HloModule`',
    ),
    # Processes.
    'no process': Call(
        of(run_processes, 0, ['true']),
        ValueError,
        f'`num_processes` {ONE_OR_MORE} 0',
    ),
    'fractional number of processes': Call(
        of(run_processes, 1.5, ['true']),
        TypeError,
        '`num_processes` must be an integer, got 1.5',
    ),
    'command in one string': Call(
        of(run_processes, 1, 'python train.py'),
        TypeError,
        "`command` must be a sequence of arguments, got 'python train.py'",
    ),
    'empty command': Call(
        of(run_processes, 1, []), ValueError, '`command` must name a program'
    ),
    'negative grace': Call(
        of(run_processes, 1, ['true'], grace=-1.0),
        ValueError,
        '`grace` must be at least 0 seconds, got -1.0',
    ),
    'grace that is no number': Call(
        of(run_processes, 1, ['true'], grace=math.nan),
        ValueError,
        '`grace` must be at least 0 seconds, got nan',
    ),
    'program that is not there': Call(
        of(run_processes, 2, ['/no/such/program']),
        FileNotFoundError,
        '/no/such/program',
    ),
    'program that fails': Call(
        of(
            run_processes,
            1,
            [sys.executable, '-S', '-c', 'raise SystemExit(3)'],
        ),
        RuntimeError,
        'must exit with status 0 .* process 0 of 1 that exited with status 3',
    ),
    'time-out of 0 seconds': Call(
        of(join_processes, initialization_timeout=0),
        ValueError,
        f'`initialization_timeout` {ONE_OR_MORE} 0',
    ),
    'fractional time-out': Call(
        of(join_processes, heartbeat_timeout=0.5),
        TypeError,
        '`heartbeat_timeout` must be an integer, got 0.5',
    ),
    'address alone': Call(
        of(join_processes),
        ValueError,
        '`JAX_NUM_PROCESSES` must be set where one of',
        joining(coordinator_address='127.0.0.1:1'),
    ),
    'process beyond the last': Call(
        of(join_processes),
        ValueError,
        "`JAX_PROCESS_ID` must be an integer from 0 to 1, got '2'",
        joining(
            coordinator_address='127.0.0.1:1', num_processes='2', process_id='2'
        ),
    ),
    'number of processes in words': Call(
        of(join_processes),
        ValueError,
        "`JAX_NUM_PROCESSES` must be an integer of 1 or more, got 'two'",
        joining(
            coordinator_address='127.0.0.1:1',
            num_processes='two',
            process_id='0',
        ),
    ),
    'address without a port': Call(
        of(join_processes),
        ValueError,
        "`JAX_COORDINATOR_ADDRESS` must be of the form host:port, got 'host'",
        joining(coordinator_address='host', num_processes='2', process_id='0'),
    ),
    # Health.
    'unknown answer to what is bad': Call(
        of(guard, SGD, on_bad='drop'),
        ValueError,
        "`on_bad` must be 'skip' or 'exclude', got 'drop'",
    ),
    'exclusion of what is reduced': Call(
        of(guard, SGD, on_bad='exclude'),
        ValueError,
        "`on_bad='exclude'` of `guard` must come with `axis_name`",
    ),
    'quorum where none may be bad': Call(
        of(guard, SGD, AXIS, min_shards=2),
        ValueError,
        "`min_shards` of `guard` must come with `on_bad='exclude'`",
    ),
    'no quorum': Call(
        of(guard, SGD, AXIS, on_bad='exclude', min_shards=0),
        ValueError,
        f'`min_shards` {ONE_OR_MORE} 0',
    ),
    'more for a quorum than there are': Call(
        of(
            init_state,
            guard(SGD, AXIS, on_bad='exclude', min_shards=9),
            PARAMS,
            MESH,
        ),
        ValueError,
        '`min_shards` of `guard` must be at most the number of shards, 8',
    ),
    'negative limit of norms': Call(
        of(guard, SGD, max_norm=-1.0), ValueError, '`max_norm` must be positive'
    ),
    'factory for an inner transformation': Call(
        of(tower_reduce, 2, optax.sgd),
        TypeError,
        '`inner` of `tower_reduce` must be an Optax gradient transformation',
    ),
    'no limit to clip to': Call(
        of(clip_by_global_norm, None),
        TypeError,
        '`max_norm` must be a real number, got None',
    ),
    'specs of slices without their axis': Call(
        of(global_norm, PARAMS, sharded=P(AXIS)),
        ValueError,
        '`sharded` of `global_norm` must come with `axis_name`',
    ),
    'slices that no type tells': Call(
        of(on_shards(lambda x: global_norm(x, AXIS)), MATRIX),
        ValueError,
        '`sharded` of `global_norm` must say which leaves are sliced',
    ),
    'check after no update': Call(
        of(track_divergence, AXIS, every=0),
        ValueError,
        f'`every` {ONE_OR_MORE} 0',
    ),
    'health of what is not guarded': Call(
        of(check_health, SGD.init(PARAMS)),
        ValueError,
        '`state` must hold a `GuardState`, a `DivergenceState` or another that',
    ),
    'state of another for another number of shards': Call(
        of(resize_state, optax.EmptyState(), SGD, PARAMS, MESH),
        ValueError,
        '`state` of `resize_state` must be made by this transformation',
    ),
    'text for a mesh': Call(
        of(init_state, SGD, PARAMS, AXIS),
        TypeError,
        "`mesh` must be a `jax.sharding.Mesh`, got 'data'",
    ),
    'number for an axis': Call(
        of(cross_shard_mean, 0),
        TypeError,
        '`axis_name` must be the name of a mapped axis .* got 0',
    ),
}


class Bench(NamedTuple):
  """A transformation, and how a good call of it is made.

  Attributes:
    tx: The transformation.
    mode: How shards are mapped: by `jax.vmap`, by `jax.shard_map` with types,
      or not at all.
    lead: The leading axes of updates on one shard.
    extra_args: The extra arguments.
  """

  tx: optax.GradientTransformationExtraArgs
  mode: str | None = 'vmap'
  lead: tuple[int, ...] = ()
  extra_args: Any = ()


MEAN = optax.chain(cross_shard_mean(AXIS), SGD)
SUMMED = optax.chain(cross_shard_mean(AXIS, on_invariant='summed'), SGD)
READ = {'local_step': 0}
BENCHES = {
    'mean': Bench(MEAN),
    'tracked mean': Bench(MEAN, 'shard_map'),
    'sum': Bench(optax.chain(cross_shard_sum(AXIS), SGD)),
    'slices': Bench(shard_update(SGD, AXIS)),
    'tracked slices': Bench(shard_update(SGD, AXIS), 'shard_map'),
    'towers': Bench(tower_reduce(TOWERS, SGD), None),
    'chained towers': Bench(optax.chain(tower_reduce(TOWERS), SGD), None),
    'shards of towers': Bench(tower_reduce(TOWERS, MEAN, axis_name=AXIS)),
    'tracked towers': Bench(
        tower_reduce(TOWERS, MEAN, axis_name=AXIS), 'shard_map'
    ),
    'stacked': Bench(reduce_towers(TOWERS, SGD), None, (TOWERS,)),
    'chained stacked': Bench(
        optax.chain(reduce_towers(TOWERS), SGD), None, (TOWERS,)
    ),
    'stale': Bench(drop_stale(2, SGD), None, (), READ),
    'shards of stale': Bench(
        drop_stale(2, MEAN, axis_name=AXIS), extra_args=READ
    ),
    'tracked shards of stale': Bench(
        drop_stale(2, MEAN, axis_name=AXIS), 'shard_map', extra_args=READ
    ),
    'tracked stale': Bench(
        optax.chain(cross_shard_mean(AXIS), drop_stale(2, SGD)),
        'shard_map',
        extra_args=READ,
    ),
    'guarded': Bench(guard(MEAN, AXIS, on_bad='exclude')),
    'tracked guarded': Bench(guard(MEAN, AXIS), 'shard_map'),
}


# Names of changes to a call; all others are extra arguments.
GIVEN = ('tx', 'updates', 'state', 'params')


class Update(NamedTuple):
  """A call of `update` that is refused.

  Attributes:
    bench: The name of the transformation.
    changes: Bad values by the names of `good_call`: the value, or a function of
      the good value. A function for an extra argument is called on each shard.
    error: What it raises.
    words: What a user would search for.
  """

  bench: str
  changes: dict[str, Any]
  error: type[Exception]
  words: str


def good_call(bench):
  """Returns fresh arguments of a good call."""
  params = jax.tree.map(jnp.asarray, PARAMS)
  lead = bench.lead if bench.mode is None else (SHARDS, *bench.lead)
  if bench.mode is None:
    state = bench.tx.init(params)
  elif bench.mode == 'vmap':
    init = jax.vmap(bench.tx.init, None, axis_name=AXIS, axis_size=SHARDS)
    state = init(params)
  else:
    state = init_state(bench.tx, params, modes.mesh())
  updates = jax.tree.map(lambda p: jnp.full((*lead, *p.shape), 2.0), params)
  call = {'updates': updates, 'state': state, 'params': params}
  return call | {'tx': bench.tx, **dict(bench.extra_args)}


def run(bench, tx, updates, state, params, **extra_args):
  """Calls `tx.update` on all shards, with the state donated."""

  def update(updates, state, params):
    own = {k: x() if callable(x) else x for k, x in extra_args.items()}
    return tx.update(updates, state, params, **own)

  def own_update(updates, state, params):
    return update(jax.tree.map(lambda x: x[0], updates), state, params)

  mapped = update
  if bench.mode == 'vmap':
    mapped = jax.vmap(update, (0, 0, None), axis_name=AXIS)
  elif bench.mode == 'shard_map':
    specs = state_specs(bench.tx, params, modes.mesh())
    mapped = jax.shard_map(
        own_update,
        mesh=modes.mesh(),
        in_specs=(P(AXIS), specs, P()),
        out_specs=(P(), specs),
    )
  return jax.jit(mapped, donate_argnums=1)(updates, state, params)


@functools.cache
def good_result(bench):
  return jax.device_get(run(BENCHES[bench], **good_call(BENCHES[bench])))


def with_leaf(**leaves):
  """Returns a function that changes leaves of updates."""

  def change(updates):
    return {**updates, **{k: fn(updates[k]) for k, fn in leaves.items()}}

  return change


def summed_before(tx):
  """Returns a transformation of gradients that `jax.grad` has summed."""

  def update(updates, state, params, **extra_args):
    return tx.update(lax.psum(updates, AXIS), state, params, **extra_args)

  return optax.GradientTransformationExtraArgs(tx.init, update)


def other_state(tx, params):
  """Returns a function that makes the state of something else."""
  init = jax.vmap(tx.init, None, axis_name=AXIS, axis_size=SHARDS)
  return lambda _: init(jax.tree.map(jnp.asarray, params))


def by_hand():
  """Returns a reduction that counts all shards, with the state of `MEAN`."""

  def update(updates, state, params=None):
    updates, own = SGD.update(lax.pmean(updates, AXIS), state[1], params)
    return updates, (state[0], own)

  return optax.GradientTransformation(MEAN.init, update)


def as_int(leaf):
  return leaf.astype(jnp.int32)


INT_AT_B = r"got int32\[.*\] at \['b'\]. Leave such leaves out"
LARGER = {'b': PARAMS['b'], 'w': np.ones(90, np.float32)}
REDUCED = r"over 'data', got \['b'\] \[\], typed invariant: .* already reduced"
GROWING = optax.GradientTransformation(
    optax.identity().init, lambda updates, state, params: (updates, [state])
)
UPDATES = {
    # Leaves.
    'integer for the mean': Update(
        'mean',
        {'updates': with_leaf(b=as_int)},
        TypeError,
        f'`updates` of `cross_shard_mean` .*{INT_AT_B}',
    ),
    'truth for the sum': Update(
        'sum',
        {'updates': with_leaf(w=lambda w: w > 0)},
        TypeError,
        r"`updates` of `cross_shard_sum` .* got bool\[9\] at \['w'\]",
    ),
    'key for the mean': Update(
        'mean',
        {
            'updates': with_leaf(
                b=lambda _: jax.random.split(jax.random.key(0), 8)
            )
        },
        TypeError,
        '`updates` of `cross_shard_mean` must be real or complex, got key',
    ),
    'integer for slices': Update(
        'slices',
        {'updates': with_leaf(b=as_int)},
        TypeError,
        f'`updates` of `shard_update` .*{INT_AT_B}',
    ),
    'integer for towers': Update(
        'towers',
        {'updates': with_leaf(b=as_int)},
        TypeError,
        f'`updates` of `tower_reduce` .*{INT_AT_B}',
    ),
    'integer for stacked towers': Update(
        'stacked',
        {'updates': with_leaf(b=as_int)},
        TypeError,
        f'`updates` of `reduce_towers` .*{INT_AT_B}',
    ),
    'integer that is stale': Update(
        'stale',
        {'updates': with_leaf(b=as_int)},
        TypeError,
        f'`updates` of `drop_stale` .*{INT_AT_B}',
    ),
    'complex tower': Update(
        'towers',
        {'updates': with_leaf(w=lambda w: w * 1j)},
        TypeError,
        r"`updates` of `tower_reduce` must be real .* complex leaf at \['w'\]",
    ),
    'tower of another shape': Update(
        'towers',
        {'updates': with_leaf(w=lambda w: w[:4])},
        ValueError,
        r'shapes that its state was made for, got \(4,\) instead of \(9,\) at',
    ),
    'tower that lacks a leaf': Update(
        'towers',
        {'updates': lambda updates: {'w': updates['w']}},
        ValueError,
        r"tree that its state was made for, but \['b'\] is only in the state",
    ),
    'tower with one leaf more': Update(
        'shards of towers',
        {'updates': lambda updates: {**updates, 'c': updates['b']}},
        ValueError,
        r"tree that its state was made for, but \['c'\] is only in the updates",
    ),
    'too few stacked towers': Update(
        'stacked',
        {'updates': with_leaf(w=lambda w: w[1:])},
        ValueError,
        r'must have a leading axis of 3 towers, got the shape \(2, 9\) at',
    ),
    'stacked towers that are not': Update(
        'stacked',
        {'updates': lambda _: dict(PARAMS)},
        ValueError,
        r"must have a leading axis of 3 towers, got the shape \(\) at \['b'\]",
    ),
    # Weights.
    'negative weight': Update(
        'mean',
        {'weight': -1.0},
        ValueError,
        '`weight` of `cross_shard_mean` must be finite and not negative',
    ),
    'weight that is no number': Update(
        'sum',
        {'weight': math.nan},
        ValueError,
        '`weight` of `cross_shard_sum` must be finite .* negative, got nan',
    ),
    'infinite weight': Update(
        'slices',
        {'weight': np.float32('inf')},
        ValueError,
        '`weight` of `shard_update` must be finite and not negative',
    ),
    'weight of all shards on each': Update(
        'mean',
        {'weight': np.ones(SHARDS)},
        ValueError,
        r'`weight` of `cross_shard_mean` must have the shape \(\), got \(8,\)',
    ),
    'complex weight': Update(
        'shards of towers',
        {'weight': 1j},
        TypeError,
        '`weight` of `tower_reduce` must be a real number, got 1j',
    ),
    'weight in words': Update(
        'shards of stale',
        {'weight': 'one'},
        TypeError,
        "`weight` of `drop_stale` must be a real number, got 'one'",
    ),
    'one weight for stacked towers': Update(
        'stacked',
        {'weight': 1.0},
        ValueError,
        r'`weight` of `reduce_towers` must have the shape \(3,\), got \(\)',
    ),
    'negative weight of a stacked tower': Update(
        'stacked',
        {'weight': np.array([1.0, -2.0, 3.0])},
        ValueError,
        '`weight` of `reduce_towers` must be finite and not negative',
    ),
    'weight of a tower in a chain': Update(
        'chained towers',
        {'weight': 1.0},
        ValueError,
        '`weight` of `tower_reduce` must come with `inner`',
    ),
    'weights of stacked towers in a chain': Update(
        'chained stacked',
        {'weight': np.ones(TOWERS)},
        ValueError,
        '`weight` of `reduce_towers` must come with `inner`',
    ),
    # Local steps.
    'no local step': Update(
        'stale',
        {'local_step': None},
        TypeError,
        '`local_step` of `drop_stale` .*got None. Call `tx.update',
    ),
    'fractional local step': Update(
        'stale',
        {'local_step': 1.5},
        TypeError,
        '`local_step` of `drop_stale` must be an integer, got 1.5',
    ),
    'local steps of all shards on each': Update(
        'shards of stale',
        {'local_step': np.zeros(SHARDS, int)},
        ValueError,
        r'`local_step` of `drop_stale` must have the shape \(\), got \(8,\)',
    ),
    'local step beyond int32': Update(
        'stale',
        {'local_step': 2**31},
        ValueError,
        '`local_step` of `drop_stale` must fit int32, got 2147483648',
    ),
    'local step of a tower in words': Update(
        'towers',
        {'local_step': 'now'},
        TypeError,
        "`local_step` of `tower_reduce` must be an integer, got 'now'",
    ),
    'too few local steps of stacked towers': Update(
        'stacked',
        {'local_step': np.zeros(2, int)},
        ValueError,
        r'`local_step` of `reduce_towers` .* \(\) or \(3,\), got \(2,\)',
    ),
    'local steps that differ without an axis': Update(
        'tracked stale',
        {'local_step': lambda: lax.axis_index(AXIS)},
        ValueError,
        'must be decided alike on all shards.*Give `axis_name`',
    ),
    # What is reduced already.
    'mean of a sum': Update(
        'tracked mean',
        {'tx': summed_before},
        ValueError,
        f'`updates` of `cross_shard_mean` must be per shard {REDUCED}',
    ),
    'weights for a sum': Update(
        'tracked mean',
        {
            'tx': lambda _: summed_before(SUMMED),
            'weight': 2.0,
        },
        ValueError,
        f'`updates` of `cross_shard_mean` must be per shard {REDUCED}',
    ),
    'slices of a sum': Update(
        'tracked slices',
        {'tx': summed_before},
        ValueError,
        f'`updates` of `shard_update` must be per shard {REDUCED}',
    ),
    'towers of a sum': Update(
        'tracked towers',
        {'tx': summed_before},
        ValueError,
        f'`updates` of `tower_reduce` must be per shard {REDUCED}',
    ),
    'stale sum': Update(
        'tracked shards of stale',
        {'tx': summed_before},
        ValueError,
        f'`updates` of `drop_stale` must be per shard {REDUCED}',
    ),
    'reduced before a guard': Update(
        'tracked guarded',
        {'tx': summed_before},
        ValueError,
        f'`updates` of `guard` must be per shard {REDUCED}',
    ),
    # Guards.
    'integer for a guard': Update(
        'guarded',
        {'updates': with_leaf(b=as_int)},
        TypeError,
        f'`updates` of `guard` .*{INT_AT_B}',
    ),
    'state of another for a guard': Update(
        'guarded',
        {'state': other_state(SGD, PARAMS)},
        TypeError,
        '`state` of `guard` must be a `GuardState`, .* got tuple',
    ),
    'reduction by hand in a guard': Update(
        'guarded',
        {'tx': lambda _: guard(by_hand(), AXIS, on_bad='exclude')},
        ValueError,
        'must heed the extra argument `weight`.* by hand, or none, counts',
    ),
    # Axes and groups.
    'mean over an axis that is not there': Update(
        'mean',
        {'tx': lambda _: cross_shard_mean('rows')},
        NameError,
        "`cross_shard_mean` needs the mapped axis 'rows', which is not bound",
    ),
    'groups of other shards': Update(
        'mean',
        {'tx': lambda _: cross_shard_mean(AXIS, groups=[[0, 1], [2, 3]])},
        ValueError,
        r'partition of the 8 shards .* ids \[4, 5, 6, 7\] are missing',
    ),
    'groups of more shards': Update(
        'sum',
        {'tx': lambda _: cross_shard_sum(AXIS, groups=[range(9)])},
        ValueError,
        r'partition of the 8 shards of the axis, but the ids \[8\] are no',
    ),
    'clipping of slices': Update(
        'slices',
        {'tx': lambda _: shard_update(optax.clip_by_global_norm(1.0), AXIS)},
        ValueError,
        '`inner` of `shard_update` must treat each element .* alone',
    ),
    # States.
    'slices for other parameters': Update(
        'slices',
        {'state': other_state(shard_update(SGD, AXIS), LARGER)},
        ValueError,
        r'State of `shard_update` must be made for these param.*\(1, 12\)',
    ),
    'slices for another optimizer': Update(
        'slices',
        {'state': other_state(shard_update(optax.adam(0.1), AXIS), PARAMS)},
        ValueError,
        'State of `shard_update` must be made for these .* got the tree',
    ),
    'slices for other shards': Update(
        'slices',
        {
            'state': lambda state: jax.tree.map(
                lambda x: jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, 1)])
                if x.ndim > 1
                else x,
                state,
            )
        },
        ValueError,
        'State of `shard_update` must be made for .* this number of shards',
    ),
    'towers for other parameters': Update(
        'shards of towers',
        {
            'state': other_state(
                tower_reduce(TOWERS, MEAN, axis_name=AXIS), LARGER
            )
        },
        ValueError,
        r'shapes that its state was made for, got \(9,\) instead of \(90,\)',
    ),
    'towers that are not kept per shard': Update(
        'shards of towers',
        {'state': other_state(tower_reduce(TOWERS, MEAN), PARAMS)},
        ValueError,
        'must have a leading axis of length 1 on each shard',
    ),
    'inner transformation whose state grows': Update(
        'stale',
        {
            'tx': lambda _: drop_stale(2, GROWING),
            'state': lambda _: drop_stale(2, GROWING).init(PARAMS),
        },
        ValueError,
        'inner transformation must keep the tree of its state',
    ),
}


class Desk(NamedTuple):
  """What the optimizers of the façade work on.

  Attributes:
    w: A variable.
    step: The global step.
    opt: An optimizer that keeps a slot for the variable.
  """

  w: facade.Variable
  step: facade.Variable
  opt: facade.Optimizer

  def minimize(self):
    return self.opt.minimize(lambda: self.w.value() ** 2, self.step)


class Facade(NamedTuple):
  """A call of the façade that is refused.

  Attributes:
    call: Takes a `Desk`.
    error: What it raises.
    words: What a user would search for.
  """

  call: Callable[[Desk], Any]
  error: type[Exception]
  words: str


FACADE = {
    'loss that reads no variable': Facade(
        lambda desk: desk.opt.minimize(lambda: jnp.float32(1), desk.step),
        ValueError,
        'No gradients provided for any variable, of which the loss must read',
    ),
    'no pair': Facade(
        lambda desk: desk.opt.apply_gradients([], desk.step),
        ValueError,
        'No variables provided',
    ),
    'gradient of another shape': Facade(
        lambda desk: desk.opt.apply_gradients([(np.ones(3), desk.w)]),
        ValueError,
        r'gradient of w:0 must have the shape \(2,\), got \(3,\)',
    ),
    'truth for a gradient': Facade(
        lambda desk: desk.opt.apply_gradients([(np.ones(2, bool), desk.w)]),
        TypeError,
        'must hold floating-point gradients .* got bool for w:0 of float32',
    ),
    'variable twice': Facade(
        lambda desk: desk.opt.apply_gradients([(np.ones(2), desk.w)] * 2),
        ValueError,
        'Each variable must come once',
    ),
    'number for a global step': Facade(
        lambda desk: desk.opt.apply_gradients([(np.ones(2), desk.w)], 3),
        TypeError,
        '`global_step` must be a `facade.Variable`, got 3',
    ),
    'value of another shape': Facade(
        lambda desk: desk.w.assign(np.ones(3)),
        ValueError,
        r"value of 'w:0' must have the shape \(2,\), got \(3,\)",
    ),
    'transformation of Optax for an optimizer': Facade(
        lambda desk: facade.CrossShardOptimizer(optax.sgd(0.1)),
        TypeError,
        'Wrap a transformation of Optax in `facade.OptaxOptimizer`',
    ),
    'unknown reduction of the façade': Facade(
        lambda desk: facade.CrossShardOptimizer(desk.opt, 'average'),
        ValueError,
        "Unsupported reduction: 'average'",
    ),
    'shards outside of a context': Facade(
        lambda desk: desk._replace(
            opt=facade.CrossShardOptimizer(desk.opt)
        ).minimize(),
        ValueError,
        '`CrossShardOptimizer` must be used inside a shard context, got none',
    ),
    'fractional staleness of the façade': Facade(
        lambda desk: facade.DropStaleGradientOptimizer(desk.opt, 1.5),
        TypeError,
        '`staleness` must be an integer, got 1.5',
    ),
    'gradient without an age': Facade(
        lambda desk: facade.DropStaleGradientOptimizer(
            desk.opt, 1
        ).apply_gradients([(np.ones(2), desk.w)]),
        ValueError,
        '`global_step` of `DropStaleGradientOptimizer` must be a variable',
    ),
    'towers of towers': Facade(
        lambda desk: facade.TowerOptimizer(facade.TowerOptimizer(desk.opt)),
        ValueError,
        'must not be a TowerOptimizer, got one',
    ),
    'more shards than devices': Facade(
        lambda desk: facade.shard(desk.minimize, num_shards=64),
        ValueError,
        '`num_shards` must not exceed the number of devices, 8, got 64',
    ),
}


def picture(given):
  """Returns a copy of a tree, and of all global state."""

  def copy(leaf):
    if isinstance(leaf, facade.Variable):
      leaf = leaf.value()
    if isinstance(leaf, jax.Array) and jnp.issubdtype(
        leaf.dtype, jax.dtypes.prng_key
    ):
      leaf = jax.random.key_data(leaf)
    if isinstance(leaf, jax.Array | np.ndarray | np.generic):
      # A donated buffer that was deleted raises here.
      array = np.asarray(leaf)
      return array.dtype, array.shape, array.tobytes()
    return type(leaf), repr(leaf)

  leaves, treedef = jax.tree.flatten(given)
  surroundings = (
      dict(os.environ),
      dict(jax.config.values),
      signal.getsignal(signal.SIGTERM),
  )
  return treedef, [copy(leaf) for leaf in leaves], surroundings


def name_rows(rows):
  return [dict(testcase_name=f'_{name}', row=row) for name, row in rows.items()]


class BadInputsTest(parameterized.TestCase):

  def assert_refused(self, call, given, error, words):
    """Checks the error of a call, and that no global state changed."""
    before = picture(given)

    with self.assertRaisesRegex(error, words):
      call()

    self.assertEqual(picture(given), before)

  @parameterized.named_parameters(name_rows(CALLS))
  def test_refuses_call(self, row):
    with mock.patch.dict(os.environ, row.environ):
      self.assert_refused(
          row.call, (row.call.args, row.call.keywords), row.error, row.words
      )

  @parameterized.named_parameters(name_rows(UPDATES))
  def test_refuses_update(self, row):
    bench, expected = BENCHES[row.bench], good_result(row.bench)
    good = good_call(bench)
    bad = good | {
        k: x(good[k]) if callable(x) and k in GIVEN else x
        for k, x in row.changes.items()
    }

    self.assert_refused(
        lambda: run(bench, **bad), (good, bad), row.error, row.words
    )

    result = jax.device_get(run(bench, **good))
    chex.assert_trees_all_equal(result, expected, strict=True)

  @parameterized.named_parameters(name_rows(FACADE))
  def test_refuses_facade(self, row):
    with facade.Graph().as_default():
      w = facade.Variable(np.float32([1, 2]), name='w')
      opt = facade.MomentumOptimizer(0.25, 0.5)
      desk = Desk(w, facade.get_or_create_global_step(), opt)
      desk.minimize()

      self.assert_refused(
          lambda: row.call(desk),
          [*desk[:2], *opt.variables()],
          row.error,
          row.words,
      )

      desk.minimize()
      # Velocities of 2 w, and of that halved and 2 w again.
      np.testing.assert_array_equal(w.value(), [0.0, 0.0])
      self.assertEqual(int(desk.step.value()), 2)

  def test_there_are_enough_rows(self):
    self.assertGreaterEqual(len(CALLS) + len(UPDATES) + len(FACADE), 60)
