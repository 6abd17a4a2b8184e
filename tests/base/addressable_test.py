from absl.testing import absltest
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np

import modes
from shard_transforms._src.base import addressable


class AddressableTest(absltest.TestCase):

  def test_pieces_say_where_they_start(self):
    x = np.arange(16).reshape(8, 2)
    sharding = jax.NamedSharding(modes.mesh(4), P(modes.AXIS))

    pieces = list(addressable.pieces(jax.device_put(x, sharding)))

    self.assertEqual([start for start, _ in pieces], [0, 2, 4, 6])
    np.testing.assert_array_equal(
        np.concatenate([piece for _, piece in pieces]), x
    )

  def test_an_array_of_numpy_is_one_piece(self):
    ((start, piece),) = addressable.pieces(np.arange(3))

    self.assertEqual(start, 0)
    np.testing.assert_array_equal(piece, [0, 1, 2])

  def test_largest_of_all_pieces(self):
    sharding = jax.NamedSharding(modes.mesh(4), P(modes.AXIS))

    self.assertEqual(addressable.largest(np.int32(3)), 3)
    self.assertEqual(
        addressable.largest(jax.device_put(jnp.array([1, 9, 4, 2]), sharding)),
        9,
    )
