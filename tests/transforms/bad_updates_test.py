"""The joint decision of shards is tested in guard_test."""

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
