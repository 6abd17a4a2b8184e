"""Tests of `compressed_mean`: error feedback, weights, options and resizing."""

import functools

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import cases
import compressions
import harness
import modes
import shard_transforms as st
from shard_transforms.contrib import compression

AXIS = modes.AXIS
zeros = compressions.zeros


def build(compressor, **options):
  options = {'min_elements': 64, **options}
  return compression.compressed_mean(AXIS, compressor, **options)


ALL = {name: build(x) for name, x in compressions.COMPRESSORS.items()}


class NothingLostTest(parameterized.TestCase):

  def test_results_and_residuals_add_up(self):
    params = {'w': zeros(7, 19), 'half': zeros(70, dtype=jnp.bfloat16)}
    data = compressions.make_data(8, 12, params)

    found = compressions.run(ALL, 'shard_map', data, params)

    for name, (updates, state) in found.items():
      with self.subTest(name):
        for leaf in ('w', 'half'):
          means = np.asarray(data[leaf], np.float64).mean(0)
          # A sum of results in bfloat16 shows how these are rounded.
          tolerance = 1e-5 if leaf == 'w' else 1e-2
          given = state, means, leaf, tolerance
          compressions.assert_nothing_lost(updates, *given)
          self.assertEqual(updates[leaf].dtype, data[leaf].dtype)
          bits = updates[leaf].view(np.uint8)
          np.testing.assert_array_equal(bits, np.stack([bits[0]] * 8))

  def test_exact_compressors_lose_no_bit(self):
    exact = {'top_k': ALL['top_k']}
    exact['float32'] = build(compression.cast('float32'))
    params = {'w': zeros(7, 19)}
    rng = np.random.default_rng(0)
    data = {'w': rng.integers(-99, 99, (8, 15, 7, 19)).astype(np.float32)}
    # Means over 8, 4, 2 and 1 shards are exact; in the last steps, no shard
    # counts.
    weight = np.zeros((8, 15), np.float32)
    for step in range(12):
      shards = rng.permutation(8)[: 8 >> step % 4]
      weight[shards, step] = 1
    clean = np.where(weight[..., None, None] > 0, data['w'], 0)
    data['w'][weight == 0] = np.nan

    found = compressions.run(exact, 'shard_map', data, params, weight)

    num_shards = np.maximum(weight.sum(0), 1)[:, None, None]
    means = clean.astype(np.float64).sum(0) / num_shards
    for name, (updates, state) in found.items():
      compressions.assert_nothing_lost(updates, state, means, 'w', 0)
      np.testing.assert_array_equal(updates['w'][0, 12:], 0)
      if name == 'float32':
        np.testing.assert_array_equal(updates['w'][0], means)

  @pytest.mark.thorough
  def test_weights_and_shards_of_weight_zero(self):
    params = {'w': zeros(7, 19), 'b': zeros(5)}
    data = compressions.make_data(8, 12, params)
    rng = np.random.default_rng(1)
    weight = rng.choice([0, 0.5, 1, 7], (8, 12)).astype(np.float32)
    weight[:, 5] = 0  # No shard counts.
    weight[:4, 7] = 0  # A host does not count.
    weight[2, 3] = 0
    clean = np.where(weight[..., None, None] > 0, data['w'], 0)
    for leaf in data.values():
      leaf[weight == 0] = np.nan
    random = compression.quantize(4, block=8, stochastic=True)
    mean = functools.partial(compression.compressed_mean, modes.HOSTS[::-1])
    some = {'sign': compression.scaled_sign(8), 'random': random}
    some = {name: mean(x, min_elements=64) for name, x in some.items()}

    found = compressions.run(some, 'hosts', data, params, weight)

    w = weight.astype(np.float64)
    total = np.where(w.sum(0) > 0, w.sum(0), 1)
    means = np.einsum('nt,ntij->tij', w / total, clean)
    for name, (updates, state) in found.items():
      with self.subTest(name):
        compressions.assert_nothing_lost(updates, state, means, 'w')
        np.testing.assert_array_equal(updates['w'][:, 5], 0)
        bits = updates['w'].view(np.uint8)
        np.testing.assert_array_equal(bits, np.stack([bits[0]] * 8))
        server = state.server_residual['w'].ravel()
        np.testing.assert_array_equal(server[7 * 19 :], 0)


