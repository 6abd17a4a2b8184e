"""`owners.owned_update`."""

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

import cases
import modes
import shard_transforms
from shard_transforms import cross_shard_mean
from shard_transforms import init_state
from shard_transforms import monitoring
from shard_transforms import owners
from shard_transforms import resize_state
from shard_transforms._src.owners import layout

AXIS = modes.AXIS
SHARDS, STEPS = 8, 3
WEIGHTS = np.array([3, 1, 0, 5, 0.1, 2, 0.7, 4], np.float32)
owned = functools.partial(owners.owned_update, axis_name=AXIS)


SHAPES = {
    'first': {'kernel': (4, 6), 'bias': (6,)},
    'stack': (2, 3, 4),
    'square': (4, 4),
    'scalar': (),
}
# The decoder of a DeepSeek-V2 as MaxText stacks it, three layers along the
# second dimension, and which dimensions its tests expect Muon to multiply.
DECODER = {
    'query': ((4, 3, 2, 5), ((0,), (-2, -1))),
    'wkv_a': ((4, 3, 6), ((0,), (-1,))),
    'wkv_b': ((6, 3, 2, 4), ((0,), (-2, -1))),
    'out': ((2, 3, 5, 4), ((0, -2), (-1,))),
    'moe': {
        'gate': ((4, 3, 5), ((0,), (-1,))),
        'wi_0': ((5, 3, 4, 6), ((-2,), (-1,))),
        'wo': ((5, 3, 6, 4), ((-2,), (-1,))),
    },
    'kv_norm': ((6, 3), None),
    'embedding': ((8, 4), None),
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


class Statistics(NamedTuple):
  """State of optimizers of these tests: arrays for each parameter, and more."""

  num_updates: jax.Array
  kept: Any


def per_leaf(start, step):
  """Makes a transformation of what it does to a leaf."""

  def init(params):
    return Statistics(jnp.int32(0), jax.tree.map(start, params))

  def update(updates, state, params=None):
    del params
    leaves, treedef = jax.tree.flatten(updates)
    kept = treedef.flatten_up_to(state.kept)
    pairs = [
        step(u, s, state.num_updates) for u, s in zip(leaves, kept, strict=True)
    ]
    updates, kept = (treedef.unflatten(x) for x in zip(*pairs, strict=True))
    return updates, Statistics(state.num_updates + 1, kept)

  return optax.GradientTransformation(init, update)


def shampoo():
  """Statistics of rows and columns, and their inverse fourth roots."""

  def start(p):
    return [jnp.eye(n) for n in p.shape] if p.ndim == 2 else []

  def root(m):
    values, vectors = jnp.linalg.eigh(m)
    return vectors @ jnp.diag(values**-0.25) @ vectors.T

  def step(u, kept, _):
    if not kept:
      return u, kept
    left, right = kept[0] + u @ u.T, kept[1] + u.T @ u
    return root(left) @ u @ root(right), [left, right]

  return optax.chain(per_leaf(start, step), optax.scale(-0.1))


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
    'muon': lambda: optax.contrib.muon(0.1),
    'adafactor': lambda: optax.adafactor(0.1, min_dim_size_to_factor=2),
    'novograd': lambda: optax.novograd(0.1),
    'sm3': lambda: vectors(optax.sm3(0.1)),
    'shampoo': shampoo,
    'adamw': lambda: optax.adamw(0.1),
    'listed': listed,
    'noise': lambda: optax.chain(
        optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.sgd(0.1)
    ),
    'several steps': lambda: optax.MultiSteps(optax.lamb(0.1), 2),
    'injected': lambda: optax.inject_hyperparams(optax.lamb)(
        learning_rate=optax.linear_schedule(0.1, 0.01, 3), b1=0.8
    ),
    'schedule-free': lambda: optax.contrib.schedule_free_adamw(0.1),
    'towers': lambda: shard_transforms.tower_reduce(2, optax.lamb(0.1)),
    'norm of parameters': lambda: optax.stateless(
        lambda updates, params: jax.tree.map(
            lambda u: u * optax.tree.norm(params), updates
        )
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
        lambda u, pair: -0.1 * u + 0.1 * jax.random.normal(pair[0], u.shape),
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
    'partition': lambda: optax.partition(
        {'slow': optax.lars(0.01), 'fast': optax.lars(0.1)},
        lambda params: {
            name: 'slow' if name in '036' else 'fast' for name in params
        },
    ),
    'keys': one_key_a_leaf,
    'keys of XLA': lambda: one_key_a_leaf('rbg'),
    'callback': lambda: by_leaf(
        lambda u: jax.pure_callback(np.negative, jax.typeof(u), u)
    ),
    'frozen': lambda: optax.partition(
        {'not': optax.set_to_zero(), 'lars': optax.lars(0.1)},
        lambda params: {k: 'not' if k != 'bias' else 'lars' for k in params},
    ),
    'norm of all': lambda: optax.chain(
        optax.lamb(0.1), INNERS['norm of parameters']()
    ),
}
STACKED_CASES = [
    *(('adamw', 9), ('listed', 17), ('keys', 17)),
    *(('keys of XLA', 17), ('callback', 17), ('frozen', 17)),
]


def train(
    tx,
    mode='shard_map',
    weights=None,
    apart=False,
    steps=STEPS,
    shapes=SHAPES,
):
  """Returns the parameters [shards, ...] after some steps."""

  def loss(params, data):
    products = jax.tree.map(
        lambda p, d: jnp.sum(p * d).astype(jnp.float32), params, data
    )
    return sum(jax.tree.leaves(products))

  def fn(params, own):
    data, weight = own
    extra_args = {} if weights is None else {'weight': weight}

    def step(carry, data):
      params, state = carry
      value_and_grad = shard_transforms.value_and_grad(loss, AXIS)
      at = params
      if hasattr(state, 'own_params'):
        at = shard_transforms.local_params(params, state)
      grads = value_and_grad(at, data)[1]
      updates, state = tx.update(grads, state, params, **extra_args)
      return (optax.apply_updates(params, updates), state), None

    start = params, tx.init(params)
    if apart:
      start = shard_transforms.per_shard(start, AXIS)
    return lax.scan(step, start, data)[0][0]

  own_weights = np.ones(SHARDS) if weights is None else weights
  own = gradients(steps, shapes), own_weights
  mapped = modes.map_shards(mode, fn)
  return jax.device_get(mapped(params_of(shapes), own))


def assert_close(actual, expected, tolerance=5e-6):
  chex.assert_trees_all_equal_shapes_and_dtypes(actual, expected)
  chex.assert_trees_all_close(actual, expected, rtol=tolerance, atol=tolerance)


def whole(inner, **kwargs):
  return optax.chain(cross_shard_mean(AXIS, **kwargs), inner)


def trace(step, *args, in_specs=P()):
  """Traces a step on shards."""
  mapped = jax.shard_map(
      step, mesh=modes.mesh(), in_specs=in_specs, out_specs=P()
  )
  return jax.eval_shape(mapped, *args)


class EqualityTest(parameterized.TestCase):
  """It trains as the replicated optimizer does."""

  @cases.parameters(*INNERS)
  def test_trains_as_the_replicated_optimizer(self, name):
    actual = train(owned(INNERS[name]()))

    assert_close(actual, train(whole(INNERS[name]())))

  @cases.parameters(*STACKED_CASES)
  def test_trains_so_where_matrices_stand_in_stacks(self, name, num_leaves):
    shapes = {str(i): (4, 6) for i in range(num_leaves)} | {'bias': (6,)}
    inner = {**INNERS, **STACKED}[name]

    actual = train(owned(inner()), shapes=shapes)

    assert_close(actual, train(whole(inner()), shapes=shapes), 2e-5)

  @cases.parameters(False, True)
  def test_clips_by_the_norm_of_whole_leaves(self, one_owner):
    shapes = {'w': (8, 8), 'b': (4,)} if one_owner else SHAPES
    clip = shard_transforms.clip_by_global_norm
    inner = optax.chain(clip(0.1, AXIS, sharded=P(AXIS)), optax.lars(0.1))

    actual = train(owned(inner), shapes=shapes)

    expected = whole(optax.chain(clip(0.1), optax.lars(0.1)))
    assert_close(actual, train(expected, shapes=shapes))

  def test_counts_shards_by_their_weight(self):
    actual = train(owned(optax.lars(0.1)), weights=WEIGHTS)

    assert_close(actual, train(whole(optax.lars(0.1)), weights=WEIGHTS))

  def test_groups_train_apart(self):
    groups = [[0, 4], [1, 5], [2, 6], [3, 7]]

    actual = train(owned(optax.lamb(0.1), groups=groups), apart=True)

    expected = whole(optax.lamb(0.1), groups=groups)
    assert_close(actual, train(expected, apart=True))

  def test_sums(self):
    actual = train(owned(optax.lars(0.1), reduction='sum'))

    summed = optax.chain(
        shard_transforms.cross_shard_sum(AXIS), optax.lars(0.1)
    )
    assert_close(actual, train(summed))

  @cases.parameters(
      lambda inner: shard_transforms.tower_reduce(
          2, shard_transforms.guard(inner, AXIS), axis_name=AXIS
      ),
      lambda inner: shard_transforms.local_updates(
          optax.sgd(0.1), inner, AXIS, every=2
      ),
  )
  def test_works_inside_what_wraps_it(self, wrap):
    actual = train(wrap(owned(optax.lamb(0.1))))

    assert_close(actual, train(wrap(whole(optax.lamb(0.1)))))

  def test_muon_multiplies_the_dimensions_that_are_named(self):
    shapes = per_entry(lambda entry: entry[0], DECODER)
    numbers = per_entry(
        lambda entry: entry[1]
        and optax.contrib.MuonDimensionNumbers(*entry[1]),
        DECODER,
    )
    muon = optax.contrib.muon(0.1, muon_weight_dimension_numbers=numbers)

    actual = train(owned(muon), shapes=shapes)

    assert_close(actual, train(whole(muon), shapes=shapes), 2e-5)

  def test_nnx_optimizer_trains_as_alone(self):
    # It calls `init` with variables, and `update` with arrays.
    def make(tx):
      layers = [nnx.Linear(4, 4, rngs=nnx.Rngs(i)) for i in range(9)]
      model = nnx.Sequential(*layers)
      return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    def loss(model, x):
      return jnp.mean(model(x) ** 2)

    x = np.random.default_rng(0).normal(size=(SHARDS, 4)).astype(np.float32)
    tx = shard_transforms.on_mesh(owned(optax.lamb(0.1)), modes.mesh())
    graph, state = nnx.split(make(tx))
    specs = shard_transforms.specs_of(state)

    def step(state, x):
      model, optimizer = nnx.merge(graph, state)
      static, params = nnx.split(model)
      value_and_grad = shard_transforms.value_and_grad(
          lambda params: loss(nnx.merge(static, params), x), AXIS
      )
      optimizer.update(model, value_and_grad(params)[1])
      return nnx.split((model, optimizer))[1]

    step = jax.shard_map(
        step, mesh=modes.mesh(), in_specs=(specs, P(AXIS)), out_specs=specs
    )
    rows = jax.device_put(x, jax.NamedSharding(modes.mesh(), P(AXIS)))
    found, _ = nnx.merge(graph, jax.jit(step)(state, rows))

    model, optimizer = make(optax.lamb(0.1))
    optimizer.update(model, nnx.grad(loss)(model, x))
    assert_close(
        *(
            jax.device_get(nnx.to_pure_dict(nnx.state(m, nnx.Param)))
            for m in (found, model)
        )
    )

  def test_takes_what_is_reduced_already_without_sending(self):
    tx = owned(optax.lars(1.0), on_invariant='averaged')

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=modes.mesh(), in_specs=P(), out_specs=P()
    )
    def step(grads):
      return tx.update(grads, tx.init(grads), grads)[0]

    grads = {'w': jnp.arange(20.0), 'v': jnp.ones((3, 2))}
    updates = step(grads)

    inner = optax.lars(1.0)
    expected = inner.update(grads, inner.init(grads), grads)[0]
    assert_close(jax.device_get(updates), jax.device_get(expected))
    report = monitoring.wire_report(step, grads)
    self.assertEqual([c.primitive for c in report.collectives], ['all_gather'])

  def test_reduces_over_several_axes(self, axes=('core', 'host')):
    mesh = jax.make_mesh((2, 4), ('host', 'core'), (AxisType.Auto,) * 2)
    params, results = params_of(), []
    for tx in (
        owned(optax.lamb(0.1), axis_name=axes),
        optax.chain(cross_shard_mean(axes), optax.lamb(0.1)),
    ):
      specs = shard_transforms.state_specs(tx, params, mesh)

      @functools.partial(
          jax.shard_map,
          mesh=mesh,
          in_specs=(P(), specs, P(('host', 'core'))),
          out_specs=(P(), specs),
      )
      def step(params, state, data, tx=tx):
        grads = jax.tree.map(lambda x: x[0, 0], data)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

      step = jax.jit(step, donate_argnums=1)
      state = init_state(tx, params, mesh)
      new_params, state = step(params, state, gradients(1))
      results.append(step(new_params, state, gradients(1))[0])

    assert_close(*map(jax.device_get, results))


