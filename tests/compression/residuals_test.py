from absl.testing import parameterized
import jax.numpy as jnp
import numpy as np

from shard_transforms._src.compression import residuals


class ResidualsTest(parameterized.TestCase):

  def test_names_the_shards_that_are_not_finite(self):
    tree = {'a': np.zeros((4, 2)), 'b': np.zeros((4, 1, 3)), 'c': None}

    self.assertIsNone(residuals.problem(tree))
    tree['b'][2, 0, 1] = np.nan
    tree['a'][3, 0] = np.inf
    self.assertRegex(residuals.problem(tree), r'shards \[2, 3\] are not finite')

  def test_squares_are_of_each_shard(self):
    tree = {'a': jnp.array([[3.0, 4.0], [0.0, 1.0]]), 'b': jnp.ones((2, 1))}

    of_residual, of_update = residuals.squares(tree, jnp.array([2.0, 3.0]))

    np.testing.assert_array_equal(of_residual, [26, 2])
    np.testing.assert_array_equal(of_update, [4, 9])

  def test_norm_is_of_all_arrays(self):
    self.assertEqual(residuals.norm([jnp.full(4, 3.0), jnp.full((), 8.0)]), 10)
    self.assertEqual(residuals.norm([]), 0)
