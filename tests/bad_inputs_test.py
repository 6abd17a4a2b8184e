"""Tests of bad inputs, which raise a clear error and do not change anything.

A new mistake is a new row of `CALLS` or `UPDATES`. The mistakes of the façade
are in `facade/refusals_test.py`.
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


# A call whose arguments `assert_refused` compares before and after.
call = functools.partial


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


class Refusal(NamedTuple):
  """A mistake, and the error for it.

  Attributes:
    call: The call that is refused.
    error: The type of the error.
    words: A regular expression of words that a user would search for.
  """

  call: Any
  error: type[Exception]
  words: str


# Calls of public functions that are refused.
CALLS = {
    'fractional num_towers': Refusal(
        call(tower_reduce, 2.5),
        TypeError,
        '`num_towers` must be an integer, got 2.5',
    ),
    'state of another transformation in cross_check': Refusal(
        call(cross_check(jnp.sum, AXIS).weight, SGD.init(PARAMS)),
        TypeError,
        '`state` of `cross_check` must be a `CrossCheckState`',
    ),
    'factory as inner of drop_stale': Refusal(
        call(drop_stale, 2, optax.sgd),
        TypeError,
        '`inner` of `drop_stale` must be an',
    ),
    'factory as inner of guard': Refusal(
        call(guard, optax.sgd), TypeError, '`inner` of `guard` must be an'
    ),
    'factory as inner of master_weights': Refusal(
        call(master_weights, optax.sgd),
        TypeError,
        '`inner` of `master_weights` must be',
    ),
    'abstract parameters of master_weights': Refusal(
        call(
            master_weights(SGD).init, jax.ShapeDtypeStruct((3,), jnp.bfloat16)
        ),
        TypeError,
        '`params` of `master_weights` must be arrays.* `jax.eval_shape',
    ),
    'factory as inner of reduce_stacked_towers': Refusal(
        call(reduce_stacked_towers, 2, optax.sgd),
        TypeError,
        '`inner` of `reduce_stacked_towers` must be',
    ),
    'factory as inner of shard_update': Refusal(
        call(shard_update, optax.sgd, AXIS),
        TypeError,
        '`inner` of `shard_update` must be',
    ),
    'factory as inner of tower_reduce': Refusal(
        call(tower_reduce, 2, optax.sgd),
        TypeError,
        '`inner` of `tower_reduce` must be',
    ),
    'factory as tx of init_state': Refusal(
        call(init_state, optax.adam, PARAMS, MESH),
        TypeError,
        '`tx` of `init_state` must be an Optax .* Call its factory',
    ),
    'axis name as in_specs': Refusal(
        call(init_state, SGD, PARAMS, MESH, in_specs=AXIS),
        TypeError,
        "`in_specs` of `init_state` must be a `PartitionSpec` .*'data'",
    ),
    'number as mesh of resize_state': Refusal(
        call(resize_state, PARAMS, SGD, PARAMS, 3),
        TypeError,
        '`mesh` must be a `jax.sharding.Mesh`, got 3',
    ),
    'no mesh': Refusal(
        call(init_state, SGD, PARAMS, None),
        TypeError,
        '`mesh` must be a `jax.sharding.Mesh`, got None',
    ),
    'string as stacked': Refusal(
        call(state_specs, SGD, PARAMS, MESH, stacked='x'),
        TypeError,
        "`stacked` must be a boolean, got 'x'",
    ),
    'no tx': Refusal(
        call(state_shardings, None, PARAMS, MESH),
        TypeError,
        '`tx` of `state_shardings` must be an Optax .* got None',
    ),
    'nnx state in metrics': Refusal(
        call(metrics, nnx.State({'num_updates': np.int32(0)})),
        TypeError,
        '`state` of `metrics` contains .*`optimizer.opt_state`',
    ),
    'string as command': Refusal(
        call(run_processes, 1, 'python train.py'),
        TypeError,
        "`command` must be a sequence of arguments, got 'python train.py'",
    ),
    'array as fun of cross_check': Refusal(
        call(cross_check, MATRIX, AXIS),
        TypeError,
        '`fun` of `cross_check` must be callable, got array',
    ),
    'unmapped axis': Refusal(
        call(shard_mean, PARAMS, AXIS), NameError, f'`shard_mean` {UNBOUND}'
    ),
    'axis that the mesh does not have': Refusal(
        call(state_specs, tower_reduce(2, axis_name='rows'), PARAMS, MESH),
        NameError,
        r"the axis 'rows', which is not mapped here .*\('data',\)",
    ),
    'name that does not exist': Refusal(
        call(getattr, shard_transforms, 'no_such'),
        AttributeError,
        "no attribute 'no_such'",
    ),
    'program that does not exist': Refusal(
        call(run_processes, 2, ['/no/such/program']),
        FileNotFoundError,
        '/no/such/program',
    ),
    # Slices of parameters over the axis that is reduced.
    'sliced parameters of shard_update': Refusal(
        call(
            state_specs,
            *(shard_update(SGD, AXIS), np.ones(16, 'f'), MESH),
            in_specs=P(AXIS),
        ),
        ValueError,
        r"`params` of `shard_update` .* all shards of \['data'\].*\(FSDP\)",
    ),
    'sliced parameters of owned_update without specs': Refusal(
        call(
            state_specs,
            *(owned_update(SGD, AXIS), np.ones(16, 'f'), MESH),
            in_specs=P(AXIS),
        ),
        ValueError,
        '`param_specs` of `owned_update` must name .* its type varies',
    ),
    **{
        f'sliced parameters of {name}': Refusal(
            call(of_slices(tx), jax.ShapeDtypeStruct((16,), np.float32)),
            ValueError,
            f'`params` of `{name}` must be the same on all shards',
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
    'empty groups': Refusal(
        call(cross_shard_mean, AXIS, groups=[]),
        ValueError,
        '`groups` must contain at least',
    ),
    'unknown on_bad': Refusal(
        call(guard, SGD, on_bad='drop'),
        ValueError,
        "`on_bad` must be 'skip' or 'exclude'",
    ),
    'excluding guard without an axis': Refusal(
        call(guard, SGD, on_bad='exclude'),
        ValueError,
        "`on_bad='exclude'` .* needs `axis_name`.* around the reduction",
    ),
    'decode with another dtype': Refusal(
        call(sent_as(2, 'float16'), MATRIX),
        ValueError,
        '`decode` of a `Compressor` must return float32',
    ),
    'encode without a payload': Refusal(
        call(sent_as(0), MATRIX),
        ValueError,
        '`encode` of a `Compressor` returned an empty payload',
    ),
    **{
        f'explicitly sharded updates of {name}': Refusal(
            call(beside_explicit(tx), MATRIX),
            ValueError,
            f'`updates` of `{name}` are sharded .*Explicit.*`Auto`',
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
    'in_specs with another tree': Refusal(
        call(resize_state, PARAMS, SGD, PARAMS, MESH, in_specs=(P(),)),
        ValueError,
        '`in_specs` of `resize_state` must have the tree of the parameters',
    ),
    'devices that are not available': Refusal(
        call(init_state, SGD, PARAMS, MESH),
        ValueError,
        'devices of `mesh` are not available',
    ),
    'state that differs between shards without a row for each': Refusal(
        call(state_specs, per_shard_state(), PARAMS, MESH),
        ValueError,
        r"\['b'\] has the shape \(\) .* leading dimension of length 1",
    ),
    'mesh that is not that of the program': Refusal(
        call(
            communication_report,
            jnp.sum,
            MATRIX,
            compiled=True,
            mesh=OTHER_MESH,
        ),
        ValueError,
        'The program runs on 1 devices, but `mesh` has 4',
    ),
    'cross_check of one shard': Refusal(
        call(cross_checked, MATRIX[:1]),
        ValueError,
        'needs 2 shards or more over `axis_name`, got',
    ),
    'rows of different numbers': Refusal(
        call(cross_checked, MATRIX, MATRIX[1:]),
        ValueError,
        'inconsistent sizes|divisible',
    ),
}


class Setup(NamedTuple):
  """A transformation, and how it is called correctly.

  Attributes:
    tx: The transformation.
    mode: How shards are mapped: by `jax.vmap`, by `jax.shard_map` with types,
      or not at all.
    leading_axes: Those of updates on one shard.
    extra_args: The extra arguments.
  """

  tx: optax.GradientTransformationExtraArgs
  mode: str | None = 'vmap'
  leading_axes: tuple[int, ...] = ()
  extra_args: Any = ()


MEAN = optax.chain(cross_shard_mean(AXIS), SGD)
MEAN_IF_REDUCED = optax.chain(cross_shard_mean(AXIS, if_reduced='mean'), SGD)
FRESH = {'local_step': 0}
SETUPS = {
    'mean': Setup(MEAN),
    'tracked mean': Setup(MEAN, 'shard_map'),
    'sum': Setup(optax.chain(cross_shard_sum(AXIS), SGD)),
    'slices': Setup(shard_update(SGD, AXIS)),
    'towers': Setup(tower_reduce(TOWERS, SGD), None),
    'chained towers': Setup(optax.chain(tower_reduce(TOWERS), SGD), None),
    'shards of towers': Setup(tower_reduce(TOWERS, MEAN, axis_name=AXIS)),
    'stacked': Setup(reduce_stacked_towers(TOWERS, SGD), None, (TOWERS,)),
    'stale': Setup(drop_stale(2, SGD), None, (), FRESH),
    'shards of stale': Setup(
        drop_stale(2, MEAN, axis_name=AXIS), extra_args=FRESH
    ),
    'tracked stale': Setup(
        optax.chain(drop_stale(2, optax.scale(-1.0)), cross_shard_mean(AXIS)),
        'shard_map',
        extra_args=FRESH,
    ),
    'masters': Setup(master_weights(SGD), None),
    'slices of masters': Setup(shard_update(master_weights(SGD), AXIS)),
    'guarded': Setup(guard(MEAN, AXIS, on_bad='exclude')),
}


# The names of arguments that are not extra arguments.
ARGUMENTS = ('tx', 'updates', 'state', 'params')


def correct_call(setup):
  """Returns new arguments that are accepted."""
  params = jax.tree.map(jnp.asarray, PARAMS)
  leading_axes = setup.leading_axes
  if setup.mode is not None:
    leading_axes = (SHARDS, *leading_axes)
  if setup.mode is None:
    state = setup.tx.init(params)
  elif setup.mode == 'vmap':
    init = jax.vmap(setup.tx.init, None, axis_name=AXIS, axis_size=SHARDS)
    state = init(params)
  else:
    state = init_state(setup.tx, params, modes.mesh())
  updates = jax.tree.map(
      lambda p: jnp.full((*leading_axes, *p.shape), 2.0), params
  )
  return {
      'tx': setup.tx,
      'updates': updates,
      'state': state,
      'params': params,
      **dict(setup.extra_args),
  }


def run(setup, tx, updates, state, params, **extra_args):
  """Calls `tx.update` on all shards, with the state donated."""

  def update(updates, state, params):
    values = {k: x() if callable(x) else x for k, x in extra_args.items()}
    return tx.update(updates, state, params, **values)

  def update_of_shard(updates, state, params):
    return update(jax.tree.map(lambda x: x[0], updates), state, params)

  mapped = update
  if setup.mode == 'vmap':
    mapped = jax.vmap(update, (0, 0, None), axis_name=AXIS)
  elif setup.mode == 'shard_map':
    specs = state_specs(setup.tx, params, modes.mesh())
    mapped = jax.shard_map(
        update_of_shard,
        mesh=modes.mesh(),
        in_specs=(P(AXIS), specs, P()),
        out_specs=(P(), specs),
    )
  return jax.jit(mapped, donate_argnums=1)(updates, state, params)


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
    mean_state, sgd_state = state
    updates = lax.pmean(updates, AXIS)
    updates, sgd_state = SGD.update(updates, sgd_state, params)
    return updates, (mean_state, sgd_state)

  return optax.GradientTransformation(MEAN.init, update)


def padded(x):
  """Returns slices as of fewer shards."""
  return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, 1)]) if x.ndim > 1 else x


LARGER = {'b': PARAMS['b'], 'w': np.ones(90, np.float32)}
REDUCED = r"over 'data', got \['b'\] \[\], typed invariant: .* already reduced"
GROWING = optax.GradientTransformation(
    optax.identity().init, lambda updates, state, params: (updates, [state])
)


class Changed(NamedTuple):
  """A call of `update` with changed arguments.

  Attributes:
    setup: The name of one of `SETUPS`.
    changes: Wrong values by the names of arguments. A function gets the correct
      value, or, for an extra argument, is called on each shard.
  """

  setup: str
  changes: dict[str, Any]


def changed(setup, **changes):
  return Changed(setup, changes)


# Calls of `update` that are refused.
UPDATES = {
    'key as an update': Refusal(
        changed(
            'mean',
            updates=with_leaf(b=lambda _: random.split(random.key(0), 8)),
        ),
        TypeError,
        '`updates` of `cross_shard_mean` must be real or complex, got key',
    ),
    'complex updates of tower_reduce': Refusal(
        changed('towers', updates=with_leaf(w=lambda w: w * 1j)),
        TypeError,
        r"`updates` of `tower_reduce` are complex at \['w'\]",
    ),
    'complex weight': Refusal(
        changed('shards of towers', weight=1j),
        TypeError,
        '`weight` of `tower_reduce` must be a real number, got 1j',
    ),
    'fractional local_step': Refusal(
        changed('stale', local_step=1.5),
        TypeError,
        '`local_step` of `drop_stale` must be an integer, got 1.5',
    ),
    'state of another transformation in guard': Refusal(
        changed('guarded', state=other_state(SGD, PARAMS)),
        TypeError,
        '`state` of `guard` must be a `GuardState`, .* got tuple',
    ),
    'state of another transformation in drop_stale': Refusal(
        changed('stale', state=other_state(SGD, PARAMS)),
        TypeError,
        '`state` of `drop_stale` must be a `DropStaleState`',
    ),
    'state of another transformation in master_weights': Refusal(
        changed('masters', state=other_state(SGD, PARAMS)),
        TypeError,
        '`state` of `master_weights` must be a `MasterWeightsState`',
    ),
    'state of another transformation in shard_update': Refusal(
        changed('slices', state=other_state(SGD, PARAMS)),
        TypeError,
        '`state` of `shard_update` must be a `ShardUpdateState`',
    ),
    'update of another shape': Refusal(
        changed('towers', updates=with_leaf(w=lambda w: w[:4])),
        ValueError,
        r'have the shape \(4,\) instead of \(9,\) at',
    ),
    'missing leaf': Refusal(
        changed('towers', updates=lambda updates: {'w': updates['w']}),
        ValueError,
        r"\['b'\] is only in the state. Pass gradients",
    ),
    'additional leaf': Refusal(
        changed(
            'shards of towers',
            updates=lambda updates: {**updates, 'c': updates['b']},
        ),
        ValueError,
        r"do not have the tree .* \['c'\] is only in the updates",
    ),
    'too few stacked towers': Refusal(
        changed('stacked', updates=with_leaf(w=lambda w: w[1:])),
        ValueError,
        r'a leading axis of 3 towers, got the shape \(2, 9\) at',
    ),
    'no parameters in master_weights': Refusal(
        changed('masters', params=lambda _: None),
        ValueError,
        '`master_weights` needs the parameters in .* got None. Call',
    ),
    'no parameters in shard_update of master_weights': Refusal(
        changed('slices of masters', params=lambda _: None),
        ValueError,
        '`master_weights` needs the parameters in `update`, got None',
    ),
    'parameters of 16 bits with a state of 32 bits': Refusal(
        changed(
            'masters', params=with_leaf(w=lambda w: w.astype(jnp.bfloat16))
        ),
        ValueError,
        r"at \['w'\], .* a leaf without .* the shape \(9,\). Make the",
    ),
    'updates of another shape than the copies': Refusal(
        changed('masters', updates=with_leaf(w=lambda w: w[:4])),
        ValueError,
        r'`updates` of `master_weights` .* \(4,\) instead of \(9,\)',
    ),
    # Weights.
    'nan weight': Refusal(
        changed('sum', weight=math.nan),
        ValueError,
        'must be finite .* negative, got nan',
    ),
    'weight with an axis': Refusal(
        changed('mean', weight=np.ones(SHARDS)),
        ValueError,
        r'the shape \(\), got \(8,\)',
    ),
    'single weight for stacked towers': Refusal(
        changed('stacked', weight=1.0),
        ValueError,
        r'the shape \(3,\), got \(\)',
    ),
    'weight of tower_reduce in a chain': Refusal(
        changed('chained towers', weight=1.0),
        ValueError,
        '`weight` .* must come with `inner',
    ),
    # Local steps.
    'local_step with an axis': Refusal(
        changed('shards of stale', local_step=np.zeros(SHARDS, int)),
        ValueError,
        r'`local_step` of `drop_stale` must have the shape \(\), got \(8,',
    ),
    'local_step that does not fit int32': Refusal(
        changed('stale', local_step=2**31),
        ValueError,
        '`local_step` .* must fit int32, got 2',
    ),
    'local_step with too few towers': Refusal(
        changed('stacked', local_step=np.zeros(2, int)),
        ValueError,
        r'`local_step` of `reduce_stacked.* \(\) or \(3,\), got \(2,\)',
    ),
    'local_step that differs between shards': Refusal(
        changed('tracked stale', local_step=lambda: lax.axis_index(AXIS)),
        ValueError,
        '`drop_stale` got .* that differs .* could not .* `axis_name`',
    ),
    # Updates that are already reduced, or reduced by hand.
    'reduced updates': Refusal(
        changed(
            'tracked mean',
            tx=lambda _: summed_before(MEAN_IF_REDUCED),
            weight=2.0,
        ),
        ValueError,
        f'`updates` of `cross_shard_mean` must be per shard {REDUCED}'
        ".*`if_reduced='mean'` and no `weight`",
    ),
    'inner that reduces without the weight': Refusal(
        changed(
            'guarded', tx=lambda _: guard(by_hand(), AXIS, on_bad='exclude')
        ),
        ValueError,
        'must use the extra argument `weight` in all of its sums over',
    ),
    'groups that are not a partition': Refusal(
        changed(
            'mean', tx=lambda _: cross_shard_mean(AXIS, groups=[[0, 1], [2, 3]])
        ),
        ValueError,
        r'partition of the 8 shards .* ids \[4, 5, 6, 7\] are missing',
    ),
    # Slices and states.
    'inner that is not element-wise': Refusal(
        changed(
            'slices',
            tx=lambda _: shard_update(optax.clip_by_global_norm(1.0), AXIS),
        ),
        ValueError,
        '`shard_update` runs `inner` on slices, .* be element-wise',
    ),
    'state of larger parameters': Refusal(
        changed('slices', state=other_state(shard_update(SGD, AXIS), LARGER)),
        ValueError,
        r'`shard_update` got a state .* for other parameters .*\(12,\)',
    ),
    'state of another inner': Refusal(
        changed(
            'slices',
            state=other_state(shard_update(optax.adam(0.1), AXIS), PARAMS),
        ),
        ValueError,
        '`shard_update` got a state .* for other parameters .*: the tree',
    ),
    'state of another number of shards': Refusal(
        changed('slices', state=lambda state: jax.tree.map(padded, state)),
        ValueError,
        '`shard_update` got a state .* another number of shards: the shape',
    ),
    'state of a shard without its row': Refusal(
        changed(
            'shards of towers',
            state=other_state(tower_reduce(TOWERS, MEAN), PARAMS),
        ),
        ValueError,
        'must have a leading axis of length 1 on each shard',
    ),
    'inner that changes the tree of its state': Refusal(
        changed(
            'stale',
            tx=lambda _: drop_stale(2, GROWING),
            state=lambda _: drop_stale(2, GROWING).init(PARAMS),
        ),
        ValueError,
        'inner transformation changed the tree of its state',
    ),
}


def snapshot(tree):
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

  leaves, treedef = jax.tree.flatten(tree)
  global_state = (
      dict(os.environ),
      dict(jax.config.values),
      signal.getsignal(signal.SIGTERM),
  )
  return treedef, [copy(leaf) for leaf in leaves], global_state


class BadInputsTest(parameterized.TestCase):

  def assert_refused(self, call, arguments, error, words):
    """Checks the error of a call, and that no global state changed."""
    before = snapshot(arguments)

    with self.assertRaisesRegex(error, words):
      call()

    self.assertEqual(snapshot(arguments), before)

  @cases.parameters(*CALLS)
  def test_refuses_call(self, name):
    call, error, words = CALLS[name]

    self.assert_refused(call, (call.args, call.keywords), error, words)

  @cases.parameters(*UPDATES)
  def test_refuses_update(self, name):
    call, error, words = UPDATES[name]
    setup = SETUPS[call.setup]
    correct = correct_call(setup)
    wrong = correct | {
        k: x(correct[k]) if callable(x) and k in ARGUMENTS else x
        for k, x in call.changes.items()
    }

    self.assert_refused(
        lambda: run(setup, **wrong), (correct, wrong), error, words
    )

  @cases.parameters(*SETUPS)
  def test_accepts_the_call_without_the_mistake(self, name):
    setup = SETUPS[name]

    updates, _ = run(setup, **correct_call(setup))

    chex.assert_tree_all_finite(updates)
