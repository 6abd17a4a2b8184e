"""Tests of bad inputs, which raise a clear error and do not change anything.

A new mistake is a new row of `CALLS` or `UPDATES`; each row is checked by
`assert_refused`. The mistakes of the façade are in `facade/refusals_test.py`.
"""

import functools
import math
import os
import signal
from typing import Any, NamedTuple

from absl.testing import parameterized
import chex
from flax import nnx
import jax
from jax import lax
from jax import random
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

import cases
import modes
import shard_transforms
from shard_transforms import cross_shard_mean
from shard_transforms import cross_shard_sum
from shard_transforms import drop_stale
from shard_transforms import guard
from shard_transforms import init_state
from shard_transforms import per_shard
from shard_transforms import reduce_stacked_towers
from shard_transforms import resize_state
from shard_transforms import shard_mean
from shard_transforms import shard_update
from shard_transforms import state_shardings
from shard_transforms import state_specs
from shard_transforms import tower_reduce
from shard_transforms.contrib import cross_check
from shard_transforms.contrib import majority_vote
from shard_transforms.contrib import master_weights
from shard_transforms.contrib import owned_update
from shard_transforms.contrib import reproducible
from shard_transforms.contrib.compression import Compressor
from shard_transforms.contrib.compression import compressed_mean
from shard_transforms.contrib.compression import power_sgd
from shard_transforms.contrib.compression import quantize
from shard_transforms.launch import run_processes
from shard_transforms.monitoring import communication_report
from shard_transforms.monitoring import metrics

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
  return jax.jit(jax.vmap(fn, axis_name=AXIS))


def per_shard_state():
  """Returns a transformation whose state differs between shards, unmarked."""
  return optax.GradientTransformation(
      lambda params: per_shard(params, AXIS), optax.identity().update
  )


def sent_as(encoded, dtype='float32'):
  """Returns a function that sends an update through a compressor."""

  def send(x):
    compressor = Compressor(
        2,
        lambda rows, common_key, own_key: rows[:, :encoded],
        lambda payload, common_key: jnp.zeros((len(payload), 2), dtype),
    )
    tx = compressed_mean(AXIS, compressor, min_elements=1)
    return tx.update(x, tx.init(x))[0]

  return on_shards(send)


def beside_explicit(tx):
  """Returns a function of an update that is sharded over an Explicit axis."""
  mesh = jax.sharding.AbstractMesh(
      (4, 2), (AXIS, 'model'), (jax.sharding.AxisType.Explicit,) * 2
  )

  def one_shard(w):
    return tx.update(per_shard(w, AXIS), tx.init(w))[0]

  def on_mesh(w):
    sharding = jax.NamedSharding(mesh, P('model'))
    w = jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=sharding)
    with jax.sharding.use_abstract_mesh(mesh):
      mapped = jax.shard_map(
          one_shard, mesh=mesh, axis_names={AXIS}, in_specs=P(), out_specs=P()
      )
      return jax.eval_shape(mapped, w)

  return on_mesh


def of_slices(tx):
  """Returns a function of parameters that are sliced over the axis of `tx`."""

  def step(params):
    return tx.update(params, tx.init(jnp.zeros(16)), params)[0]

  mapped = jax.shard_map(step, mesh=MESH, in_specs=P(AXIS), out_specs=P(AXIS))
  return functools.partial(jax.eval_shape, mapped)


CHECK = cross_check(lambda w, batch: jax.tree.map(w.__mul__, batch), AXIS)


def cross_checked(*batch):
  """Checks a function of a batch, whose leaves have rows of all shards."""
  step = jax.vmap(CHECK.apply, (None, None, 0), axis_name=AXIS)
  return step(CHECK.init(max(2, len(batch[0]))), jnp.float32(2), batch)


