"""Tests of `unshard_state` and `shard_state`: checkpoints of sharded state."""

import functools
import tempfile
from unittest import mock

from absl.testing import parameterized
import chex
import flax.serialization
import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import orbax.checkpoint as ocp

import cases
from harness import assert_same
import modes
from shard_transforms import contrib
from shard_transforms import guard
from shard_transforms import init_state
from shard_transforms import resize_state
from shard_transforms import shard_state
from shard_transforms import shard_update
from shard_transforms import tower_reduce
from shard_transforms import unshard_state
from shard_transforms._src.state import resizing
from shard_transforms.contrib import compression
from shard_transforms.contrib import reproducible

AXIS = modes.AXIS
WRAPPERS = {
    'elements': functools.partial(shard_update, axis_name=AXIS),
    'owners': functools.partial(contrib.owned_update, axis_name=AXIS),
}


zeros = functools.partial(np.zeros, dtype=np.float32)
ones = functools.partial(np.ones, dtype=np.float32)


def params_of():
  """Returns leaves that are divided evenly, with padding, or not at all."""
  normal = np.random.default_rng(0).normal
  return {
      'even': normal(size=(8, 4)).astype(np.float32),
      'padded': normal(size=(3, 5, 1)).astype(np.float32),
      'few': np.float32([1, -1, 2]),
      'one': np.float32([[7]]),
      'half': normal(size=(2, 5)).astype(jnp.bfloat16),
      'empty': zeros((0, 3)),
      'scalar': np.float32(0.5),
  }


# The state consists of a copy of the parameters and a count.
COPY = optax.GradientTransformation(
    lambda params: (jnp.int32(3), jax.tree.map(jnp.copy, params)),
    lambda updates, state, params=None: (updates, state),
)


def saved_by_orbax(state, like):
  """Saves a state with orbax, and restores it with the target `like`."""
  folder = tempfile.TemporaryDirectory()
  with folder as path, ocp.StandardCheckpointer() as saver:
    saver.save(f'{path}/state', state)
    saver.wait_until_finished()
    return saver.restore(f'{path}/state', like)


