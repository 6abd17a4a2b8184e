from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

import cases
from shard_transforms import tf1
from shard_transforms._src.tf1 import optimizers

RNG = np.random.default_rng(0)
PARAMS = {
    'w': RNG.normal(size=(2, 3, 4)).astype(np.float32),
    'b': RNG.normal(size=3).astype(np.float32),
    's': np.float32(0.5),
}
GRADS = jax.tree.map(lambda x: np.float32(0.5) * x + 0.3, PARAMS)


def first(**options):
  tx = tf1.adafactor(0.5, 0.75, **options)
  return jax.jit(tx.update)(GRADS, tx.init(PARAMS), PARAMS)


def rms(x):
  return np.sqrt(np.mean(x * x))


class AdafactorTest(parameterized.TestCase):

  def test_keeps_rows_and_columns_of_the_last_two_dimensions(self):
    _, state = first()

    square = GRADS['w'] ** 2
    chex.assert_trees_all_close(
        (state.vr['w'], state.vc['w']),
        (square.mean(-1) / 4, square.mean(-2) / 4),
        rtol=1e-5,
    )
    self.assertIsNone(state.v['w'])
    self.assertIsNone(state.vr['b'])
    chex.assert_trees_all_close(
        (state.v['b'], state.v['s']),
        (GRADS['b'] ** 2 / 4, GRADS['s'] ** 2 / 4),
        rtol=1e-5,
    )

  @cases.product(scale=(True, False), clip=(None, 1.5))
  def test_updates_are_clipped_and_scaled(self, scale, clip):
    updates, _ = first(
        multiply_by_parameter_scale=scale, clipping_threshold=clip
    )

    square = GRADS['w'] ** 2
    rows, columns = square.mean(-1) / 4, square.mean(-2) / 4
    rows /= rows.mean(-1, keepdims=True)
    factored = GRADS['w'] / np.sqrt(rows[..., None] * columns[..., None, :])
    by_leaf = {
        'w': factored,
        'b': 2 * np.sign(GRADS['b']),
        's': 2 * np.sign(GRADS['s']),
    }
    for name, x in by_leaf.items():
      if clip is not None:
        x = x / max(1, rms(x) / clip)
      x = -0.5 * x * (rms(PARAMS[name]) if scale else 1)
      chex.assert_trees_all_close(
          updates[name], jnp.float32(x), rtol=1e-5, strict=True
      )

  def test_is_not_factored_if_so_told(self):
    _, state = first(factored=False)

    self.assertIsNone(state.vr['w'])
    chex.assert_shape(state.v['w'], (2, 3, 4))

  def test_small_parameters_count_as_larger(self):
    tx = tf1.adafactor(0.5, 0.0, epsilon2=0.25)
    zero = jnp.zeros(())

    updates, _ = tx.update(jnp.float32(3), tx.init(zero), zero)

    chex.assert_trees_all_close(updates, jnp.float32(-0.125), strict=True)

  def test_momentum_holds_the_rate(self):
    tx = tf1.adafactor(0.5, 0.75, beta1=0.75)

    updates, state = tx.update(GRADS, tx.init(PARAMS), PARAMS)

    plain, _ = first()
    expected = jax.tree.map(lambda x: x / 4, plain)
    chex.assert_trees_all_close(updates, expected, rtol=1e-6)
    chex.assert_trees_all_close(
        state.m, jax.tree.map(lambda x: -x, updates), strict=True
    )

  def test_usual_rates_fall_with_the_step(self):
    rates = optimizers.default_rate(jnp.float32([0, 99, 39999]))
    decays = optimizers.default_decay_rate(jnp.float32([0, 31]))

    chex.assert_trees_all_close(rates, jnp.float32([0.01, 0.01, 0.005]))
    chex.assert_trees_all_close(decays, jnp.float32([0, 0.9375]), rtol=1e-6)
