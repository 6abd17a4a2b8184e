from absl.testing import absltest
from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np

from shard_transforms import facade
from shard_transforms.facade import frames
from shard_transforms.facade import shards


def setUpModule():
  chex.assert_devices_available(8, 'cpu')


class MapVariablesTest(parameterized.TestCase):

  def setUp(self):
    super().setUp()
    self.enterContext(facade.Graph().as_default())

  def test_variables_are_read_and_assigned(self):
    w = facade.Variable([1.0, 2.0])
    step = facade.get_or_create_global_step()

    def computation(x):
      w.assign_add(x.mean() * 0 + w)
      step.assign_add(1)
      return x * w[1]

    # The variable has been assigned what is the same on all shards.
    def reduced(x):
      w.assign_add(jax.lax.pmean(x.sum(), 'shard') * jnp.ones(2))
      step.assign_add(1)
      return x * w[1]

    with self.assertRaisesRegex(ValueError, "'Variable:0' would differ"):
      facade.shard(computation, [jnp.arange(4.0)], 4)
    chex.assert_trees_all_equal(w.value(), jnp.array([1.0, 2.0]))
    self.assertEqual(int(step), 0)

    (out,) = facade.shard(reduced, [jnp.arange(4.0)], 4)

    chex.assert_trees_all_equal(w.value(), jnp.array([2.5, 3.5]), strict=True)
    chex.assert_trees_all_equal(out, 3.5 * jnp.arange(4.0), strict=True)
    self.assertEqual(int(step), 1)

  def test_an_optimizer_that_does_not_reduce_is_refused(self):
    w = facade.Variable(1.0, name='w')
    opt = facade.GradientDescentOptimizer(0.1)

    with self.assertRaisesRegex(
        ValueError, "'w:0' would differ between the shards"
    ):
      facade.shard(
          lambda x: opt.minimize(lambda: (w * x).sum()), [jnp.arange(4.0)], 4
      )
    self.assertEqual(float(w), 1.0)

  def test_weights_that_were_trained_on_fewer_shards_go_on(self):
    w = facade.Variable(0.0)
    opt = facade.CrossShardOptimizer(facade.MomentumOptimizer(1.0, 0.5))

    def computation(x):
      opt.minimize(lambda: jnp.mean(w * x))

    for num_shards in (2, 8, 1, 4):
      facade.shard(computation, [jnp.ones(8)], num_shards)

    self.assertEqual(float(w), -(1 + 1.5 + 1.75 + 1.875))

  def parted(self, num_shards=4):
    w = facade.Variable(0.0, name='w')
    opt = facade.CrossShardOptimizer(
        facade.GradientDescentOptimizer(1.0),
        group_assignment=np.arange(num_shards).reshape(2, -1),
    )
    x = jnp.arange(float(num_shards))
    facade.shard(
        lambda x: opt.minimize(lambda: jnp.sum(w * x)), [x], num_shards
    )
    return w

  def test_a_value_per_shard_on_another_number_of_shards(self):
    w = self.parted()

    with self.assertRaisesRegex(ValueError, 'each of 4 shards.*used on 8'):
      facade.shard(lambda: w.value(), num_shards=8)

  def test_others_may_have_values_of_another_number_of_shards(self):
    self.parted()
    v = facade.Variable(2.0)

    (out,) = facade.shard(lambda: v.value(), num_shards=8)

    chex.assert_trees_all_equal(out, jnp.full(8, 2.0), strict=True)

  def test_slots_for_what_has_a_value_per_shard(self):
    w = self.parted()

    def update(inner):
      opt = facade.CrossShardOptimizer(inner, group_assignment=[[0, 1], [2, 3]])
      facade.shard(lambda: opt.apply_gradients([(w * 0 + 1, w)]), num_shards=4)

    before = w.shard_values()
    update(facade.GradientDescentOptimizer(1.0))
    chex.assert_trees_all_equal(w.shard_values(), before - 2, strict=True)
    with self.assertRaisesRegex(ValueError, 'made before it gets a value per'):
      update(facade.MomentumOptimizer(1.0, 0.9))

  def test_inside_a_loss(self):
    w = facade.Variable(2.0)
    opt = facade.GradientDescentOptimizer(1.0)

    def loss():
      (parts,) = facade.shard(lambda x: w * x, [jnp.arange(8.0)], 4)
      return jnp.sum(parts)

    [(eager, _)] = opt.compute_gradients(loss, [w])
    compiled = facade.function(
        lambda: [g for g, _ in opt.compute_gradients(loss, [w])]
    )()

    self.assertEqual([float(eager), *map(float, compiled)], [28.0, 28.0])


class PlacementTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.enterContext(facade.Graph().as_default())
    self.mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ('shards',))
    self.w = facade.Variable([1.0, 2.0], name='w')

  def test_replicates_a_variable_once(self):
    moved = shards.place([self.w], self.mesh)
    again = shards.place([self.w], self.mesh)

    self.assertEqual((moved, again), (True, False))
    self.assertEqual(
        self.w.stored.sharding, jax.sharding.NamedSharding(self.mesh, P())
    )

  def test_shards_a_variable_with_a_value_a_shard(self):
    frames.commit([self.w], [jnp.ones((2, 2))])

    shards.place([self.w], self.mesh)

    self.assertEqual(
        self.w.stored.sharding,
        jax.sharding.NamedSharding(self.mesh, P('shards')),
    )

  def test_moves_nothing_while_tracing(self):
    with frames.frame('discovered'):
      moved = shards.place([self.w], self.mesh)

    self.assertFalse(moved)
    self.assertLen(self.w.stored.sharding.device_set, 1)