class FullTest(parameterized.TestCase):

  @cases.parameters(*WRAPPERS, fast='elements')
  def test_full_state_is_that_of_the_replicated_optimizer(self, name):
    tx, shapes = WRAPPERS[name](COPY), jax.eval_shape(params_of)
    mesh = jax.make_mesh((8,), (AXIS,), (AxisType.Explicit,))
    state = init_state(tx, params_of(), mesh)

    full = unshard_state(state, tx, params_of(), mesh)
    target = unshard_state(init_state(tx, shapes, mesh), tx, shapes, mesh)

    found = jax.device_get((full.inner_state, COPY.init(params_of())))
    chex.assert_trees_all_equal(*found, strict=True)
    kinds = jax.tree.map(ocp.utils.to_shape_dtype_struct, full)
    self.assertEqual(target, kinds)
    for given, after in (full, mesh), (jax.device_get(full), modes.mesh(3)):
      placed = shard_state(given, tx, shapes, after)
      assert_same(placed, init_state(tx, params_of(), after))
      for leaf in jax.tree.leaves(placed):
        self.assertEqual(leaf.sharding.mesh, after)

  def test_init_and_checkpoints_trace_init_a_few_times_and_no_update(self):
    traced = []

    def init(params):
      traced.append('init')
      return COPY.init(params)

    def update(*_):
      self.fail('`update` was traced.')

    tx = shard_update(optax.GradientTransformation(init, update), AXIS)
    params, mesh = jax.eval_shape(params_of), modes.mesh()
    calls = {
        'init_state': lambda: init_state(tx, params, mesh),
        'unshard_state': lambda: unshard_state(state, tx, params, mesh),
        'shard_state': lambda: shard_state(full, tx, params, mesh),
        'resize_state': lambda: resize_state(here, tx, params, modes.mesh(3)),
    }
    state = init_state(tx, params, mesh)
    here = init_state(tx, params_of(), mesh)
    full = unshard_state(here, tx, params, mesh)

    counts = {}
    for name, call in calls.items():
      traced.clear()
      call()
      counts[name] = len(traced)

    # Once on the mesh and once on one shard. JAX has cached the trace for this
    # mesh, but not for the other mesh.
    expected = {'init_state': 2, 'unshard_state': 2, 'shard_state': 2}
    self.assertEqual(counts, expected | {'resize_state': 5})

  def test_no_device_needs_memory_for_the_full_state(self):
    tx, mesh = contrib.owned_update(optax.trace(0.9), AXIS), modes.mesh()
    params = {str(i): ones((64, 64)) for i in range(16)}
    state = init_state(tx, params, mesh)
    join = jax.jit(lambda state: unshard_state(state, tx, params, mesh))

    memory = join.lower(state).compile().memory_analysis()
    num_bytes = sum(x.nbytes for x in params.values())
    self.assertLess(memory.temp_size_in_bytes, num_bytes / 2)

  @cases.parameters(*WRAPPERS)
  def test_unshards_under_set_mesh(self, name):
    tx, params = WRAPPERS[name](COPY), params_of()
    mesh = jax.make_mesh((8,), (AXIS,), (AxisType.Explicit,))

    with jax.set_mesh(mesh):
      state = init_state(tx, params, mesh)
      full = unshard_state(state, tx, params, mesh)
      placed = shard_state(full, tx, params, mesh)

    found = jax.device_get((full.inner_state, COPY.init(params)))
    chex.assert_trees_all_equal(*found, strict=True)
    assert_same(placed, state)

  @cases.parameters(*WRAPPERS)
  def test_unshards_over_several_axes(self, name):
    tx = WRAPPERS[name](COPY, axis_name=('hosts', 'cores'))
    before, after = (
        jax.make_mesh(shape, ('hosts', 'cores'), (AxisType.Auto,) * 2)
        for shape in ((2, 4), (4, 2))
    )
    params = {k: params_of()[k] for k in ('even', 'padded')}
    params['odd'] = ones((6, 2))
    state = init_state(tx, params, before)

    full = unshard_state(state, tx, params, before)
    placed = shard_state(full, tx, params, after)

    assert_same(placed, init_state(tx, params, after))
    # The order of axes is that of slices; XLA would gather for another order.
    specs = {k: x.sharding.spec for k, x in full.inner_state[1].items()}
    self.assertEqual(specs['even'], P('cores', 'hosts'))
    self.assertEqual(specs['odd'], P(None, 'hosts'))

  @cases.parameters(*WRAPPERS)
  def test_numpy_state_gives_numpy_state_without_shared_memory(self, name):
    # JAX may alias the memory of NumPy arrays, depending on their alignment.
    tx, mesh = optax.chain(WRAPPERS[name](COPY), COPY), modes.mesh()
    params = {k: ones((64, 64)) for k in 'vw'}
    state = jax.tree.map(np.array, init_state(tx, params, mesh))

    full = unshard_state(state, tx, params, mesh)
    placed = shard_state(full, tx, params, mesh)

    for leaf in jax.tree.leaves((state, full)):
      self.assertIsInstance(leaf, np.ndarray)
    for leaf in jax.tree.leaves(state):
      leaf[...] = -1
    chex.assert_trees_all_equal(full[0].inner_state[1], full[1][1], params)
    for leaf in jax.tree.leaves(full):
      leaf[...] = -1
    again = unshard_state(placed, tx, params, mesh)
    chex.assert_trees_all_equal(again[0].inner_state[1], again[1][1], params)

  @cases.parameters(*WRAPPERS)
  def test_full_state_survives_donation_of_the_state(self, name):
    tx, mesh = optax.chain(WRAPPERS[name](COPY), COPY), modes.mesh()
    params = {k: params_of()[k] for k in ('even', 'scalar')}
    state = init_state(tx, params, mesh)
    full = unshard_state(state, tx, params, mesh)
    resized = resize_state(state, tx, params, mesh)

    spoil = functools.partial(jax.tree.map, lambda x: x * 2 + 1)
    jax.block_until_ready(jax.jit(spoil, donate_argnums=0)(state))

    again = unshard_state(resized, tx, params, mesh)
    for count, copy in full[0].inner_state, full[1], again[0].inner_state:
      np.testing.assert_array_equal(count, 3)
      np.testing.assert_array_equal(copy['scalar'], 0.5)

  def test_full_state_contains_random_keys(self):
    noise = optax.add_noise(0.1, 0.5, jax.random.key(3))
    inner = optax.chain(noise, optax.trace(0.9))
    tx, params = contrib.owned_update(inner, AXIS), {'a': ones((4, 3))}
    state = init_state(tx, params, modes.mesh())

    full = unshard_state(state, tx, params, modes.mesh())
    resized = resize_state(state, tx, params, modes.mesh(4))
    placed = shard_state(full, tx, params, modes.mesh(4))

    expected = jax.tree.map(_bits, init_state(tx, params, modes.mesh(4)))
    for found in (resized, placed):
      chex.assert_trees_all_equal(jax.tree.map(_bits, found), expected)

  @cases.parameters(*WRAPPERS)
  def test_resizes_a_label_without_parameters(self, name):
    inner = functools.partial(WRAPPERS[name], optax.trace(0.9))
    tx = optax.partition(
        {'matrix': inner(), 'embedding': inner()},
        lambda params: jax.tree.map(lambda _: 'matrix', params),
    )
    params = {'a': ones((4, 3)), 'b': ones(3)}
    state = init_state(tx, params, modes.mesh(4))

    resized = resize_state(state, tx, params, modes.mesh(2))

    assert_same(resized, init_state(tx, params, modes.mesh(2)))

  @cases.product(
      name=(*WRAPPERS, 'compression'),
      params=((), {}, {'a': None}),
      fast=['elements', 'compression_a'],
  )
  def test_empty_parameters_have_a_full_state(self, name, params):
    tx = compression.compressed_mean(AXIS, compression.quantize(8))
    if name in WRAPPERS:
      tx = WRAPPERS[name](optax.trace(0.9))
    mesh, other = modes.mesh(4), modes.mesh(2)
    state = init_state(tx, params, mesh)

    full = unshard_state(state, tx, params, mesh)
    placed = shard_state(full, tx, params, other)
    resized = resize_state(state, tx, params, other)

    for found in placed, resized:
      assert_same(found, init_state(tx, params, other))

  def test_keeps_and_resizes_per_shard_state(self):
    inner = shard_update(optax.trace(0.9), AXIS)
    tx = tower_reduce(4, guard(inner, AXIS), axis_name=AXIS)
    params = {'w': zeros((3, 5))}
    state = init_state(tx, params, modes.mesh(4))
    state = state._replace(
        tower_count=np.int32(2),
        total={'w': np.arange(60, dtype=np.float32).reshape(4, 3, 5)},
        total_weight=np.float32([1, 2, 3, 5]),
    )

    full = unshard_state(state, tx, params, modes.mesh(4))
    placed = shard_state(full, tx, params, modes.mesh(2))

    chex.assert_trees_all_equal(full.total, state.total)
    trace = optax.tree_utils.tree_get(full, 'trace')
    self.assertEqual(trace['w'].shape, (3, 5))
    expected = resize_state(state, tx, params, modes.mesh(2))
    assert_same(placed, expected)
    np.testing.assert_array_equal(placed.total_weight, [3, 8])

  def test_joins_the_slices_of_residuals(self):
    tx = compression.compressed_mean(AXIS, compression.quantize(8))
    params = {'w': ones((200, 300)), 'b': ones(300)}
    state = init_state(tx, params, modes.mesh())

    full = unshard_state(state, tx, params, modes.mesh())
    placed = shard_state(jax.device_get(full), tx, params, modes.mesh(4))

    self.assertEqual(full.server_residual['w'].size, 60_000)
    assert_same(placed, init_state(tx, params, modes.mesh(4)))


