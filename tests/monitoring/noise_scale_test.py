from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

import cases
import modes
import shard_transforms
from shard_transforms import monitoring

AXIS = modes.AXIS
GRADIENT = np.array([1.0, -2.0, 0.5])
DEVIATIONS = np.array([2.0, 0.5, 3.0])


def measured(updates, weight, **kwargs):
  """Returns the state after each of the trials [trials, shards, ...]."""
  tx = monitoring.track_noise_scale(AXIS, decay=0.0)

  def one(update, weight):
    return tx.update(update, tx.init(update), weight=weight)[1]

  in_axes = (0, None if weight is None else 0)
  shards = jax.vmap(one, in_axes, axis_name=AXIS)
  states = jax.jit(jax.vmap(shards, (0, None)))(updates, weight)
  return jax.tree.map(lambda x: np.asarray(x[:, 0], np.float64), states)


class NoiseScaleTest(parameterized.TestCase):

  @cases.parameters(
      ((16,) * 8,), ((1, 2, 3, 40, 5, 6, 7, 8),), ((5, 0, 9),), ((3, 4),)
  )
  def test_estimates_have_no_bias(self, num_examples):
    weight = np.float32(num_examples)
    trials = 20_000
    # The mean over so many examples has that much less variance.
    spread = DEVIATIONS / np.sqrt(np.maximum(weight, 1))[:, None]
    noise = np.random.default_rng(0).normal(size=(trials, len(weight), 3))
    updates = GRADIENT + spread * noise
    updates[:, weight == 0] = np.nan

    state = measured(updates.astype('float32'), weight)

    for found, expected in (
        (state.noise, np.sum(DEVIATIONS**2)),
        (state.gradient_square, np.sum(GRADIENT**2)),
    ):
      error = found.std() / np.sqrt(trials)
      self.assertLess(abs(found.mean() - expected), 4 * error)
      self.assertLess(error, 0.05 * expected)

  def test_without_weights_a_shard_is_an_example(self):
    updates = np.random.default_rng(0).normal(size=(50, 8, 3)).astype('float32')

    alike = measured(updates, None)
    weighted = measured(updates, np.full(8, 32, np.float32))

    np.testing.assert_allclose(32 * alike.noise, weighted.noise, rtol=1e-5)
    np.testing.assert_allclose(
        alike.gradient_square, weighted.gradient_square, rtol=1e-3, atol=1e-6
    )

  @cases.parameters(*modes.MODES)
  def test_averages_both_and_passes_over_what_is_not_finite(self, mode):
    tx = monitoring.track_noise_scale(AXIS, decay=0.5)
    updates = np.random.default_rng(0).normal(size=(8, 4, 3)).astype('float32')
    updates[3, 1] = np.nan

    def fn(params, own):
      state, states = tx.init(params), []
      for step in range(4):
        # The third has no weight but on one shard.
        is_second = jax.lax.axis_index(AXIS) == 2
        weight = jnp.where(is_second | (step != 2), 1.0, 0.0)
        update = shard_transforms.per_shard(own[step], AXIS)
        _, state = tx.update(update, state, params, weight=weight)
        states.append(state)
      return states

    states = modes.map_shards(mode, fn)(jnp.zeros(3), updates)

    first, _, third, last = states
    np.testing.assert_array_equal(last.num_measured, [2] * 8)
    np.testing.assert_array_equal(third.noise, first.noise)
    noise, square = [], []
    for u in updates[:, 0].astype('float64'), updates[:, 3].astype('float64'):
      noise.append(u.var(axis=0, ddof=1).sum())
      square.append(np.sum(u.mean(0) ** 2) - noise[-1] / 8)
    np.testing.assert_allclose(
        last.noise[0], 0.25 * noise[0] + 0.5 * noise[1], rtol=1e-5
    )
    np.testing.assert_allclose(
        last.gradient_square[0],
        0.25 * square[0] + 0.5 * square[1],
        rtol=1e-4,
        atol=1e-5,
    )

  def test_sends_three_numbers_beside_the_mean(self):
    grads = jax.ShapeDtypeStruct((1024,), jnp.float32)

    def sent(tx):
      return monitoring.wire_report(
          lambda u: tx.update(u, tx.init(u))[0], grads, axis_sizes={AXIS: 8}
      ).total_bytes

    mean = shard_transforms.cross_shard_mean(AXIS)
    self.assertEqual(
        sent(monitoring.track_noise_scale(AXIS)), sent(mean) + 12 * 2 * 7 / 8
    )

  def test_is_not_known_of_one_shard(self):
    state = measured(np.ones([1, 1, 3], np.float32), None)

    self.assertEqual((state.num_measured, state.noise_scale), (0, 0))
