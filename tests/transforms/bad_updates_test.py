"""That shards decide together is tested in guard_test."""

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

import cases
from shard_transforms._src.transforms import bad_updates

NO_LIMITS = bad_updates.Limits(max_norm=None, max_stds=None, window=2)


class DiagnosisTest(parameterized.TestCase):

  @cases.parameters(
      ({}, True),
      ({'a': np.ones(3), 'b': None}, True),
      ({'a': np.ones((0, 2))}, True),
      ({'a': np.zeros(3, jax.dtypes.float0)}, True),
      ({'a': np.ones(3), 'b': np.array([1, np.nan])}, False),
      ({'a': np.array(-np.inf)}, False),
      ({'a': jnp.array([1, jnp.inf], jnp.bfloat16)}, False),
      ({'a': np.array([1, 1j * np.nan])}, False),
  )
  def test_looks_at_each_element(self, updates, expected):
    diagnosis = bad_updates.diagnose(updates, (), NO_LIMITS, (), None)

    self.assertEqual(diagnosis.is_healthy, expected)
    self.assertEmpty(diagnosis.deviations)

  @cases.parameters(
      ('nan', np.nan, False),
      ('infinity', np.inf, False),
      ('minus infinity', -np.inf, False),
      # The sum of these is infinite.
      ('largest', np.finfo(np.float32).max, True),
  )
  def test_finds_one_among_many(self, _, element, expected):
    updates = jnp.full(70_000, np.finfo(np.float32).max)

    is_healthy = jax.jit(
        lambda x: bad_updates.diagnose(x, (), NO_LIMITS, (), None).is_healthy
    )(updates.at[65_537].set(element))

    self.assertEqual(is_healthy, expected)

  @cases.parameters((4.9, False), (5.0, True))
  def test_compares_the_norm_with_the_largest(self, max_norm, expected):
    limits = bad_updates.Limits(max_norm, max_stds=None, window=2)
    updates = {'a': jnp.array([3.0]), 'b': jnp.array([4.0])}

    diagnosis = bad_updates.diagnose(updates, (), limits, (), None)

    self.assertEqual(diagnosis.is_healthy, expected)

  def test_limits_fit_the_norms_that_they_start(self):
    limits = bad_updates.Limits(max_norm=None, max_stds=3.0, window=5)

    limits.check_fits(limits.start())
    with self.assertRaisesRegex(ValueError, 'norms of 5 steps .* those of 0'):
      limits.check_fits(NO_LIMITS.start())


def recorded(steps, window):
  """Returns a window after the norms of shards [steps, shards]."""
  limits = bad_updates.Limits(max_norm=None, max_stds=1.0, window=window)
  norms = limits.start()
  for step in np.asarray(steps, np.float32):
    deviations = zip(*map(norms.deviations, step), strict=True)
    norms = norms.record(list(map(sum, deviations)), jnp.float32(len(step)))
  return norms


class SpikesTest(parameterized.TestCase):
  # That shards agree on it is tested through `guard`.

  def test_nothing_is_a_spike_until_the_window_is_full(self):
    steps = np.arange(1.0, 7).reshape(3, 2)

    largest = np.finfo(np.float32).max

    self.assertEqual(recorded(steps[:2], 3).limit(2.0), largest)
    self.assertLess(recorded(steps, 3).limit(2.0), 9)

  @cases.parameters(4, 7, 20)
  def test_limit_is_over_the_last_steps(self, num_steps):
    steps = np.random.default_rng(0).uniform(1, 9, size=(num_steps, 5))

    limit = recorded(steps, 4).limit(2.5)

    last = steps[-4:]
    np.testing.assert_allclose(limit, last.mean() + 2.5 * last.std(), 1e-5)

  def test_keeps_small_deviations_of_large_norms(self):
    steps = 1e4 + np.random.default_rng(0).uniform(-1, 1, size=(9, 5))
    steps = np.asarray(steps, np.float32)

    limit = recorded(steps, 4).limit(1.0)

    last = np.asarray(steps[-4:], np.float64)
    np.testing.assert_allclose(limit - last.mean(), last.std(), rtol=0.05)

  def test_the_same_norms_deviate_by_nothing(self):
    limit = recorded(np.full((9, 5), 3.0), 4).limit(5.0)

    self.assertBetween(limit, 3.0, 3.00001)