class OneShardTest(parameterized.TestCase):

  def test_is_the_identity_to_the_bit(self):
    params = {'w': zeros(7, 19), 'half': zeros(70, dtype=jnp.bfloat16)}
    data = compressions.make_data(1, 3, params)
    data['w'][0, 0, 0, :2] = [-0.0, 3e38]
    weight = np.array([[3.0, 0.7, 1e-3]], np.float32)

    found = compressions.run(ALL, 'vmap', data, params, weight)

    bits = jax.tree.map(lambda x: x.view(np.uint8), data)
    for updates, _ in found.values():
      for leaf in ('w', 'half'):
        np.testing.assert_array_equal(updates[leaf].view(np.uint8), bits[leaf])


class OptionsTest(parameterized.TestCase):

  @pytest.mark.thorough
  def test_options(self):
    # 8 slices of 9 elements hold 65, in blocks of 16.
    params = {'w': zeros(65)}
    data = compressions.make_data(8, 6, params)
    data['w'][:, 5] = data['w'][:, 4]
    sign = compression.scaled_sign(16)
    transformations = {
        'mean': st.cross_shard_mean(AXIS),
        'sign': ALL['sign'],
        'int4': ALL['int4'],
        'warmup': build(sign, warmup_steps=3),
        'no feedback': build(sign, feedback=None),
        'random': build(
            compressions.COMPRESSORS['int8_stochastic'], feedback=None
        ),
    }

    found = compressions.run(transformations, 'shard_map', data, params)

    # The padding has no residual.
    for name in 'sign', 'int4':
      server = found[name][1].server_residual['w']
      self.assertEqual(server.shape, (8, 1, 9))
      np.testing.assert_array_equal(server.ravel()[65:], 0)
    # The warm-up is the plain mean, and leaves no residual.
    mean, _ = found['mean']
    updates, state = found['warmup']
    np.testing.assert_array_equal(updates['w'][:, :3], mean['w'][:, :3])
    self.assertTrue((updates['w'][:, 3] != mean['w'][:, 3]).any())
    means = data['w'].astype(np.float64).mean(0)
    compressions.assert_nothing_lost(updates, state, means, 'w')
    # Without feedback, steps are independent.
    updates, state = found['no feedback']
    self.assertEmpty(jax.tree.leaves((state.residual, state.server_residual)))
    np.testing.assert_array_equal(updates['w'][:, 5], updates['w'][:, 4])
    # Each step draws new random values.
    drawn, _ = found['random']
    self.assertTrue((drawn['w'][:, 5] != drawn['w'][:, 4]).any())


class ResizeTest(parameterized.TestCase):

  @pytest.mark.thorough
  def test_nothing_is_lost_across_numbers_of_shards(self):
    tx = optax.chain(build(compression.scaled_sign(16)))
    params = {'w': zeros(7, 19), 'b': zeros(5)}
    state = st.init_state(tx, params, modes.mesh(8))
    results, means = 0, []

    for seed, num_shards in enumerate((8, 3, 1)):
      mesh = modes.mesh(num_shards)
      data = compressions.make_data(num_shards, 5, params, seed)
      state = st.resize_state(state, tx, params, mesh)
      updates, state = compressions.go_on(tx, params, mesh, state, data)
      results += np.asarray(updates['w'], np.float64).sum(0)
      means.append(np.asarray(data['w'], np.float64).mean(0))
      total = results + compressions.held_back(state[0], 'w', (7, 19))
      expected = np.concatenate(means)
      error = np.linalg.norm(total - expected.sum(0))
      self.assertLess(error / np.linalg.norm(expected), 1e-5)

    # A single shard sends all residuals.
    np.testing.assert_array_equal(state[0].residual['w'], 0)
    np.testing.assert_array_equal(state[0].server_residual['w'], 0)

  def test_refuses_a_state_for_other_shards_or_transformation(self):
    tx = build(compression.scaled_sign(16))
    params = {'w': zeros(7, 19)}
    state = st.init_state(tx, params, modes.mesh(4))
    twice = jax.tree.map(lambda x: np.concatenate([x, x]), state[1:])
    state = compression.CompressedMeanState(state.step, *twice)
    data = compressions.make_data(8, 1, params)

    with self.assertRaisesRegex(
        ValueError, 'do not fit 8 shards.*resize_state'
    ):
      compressions.go_on(tx, params, modes.mesh(8), state, data)
    with self.assertRaisesRegex(TypeError, 'must be a `CompressedMeanState`'):
      tx.update(params, optax.EmptyState())


