"""What shards make of it together is in guard_test."""

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

from shard_transforms._src.transforms import bad_updates


class SymptomsTest(parameterized.TestCase):

  @parameterized.parameters(
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
    self.assertEqual(bad_updates.are_finite(updates, ()), expected)

  def test_puts_zeros_in_place_of_what_is_bad(self):
    updates = {
        'a': jnp.array([1.0, jnp.nan]),
        'b': None,
        'f': np.zeros(3, jax.dtypes.float0),
    }

    bad, good = (
        bad_updates.zero_if(jnp.asarray(x), updates) for x in (True, False)
    )

    chex.assert_trees_all_equal(good['a'], updates['a'], strict=True)
    np.testing.assert_array_equal(bad['a'], [0, 0])
    self.assertIs(bad['f'], updates['f'])

  def test_no_axis_is_sliced_over_without_a_map(self):
    self.assertEqual(bad_updates.sliced_over({'a': jnp.ones(2)}, (), None), ())
