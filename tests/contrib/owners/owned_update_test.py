"""`owned_update`: trains as replicated; owners, state, bytes and refusals."""

import functools
from typing import Any, NamedTuple
import warnings

from absl.testing import parameterized
import chex
from flax import nnx
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

import cases
import modes
import shard_transforms as st
from shard_transforms import contrib
from shard_transforms import cross_shard_mean
from shard_transforms import init_state
from shard_transforms import monitoring
from shard_transforms import resize_state

AXIS = modes.AXIS
SHARDS, STEPS = 4, 3
owned = functools.partial(contrib.owned_update, axis_name=AXIS)


# All shards update the last two; two matrices and two biases have owners.
SHAPES = {
    'first': {'kernel': (4, 6), 'bias': (6,)},
    'second': {'kernel': (4, 6), 'bias': (6,)},
    'stack': (2, 3, 4),
    'scalar': (),
}
# Of a decoder of MaxText, three layers along the second dimension: leaves, and
# which of their dimensions Muon is to multiply.
DECODER = {
    'query': ((4, 3, 2, 5), ((0,), (-2, -1))),
    'out': ((2, 3, 5, 4), ((0, -2), (-1,))),
    'moe': {'wi_0': ((5, 3, 4, 6), ((-2,), (-1,)))},
    'kv_norm': ((6, 3), None),
}


def per_entry(fn, tree):
  return jax.tree.map(fn, tree, is_leaf=lambda x: isinstance(x, tuple))


def params_of(shapes=SHAPES):
  normal = np.random.default_rng(0).normal
  return per_entry(
      lambda shape: np.asarray(normal(size=shape), np.float32), shapes
  )


def gradients(steps, shapes=SHAPES):
  """Returns other ones for each shard and step: [shards, steps, ...]."""
  rng = np.random.default_rng(1)
  return jax.tree.map(
      lambda p: rng.normal(size=(SHARDS, steps, *p.shape)).astype(p.dtype),
      params_of(shapes),
  )


def listed():
  """Momentum in a list, without the names of the parameters, the last first."""

  def init(params):
    return [jnp.copy(p) for p in reversed(jax.tree.leaves(params))]

  def update(updates, state, params=None):
    del params
    leaves, treedef = jax.tree.flatten(updates)
    state = [0.9 * s + u for s, u in zip(state, reversed(leaves), strict=True)]
    return treedef.unflatten([-0.1 * s for s in reversed(state)]), state

  return optax.GradientTransformation(init, update)


def vectors(inner):
  """Applies to all but scalars, which some optimizers do not take."""
  return optax.masked(
      inner, lambda params: jax.tree.map(lambda p: jnp.ndim(p) > 0, params)
  )


INNERS = {
    'factors and noise': optax.chain(
        optax.add_noise(0.1, 0.5, jax.random.key(0)),
        optax.adafactor(0.1, min_dim_size_to_factor=2),
        vectors(optax.sm3(0.1)),
    ),
    'injected, in several steps': optax.MultiSteps(
        optax.inject_hyperparams(optax.lamb)(
            learning_rate=optax.linear_schedule(0.1, 0.01, 3), b1=0.8
        ),
        2,
    ),
}


def one_key_a_leaf(impl=None):
  """Noise, whose typed key each leaf has for itself."""

  def init(params):
    keys = jax.random.key(0, impl=impl)
    keys = jax.random.split(keys, len(jax.tree.leaves(params)))
    return jax.tree.unflatten(jax.tree.structure(params), list(keys))

  def update(updates, state, params=None):
    del params
    pairs = jax.tree.map(jax.random.split, state)
    updates = jax.tree.map(
        lambda u, pair: -0.1 * u + 0.1 * jax.random.uniform(pair[0], u.shape),
        updates,
        pairs,
    )
    return updates, jax.tree.map(lambda pair: pair[1], pairs)

  return optax.GradientTransformation(init, update)


def data_of(x):
  is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
  return np.asarray(jax.random.key_data(x) if is_key else x)


# The programs of leaves of one shape differ, or read other leaves.
STACKED = {
    'norm of parameters': lambda: optax.stateless(
        lambda updates, params: jax.tree.map(
            lambda u: u * optax.tree.norm(params), updates
        )
    ),
    'listed': listed,
    'keys': one_key_a_leaf,
    'keys of XLA': lambda: one_key_a_leaf('rbg'),
    'callback': lambda: by_leaf(
        lambda u: jax.pure_callback(np.negative, jax.typeof(u), u)
    ),
    'frozen': lambda: optax.partition(
        {'not': optax.set_to_zero(), 'lars': optax.lars(0.1)},
        lambda params: {k: 'not' if k != 'bias' else 'lars' for k in params},
    ),
}