class LeavesTest(parameterized.TestCase):
  """Leaves of all kinds."""

  def update(self, params, grads, inner):
    def fn(params, grads):
      tx = owned(inner)
      return tx.update(grads, tx.init(params), params)[0]

    return modes.map_shards('shard_map', fn)(params, grads)

  @cases.parameters('bfloat16', 'float16', 'complex64')
  def test_reduces_leaves_of_other_dtypes(self, dtype):
    rng = np.random.default_rng(0)
    grads = {
        'a': rng.integers(-9, 9, (SHARDS, 3, 7)).astype(jnp.dtype(dtype)),
        'b': rng.integers(-9, 9, (SHARDS, 5)).astype(np.float32),
    }
    params = jax.tree.map(lambda x: x[0], grads)

    updates = self.update(params, grads, optax.sgd(1.0, momentum=0.5))

    for name, found in updates.items():
      wide = grads[name].astype(np.promote_types(found.dtype, np.float32))
      expected = -wide.mean(0).astype(found.dtype)
      np.testing.assert_array_equal(found, [expected] * SHARDS)

  def test_leaves_without_a_gradient_pass(self):
    params = {'x': jnp.ones(16), 'count': jnp.arange(9), 'none': None}
    tx = owned(optax.identity())

    def fn(shared, scale):
      params, zeros = shared
      grads = {'x': scale * params['x'], 'count': zeros, 'none': None}
      updates, _ = tx.update(grads, tx.init(params), params)
      self.assertEqual(updates['count'].dtype, jax.dtypes.float0)
      self.assertIsNone(updates['none'])
      return updates['x']

    zeros = np.zeros(9, jax.dtypes.float0)
    mapped = modes.map_shards(
        'shard_map', lambda params, scale: fn((params, zeros), scale)
    )
    updates = mapped(params, jnp.arange(8.0))

    np.testing.assert_array_equal(updates, np.full((SHARDS, 16), 3.5))

  def test_a_shard_of_weight_zero_does_not_count_even_with_nan(self):
    tx = owned(optax.sgd(1.0))

    def fn(_, own):
      grads, weight = own
      params = jnp.zeros(9)
      return tx.update(grads, tx.init(params), params, weight=weight)[0]

    grads = np.ones((SHARDS, 9), np.float32)
    grads[3] = np.nan
    weight = np.ones(SHARDS, np.float32)
    weight[3] = 0
    updates = modes.map_shards('shard_map', fn)((), (grads, weight))

    np.testing.assert_array_equal(updates, -np.ones((SHARDS, 9)))


