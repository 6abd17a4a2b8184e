"""Tests of all aggregators: composition with wrappers, types and exchange."""

from absl.testing import parameterized
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

import cases
import lying_shards
import modes
import shard_transforms as st
from shard_transforms import contrib

AXIS = modes.AXIS
AXES = ('slow', 'fast')
AGGREGATORS = {
    'adasum': lambda: contrib.adasum(AXIS),
    'coordinate_median': lambda: contrib.coordinate_median(AXIS),
    'majority_vote': lambda: contrib.majority_vote(AXIS),
    'trimmed_mean': lambda: contrib.trimmed_mean(AXIS, 2),
}


def aggregated(name, updates):
  """Aggregates updates of several shards."""
  num_shards = len(jax.tree.leaves(updates)[0])
  found = lying_shards.aggregated(
      AGGREGATORS[name](), 'vmap', updates, None, num_shards
  )
  return jax.tree.map(lambda x: x[0], found)


def two_level_mesh():
  return jax.make_mesh((2, 4), AXES, (jax.sharding.AxisType.Auto,) * 2)


class AggregatorTest(parameterized.TestCase):

  @cases.parameters('adasum', 'trimmed_mean', fast='trimmed_mean')
  def test_composes_with_every_wrapper(self, name):
    make = AGGREGATORS[name]
    gated = st.guard(make(), AXIS, on_bad='exclude', min_shards=5)
    gated = st.drop_stale(0, gated, axis_name=AXIS)
    towers = st.tower_reduce(2, make(), axis_name=AXIS)
    outer = optax.chain(make(), optax.sgd(1.0))
    rounds = st.contrib.local_updates(optax.sgd(0.5), outer, AXIS, every=2)
    sliced = optax.chain(
        make(), st.shard_update(optax.sgd(1.0), AXIS, if_reduced='mean')
    )

    def run(tx, params, *calls):
      state = tx.init(params)
      for update, extra_args in calls:
        found, state = tx.update(update, state, params, **extra_args)
      return found

    def fn(params, own):
      (first, second), bad, local_step, weight = own
      return {
          'gates': run(gated, params, (bad, {'local_step': local_step})),
          'towers': run(
              towers,
              params,
              (first, {'weight': 3 * weight}),
              (second, {'weight': weight}),
          ),
          'rounds': run(rounds, params, (first, {}), (second, {})),
          'slices': run(sliced, params, (first, {})),
      }

    updates = np.random.default_rng(0).normal(size=(8, 2, 29)).astype('float32')
    bad = updates[:, 0].copy()
    bad[2, 5] = np.nan
    local_step = np.where(np.arange(8) == 3, -5, 0).astype(np.int32)
    found = modes.map_shards('shard_map', fn)(
        np.zeros(29, np.float32),
        (updates, bad, local_step, np.ones(8, np.float32)),
    )

    expected = {
        'towers': (3 * updates[:, 0] + updates[:, 1]) / 4,
        'rounds': 0.5 * updates.sum(1),
        'slices': updates[:, 0],
    }
    expected = aggregated(name, expected)
    if name == 'adasum':
      bad[[2, 3]] = 0
    else:
      bad = np.delete(bad, [2, 3], axis=0)
    expected['gates'] = aggregated(name, bad)
    for key, x in expected.items():
      with self.subTest(key):
        x = -x if key in ('rounds', 'slices') else x
        np.testing.assert_allclose(found[key][0], x, rtol=3e-5, atol=1e-6)

  @cases.parameters(*AGGREGATORS)
  def test_is_refused_inside_shard_update(self, name):
    tx = st.shard_update(AGGREGATORS[name](), AXIS)

    def fn(params, update):
      return tx.update(update, tx.init(params), params)[0]

    with self.assertRaisesRegex(
        ValueError, 'put aggregators before `shard_update`'
    ):
      modes.map_shards('shard_map', fn)(np.zeros(3), np.ones((8, 3)))

  @cases.product(name=AGGREGATORS, weighted=(False, True))
  def test_results_are_typed_as_invariant(self, name, weighted):
    tx = AGGREGATORS[name]()

    def fn(update, weight):
      given = {'weight': weight[0]} if weighted else {}
      return tx.update(update[0], tx.init(update), **given)[0]

    # Otherwise `jax.shard_map` would refuse the specs of the results.
    mapped = jax.shard_map(
        fn, mesh=modes.mesh(), in_specs=P(AXIS), out_specs=P()
    )
    found = jax.eval_shape(mapped, jnp.ones([8, 3]), jnp.ones(8))

    self.assertEqual(found.shape, (3,))


class ExchangeTest(parameterized.TestCase):
  # The bytes that are sent are tested with each aggregator.

  @cases.parameters(*AGGREGATORS)
  def test_small_leaves_share_buffers(self, name):
    leaves = [jax.ShapeDtypeStruct(s, jnp.float32) for s in 9 * [(8, 64), (8,)]]
    tx = AGGREGATORS[name]()

    report = st.monitoring.communication_report(
        lambda u: tx.update(u, tx.init(u))[0], leaves, axis_sizes={AXIS: 8}
    )

    sent = [c.primitive for c in report.collectives]
    self.assertEqual(sent.count('all_to_all'), 1)

  def test_slices_follow_the_order_of_several_axes(self):
    updates = np.random.default_rng(0).normal(size=(8, 13)).astype('float32')

    for axes in (AXES, AXES[::-1]):

      def fn(update, axes=axes):
        tx = contrib.coordinate_median(axes)
        return tx.update(update[0], tx.init(update))[0]

      mapped = jax.shard_map(
          fn, mesh=two_level_mesh(), in_specs=P(AXES), out_specs=P()
      )
      np.testing.assert_array_equal(
          jax.jit(mapped)(updates), np.median(updates, axis=0)
      )

  def test_updates_may_be_sharded_over_an_unmapped_axis(self):
    mesh = two_level_mesh()
    updates = np.random.default_rng(0).normal(size=(2, 5, 8)).astype('float32')
    updates = jax.device_put(
        updates, jax.NamedSharding(mesh, P('slow', None, 'fast'))
    )

    for tx, expected in (
        (contrib.coordinate_median('slow'), np.median(updates, axis=0)),
        (
            contrib.majority_vote('slow'),
            np.where((updates < 0).all(0), -1, 1),
        ),
    ):

      def fn(update, tx=tx):
        return tx.update(update[0], tx.init(update))[0]

      mapped = jax.shard_map(
          fn, mesh=mesh, in_specs=P('slow'), out_specs=P(), axis_names={'slow'}
      )
      np.testing.assert_array_equal(jax.jit(mapped)(updates), expected)
