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
PARAMS = {
    'w': RNG.normal(size=(2, 3)).astype(np.float32),
    'b': RNG.normal(size=3).astype(np.float32),
}
GRADS = jax.tree.map(lambda x: np.float32(0.5) * x**2 + 1, PARAMS)


def first(tx, params=PARAMS, grads=GRADS):
  updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
  return updates


class LarsTest(parameterized.TestCase):

  def test_divides_by_the_sum_of_the_norms(self):
    norm = np.linalg.norm

    updates = first(tf1.lars(0.5, 0.9, 0.1, 0.2, 0.3))

    def expected(g, w):
      ratio = 0.2 * norm(w) / (norm(g) + 0.1 * norm(w) + 0.3)
      return jnp.float32(-0.5 * ratio * (g + 0.1 * w))

    chex.assert_trees_all_close(
        updates, jax.tree.map(expected, GRADS, PARAMS), rtol=1e-5, strict=True
    )

  @cases.parameters(False, True)
  def test_momentum_holds_the_rate(self, nesterov):
    zeros = jax.tree.map(np.zeros_like, PARAMS)
    tx = tf1.lars(0.5, 0.8, mask=False, nesterov=nesterov)
    state = tx.init(PARAMS)
    found = []
    for rate, grads in ((0.5, GRADS), (0.0, zeros)):
      tx = tf1.lars(rate, 0.8, mask=False, nesterov=nesterov)
      updates, state = tx.update(grads, state, PARAMS)
      found.append(updates)

    factors = (1.8, 0.64) if nesterov else (1.0, 0.8)
    for updates, factor in zip(found, factors, strict=True):
      expected = jax.tree.map(
          lambda g, f=factor: jnp.float32(-0.5 * f * g), GRADS
      )
      chex.assert_trees_all_close(updates, expected, rtol=1e-6, strict=True)

  def test_a_norm_of_zero_takes_the_rate_as_it_is(self):
    zeros = jax.tree.map(np.zeros_like, PARAMS)

    updates = first(tf1.lars(0.5, weight_decay=0.0), zeros)
    still = first(tf1.lars(0.5, weight_decay=0.0), grads=zeros)

    expected = jax.tree.map(lambda g: jnp.float32(-0.5 * g), GRADS)
    chex.assert_trees_all_close(updates, expected, strict=True)
    chex.assert_trees_all_close(still, zeros)

  def test_the_mask_chooses_leaves(self):
    mask = {'w': True, 'b': False}

    updates = first(tf1.lars(0.5, mask=lambda params: mask))

    chex.assert_trees_all_close(updates['b'], -0.5 * jnp.asarray(GRADS['b']))
    chex.assert_trees_all_close(updates['w'], first(tf1.lars(0.5))['w'])


class LambTest(parameterized.TestCase):

  def test_does_not_correct_the_bias(self):
    updates = first(tf1.lamb(0.5, 0.1, 0.8, 0.95, 1e-3))

    def expected(g, w):
      r = 0.2 * g / (np.sqrt(0.05 * g * g) + 1e-3) + 0.1 * w
      ratio = np.linalg.norm(w) / np.linalg.norm(r)
      return jnp.float32(-0.5 * ratio * r)

    chex.assert_trees_all_close(
        updates, jax.tree.map(expected, GRADS, PARAMS), rtol=1e-5, strict=True
    )

  def test_masks_choose_leaves(self):
    of_b = {'w': False, 'b': True}
    masked = first(
        tf1.lamb(0.5, 0.1, decay_mask=of_b, adaptation_mask=lambda _: of_b)
    )

    chex.assert_trees_all_close(masked['b'], first(tf1.lamb(0.5, 0.1))['b'])
    adam = 0.1 * GRADS['w'] / (np.sqrt(0.001) * np.abs(GRADS['w']) + 1e-6)
    chex.assert_trees_all_close(
        masked['w'], jnp.float32(-0.5 * adam), rtol=1e-5, strict=True
    )


TRANSFORMATIONS = {
    'lars': lambda rate=0.1: tf1.lars(rate),
    'lamb': lambda rate=0.1: tf1.lamb(rate),
    'adafactor': lambda rate=0.1: tf1.adafactor(rate, 0.9, beta1=0.5),
}


class ContractTest(parameterized.TestCase):

  @cases.parameters(
      (tf1.adam, 0.1, math.nan, 0.9, 1e-8),
      (tf1.ftrl, math.nan),
      (tf1.lars, 0.1, math.nan),
      (tf1.lamb, 0.1, math.nan),
      (tf1.adafactor, 0.1, math.nan),
  )
  def test_names_an_argument_that_is_not_a_number(self, factory, *numbers):
    names = [*inspect.signature(factory).parameters]
    name = names[[*map(math.isnan, numbers)].index(True)]

    with self.assertRaisesRegex(ValueError, f'`{name}` of .* must not be NaN'):
      factory(*numbers)

  @cases.parameters(sorted(TRANSFORMATIONS))
  def test_needs_the_parameters(self, name):
    tx = TRANSFORMATIONS[name]()

    with self.assertRaisesRegex(
        ValueError, f'`update` of `{name}` must be given the parameters'
    ):
      tx.update(GRADS, tx.init(PARAMS))

  @cases.parameters(sorted(TRANSFORMATIONS))
  def test_keeps_dtypes_and_ignores_extra_arguments(self, name):
    half = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), PARAMS)
    tx = TRANSFORMATIONS[name]()
    state = tx.init(half)

    updates, after = tx.update(half, state, half, weight=3.0)

    chex.assert_trees_all_equal_dtypes(updates, half)
    chex.assert_trees_all_equal_shapes_and_dtypes(after, state)

  @cases.parameters(sorted(TRANSFORMATIONS))
  def test_takes_a_schedule_by_inject_hyperparams(self, name):
    injected = optax.inject_hyperparams(TRANSFORMATIONS[name])
    tx = injected(lambda count: 0.1 * (count + 1))

    updates = first(tx)

    chex.assert_trees_all_close(
        updates, first(TRANSFORMATIONS[name]()), rtol=1e-6, strict=True
    )