COPY = optax.GradientTransformation(
    lambda params: (jnp.int32(3), jax.tree.map(jnp.copy, params)),
    lambda updates, state, params=None: (updates, state),
)


class StateTest(parameterized.TestCase):
  """What a shard keeps."""

  def test_a_shard_keeps_its_leaves(self):
    params = {str(i): jnp.zeros((16, 8)) for i in range(16)}
    inner = optax.lamb(0.1)

    state = init_state(owned(inner), params, modes.mesh())

    own = sum(
        leaf.addressable_shards[0].data.nbytes
        for leaf in jax.tree.leaves(state)
    )
    all_of_it = sum(x.nbytes for x in jax.tree.leaves(inner.init(params)))
    self.assertLess(own, (1 / SHARDS + 0.001) * all_of_it)

  def test_state_says_where_each_leaf_is(self):
    state = init_state(owned(optax.lamb(0.1)), params_of(), modes.mesh())

    mu = optax.tree_utils.tree_get(state, 'mu')

    place = mu['first']['kernel']
    self.assertEqual(place.of, 1)
    self.assertRegex(place.row, '^float32_')
    self.assertEqual(place.shape, (4, 6))
    self.assertEqual(mu['scalar'].shape, ())
    self.assertEqual(optax.tree_utils.tree_get(state, 'count'), 0)

  def test_specs_say_what_shards_keep(self):
    tx = owned(optax.lamb(0.1))

    specs = shard_transforms.state_specs(tx, params_of(), modes.mesh())

    self.assertEqual(optax.tree_utils.tree_get(specs, 'count'), P())
    self.assertEqual({*specs.inner_state.rows.values()}, {P(AXIS)})

  def test_maps_the_leaves_of_a_parameter_elsewhere(self):
    tx = owned(optax.lamb(0.1))
    state = init_state(tx, params_of(), modes.mesh())

    mapped = optax.tree_utils.tree_map_params(tx, lambda x: x + 1, state)

    self.assertEqual(jax.tree.structure(mapped), jax.tree.structure(state))

  @cases.parameters(4, 3, 1)
  def test_resizes_to_the_bit(self, shards):
    tx = owned(COPY)
    state = init_state(tx, params_of(), modes.mesh())

    resized = resize_state(state, tx, params_of(), modes.mesh(shards))
    back = resize_state(resized, tx, params_of(), modes.mesh())

    expected = init_state(tx, params_of(), modes.mesh(shards))
    chex.assert_trees_all_equal(resized, expected, strict=True)
    chex.assert_trees_all_equal(back, state, strict=True)

  @cases.parameters('keys', 'noise', 'listed', 'empty label')
  def test_resizes_what_is_no_number(self, name):
    empty = {'all': optax.trace(0.9), 'none': optax.adam(0.1)}
    label = optax.partition(empty, lambda p: jax.tree.map(lambda _: 'all', p))
    tx = owned({**INNERS, **STACKED, 'empty label': lambda: label}[name]())
    params = params_of({str(i): (4, 6) for i in range(17)})
    state = init_state(tx, params, modes.mesh())

    resized = resize_state(state, tx, params, modes.mesh(4))
    back = resize_state(resized, tx, params, modes.mesh())

    expected = init_state(tx, params, modes.mesh(4))
    for found, made in (resized, expected), (back, state):
      self.assertEqual(jax.tree.structure(found), jax.tree.structure(made))
      chex.assert_trees_all_equal(
          *(jax.tree.map(data_of, x) for x in (found, made)), strict=True
      )

  def test_resizes_to_another_cost(self):
    state = init_state(owned(COPY), params_of(), modes.mesh(3))
    other = owned(COPY, cost=lambda p: jax.tree.map(lambda x: -x.ndim + 9, p))

    resized = resize_state(state, other, params_of(), modes.mesh(3))

    self.assertNotEqual(resized.inner_state.leaves, state.inner_state.leaves)
    expected = init_state(other, params_of(), modes.mesh(3))
    chex.assert_trees_all_equal(resized, expected, strict=True)

  @cases.parameters(
      ({}, {'x': 1}, 'the tree'),
      ({}, {'b': 9}, 'got Place'),
      # All shards own both.
      ({}, {'b': 2}, 'got Place'),
      ({'cost': lambda p: {'a': 1, 'b': 1}}, {}, 'got Place'),
      ({'groups': [[0, 2], [1, 3], [4, 6], [5, 7]]}, {}, 'got Place', 2),
  )
  def test_refuses_state_of_others(
      self, kwargs, shapes, message, group_size=None
  ):
    inner, before = listed(), {'a': (4, 2), 'b': 1}
    groups = group_size and np.arange(SHARDS).reshape(-1, group_size).tolist()
    made = owned(inner, groups=groups)
    params = {k: jnp.zeros(v) for k, v in (before | shapes).items()}
    before = {k: jnp.zeros(v) for k, v in before.items()}
    state = init_state(made, before, modes.mesh())
    tx = owned(inner, **kwargs)

    def step(state, grads):
      grads = shard_transforms.per_shard(grads, AXIS)
      return tx.update(grads, state, params)[0]

    specs = shard_transforms.state_specs(made, before, modes.mesh())
    with self.assertRaisesRegex(ValueError, message):
      trace(step, state, params, in_specs=(specs, P()))

  @cases.parameters(
      (lambda rows: {},), (lambda rows: jax.tree.map(lambda x: x.mT, rows),)
  )
  def test_refuses_other_rows(self, change):
    tx = owned(optax.trace(0.9))

    def step(grads):
      kept = tx.init(grads).inner_state
      kept = kept._replace(rows=change(kept.rows))
      return tx.update(grads, owners.OwnedUpdateState(kept))[0]

    with self.assertRaisesRegex(ValueError, 'State of .* got the rows'):
      jax.vmap(step, axis_name=AXIS)(jnp.ones((SHARDS, 5, 3)))

  def test_refuses_what_is_kept_otherwise(self):
    inner = optax.trace(0.9)
    state = owners.OwnedUpdateState(inner.init(jnp.zeros(16)))

    def step(state):
      grads = shard_transforms.per_shard(jnp.zeros(16), AXIS)
      return owned(inner).update(grads, state)[0]

    with self.assertRaisesRegex(ValueError, 'State of .* got TraceState'):
      trace(step, state, in_specs=P(AXIS))