def stack(num_leaves):
  return {str(i): (4, 6) for i in range(num_leaves)} | {'bias': (6,)}


def whole(inner, **kwargs):
  return optax.chain(cross_shard_mean(AXIS, **kwargs), inner)


class Case(NamedTuple):
  """Two trainings that are to be alike.

  Attributes:
    owned: The transformation with owners.
    whole: The replicated one.
    shapes: Those of the parameters.
    apart: Whether the parameters of shards come to differ.
    tolerance: Of rounding.
  """

  owned: Any
  whole: Any
  shapes: Any = SHAPES
  apart: bool = False
  tolerance: float = 5e-6

  @classmethod
  def of(cls, inner, *args, **kwargs):
    return cls(owned(inner), whole(inner), *args, **kwargs)


def clip_then_lars(shapes, wrap=lambda tx: tx):
  clip = st.clip_by_global_norm
  sliced = optax.chain(clip(0.1, AXIS), optax.lars(0.1))
  alone = optax.chain(clip(0.1), optax.lars(0.1))
  return Case(wrap(owned(sliced)), wrap(whole(alone)), shapes)


def in_towers_of_a_guard(reduced):
  guarded = st.guard(reduced, AXIS)
  return st.tower_reduce(2, guarded, axis_name=AXIS)


def muon_of_decoder():
  numbers = per_entry(
      lambda entry: entry[1] and optax.contrib.MuonDimensionNumbers(*entry[1]),
      DECODER,
  )
  muon = optax.contrib.muon(0.1, muon_weight_dimension_numbers=numbers)
  shapes = per_entry(lambda entry: entry[0], DECODER)
  return Case.of(muon, shapes, tolerance=2e-5)


GROUPS = [[0, 2], [1, 3]]
CASES = {name: Case.of(inner) for name, inner in INNERS.items()} | {
    'sums of groups': Case(
        owned(optax.lars(0.1), reduction='sum', groups=GROUPS),
        optax.chain(st.cross_shard_sum(AXIS, groups=GROUPS), optax.lars(0.1)),
        apart=True,
    ),
    'norm of whole leaves': clip_then_lars(SHAPES, in_towers_of_a_guard),
    'norm of the leaves of one owner': clip_then_lars(
        {'w': (8, 8), 'v': (8, 8), 'b': (4,)}
    ),
    'dimensions of muon': muon_of_decoder(),
}


def train(named, mode='shard_map', num_shards=SHARDS):
  """Returns the parameters [shards, ...] after some steps, of both trainings.

  Args:
    named: Cases by name, all trained by one program.
    mode: How the axis is bound.
    num_shards: How many shards train.
  """

  def train_one(case, tx, params, data):
    def step(carry, grads):
      params, state = carry
      updates, state = tx.update(grads, state, params)
      return (optax.apply_updates(params, updates), state), None

    start = params, tx.init(params)
    if case.apart:
      start = st.per_shard(start, AXIS)
    return lax.scan(step, start, data)[0][0]

  def fn(params, data):
    return {
        name: [train_one(case, tx, params[name], data[name]) for tx in case[:2]]
        for name, case in named.items()
    }

  data = {name: gradients(STEPS, case.shapes) for name, case in named.items()}
  data = jax.tree.map(lambda x: x[:num_shards], data)
  params = {name: params_of(case.shapes) for name, case in named.items()}
  return jax.device_get(modes.map_shards(mode, fn, num_shards)(params, data))


def assert_close(actual, expected, tolerance=5e-6):
  chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
  chex.assert_trees_all_close(actual, expected, rtol=tolerance, atol=tolerance)


def trace(step, *args, in_specs=P()):
  """Traces a step on shards."""
  mapped = jax.shard_map(
      step, mesh=modes.mesh(SHARDS), in_specs=in_specs, out_specs=P()
  )
  return jax.eval_shape(mapped, *args)