def _bits(x):
  is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
  return np.array(jax.random.key_data(x) if is_key else x)


# One owner has most of the elements; the other rows have other lengths.
OWNED = {'a': (10,), 'b': (4,), 'c': (4,), 'd': (4,), 'e': (4,)}


class CheckpointTest(parameterized.TestCase):
  """Checkpoints of orbax and flax."""

  @cases.parameters(*WRAPPERS, fast='elements')
  def test_orbax_restores_full_state_on_other_shards(self, name):
    tx = WRAPPERS[name](optax.trace(0.9))
    params = {name: ones(shape) for name, shape in OWNED.items()}
    before, after = modes.mesh(), modes.mesh(3)
    trace = {k: x * i for i, (k, x) in enumerate(params.items(), 1)}
    expected = init_state(tx, params, before)
    expected = expected._replace(inner_state=optax.TraceState(trace))
    state = shard_state(expected, tx, params, before)

    like = unshard_state(init_state(tx, params, after), tx, params, after)
    saved = saved_by_orbax(unshard_state(state, tx, params, before), like)
    placed = shard_state(saved, tx, params, after)

    found = unshard_state(placed, tx, params, after)
    chex.assert_trees_all_equal(jax.device_get(found), expected, strict=True)

  def test_orbax_places_divided_slices_by_their_shardings(self):
    tx = shard_update(COPY, AXIS)
    params = {
        'rows': np.arange(40, dtype=np.float32).reshape(8, 5),
        'columns': np.arange(80, dtype=np.float32).reshape(5, 16),
        'both': np.arange(16, dtype=np.float32),
    }
    after = modes.mesh(4)
    state = init_state(tx, params, modes.mesh())

    like = init_state(tx, jax.eval_shape(lambda: params), after)
    restored = saved_by_orbax(state, like)

    assert_same(restored, init_state(tx, params, after))
    restored = jax.device_get(restored.inner_state[1])
    chex.assert_trees_all_equal(restored, params, strict=True)

  def test_stacks_are_never_restored_for_other_owners(self):
    params = {name: ones((4, 4)) for name in 'abcdefgh'}
    tx = WRAPPERS['owners'](optax.trace(0.9))
    state = init_state(tx, params, modes.mesh())
    like = init_state(tx, params, modes.mesh(4))
    like = jax.tree.map(np.zeros_like, like)

    # The error of orbax does not say that the names of the stacks differ.
    with self.assertRaises(ValueError):
      saved_by_orbax(state, like)
    stacks = flax.serialization.to_bytes(state.inner_state.stacks)
    with self.assertRaisesRegex(ValueError, 'keys do not match'):
      flax.serialization.from_bytes(like.inner_state.stacks, stacks)


