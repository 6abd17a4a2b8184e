"""Optimizers whose numbers are those of TensorFlow 1.

Beside its recordings they are tested in `facade/golden_test.py`.
"""

import inspect
import math

from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

import cases
from shard_transforms import tf1

RNG = np.random.default_rng(0)
PARAMS = {'w': RNG.normal(size=(2, 3)).astype(np.float32), 'b': np.float32(0.5)}
GRADS = [
    {'w': RNG.normal(size=(2, 3)).astype(np.float32), 'b': np.float32(i - 3)}
    for i in range(10)
]
# Of numbers that may be arrays.
FACTORIES = {
    'adam': lambda *rates: tf1.adam(*(rates or (0.1, 0.8, 0.95, 0.1))),
    'ftrl': lambda *rates: tf1.ftrl(*(rates or (0.5,)), **FTRL['all']),
    'lars': lambda *rates: tf1.lars(*(rates or (0.1,))),
}
FTRL = {
    'plain': {},
    'constant_rate': {'learning_rate_power': 0.0},
    'all': {
        'learning_rate_power': -0.7,
        'initial_accumulator_value': 0.2,
        'l1_regularization_strength': 3.0,
        'l2_regularization_strength': 0.2,
        'l2_shrinkage_regularization_strength': 0.1,
    },
}

DEFAULTS = dict(zip(FTRL['all'], (-0.5, 0.1, 0.0, 0.0, 0.0), strict=True))


def trained(tx, params=PARAMS, grads=GRADS):
  """Returns all updates, the parameters and the state at the end."""
  state, found = tx.init(params), []
  update = jax.jit(tx.update)
  for of_step in grads:
    updates, state = update(of_step, state, params)
    params = optax.apply_updates(params, updates)
    found.append(updates)
  return found, params, state


def assert_close(actual, expected, rtol=1e-5, atol=0.0):
  expected = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), expected)
  chex.assert_trees_all_close(
      actual, expected, rtol=rtol, atol=atol, strict=True
  )


class OptimizerTest(parameterized.TestCase):
  """What all of them promise."""

  @cases.parameters(
      (tf1.adam, 0.1, math.nan, 0.9, 1e-8),
      (tf1.ftrl, math.nan),
      (tf1.lars, 0.1, math.nan),
  )
  def test_names_an_argument_that_is_not_a_number(self, factory, *numbers):
    names = [*inspect.signature(factory).parameters]
    name = names[[*map(math.isnan, numbers)].index(True)]

    with self.assertRaisesRegex(ValueError, f'`{name}` of .* must not be NaN'):
      factory(*numbers)

  @cases.parameters('ftrl', 'lars')
  def test_needs_the_parameters(self, name):
    tx = FACTORIES[name]()

    with self.assertRaisesRegex(ValueError, f'of `{name}` must be given the p'):
      tx.update(GRADS[0], tx.init(PARAMS))

  @cases.parameters('adam', 'ftrl', 'lars', ('lars', np.float32(0.1)))
  def test_keeps_dtypes_and_ignores_extra_arguments(self, name, *rates):
    half = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), PARAMS)
    tx = FACTORIES[name](*rates)
    state = tx.init(half)

    updates, after = tx.update(half, state, half, weight=3.0)

    chex.assert_trees_all_equal_dtypes(updates, half)
    chex.assert_trees_all_equal_shapes_and_dtypes(after, state)
    without = tx.update(half, state, half)
    chex.assert_trees_all_equal((updates, after), without)

  @cases.parameters(*FACTORIES)
  def test_takes_a_tree_without_leaves(self, name):
    tx = FACTORIES[name]()

    self.assertEqual(tx.update({}, tx.init({}), {})[0], {})

  @cases.parameters(('adam', 0.1, 0.8, 0.95, 0.1), ('ftrl', 0.5), ('lars', 0.1))
  def test_numbers_may_be_arrays(self, name, *numbers):
    @jax.jit
    def update(numbers):
      tx = FACTORIES[name](*numbers)
      return tx.update(GRADS[0], tx.init(PARAMS), PARAMS)[0]

    tx = FACTORIES[name](*numbers)
    assert_close(
        update(tuple(map(jnp.float32, numbers))),
        tx.update(GRADS[0], tx.init(PARAMS), PARAMS)[0],
        atol=1e-6,
    )


class AdamTest(parameterized.TestCase):

  def test_is_that_of_optax_where_epsilon_is_small(self):
    updates, _, state = trained(tf1.adam(0.1, 0.8, 0.95, 1e-8))

    expected, _, (of_optax, _) = trained(optax.adam(0.1, 0.8, 0.95, eps=1e-8))
    assert_close(updates, expected)
    assert_close((state.m, state.v), (of_optax.mu, of_optax.nu))
    powers = np.float32(0.8**11), np.float32(0.95**11)
    assert_close((state.beta1_power, state.beta2_power), powers)

  def test_goes_on_below_the_smallest_power(self):
    tx = tf1.adam(0.1, 0.8, 0.95, 1e-8)
    state = tx.init(PARAMS)._replace(
        beta1_power=jnp.float32(0), beta2_power=jnp.float32(0)
    )

    updates, state = tx.update(GRADS[0], state)

    chex.assert_tree_all_finite((updates, state))
    assert_close(updates['b'], 0.1 * 0.2 / np.sqrt(0.05), rtol=1e-4)


