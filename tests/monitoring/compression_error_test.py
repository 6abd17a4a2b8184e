from absl.testing import parameterized
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

import cases
import compressions
import modes
import shard_transforms
from shard_transforms import compression
from shard_transforms.monitoring import compression_error

AXIS = modes.AXIS


class CompressionErrorTest(parameterized.TestCase):

  @pytest.mark.slow
  def test_is_of_all_residuals_of_each_shard(self):
    params = {'w': jnp.zeros((12, 16)), 'v': jnp.zeros(128), 'b': jnp.zeros(5)}
    sign = compression.compressed_mean(
        AXIS, compression.scaled_sign(8), min_elements=64
    )
    tx = optax.chain(
        optax.partition(
            {'low': compression.power_sgd(AXIS, 1), 'sign': sign},
            {'w': 'low', 'v': 'sign', 'b': 'sign'},
        ),
        optax.scale_by_adam(),
    )
    data = compressions.make_data(8, 3, params)

    _, state = compressions.run({'tx': tx}, 'shard_map', data, params)['tx']
    inner = state[0].inner_states
    low, sign = inner['low'].inner_state, inner['sign'].inner_state
    squares = 0, 0
    for leaf, kept in (('w', low), ('v', sign)):
      residual = np.reshape(kept.residual[leaf], (8, -1))
      last = data[leaf][:, -1].reshape(8, -1)
      squares = (
          squares[0] + (residual**2).sum(1),
          squares[1] + (last**2).sum(1),
      )

    found = compression_error(state)

    np.testing.assert_allclose(
        found, np.sqrt(squares[0] / squares[1]), rtol=1e-5
    )

  @cases.parameters(('data', 'model'), ('model', 'data'))
  @pytest.mark.slow_after(1)
  def test_knows_shards_among_those_of_a_model_axis(self, *names):
    sizes = {'data': 4, 'model': 2}
    mesh = jax.make_mesh([sizes[name] for name in names], names)
    params = {'w': jnp.zeros((24, 16)), 'v': jnp.zeros(128)}
    in_specs = {'w': P('model'), 'v': P()}
    data = compressions.make_data(4, 1, params)
    # So that one shard cannot pass for another.
    data['w'] *= np.float32([1, 3, 10, 30])[:, None, None, None]
    data['w'][:, :, :12] *= 7
    sign = compression.scaled_sign(8)

    for feedback in ('residual', 'ef21'):
      tx = compression.compressed_mean(
          AXIS, sign, feedback=feedback, min_elements=64
      )
      specs = shard_transforms.state_specs(tx, params, mesh, in_specs=in_specs)
      state = shard_transforms.init_state(tx, params, mesh, in_specs=in_specs)

      def shard(state, grads, tx=tx):
        return tx.update({k: grads[k][0, 0] for k in grads}, state)[1]

      grad_specs = {'w': P(AXIS, None, 'model'), 'v': P(AXIS)}
      mapped = jax.shard_map(
          shard, mesh=mesh, in_specs=(specs, grad_specs), out_specs=specs
      )
      placed = jax.tree.map(
          lambda x, spec: jax.device_put(x, jax.NamedSharding(mesh, spec)),
          data,
          grad_specs,
      )
      state = jax.jit(mapped)(state, placed)

      held = getattr(state, 'residual', None)
      if feedback == 'ef21':
        held = {k: data[k][:, 0] - state.estimate[k] for k in data}
      squares = [
          sum(np.square(x).reshape(4, -1).sum(1) for x in tree.values())
          for tree in (jax.device_get(held), data)
      ]
      np.testing.assert_allclose(
          compression_error(state), np.sqrt(squares[0] / squares[1]), rtol=1e-4
      )

    with self.assertRaisesRegex(ValueError, 'order that cannot be told'):
      compression_error(jax.device_get(state))

  def test_is_zero_before_the_first_step(self):
    tx = compression.power_sgd(AXIS, 1)
    data = {'w': np.zeros((8, 1, 12, 16), np.float32)}
    params = {'w': jnp.zeros((12, 16))}

    _, state = compressions.run({'tx': tx}, 'vmap', data, params)['tx']

    np.testing.assert_array_equal(compression_error(state), 0)

  def test_refuses_a_state_without_residuals(self):
    with self.assertRaisesRegex(ValueError, '`state` must hold the residuals'):
      compression_error(optax.sgd(0.1).init(jnp.zeros(3)))
