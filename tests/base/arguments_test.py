"""Tests of checks of integers, real numbers, weights and local steps."""

from absl.testing import parameterized
import jax
import jax.numpy as jnp
import numpy as np

import cases
import shard_transforms as st

NAN = float('nan')
INF = float('inf')


def _cross_shard_mean(x, weight):
  tx = st.cross_shard_mean('data')
  return tx.update(x, tx.init(x), weight=weight)[0]


def _shard_mean(x, weight):
  return st.shard_mean(x, 'data', weight=weight)


def _tower_reduce(x, weight):
  inner = st.cross_shard_mean('data')
  tx = st.tower_reduce(2, inner, axis_name='data')
  _, state = tx.update(x, tx.init(x), weight=weight)
  return tx.update(x, state, weight=weight)[0]


def _reduce_stacked_towers(x, weight):
  inner = st.cross_shard_mean('data')
  tx = st.reduce_stacked_towers(2, inner)
  stacked = weight if weight is None else jnp.stack([weight, weight])
  return tx.update(jnp.stack([x, x]), tx.init(x), weight=stacked)[0]


def _drop_stale(x, weight):
  inner = st.cross_shard_mean('data')
  tx = st.drop_stale(1, inner, axis_name='data')
  return tx.update(x, tx.init(x), local_step=0, weight=weight)[0]


BAD_WEIGHTS = (
    (ValueError, 'must be finite and not negative', (-1, NAN, 1e39)),
    (
        TypeError,
        'must be a real number, got',
        (1j, np.complex64(2), [1.0], '1', object, True, np.True_),
    ),
    (ValueError, r'must have the shape \(\), got \(5,\)', (np.ones(5),)),
)
BAD_STEPS = (
    (
        TypeError,
        'must be an integer, got',
        (1.0, True, np.float32(2), 1j, [1], '1', object),
    ),
    (ValueError, r'must have the shape \(\), got', (np.zeros(1, int),)),
    (ValueError, 'must fit int32, got', (2**31, -(2**31) - 1, np.int64(2**40))),
)
MEANS = {
    'cross_shard_mean': _cross_shard_mean,
    'shard_mean': _shard_mean,
    'tower_reduce': _tower_reduce,
    'reduce_stacked_towers': _reduce_stacked_towers,
    'drop_stale': _drop_stale,
}


class IntegerTest(parameterized.TestCase):

  def test_accepts_integers_of_any_type_and_nothing_else(self):
    for kind in int, np.int64, np.uint8, np.array:
      st.tower_reduce(kind(2))
    for value in 1.5, '2', None, True, np.True_, [2]:
      with self.assertRaisesRegex(TypeError, '`num_towers` must be an integer'):
        st.tower_reduce(value)


class WeightTest(parameterized.TestCase):

  @cases.parameters(*BAD_WEIGHTS)
  def test_refuses_invalid_weights(self, error, words, weights):
    for weight in weights:
      mapped = jax.vmap(
          lambda x, w=weight: _cross_shard_mean(x, w), axis_name='data'
      )
      with self.assertRaisesRegex(error, f'`weight` of `cross_.*` {words}'):
        jax.eval_shape(mapped, jnp.ones(3))

  def test_accepts_traced_weights_of_any_real_dtype(self):
    x = np.float32([2, 6, NAN])

    def means(x, weight):
      return {caller: fn(x, weight) for caller, fn in MEANS.items()}

    mapped = jax.jit(jax.vmap(means, axis_name='data'))

    # Invalid weights count as zero.
    for weights, expected in (
        (np.int32([3, 1, 0]), 3),
        (np.array([3, 1, -1], jnp.bfloat16), 3),
        (np.array([True, True, False]), 4),
        *((np.float32([3, 1, bad]), 3) for bad in (NAN, INF, -INF, -0.0)),
        (np.float32([0, -1, NAN]), 0),
    ):
      for caller, found in mapped(x, weights).items():
        with self.subTest(caller, weights=weights):
          np.testing.assert_array_equal(
              found, np.full(3, expected, 'float32'), strict=True
          )

  def test_accepts_a_concrete_weight(self):
    def means(x):
      found = [fn(x, np.float32(3)) for fn in MEANS.values()]
      return found + [_cross_shard_mean(x, w) for w in (2**70, np.int8(4))]

    mapped = jax.jit(jax.vmap(means, axis_name='data'))

    for found in mapped(np.float32([2, 6, 7])):
      expected = np.full(3, 5, 'float32')
      np.testing.assert_array_equal(found, expected, strict=True)


class LocalStepTest(parameterized.TestCase):

  @cases.parameters(*BAD_STEPS)
  def test_refuses_invalid_local_steps(self, error, words, local_steps):
    tx = st.drop_stale(2)
    state = tx.init(jnp.ones(2))

    for step in local_steps:
      with self.assertRaisesRegex(error, f'`local_step` of .*` {words}'):
        tx.update(jnp.ones(2), state, local_step=step)


class RealTest(parameterized.TestCase):

  def test_accepts_traced_numbers(self):
    def build(x):
      st.contrib.compensate_delay(x, decay=x, eps=x)
      return x

    jax.eval_shape(build, -1.0)
    st.contrib.compensate_delay(np.float32(0), decay=0)


class WrappingTest(parameterized.TestCase):

  def test_one_tower_refuses_the_state_of_several(self):
    state = st.tower_reduce(2).init(jnp.zeros(2))
    tx = st.tower_reduce(1)

    with self.assertRaisesRegex(
        ValueError, 'a state that was made with more towers'
    ):
      tx.update(jnp.ones(2), state)