UNBOUND = "needs the axis 'data', which is not mapped .*`jax.shard_map`"
OTHER_MESH = jax.sharding.AbstractMesh((4,), (AXIS,))
# Calls of public functions that are refused, by what they raise, and by words
# that a user would search for.
CALLS = {
    TypeError: {
        '`num_towers` must be an integer, got 2.5': of(tower_reduce, 2.5),
        '`state` of `cross_check` must be a `CrossCheckState`': of(
            cross_check(jnp.sum, AXIS).weight, SGD.init(PARAMS)
        ),
        '`inner` of `drop_stale` must be an': of(drop_stale, 2, optax.sgd),
        '`inner` of `guard` must be an': of(guard, optax.sgd),
        '`inner` of `master_weights` must be': of(master_weights, optax.sgd),
        '`params` of `master_weights` must be arrays.* `jax.eval_shape': of(
            master_weights(SGD).init, jax.ShapeDtypeStruct((3,), jnp.bfloat16)
        ),
        '`inner` of `reduce_stacked_towers` must be': of(
            reduce_stacked_towers, 2, optax.sgd
        ),
        '`inner` of `shard_update` must be': of(shard_update, optax.sgd, AXIS),
        '`inner` of `tower_reduce` must be': of(tower_reduce, 2, optax.sgd),
        '`tx` of `init_state` must be an Optax .* Call its factory': of(
            init_state, optax.adam, PARAMS, MESH
        ),
        "`in_specs` of `init_state` must be a `PartitionSpec` .*'data'": of(
            init_state, SGD, PARAMS, MESH, in_specs=AXIS
        ),
        '`mesh` must be a `jax.sharding.Mesh`, got 3': of(
            resize_state, PARAMS, SGD, PARAMS, 3
        ),
        '`mesh` must be a `jax.sharding.Mesh`, got None': of(
            init_state, SGD, PARAMS, None
        ),
        "`stacked` must be a boolean, got 'x'": of(
            state_specs, SGD, PARAMS, MESH, stacked='x'
        ),
        '`tx` of `state_shardings` must be an Optax .* got None': of(
            state_shardings, None, PARAMS, MESH
        ),
        '`state` of `metrics` contains .*`optimizer.opt_state`': of(
            metrics, nnx.State({'num_updates': np.int32(0)})
        ),
        "`command` must be a sequence of arguments, got 'python train.py'": of(
            run_processes, 1, 'python train.py'
        ),
        '`fun` of `cross_check` must be callable, got array': of(
            cross_check, MATRIX, AXIS
        ),
    },
    NameError: {
        f'`shard_mean` {UNBOUND}': of(shard_mean, PARAMS, AXIS),
        r"the axis 'rows', which is not mapped here .*\('data',\)": of(
            state_specs, tower_reduce(2, axis_name='rows'), PARAMS, MESH
        ),
    },
    AttributeError: {
        "no attribute 'no_such'": of(getattr, shard_transforms, 'no_such')
    },
    FileNotFoundError: {
        '/no/such/program': of(run_processes, 2, ['/no/such/program'])
    },
    ValueError: {
        # Slices of parameters over the axis that is reduced.
        r"`params` of `shard_update` .* all shards of \['data'\].*\(FSDP\)": of(
            state_specs,
            *(shard_update(SGD, AXIS), np.ones(16, 'f'), MESH),
            in_specs=P(AXIS),
        ),
        '`param_specs` of `owned_update` must name .* its type varies': of(
            state_specs,
            *(owned_update(SGD, AXIS), np.ones(16, 'f'), MESH),
            in_specs=P(AXIS),
        ),
        **{
            f'`params` of `{name}` must be the same on all shards': of(
                of_slices(tx), jax.ShapeDtypeStruct((16,), np.float32)
            )
            for name, tx in {
                'cross_shard_mean': cross_shard_mean(AXIS),
                'cross_shard_sum': cross_shard_sum(AXIS),
                'compressed_mean': compressed_mean(AXIS, quantize(8)),
                'power_sgd': power_sgd(AXIS, 1),
                'reproducible.cross_shard_mean': reproducible.cross_shard_mean(
                    AXIS
                ),
                'reproducible.tower_reduce': reproducible.tower_reduce(
                    2, SGD, AXIS
                ),
            }.items()
        },
        '`groups` must contain at least': of(cross_shard_mean, AXIS, groups=[]),
        "`on_bad` must be 'skip' or 'exclude'": of(guard, SGD, on_bad='drop'),
        "`on_bad='exclude'` .* needs `axis_name`.* around the reduction": of(
            guard, SGD, on_bad='exclude'
        ),
        '`decode` of a `Compressor` must return float32': of(
            sent_as(2, 'float16'), MATRIX
        ),
        '`encode` of a `Compressor` returned an empty payload': of(
            sent_as(0), MATRIX
        ),
        **{
            f'`updates` of `{name}` are sharded .*Explicit.*`Auto`': of(
                beside_explicit(tx), MATRIX
            )
            for name, tx in {
                'compressed_mean': compressed_mean(AXIS, quantize(8)),
                'power_sgd': power_sgd(AXIS, 1),
                'majority_vote': majority_vote(AXIS),
                'reproducible.cross_shard_mean': reproducible.cross_shard_mean(
                    AXIS
                ),
                'reproducible.tower_reduce': reproducible.tower_reduce(
                    1, SGD, AXIS
                ),
            }.items()
        },
        '`in_specs` of `resize_state` must have the tree of the parameters': of(
            resize_state, PARAMS, SGD, PARAMS, MESH, in_specs=(P(),)
        ),
        'devices of `mesh` are not available': of(
            init_state, SGD, PARAMS, MESH
        ),
        r"\['b'\] has the shape \(\) .* leading dimension of length 1": of(
            state_specs, per_shard_state(), PARAMS, MESH
        ),
        'The program runs on 1 devices, but `mesh` has 4': of(
            communication_report,
            jnp.sum,
            MATRIX,
            compiled=True,
            mesh=OTHER_MESH,
        ),
        'needs 2 shards or more over `axis_name`, got': of(
            cross_checked, MATRIX[:1]
        ),
        'inconsistent sizes|divisible': of(cross_checked, MATRIX, MATRIX[1:]),
    },
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
AVERAGED = optax.chain(cross_shard_mean(AXIS, if_reduced='mean'), SGD)
READ = {'local_step': 0}
BENCHES = {
    'mean': Bench(MEAN),
    'tracked mean': Bench(MEAN, 'shard_map'),
    'sum': Bench(optax.chain(cross_shard_sum(AXIS), SGD)),
    'slices': Bench(shard_update(SGD, AXIS)),
    'towers': Bench(tower_reduce(TOWERS, SGD), None),
    'chained towers': Bench(optax.chain(tower_reduce(TOWERS), SGD), None),
    'shards of towers': Bench(tower_reduce(TOWERS, MEAN, axis_name=AXIS)),
    'stacked': Bench(reduce_stacked_towers(TOWERS, SGD), None, (TOWERS,)),
    'stale': Bench(drop_stale(2, SGD), None, (), READ),
    'shards of stale': Bench(
        drop_stale(2, MEAN, axis_name=AXIS), extra_args=READ
    ),
    'tracked stale': Bench(
        optax.chain(drop_stale(2, optax.scale(-1.0)), cross_shard_mean(AXIS)),
        'shard_map',
        extra_args=READ,
    ),
    'masters': Bench(master_weights(SGD), None),
    'slices of masters': Bench(shard_update(master_weights(SGD), AXIS)),
    'guarded': Bench(guard(MEAN, AXIS, on_bad='exclude')),
}


# Names of changes to a call; all others are extra arguments.
GIVEN = ('tx', 'updates', 'state', 'params')


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
def good_run(name):
  """Returns a compiled function of a good call, and what it gave at first."""
  bench = BENCHES[name]
  call = good_call(bench)

  @jax.jit
  def rerun(updates, state, params):
    return run(
        bench, bench.tx, updates, state, params, **dict(bench.extra_args)
    )

  arrays = [call[k] for k in ('updates', 'state', 'params')]
  return rerun, jax.device_get(rerun(*arrays))


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


def padded(x):
  """Returns slices as of fewer shards."""
  return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, 1)]) if x.ndim > 1 else x


