"""Tests of `delay_updates`: delays, weights, resizing and errors."""

from absl.testing import parameterized
import chex
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

import cases
import modes
import shard_transforms as st
from shard_transforms import cross_shard_mean
from shard_transforms.contrib import delay_updates

AXIS = modes.AXIS
LEARNING_RATE, DECAY, CALLS = 0.1, 0.9, 7

# [shards, calls, features]
DATA = np.random.default_rng(0).normal(size=(8, CALLS, 5)).astype(np.float32)


def _loss(params, x):
  return 0.5 * jnp.sum((params['w'] - x) ** 2) + params['b'] * x[0]


def _grads(params, x):
  return st.value_and_grad(_loss, AXIS)(params, x)[1]


def _params():
  return {'w': jnp.linspace(-1, 1, 5), 'b': jnp.float32(2)}


def _chain(steps, place):
  mean = cross_shard_mean(AXIS)
  momentum = optax.trace(DECAY), optax.scale(-LEARNING_RATE)
  if place == 'before':
    return optax.chain(delay_updates(steps, axis_name=AXIS), mean, *momentum)
  return optax.chain(mean, delay_updates(steps), *momentum)


class DelayTest(parameterized.TestCase):

  @cases.parameters(0, 1, 9, fast='1')
  def test_returns_every_bit_later(self, steps):
    tx = delay_updates(steps)
    rng = np.random.default_rng(3)
    params = {
        'w': jnp.ones((2, 3)),
        'half': jnp.ones(4, jnp.bfloat16),
        'complex': jnp.ones(2, jnp.complex64),
        'empty': jnp.ones((0, 3)),
        'none': None,
        'masked': optax.MaskedNode(),
    }

    def draw(param):
      bits = rng.integers(0, 256, (12, param.size * param.itemsize), np.uint8)
      return jnp.asarray(bits.view(param.dtype).reshape(12, *param.shape))

    given = jax.tree.map(draw, params)
    late = jax.tree.map(lambda x: jnp.zeros((steps, *x.shape), x.dtype), params)
    late = jax.tree.map(lambda x, y: jnp.concatenate([x, y])[:12], late, given)

    @jax.jit
    def delayed(given):
      def call(state, updates):
        return tx.update(updates, state)[::-1]

      return lax.scan(call, tx.init(params), given)[1]

    chex.assert_trees_all_equal(_bits(delayed(given)), _bits(late), strict=True)

  def test_returns_the_dtypes_of_updates_and_stores_those_of_parameters(self):
    tx = delay_updates(1)
    state = tx.init(jnp.ones(2, jnp.bfloat16))

    _, state = tx.update(np.full(2, 1.5, np.float32), state)
    updates, state = tx.update(np.ones(2, np.float32), state)

    self.assertEqual(updates.dtype, jnp.float32)
    np.testing.assert_array_equal(updates, np.full(2, 1.5))
    self.assertEqual(state.pending.dtype, jnp.bfloat16)

  def test_a_missing_gradient_counts_as_zero_later(self):
    tx = delay_updates(1)
    params = {'a': jnp.ones(2), 'i': jnp.ones(2, jnp.int32)}
    float0 = np.zeros(2, jax.dtypes.float0)
    state = tx.init(params)

    found = []
    for value in (1, 2, None, 4, 5):
      a = None if value is None else jnp.full(2, float(value))
      updates, state = tx.update({'a': a, 'i': float0}, state)
      self.assertIs(updates['i'], float0)
      found.append(updates['a'])

    self.assertIsNone(found.pop(2))
    np.testing.assert_array_equal(
        np.stack(found), [[0, 0], [1, 1], [0, 0], [4, 4]]
    )

  def test_writes_in_place(self):
    tx = delay_updates(8)
    params = jnp.zeros(100_000)
    step = jax.jit(tx.update, donate_argnums=1)

    memory = step.lower(params, tx.init(params)).compile().memory_analysis()

    # A copy of the pending updates would take the memory of 9 updates.
    self.assertLess(memory.temp_size_in_bytes, params.nbytes)
    self.assertGreaterEqual(memory.alias_size_in_bytes, 9 * params.nbytes)


class GatesTest(parameterized.TestCase):

  def test_refuses_weights_before_the_reduction(self):
    tx = _chain(1, 'before')

    def shard(params, x):
      grads = _grads(params, x)
      return tx.update(grads, tx.init(params), params, weight=2.0)[0]

    with self.assertRaisesRegex(
        ValueError, 'before a reduction got a `weight`'
    ):
      jax.eval_shape(modes.map_shards('vmap', shard), _params(), DATA[:, 0])

  def test_accepts_weights_after_the_reduction(self):
    tx = _chain(1, 'after')

    def shard(params, own):
      x, weight = own
      state = tx.init(params)
      _, state = tx.update(_grads(params, x), state, params, weight=weight)
      return tx.update(_grads(params, x), state, params, weight=1.0)[0]['b']

    weights = np.arange(8, dtype=np.float32)
    updates = modes.map_shards('shard_map', shard)(
        _params(), (DATA[:, 0], weights)
    )

    mean = np.average(DATA[:, 0, 0].astype(float), weights=weights)
    np.testing.assert_allclose(updates, -LEARNING_RATE * mean, rtol=1e-5)


class StateTest(parameterized.TestCase):

  @cases.parameters(
      ('mean', 4, [0.5, 2.5, 4.5, 6.5]), ('sum', 4, [1, 5, 9, 13])
  )
  def test_resizing_preserves_pending_updates(self, how, after, rows):
    tx = delay_updates(1, axis_name=AXIS)
    params = np.zeros(3, np.float32)
    state = st.init_state(tx, params, modes.mesh())
    pending = np.arange(8, dtype=np.float32)[:, None, None]
    pending = pending * np.array([1.0, 10.0], np.float32)[None, :, None]
    state = state._replace(
        slot=np.int32(1), pending=np.tile(pending, (1, 1, 3))
    )

    resized = st.resize_state(
        state, tx, params, modes.mesh(after), reduction=how
    )

    self.assertEqual(resized.slot, 1)
    expected = np.stack([np.outer([1, 10], [row] * 3) for row in rows])
    np.testing.assert_array_equal(resized.pending, expected)

  @cases.parameters(None, 'weighted')
  def test_resizing_requires_the_reduction(self, how):
    tx = delay_updates(1, axis_name=AXIS)
    state = st.init_state(tx, jnp.zeros(3), modes.mesh())

    with self.assertRaisesRegex(
        ValueError, r"`reduction` must be 'mean' or 'sum'.* at \.pending"
    ):
      st.resize_state(state, tx, jnp.zeros(3), modes.mesh(4), reduction=how)


class RefusalTest(parameterized.TestCase):

  @cases.parameters(
      (-1, ValueError, '`steps` must be at least 0, got -1'),
      (1.0, TypeError, '`steps` must be an integer, got 1.0'),
      (np.ones(2), TypeError, '`steps` must be an integer'),
  )
  def test_refuses_bad_steps(self, steps, error, message):
    with self.assertRaisesRegex(error, message):
      delay_updates(steps)

  @cases.parameters((2, 3), (1, 0), (0, 2))
  def test_refuses_a_state_for_other_steps(self, before, after):
    state = delay_updates(before).init(jnp.ones(3))

    with self.assertRaisesRegex(
        ValueError, 'got a state for' if before else 'do not have the tree'
    ):
      delay_updates(after).update(jnp.ones(3), state)


def _bits(tree):
  return jax.tree.map(lambda x: np.asarray(x).view(np.uint8), tree)
