from absl.testing import parameterized
import jax.numpy as jnp
import numpy as np

import cases
from shard_transforms._src.transforms import norm_window


def recorded(steps, window):
  """Returns a window after the norms of shards [steps, shards]."""
  norms = norm_window.start(window)
  for step in np.asarray(steps, np.float32):
    total = sum(norm_window.deviations(norms, norm) for norm in step)
    norms = norm_window.record(norms, total, jnp.float32(len(step)))
  return norms


class SpikesTest(parameterized.TestCase):
  # That shards agree on it is tested through `guard`.

  def test_nothing_is_a_spike_until_the_window_is_full(self):
    steps = np.arange(1.0, 7).reshape(3, 2)

    largest = np.finfo(np.float32).max

    self.assertEqual(norm_window.limit(recorded(steps[:2], 3), 2.0), largest)
    self.assertLess(norm_window.limit(recorded(steps, 3), 2.0), 9)

  @cases.parameters(4, 7, 20)
  def test_limit_is_over_the_last_steps(self, num_steps):
    steps = np.random.default_rng(0).uniform(1, 9, size=(num_steps, 5))

    limit = norm_window.limit(recorded(steps, 4), 2.5)

    last = steps[-4:]
    np.testing.assert_allclose(limit, last.mean() + 2.5 * last.std(), 1e-5)

  def test_keeps_small_deviations_of_large_norms(self):
    steps = 1e4 + np.random.default_rng(0).uniform(-1, 1, size=(9, 5))
    steps = np.asarray(steps, np.float32)

    limit = norm_window.limit(recorded(steps, 4), 1.0)

    last = np.asarray(steps[-4:], np.float64)
    np.testing.assert_allclose(limit - last.mean(), last.std(), rtol=0.05)

  def test_the_same_norms_deviate_by_nothing(self):
    limit = norm_window.limit(recorded(np.full((9, 5), 3.0), 4), 5.0)

    self.assertBetween(limit, 3.0, 3.00001)
