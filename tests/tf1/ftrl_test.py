from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

import cases
from shard_transforms import tf1

RNG = np.random.default_rng(0)
START = RNG.normal(size=6).astype(np.float32)
GRADS = RNG.normal(size=(12, 6)).astype(np.float32)
OPTIONS = {
    'plain': {},
    'power': {'learning_rate_power': -0.7},
    'constant_rate': {'learning_rate_power': 0.0},
    'start': {'initial_accumulator_value': 1.5},
    'l1': {'l1_regularization_strength': 3.0},
    'l2': {'l2_regularization_strength': 0.2},
    'shrinkage': {'l2_shrinkage_regularization_strength': 0.1},
    'all': {
        'learning_rate_power': -0.7,
        'initial_accumulator_value': 0.2,
        'l1_regularization_strength': 3.0,
        'l2_regularization_strength': 0.2,
        'l2_shrinkage_regularization_strength': 0.1,
    },
}
RATE = 0.5


def by_hand(
    learning_rate_power=-0.5,
    initial_accumulator_value=0.1,
    l1_regularization_strength=0.0,
    l2_regularization_strength=0.0,
    l2_shrinkage_regularization_strength=0.0,
):
  """Returns parameters, sums of squares and linear terms, in float64."""
  p, l1 = -learning_rate_power, l1_regularization_strength
  params = START.astype(np.float64)
  accum = np.full(6, initial_accumulator_value)
  linear = np.zeros(6)
  for grad in GRADS.astype(np.float64):
    for i, g in enumerate(grad):
      new = accum[i] + g**2
      shrunk = g + 2 * l2_shrinkage_regularization_strength * params[i]
      linear[i] += shrunk - (new**p - accum[i] ** p) / RATE * params[i]
      accum[i] = new
      if abs(linear[i]) <= l1:
        params[i] = 0
      else:
        quadratic = new**p / RATE + 2 * l2_regularization_strength
        params[i] = (np.sign(linear[i]) * l1 - linear[i]) / quadratic
  return params, accum, linear


def updated(tx, params, grads):
  state = tx.init(params)
  update = jax.jit(tx.update)
  for grad in grads:
    updates, state = update(grad, state, params)
    params = optax.apply_updates(params, updates)
  return params, state


class FtrlTest(parameterized.TestCase):

  @parameterized.named_parameters(OPTIONS.items())
  def test_follows_its_formulas(self, options):
    tx = tf1.ftrl(RATE, **options)

    params, state = updated(tx, jnp.asarray(START), GRADS)

    expected = [np.float32(x) for x in by_hand(**options)]
    chex.assert_trees_all_close(
        [params, state.accum, state.linear],
        [jnp.asarray(x) for x in expected],
        rtol=1e-4,
        atol=1e-5,
        strict=True,
    )

  @cases.parameters('l1', 'all')
  def test_the_cases_of_l1_have_zeros_and_others(self, name):
    zeros = by_hand(**OPTIONS[name])[0] == 0

    self.assertBetween(zeros.sum(), 1, 5)

  def test_updates_each_leaf_by_itself(self):
    tx = tf1.ftrl(RATE, **OPTIONS['all'])
    split = [{'a': g[0], 'b': (g[1:3], g[3:])} for g in GRADS]
    start = {'a': START[0], 'b': (START[1:3], START[3:])}

    params, state = updated(tx, jax.tree.map(jnp.asarray, start), split)

    whole, _ = updated(tx, jnp.asarray(START), GRADS)
    chex.assert_trees_all_close(
        params,
        {'a': whole[0], 'b': (whole[1:3], whole[3:])},
        rtol=1e-5,
        strict=True,
    )
    self.assertEqual(
        jax.tree.structure(state.linear), jax.tree.structure(params)
    )

  def test_starts_from_the_initial_sum_and_zeros(self):
    state = tf1.ftrl(RATE, initial_accumulator_value=0.25).init(
        {'w': jnp.asarray(START)}
    )

    chex.assert_trees_all_equal(
        (state.accum, state.linear),
        ({'w': jnp.full(6, 0.25)}, {'w': jnp.zeros(6)}),
        strict=True,
    )

  def test_zero_gradients_from_a_zero_sum_stay_finite(self):
    tx = tf1.ftrl(
        RATE, initial_accumulator_value=0.0, l2_regularization_strength=0.1
    )

    updates, _ = tx.update(jnp.zeros(6), tx.init(START), jnp.asarray(START))

    chex.assert_tree_all_finite(updates)

  def test_the_learning_rate_may_be_an_array(self):
    @jax.jit
    def update(rate):
      tx = tf1.ftrl(rate, **OPTIONS['all'])
      return tx.update(GRADS[0], tx.init(START), START)

    tx = tf1.ftrl(RATE, **OPTIONS['all'])
    chex.assert_trees_all_close(
        update(jnp.float32(RATE)),
        tx.update(jnp.asarray(GRADS[0]), tx.init(START), START),
        rtol=1e-5,
        atol=1e-6,
    )

  def test_refuses_a_rate_that_grows(self):
    with self.assertRaisesRegex(
        ValueError, '`learning_rate_power` must not be positive, got 0.5'
    ):
      tf1.ftrl(RATE, learning_rate_power=0.5)

  @cases.parameters(
      'initial_accumulator_value',
      'l1_regularization_strength',
      'l2_regularization_strength',
      'l2_shrinkage_regularization_strength',
  )
  def test_refuses_negative_numbers(self, name):
    with self.assertRaisesRegex(
        ValueError, f'`{name}` must not be negative, got -0.1'
    ):
      tf1.ftrl(RATE, **{name: -0.1})