class EqualityTest(parameterized.TestCase):
  """It trains as the replicated optimizer does."""

  def check(self, named, *args):
    for name, (found, expected) in train(named, *args).items():
      with self.subTest(name):
        assert_close(found, expected, named[name].tolerance)

  @pytest.mark.thorough
  def test_trains_as_the_replicated_optimizer(self):
    self.check(CASES)

  def test_trains_so_where_matrices_stand_in_stacks(self):
    # One more than the shards have, each one or two.
    numbers = {'listed': 5, 'keys': 3, 'keys of XLA': 5}
    numbers |= {'callback': 5, 'frozen': 5, 'norm of parameters': 3}
    named = {
        name: Case.of(STACKED[name](), stack(n), tolerance=2e-5)
        for name, n in numbers.items()
    }
    self.check(named, 'shard_map', 2)

  @pytest.mark.thorough
  def test_trains_so_what_sums_over_owners(self):
    totals = {
        'psum': lambda u: lax.psum(norm_of(u), AXIS),
        'psum of jit': lambda u: lax.psum(jax.jit(norm_of)(u), AXIS),
        'jit': jax.jit(lambda u: lax.psum(norm_of(u), AXIS)),
        'checkpoint': jax.checkpoint(lambda u: lax.psum(norm_of(u), AXIS)),
    }
    named = {
        name: Case(
            owned(vectors(scaled_by(total))), whole(vectors(scaled_by(norm_of)))
        )
        for name, total in totals.items()
    }
    named['scalars'] = Case(
        owned(scaled_by(totals['psum'])),
        whole(scaled_by(norm_of)),
    )
    self.check(named, 'vmap')

  def test_reads_parameters_without_owners(self):
    named = {
        'in sums': Case(
            owned(vectors(scaled_by_params(lambda x: lax.psum(x, AXIS)))),
            whole(vectors(scaled_by_params(lambda x: x))),
        ),
        'in each update': Case.of(
            optax.stateless(
                lambda updates, params: jax.tree.map(
                    lambda u: u * params['scalar'], updates
                )
            )
        ),
    }

    self.check(named)

  def test_takes_what_is_reduced_already_without_sending(self):
    inner = optax.lars(1.0)
    tx = owned(inner, if_reduced='mean')

    def step(tx, grads):
      return tx.update(grads, tx.init(grads), grads)[0]

    mapped = jax.shard_map(
        functools.partial(step, tx),
        mesh=modes.mesh(SHARDS),
        in_specs=P(),
        out_specs=P(),
    )
    grads = params_of({str(i): (3, 2) for i in range(SHARDS)} | {'w': (20,)})
    found = jax.jit(mapped)(grads)

    expected = jax.jit(functools.partial(step, inner))(grads)
    assert_close(*jax.device_get((found, expected)))
    report = monitoring.communication_report(mapped, grads)
    self.assertEqual([c.primitive for c in report.collectives], ['all_gather'])

  @pytest.mark.thorough
  def test_nnx_optimizer_trains_as_alone(self):
    # It calls `init` with variables, and `update` with arrays.
    def train(tx, x):
      model = nnx.Linear(4, 6, rngs=nnx.Rngs(0))
      optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
      model, optimizer = nnx.merge(*nnx.split((model, optimizer)))
      params = nnx.state(model, nnx.Param)
      optimizer.update(model, jax.tree.map(lambda p: x * p, params))
      return nnx.to_pure_dict(nnx.state(model, nnx.Param))

    inner, x = optax.lars(0.1), np.arange(SHARDS, dtype=np.float32)
    mapped = modes.map_shards(
        'shard_map', lambda _, x: train(owned(inner), x), SHARDS
    )
    found = jax.tree.map(lambda x: x[0], mapped((), x))
    expected = jax.jit(functools.partial(train, inner))(x.mean())
    assert_close(*jax.device_get((found, expected)))

  def test_reduces_over_several_axes(self):
    inner = optax.lars(0.1)
    tx = owned(inner, axis_name=modes.HOSTS[::-1])
    params = params_of({'w': (4, 6), 'v': (4, 6), 'b': (6,)})
    grads = jax.tree.map(lambda p: np.stack([i * p for i in range(8)]), params)

    found = modes.map_over_hosts(
        lambda params, own: tx.update(own, tx.init(params), params)[0]
    )(params, grads)

    mean = jax.tree.map(lambda x: x.mean(0), grads)
    update = jax.jit(lambda g, p: inner.update(g, inner.init(p), p)[0])
    expected = update(mean, params)
    assert_close(jax.tree.map(lambda x: x[0], found), jax.device_get(expected))