class ProgramTest(parameterized.TestCase):
  """What a step runs and sends."""

  def program(self, inner, shapes, shards=SHARDS, axes=AXIS, sizes=None):
    mesh = jax.make_mesh(
        sizes or (shards,),
        axes if sizes else (axes,),
        (AxisType.Auto,) * len(sizes or (1,)),
        devices=jax.devices()[:shards],
    )
    tx = owned(inner, axis_name=axes)
    params = {str(i): jnp.ones(shape) for i, shape in enumerate(shapes)}
    specs = shard_transforms.state_specs(tx, params, mesh)

    def step(params, state):
      grads = shard_transforms.per_shard(params, axes)
      return tx.update(grads, state, params)

    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(P(), specs), out_specs=(P(), specs)
    )
    return mapped, (params, init_state(tx, params, mesh))

  @cases.parameters(
      # Matrices, branches, and products of matrices over those of one.
      (8, 0, 1),
      (16, 0, 1),
      (9, 1, 2),
      (4, 0, 1),
  )
  def test_equal_programs_are_run_once(self, number, branches, products):
    mapped, args = self.program(optax.contrib.muon(0.1), [(4, 6)] * number)
    muon = optax.contrib.muon(0.1)
    one = {'0': jnp.ones((4, 6))}

    found = str(jax.make_jaxpr(mapped)(*args))

    expected = str(jax.make_jaxpr(muon.update)(one, muon.init(one), one))
    self.assertEqual(
        (
            found.count(' cond['),
            found.count('dot_general[') / expected.count('dot_general['),
        ),
        (branches, products),
    )

  def test_rows_are_packed_in_one_order_in_all_processes(self):
    sizes = list(range(1, 20))
    rows = {f'{n}': jax.ShapeDtypeStruct((n,), jnp.float32) for n in sizes}

    program = jax.make_jaxpr(lambda: layout.Layout({}, rows).pack([0], {}))()

    made = [
        eqn.outvars[0].aval.size
        for eqn in program.eqns
        if eqn.primitive.name == 'broadcast_in_dim'
    ]
    self.assertEqual(made, sizes)

  @cases.parameters(
      (AXIS, None), (('host', 'core'), (2, 4)), (('host', 'core'), (4, 2))
  )
  def test_what_is_sent_does_not_grow_with_shards(self, axes, sizes):
    shapes = [(8, 32)] * 2
    mapped, args = self.program(optax.lars(0.1), shapes, 8, axes, sizes)
    alone, few = self.program(optax.lars(0.1), shapes, 2)

    report = monitoring.wire_report(mapped, *args)

    least = monitoring.wire_report(alone, *few)
    # Of an all-reduce, (N - 1) / N of twice the bytes, and sums of copies.
    self.assertLess(report.total_bytes, 2.7 * least.total_bytes)


