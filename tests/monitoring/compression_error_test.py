from absl.testing import parameterized
import jax.numpy as jnp
import numpy as np
import optax

import compressions
import modes
from shard_transforms import compression
from shard_transforms.monitoring import compression_error

AXIS = modes.AXIS


class CompressionErrorTest(parameterized.TestCase):

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

  def test_is_zero_before_the_first_step(self):
    tx = compression.power_sgd(AXIS, 1)
    data = {'w': np.zeros((8, 1, 12, 16), np.float32)}
    params = {'w': jnp.zeros((12, 16))}

    _, state = compressions.run({'tx': tx}, 'vmap', data, params)['tx']

    np.testing.assert_array_equal(compression_error(state), 0)

  def test_refuses_a_state_without_residuals(self):
    with self.assertRaisesRegex(ValueError, '`state` must hold the residuals'):
      compression_error(optax.sgd(0.1).init(jnp.zeros(3)))
