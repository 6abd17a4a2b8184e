from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import cases
import modes
import shard_transforms
from shard_transforms import monitoring

AXIS = modes.AXIS
GRADIENT = np.array([1.0, -2.0, 0.5])
DEVIATIONS = np.array([2.0, 0.5, 3.0])
TRIALS = 20_000


def measured(updates, weight, **kwargs):
  """Returns the state after each of the trials [trials, shards, ...]."""
  tx = monitoring.track_noise_scale(AXIS, decay=0.0)

  def one(update, weight):
    return tx.update(update, tx.init(update), weight=weight)[1]

  in_axes = (0, None if weight is None else 0)
  shards = jax.vmap(one, in_axes, axis_name=AXIS)
  states = jax.jit(jax.vmap(shards, (0, None)))(updates, weight)
  return jax.tree.map(lambda x: np.asarray(x[:, 0], np.float64), states)


def of_towers(updates, weight, *links, mask=None):
  """Returns the state after a window of each trial.

  Args:
    updates: [trials, shards, towers, ...]
    weight: [shards, towers].
    links: What is before.
    mask: Which leaves it sees.
  """
  tracker = monitoring.track_noise_scale(AXIS, decay=0.0)
  if mask is not None:
    others = jax.tree.map(lambda is_seen: not is_seen, mask)
    mean = shard_transforms.cross_shard_mean(AXIS)
    tracker = optax.chain(
        optax.masked(tracker, mask), optax.masked(mean, others)
    )
  tx = shard_transforms.tower_reduce(
      weight.shape[1], optax.chain(*links, tracker), axis_name=AXIS
  )

  def one(towers, weight):
    state = tx.init(jax.tree.map(lambda x: x[0], towers))
    for i in range(len(weight)):
      tower = jax.tree.map(lambda x, i=i: x[i], towers)
      _, state = tx.update(tower, state, weight=weight[i])
    return optax.tree_utils.tree_get(state, 'NoiseScaleState')

  shards = jax.vmap(one, axis_name=AXIS)
  states = jax.jit(jax.vmap(shards, (0, None)))(updates, weight)
  return jax.tree.map(lambda x: np.asarray(x[:, 0], np.float64), states)


def simulated(num_examples):
  """Returns means over so many examples each, [trials, *, 3]."""
  # The mean over so many examples has that much less variance.
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

  @cases.parameters(
      ((16,) * 8,), ((1, 2, 3, 40, 5, 6, 7, 8),), ((5, 0, 9),), ((3, 4),)
  )
  def test_estimates_have_no_bias(self, num_examples):
    updates = simulated(np.array(num_examples))

    state = measured(updates, np.float32(num_examples))

    assert_unbiased(state)

  @cases.parameters(
      (np.full((4, 3), 16),),
      (np.array([[1, 2, 3], [40, 5, 0], [7, 8, 9], [2, 0, 4]]),),
      (np.array([[3, 4, 5]]),),
  )
  @pytest.mark.slow_after(1)
  def test_each_tower_of_each_shard_is_a_small_batch(self, num_examples):
    updates = simulated(num_examples)

    state = of_towers(updates, np.float32(num_examples))

    degrees = np.sum(num_examples > 0) - 1
    assert_unbiased(state)
    # Of normal updates, the estimate is a sum of squares of so many.
    spread = np.sqrt(2 * np.sum(DEVIATIONS**4) / degrees)
    self.assertLess(abs(state.noise.std() / spread - 1), 0.05)

  @cases.parameters('changed', 'masked')
  @pytest.mark.slow_after(1)
  def test_where_the_mean_of_towers_is_changed_a_shard_is_one(self, way):
    num_examples = np.full((4, 3), 16)
    updates = simulated(num_examples)

    if way == 'changed':
      state = of_towers(updates, np.float32(num_examples), optax.scale(2.0))
      expected = measured(2 * updates.mean(2), np.full(4, 48, np.float32))
    else:
      halves = {'seen': updates[..., :2], 'unseen': 9 + updates[..., 2:]}
      mask = {'seen': True, 'unseen': False}
      state = of_towers(halves, np.float32(num_examples), mask=mask)
      expected = measured(updates[..., :2].mean(2), np.full(4, 48, np.float32))

    np.testing.assert_allclose(state.noise, expected.noise, rtol=1e-2)

  @cases.product(mode=modes.MODES, weighted=(cases.Repeated(False), True))
  def test_towers_are_those_of_numpy(self, mode, weighted):
    rng = np.random.default_rng(0)
    updates = rng.normal(size=(8, 2, 3, 5)).astype('float32')
    weight = np.float32(rng.integers(1, 9, size=(8, 2, 3)))
    if weighted:
      # One that does not count may be anything.
      weight[3, 1, 2], updates[3, 1, 2] = 0, np.nan
    else:
      weight = np.full((8, 2, 3), 1 / 3, np.float32)
    tx = shard_transforms.tower_reduce(
        3, monitoring.track_noise_scale(AXIS, decay=0.0), axis_name=AXIS
    )

    def fn(params, own):
      state = tx.init(params)
      for window in range(2):
        for tower in range(3):
          update = shard_transforms.per_shard(own[0][window, tower], AXIS)
          given = own[1][window, tower] if weighted else None
          found, state = tx.update(update, state, params, weight=given)
      return found, state.inner_state

    found, state = modes.map_shards(mode, fn)(jnp.zeros(5), (updates, weight))

    u = updates[:, 1].reshape(24, 5).astype('float64')
    w = weight[:, 1].reshape(24).astype('float64')
    u, w = u[w > 0], w[w > 0]
    mean = w @ u / w.sum()
    noise = w @ np.sum((u - mean) ** 2, axis=1) / (len(w) - 1)
    np.testing.assert_allclose(found[0], mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(state.noise, [noise] * 8, rtol=1e-5)
    np.testing.assert_array_equal(state.num_measured, [2] * 8)

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
