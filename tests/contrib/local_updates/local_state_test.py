"""Tests of the state of `local_updates`: local parameters, health, resizing."""

import functools

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

import cases
import modes
import shard_transforms as st
from shard_transforms import cross_shard_mean
from shard_transforms import monitoring
from shard_transforms._src.state import resizing
from shard_transforms.contrib import local_params
from shard_transforms.contrib import local_updates
from shard_transforms.contrib._src.local_updates import local_state
from shard_transforms.state_rules import Rule

AXIS = modes.AXIS


def _outer():
  return optax.chain(cross_shard_mean(AXIS), optax.sgd(1.0, 0.5))


def _tx():
  return local_updates(optax.adam(0.1), _outer(), AXIS, every=3)


def _on_shard(fn):
  """Returns a function that is mapped over 8 shards."""
  return modes.map_shards('shard_map', fn)


class LocalParamsTest(parameterized.TestCase):

  def test_finds_local_parameters_in_any_state(self):
    txs = {
        'unwrapped': _tx(),
        'chain': optax.chain(optax.identity(), _tx()),
        'masked': optax.masked(_tx(), {'a': True, 'b': False, 'n': False}),
        'partition': optax.partition(
            {'x': _tx(), 'y': _tx()}, {'a': 'x', 'b': 'y', 'n': 'x'}
        ),
        'towers': st.tower_reduce(1, _tx(), axis_name=AXIS),
    }
    params = {'a': jnp.zeros(2), 'b': jnp.zeros(()), 'n': jnp.arange(3)}

    def own_of(tx, params, x):
      state = tx.init(params)
      own = local_params(params, state)
      grads = jax.tree.map(lambda p: x + 0.0 * p, own)
      grads['n'] = np.zeros(3, jax.dtypes.float0)
      _, state = tx.update(grads, state, params)
      return local_params(params, state)

    def shard(params, x):
      return {name: own_of(tx, params, x) for name, tx in txs.items()}

    found = _on_shard(shard)(params, np.float32(1 + np.arange(8)))

    for name, own in found.items():
      with self.subTest(name):
        np.testing.assert_array_equal(own['n'], [np.arange(3)] * 8)
        np.testing.assert_allclose(own['a'], np.full((8, 2), -0.1), rtol=1e-5)
        moved = np.full(8, 0.0 if name == 'masked' else -0.1)
        np.testing.assert_allclose(own['b'], moved, rtol=1e-5)

  def test_refuses_another_state(self):
    params = np.zeros(3, np.float32)
    whole = st.init_state(_tx(), params, modes.mesh())

    def of_others(params, _):
      return local_params({'b': params}, _tx().init({'a': params}))

    for call, error, words in (
        (lambda: local_params(params, ()), TypeError, '`state` of `local_par'),
        (
            lambda: _on_shard(lambda own, _: local_params(own, whole))(
                params, np.zeros(8)
            ),
            ValueError,
            'axis of length 1',
        ),
        (
            lambda: _on_shard(of_others)(params, np.zeros(8)),
            ValueError,
            '`params` of `local_params` have a different.* With nnx',
        ),
    ):
      with self.subTest(words), self.assertRaisesRegex(error, words):
        call()

  def test_returns_a_stack_where_no_axis_is_mapped(self):
    params = {'a': jnp.ones(2), 'n': jnp.arange(3)}
    state = st.init_state(_tx(), params, modes.mesh())

    own = local_params(params, state)

    self.assertIsInstance(own, st.Stacked)
    expected = jax.tree.map(lambda x: np.stack([x] * 8), params)
    chex.assert_trees_all_equal(own.tree, expected)


class HealthTest(parameterized.TestCase):

  def test_is_healthy_as_long_as_a_shard_is_finite(self):
    state = st.init_state(
        _tx(), {'a': jnp.zeros(2), 'b': jnp.zeros(())}, modes.mesh()
    )
    sick = {k: x.at[1:].set(jnp.nan) for k, x in state.own_params.items()}
    lost = {**sick, 'b': sick['b'].at[0].set(jnp.inf)}

    found = monitoring.metrics(state._replace(num_rounds=jnp.int32(7)))
    self.assertEqual(found['local_updates/num_rounds'], 7)
    self.assertEqual(found['local_updates/step'], 0)
    monitoring.check_health(state)
    monitoring.check_health(state._replace(own_params=sick))
    with self.assertRaisesRegex(
        RuntimeError, r'are not finite .* \[0, 1, .*7\], in round 0'
    ):
      monitoring.check_health(state._replace(own_params=lost))