class LeavesTest(parameterized.TestCase):
  """Leaves of all kinds."""

  def test_reduces_leaves_of_all_dtypes_and_passes_those_without_a_gradient(
      self,
  ):
    rng = np.random.default_rng(0)
    dtypes = 'bfloat16', 'float16', 'complex64', 'float32'
    own = {
        dtype: rng.integers(-9, 9, (SHARDS, 3, 7)).astype(jnp.dtype(dtype))
        for dtype in dtypes
    }
    own['small'] = own['bfloat16'][:, 0]
    params = jax.tree.map(lambda x: x[0], own)
    params |= {'count': np.arange(9), 'none': None}
    tx = owned(optax.identity())

    def fn(params, grads):
      grads['count'], grads['none'] = np.zeros(9, jax.dtypes.float0), None
      updates, _ = tx.update(grads, tx.init(params), params)
      assert updates.pop('count').dtype == jax.dtypes.float0
      assert updates.pop('none') is None
      return updates

    found = modes.map_shards('shard_map', fn, SHARDS)(params, own)

    for name, x in found.items():
      wide = own[name].astype(np.promote_types(x.dtype, np.float32))
      expected = wide.mean(0).astype(x.dtype)
      np.testing.assert_array_equal(x, [expected] * SHARDS)


COPY = optax.GradientTransformation(
    lambda params: (jnp.int32(3), jax.tree.map(jnp.copy, params)),
    lambda updates, state, params=None: (updates, state),
)


class StateTest(parameterized.TestCase):
  """What a shard keeps."""

  def test_a_shard_keeps_its_leaves(self):
    params = {str(i): jnp.zeros((16, 8)) for i in range(8)}
    inner = optax.lamb(0.1)

    state = init_state(owned(inner), params, modes.mesh(SHARDS))

    own = sum(
        leaf.addressable_shards[0].data.nbytes
        for leaf in jax.tree.leaves(state)
    )
    all_of_it = sum(
        x.size * x.dtype.itemsize
        for x in jax.tree.leaves(jax.eval_shape(inner.init, params))
    )
    self.assertLess(own, (1 / SHARDS + 0.001) * all_of_it)

  def test_state_says_where_each_leaf_is(self):
    tx, mesh = owned(optax.lamb(0.1)), modes.mesh(SHARDS)
    params = jax.eval_shape(params_of)

    state = init_state(tx, params, mesh)

    mu = optax.tree_utils.tree_get(state, 'mu')
    place = mu['second']['kernel']
    self.assertEqual(place.of, 4)
    self.assertEqual(place.shape, (4, 6))
    ((stack, *at),) = place.at
    self.assertRegex(stack, '^float32_')
    self.assertEqual(at, [1, 0])
    self.assertEqual(mu['stack'].shape, (2, 3, 4))
    self.assertEqual(mu['scalar'].shape, ())
    self.assertEqual(optax.tree_utils.tree_get(state, 'count').shape, ())
    specs = st.state_specs(tx, params, mesh)
    self.assertEqual(optax.tree_utils.tree_get(specs, 'count'), P())
    self.assertEqual({*specs.inner_state.stacks.values()}, {P(AXIS)})
    mapped = optax.tree_utils.tree_map_params(tx, lambda x: x, state)
    self.assertEqual(jax.tree.structure(mapped), jax.tree.structure(state))

  @cases.parameters(
      (COPY, SHAPES, 3),
      (COPY, SHAPES, 1),
      # What is no number.
      (one_key_a_leaf(), stack(5), 2),
      (listed(), stack(9), 2),
      fast='first_second_stack_scalar_3',
  )
  def test_resizes_to_the_bit(self, inner, shapes, shards):
    tx, params, mesh = owned(inner), params_of(shapes), modes.mesh(SHARDS)
    state = init_state(tx, params, mesh)

    resized = resize_state(state, tx, params, modes.mesh(shards))
    back = resize_state(resized, tx, params, mesh)

    expected = init_state(tx, params, modes.mesh(shards))
    for found, made in (resized, expected), (back, state):
      self.assertEqual(jax.tree.structure(found), jax.tree.structure(made))
      chex.assert_trees_all_equal(
          *(jax.tree.map(data_of, x) for x in (found, made)), strict=True
      )

  @cases.parameters(
      ({}, {'x': (1,)}, 'got PyTreeDef'),
      ({}, {'b': (9,)}, 'got Place'),
      ({}, {'c': (4, 2)}, 'got PyTreeDef'),
      ({'groups': GROUPS}, {}, 'got Place', [[0, 1], [2, 3]]),
  )
  def test_refuses_state_of_others(self, kwargs, shapes, message, groups=None):
    inner, before = listed(), {'a': (4, 2), 'b': (4, 2)}
    made, mesh = owned(inner, groups=groups), modes.mesh(SHARDS)
    params = params_of(before | shapes)
    before = jax.eval_shape(lambda: params_of(before))
    state = init_state(made, before, mesh)
    tx = owned(inner, **kwargs)

    def step(state, grads):
      grads = st.per_shard(grads, AXIS)
      return tx.update(grads, state)[0]

    specs = st.state_specs(made, before, mesh)
    with self.assertRaisesRegex(ValueError, message):
      trace(step, state, params, in_specs=(specs, P()))

  @cases.parameters(
      (lambda stacks: {},),
      (lambda stacks: jax.tree.map(lambda x: x.mT, stacks),),
  )
  def test_refuses_other_stacks(self, change):
    tx = owned(optax.trace(0.9))

    def step(grads):
      kept = tx.init(grads).inner_state
      kept = kept._replace(stacks=change(kept.stacks))
      return tx.update(grads, contrib.OwnedUpdateState(kept))[0]

    with self.assertRaisesRegex(
        ValueError, r"The state of .* got {.* instead of {'float32_"
    ):
      mapped = jax.vmap(step, axis_name=AXIS)
      jax.eval_shape(mapped, [np.ones((SHARDS, 5, 3), np.float32)] * 2)

  def test_refuses_what_is_kept_otherwise(self):
    inner = optax.trace(0.9)
    zeros = np.zeros(16, np.float32)
    state = contrib.OwnedUpdateState(optax.TraceState(zeros))

    def step(state):
      grads = st.per_shard(zeros, AXIS)
      return owned(inner).update(grads, state)[0]

    with self.assertRaisesRegex(ValueError, 'The state of .* got TraceState'):
      trace(step, state, in_specs=P(AXIS))


