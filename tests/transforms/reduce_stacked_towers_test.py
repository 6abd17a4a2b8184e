"""Stacked towers by weight, and what `inner` is given."""

import functools

from absl.testing import parameterized
import chex
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

import cases
import harness
import modes
import one_device
import shard_transforms as st

NUM_TOWERS = 3
INT32_MAX = np.iinfo(np.int32).max

# [shards, towers, features]
DATA = np.random.default_rng(0).integers(-99, 99, (8, 3, 5)).astype(np.float32)
WEIGHTS = np.random.default_rng(1).integers(1, 9, (8, 3)).astype(np.float32)


def _loss(params, x):
  return jnp.sum(params['w'] * x) + jnp.sum(params['m'] * x[:4, None])


def _like_params(w):
  """Returns the expectation for both parameters, given that of `w`."""
  w = np.asarray(w, np.float32)
  return {'w': w, 'm': np.broadcast_to(w[:, :4, None], (8, 4, 2))}


def _reduce(reduction):
  """Maps reductions of 3 towers of each shard: without weights, and with."""
  tx = st.reduce_stacked_towers(
      NUM_TOWERS, st.cross_shard_mean(modes.AXIS), reduction=reduction
  )

  def shard(params, own):
    data, weight = own
    grad = st.value_and_grad(_loss, modes.AXIS)
    _, grads = jax.vmap(grad, in_axes=(None, 0))(params, data)
    update = functools.partial(tx.update, grads, tx.init(params), params)
    return [update(weight=w)[0] for w in (None, weight)]

  mapped = modes.map_shards('shard_map', shard)
  params = {'w': np.ones(5, np.float32), 'm': np.ones((4, 2), np.float32)}
  return lambda data, weights: mapped(params, (data, weights))


def _expected(data, weights, reduction):
  """Returns what all shards get."""
  divisor = weights.any(1).sum() if reduction == 'sum' else None
  mean = one_device.reduced(data, weights, divisor or None)
  return _like_params(np.broadcast_to(mean, (8, 5)))


class ReduceTowersTest(parameterized.TestCase):

  @cases.parameters('mean', 'sum')
  def test_counts_towers_by_their_weights(self, reduction):
    # What has no weight contributes nothing.
    weights, data = WEIGHTS.copy(), DATA.copy()
    without = ([0, 0, 3, 4, 4, 4, 7], [0, 2, 1, 0, 1, 2, 2])
    weights[without] = 0
    data[without] = np.nan

    reduce = _reduce(reduction)
    for x, counts in (data, weights), (DATA, 0 * WEIGHTS):
      plain, updates = reduce(x, counts)

      expected = _expected(x, counts, reduction)
      chex.assert_trees_all_close(updates, expected, rtol=1e-6, strict=True)
    expected = _expected(DATA, np.ones((8, 3)), reduction)
    chex.assert_trees_all_close(plain, expected, rtol=1e-6, strict=True)

  @cases.parameters('mean', 'sum')
  def test_hands_on_weight_step_and_other_arguments(self, reduction):
    tx = st.reduce_stacked_towers(
        NUM_TOWERS, harness.recorder(), reduction=reduction
    )
    weights = WEIGHTS.copy()
    weights[3], weights[5, 0] = 0, 0
    steps = np.random.default_rng(2).integers(-9, 99, (8, 3)).astype(np.int32)
    steps[5, 0] = -10

    def shard(_, own):
      data, weight, local_step = own
      extra = {'weight': weight, 'local_step': local_step, 'value': data[0, 1]}
      return tx.update(data, tx.init(data[0]), **extra)[1]

    recorded = modes.map_shards('shard_map', shard)(0.0, (DATA, weights, steps))

    total = weights.sum(1)
    expected = {
        'weight': np.sign(total) if reduction == 'sum' else total,
        # Towers without weight do not count.
        'local_step': np.where(weights > 0, steps, INT32_MAX).min(1),
        'value': DATA[:, 0, 1],
    }
    chex.assert_trees_all_equal(recorded, expected, strict=True)

  def test_one_tower_counts_by_its_weight(self):
    tx = st.reduce_stacked_towers(1, optax.identity())

    for weight in 2, 0:
      x, weights = np.ones((1, 3), np.float32), np.full(1, weight)
      updates, _ = tx.update(x, tx.init(None), weight=weights)

      np.testing.assert_array_equal(updates, np.full(3, weight > 0))

  def test_one_local_step_stands_for_all_towers(self):
    tx = st.reduce_stacked_towers(2, harness.recorder())

    _, recorded = tx.update(jnp.ones((2, 3)), tx.init(None), local_step=7)

    self.assertEqual(recorded['local_step'], 7)


class WeightTest(parameterized.TestCase):

  def test_a_link_of_a_chain_takes_no_weight(self):
    tx = st.reduce_stacked_towers(2)

    with self.assertRaisesRegex(ValueError, 'must come with `inner`'):
      tx.update(np.ones((2, 3), np.float32), tx.init(None), weight=np.ones(2))

  def test_refuses_own_weights_for_updates_that_are_already_reduced(self):
    tx = st.reduce_stacked_towers(2, optax.identity())

    def shard(params, weight):
      grads = jax.vmap(jax.grad(jnp.multiply), in_axes=(None, 0))
      grads = grads(params, weight)
      return tx.update(grads, tx.init(params), weight=weight)[0]

    mapped = modes.map_shards('shard_map', shard)
    message = (
        "`updates` of `reduce_stacked_towers` must be per shard over 'data'"
    )
    with self.assertRaisesRegex(ValueError, message):
      jax.eval_shape(mapped, jnp.ones(()), jnp.ones((8, 2)))

  @cases.parameters(*modes.MAPPED, 'on_mesh')
  def test_refuses_an_inner_that_reduces_without_the_weight(self, mode):
    def update(inner, **kwargs):
      tx = st.reduce_stacked_towers(2, inner, **kwargs)

      def shard(_, own):
        towers, weight = own
        return tx.update(towers, tx.init(towers[0]), weight=weight)[0]

      towers, weight = DATA[:, :2], np.eye(8, 2, dtype=np.float32)
      if mode != 'on_mesh':
        return modes.map_shards(mode, shard)(0.0, (towers, weight))
      bound, params = st.on_mesh(tx, modes.mesh()), jnp.zeros(5)
      stack = st.Stacked(towers, (modes.AXIS,))
      return bound.update(stack, bound.init(params), params, weight=weight)

    by_hand = optax.stateless(lambda updates, _: lax.pmean(updates, modes.AXIS))
    message = 'must use .* to `reduce_stacked_towers`'
    with self.assertRaisesRegex(ValueError, message):
      update(optax.chain(optax.scale(2.0), by_hand))
    assumed = update(by_hand, assume_weighted=True)
    reduced = update(st.cross_shard_mean(modes.AXIS))

    first = np.stack([DATA[0, 0], DATA[1, 1]])
    np.testing.assert_allclose(assumed[0], first.sum(0) / 8, rtol=1e-6)
    np.testing.assert_allclose(reduced[0], first.mean(0), rtol=1e-6)

  def test_takes_common_weights_for_updates_that_are_already_reduced(self):
    tx = st.reduce_stacked_towers(2, optax.identity())

    def shard(towers, _):
      return tx.update(towers, tx.init(towers[0]), weight=np.array([3, 1]))[0]

    towers = np.array([2.0, 6.0], np.float32)
    updates = modes.map_shards('shard_map', shard)(towers, np.zeros(8))

    np.testing.assert_array_equal(updates, np.full(8, 3, np.float32))
