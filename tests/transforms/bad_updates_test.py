"""That shards decide together is tested in guard_test."""

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

import cases
from shard_transforms._src.transforms import bad_updates


def judged(updates):
  return bad_updates.judge(None, (), updates, None, (), None)


class JudgementTest(parameterized.TestCase):

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
    judgement = judged(updates)

    self.assertEqual(judgement.is_healthy, expected)
    self.assertEqual(judgement.tally.size, 0)

  @cases.parameters(
      ('nan', np.nan, False),
      ('infinity', np.inf, False),
      ('minus infinity', -np.inf, False),
      # The sum of these is infinite.
      ('largest', np.finfo(np.float32).max, True),
  )
  def test_finds_one_among_many(self, _, element, expected):
    updates = jnp.full(70_000, np.finfo(np.float32).max)

    is_healthy = jax.jit(lambda x: judged(x).is_healthy)(
        updates.at[65_537].set(element)
    )

    self.assertEqual(is_healthy, expected)
