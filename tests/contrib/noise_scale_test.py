"""Tests of `track_noise_scale`: bias, weights, towers and communication."""

from absl.testing import parameterized
import chex
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

import cases
import lying_shards
import modes
import shard_transforms as st
from shard_transforms import contrib
from shard_transforms import monitoring

AXIS = modes.AXIS
GRADIENT = np.array([1.0, -2.0, 0.5])
DEVIATIONS = np.array([2.0, 0.5, 3.0])
TRIALS = 20_000


def measured(updates, weight, **kwargs):
  """Returns the state after each trial of [trials, shards, ...]."""
  tx = contrib.track_noise_scale(AXIS, decay=0.0)

  def one(update, weight):
    return tx.update(update, tx.init(update), weight=weight)[1]

  in_axes = (0, None if weight is None else 0)
  shards = jax.vmap(one, in_axes, axis_name=AXIS)
  states = jax.jit(jax.vmap(shards, (0, None)))(updates, weight)
  return jax.tree.map(lambda x: np.asarray(x[:, 0], np.float64), states)


def simulated(num_examples):
  """Returns means over these numbers of examples, [trials, *, 3]."""
  # The variance of a mean is inversely proportional to the number of examples.
  spread = DEVIATIONS / np.sqrt(np.maximum(num_examples, 1))[..., None]
  size = (TRIALS, *num_examples.shape, 3)
  updates = GRADIENT + spread * np.random.default_rng(0).normal(size=size)
  updates[:, num_examples == 0] = np.nan
  return updates.astype('float32')


def assert_unbiased(state):
  for found, expected in (
      (state.noise, np.sum(DEVIATIONS**2)),
      (state.gradient_square, np.sum(GRADIENT**2)),
  ):
    error = found.std() / np.sqrt(TRIALS)
    assert abs(found.mean() - expected) < 4 * error, (found.mean(), expected)
    assert error < 0.05 * expected, error


class NoiseScaleTest(parameterized.TestCase):

  @cases.parameters(((1, 2, 3, 40, 5, 6, 7, 8),), ((5, 0, 9),))
  def test_estimates_are_unbiased(self, num_examples):
    updates = simulated(np.array(num_examples))

    state = measured(updates, np.float32(num_examples))

    assert_unbiased(state)

  def test_the_towers_of_a_shard_count_as_one_batch(self):
    updates = simulated(np.full((4, 3), 16))[:100]
    tx = st.tower_reduce(
        3, contrib.track_noise_scale(AXIS, decay=0.0), axis_name=AXIS
    )

    def one(towers):
      state = tx.init(towers[0])
      for tower in towers:
        _, state = tx.update(tower, state, weight=16.0)
      return state.inner_state.noise

    shards = jax.vmap(one, axis_name=AXIS)
    noise = jax.jit(jax.vmap(shards))(updates)[:, 0]

    expected = measured(updates.mean(2), np.full(4, 48, np.float32))
    np.testing.assert_allclose(noise, expected.noise, rtol=1e-3)

  def test_without_weights_a_shard_counts_as_one_example(self):
    updates = np.random.default_rng(0).normal(size=(50, 8, 3)).astype('float32')

    unweighted = measured(updates, None)
    weighted = measured(updates, np.full(8, 32, np.float32))

    np.testing.assert_allclose(32 * unweighted.noise, weighted.noise, rtol=1e-5)
    np.testing.assert_allclose(
        unweighted.gradient_square,
        weighted.gradient_square,
        rtol=1e-3,
        atol=1e-6,
    )

  def test_averages_estimates_and_skips_non_finite_steps(self):
    tx = contrib.track_noise_scale(AXIS, decay=0.5)
    updates = np.random.default_rng(0).normal(size=(8, 4, 3)).astype('float32')
    updates[3, 1] = np.nan

    def fn(params, own):
      state, states = tx.init(params), []
      for step in range(4):
        # In the third step, only one shard has a weight.
        is_second = jax.lax.axis_index(AXIS) == 2
        weight = jnp.where(is_second | (step != 2), 1.0, 0.0)
        update = st.per_shard(own[step], AXIS)
        _, state = tx.update(update, state, params, weight=weight)
        states.append(state)
      return states

    states = modes.map_shards('shard_map', fn)(jnp.zeros(3), updates)

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

  def test_sends_three_values_in_addition_to_the_mean(self):
    grads = jax.ShapeDtypeStruct((1024,), jnp.float32)

    def sent(tx):
      return monitoring.communication_report(
          lambda u: tx.update(u, tx.init(u))[0], grads, axis_sizes={AXIS: 8}
      ).total_bytes

    mean = st.cross_shard_mean(AXIS)
    self.assertEqual(
        sent(contrib.track_noise_scale(AXIS)), sent(mean) + 12 * 2 * 7 / 8
    )

  def test_updates_have_the_bits_of_the_reduction(self):
    mean = st.cross_shard_mean(AXIS)
    median = st.contrib.coordinate_median(AXIS)
    track = contrib.track_noise_scale
    updates = {**lying_shards.tree(), 'half': np.ones([8, 3], jnp.bfloat16)}

    def fn(params, own):
      def run(tx):
        return tx.update(own[0], tx.init(params), params, weight=own[1])[0]

      own = st.per_shard(own, AXIS)
      pairs = [
          (track(AXIS), mean),
          (track(AXIS, mean), mean),
          (track(AXIS, median), median),
      ]
      return [list(map(run, pair)) for pair in pairs]

    weight = np.float32([3, 0, 1, 0, 2, 1, np.nan, 0.5])
    params = jax.tree.map(lambda x: x[0], updates)
    for found, expected in modes.map_shards('shard_map', fn)(
        params, (updates, weight)
    ):
      chex.assert_trees_all_equal(found, expected, strict=True)

  @cases.parameters(
      (dict(inner=0.9), TypeError, '`inner` of .* must be an Optax'),
      (dict(decay=1.0), ValueError, '`decay` must be at least 0 and'),
      (dict(decay='fast'), TypeError, '`decay` must be a real number'),
  )
  def test_refuses_argument(self, kwargs, error, words):
    with self.assertRaisesRegex(error, words):
      contrib.track_noise_scale(AXIS, **kwargs)

  def test_refuses_another_state_and_integer_results(self):
    def vote(updates, state, params=None):
      del params
      return jnp.sign(lax.psum(updates, AXIS)).astype(jnp.int8), state

    def fn(params, update):
      tx = contrib.track_noise_scale(AXIS)
      with self.assertRaisesRegex(TypeError, '`state` of .* must be a'):
        tx.update(update, optax.EmptyState(), params)
      votes = optax.GradientTransformation(optax.identity().init, vote)
      tx = contrib.track_noise_scale(AXIS, votes)
      with self.assertRaisesRegex(TypeError, '`updates` of .* got int8'):
        tx.update(update, tx.init(params), params)
      return params

    modes.map_shards('shard_map', fn)(jnp.zeros(3), np.ones([8, 3]))
