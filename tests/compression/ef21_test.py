from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cases
import compressions
import modes
import shard_transforms
from shard_transforms import compression
from shard_transforms import monitoring

AXIS = modes.AXIS
PARAMS = {
    'w': jnp.zeros((7, 19)),
    'half': jnp.zeros(70, jnp.bfloat16),
    'b': jnp.zeros(5),
}


def build(compressor, **options):
  return compression.compressed_mean(
      AXIS, compressor, feedback='ef21', min_elements=64, **options
  )


ALL = {name: build(x) for name, x in compressions.COMPRESSORS.items()}


def assert_known(updates, state, num_shards):
  """Checks that the last result and what is held back are the estimates."""
  for name in ('w', 'half'):
    last = np.asarray(state.mean[name], np.float64)
    last = last.reshape(num_shards, *PARAMS[name].shape)[0]
    np.testing.assert_array_equal(
        np.asarray(last, PARAMS[name].dtype), updates[name][0, -1]
    )
    server = np.asarray(state.server_residual[name], np.float64).ravel()
    server = server[: last.size].reshape(last.shape)
    estimate = np.asarray(state.estimate[name], np.float64)
    estimate = estimate.reshape(num_shards, *last.shape).mean(0)
    np.testing.assert_allclose(last + server, estimate, atol=2e-5)


class EF21Test(parameterized.TestCase):

  @cases.product(num_shards=(8, cases.Repeated(3)), mode=modes.MODES)
  @pytest.mark.slow
  def test_results_are_what_is_known_of_estimates(self, num_shards, mode):
    data = compressions.make_data(num_shards, 12, PARAMS)

    found = compressions.run(ALL, mode, data, PARAMS)

    for name, (updates, state) in found.items():
      with self.subTest(name):
        assert_known(updates, state, num_shards)
        bits = updates['w'].view(np.uint8)
        np.testing.assert_array_equal(bits, np.stack([bits[0]] * num_shards))
        np.testing.assert_allclose(
            updates['b'][0], data['b'].mean(0), atol=1e-6
        )
        last = data['w'][:, -1]
        error = last - np.reshape(state.estimate['w'], last.shape)
        error, last = (
            np.linalg.norm(x.reshape(num_shards, -1), axis=1)
            for x in (error, last)
        )
        np.testing.assert_allclose(
            np.ravel(state.error_norm['w']), error, rtol=1e-4, atol=1e-5
        )
        np.testing.assert_allclose(
            np.ravel(state.update_norm['w']), last, rtol=1e-5
        )

  @pytest.mark.slow
  def test_the_error_of_updates_that_stay_contracts(self):
    params = {'w': jnp.zeros((7, 19))}
    data = compressions.make_data(8, 1, params)
    errors = []
    tx = {'top_k': ALL['top_k'], 'sign': ALL['sign']}

    for steps in (1, 2, 40):
      stay = {'w': np.repeat(data['w'], steps, axis=1)}
      found = compressions.run(tx, 'vmap', stay, params)
      errors.append(
          {
              name: np.square(data['w'][:, 0] - state.estimate['w'][:, 0]).sum()
              for name, (_, state) in found.items()
          }
      )
      last = {name: x['w'][0, -1] for name, (x, _) in found.items()}

    # Of each block of 16 elements, or of 9 in 16, the 4 largest are sent.
    start = np.square(data['w']).sum()
    self.assertLess(errors[0]['top_k'], 0.75 * start)
    self.assertLess(errors[1]['top_k'], 0.75 * errors[0]['top_k'])
    for name in tx:
      self.assertLess(errors[2][name], 1e-3 * start)
      mean = data['w'][:, 0].mean(0)
      error = np.linalg.norm(last[name] - mean)
      self.assertLess(error, 0.1 * np.linalg.norm(mean))

  @cases.parameters('shard_map', 'vmap', 'pmap')
  @pytest.mark.slow
  def test_one_shard_is_the_identity_to_the_bit(self, mode):
    data = compressions.make_data(1, 4, PARAMS)
    data['w'][0, 0, 0, :2] = [-0.0, 3e38]

    found = compressions.run(ALL, mode, data, PARAMS)

    for updates, state in found.values():
      for name, leaf in updates.items():
        np.testing.assert_array_equal(
            leaf.view(np.uint8), data[name].view(np.uint8)
        )
      np.testing.assert_array_equal(state.server_residual['w'], 0)

  def test_warmup_is_the_plain_mean(self):
    data = compressions.make_data(8, 3, PARAMS)
    some = {
        'tx': build(compression.scaled_sign(16), warmup_steps=3),
        'mean': shard_transforms.cross_shard_mean(AXIS),
    }

    found = compressions.run(some, 'shard_map', data, PARAMS)

    for name, leaf in found['mean'][0].items():
      np.testing.assert_array_equal(found['tx'][0][name], leaf)
    np.testing.assert_array_equal(found['tx'][1].estimate['w'], 0)

  @pytest.mark.slow
  def test_goes_on_with_another_number_of_shards(self):
    tx = build(compression.quantize(8, block=16))
    state = shard_transforms.init_state(tx, PARAMS, modes.mesh(8))

    for num_shards in (8, 3, 8):
      data = compressions.make_data(num_shards, 4, PARAMS, seed=num_shards)
      mesh = modes.mesh(num_shards)
      state = shard_transforms.resize_state(state, tx, PARAMS, mesh)
      updates, state = compressions.go_on(tx, PARAMS, mesh, state, data)
      updates = jax.tree.map(lambda x: np.asarray(x)[None], updates)
      mean = {k: None if x is None else x for k, x in state.mean.items()}
      repeated = {
          k: None if x is None else np.stack([x] * num_shards)
          for k, x in mean.items()
      }
      assert_known(updates, state._replace(mean=repeated), num_shards)

  @pytest.mark.slow
  def test_guard_keeps_nan_out(self):
    data = compressions.make_data(8, 3, PARAMS)
    data['w'][5, 1, 0, 0] = np.nan
    tx = {'tx': shard_transforms.guard(ALL['sign'], AXIS)}

    updates, state = compressions.run(tx, 'shard_map', data, PARAMS)['tx']

    np.testing.assert_array_equal(updates['w'][:, 1], 0)
    monitoring.check_health(state)
    error = monitoring.compression_error(state)
    self.assertTrue(((error > 0) & (error < 2)).all())

  def test_refuses_weights(self):
    def shard(grads):
      state = ALL['sign'].init(grads)
      return ALL['sign'].update(grads, state, weight=1.0)

    message = "`weight` of `compressed_mean` must be left out .*='ef21'`, got 1"
    with self.assertRaisesRegex(ValueError, message):
      jax.make_jaxpr(shard, axis_env=[(AXIS, 8)])(PARAMS)

  def test_refuses_the_state_of_the_other_feedback(self):
    other = compression.compressed_mean(
        AXIS, compression.scaled_sign(16), min_elements=64
    )

    def shard(grads):
      return ALL['sign'].update(grads, other.init(grads))

    with self.assertRaisesRegex(TypeError, 'must be a `EF21State`'):
      jax.make_jaxpr(shard, axis_env=[(AXIS, 8)])(PARAMS)
