"""Tests of `compensate_delay`: corrections, masked leaves, state and errors."""

from absl.testing import parameterized
import chex
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import cases
import modes
import shard_transforms as st
from shard_transforms import cross_shard_mean
from shard_transforms.contrib import compensate_delay

AXIS = modes.AXIS
LEARNING_RATE, LAM, DECAY, EPS, CALLS = 0.1, 0.7, 0.9, 1e-3, 6

# [shards, calls, features] and [shards, calls]
DATA = np.random.default_rng(0).normal(size=(8, CALLS, 5)).astype(np.float32)
WEIGHTS = np.random.default_rng(1).integers(0, 9, (8, CALLS))
WEIGHTS = WEIGHTS.astype(np.float32)
# Whether a shard has read the parameters of the previous call.
IS_LATE = np.random.default_rng(2).random((8, CALLS)) < 0.5


def _loss(params, x):
  return jnp.sum(jnp.sin(params - x))


def _grads(params, x):
  return st.value_and_grad(_loss, AXIS)(params, x)[1]


def _compensate(adaptive, **kwargs):
  decay = DECAY if adaptive else None
  return compensate_delay(LAM, decay=decay, eps=EPS, **kwargs)


def _chain(adaptive, place):
  mean, scale = cross_shard_mean(AXIS), optax.scale(-LEARNING_RATE)
  if place == 'before':
    return optax.chain(_compensate(adaptive, axis_name=AXIS), mean, scale)
  return optax.chain(mean, _compensate(adaptive), scale)


def _expected(adaptive, place, weights, is_late):
  """Returns the updates of each call, in float64."""
  params = read = np.linspace(-1, 1, 5)
  mean_square = np.zeros((8, 5) if place == 'before' else 5)
  calls = []
  for x, weight, late in zip(
      DATA.swapaxes(0, 1).astype(np.float64), weights.T, is_late.T, strict=True
  ):
    own_read = np.where(late[:, None], read, params)
    u = np.cos(own_read - x)
    own_weights = weight.astype(np.float64) if weight.any() else None
    if place == 'after':
      u = np.average(u, axis=0, weights=own_weights)
      own_read = own_read[0]
    lam = LAM
    if adaptive:
      recorded = DECAY * mean_square + (1 - DECAY) * u**2
      is_recorded = place == 'after' or weight[:, None] > 0
      mean_square = np.where(is_recorded, recorded, mean_square)
      lam = LAM / np.sqrt(mean_square + EPS)
    u = u + lam * u * u * (params - own_read)
    if place == 'before':
      u = np.average(np.where(weight[:, None] > 0, u, 0), 0, own_weights)
    update = -LEARNING_RATE * u
    read, params = params, params + update
    calls.append(update)
  return np.stack([np.stack(calls)] * 8).astype(np.float32)


def _train(adaptive, place, data, weights, is_late, weighted):
  """Returns the updates of each call."""
  tx = _chain(adaptive, place)

  def call(carry, own):
    params, before, state = carry
    x, weight, is_late = own
    read = jnp.where(is_late, before, params)
    given = {'weight': weight} if weighted else {}
    updates, state = tx.update(
        _grads(read, x), state, params, read_params=read, **given
    )
    return (optax.apply_updates(params, updates), params, state), updates

  def shard(shared, own):
    params, common = shared
    x, weights, is_late = own
    is_late = is_late if place == 'before' else common
    start = params, params, tx.init(params)
    return lax.scan(call, start, (x, weights, is_late))[1]

  params = np.linspace(-1, 1, 5, dtype=np.float32)
  return modes.map_shards('shard_map', shard)(
      (params, is_late[0]), (data, weights, is_late)
  )


class CompensationTest(parameterized.TestCase):

  @cases.parameters(
      ('before', False, False),
      ('before', True, False),
      ('before', True, True),
      ('after', True, True),
  )
  def test_corrects_gradients_of_older_parameters(
      self, place, adaptive, weighted
  ):
    is_late = IS_LATE if place == 'before' else np.tile(IS_LATE[0], (8, 1))
    weights = WEIGHTS if weighted else np.ones_like(WEIGHTS)
    self.assertIn(0, WEIGHTS)
    data = np.where(weights[..., None] > 0, DATA, np.float32(np.nan))

    updates = _train(adaptive, place, data, weights, is_late, weighted)

    expected = _expected(adaptive, place, weights, is_late)
    chex.assert_trees_all_close(
        updates, expected, rtol=1e-5, atol=1e-6, strict=True
    )
    # The corrections are larger than rounding errors.
    plain = _expected(adaptive, place, weights, np.zeros_like(is_late))
    self.assertGreater(np.abs(plain - expected).max(), 1e-3)

  @cases.product(adaptive=(False, True))
  def test_keeps_every_bit_of_parameters_that_have_not_moved(self, adaptive):
    tx = _compensate(adaptive)
    params = {
        'w': jnp.arange(7.0),
        'half': jnp.ones(4, jnp.bfloat16),
        'complex': jnp.array([1 + 1j, 2]),
    }
    updates = {
        'w': jnp.array([-0.0, 0.0, jnp.inf, -jnp.inf, jnp.nan, 3e38, 1e-30]),
        'half': jnp.array([-0.0, 1.1, jnp.inf, 3e38], jnp.bfloat16),
        'complex': jnp.array([complex(-0.0, -0.0), complex(jnp.inf, 1)]),
    }
    same, _ = jax.jit(tx.update)(
        updates, tx.init(params), params, read_params=params
    )

    chex.assert_trees_all_equal(_bits(same), _bits(updates), strict=True)

  @pytest.mark.thorough
  def test_keeps_leaves_of_every_type(self):
    tx = _compensate(True)
    params = {
        'half': jnp.full(2, 3.0, jnp.bfloat16),
        'complex': jnp.array([1.0 + 2j], jnp.complex64),
        'none': None,
        'missing': jnp.ones(2, jnp.float32),
        'masked': optax.MaskedNode(),
        'integer': jnp.ones(2, jnp.int32),
    }
    updates = {
        **params,
        'missing': None,
        'integer': np.zeros(2, jax.dtypes.float0),
    }
    read = jax.tree.map(lambda x: x - jnp.ones((), x.dtype), params)

    after, state = tx.update(updates, tx.init(params), params, read_params=read)

    chex.assert_trees_all_equal_shapes_and_dtypes(after, updates)
    lam = LAM / np.sqrt((1 - DECAY) * 5 + EPS)
    np.testing.assert_allclose(after['complex'], [1 + 2j + lam * 5], rtol=1e-5)
    mean_square = state.mean_square
    chex.assert_trees_all_close(
        {key: mean_square[key] for key in ('half', 'complex', 'missing')},
        {
            'half': np.full(2, 0.9, np.float32),
            'complex': np.full(1, 0.5, np.float32),
            'missing': np.zeros(2, np.float32),
        },
        rtol=1e-5,
        strict=True,
    )
    self.assertIsNone(mean_square['integer'])


