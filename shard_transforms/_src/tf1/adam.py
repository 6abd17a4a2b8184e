"""`adam`: Adam with the state and the epsilon of TensorFlow 1."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


class AdamState(NamedTuple):
  r"""State of `adam`.

  Attributes:
    beta1_power: :math:`\beta_1^{t+1}` after t updates, float32 [].
    beta2_power: :math:`\beta_2^{t+1}` after t updates, float32 [].
    m: The first moment, a tree like the parameters.
    v: The second moment, the same.
  """

  beta1_power: jax.Array
  beta2_power: jax.Array
  m: optax.Updates
  v: optax.Updates


def adam(
    learning_rate: Any, beta1: Any, beta2: Any, epsilon: Any
) -> optax.GradientTransformationExtraArgs:
  r"""Adam as TensorFlow 1 computes and saves it.

  .. math:: u = -\eta \frac{\sqrt{1 - \beta_2^t}}{1 - \beta_1^t}
     \frac{m}{\sqrt{v} + \epsilon}

  It differs from `optax.adam` in two ways. Its epsilon is added before the bias
  of the second moment is corrected (the "epsilon hat" of the paper). And it
  keeps the powers of the betas instead of a count, as checkpoints of TensorFlow
  1 do; once a power underflows, no count can be recovered from it.

  Args:
    learning_rate: The rate, a number or a scalar array.
    beta1: The decay of the first moment, the same.
    beta2: The decay of the second moment, the same.
    epsilon: The number that keeps the divisor from zero, the same.

  Returns:
    An `optax.GradientTransformationExtraArgs` with an `AdamState`.

  Examples:
    >>> import jax.numpy as jnp
    >>> from shard_transforms import tf1
    >>> tx = tf1.adam(0.5, 0.9, 0.999, 1e-8)
    >>> updates, _ = tx.update(jnp.array([2.0]), tx.init(jnp.zeros(1)))
    >>> print(updates.round(3))
    [-0.5]

  References:
    Kingma and Ba, Adam: a method for stochastic optimization, 2014,
    https://arxiv.org/abs/1412.6980; `tf.train.AdamOptimizer` of TensorFlow
    1.15.
  """

  def init_fn(params):
    return AdamState(
        beta1_power=jnp.asarray(beta1, jnp.float32),
        beta2_power=jnp.asarray(beta2, jnp.float32),
        m=optax.tree.zeros_like(params),
        v=optax.tree.zeros_like(params),
    )

  def update_fn(updates, state, params=None, **extra_args):
    del params, extra_args
    m = optax.tree.update_moment(updates, state.m, beta1, 1)
    v = optax.tree.update_moment_per_elem_norm(updates, state.v, beta2, 2)
    rate = learning_rate * jnp.sqrt(1 - state.beta2_power)
    rate /= 1 - state.beta1_power
    updates = jax.tree.map(
        lambda m, v: (-rate * m / (jnp.sqrt(v) + epsilon)).astype(m.dtype), m, v
    )
    powers = state.beta1_power * beta1, state.beta2_power * beta2
    return updates, AdamState(*powers, m, v)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)
