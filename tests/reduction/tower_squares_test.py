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
TRACKER = monitoring.track_noise_scale(AXIS)


def after(tx, num_calls, updates):
  """Returns the updates and the state on all shards after some calls."""

  def fn(params, own):
    state = tx.init(params)
    for i in range(num_calls):
      update = shard_transforms.per_shard((i + 1.0) * own, AXIS)
      found, state = tx.update(update, state, params)
    return found, state

  mapped = modes.map_shards('shard_map', fn)
  return mapped(jnp.zeros(updates.shape[1:]), updates)


class TowerSquaresTest(parameterized.TestCase):
  # What is made of them is tested through `track_noise_scale`.

  @cases.parameters(
      ('nobody', shard_transforms.cross_shard_mean(AXIS), {}),
      ('of one tower', TRACKER, {'num_towers': 1}),
      ('a sum', TRACKER, {'reduction': 'sum'}),
  )
  def test_are_not_collected_unless_asked_for(self, _, inner, options):
    tx = shard_transforms.tower_reduce(
        **{'num_towers': 2, **options}, inner=inner, axis_name=AXIS
    )

    _, state = after(tx, 1, lying_shards.tree()['w'])

    self.assertEqual(state.tower_squares, ())

  def test_are_those_of_the_window_of_each_shard(self):
    inner = shard_transforms.guard(TRACKER, AXIS)
    tx = shard_transforms.tower_reduce(3, inner, axis_name=AXIS)
    updates = lying_shards.tree()['w']

    _, within = after(tx, 2, updates)
    _, full = after(tx, 3, updates)

    squares = 5 * np.sum(updates**2, axis=1)
    np.testing.assert_allclose(
        within.tower_squares, np.stack([squares, 2 + 0 * squares], 1)[:, None],
        rtol=1e-6,
    )  # fmt: skip
    np.testing.assert_array_equal(full.tower_squares, np.zeros([8, 1, 2]))

  def test_change_no_bit_of_the_updates(self):
    updates = lying_shards.tree()['w']

    found, expected = (
        after(
            shard_transforms.tower_reduce(
                2, optax.chain(inner, optax.adam(0.1)), axis_name=AXIS
            ),
            4,
            updates,
        )[0]
        for inner in (TRACKER, shard_transforms.cross_shard_mean(AXIS))
    )

    chex.assert_trees_all_equal(found, expected, strict=True)

  @cases.parameters(0, 1)
  def test_of_a_window_that_is_resized_are_passed_over(self, num_calls):
    tx = shard_transforms.tower_reduce(2, TRACKER, axis_name=AXIS)
    mesh = modes.mesh()
    params = jnp.zeros(3)
    state = shard_transforms.init_state(tx, params, mesh)
    state = state._replace(tower=np.int32(num_calls))

    fewer = shard_transforms.resize_state(
        state, tx, params, modes.mesh(4), reduction='mean'
    )

    expected = np.full([4, 2], np.nan if num_calls else 0.0, np.float32)
    np.testing.assert_array_equal(jax.device_get(fewer.tower_squares), expected)