class GatesTest(parameterized.TestCase):

  @cases.parameters('masked', 'partition')
  def test_read_params_may_have_more_leaves(self, combinator):
    tx = compensate_delay(0.5)
    if combinator == 'masked':
      tx = optax.masked(tx, {'a': True, 'b': False})
    else:
      links = {'tx': tx, 'rest': optax.identity()}
      tx = optax.partition(links, {'a': 'tx', 'b': 'rest'})
    params = {'a': jnp.array([3.0]), 'b': jnp.ones(2)}
    read = {'a': jnp.array([1.0]), 'b': jnp.zeros(2)}

    updates, _ = tx.update(params, tx.init(params), params, read_params=read)

    np.testing.assert_array_equal(updates['a'], [3.0 + 0.5 * 9 * 2])
    np.testing.assert_array_equal(updates['b'], np.ones(2))


class StateTest(parameterized.TestCase):

  @cases.parameters((8, 4, [1, 3, 5, 7]), (3, 5, [0, 1, 2, 2, 2]))
  def test_mean_square_does_not_shrink_when_resized(self, before, after, rows):
    tx = _compensate(True, axis_name=AXIS)
    params = np.zeros(3, np.float32)
    state = st.init_state(tx, params, modes.mesh(before))
    mean_square = np.tile(np.arange(before, dtype='float32')[:, None], (1, 3))
    state = state._replace(mean_square=mean_square)

    resized = st.resize_state(state, tx, params, modes.mesh(after))

    np.testing.assert_array_equal(
        resized.mean_square, np.tile(np.array(rows)[:, None], (1, 3))
    )


class RefusalTest(parameterized.TestCase):

  @cases.parameters(
      ((-1,), {}, ValueError, '`strength` must not be negative, got -1'),
      ((1,), {'decay': 1}, ValueError, '`decay` must be .* less than 1, got 1'),
      ((1,), {'eps': 0}, ValueError, '`eps` must be positive, got 0'),
  )
  def test_refuses_bad_arguments(self, args, kwargs, error, message):
    with self.assertRaisesRegex(error, message):
      compensate_delay(*args, **kwargs)

  @cases.parameters(
      (
          {'params': None},
          ValueError,
          'needs the current parameters',
      ),
      ({'read_params': None}, TypeError, 'needs the parameters at which'),
      (
          {'read_params': {'a': jnp.ones(3), 'b': jnp.ones(2)}},
          ValueError,
          r"`read_params` .*\(3,\) instead of the shape \(2,\) at \['a'\]",
      ),
      (
          {'read_params': {'a': jnp.ones(2)}},
          ValueError,
          r"`read_params` .*no leaf instead of the shape \(2,\) at \['b'\]",
      ),
      ({'state': optax.EmptyState()}, TypeError, '`CompensateDelayState`'),
      ({'updates': {'a': jnp.ones(2)}}, ValueError, 'do not have the tree'),
  )
  def test_refuses_mismatched_trees(self, wrong, error, message):
    tx = _compensate(True)
    params = {'a': jnp.ones(2), 'b': jnp.ones(2)}
    given = {
        'updates': params,
        'state': tx.init(params),
        'params': params,
        'read_params': params,
    }

    with self.assertRaisesRegex(error, message):
      tx.update(**{**given, **wrong})

  @cases.parameters(
      ('parameters read by each shard', '`updates` of .* reduced'),
      ('no axis', r"`axis_name` of `compensate_delay` must name \['data'\]"),
  )
  def test_refuses_updates_that_would_diverge(self, which, message):
    tx = _compensate(True)

    def shard(params, x):
      read = params
      grads = jax.grad(_loss)(params, x)
      if which == 'parameters read by each shard':
        read = params + x
      if which == 'no axis':
        grads = _grads(params, x)
      return tx.update(grads, tx.init(params), params, read_params=read)[0]

    with self.assertRaisesRegex(ValueError, message):
      mapped = modes.map_shards('shard_map', shard)
      jax.eval_shape(mapped, jnp.zeros(5), DATA[:, 0])


def _bits(tree):
  return jax.tree.map(lambda x: np.asarray(x).view(np.uint8), tree)
