from absl.testing import absltest
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np

from shard_transforms import aggregators
from shard_transforms._src.aggregators import exchange

AXES = ('slow', 'fast')


def two_level_mesh(*kinds):
  return jax.make_mesh((2, 4), AXES, kinds or (jax.sharding.AxisType.Auto,) * 2)


class ExchangeTest(absltest.TestCase):
  # The bytes that are sent are tested through the aggregators.

  def test_cuts_and_joins(self):
    x = jnp.arange(15.0).reshape(3, 5)

    rows = exchange.cut(x, 4)

    self.assertEqual(rows.shape, (4, 4))
    np.testing.assert_array_equal(exchange.join(rows, x), x)

  def test_slices_are_those_of_several_axes(self):
    updates = np.random.default_rng(0).normal(size=(8, 13)).astype('float32')

    for axes in (AXES, AXES[::-1]):

      def fn(update, axes=axes):
        tx = aggregators.coordinate_median(axes)
        return tx.update(update[0], tx.init(update))[0]

      mapped = jax.shard_map(
          fn, mesh=two_level_mesh(), in_specs=P(AXES), out_specs=P()
      )
      np.testing.assert_array_equal(
          jax.jit(mapped)(updates), np.median(updates, axis=0)
      )

  def test_an_axis_that_is_not_mapped_may_slice_updates(self):
    mesh = two_level_mesh()
    updates = np.random.default_rng(0).normal(size=(2, 5, 8)).astype('float32')
    updates = jax.device_put(
        updates, jax.NamedSharding(mesh, P('slow', None, 'fast'))
    )

    for tx, expected in (
        (aggregators.coordinate_median('slow'), np.median(updates, axis=0)),
        (
            aggregators.majority_vote('slow'),
            np.where((updates < 0).all(0), -1, 1),
        ),
    ):

      def fn(update, tx=tx):
        return tx.update(update[0], tx.init(update))[0]

      mapped = jax.shard_map(
          fn,
          mesh=mesh,
          in_specs=P('slow'),
          out_specs=P(),
          axis_names={'slow'},
      )
      np.testing.assert_array_equal(jax.jit(mapped)(updates), expected)