class FormulaTest(parameterized.TestCase):

  def test_follows_the_formulas(self):
    tx = build(compression.top_k(0.5, block=2), min_elements=1)
    u = np.array([[4.0, 1.0, -1.0, 0.0], [2.0, 1.0, 3.0, 8.0]], np.float32)
    e = np.array([[0.0, 1.0, 0.0, 2.0], [0.0, 0.0, 1.0, 0.0]], np.float32)
    server = np.array([[1.0, 2.0], [-3.0, 0.0]], np.float32)

    def fn(_, own):
      u, *held = own
      held = jax.tree.map(lambda x: x[None], (*held, u[0]))
      state = compression.CompressedMeanState(jnp.int32(0), *held)
      return tx.update(u, state)

    mean, state = modes.map_shards('shard_map', fn, 2)(0.0, (u, e, server))

    # Shards send [4, 0 | 0, 2] and [2, 0 | 0, 8]. The owners add [1, 2] and
    # [-3, 0] to the means [3, 0] and [0, 5].
    np.testing.assert_array_equal(mean, [[4, 0, 0, 5]] * 2)
    own, server, norms = (x[:, 0] for x in state[1:])
    np.testing.assert_array_equal(own, [[0, 2, -1, 0], [0, 1, 4, 0]])
    np.testing.assert_array_equal(server, [[0, 2], [-3, 0]])
    np.testing.assert_allclose(norms, np.linalg.norm(u, axis=1), rtol=1e-6)


SIGN = compression.scaled_sign(16)
ERRORS = (
    (SIGN, dict(feedback='all'), ValueError, "`feedback` must be 'residual' o"),
    (SIGN, dict(min_elements=0), ValueError, '`min_elements` must be at least'),
    (SIGN, dict(warmup_steps=-1), ValueError, '`warmup_steps` must be at leas'),
    ('sign', {}, TypeError, '`compressor` of `compressed_mean` must be a `Com'),
)
# The options of the state, a change of the updates, and the error.
WRONG_UPDATES = (
    (
        dict(min_elements=2),
        None,
        ValueError,
        'has a residual.* another `feedback`',
    ),
    (
        dict(feedback=None),
        None,
        ValueError,
        'lacks a residual.* `min_elements`',
    ),
    ({}, lambda x: x[:7], ValueError, r"shape \(7,\) .* at \['w'\]"),
    ({}, lambda x: x + 0j, TypeError, r"complex at \['w'\]"),
)


class ErrorTest(parameterized.TestCase):

  @cases.parameters(*ERRORS)
  def test_refuses_argument(self, compressor, options, error, words):
    with self.assertRaisesRegex(error, words):
      build(compressor, **options)

  @cases.parameters(*WRONG_UPDATES)
  def test_refuses_update(self, options, change, error, words):
    params = {'w': zeros(80), 'b': zeros(5)}
    made = build(SIGN, **options)

    def shard(params, grads):
      if change is not None:
        grads = {**grads, 'w': change(grads['w'])}
      return ALL['sign'].update(grads, made.init(params))

    mapped = jax.vmap(shard, (None, 0), axis_name=AXIS)
    with self.assertRaisesRegex(error, words):
      jax.eval_shape(mapped, params, harness.on_each_shard(params))
