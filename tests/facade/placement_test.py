from absl.testing import absltest
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np

from shard_transforms import facade
from shard_transforms.facade import frames
from shard_transforms.facade import placement


class PlacementTest(absltest.TestCase):

  def setUp(self):
    super().setUp()
    self.enterContext(facade.Graph().as_default())
    self.mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ('shards',))
    self.w = facade.Variable([1.0, 2.0], name='w')

  def test_replicates_a_variable_once(self):
    moved = placement.place([self.w], self.mesh)
    again = placement.place([self.w], self.mesh)

    self.assertEqual((moved, again), (True, False))
    self.assertEqual(
        self.w.stored.sharding, jax.sharding.NamedSharding(self.mesh, P())
    )

  def test_shards_a_variable_with_a_value_a_shard(self):
    frames.commit([self.w], [jnp.ones((2, 2))])

    placement.place([self.w], self.mesh)

    self.assertEqual(
        self.w.stored.sharding,
        jax.sharding.NamedSharding(self.mesh, P('shards')),
    )

  def test_moves_nothing_while_tracing(self):
    with frames.frame('discovered'):
      moved = placement.place([self.w], self.mesh)

    self.assertFalse(moved)
    self.assertLen(self.w.stored.sharding.device_set, 1)
