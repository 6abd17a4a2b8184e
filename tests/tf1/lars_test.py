from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np

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
