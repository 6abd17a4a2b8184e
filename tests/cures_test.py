"""Tests of the cures that error messages name."""

from collections.abc import Callable
from typing import Any, NamedTuple

from absl.testing import parameterized
import chex
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

import cases
import modes
import shard_transforms as st
from shard_transforms import contrib
import sliced_trees

AXIS = modes.AXIS
W = np.ones(16, np.float32)
OWN = np.arange(128, dtype=np.float32).reshape(8, 16)
MEAN = st.cross_shard_mean(AXIS)
SGD = optax.sgd(0.5, momentum=0.5)
MEAN_SGD = optax.chain(MEAN, SGD)


def loss(w, x):
  return jnp.sum(w * x)


def on_shards(fn, mode='shard_map'):
  """Returns a call of a function of parameters and each shard's own row."""
  return lambda: modes.map_shards(mode, fn)(W, OWN)


def step(tx, mode='shard_map', state_of=None, with_params=True, **extra_args):
  """Returns a call of one step of each shard, with its own gradient.

  Args:
    tx: The transformation.
    mode: One of `modes.MAPPED`.
    state_of: The transformation that makes the state, if not `tx`.
    with_params: Whether `update` gets the parameters.
    **extra_args: Functions of the index of a shard that return its value.
  """

  def one(w, x):
    index = lax.axis_index(AXIS)
    values = {name: value_of(index) for name, value_of in extra_args.items()}
    state = (state_of or tx).init(w)
    return tx.update(x, state, w if with_params else None, **values)[0]

  return on_shards(one, mode)


def weight(index):
  return jnp.asarray(index + 1, jnp.float32)


def with_gradient(gradient, tx=MEAN_SGD):
  def one(w, x):
    return tx.update(gradient(w, x), tx.init(w), w)[0]

  return on_shards(one)


def by_hand(inner=SGD):
  """Returns a mean that counts all shards."""

  def update(updates, state, params=None, **extra_args):
    del extra_args
    return inner.update(lax.pmean(updates, AXIS), state, params)

  return optax.GradientTransformationExtraArgs(inner.init, update)


def specs_of(tx, spec):
  return lambda: st.state_specs(tx, W, modes.mesh(), in_specs=spec)


def clipped(*axis_names):
  """Returns a call that clips slices along two axes."""
  specs = {'a': P('model', AXIS), 'b': P(), 'c': P(), 's': P()}
  tree = sliced_trees.tree_of() | {'a': np.ones((2, 8), np.float32)}
  tx = st.clip_by_global_norm(1.0, axis_names, specs=specs)

  def clip(tree):
    updates, _ = tx.update(tree, tx.init(tree))
    # One that is whole.
    return jax.tree.leaves(updates)[2]

  fn = sliced_trees.on_mesh(clip, specs, False)
  return lambda: fn(tree)


def stacked(tx, **extra_args):
  def one(w, x):
    towers = jnp.stack([x, x])
    return tx.update(towers, tx.init(w), w, **extra_args)[0]

  return on_shards(one)


def averaging(outer, inner=SGD):
  return step(st.contrib.local_updates(inner, outer, AXIS, every=1), 'vmap')


def on_part_of_mesh(**options):
  """Returns a call of a sharded optimizer on a mesh of two axes."""
  mesh = jax.make_mesh(
      (4, 2), (AXIS, 'model'), (jax.sharding.AxisType.Auto,) * 2
  )
  tx = st.shard_update(SGD, AXIS)

  def one(w):
    return tx.update(st.per_shard(w, AXIS), tx.init(w), w)[0]

  mapped = jax.shard_map(one, mesh=mesh, in_specs=P(), out_specs=P(), **options)
  return lambda: jax.jit(mapped)(W)


def resized(**options):
  """Returns a call that carries a begun window over to fewer shards."""
  tx = st.tower_reduce(2, MEAN_SGD, axis_name=AXIS)

  def call():
    state = st.init_state(tx, W, modes.mesh())
    specs = st.state_specs(tx, W, modes.mesh())
    mapped = jax.shard_map(
        lambda x, state: tx.update(x[0], state, W)[1],
        mesh=modes.mesh(),
        in_specs=(P(AXIS), specs),
        out_specs=specs,
    )
    state = jax.jit(mapped)(OWN, state)
    return st.resize_state(state, tx, W, modes.mesh(4), **options)

  return call


def hyperparams(**options):
  tx = optax.inject_hyperparams(st.tower_reduce, **options)(num_towers=2)
  return lambda: tx.update(W, tx.init(W))


def unless_skipped(tx):
  """Returns a call that keeps model state where a guard skips."""

  def one(w, x):
    _, state = tx.update(x, tx.init(w), w)
    return st.unless_skipped(state, x, w)

  return on_shards(one)