LARGER = {'b': PARAMS['b'], 'w': np.ones(90, np.float32)}
REDUCED = r"over 'data', got \['b'\] \[\], typed invariant: .* already reduced"
GROWING = optax.GradientTransformation(
    optax.identity().init, lambda updates, state, params: (updates, [state])
)


def to(name, **changes):
  """Returns changes to the call of a bench."""
  return name, changes


# Calls of `update` that are refused, by what they raise and by words: the name
# of a bench; bad values by the names of `good_call`, each the value or a
# function of the good one, on each shard for an extra argument.
UPDATES = {
    TypeError: {
        '`updates` of `cross_shard_mean` must be real or complex, got key': to(
            'mean',
            updates=with_leaf(b=lambda _: random.split(random.key(0), 8)),
        ),
        r"`updates` of `tower_reduce` are complex at \['w'\]": to(
            'towers', updates=with_leaf(w=lambda w: w * 1j)
        ),
        '`weight` of `tower_reduce` must be a real number, got 1j': to(
            'shards of towers', weight=1j
        ),
        '`local_step` of `drop_stale` must be an integer, got 1.5': to(
            'stale', local_step=1.5
        ),
        '`state` of `guard` must be a `GuardState`, .* got tuple': to(
            'guarded', state=other_state(SGD, PARAMS)
        ),
        '`state` of `drop_stale` must be a `DropStaleState`': to(
            'stale', state=other_state(SGD, PARAMS)
        ),
        '`state` of `master_weights` must be a `MasterWeightsState`': to(
            'masters', state=other_state(SGD, PARAMS)
        ),
        '`state` of `shard_update` must be a `ShardUpdateState`': to(
            'slices', state=other_state(SGD, PARAMS)
        ),
    },
    ValueError: {
        r'have the shape \(4,\) instead of \(9,\) at': to(
            'towers', updates=with_leaf(w=lambda w: w[:4])
        ),
        r"\['b'\] is only in the state. Pass gradients": to(
            'towers', updates=lambda updates: {'w': updates['w']}
        ),
        r"do not have the tree .* \['c'\] is only in the updates": to(
            'shards of towers',
            updates=lambda updates: {**updates, 'c': updates['b']},
        ),
        r'a leading axis of 3 towers, got the shape \(2, 9\) at': to(
            'stacked', updates=with_leaf(w=lambda w: w[1:])
        ),
        '`master_weights` needs the parameters in .* got None. Call': to(
            'masters', params=lambda _: None
        ),
        '`master_weights` needs the parameters in `update`, got None': to(
            'slices of masters', params=lambda _: None
        ),
        r"at \['w'\], .* a leaf without .* the shape \(9,\). Make the": to(
            'masters', params=with_leaf(w=lambda w: w.astype(jnp.bfloat16))
        ),
        r'`updates` of `master_weights` .* \(4,\) instead of \(9,\)': to(
            'masters', updates=with_leaf(w=lambda w: w[:4])
        ),
        # Weights.
        'must be finite .* negative, got nan': to('sum', weight=math.nan),
        r'the shape \(\), got \(8,\)': to('mean', weight=np.ones(SHARDS)),
        r'the shape \(3,\), got \(\)': to('stacked', weight=1.0),
        '`weight` .* must come with `inner': to('chained towers', weight=1.0),
        # Local steps.
        r'`local_step` of `drop_stale` must have the shape \(\), got \(8,': to(
            'shards of stale', local_step=np.zeros(SHARDS, int)
        ),
        '`local_step` .* must fit int32, got 2': to('stale', local_step=2**31),
        r'`local_step` of `reduce_stacked.* \(\) or \(3,\), got \(2,\)': to(
            'stacked', local_step=np.zeros(2, int)
        ),
        '`drop_stale` got .* that differs .* could not .* `axis_name`': to(
            'tracked stale', local_step=lambda: lax.axis_index(AXIS)
        ),
        # Updates that are already reduced, or reduced by hand.
        f'`updates` of `cross_shard_mean` must be per shard {REDUCED}': to(
            'tracked mean', tx=lambda _: summed_before(AVERAGED), weight=2.0
        ),
        'must use the extra argument `weight` in all of its sums over': to(
            'guarded', tx=lambda _: guard(by_hand(), AXIS, on_bad='exclude')
        ),
        r'partition of the 8 shards .* ids \[4, 5, 6, 7\] are missing': to(
            'mean', tx=lambda _: cross_shard_mean(AXIS, groups=[[0, 1], [2, 3]])
        ),
        # Slices and states.
        '`shard_update` runs `inner` on slices, .* be element-wise': to(
            'slices',
            tx=lambda _: shard_update(optax.clip_by_global_norm(1.0), AXIS),
        ),
        r'`shard_update` got a state .* for other parameters .*\(12,\)': to(
            'slices', state=other_state(shard_update(SGD, AXIS), LARGER)
        ),
        '`shard_update` got a state .* for other parameters .*: the tree': to(
            'slices',
            state=other_state(shard_update(optax.adam(0.1), AXIS), PARAMS),
        ),
        '`shard_update` got a state .* another number of shards: the shape': to(
            'slices', state=lambda state: jax.tree.map(padded, state)
        ),
        'must have a leading axis of length 1 on each shard': to(
            'shards of towers',
            state=other_state(tower_reduce(TOWERS, MEAN), PARAMS),
        ),
        'inner transformation changed the tree of its state': to(
            'stale',
            tx=lambda _: drop_stale(2, GROWING),
            state=lambda _: drop_stale(2, GROWING).init(PARAMS),
        ),
    },
}