class ResizeTest(parameterized.TestCase):

  @cases.parameters(((8, 4, 8), 2), ((8, 3), 3), fast='8_4_8_2')
  def test_a_resized_round_includes_all_steps(self, sizes, step):
    tx = _tx()
    params = jnp.linspace(-1, 1, 5)
    meshes = [modes.mesh(size) for size in sizes]
    state = st.init_state(tx, params, meshes[0])
    rng = np.random.default_rng(0)
    for _ in range(step):
      grads = np.float32(rng.normal(size=(8, 5)))
      params, state = _step(tx, meshes[0], params)(params, state, grads)
    before = jax.device_get(state)

    for mesh in meshes[1:]:
      state = st.resize_state(state, tx, params, mesh)

    after = jax.device_get(state)
    mean = before.own_params.astype(np.float64).mean(0)
    np.testing.assert_allclose(after.own_params, [mean] * sizes[-1], rtol=1e-6)
    jax.tree.map(
        np.testing.assert_array_equal, before.outer_state, after.outer_state
    )
    counts = optax.tree_utils.tree_get(after.inner_state, 'count')
    np.testing.assert_array_equal(counts, np.full(sizes[-1], step))
    if step == 3:
      # Between rounds, all shards have the exact bits of the anchor.
      np.testing.assert_array_equal(
          after.own_params, np.stack([params] * sizes[-1])
      )
    self.assertEqual((after.step, after.num_rounds), (step % 3, step // 3))

  def test_weights_shards_and_leaves_out_those_that_are_not_finite(self):
    tx = _tx()
    params = np.zeros(2, np.float32)
    state = st.init_state(tx, params, modes.mesh())
    own = np.arange(16, dtype=np.float32).reshape(8, 2)
    own[7] = np.nan
    weights = np.float32([[1], [0], [3], [0], [0], [0], [0], [9]])
    state = state._replace(own_params=own, total_weight=weights)

    state = st.resize_state(state, tx, params, modes.mesh(3))

    want = (own[0] + 3 * own[2]) / 4
    np.testing.assert_allclose(state.own_params, [want] * 3)
    # The weight of a shard that is left out of the mean is left out too.
    np.testing.assert_allclose(state.total_weight, np.full((3, 1), 4 / 3))

  def test_names_a_field_that_was_restored_with_another_dtype(self):
    tx = _tx()
    params = jnp.zeros(2, jnp.bfloat16)
    state = st.init_state(tx, params, modes.mesh())
    own = np.arange(16).reshape(8, 2).astype(jnp.bfloat16)
    state = state._replace(
        own_params=own, total_weight=np.ones((8, 1), np.float16)
    )

    with self.assertRaisesRegex(
        TypeError, r'float16 instead of float32 at \.total_weight'
    ):
      st.resize_state(state, tx, params, modes.mesh(4))

  def test_steps_before_a_resize_keep_their_weight(self):
    sizes = 8, 3
    tx = local_updates(optax.sgd(0.1), _outer(), AXIS, every=3)
    meshes = [modes.mesh(size) for size in sizes]
    params = np.linspace(-1, 1, 5, dtype=np.float32)
    steps = [_step(tx, mesh, params) for mesh in meshes]
    state = st.init_state(tx, params, meshes[0])
    rng = np.random.default_rng(0)
    own, total = np.zeros((sizes[0], 5)), np.zeros((sizes[0], 1))

    for i, size in enumerate((sizes[0], sizes[0], sizes[1])):
      if i == 2:
        state = st.resize_state(state, tx, params, meshes[1])
        own = np.full((size, 5), (own * total).sum(0) / total.sum())
        total = np.full((size, 1), total.sum() / size)
        np.testing.assert_allclose(state.total_weight, total, rtol=1e-6)
      grads = np.float32(rng.normal(size=(size, 5)))
      weight = np.float32(rng.integers(1, 50, size))
      moved, state = steps[i // 2](params, state, grads, weight)
      own -= 0.1 * grads
      total += weight[:, None]

    want = params + (own * total).sum(0) / total.sum()
    np.testing.assert_allclose(moved, want, rtol=1e-5, atol=1e-6)


def _step(tx, mesh, like):
  """Returns a step of all shards, for a state created by `init_state`."""
  specs = st.state_specs(tx, like, mesh)

  def step(params, state, grads, weight=None):
    grads, weight = jax.tree.map(lambda x: x[0], (grads, weight))
    updates, state = tx.update(grads, state, params, weight=weight)
    return optax.apply_updates(params, updates), state

  mapped = jax.jit(
      jax.shard_map(
          step,
          mesh=mesh,
          in_specs=(P(), specs, P(AXIS), P(AXIS)),
          out_specs=(P(), specs),
      )
  )
  return lambda params, state, grads, weight=None: mapped(
      params, state, grads, weight
  )


ROWS = np.arange(0, 840, 210)


class RowsTest(parameterized.TestCase):

  @cases.parameters(
      ('average_rows', [1, 1, 1, 1], ROWS, [315] * 3),
      ('average_rows', [0, 0, 0, 0], ROWS, [315] * 3),
      ('average_rows', [0, 1, 0, 2], ROWS, [490] * 6),
      ('split_rows', [1, 1, 1, 1], ROWS, [420] * 3),
      ('split_rows', [1, 0, 0, 1], ROWS, [210] * 3),
      ('split_rows', [1, 1, 1], [1, 2, 4], [1.75] * 4),
      # Equal rows keep their bits; otherwise, the mean is of finite rows.
      ('average_rows', [1, 1, 1], np.full((3, 2), 0.1), np.full((4, 2), 0.1)),
      ('average_rows', [1] * 3, [[1, np.nan], [2, 4], [4, 8]], [[3, 6]] * 4),
      ('average_rows', [1, 1], [[np.nan], [np.nan]], [[np.nan]] * 4),
  )
  def test_rows_are_resized(self, name, weights, rows, want):
    sharding = jax.NamedSharding(modes.mesh(len(want)), P(AXIS))
    resize = functools.partial(
        getattr(local_state, name), weights=np.array(weights)
    )
    for dtype in (np.float32, np.int32):
      if not np.isfinite(rows).all() and dtype is np.int32:
        continue
      rows = np.asarray(rows, dtype)
      like = jax.ShapeDtypeStruct(np.shape(want), dtype, sharding=sharding)

      resized = resizing.resized(Rule(resize=resize), 'leaf', rows, like)

      self.assertEqual(resized.dtype, dtype)
      want = np.rint(want) if dtype is np.int32 else np.asarray(want, dtype)
      np.testing.assert_array_equal(resized, want)
