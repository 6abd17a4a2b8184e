"""Tests of compression with gates, masks, partitions and model axes."""

from absl.testing import parameterized
import chex
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import pytest

import cases
import compressions
import modes
import shard_transforms
from shard_transforms.contrib import compression
from shard_transforms.monitoring import check_health

AXIS = modes.AXIS
zeros = compressions.zeros
PARAMS = {'w': zeros(12, 16), 'b': zeros(5)}


def sign(**options):
  options = {'min_elements': 64, **options}
  return compression.compressed_mean(
      AXIS, compression.scaled_sign(8), **options
  )


LINKS = {'sign': sign(), 'power_sgd': compression.power_sgd(AXIS, 1)}


def held_back(state):
  """Returns the mean of what is held back of `w` by a state of `run`."""
  if hasattr(state, 'server_residual'):
    return compressions.held_back(state, 'w', (12, 16))
  residual = np.asarray(state.residual['w'], np.float64)
  return residual.reshape(-1, 12, 16).mean(0)


def state_of(state):
  """Returns the state of the compression anywhere in a state."""

  def is_ours(node):
    return hasattr(node, 'update_norm')

  nodes = jax.tree.leaves(state, is_leaf=is_ours)
  return next(node for node in nodes if is_ours(node))


class GateTest(parameterized.TestCase):

  @pytest.mark.thorough
  def test_skipping_guard_keeps_the_residuals(self):
    data = compressions.make_data(8, 2, PARAMS)
    data['w'][5, 1] = np.nan
    guarded = {
        name: shard_transforms.guard(tx, AXIS) for name, tx in LINKS.items()
    }
    bare = {f'bare {name}': tx for name, tx in LINKS.items()}
    masked = optax.masked(LINKS['sign'], {'w': True, 'b': False})

    after_one = compressions.run(
        guarded, 'shard_map', jax.tree.map(lambda x: x[:, :1], data), PARAMS
    )
    after_two = compressions.run(
        {**guarded, **bare, 'masked': masked}, 'shard_map', data, PARAMS
    )

    for name in guarded:
      # XLA rounds the first of two steps differently from a single step.
      chex.assert_trees_all_close(
          state_of(after_two[name][1]),
          state_of(after_one[name][1]),
          rtol=1e-5,
          atol=1e-6,
      )
    # Without a guard a NaN is found.
    for name in bare:
      with self.assertRaisesRegex(RuntimeError, 'not finite.*guard'):
        check_health(after_two[name][1])
    # Masked leaves stay.
    updates, _ = after_two['masked']
    np.testing.assert_array_equal(updates['b'], data['b'])
    np.testing.assert_array_equal(updates['w'], after_two['bare sign'][0]['w'])

  @pytest.mark.thorough
  def test_updates_of_stale_and_bad_shards_add_up(self):
    num_shards, steps = 8, 60
    stochastic = compressions.COMPRESSORS['int8_stochastic']
    links = {
        'mean': compression.compressed_mean(AXIS, stochastic, min_elements=64),
        'power_sgd': LINKS['power_sgd'],
    }
    data = compressions.make_data(num_shards, steps, PARAMS)
    clean = data['w'].astype(np.float64)
    rng = np.random.default_rng(1)
    weight = rng.choice([0, 0.5, 1, 7], (num_shards, steps)).astype(np.float32)
    is_stale, is_bad = rng.random((2, num_shards, steps)) < 0.2
    is_stale[:, 30] = True
    data['w'][is_bad, 3, 2] = np.nan

    def shard(params, inputs):
      def one(tx):
        tx = shard_transforms.guard(tx, AXIS, on_bad='exclude', min_shards=1)
        tx = shard_transforms.drop_stale(1, tx, axis_name=AXIS)

        def step(state, inputs):
          grads, weight, is_stale = inputs
          local_step = state.global_step - jnp.where(is_stale, 3, 0)
          updates, state = tx.update(
              grads, state, params, local_step=local_step, weight=weight
          )
          return state, updates

        state, updates = lax.scan(step, tx.init(params), inputs)
        return updates, state_of(state)

      return {name: one(tx) for name, tx in links.items()}

    mapped = modes.map_shards('shard_map', shard)
    results = jax.device_get(mapped(PARAMS, (data, weight, is_stale)))

    counts = np.where(is_stale | is_bad, 0, weight).astype(np.float64)
    share = counts / np.where(counts.sum(0) > 0, counts.sum(0), 1)
    means = np.einsum('nt,ntij->tij', share, clean)
    for name, (updates, state) in results.items():
      with self.subTest(name):
        total = updates['w'][0].astype(np.float64).sum(0) + held_back(state)
        error = np.linalg.norm(total - means.sum(0)) / np.linalg.norm(means)
        self.assertLess(error, 1e-5)
        np.testing.assert_array_equal(updates['w'][:, 30], 0)


class PartTest(parameterized.TestCase):

  @cases.parameters(*LINKS, fast='sign')
  def test_supports_parameters_over_a_model_axis(self, name):
    tx, params = LINKS[name], {'w': zeros(24, 16), 'v': zeros(12, 16)}
    in_specs = {'w': P('model'), 'v': P()}
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((4, 2), (AXIS, 'model'), auto)
    data = compressions.make_data(4, 6, params)
    state = shard_transforms.init_state(tx, params, mesh, in_specs=in_specs)

    updates, new_state = compressions.go_on(
        tx, params, mesh, state, data, in_specs
    )

    # Equal to separate runs of the model shards.
    for part in range(2):
      rows = slice(12 * part, 12 * (part + 1))
      data_of_part = {'w': data['w'][:, :, rows], 'v': data['v']}
      zeros_of_part = dict.fromkeys(params, zeros(12, 16))
      expected, _ = compressions.run(
          {name: tx}, 'vmap', data_of_part, zeros_of_part
      )[name]
      w = updates['w'][:, rows]
      np.testing.assert_allclose(w, expected['w'][0], atol=1e-5)
      np.testing.assert_allclose(updates['v'], expected['v'][0], atol=1e-5)
    for piece in updates['v'].addressable_shards:
      np.testing.assert_array_equal(piece.data, updates['v'])
    chex.assert_trees_all_equal_shapes_and_dtypes(new_state, state)
