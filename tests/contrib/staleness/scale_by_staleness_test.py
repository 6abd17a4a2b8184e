"""`scale_by_staleness`: factors by age, with and without a reduction."""

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
from shard_transforms.contrib import scale_by_staleness

AXIS = modes.AXIS
RATE = 0.4
INT32 = np.iinfo(np.int32)

# [shards, calls, features] and [shards, calls]
DATA = np.random.default_rng(0).normal(size=(8, 7, 5)).astype(np.float32)
WEIGHTS = np.random.default_rng(1).integers(1, 9, (8, 7)).astype(np.float32)
# Of parameters that are up to 3 steps old, or seem to be of the future.
STEPS = np.arange(7) - np.random.default_rng(2).integers(-1, 4, (8, 7))
STEPS = STEPS.astype(np.int32)

# By name: the arguments, and the factor in NumPy.
KINDS = {
    'inverse': (('inverse',), {}, lambda age: 1 / np.maximum(age, 1)),
    'exponential': (
        *(('exponential',), {'rate': RATE}),
        lambda age: np.exp(-RATE * age),
    ),
    # Factors below zero count as zero.
    'function': (
        *((lambda age: 3 - jnp.minimum(age, 4),), {}),
        lambda age: np.maximum(3.0 - age, 0),
    ),
    'flag': (((lambda age: age < 2),), {}, lambda age: 1.0 * (age < 2)),
    'constant': (((lambda age: 0.5),), {}, lambda age: 0.5 + 0 * age),
}


def _loss(params, x):
  return 0.5 * jnp.sum((params - x) ** 2)


def _grads(params, x):
  return st.value_and_grad(_loss, AXIS)(params, x)[1]


def _mean():
  return st.cross_shard_mean(AXIS)


def _weighted(kind, inner=None):
  args, kwargs, _ = KINDS[kind]
  inner = harness.momentum() if inner is None else inner
  return scale_by_staleness(*args, inner, axis_name=AXIS, **kwargs)


def _expected(kind, data, weights, steps):
  """Returns updates, momenta and global steps."""
  device, global_step = one_device.Device(), 0
  calls = []
  by_call = data.swapaxes(0, 1), weights.T, steps.T
  for x, weight, step in zip(*by_call, strict=True):
    ages = np.maximum(global_step - step.astype(int), 0)
    counted = weight * KINDS[kind][2](ages)
    update = device.step(x, counted)
    global_step += counted.any()
    calls.append((update, device.momentum, global_step))
  updates, momenta, global_steps = zip(*calls, strict=True)
  on_all = one_device.on_all
  reduced = on_all(*updates), on_all(*momenta)
  return *reduced, on_all(*global_steps, dtype=np.int32)


def _train(kind, data=DATA, weights=None, steps=STEPS):
  names = 'local_step', 'weight'
  trained = harness.train(
      _weighted(kind),
      np.zeros(5, np.float32),
      (data, steps) if weights is None else (data, steps, weights),
      'shard_map',
      grad=lambda params, own: _grads(params, own[0]),
      extra_args=lambda _, own: dict(zip(names, own[1:], strict=False)),
      observe=lambda s: (optax.tree_utils.tree_get(s, 'trace'), s.global_step),
  )
  return trained.updates, *trained.observed