class ProgramTest(parameterized.TestCase):
  """What a step runs and sends."""

  def program(self, inner, shapes, axes=(AXIS,), sizes=(SHARDS,)):
    tx, params = owned(inner, axis_name=axes), jax.eval_shape(
        lambda: params_of({str(i): shape for i, shape in enumerate(shapes)})
    )
    mesh = jax.make_mesh(
        sizes,
        axes,
        (AxisType.Auto,) * len(sizes),
        devices=jax.devices()[: np.prod(sizes)],
    )
    specs = st.state_specs(tx, params, mesh)

    def step(params, state):
      grads = st.per_shard(params, axes)
      return tx.update(grads, state, params)

    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(P(), specs), out_specs=(P(), specs)
    )
    return mapped, (params, init_state(tx, params, mesh))

  @cases.parameters(
      # Matrices, branches, and products of matrices over those of one.
      (8, 0, 1),
      (5, 0, 2),
      (6, 0, 2),
      (2, 0, 1),
  )
  def test_equal_programs_are_run_once(self, number, branches, products):
    muon, one = optax.contrib.muon(0.1), {'0': np.ones((4, 6), np.float32)}
    mapped, args = self.program(muon, [(4, 6)] * number)

    found = str(jax.make_jaxpr(mapped)(*args))

    expected = jax.make_jaxpr(lambda p: muon.update(p, muon.init(p), p))(one)
    self.assertEqual(
        (
            found.count(' cond['),
            found.count('dot_general[') / str(expected).count('dot_general['),
        ),
        (branches, products),
    )

  @cases.parameters(((AXIS,), (8,)), (modes.HOSTS, (2, 4)))
  def test_what_is_sent_does_not_grow_with_shards(self, axes, sizes):
    shapes = [(8, 32)] * 2
    mapped, args = self.program(optax.lars(0.1), shapes, axes, sizes)
    alone, few = self.program(optax.lars(0.1), shapes, sizes=(2,))

    report = monitoring.communication_report(mapped, *args)

    least = monitoring.communication_report(alone, *few)
    # Of an all-reduce, (N - 1) / N of twice the bytes, and slices of two
    # matrices for eight owners, there and back.
    self.assertLess(report.total_bytes, 3.1 * least.total_bytes)


PAIR = params_of({'b': (4, 6), 'w': (4, 6)})


def by_leaf(fn):
  return optax.stateless(lambda updates, _: jax.tree.map(fn, updates))


def norm_of(updates):
  squares = sum(jnp.sum(u * u) for u in jax.tree.leaves(updates))
  return squares


def scaled_by(total):
  return optax.stateless(
      lambda updates, _: jax.tree.map(lambda u: u / total(updates), updates)
  )