def picture(given):
  """Returns a copy of a tree, and of all global state."""

  def copy(leaf):
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


def rows_of(table):
  """Returns the rows of a table, with the error of each."""
  return [
      (words, row, error)
      for error, rows in table.items()
      for words, row in rows.items()
  ]


class BadInputsTest(parameterized.TestCase):

  def assert_refused(self, call, given, error, words):
    """Checks the error of a call, and that no global state changed."""
    before = picture(given)

    with self.assertRaisesRegex(error, words):
      call()

    self.assertEqual(picture(given), before)

  @cases.parameters(rows_of(CALLS))
  def test_refuses_call(self, words, call, error):
    self.assert_refused(call, (call.args, call.keywords), error, words)

  @cases.parameters(rows_of(UPDATES))
  def test_refuses_update(self, words, call, error):
    name, changes = call
    bench, (rerun, expected) = BENCHES[name], good_run(name)
    good = good_call(bench)
    bad = good | {
        k: x(good[k]) if callable(x) and k in GIVEN else x
        for k, x in changes.items()
    }

    self.assert_refused(lambda: run(bench, **bad), (good, bad), error, words)

    result = rerun(good['updates'], good['state'], good['params'])
    chex.assert_trees_all_equal(jax.device_get(result), expected, strict=True)