def by_leaf(fn):
  return optax.stateless(lambda updates, _: jax.tree.map(fn, updates))


def norm_of(updates):
  squares = sum(jnp.sum(u * u) for u in jax.tree.leaves(updates))
  return squares


def scaled_by(total):
  return optax.stateless(
      lambda updates, _: jax.tree.map(lambda u: u / total(updates), updates)
  )


def chosen(updates):
  w = lax.cond(updates['b'][0] > 0, lambda w: w, lambda w: -w, updates['w'])
  return updates | {'w': w}


def in_a_branch(updates):
  return lax.cond(
      True, lambda: lax.psum(norm_of(updates), AXIS), lambda: jnp.float32(1)
  )


class RefusalTest(parameterized.TestCase):
  """Found while tracing."""

  @cases.parameters(
      (
          optax.clip_by_global_norm(1.0),
          r"updates at \['b'\] depends on its updates at \['w'\]",
      ),
      (optax.flatten(optax.adam(0.1)),),
      (optax.stateless(lambda updates, _: chosen(updates)),),
      (optax.adaptive_grad_clip(0.1), None),
  )
  def test_refuses_at_init_what_mixes_leaves(self, inner, message='depends on'):
    tx = owned(inner)
    params = {'w': jnp.ones((4, 6)), 'b': jnp.ones(6)}

    if message is None:
      init_state(tx, params, modes.mesh())
      return
    for num_shards in 1, SHARDS:
      with self.assertRaisesRegex(
          ValueError,
          r'`inner` of `owned_update` must treat each leaf'
          rf' .*{message}.*optax.partition',
      ):
        init_state(tx, params, modes.mesh(num_shards))

  @cases.parameters(
      (
          lambda u: jnp.sqrt(lax.pmean(norm_of(u), AXIS)),
          '`pmean` divides a sum over leaves',
      ),
      (
          lambda u: lax.psum(lax.psum(norm_of(u), AXIS), AXIS),
          '`psum` adds up what is the same',
      ),
      (
          lambda u: lax.psum(norm_of(u) ** 2, AXIS),
          'numbers that each come from one leaf',
      ),
      (lambda u: lax.pmax(norm_of(u), AXIS), '`pmax` in it waits for shards'),
      (
          lambda u: [jax.debug.print('{}', norm_of(u)), 1.0][1],
          'side effects, such as `jax.debug.print`, would show',
      ),
      (in_a_branch, '`psum` in it waits for shards'),
      (
          lambda u: 1.0 + lax.axis_index(AXIS),
          'shards bring numbers of their own',
      ),
  )
  def test_refuses_what_cannot_be_summed_over_owners(self, total, message):
    tx = owned(scaled_by(total))

    with self.assertRaisesRegex(ValueError, message):
      train(tx, 'pmap')

  @cases.parameters(
      (lambda u: lax.psum(norm_of(u), AXIS),),
      (lambda u: lax.psum(jax.jit(norm_of)(u), AXIS),),
      (jax.jit(lambda u: lax.psum(norm_of(u), AXIS)),),
      (jax.checkpoint(lambda u: lax.psum(norm_of(u), AXIS)),),
      # Each shard has the number of a scalar.
      (lambda u: lax.psum(norm_of(u), AXIS), lambda inner: inner),
  )
  def test_sums_over_owners_what_a_transformation_asks_for(
      self, total, of=vectors
  ):
    tx = owned(of(scaled_by(total)), assume_leafwise=of is not vectors)

    actual = train(tx, 'pmap')

    assert_close(actual, train(whole(of(scaled_by(norm_of))), 'pmap'))

  def test_refuses_parameters_of_each_shard(self):
    tx = owned(optax.add_decayed_weights(0.1))

    def step(params, own):
      grads = shard_transforms.per_shard(jnp.ones(16), AXIS)
      return tx.update(grads, tx.init(params), params + own[0])[0]

    with self.assertRaisesRegex(ValueError, 'numbers of their own'):
      trace(step, jnp.ones(16), jnp.ones(8), in_specs=(P(), P(AXIS)))

  def test_refuses_updates_that_differ_over_an_axis_that_is_not_named(self):
    tx = owned(optax.lars(0.1))
    params = {'w': jnp.ones((4, 6)), 'b': jnp.ones(6)}

    def step(params):
      grads = shard_transforms.per_shard(params, (AXIS, 'model'))
      return tx.update(grads, tx.init(params), params)[0]

    mesh = jax.make_mesh((4, 2), (AXIS, 'model'), (AxisType.Auto,) * 2)
    step = jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P())
    with self.assertRaisesRegex(
        ValueError, rf"vary over \['model'\]. Name .*: \('model', '{AXIS}'\)"
    ):
      jax.eval_shape(step, params)

  def test_says_what_init_could_not_follow(self):
    def update(updates, state, params=None, *, value):
      return listed().update(updates, state, params)

    tx = owned(optax.GradientTransformationExtraArgs(listed().init, update))
    params = {'w': jnp.ones((4, 6)), 'v': jnp.ones((4, 6))}

    def step(params):
      grads = shard_transforms.per_shard(params, AXIS)
      return tx.update(grads, tx.init(params), params, value=1)[0]

    with self.assertRaisesRegex(
        ValueError,
        r'state at \[0\] depends .*`init` could not see .* a tree like',
    ):
      trace(step, params)

  def test_refuses_leaves_of_which_some_are_slices(self):
    tx = owned(optax.lars(0.1))
    mesh = jax.make_mesh((4, 2), (AXIS, 'model'), (AxisType.Auto,) * 2)
    params = {'w': jnp.ones((4, 6)), 'b': jnp.ones(6)}

    with self.assertRaisesRegex(ValueError, r"vary over axes of \['model'\]"):
      init_state(tx, params, mesh, in_specs={'w': P(None, 'model'), 'b': P()})

  def test_refuses_a_mesh_that_is_mapped_in_part(self):
    tx = owned(optax.adam(0.1))

    step = jax.shard_map(
        lambda params: optax.tree_utils.tree_get(tx.init(params), 'count'),
        mesh=jax.make_mesh((4, 2), (AXIS, 'model'), (AxisType.Auto,) * 2),
        in_specs=P(),
        out_specs=P(),
        axis_names={AXIS},
    )
    with self.assertRaisesRegex(ValueError, r"not mapped, got \('model',\)"):
      jax.eval_shape(step, jnp.ones(16))

  def test_refuses_state_of_another_dtype(self):
    inner = optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params),
        lambda u, s, _: (u, jax.tree.map(lambda x: x.astype('bfloat16'), s)),
    )
    with self.assertRaisesRegex(
        ValueError, r'keep the types .* bfloat16\[16\] for float32\[16\]'
    ):
      init_state(owned(inner), jnp.ones(16), modes.mesh())

  @cases.parameters(
      (owned, r'must keep the types .* got the tree'),
      (
          functools.partial(shard_transforms.shard_update, axis_name=AXIS),
          r'must treat each element .* it changes the tree',
      ),
  )
  def test_init_leaves_updates_of_another_tree_to_update(self, make, message):
    params = {'w': jnp.ones((4, 6)), 'b': jnp.ones(6)}
    inner = optax.lookahead(optax.sgd(0.1, momentum=0.9), 2, 0.5)
    tx = make(inner)
    pair = optax.LookaheadParams.init_synced(params)

    init_state(tx, pair, modes.mesh())

    def step(pair):
      grads = shard_transforms.per_shard(pair.fast, AXIS)
      return tx.update(grads, tx.init(pair), pair)[0]

    with self.assertRaisesRegex(ValueError, message):
      trace(step, pair)

  def test_takes_the_word_of_who_flattens(self):
    # One vector of all leaves, of which each shard keeps its own.
    inner = optax.flatten(optax.adam(0.1))

    actual = train(owned(inner, assume_leafwise=True), 'vmap')

    assert_close(actual, train(whole(inner), 'vmap'))

  @cases.parameters(TypeError, ValueError)
  def test_takes_the_word_of_who_flattens_and_needs_arguments(self, kind):
    def update(updates, state, params=None, *, value=None, **extra_args):
      del params, extra_args
      if value is None:
        raise kind('It must have `value`.')
      return jax.tree.map(lambda u: value * u, updates), state

    init = optax.identity().init
    link = optax.GradientTransformationExtraArgs(init, update)
    inner = optax.flatten(optax.chain(optax.adam(0.1), link))

    def trained(tx):
      update = functools.partial(tx.update, value=2.0)
      return train(tx._replace(update=update), 'vmap')

    actual = trained(owned(inner, assume_leafwise=True))

    assert_close(actual, trained(whole(inner)))

  def test_refuses_at_update_what_needs_extra_arguments_to_be_known(self):
    tx = owned(optax.polyak_sgd())

    def step(params):
      grads = shard_transforms.per_shard(params, AXIS)
      state = tx.init(params)
      return tx.update(grads, state, params, value=jnp.float32(1))[0]

    with self.assertRaisesRegex(ValueError, '`inner` of .* depends on'):
      trace(step, {'a': jnp.ones(16), 'b': jnp.ones(3)})

  @cases.parameters(
      ({'cost': 3}, TypeError, '`cost` must be a function'),
      (
          {'assume_leafwise': 1},
          TypeError,
          '`assume_leafwise` must be a boolean, got 1',
      ),
  )
  def test_refuses_wrong_arguments(self, kwargs, error, message):
    with self.assertRaisesRegex(error, message):
      owned(optax.sgd(0.1), **kwargs)