TRACE = {name: wrap(optax.trace(0.9)) for name, wrap in WRAPPERS.items()}
SLICED = TRACE['elements']


def on_axes(sizes, axes):
  return jax.make_mesh(sizes, axes, (AxisType.Auto,) * len(axes))


def convert(
    params,
    tx=SLICED,
    fn=unshard_state,
    other=None,
    others=None,
    mesh=((8,), (AXIS,)),
    after=None,
    specs=P(),
    change=lambda state: state,
    **options,
):
  """Converts a state that another transformation may have created."""
  made_on = on_axes(*mesh)
  state = change(init_state(tx, params, made_on, in_specs=specs))
  here = on_axes(*after) if after else made_on
  fn(state, other or tx, params if others is None else others, here, **options)


PLACED = {'fn': shard_state}


def traced(shape, dtype=np.float32):
  """Returns options that replace a leaf of the full state."""
  trace = optax.TraceState({'w': np.zeros(shape, dtype)})
  return PLACED | {'change': lambda state: state._replace(inner_state=trace)}


def owned(shape, change):
  def changed(state):
    stacks = jax.device_get(state.inner_state.stacks)
    stacks = {name: change(x) for name, x in stacks.items()}
    kept = state.inner_state._replace(stacks=stacks)
    return state._replace(inner_state=kept)

  params = {'w': zeros(shape), 'v': zeros(shape)}
  return {'params': params, 'tx': TRACE['owners'], 'change': changed}


MODEL = P('model')
LARGE, SMALL = {'w': zeros((64, 100))}, {'w': zeros((60, 90))}


def on_model(shape, sizes):
  params = {name: zeros(shape) for name in 'vw'}
  return {'params': params, 'mesh': (sizes, (AXIS, 'model')), 'specs': MODEL}