def masked_ints(wrap):
  tree = {'w': W, 'n': np.arange(8)}
  tx = wrap(MEAN)

  def one(_, x):
    updates = {'w': x, 'n': jnp.arange(8)}
    return tx.update(updates, tx.init(tree))[0]['w']

  return on_shards(one)


class Row(NamedTuple):
  """A refusal, and the program after each of its cures.

  Attributes:
    refused: The call that raises.
    words: What the error says, the cures among it.
    cures: The same call after each cure, by the words that name it.
  """

  refused: Callable[[], Any]
  words: str
  cures: dict[str, Callable[[], Any]]


CLIP = optax.chain(optax.clip_by_global_norm(1.0), SGD)
OUR_CLIP = optax.chain(st.clip_by_global_norm(1.0, AXIS), SGD)
STALE: dict[str, Any] = dict(local_step=lambda index: jnp.minimum(index, 0))
SAME: dict[str, Any] = dict(
    local_step=lambda index: lax.pmin(jnp.minimum(index, 0), AXIS)
)

HALF = np.ones(8, jnp.bfloat16)
MASTERS = st.contrib.master_weights(SGD)


def local_updates_of_half(inner, outer):
  """Returns updates of 16-bit parameters, which shards train alone."""
  tx = st.contrib.local_updates(inner, outer, AXIS, every=1)

  def one(updates):
    return tx.update(jnp.asarray(updates, HALF.dtype), tx.init(HALF), HALF)[0]

  return jax.vmap(one, axis_name=AXIS)(OWN[:, :8])


