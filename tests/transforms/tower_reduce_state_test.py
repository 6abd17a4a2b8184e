from absl.testing import parameterized
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

import cases
import modes
import shard_transforms

INNER = optax.trace(0.9)

# [shards, calls, features]
DATA = np.random.default_rng(0).integers(-99, 99, (8, 2, 5)).astype(np.float32)
WEIGHTS = np.random.default_rng(1).integers(1, 9, (8, 2)).astype(np.float32)
STEPS = np.random.default_rng(2).integers(-9, 99, (8, 2)).astype(np.int32)
PARAMS = {
    'w': np.ones(5, np.float32),
    'half': np.ones((3, 5), jnp.bfloat16),
    'steps': np.array([3, 4], np.int32),
    'none': None,
}


def _loss(params, x):
  return jnp.sum(params['w'] * x) + jnp.sum(params['half'] * x[:3, None])


class TowerReduceStateTest(parameterized.TestCase):

  def test_counts_towers_in_int32_and_weights_in_float32(self):
    tx = shard_transforms.tower_reduce(3, INNER)
    state = tx.init(jnp.ones(3))

    for weight, local_step in (jnp.int8(100), jnp.uint8(7)), (100, 9):
      _, state = tx.update(
          jnp.ones(3), state, weight=weight, local_step=local_step
      )

    kinds = [leaf.dtype for leaf in state[:1] + state[2:4]]
    self.assertEqual(kinds, [np.int32, np.float32, np.int32])
    self.assertEqual([int(leaf) for leaf in state[2:4]], [200, 7])


class SharedStateTest(parameterized.TestCase):
  """What differs between shards must not be kept as if it did not."""

  def _update(self, updates, **extra_args):
    tx = shard_transforms.tower_reduce(2, INNER)

    def shard(shared, own):
      given = {
          name: own if value == 'own' else value
          for name, value in extra_args.items()
      }
      x = own.astype(jnp.float32) if updates == 'own' else shared
      params = {'w': jnp.zeros(())}
      return tx.update({'w': x}, tx.init(params), **given)[0]['w']

    mapped = modes.map_shards('shard_map', shard)
    return jax.eval_shape(mapped, jnp.ones(()), jnp.arange(8))

  @cases.parameters(
      {'updates': 'own', 'extra': {}, 'where': r"total\['w'\]"},
      {'updates': 'all', 'extra': {'weight': 'own'}, 'where': r"total\['w'\]"},
      {
          'updates': 'all',
          'extra': {'local_step': 'own'},
          'where': 'oldest_local_step',
      },
  )
  def test_refuses_what_differs_without_axis_name(self, updates, extra, where):
    with self.assertRaisesRegex(
        ValueError,
        r"`axis_name` of `tower_reduce` must name \['data'\], because state"
        rf' differs between those shards at {where}, .*'
        '`shard_transforms.init_state`',
    ):
      self._update(updates, **extra)

  @cases.parameters(('host', 'core'), ('core', 'host'))
  def test_names_the_axis_that_is_missing(self, named, missing):
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 4), ('host', 'core'), auto)
    tx = shard_transforms.tower_reduce(2, INNER, axis_name=named)
    mapped = jax.shard_map(
        lambda x: tx.update(x, tx.init(jnp.zeros(1)))[0],
        mesh=mesh,
        in_specs=P(('host', 'core')),
        out_specs=P(('host', 'core')),
    )

    with self.assertRaisesRegex(ValueError, rf"must name \['{missing}'\]"):
      jax.eval_shape(mapped, jnp.ones(8))


class PerShardStateTest(parameterized.TestCase):

  def test_refuses_a_delayed_sum(self):
    tx = shard_transforms.tower_reduce(2, INNER, axis_name=modes.AXIS)

    def shard(params, x):
      reduced = lax.pcast(params, modes.AXIS, to='reduced')
      grads = jax.grad(lambda p: jnp.sum(p * x))(reduced)
      return tx.update(grads, tx.init(params))[0]

    with self.assertRaisesRegex(ValueError, 'typed unreduced'):
      mapped = modes.map_shards('shard_map', shard)
      jax.eval_shape(mapped, jnp.ones(5), DATA[:, 0])

  def test_a_sum_per_shard_does_not_hide_that_updates_are_reduced(self):
    tx = shard_transforms.tower_reduce(2, INNER)

    def shard(params, x):
      state = tx.init(shard_transforms.per_shard(params, modes.AXIS))
      grads = jax.grad(lambda p: jnp.sum(p * x))(params)
      return tx.update(grads, state)[0]

    with self.assertRaisesRegex(
        ValueError, "`tower_reduce` must be per shard over 'data', got the root"
    ):
      mapped = modes.map_shards('shard_map', shard)
      jax.eval_shape(mapped, jnp.ones(5), DATA[:, 0])

  def test_sums_that_are_kept_per_shard_stay_per_shard(self):
    # Without `axis_name`, where parameters and all state differ.
    tx = shard_transforms.tower_reduce(2, optax.identity())

    def shard(params, data):
      own = shard_transforms.per_shard(params, modes.AXIS)
      state = tx.init(own)
      _, state = tx.update(data[0], state)
      updates, _ = tx.update(data[1], state)
      return updates

    updates = modes.map_shards('shard_map', shard)(
        np.zeros(5, np.float32), DATA
    )

    np.testing.assert_array_equal(updates, DATA.mean(1), strict=True)

  def test_a_counter_that_differs_in_type_only_is_agreed_on(self):
    tx = shard_transforms.tower_reduce(2, INNER, axis_name=modes.AXIS)

    def shard(params, data):
      own = shard_transforms.per_shard(tx.init(params), modes.AXIS)
      _, state = tx.update(data[0], own)
      updates, _ = tx.update(data[1], state)
      return updates

    updates = modes.map_shards('shard_map', shard)(
        np.zeros(5, np.float32), DATA
    )

    np.testing.assert_array_equal(updates, DATA.mean(1), strict=True)
