"""Tests of the selection of leaves, and of the health of the state."""

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

import cases
import modes
import shard_transforms as st
from shard_transforms import monitoring
from shard_transforms.contrib import compression

AXIS = modes.AXIS


class CompressedReductionTest(parameterized.TestCase):

  def test_compresses_large_real_leaves(self):
    large = jnp.zeros(8), jnp.zeros((2, 4), jnp.bfloat16)
    others = jnp.zeros(7), jnp.zeros(80, jnp.complex64), jnp.zeros(80, int)
    tx = compression.compressed_mean(
        AXIS, compression.scaled_sign(), min_elements=8
    )

    init = jax.vmap(lambda _: tx.init((*large, *others, None)), axis_name=AXIS)
    state = jax.eval_shape(init, jnp.zeros(2))

    is_held = [residual is not None for residual in state.residual]
    self.assertEqual(is_held, [True] * 2 + [False] * 4)


class StateTest(parameterized.TestCase):

  def test_health_names_the_shards_that_are_not_finite(self):
    tx = compression.compressed_mean(
        AXIS, compression.scaled_sign(), min_elements=1
    )
    params = {'a': jnp.zeros(2), 'b': jnp.zeros((1, 3)), 'c': jnp.int32(0)}
    state = st.init_state(tx, params, modes.mesh(4))

    monitoring.check_health(state)
    # No update has been sent.
    error = compression.compression_error(state)
    np.testing.assert_array_equal(error, np.zeros(4))
    state.residual['a'] = state.residual['a'].at[3, 0].set(jnp.inf)
    with self.assertRaisesRegex(RuntimeError, r'shards \[3\] are not finite'):
      monitoring.check_health(state)
    state.server_residual['b'] = jnp.full((4, 1, 1), jnp.nan).at[:2].set(0)
    with self.assertRaisesRegex(RuntimeError, r'shards \[2, 3\] are not fin'):
      monitoring.check_health(state)

  @cases.parameters(
      (compression.compressed_mean(AXIS, compression.scaled_sign()),),
      (compression.power_sgd(AXIS, 1),),
  )
  def test_metrics_include_the_step(self, tx):
    state = st.init_state(tx, jnp.zeros(2), modes.mesh(8))

    found = monitoring.metrics(state._replace(step=jnp.int32(3)))

    self.assertEqual([int(x) for x in found.values()], [3])

  def test_norm_is_of_the_last_update_that_is_not_zero(self):
    tx = compression.compressed_mean(
        AXIS, compression.scaled_sign(), min_elements=1
    )

    def shard(update):
      _, state = tx.update(update, tx.init(update))
      return tx.update(0 * update, state)[1].update_norm

    updates = jnp.array([[3.0, 4.0], [0.0, 1.0]])
    norms = jax.jit(jax.vmap(shard, axis_name=AXIS))(updates)

    np.testing.assert_array_equal(norms, [[5], [1]])