ROWS = {
    'copies of types': Row(
        lambda: MASTERS.init(jax.eval_shape(lambda: HALF)),
        'must be arrays',
        {
            '`jax.eval_shape(tx.init, params)`': lambda: jax.eval_shape(
                MASTERS.init, jax.eval_shape(lambda: HALF)
            )
        },
    ),
    'copies without parameters': Row(
        lambda: MASTERS.update(HALF, MASTERS.init(HALF)),
        'needs the parameters in `update`',
        {
            '`tx.update(updates, state, params)`': lambda: MASTERS.update(
                HALF, MASTERS.init(HALF), HALF
            )
        },
    ),
    'copies of parameters of 32 bits': Row(
        lambda: MASTERS.update(HALF, MASTERS.init(W), HALF),
        'was made for other parameters',
        {
            'Make the state with `init` for parameters': lambda: MASTERS.update(
                HALF, MASTERS.init(HALF), HALF
            )
        },
    ),
    'copies inside of local updates': Row(
        lambda: local_updates_of_half(MASTERS, MEAN_SGD),
        'would undo the mean at the end of the round',
        {
            'Put `master_weights` into `outer`': lambda: local_updates_of_half(
                SGD, optax.chain(MEAN, MASTERS)
            ),
            'keep the parameters in float32': step(
                st.contrib.local_updates(MASTERS, MEAN_SGD, AXIS, every=1),
                'vmap',
            ),
        },
    ),
    'a sum of JAX': Row(
        with_gradient(jax.grad(loss)),
        'and `lax.pmean` of this sum is still the sum',
        {
            'with `shard_transforms.value_and_grad`': with_gradient(
                lambda w, x: st.value_and_grad(loss, AXIS)(w, x)[1]
            )
        },
    ),
    'a mean by hand': Row(
        with_gradient(lambda w, x: lax.pmean(x, AXIS)),
        'is already reduced',
        {
            "`if_reduced='mean'`": with_gradient(
                lambda w, x: lax.pmean(x, AXIS),
                optax.chain(st.cross_shard_mean(AXIS, if_reduced='mean'), SGD),
            )
        },
    ),
    'a loss that is reduced': Row(
        with_gradient(
            lambda w, x: st.value_and_grad(
                lambda w, x: lax.pmean(loss(w, x), AXIS), AXIS
            )(w, x)[1]
        ),
        'is the same on all shards',
        {
            'Return the loss of the shard': with_gradient(
                lambda w, x: st.value_and_grad(loss, AXIS)(w, x)[1]
            )
        },
    ),
    'an axis that is not bound': Row(
        lambda: st.shard_update(SGD, AXIS).init(W),
        'not mapped here',
        {
            'Inside `jax.shard_map`': step(st.shard_update(SGD, AXIS)),
            '`jax.pmap`': step(st.shard_update(SGD, AXIS), 'pmap'),
            '`jax.vmap`': step(st.shard_update(SGD, AXIS), 'vmap'),
            '`shard_transforms.on_mesh(tx, mesh)`': lambda: st.on_mesh(
                st.shard_update(SGD, AXIS), modes.mesh()
            ).init(W),
        },
    ),
    'slices of parameters': Row(
        specs_of(st.shard_update(SGD, AXIS), P(AXIS)),
        'the same on all shards',
        {
            'Pass whole parameters, with `PartitionSpec()`': specs_of(
                st.shard_update(SGD, AXIS), P()
            ),
            '`contrib.owned_update`': specs_of(
                contrib.owned_update(SGD, AXIS), P()
            ),
            'use `contrib.owned_update` with `param_specs`': specs_of(
                contrib.owned_update(
                    SGD, AXIS, param_specs=P(AXIS), if_sliced='sum'
                ),
                P(AXIS),
            ),
            '`accumulated_value_and_grad`': lambda: jax.jit(
                st.accumulated_value_and_grad(
                    lambda w, x: jnp.mean(x @ w),
                    AXIS,
                    mesh=modes.mesh(),
                    num_towers=2,
                    param_specs=P(AXIS),
                )
            )(W, np.ones((16, 16), np.float32)),
        },
    ),
    'specs of an axis that is not named': Row(
        clipped('model'),
        'must name all mapped axes',
        {"Write `axis_name=('model', 'data')`": clipped('model', AXIS)},
    ),
    'clipping of slices': Row(
        step(st.shard_update(CLIP, AXIS)),
        'must be element-wise',
        {
            'clip by `shard_transforms.clip_by_global_norm`': step(
                st.shard_update(OUR_CLIP, AXIS)
            )
        },
    ),
    'LAMB of slices': Row(
        step(st.shard_update(optax.lamb(0.1), AXIS)),
        'must be element-wise',
        {
            '`contrib.owned_update`': step(
                contrib.owned_update(optax.lamb(0.1), AXIS)
            )
        },
    ),
    'an aggregator of slices': Row(
        step(st.shard_update(contrib.adasum(AXIS), AXIS)),
        'must be element-wise',
        {
            "before `shard_update` and pass it `if_reduced='mean'`": step(
                optax.chain(
                    contrib.adasum(AXIS),
                    st.shard_update(SGD, AXIS, if_reduced='mean'),
                )
            )
        },
    ),
    'elements in groups': Row(
        step(st.shard_update(CLIP, AXIS, groups=[[0, 1, 2, 3], [4, 5, 6, 7]])),
        'must be element-wise',
        {
            'cross_shard_mean(axis_name), inner': step(
                optax.chain(
                    st.cross_shard_mean(
                        AXIS, groups=[[0, 1, 2, 3], [4, 5, 6, 7]]
                    ),
                    CLIP,
                ),
                'shard_map_unchecked',
            )
        },
    ),
    'an axis that is not mapped': Row(
        on_part_of_mesh(axis_names={AXIS}),
        'with axes that are not mapped',
        {
            'Name all axes in `axis_names`': on_part_of_mesh(
                axis_names={AXIS, 'model'}
            )
        },
    ),
    'a weight of stacked towers in a chain': Row(
        stacked(st.reduce_stacked_towers(2), weight=jnp.ones(2)),
        'must come with `inner`',
        {
            'Write `reduce_stacked_towers(num_towers, optax.chain': stacked(
                st.reduce_stacked_towers(2, MEAN_SGD), weight=jnp.ones(2)
            )
        },
    ),
    'a weight of towers in a chain': Row(
        step(
            optax.chain(st.tower_reduce(1, axis_name=AXIS), MEAN), weight=weight
        ),
        'must come with `inner`',
        {
            'Write `tower_reduce(num_towers, optax.chain': step(
                st.tower_reduce(1, MEAN_SGD, axis_name=AXIS), weight=weight
            )
        },
    ),
    'the state of more towers': Row(
        step(
            st.tower_reduce(1, MEAN_SGD, axis_name=AXIS),
            state_of=st.tower_reduce(4, MEAN_SGD, axis_name=AXIS),
        ),
        'made with more towers',
        {
            'Make the state with `init`': step(
                st.tower_reduce(1, MEAN_SGD, axis_name=AXIS)
            )
        },
    ),
    'the state of one tower': Row(
        step(
            st.tower_reduce(4, MEAN_SGD, axis_name=AXIS),
            state_of=st.tower_reduce(1, MEAN_SGD, axis_name=AXIS),
        ),
        'made with `num_towers=1`',
        {
            'Make the state with `init`': step(
                st.tower_reduce(4, MEAN_SGD, axis_name=AXIS)
            )
        },
    ),
    'an axis without inner': Row(
        lambda: st.drop_stale(2, axis_name=AXIS),
        'needs `inner`',
        {
            'Write `drop_stale(staleness, optax.chain(...), axis_name': step(
                st.drop_stale(2, MEAN_SGD, axis_name=AXIS), **STALE
            )
        },
    ),
    'steps that differ': Row(
        step(optax.chain(st.drop_stale(2, SGD), MEAN), **STALE),
        'could not decide together',
        {
            'Put the reduction inside `drop_stale`, with `axis_name`': step(
                st.drop_stale(2, MEAN_SGD, axis_name=AXIS), **STALE
            ),
            'or put `drop_stale` after the reduction': step(
                optax.chain(MEAN, st.drop_stale(2, SGD)), **STALE
            ),
        },
    ),
    'weights that differ': Row(
        step(optax.chain(MEAN, st.tower_reduce(1, SGD)), weight=weight),
        'could not decide together',
        {
            'Put the reduction inside `tower_reduce`, with `axis_name`': step(
                st.tower_reduce(1, MEAN_SGD, axis_name=AXIS), weight=weight
            )
        },
    ),
    'no step': Row(
        step(st.drop_stale(2, MEAN_SGD, axis_name=AXIS)),
        'is the global step',
        {
            'local_step=': step(
                st.drop_stale(2, MEAN_SGD, axis_name=AXIS), **SAME
            )
        },
    ),
    'a mean that counts all': Row(
        step(st.guard(by_hand(), AXIS, on_bad='exclude')),
        'must use the extra argument `weight`',
        {
            'Reduce with `cross_shard_mean`': step(
                st.guard(MEAN_SGD, AXIS, on_bad='exclude')
            ),
            'pass `assume_weighted=True` to `guard`': step(
                st.guard(
                    by_hand(), AXIS, on_bad='exclude', assume_weighted=True
                )
            ),
        },
    ),
    'an outer that does not reduce': Row(
        averaging(SGD),
        'differ between shards',
        {'Reduce over all of `axis_name` first': averaging(MEAN_SGD)},
    ),
    'an inner that sends': Row(
        averaging(MEAN_SGD, inner=MEAN_SGD),
        'communicates over `axis_name`',
        {'into `outer`': averaging(MEAN_SGD)},
    ),
    'integers': Row(
        masked_ints(lambda tx: tx),
        'must be real or complex',
        {
            '`optax.masked`': masked_ints(
                lambda tx: optax.masked(tx, {'w': True, 'n': False})
            )
        },
    ),
    'a traced number of towers': Row(
        hyperparams(),
        'must be a Python integer',
        {'`static_args`': hyperparams(static_args='num_towers')},
    ),
    'a begun window': Row(
        resized(),
        'depends on how `inner` reduces',
        {
            "Pass `reduction`, one of 'mean', 'sum'": resized(reduction='mean'),
            "and 'weighted', to `shard_state` or `resize_state`": resized(
                reduction='weighted'
            ),
        },
    ),
    'a guard in a window': Row(
        unless_skipped(
            st.tower_reduce(2, st.guard(MEAN_SGD, AXIS), axis_name=AXIS)
        ),
        'may skip a step',
        {
            'Put `guard` around that': unless_skipped(
                st.guard(st.tower_reduce(2, MEAN_SGD, axis_name=AXIS), AXIS)
            )
        },
    ),
    'a weight before a delay': Row(
        step(
            optax.chain(st.contrib.delay_updates(1, axis_name=AXIS), MEAN),
            weight=weight,
        ),
        'Delay the mean instead',
        {
            'optax.chain(cross_shard_mean': step(
                optax.chain(MEAN, st.contrib.delay_updates(1)), weight=weight
            )
        },
    ),
    'no parameters': Row(
        step(
            st.contrib.local_updates(SGD, MEAN_SGD, AXIS, every=1),
            with_params=False,
        ),
        'needs the parameters',
        {
            'Call `tx.update(updates, state, params)`': step(
                st.contrib.local_updates(SGD, MEAN_SGD, AXIS, every=1)
            )
        },
    ),
}


class CuresTest(parameterized.TestCase):

  @cases.parameters(*ROWS, fast=set(ROWS) - {'copies inside of local updates'})
  def test_cure_works(self, name):
    row = ROWS[name]

    with self.assertRaises((NameError, TypeError, ValueError)) as raised:
      row.refused()

    message = str(raised.exception)
    self.assertIn(row.words, message)
    for words, cured in row.cures.items():
      with self.subTest(words):
        self.assertIn(words, message)
        results = cured()
        arrays = [
            x for x in jax.tree.leaves(results) if isinstance(x, jax.Array)
        ]
        chex.assert_tree_all_finite(arrays)
