"""What all optimizers of `tf1` have in common."""

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

PARAMS = {'w': np.float32([[1, -2, 3], [4, 5, -6]]), 'b': np.float32(0.5)}
GRADS = jax.tree.map(lambda x: np.float32(0.5) * x**2 + 1, PARAMS)
TRANSFORMATIONS = {
    'adam': lambda rate: tf1.adam(rate, 0.9, 0.999, 1e-8),
    'ftrl': lambda rate: tf1.ftrl(rate, l1_regularization_strength=0.1),
    'lars': lambda rate: tf1.lars(rate),
}


class ContractTest(parameterized.TestCase):

  @cases.parameters('ftrl', 'lars')
  def test_needs_the_parameters(self, name):
    tx = TRANSFORMATIONS[name](0.1)

    with self.assertRaisesRegex(ValueError, f'of `{name}` must be given the p'):
      tx.update(GRADS, tx.init(PARAMS))

  @cases.product(name=TRANSFORMATIONS, rate=(0.1, np.float32(0.1)))
  def test_keeps_dtypes_and_ignores_extra_arguments(self, name, rate):
    half = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), PARAMS)
    tx = TRANSFORMATIONS[name](rate)
    state = tx.init(half)

    updates, after = tx.update(half, state, half, weight=3.0)

    chex.assert_trees_all_equal_shapes_and_dtypes(updates, half)
    chex.assert_trees_all_equal_shapes_and_dtypes(after, state)
    chex.assert_trees_all_equal(
        (updates, after), tx.update(half, state, half), strict=True
    )

  @cases.parameters(*TRANSFORMATIONS)
  def test_takes_a_schedule_by_inject_hyperparams(self, name):
    make = TRANSFORMATIONS[name]
    injected = optax.inject_hyperparams(make)(lambda count: 0.1 * (count + 1))

    found, expected = (
        jax.jit(tx.update)(GRADS, tx.init(PARAMS), PARAMS)[0]
        for tx in (injected, make(0.1))
    )

    chex.assert_trees_all_close(found, expected, rtol=1e-5, strict=True)

  @cases.parameters(*TRANSFORMATIONS)
  def test_takes_a_tree_without_leaves(self, name):
    tx = TRANSFORMATIONS[name](0.1)

    self.assertEqual(tx.update({}, tx.init({}), {})[0], {})

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
