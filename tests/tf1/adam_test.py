from absl.testing import parameterized
import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from shard_transforms import tf1

RNG = np.random.default_rng(0)
PARAMS = {
    'w': RNG.normal(size=(2, 3)).astype(np.float32),
    'b': np.float32(0.5),
}
GRADS = [
    {'w': RNG.normal(size=(2, 3)).astype(np.float32), 'b': np.float32(i - 3)}
    for i in range(10)
]


def updates_of(tx, params=PARAMS, grads=GRADS):
  """Returns all updates, and the last state."""
  state = tx.init(params)
  update = jax.jit(tx.update)
  found = []
  for of_step in grads:
    updates, state = update(of_step, state)
    found.append(updates)
  return found, state


class AdamTest(parameterized.TestCase):

  def assert_close(self, actual, expected, rtol=1e-5):
    chex.assert_trees_all_close(actual, expected, rtol=rtol, strict=True)

  def test_is_that_of_optax_where_epsilon_is_small(self):
    updates, state = updates_of(tf1.adam(0.1, 0.8, 0.95, 1e-8))

    expected, (of_optax, _) = updates_of(optax.adam(0.1, 0.8, 0.95, eps=1e-8))
    self.assert_close(updates, expected)
    self.assert_close((state.m, state.v), (of_optax.mu, of_optax.nu))

  def test_is_that_of_optax_with_the_epsilon_of_each_step(self):
    updates, _ = updates_of(tf1.adam(0.1, 0.8, 0.95, 0.1))

    tx = optax.inject_hyperparams(optax.adam, static_args=('b1', 'b2'))(
        0.1,
        b1=0.8,
        b2=0.95,
        eps=lambda count: 0.1 / jnp.sqrt(1 - 0.95 ** (count + 1)),
    )
    self.assert_close(updates, updates_of(tx)[0])

  def test_adds_epsilon_before_the_bias_is_corrected(self):
    updates, _ = updates_of(tf1.adam(0.1, 0.8, 0.95, 0.1), grads=GRADS[:1])

    m, v = (
        jax.tree.map(lambda g, decay=decay, n=n: (1 - decay) * g**n, GRADS[0])
        for decay, n in ((0.8, 1), (0.95, 2))
    )
    expected = jax.tree.map(
        lambda m, v: -0.1 * np.sqrt(0.05) / 0.2 * m / (np.sqrt(v) + 0.1), m, v
    )
    self.assert_close(
        updates[0],
        jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), expected),
    )

  def test_keeps_the_powers_of_the_betas(self):
    tx = tf1.adam(0.1, 0.8, 0.95, 1e-8)

    _, state = updates_of(tx)

    self.assert_close(
        (tx.init(PARAMS).beta1_power, tx.init(PARAMS).beta2_power),
        (jnp.float32(0.8), jnp.float32(0.95)),
    )
    self.assert_close(
        (state.beta1_power, state.beta2_power),
        (jnp.float32(0.8**11), jnp.float32(0.95**11)),
    )

  def test_goes_on_below_the_smallest_power(self):
    tx = tf1.adam(0.1, 0.8, 0.95, 1e-8)
    state = tx.init(PARAMS)._replace(
        beta1_power=jnp.float32(0), beta2_power=jnp.float32(0)
    )

    updates, state = tx.update(GRADS[0], state)

    chex.assert_tree_all_finite((updates, state))
    self.assert_close(
        updates['b'], jnp.float32(0.1 * 0.2 / np.sqrt(0.05)), rtol=1e-4
    )

  def test_starts_from_zeros(self):
    state = tf1.adam(0.1, 0.8, 0.95, 1e-8).init(PARAMS)

    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    chex.assert_trees_all_equal((state.m, state.v), (zeros, zeros), strict=True)

  def test_hyperparameters_may_be_arrays(self):
    numbers = 0.1, 0.8, 0.95, 0.1

    @jax.jit
    def update(hyperparameters):
      tx = tf1.adam(*hyperparameters)
      return tx.update(GRADS[0], tx.init(PARAMS))

    self.assert_close(
        update(tuple(map(jnp.float32, numbers))),
        tf1.adam(*numbers).update(GRADS[0], tf1.adam(*numbers).init(PARAMS)),
    )
