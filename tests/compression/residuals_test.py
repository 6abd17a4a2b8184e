from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

import cases
import shard_transforms
from shard_transforms import compression
from shard_transforms import monitoring
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

    norms = {'a': jnp.array([2.0, 3.0]), 'b': jnp.array([1.0, 0.0])}

    np.testing.assert_array_equal(residuals.squares(tree), [26, 2])
    found = residuals.norm_squares(norms, tree)
    np.testing.assert_array_equal(found, [5, 9])
    self.assertIsNone(residuals.squares({'a': None}))
    self.assertIsNone(residuals.norm_squares({'a': None}, {'a': None}))

  def test_norm_is_of_the_last_update_that_is_not_zero(self):
    update = jnp.array([3.0, 4.0])

    self.assertEqual(residuals.next_norm(jnp.float32(2), update), 5)
    self.assertEqual(residuals.next_norm(jnp.float32(2), 0 * update), 2)

  @cases.parameters(
      (compression.compressed_mean('data', compression.cast('bfloat16')),),
      (compression.power_sgd('data', 1),),
  )
  def test_metrics_tell_the_steps(self, tx):
    mesh = jax.make_mesh((8,), ('data',))
    state = shard_transforms.init_state(tx, jnp.zeros(2), mesh)

    found = monitoring.metrics(state._replace(step=jnp.int32(3)))

    self.assertEqual([int(x) for x in found.values()], [3])
