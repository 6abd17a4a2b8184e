"""What `track_noise_scale` and `track_agreement` have in common."""

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

import cases
import lying_shards
import modes
import shard_transforms
from shard_transforms import monitoring

AXIS = modes.AXIS
TRACKERS = {
    'noise_scale': monitoring.track_noise_scale,
    'agreement': monitoring.track_agreement,
}


class WatchedReductionTest(parameterized.TestCase):

  @cases.product(name=TRACKERS, mode=modes.MODES)
  def test_updates_are_those_of_the_reduction_to_the_bit(self, name, mode):
    mean = shard_transforms.cross_shard_mean(AXIS)
    median = shard_transforms.aggregators.coordinate_median(AXIS)
    track = TRACKERS[name]
    updates = {**lying_shards.tree(), 'half': np.ones([8, 3], jnp.bfloat16)}

    def fn(params, own):
      def run(tx):
        return tx.update(own[0], tx.init(params), params, weight=own[1])[0]

      own = shard_transforms.per_shard(own, AXIS)
      pairs = [
          (track(AXIS), mean),
          (track(AXIS, mean), mean),
          (track(AXIS, median), median),
      ]
      return [list(map(run, pair)) for pair in pairs]

    weight = np.float32([3, 0, 1, 0, 2, 1, np.nan, 0.5])
    params = jax.tree.map(lambda x: x[0], updates)
    for found, expected in modes.map_shards(mode, fn)(
        params, (updates, weight)
    ):
      chex.assert_trees_all_equal(found, expected, strict=True)

  @cases.parameters(*TRACKERS)
  def test_works_within_windows_of_towers_and_guards(self, name):
    inner = optax.chain(TRACKERS[name](AXIS), optax.sgd(1.0))
    tx = shard_transforms.tower_reduce(
        2,
        shard_transforms.guard(inner, AXIS, on_bad='exclude'),
        axis_name=AXIS,
    )
    updates = lying_shards.tree()['w']

    def fn(params, update):
      state = tx.init(params)
      for tower in 1.0, 3.0:
        found, state = tx.update(
            shard_transforms.per_shard(tower * update, AXIS), state, weight=2.0
        )
      return found

    found = modes.map_shards('shard_map', fn)(jnp.zeros(29), updates)

    np.testing.assert_allclose(found[0], -2 * updates.mean(0), rtol=1e-5)

  @cases.parameters(*TRACKERS)
  def test_refuses_what_is_no_transformation_or_decay(self, name):
    with self.assertRaisesRegex(TypeError, '`inner` of .* must be an Optax'):
      TRACKERS[name](AXIS, 0.9)
    for decay in -0.1, 1.0:
      with self.assertRaisesRegex(ValueError, '`decay` must be at least 0 and'):
        TRACKERS[name](AXIS, decay=decay)
    with self.assertRaisesRegex(TypeError, '`decay` must be a real number'):
      TRACKERS[name](AXIS, decay='fast')

  @cases.parameters(*TRACKERS)
  def test_refuses_a_state_of_another_transformation(self, name):
    tx = TRACKERS[name](AXIS)

    def fn(params, update):
      return tx.update(update, optax.EmptyState(), params)[0]

    with self.assertRaisesRegex(TypeError, '`state` of .* must be a'):
      modes.map_shards('shard_map', fn)(jnp.zeros(3), np.ones([8, 3]))