class WeightTest(parameterized.TestCase):
  """With `inner` and `axis_name`."""

  def assert_close(self, calls, expected):
    close = dict(rtol=1e-5, atol=1e-6, strict=True)
    chex.assert_trees_all_close(calls, expected, **close)

  @cases.parameters(*KINDS)
  def test_shards_count_by_their_ages(self, kind):
    data, steps = DATA.copy(), STEPS.copy()
    if kind == 'function':
      # With a factor of zero, it contributes nothing.
      steps[5], data[5] = -9, np.inf

    calls = _train(kind, data, steps=steps)

    self.assert_close(calls, _expected(kind, data, np.ones((8, 7)), steps))

  @cases.parameters(85, 1000)
  def test_shards_of_one_age_give_the_plain_mean(self, age):
    tx = scale_by_staleness('exponential', _mean(), rate=1.0, axis_name=AXIS)

    def shard(_, x):
      state = tx.init(x)._replace(global_step=jnp.int32(age))
      return tx.update(x, state, local_step=0)[0]

    updates = modes.map_shards('vmap', shard)(None, 1e-3 * DATA[:, 0])

    np.testing.assert_allclose(
        updates[0], 1e-3 * DATA[:, 0].mean(axis=0), rtol=1e-5, atol=1e-9
    )

  def test_ages_multiply_weights(self):
    data, weights = DATA.copy(), WEIGHTS.copy()
    weights[3] = 0
    # In one call, no shard counts at all.
    weights[:, 4] = 0
    data[weights == 0] = np.nan

    calls = _train('inverse', data, weights)

    self.assert_close(calls, _expected('inverse', data, weights, STEPS))
    updates, momenta, global_steps = calls
    np.testing.assert_array_equal(updates[:, 4], np.zeros((8, 5)))
    np.testing.assert_array_equal(momenta[:, 4], momenta[:, 3])
    np.testing.assert_array_equal(global_steps[0], [1, 2, 3, 4, 4, 5, 6])

  @cases.parameters(*KINDS)
  def test_factors_of_any_dtype_multiply_fractional_weights(self, kind):
    weights = WEIGHTS / 16

    calls = _train(kind, weights=weights)

    self.assert_close(calls, _expected(kind, DATA, weights, STEPS))

  def test_moments_before_the_reduction_see_no_nan(self):
    tx = _weighted('function', optax.chain(optax.trace(0.5), _mean()))

    def shard(params, own):
      x, local_step = own
      state = tx.init(st.per_shard(params, AXIS))
      state = tx.update(x, state, local_step=local_step)[1]
      return state.inner_state[0].trace

    x, steps = DATA[:, 0].copy(), np.zeros(8, np.int32)
    x[5], steps[5] = np.nan, -9
    trace = modes.map_shards('shard_map', shard)(np.zeros(5, 'f'), (x, steps))

    np.testing.assert_array_equal(trace, np.nan_to_num(x))

  def test_sends_one_number_beside_the_reduction(self):
    tx = _weighted('inverse')

    def shard(params, x):
      return tx.update(_grads(params, x), tx.init(params), local_step=0)[0]

    mapped = modes.map_shards('shard_map', shard)
    report = st.monitoring.communication_report(
        mapped, np.zeros(5, 'f'), DATA[:, 0]
    )

    # The weights, and the mean of five elements with its weight.
    payload = sum(sent.payload_bytes for sent in report.collectives)
    self.assertEqual(payload, 4 * (1 + 5 + 1))


class UpdateTest(parameterized.TestCase):
  """Without them."""

  def test_scales_updates_before_a_reduction(self):
    updates = harness.train(
        optax.chain(scale_by_staleness('inverse'), _mean()),
        np.zeros(5, np.float32),
        (DATA, STEPS),
        'shard_map',
        grad=lambda _, own: own[0],
        extra_args=lambda _, own: {'local_step': own[1]},
    ).updates

    factors = 1 / np.maximum(np.arange(7) - STEPS.astype(int), 1)
    expected = np.mean(DATA.astype(np.float64) * factors[..., None], axis=0)
    expected = np.tile(expected, (8, 1, 1))
    np.testing.assert_allclose(updates, expected, rtol=1e-5, atol=1e-6)

  def test_what_is_no_factor_gives_zero_of_a_nan(self):
    @jax.jit
    @jax.vmap
    def two_calls(factor):
      tx = scale_by_staleness(lambda age: jnp.where(age > 0, factor, 1.0))
      state = tx.init(jnp.zeros(3))
      fresh, state = tx.update(jnp.ones(3), state, local_step=0)
      old, state = tx.update(jnp.full(3, jnp.nan), state, local_step=0)
      return fresh, old, state.global_step

    fresh, old, steps = two_calls(np.float32([0, -1, np.inf, np.nan]))

    np.testing.assert_array_equal(fresh, np.ones((4, 3)))
    np.testing.assert_array_equal(old, np.zeros((4, 3)))
    np.testing.assert_array_equal(steps, [2] * 4)

  def test_keeps_leaves_of_every_kind(self):
    tx = scale_by_staleness('inverse')
    updates = {
        'half': jnp.full(3, 3.0, jnp.bfloat16),
        'complex': jnp.array([1.0 + 2j]),
        'none': None,
        'masked': optax.MaskedNode(),
        'integer': np.zeros(2, jax.dtypes.float0),
    }
    state = tx.init(updates)._replace(global_step=jnp.int32(2))

    scaled, _ = tx.update(updates, state, local_step=0)

    chex.assert_trees_all_equal_shapes_and_dtypes(scaled, updates)
    np.testing.assert_array_equal(scaled['half'].astype(float), np.full(3, 1.5))
    np.testing.assert_array_equal(scaled['complex'], [0.5 + 1j])

  def test_refuses_updates_of_which_some_are_reduced_where_steps_differ(self):
    tx = scale_by_staleness('inverse')

    def shard(params, own):
      x, local_step = own
      state = tx.init(params)
      grads = _grads(params, x)
      mean = _mean().update(grads, optax.EmptyState())[0]
      return tx.update([mean, grads], state, local_step=local_step)[0]

    message = '`updates` of `scale_by_.* must be per shard .*already reduced'
    with self.assertRaisesRegex(ValueError, message):
      mapped = modes.map_shards('shard_map', shard)
      jax.eval_shape(mapped, np.zeros(5, 'float32'), (DATA[:, 0], STEPS[:, 0]))