class CostTest(parameterized.TestCase):
  """Who owns what."""

  def state(self, shapes, shards=3, **kwargs):
    params = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32)
        for name, shape in shapes.items()
    }
    tx = owned(optax.trace(0.9), **kwargs)
    return init_state(tx, params, modes.mesh(shards)).inner_state

  def owners(self, shapes, shards=3, **kwargs):
    leaves = self.state(shapes, shards, **kwargs).leaves
    return {name: place.shard for name, place in leaves.trace.items()}

  def test_the_costliest_leaf_goes_to_the_shard_with_the_least_to_do(self):
    found = self.owners(
        {
            'big': (8, 8),
            'long': (128, 2),
            'mid': (7, 7),
            'small': (3, 3),
            'vector': (100,),
        }
    )

    # 8 * 8 * 8 = 512, 128 * 2 * 2 = 512, 343, 27, 100.
    self.assertEqual(
        found, {'long': 0, 'big': 1, 'mid': 2, 'vector': 2, 'small': 2}
    )

  def test_a_cost_of_the_user_decides(self):
    costs = {'a': 1, 'b': 5.0, 'c': np.float32(3), 'd': 0}

    found = self.owners(dict.fromkeys(costs, (4, 4)), cost=lambda _: costs)

    self.assertEqual(found, {'b': 0, 'c': 1, 'a': 2, 'd': 2})

  @cases.parameters(
      # Shapes, shards, owners and the rows of each.
      ([(4, 4)] * 8, 8, 8, [(1, 4, 4)]),
      ([(4, 4)] * 8, 4, 4, [(2, 4, 4)]),
      ([(4, 4)] * 2, 8, 2, [(1, 4, 4)]),
      ([(4, 4)] * 3, 8, 4, [(16,)]),
      ([(4, 4)] * 3, 6, 3, [(1, 4, 4)]),
      ([(4, 4)] * 9 + [(3, 5)] * 8, 8, 8, [(1, 4, 4), (30,)]),
      ([(9,)] * 8, 4, 4, [(18,)]),
      ([(4, 4), (2,)], 8, 1, [(1, 4, 4), (2,)]),
  )
  def test_there_are_as_many_owners_as_shares(self, shapes, shards, k, rows):
    state = self.state({str(i): x for i, x in enumerate(shapes)}, shards)

    places = state.leaves.trace.values()
    self.assertEqual({place.num_owners for place in places}, {k})
    self.assertLess(max(place.shard for place in places), k)
    shapes = sorted(row.shape for row in state.rows.values())
    self.assertEqual(shapes, sorted((shards, *row) for row in rows))

  @cases.parameters(
      ({'a': -1.0}, ValueError, r"of at least 0, got -1.0 at \['a'\]"),
      ({'a': float('nan')}, ValueError, 'finite .* got nan'),
      ({'a': 'much'}, TypeError, "real number a leaf, got 'much'"),
      ({'b': 1}, ValueError, 'must give a tree like the parameters'),
  )
  def test_refuses_a_cost_that_is_none(self, costs, error, message):
    with self.assertRaisesRegex(error, message):
      self.owners({'a': (4, 4)}, cost=lambda _: costs)

  def test_warns_of_a_leaf_that_decides_the_time(self):
    shapes = {'huge': (2048, 1024), **{str(i): (8, 8) for i in range(9)}}

    with self.assertWarnsRegex(
        UserWarning, r"one leaf, \['huge'\] of 2,097,152"
    ):
      self.state(shapes)
    with warnings.catch_warnings():
      warnings.simplefilter('error')
      self.state(shapes | {f'huge{i}': (2048, 1024) for i in range(3)})