def scaled_by_params(total):
  """Divides by a function of the sum of the products with the parameters."""

  def update(updates, params):
    products = jax.tree.map(jnp.vdot, updates, params)
    divisor = 1 + total(sum(jax.tree.leaves(products))) ** 2
    return jax.tree.map(lambda u: u / divisor, updates)

  return optax.stateless(update)


def needs_value(kind):
  """Multiplies by an argument without which it raises an error."""

  def update(updates, state, params=None, *, value=None, **extra_args):
    del params, extra_args
    if value is None:
      raise kind('It must have `value`.')
    return jax.tree.map(lambda u: value * u, updates), state

  return optax.GradientTransformationExtraArgs(optax.identity().init, update)


def chosen(updates):
  w = lax.cond(updates['b'][0, 0] > 0, lambda w: w, lambda w: -w, updates['w'])
  return updates | {'w': w}


def in_a_branch(updates):
  return lax.cond(
      True, lambda: lax.psum(norm_of(updates), AXIS), lambda: jnp.float32(1)
  )


def updated(inner, params, own=0.0, **extra_args):
  """Returns the first updates, at parameters that a number is added to."""
  tx = owned(inner)
  grads = st.per_shard(params, AXIS)
  at = jax.tree.map(lambda p: p + own, params)
  return tx.update(grads, tx.init(params), at, **extra_args)[0]


def listed_with_value():
  def update(updates, state, params=None, *, value):
    return listed().update(updates, state, params)

  return optax.GradientTransformationExtraArgs(listed().init, update)