class GatesTest(parameterized.TestCase):
  """Inside and around the gates, through which local steps flow."""

  def test_the_rate_can_be_injected(self):
    tx = optax.inject_hyperparams(scale_by_staleness)(
        'exponential', rate=optax.linear_schedule(1.0, 0.0, 2)
    )
    state = tx.init(jnp.zeros(()))

    def call(state, _):
      return tx.update(jnp.ones(()), state, local_step=-2)[::-1]

    _, scaled = jax.jit(lambda s: lax.scan(call, s, length=2))(state)

    np.testing.assert_allclose(scaled, np.exp([-1.0 * 2, -0.5 * 3]), rtol=1e-6)


class RefusalTest(parameterized.TestCase):

  @cases.parameters(
      (('linear',), {}, ValueError, "`kind` .* 'exponential' or .*'linear'"),
      ((0.5,), {}, TypeError, '`kind` .* function of the age, got 0.5.*static'),
      (('exponential',), {}, ValueError, 'needs `rate` .*`rate=None`'),
      (
          ('inverse',),
          {'rate': 1},
          ValueError,
          "`rate` .*kind='inverse'` .*rate=1`",
      ),
      (('exponential',), {'rate': 0}, ValueError, '`rate` must be positive'),
      (('exponential',), {'rate': '1'}, TypeError, '`rate` must be a real'),
      (('inverse', optax.identity()), {}, ValueError, 'needs both `inner` and'),
      (('inverse',), {'axis_name': AXIS}, ValueError, 'needs both `inner` and'),
      (('inverse', 3), {'axis_name': AXIS}, TypeError, '`inner` of `scale_by'),
  )
  def test_refuses_bad_arguments(self, args, kwargs, error, message):
    with self.assertRaisesRegex(error, message):
      scale_by_staleness(*args, **kwargs)

  @cases.parameters(
      (lambda age: None, TypeError, 'must be a real number, got None'),
      (lambda age: 1j * age, TypeError, 'must be a real number'),
      (lambda age: jnp.ones(3), ValueError, r'a scalar, got the shape \(3,\)'),
  )
  def test_refuses_what_is_no_factor(self, kind, error, message):
    tx = scale_by_staleness(kind)

    with self.assertRaisesRegex(error, f'The factor .*{message}'):
      tx.update(jnp.ones(3), tx.init(jnp.ones(3)), local_step=0)


class FactorTest(parameterized.TestCase):

  def test_the_age_does_not_wrap_around(self):
    rows = np.array(
        [
            # (global step, local step, age)
            (0, 0, 0),
            (5, 2, 3),
            (5, 9, 0),
            (0, INT32.max, 0),
            (0, INT32.min, INT32.max),
            (INT32.max, INT32.min, INT32.max),
            (INT32.max, -1, INT32.max),
            (INT32.max, 0, INT32.max),
            (INT32.max, INT32.max - 1, 1),
        ],
        np.int32,
    )

    tx = scale_by_staleness(lambda age: jnp.where(age > 0, age, 0.5))

    @jax.jit
    @jax.vmap
    def factor(row):
      state = tx.init(jnp.float32(0))._replace(global_step=row[0])
      return tx.update(jnp.float32(1), state, local_step=row[1])

    found, state = factor(rows)

    expected = np.maximum(rows[:, 2], 0.5).astype('f')
    np.testing.assert_array_equal(found, expected)
    # The counter saturates.
    counted = np.minimum(np.int64(rows[:, 0]) + 1, INT32.max)
    np.testing.assert_array_equal(state.global_step, counted)
