from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import cases
import compressions
import modes
import shard_transforms
from shard_transforms import compression
from shard_transforms import monitoring

AXIS = modes.AXIS
PARAMS = {'w': jnp.zeros((7, 19)), 'b': jnp.zeros(5), 'scalar': jnp.float32(0)}
SIGN = compression.scaled_sign(8)
INT8 = compression.quantize(8, block=16)
FLOAT32 = compression.cast('float32')


def build(inner=None, compressor=SIGN, **options):
  options = {'min_elements': 64, **options}
  inner = optax.identity() if inner is None else inner
  return compression.compressed_shard_update(inner, AXIS, compressor, **options)


def mean(compressor=SIGN, **options):
  options = {'min_elements': 64, **options}
  return compression.compressed_mean(AXIS, compressor, **options)


def weights():
  weight = np.random.default_rng(1).choice([0, 0.5, 1, 7], (8, 12))
  weight[2, 3] = 0
  return weight.astype(np.float32)


class HalvesTest(parameterized.TestCase):

  @cases.parameters(*modes.MODES)
  @pytest.mark.slow
  def test_around_nothing_it_is_the_compressed_mean(self, mode):
    data = compressions.make_data(8, 12, PARAMS)
    weight = weights()
    data['w'][weight == 0] = np.nan
    random = compression.quantize(4, block=16, stochastic=True)
    some = {
        'sign': (build(update_compressor=SIGN), mean()),
        'random': (
            build(None, random, update_compressor=random),
            mean(random),
        ),
    }
    firsts, seconds = (
        {name: pair[i] for name, pair in some.items()} for i in range(2)
    )

    found = compressions.run(firsts, mode, data, PARAMS, weight)
    expected = compressions.run(seconds, mode, data, PARAMS, weight)

    for name, (updates, state) in found.items():
      chex.assert_trees_all_close(
          (updates, state.mean_state), expected[name], atol=1e-5
      )

  @cases.parameters(*modes.MODES)
  def test_nothing_of_gradients_or_updates_is_lost(self, mode):
    data = compressions.make_data(8, 12, PARAMS)
    # What is sent back is -2 times what the inner transformation is given.
    some = {
        'gradients': build(optax.scale(-2.0)),
        'both': build(optax.scale(-2.0), update_compressor=INT8),
    }

    found = compressions.run(some, mode, data, PARAMS)

    means = data['w'].astype(np.float64).mean(0)
    for updates, state in found.values():
      state = state.mean_state
      total = updates['w'][0].astype(np.float64).sum(0)
      server = state.server_residual['w'].astype(np.float64).ravel()
      total += server[: total.size].reshape(total.shape)
      residual = state.residual['w'].astype(np.float64).mean(0)
      total -= 2 * residual.reshape(total.shape)
      np.testing.assert_allclose(total, -2 * means.sum(0), atol=1e-4)
      bits = updates['w'].view(np.uint8)
      np.testing.assert_array_equal(bits, np.stack([bits[0]] * 8))
    _, state = found['gradients']
    np.testing.assert_array_equal(state.mean_state.server_residual['w'], 0)
    np.testing.assert_array_equal(state.mean_state.step, 12)
    _, state = found['both']
    self.assertTrue(state.mean_state.server_residual['w'].any())

  def test_keeps_dtypes(self):
    params = {'w': jnp.zeros(80, jnp.bfloat16)}
    data = compressions.make_data(8, 2, params)
    seen = []

    def look(updates, _):
      seen.append(updates['w'].dtype)
      return updates

    tx = build(optax.stateless(look), update_compressor=SIGN)
    updates, _ = compressions.run({'tx': tx}, 'vmap', data, params)['tx']

    self.assertEqual(set(seen), {jnp.dtype('bfloat16')})
    self.assertEqual(updates['w'].dtype, jnp.bfloat16)

  def test_padding_does_not_leak(self):
    params = {'w': jnp.zeros(65)}
    data = compressions.make_data(8, 3, params)
    inner = optax.stateless(lambda u, _: jax.tree.map(lambda x: x + 99, u))

    tx = {'tx': build(inner, FLOAT32, update_compressor=SIGN)}
    updates, state = compressions.run(tx, 'shard_map', data, params)['tx']

    # The last slice holds two elements, and its first block six zeros.
    expected = (data['w'][:, 0].mean(0) + 99)[63:].sum() / 8
    np.testing.assert_allclose(updates['w'][:, 0, 64], expected, rtol=1e-5)
    server = state.mean_state.server_residual['w']
    np.testing.assert_array_equal(server.ravel()[65:], 0)