class RefusalTest(parameterized.TestCase):
  """Found while tracing."""

  @cases.parameters(
      (
          optax.clip_by_global_norm(1.0),
          r"its updates at \['b'\] from its updates at \['w'\]",
      ),
      (optax.flatten(optax.adam(0.1)),),
      (optax.stateless(lambda updates, _: chosen(updates)),),
      (optax.adaptive_grad_clip(0.1), None),
  )
  def test_refuses_at_init_what_mixes_leaves(self, inner, message='computes'):
    tx = owned(inner)

    if message is None:
      init_state(tx, PAIR, modes.mesh())
      return
    for num_shards in 1, SHARDS:
      with self.assertRaisesRegex(
          ValueError,
          r'`inner` of `owned_update` must treat each leaf'
          rf' .*{message}.*optax.partition',
      ):
        init_state(tx, PAIR, modes.mesh(num_shards))

  @cases.parameters(
      (
          lambda u: jnp.sqrt(lax.pmean(norm_of(u), AXIS)),
          'divides a sum over leaves .* by `pmean`',
      ),
      (
          lambda u: lax.psum(lax.psum(norm_of(u), AXIS), AXIS),
          'values by `psum` that do not each come from one leaf',
      ),
      (
          lambda u: lax.psum(norm_of(u) ** 2, AXIS),
          'do not each come from one leaf',
      ),
      (
          lambda u: lax.pmax(norm_of(u), AXIS),
          'uses `pmax`, which would wait for shards',
      ),
      (
          lambda u: [jax.debug.print('{}', norm_of(u)), 1.0][1],
          'side effects, such as `jax.debug.print`, which would show',
      ),
      (in_a_branch, 'uses `psum`, which would wait for shards'),
      (
          lambda u: 1.0 + lax.axis_index(AXIS),
          'uses values that differ between shards for its updates',
      ),
  )
  def test_refuses_what_cannot_be_summed_over_owners(self, total, message):
    tx = owned(scaled_by(total))

    with self.assertRaisesRegex(ValueError, message):
      train({'refused': Case(tx, tx)}, 'vmap')

  @cases.parameters(
      # Parameters of each shard, and what only extra arguments make known.
      (
          lambda w, own: updated(optax.add_decayed_weights(0.1), w, own),
          r'does not name \[.data.\], .* or the parameter was passed through',
      ),
      (
          lambda w, own: updated(optax.polyak_sgd(), w, value=jnp.float32(1)),
          '`inner` of .* computes its updates',
      ),
      (
          lambda w, own: updated(
              listed_with_value(), {'v': w['w'], 'w': w['w']}, value=1
          ),
          r'its state at \[0\] .*`init` could not detect .* a tree like',
      ),
  )
  def test_refuses_update(self, call, message):
    mapped = modes.map_shards('shard_map', call, SHARDS)

    with self.assertRaisesRegex(ValueError, message):
      jax.eval_shape(mapped, PAIR, np.ones(SHARDS, 'f'))

  def test_refuses_state_of_several_leaves_although_it_is_assumed(self):
    inner = optax.flatten(optax.chain(optax.adam(0.1), needs_value(KeyError)))
    tx = owned(inner, assume_leafwise=True)

    def step(params, value):
      grads = st.per_shard(params, AXIS)
      return tx.update(grads, tx.init(params), params, value=value)[0]

    with self.assertRaisesRegex(ValueError, r'its state at .*mu from its upd'):
      trace(step, PAIR, 2.0)

  @cases.parameters((KeyError,), (TypeError,), (ValueError,), (AttributeError,))
  def test_leaves_what_needs_extra_arguments_to_update(self, kind):
    tx = owned(needs_value(kind))

    init_state(tx, PAIR, modes.mesh())

    with self.assertRaises(kind):
      trace(lambda params: updated(needs_value(kind), params), PAIR)

  def test_refuses_a_branch_on_all_leaves(self):
    inner = optax.apply_if_finite(optax.lars(0.1), 3)

    def step(params):
      tx = owned(inner)
      grads = st.per_shard(params, AXIS)
      return tx.update(grads, tx.init(params), params)[0]

    with self.assertRaisesRegex(ValueError, 'must treat each leaf .*computes'):
      trace(step, PAIR)

  def test_refuses_updates_that_differ_over_an_axis_that_is_not_named(self):
    tx = owned(optax.lars(0.1))

    def step(params):
      grads = st.per_shard(params, (AXIS, 'model'))
      return tx.update(grads, tx.init(params), params)[0]

    mesh = jax.make_mesh((4, 2), (AXIS, 'model'), (AxisType.Auto,) * 2)
    step = jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P())
    with self.assertRaisesRegex(
        ValueError,
        rf"differ between the shards of \['model'\].*=\('model', '{AXIS}'\)",
    ):
      jax.eval_shape(step, PAIR)

  def test_refuses_a_mesh_that_is_mapped_in_part(self):
    tx = owned(optax.adam(0.1))

    step = jax.shard_map(
        lambda params: optax.tree_utils.tree_get(tx.init(params), 'count'),
        mesh=jax.make_mesh((4, 2), (AXIS, 'model'), (AxisType.Auto,) * 2),
        in_specs=P(),
        out_specs=P(),
        axis_names={AXIS},
    )
    with self.assertRaisesRegex(ValueError, r"not mapped, \('model',\)"):
      jax.eval_shape(step, jnp.ones(16))

  def test_refuses_state_of_another_dtype(self):
    inner = optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda u, s, _: (u, jax.tree.map(lambda x: x.astype('bfloat16'), s)),
    )
    with self.assertRaisesRegex(
        ValueError, r'keep the types .* bfloat16\[16\] for float\d+\[16\]'
    ):
      init_state(owned(inner), [jnp.ones(16)] * 2, modes.mesh())

  @cases.parameters(
      (owned, r'a leaf at \[.b.\], where there is no parameter'),
      (
          functools.partial(st.shard_update, axis_name=AXIS),
          r'must be element-wise, but it changes the tree',
      ),
  )
  def test_init_leaves_updates_of_another_tree_to_update(self, make, message):
    inner = optax.lookahead(optax.sgd(0.1, momentum=0.9), 2, 0.5)
    tx = make(inner)
    pair = optax.LookaheadParams.init_synced(PAIR)

    init_state(tx, pair, modes.mesh())

    def step(pair):
      grads = st.per_shard(pair.fast, AXIS)
      return tx.update(grads, tx.init(pair), pair)[0]

    with self.assertRaisesRegex(ValueError, message):
      trace(step, pair)

  @cases.parameters(
      ({'whole_dims': 2.0}, TypeError, '`whole_dims` must be'),
      ({'whole_dims': 0}, ValueError, '`whole_dims` must be at least 1'),
      ({'if_sliced': 'all'}, ValueError, "must be 'error', 'sum' or"),
      (
          {'if_sliced': 'mean', 'reduction': 'sum'},
          ValueError,
          "must be 'mean' with if_sliced='mean'",
      ),
      ({'param_specs': 'data'}, TypeError, '`param_specs` of `owned_update`'),
      (
          {'param_specs': P(AXIS), 'groups': GROUPS},
          ValueError,
          'must not slice parameters with `groups`',
      ),
      (
          {'assume_leafwise': 1},
          TypeError,
          '`assume_leafwise` must be a boolean, got 1',
      ),
  )
  def test_refuses_wrong_arguments(self, kwargs, error, message):
    with self.assertRaisesRegex(error, message):
      owned(optax.sgd(0.1), **kwargs)


