"""The use of weights is tested with the transformations."""

from absl.testing import parameterized
import chex
import jax.numpy as jnp
import numpy as np

import cases
from shard_transforms._src.base import weights


class WeightsTest(parameterized.TestCase):

  @cases.parameters(True, False, np.bool_(True))
  def test_refuses_a_flag(self, flag):
    with self.assertRaisesRegex(
        TypeError, f'`weight` of `caller` must be a real number, got .*{flag}'
    ):
      weights.as_weight(flag, (), 'caller')

  @cases.parameters(np.array, jnp.array)
  def test_arrays_of_booleans_say_what_counts(self, as_array):
    weight = as_array([True, False])

    np.testing.assert_array_equal(
        weights.as_weight(weight, (2,), 'caller'), [1, 0]
    )

  def test_zero_weighs_nothing_even_of_nan(self):
    x = jnp.array([jnp.nan, 2.0])

    chex.assert_trees_all_equal(
        weights.weighing(jnp.float32(0))(x), jnp.zeros(2), strict=True
    )
    np.testing.assert_array_equal(
        weights.weighing(jnp.float32(3))(x), [np.nan, 6]
    )
    self.assertIs(weights.weighing(None)(x), x)

  def test_divides_by_one_in_place_of_zero(self):
    total = jnp.array([0.0, 0.5, 7.0])

    np.testing.assert_array_equal(weights.safe_divisor(total), [1, 0.5, 7])

  @cases.parameters(
      ('mean', 0.0, 0.0), ('mean', 7.0, 7.0), ('sum', 0.0, 0.0), ('sum', 7.0, 1)
  )
  def test_a_sum_uses_weights_up(self, reduction, total, expected):
    left = weights.passed_on(jnp.float32(total), reduction)

    self.assertEqual(left, expected)

  def test_hands_on_only_what_is_given(self):
    self.assertEqual(
        weights.given(weight=None, local_step=0), {'local_step': 0}
    )

  def test_a_link_of_a_chain_takes_no_weight(self):
    weights.check_not_in_chain(None, 'caller')
    with self.assertRaisesRegex(
        ValueError, r'`weight` of `caller` must .*`caller\(num_towers, optax'
    ):
      weights.check_not_in_chain(1.0, 'caller')
