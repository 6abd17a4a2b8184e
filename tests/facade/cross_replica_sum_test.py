import chex
import jax.numpy as jnp
import numpy as np

import cases
import facade_cases
from shard_transforms import facade

X = np.arange(8, dtype=np.float32)


class CrossReplicaSumTest(facade_cases.GraphTest):

  def sums(self, groups=None):
    found = facade.shard(
        lambda x: facade.cross_replica_sum(x, groups), [X], num_shards=4
    )
    return found[0]

  def test_sums_over_shards(self):
    self.assert_equal(self.sums(), jnp.tile(jnp.float32([12, 16]), 4))

  @cases.parameters(list, np.array)
  def test_sums_over_groups(self, kind):
    found = self.sums(kind([[0, 1], [2, 3]]))

    self.assert_equal(found, jnp.float32([2, 4, 2, 4, 10, 12, 10, 12]))

  @cases.parameters(([[0, 1, 2], [3]], 'equal size'), ([[0, 1]], 'range'))
  def test_refuses_what_cross_shard_optimizer_refuses(self, groups, message):
    with self.assertRaisesRegex(ValueError, f'group_assignment.*{message}'):
      self.sums(groups)

  def test_one_shard_keeps_its_array(self):
    self.assert_equal(
        facade.shard(facade.cross_replica_sum, [X]), [jnp.asarray(X)]
    )

  def test_counts_what_is_the_same_on_all_shards_for_each(self):
    w = facade.Variable(2.0)

    (found,) = facade.shard(
        lambda x: facade.cross_replica_sum(w) + 0 * x, [X[:4]], num_shards=4
    )

    self.assert_equal(found, jnp.full(4, 8.0))

  def test_needs_shards(self):
    with self.assertRaisesRegex(ValueError, '`cross_replica_sum` must be used'):
      facade.cross_replica_sum(X)

  def test_gradients_flow_through_statistics_of_the_whole_batch(self):
    x = np.random.default_rng(0).normal(size=16).astype(np.float32)

    def train(num_shards):
      w = facade.Variable(1.5)
      opt = facade.CrossShardOptimizer(facade.GradientDescentOptimizer(0.1))

      def computation(x):
        def loss():
          y = jnp.tanh(w * x)
          mean = facade.cross_replica_sum(jnp.mean(y)) / num_shards
          square = facade.cross_replica_sum(jnp.mean(y * y)) / num_shards
          z = (y - mean) / jnp.sqrt(square - mean * mean + 1e-3)
          return jnp.mean(jnp.sin(z) * x)

        opt.minimize(loss, var_list=[w])

      facade.shard(computation, [x], num_shards=num_shards)
      return w.value()

    chex.assert_trees_all_close(train(4), train(1), rtol=1e-5)
    self.assertGreater(abs(float(train(1)) - 1.5), 1e-4)