class StacksTest(parameterized.TestCase):
  """Which matrices stand in stacks, and who owns them."""

  @cases.parameters(
      # Shapes, shards, and the stacks of each.
      ([(4, 4)] * 8, 8, [(1, 4, 4)]),
      ([(4, 4)] * 8, 4, [(2, 4, 4)]),
      ([(4, 4)] * 2, 8, [(1, 4, 4)]),
      # All shards update a leaf that is left alone.
      ([(4, 4)] * 9 + [(3, 5)] * 8, 8, [(1, 3, 5), (1, 4, 4)]),
      ([(4, 4)] * 11, 8, [(1, 4, 4), (1, 4, 4)]),
      ([(9,)] * 8, 4, [(2, 9)]),
      ([(4, 4), (2,)], 8, []),
      # A single layer is a leaf like any other.
      ([(1, 4, 4)], 8, [], 2),
      ([(1, 4, 4)] * 9, 8, [(1, 1, 4, 4)], 2),
      ([(3, 4, 4)], 8, [(1, 1, 4, 4)], 2),
  )
  def test_rows_of_each_owner(self, shapes, shards, rows, whole_dims=None):
    params = {
        str(i): jax.ShapeDtypeStruct(shape, jnp.float32)
        for i, shape in enumerate(shapes)
    }
    tx = owned(optax.trace(0.9), whole_dims=whole_dims)

    state = init_state(tx, params, modes.mesh(shards)).inner_state

    found = sorted(x.shape for x in state.stacks.values())
    self.assertEqual(found, sorted((shards, *row) for row in rows))
    alone = jax.tree.leaves(state.leaves)
    self.assertEqual(len(alone), len(shapes) - len(_places(state)))

  @cases.parameters((9, 1.0), (12, 1.1), (16, 1.0), (11, 1.1), fast=['9', '12'])
  def test_sends_little_padding(self, number, most):
    params = {str(i): np.ones((16, 24), np.float32) for i in range(number)}
    mesh = modes.mesh(8)
    step = {}
    for name, tx in {
        'owned': owned(optax.trace(0.9)),
        'whole': whole(optax.trace(0.9)),
    }.items():
      specs = st.state_specs(tx, params, mesh)
      mapped = jax.shard_map(
          lambda p, s, tx=tx: tx.update(st.per_shard(p, AXIS), s, p),
          mesh=mesh,
          in_specs=(P(), specs),
          out_specs=(P(), specs),
      )
      state = init_state(tx, params, mesh)
      step[name] = monitoring.communication_report(
          mapped, params, state
      ).total_bytes

    self.assertLessEqual(step['owned'], most * step['whole'])

  @cases.parameters(
      # All shards update the first; all others are small.
      (
          {'huge': (2048, 1024)},
          r"leaves of 2,097,152 elements in total, such as \['huge'\]",
      ),
      # No two are alike, and each is a small part.
      (
          {f'huge{i}': (2048 + i, 256) for i in range(8)},
          r"leaves of 4,201,472 elements in total, such as \['huge7'\]",
      ),
      # Three for eight owners.
      (
          {f'huge{i}': (2048, 1024) for i in range(3)},
          r'16.8 MB of padding per step in addition to 50.\d MB .*\(2048, 10',
      ),
  )
  def test_warns_of_what_owners_do_not_divide(self, shapes, message):
    shapes = {**shapes, **{str(i): (8, 8) for i in range(9)}}
    params = {
        k: jax.ShapeDtypeStruct(x, jnp.float32) for k, x in shapes.items()
    }
    tx = owned(optax.trace(0.9))

    with warnings.catch_warnings(record=True) as caught:
      warnings.simplefilter('always')
      init_state(tx, params, modes.mesh())

    (warning,) = caught
    self.assertRegex(str(warning.message), message)

  @cases.parameters((8,), (9,), (12,), (16,), (1, 1), (3, 2))
  def test_does_not_warn(self, number, shards=8):
    shapes = {str(i): (2048, 1024) for i in range(number)}
    params = {
        k: jax.ShapeDtypeStruct(x, jnp.float32) for k, x in shapes.items()
    }

    with warnings.catch_warnings():
      warnings.simplefilter('error')
      init_state(owned(optax.trace(0.9)), params, modes.mesh(shards))


def _places(state):
  def is_place(x):
    return isinstance(x, contrib.Place)

  leaves = jax.tree.leaves(state.leaves, is_leaf=is_place)
  return list(filter(is_place, leaves))