class FtrlTest(parameterized.TestCase):

  def by_hand(self, options):
    """Returns parameters, sums of squares and linear terms of `w`."""
    power, initial, l1, l2, shrinkage = {**DEFAULTS, **options}.values()
    p = -power
    params = PARAMS['w'].astype(np.float64)
    accum = np.full(params.shape, initial)
    linear = np.zeros(params.shape)
    for g in (grads['w'].astype(np.float64) for grads in GRADS):
      new = accum + g**2
      shrunk = g + 2 * shrinkage * params
      linear += shrunk - (new**p - accum**p) / 0.5 * params
      accum = new
      quadratic = new**p / 0.5 + 2 * l2
      params = (np.sign(linear) * l1 - linear) / quadratic
      params[abs(linear) <= l1] = 0
    return params, accum, linear

  @parameterized.named_parameters(FTRL.items())
  def test_follows_its_formulas(self, options):
    _, params, state = trained(tf1.ftrl(0.5, **options))

    expected = self.by_hand(options)
    found = params['w'], state.accum['w'], state.linear['w']
    assert_close(found, expected, rtol=1e-4, atol=1e-5)
    if 'l1_regularization_strength' in options:
      self.assertBetween((expected[0] == 0).sum(), 1, 5)

  def test_zero_gradients_from_a_zero_sum_stay_finite(self):
    tx = tf1.ftrl(
        0.5, initial_accumulator_value=0.0, l2_regularization_strength=0.1
    )

    updates, _ = tx.update(jnp.zeros(6), tx.init(jnp.ones(6)), jnp.ones(6))

    chex.assert_tree_all_finite(updates)

  def test_refuses_numbers_of_the_wrong_sign(self):
    for name in FTRL['all']:
      value = 0.5 if name == 'learning_rate_power' else -0.1
      with self.assertRaisesRegex(
          ValueError, f'`{name}` must not be .*{value}'
      ):
        tf1.ftrl(0.5, **{name: value})


class LarsTest(parameterized.TestCase):

  def first(self, tx, params=PARAMS, grads=GRADS[0]):
    return trained(tx, params, [grads])[0][0]

  def test_divides_by_the_sum_of_the_norms(self):
    updates = self.first(tf1.lars(0.5, 0.9, 0.1, 0.2, 0.3))

    def expected(g, w):
      norms = np.linalg.norm(g), np.linalg.norm(w)
      ratio = 0.2 * norms[1] / (norms[0] + 0.1 * norms[1] + 0.3)
      return -0.5 * ratio * (g + 0.1 * w)

    assert_close(updates, jax.tree.map(expected, GRADS[0], PARAMS))

  @cases.parameters(False, True)
  def test_momentum_holds_the_rate(self, nesterov):
    zeros = jax.tree.map(np.zeros_like, PARAMS)
    tx = tf1.lars(0.5, 0.8, mask=False, nesterov=nesterov)
    state = tx.init(PARAMS)
    found = []
    for rate, grads in ((0.5, GRADS[0]), (0.0, zeros)):
      tx = tf1.lars(rate, 0.8, mask=False, nesterov=nesterov)
      updates, state = tx.update(grads, state, PARAMS)
      found.append(updates)

    factors = (1.8, 0.64) if nesterov else (1.0, 0.8)
    for updates, factor in zip(found, factors, strict=True):
      expected = jax.tree.map(lambda g, f=factor: -0.5 * f * g, GRADS[0])
      assert_close(updates, expected, rtol=1e-6)

  def test_a_norm_of_zero_takes_the_rate_as_it_is(self):
    zeros = jax.tree.map(np.zeros_like, PARAMS)

    updates = self.first(tf1.lars(0.5, weight_decay=0.0), zeros)
    still = self.first(tf1.lars(0.5, weight_decay=0.0), grads=zeros)

    assert_close(updates, jax.tree.map(lambda g: -0.5 * g, GRADS[0]))
    chex.assert_trees_all_close(still, zeros)

  def test_the_mask_chooses_leaves(self):
    mask = {'w': True, 'b': False}

    updates = self.first(tf1.lars(0.5, mask=lambda params: mask))

    assert_close(updates['b'], -0.5 * GRADS[0]['b'])
    assert_close(updates['w'], self.first(tf1.lars(0.5))['w'])

  def test_takes_a_schedule_by_inject_hyperparams(self):
    tx = optax.inject_hyperparams(tf1.lars)(lambda count: 0.1 * (count + 1))

    assert_close(self.first(tx), self.first(tf1.lars(0.1)), rtol=1e-6)