class TrainingTest(parameterized.TestCase):

  @cases.parameters(*modes.MODES)
  def test_trains_as_the_sharded_optimizer(self, mode):
    data = compressions.make_data(8, 12, PARAMS)
    data['w'] += 1
    adam = optax.adam(0.1)
    transformations = {
        'plain': shard_transforms.shard_update(adam, AXIS),
        'exact': build(adam, FLOAT32, update_compressor=FLOAT32),
        'warm': build(adam, SIGN, update_compressor=SIGN, warmup_steps=12),
        'int8': build(adam, INT8, update_compressor=INT8),
    }

    found = compressions.run(
        transformations, mode, data, PARAMS, np.ones((8, 12), np.float32)
    )

    expected, _ = found['plain']
    for name, tolerance in (('exact', 1e-5), ('warm', 1e-6)):
      updates, state = found[name]
      chex.assert_trees_all_close(updates, expected, atol=tolerance)
      np.testing.assert_array_equal(state.mean_state.step, 12)
    total = found['int8'][0]['w'][0].sum(0)
    np.testing.assert_allclose(total, expected['w'][0].sum(0), atol=0.02)

  @cases.parameters(*modes.MODES[:3])
  def test_one_shard_runs_the_optimizer_itself(self, mode):
    data = compressions.make_data(1, 3, PARAMS)
    adam = optax.adam(0.1)
    some = {
        'tx': build(adam, update_compressor=SIGN),
        'adam': optax.chain(shard_transforms.cross_shard_mean(AXIS), adam),
    }

    found = compressions.run(some, mode, data, PARAMS)

    chex.assert_trees_all_equal(found['tx'][0], found['adam'][0])

  @pytest.mark.slow
  def test_guard_keeps_nan_out(self):
    data = compressions.make_data(8, 3, PARAMS)
    data['w'][5, 1, 0, 0] = np.nan
    tx = shard_transforms.guard(
        build(optax.adam(0.1), update_compressor=SIGN),
        AXIS,
        on_bad='exclude',
        min_shards=1,
    )

    updates, state = compressions.run({'tx': tx}, 'vmap', data, PARAMS)['tx']

    self.assertTrue(np.isfinite(updates['w']).all())
    monitoring.check_health(state)
    error = monitoring.compression_error(state)
    self.assertTrue((error > 0).all())

  @pytest.mark.slow
  def test_nothing_is_lost_across_numbers_of_shards(self):
    tx = build(update_compressor=SIGN)
    state = shard_transforms.init_state(tx, PARAMS, modes.mesh(8))
    results, means = 0, []

    for seed, num_shards in enumerate((8, 3, 1)):
      mesh = modes.mesh(num_shards)
      data = compressions.make_data(num_shards, 5, PARAMS, seed)
      state = shard_transforms.resize_state(state, tx, PARAMS, mesh)
      updates, state = compressions.go_on(tx, PARAMS, mesh, state, data)
      results += np.asarray(updates['w'], np.float64).sum(0)
      means.append(np.asarray(data['w'], np.float64).mean(0))
      held = compressions.held_back(state.mean_state, 'w', (7, 19))
      expected = np.concatenate(means).sum(0)
      np.testing.assert_allclose(results + held, expected, atol=1e-4)

    np.testing.assert_array_equal(state.mean_state.server_residual['w'], 0)


class BytesTest(parameterized.TestCase):

  @cases.parameters((None, 4 * 1024), (SIGN, 5 * 1024 / 8))
  def test_sends_the_bytes_of_the_formula(self, update_compressor, back):
    tx = build(optax.adam(0.1), update_compressor=update_compressor)
    grads = jax.ShapeDtypeStruct((8 * 1024,), jnp.float32)

    def step(grads):
      return tx.update(grads, tx.init(grads), grads)[0]

    report = monitoring.wire_report(step, grads, axis_sizes={AXIS: 8})

    # A sign and a half byte of its block's scale for each element.
    self.assertEqual(report.total_bytes, 7 * (5 * 1024 / 8 + back))
    self.assertEqual(report.num_collectives, 2)


class ChoiceTest(parameterized.TestCase):

  @cases.parameters(
      (jnp.zeros((2, 4)), True),
      (jnp.zeros(1), True),
      (jnp.zeros([]), False),
      (jnp.zeros((0, 3)), False),
      (jnp.zeros(8, jnp.complex64), False),
      (None, False),
  )
  def test_compresses_real_leaves_that_are_cut(self, leaf, expected):
    tx = build(min_elements=1)

    state = jax.vmap(lambda _: tx.init([leaf]), axis_name=AXIS)(jnp.zeros(2))

    is_compressed = state.mean_state.residual[0] is not None
    self.assertEqual(is_compressed, expected)


class RefusalTest(parameterized.TestCase):

  def test_refuses_what_is_no_compressor(self):
    for options in (
        dict(compressor='sign'),
        dict(update_compressor=compression.scaled_sign),
    ):
      (name,) = options
      with self.assertRaisesRegex(
          TypeError, f'^`{name}` of `compressed_shard_update` must be'
      ):
        build(**options)

  def test_refuses_an_inner_that_looks_across_elements(self):
    tx = build(optax.lamb(0.1))

    with self.assertRaisesRegex(
        ValueError, '`inner` of `compressed_shard_update` must treat'
    ):
      jax.make_jaxpr(tx.init, axis_env=[(AXIS, 8)])(PARAMS)

  def test_refuses_the_state_of_another(self):
    state = shard_transforms.ShardUpdateState(optax.EmptyState())
    with self.assertRaisesRegex(TypeError, 'a `CompressedShardUpdateState`'):
      build().update(PARAMS, state)