CREATED_BY = '`state` was not created by .*'
# Each part, [3], is padded at its end, but the global shape is still [6].
PARTS = {
    'params': np.arange(6, dtype=np.float32),
    'mesh': ((2, 4), ('model', AXIS)),
    'specs': MODEL,
}
# Calls that both wrappers refuse: changed options, the error and its words.
BOTH = (
    (PLACED, ValueError, r'got .* instead of .* at \.inner_state'),
    (
        traced((2, 8)),
        ValueError,
        r'\(2, 8\) instead of \(4, 4\) at .*result of `unshard_state`',
    ),
    (traced((4, 4), 'f8'), TypeError, 'float64 instead of float32'),
    (
        {'others': {'w': zeros((4, 99))}},
        ValueError,
        CREATED_BY + r'\.inner_state',
    ),
    (
        {'others': {'v': zeros((4, 4))}},
        ValueError,
        CREATED_BY + r'\.inner_state',
    ),
)
RAW = {'change': lambda state: state._asdict()}
RESIZED = PARTS | {'fn': resize_state}
HALVES = [[0, 1, 2, 3], [4, 5, 6, 7]]
GROUPED = shard_update(optax.trace(0.9), AXIS, groups=HALVES)
# Calls that one of the wrappers refuses.
EACH = (
    # The parts of the parameter, [3, 5], are padded.
    (
        on_model((6, 5), (4, 2)) | {'in_specs': MODEL},
        '`in_specs` shards parameters .*, and their state is sharded',
    ),
    (on_model((4, 5), (2, 4)), 'created'),
    (
        PLACED
        | {'tx': reproducible.tower_reduce(2, optax.trace(0.9), AXIS)}
        | {'other': SLICED},
        'got the tree .*ReproducibleState.* instead',
    ),
    ({'tx': GROUPED}, 'by `groups` cannot be unsharded'),
    (
        traced((4, 4)) | {'other': GROUPED},
        'by `groups` cannot be unsharded',
    ),
    (
        PLACED
        | {'tx': tower_reduce(2, SLICED, axis_name=AXIS)}
        | {'others': {'v': zeros((4, 5))}},
        r'got the tree .* at \.total',
    ),
    # The raw tree of a checkpoint.
    (RAW, 'got the tree .* instead of'),
    ({'tx': optax.trace(0.9)} | RAW, 'got the tree .* instead of'),
    (owned((4, 4), lambda x: x[:1]), 'the stack .* instead of one with row 0'),
    (owned((4, 4), lambda x: x[..., :3]), r'row 0 of shard 0, 16 elements'),
    ({'params': LARGE, 'others': SMALL, 'change': jax.device_get}, 'created'),
    ({'params': LARGE, 'others': SMALL}, 'created'),
    ({'params': LARGE, 'others': SMALL, 'fn': resize_state}, 'created'),
    (
        {'after': ((4,), (AXIS,)), 'params': ones(10)},
        'those that `init_state` gives it',
    ),
    (PARTS, 'those that `init_state` gives it'),
    (RESIZED, 'those that `init_state` gives it'),
    (
        RESIZED | {'after': ((2, 4), ('other', AXIS))},
        'those that `init_state` gives it',
    ),
)


class RefusalTest(parameterized.TestCase):

  def test_refuses_state_that_was_created_differently(self):
    given = {'params': {'w': zeros((4, 4))}}
    for name, tx in TRACE.items():
      for changes, error, words in BOTH:
        named = self.subTest(f'{name} {words}')
        with named, self.assertRaisesRegex(error, words):
          convert(**{'tx': tx} | given | changes)
    for changes, words in EACH:
      with self.subTest(words), self.assertRaisesRegex(ValueError, words):
        convert(**given | changes)

  def test_state_that_is_not_resized_may_be_on_other_processes(self):
    tx, params = guard(shard_update(COPY, AXIS), AXIS), {'w': ones((3, 5))}
    mesh = modes.mesh()
    state = init_state(tx, params, mesh)

    def is_addressable(leaf):
      return not isinstance(leaf, jax.Array) or leaf.is_fully_replicated

    with mock.patch.object(resizing, 'is_addressable', is_addressable):
      full = unshard_state(state, tx, params, mesh)
      placed = shard_state(full, tx, params, mesh)

      with self.assertRaisesRegex(
          ValueError, 'GuardState is partly on other processes'
      ):
        shard_state(full, tx, params, modes.mesh(4))

    chex.assert_trees_all_equal(placed, state)
