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

  @cases.product(
      dtype=(
          'bfloat16',
          'float16',
          'float32',
          'float64',
          'complex64',
          'complex128',
      ),
      element=(None, np.nan, np.inf, -np.inf, 'imaginary'),
  )
  def test_judges_all_dtypes_and_no_sum_overflows(self, dtype, element):
    with jax.enable_x64(True):
      # So many that their sum is infinite in each dtype.
      updates = jnp.full(1000, jnp.finfo(dtype).max, dtype)
      if element == 'imaginary' and jnp.iscomplexobj(updates):
        updates = updates.at[500].set(complex(1, np.inf))
      elif element not in (None, 'imaginary'):
        updates = updates.at[500].set(element)
      finite = bool(jnp.isfinite(updates).all())

      is_healthy = jax.jit(lambda x: judged(x).is_healthy)({'a': updates})

    is_real = not dtype.startswith('complex')
    expected = element is None or (element == 'imaginary' and is_real)
    self.assertEqual((finite, bool(is_healthy)), (expected, expected))

  @cases.parameters((1e38, True), (np.inf, False))
  def test_sums_of_leaves_do_not_overflow(self, last, expected):
    updates = [jnp.full(9, 1e38) for _ in range(9)] + [jnp.float32(last)]

    self.assertEqual(judged(updates).is_healthy, expected)
