"""`adam`, `ftrl` and `lars`: dtypes, arguments and edge cases.

Their numerical results are compared with recordings in `golden_test.py` and
`optimizers_test.py`.
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
from shard_transforms import facade

RNG = np.random.default_rng(0)
PARAMS = {'w': RNG.normal(size=(2, 3)).astype(np.float32), 'b': np.float32(0.5)}
GRADS = {'w': RNG.normal(size=(2, 3)).astype(np.float32), 'b': np.float32(-3)}
# Of numbers that may be arrays.
FACTORIES = {
    'adam': lambda *rates: facade.adam(*(rates or (0.1, 0.8, 0.95, 0.1))),
    'ftrl': lambda *rates: facade.ftrl(*(rates or (0.5,)), **FTRL),
    'lars': lambda *rates: facade.lars(*(rates or (0.1,))),
}
FTRL = {
    'learning_rate_power': -0.7,
    'initial_accumulator_value': 0.2,
    'l1_regularization_strength': 3.0,
    'l2_regularization_strength': 0.2,
    'l2_shrinkage_regularization_strength': 0.1,
}


def assert_close(actual, expected, rtol=1e-5, atol=0.0):
  expected = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), expected)
  chex.assert_trees_all_close(
      actual, expected, rtol=rtol, atol=atol, strict=True
  )


class OptimizerTest(parameterized.TestCase):
  """Properties that all transformations have."""

  @cases.parameters(
      (facade.adam, 0.1, math.nan, 0.9, 1e-8),
      (facade.ftrl, math.nan),
      (facade.lars, 0.1, math.nan),
  )
  def test_nan_arguments_raise(self, factory, *numbers):
    names = [*inspect.signature(factory).parameters]
    name = names[[*map(math.isnan, numbers)].index(True)]

    with self.assertRaisesRegex(ValueError, f'`{name}` of .* is NaN'):
      factory(*numbers)

  @cases.product(name=FACTORIES, dtype=(jnp.bfloat16, jnp.float64))
  def test_needs_no_implicit_promotion(self, name, dtype):
    tx = FACTORIES[name]()

    def step(params, updates):
      return tx.update(updates, tx.init(params), params)[0]

    with jax.enable_x64(True), jax.numpy_dtype_promotion('strict'):
      params = {'w': jnp.ones(3, dtype), 'b': jnp.float32(1)}
      updates = jax.eval_shape(step, params, params)

    chex.assert_trees_all_equal_shapes_and_dtypes(updates, params)

  @cases.parameters('ftrl', 'lars')
  def test_missing_parameters_raise(self, name):
    tx = FACTORIES[name]()

    with self.assertRaisesRegex(ValueError, f'`{name}` needs the p'):
      tx.update(GRADS, tx.init(PARAMS))

  @cases.parameters(
      'adam', 'ftrl', 'lars', ('lars', np.float32(0.1)), fast=['adam', 'lars_1']
  )
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
  def test_accepts_an_empty_tree(self, name):
    tx = FACTORIES[name]()

    self.assertEqual(tx.update({}, tx.init({}), {})[0], {})

  @cases.parameters(
      ('adam', 0.1, 0.8, 0.95, 0.1), ('ftrl', 0.5), ('lars', 0.1), fast='adam'
  )
  def test_hyperparameters_may_be_arrays(self, name, *numbers):
    @jax.jit
    def update(numbers):
      tx = FACTORIES[name](*numbers)
      return tx.update(GRADS, tx.init(PARAMS), PARAMS)[0]

    tx = FACTORIES[name](*numbers)
    assert_close(
        update(tuple(map(jnp.float32, numbers))),
        tx.update(GRADS, tx.init(PARAMS), PARAMS)[0],
        atol=1e-6,
    )


class AdamTest(parameterized.TestCase):

  @cases.parameters(0.999, np.float32(0.999))
  def test_subtracts_betas_from_one_in_the_dtype_of_the_parameters(self, beta):
    tx = facade.adam(0.1, beta, beta, 1e-8)

    _, state = tx.update(GRADS, tx.init(PARAMS))

    part = np.float32(1) - np.float32(0.999)  # 1.3e-5 below 0.001.
    assert_close(state.m, jax.tree.map(lambda g: part * g, GRADS), rtol=3e-7)
    squares = jax.tree.map(lambda g: part * g * g, GRADS)
    assert_close(state.v, squares, rtol=3e-7)

  def test_continues_after_a_power_underflows(self):
    tx = facade.adam(0.1, 0.8, 0.95, 1e-8)
    state = tx.init(PARAMS)._replace(
        beta1_power=jnp.float32(0), beta2_power=jnp.float32(0)
    )

    updates, state = tx.update(GRADS, state)

    chex.assert_tree_all_finite((updates, state))
    assert_close(updates['b'], 0.1 * 0.2 / np.sqrt(0.05), rtol=1e-4)


class FtrlTest(parameterized.TestCase):

  def test_zero_gradients_from_a_zero_sum_stay_finite(self):
    tx = facade.ftrl(
        0.5, initial_accumulator_value=0.0, l2_regularization_strength=0.1
    )

    updates, _ = tx.update(jnp.zeros(6), tx.init(jnp.ones(6)), jnp.ones(6))

    chex.assert_tree_all_finite(updates)

  def test_arguments_of_the_wrong_sign_raise(self):
    for name in FTRL:
      value = 0.5 if name == 'learning_rate_power' else -0.1
      with self.assertRaisesRegex(
          ValueError, f'`{name}` must not be .*{value}'
      ):
        facade.ftrl(0.5, **{name: value})


class LarsTest(parameterized.TestCase):

  def first(self, tx, params=PARAMS, grads=GRADS):
    return jax.jit(tx.update)(grads, tx.init(params), params)[0]

  @cases.parameters(False, True)
  def test_momentum_contains_the_rate(self, nesterov):
    zeros = jax.tree.map(np.zeros_like, PARAMS)
    tx = facade.lars(0.5, 0.8, mask=False, nesterov=nesterov)
    state = tx.init(PARAMS)
    result = []
    for rate, grads in ((0.5, GRADS), (0.0, zeros)):
      tx = facade.lars(rate, 0.8, mask=False, nesterov=nesterov)
      updates, state = tx.update(grads, state, PARAMS)
      result.append(updates)

    factors = (1.8, 0.64) if nesterov else (1.0, 0.8)
    for updates, factor in zip(result, factors, strict=True):
      expected = jax.tree.map(lambda g, f=factor: -0.5 * f * g, GRADS)
      assert_close(updates, expected, rtol=1e-6)

  def test_a_zero_norm_uses_the_unscaled_rate(self):
    zeros = jax.tree.map(np.zeros_like, PARAMS)

    updates = self.first(facade.lars(0.5, weight_decay=0.0), zeros)
    still = self.first(facade.lars(0.5, weight_decay=0.0), grads=zeros)

    assert_close(updates, jax.tree.map(lambda g: -0.5 * g, GRADS))
    chex.assert_trees_all_close(still, zeros)

  def test_takes_a_schedule_by_inject_hyperparams(self):
    tx = optax.inject_hyperparams(facade.lars)(lambda count: 0.1 * (count + 1))

    assert_close(self.first(tx), self.first(facade.lars(0.1)), rtol=1e-6)
