"""`adam` and `ftrl`: an update of each element by itself."""

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


class FtrlState(NamedTuple):
  """State of `ftrl`.

  Attributes:
    accum: The sum of squared gradients, a tree like the parameters.
    linear: The linear term :math:`z`, a tree like the parameters.
  """

  accum: optax.Updates
  linear: optax.Updates


def ftrl(
    learning_rate: Any,
    learning_rate_power: float = -0.5,
    initial_accumulator_value: float = 0.1,
    l1_regularization_strength: float = 0.0,
    l2_regularization_strength: float = 0.0,
    l2_shrinkage_regularization_strength: float = 0.0,
) -> optax.GradientTransformationExtraArgs:
  r"""Follows the regularized leader, each coordinate at its own rate.

  With the exponent :math:`p` = -`learning_rate_power` and the shrunk gradient
  :math:`g' = g + 2 \lambda_s x`,

  .. math::
    n' = n + g^2, \quad
    z' = z + g' - (n'^p - n^p) x / \eta, \quad
    x' = \frac{\operatorname{sign}(z') \lambda_1 - z'}
              {n'^p / \eta + 2 \lambda_2} [|z'| > \lambda_1]

  and the update is :math:`x' - x`.

  Args:
    learning_rate: The rate :math:`\eta`, a number or a scalar array.
    learning_rate_power: How it decays, not positive.
    initial_accumulator_value: The initial :math:`n`, not negative.
    l1_regularization_strength: :math:`\lambda_1`, not negative.
    l2_regularization_strength: :math:`\lambda_2`, not negative.
    l2_shrinkage_regularization_strength: :math:`\lambda_s`, not negative.

  Returns:
    An `optax.GradientTransformationExtraArgs` with an `FtrlState`. Its `update`
    needs the parameters.

  Raises:
    ValueError: If an argument has the wrong sign; in `update`, without
      parameters.

  Examples:
    >>> import jax.numpy as jnp
    >>> from shard_transforms import tf1
    >>> tx, w = tf1.ftrl(0.5), jnp.zeros(1)
    >>> updates, _ = tx.update(jnp.ones(1), tx.init(w), w)
    >>> print(f'{updates[0]:.3f}')
    -0.477

  References:
    McMahan et al., Ad click prediction: a view from the trenches, 2013,
    https://research.google/pubs/pub41159/; `tf.train.FtrlOptimizer` of
    TensorFlow 1.15.
  """
  if learning_rate_power > 0:
    raise ValueError(
        '`learning_rate_power` must not be positive, got'
        f' {learning_rate_power!r}.'
    )
  for name, value in (
      ('initial_accumulator_value', initial_accumulator_value),
      ('l1_regularization_strength', l1_regularization_strength),
      ('l2_regularization_strength', l2_regularization_strength),
      (
          'l2_shrinkage_regularization_strength',
          l2_shrinkage_regularization_strength,
      ),
  ):
    if value < 0:
      raise ValueError(f'`{name}` must not be negative, got {value!r}.')

  def init_fn(params):
    return FtrlState(
        accum=optax.tree.full_like(params, initial_accumulator_value),
        linear=optax.tree.zeros_like(params),
    )

  def advance(grad, accum, linear, param):
    new = accum + grad * grad
    power, new_power = (x**-learning_rate_power for x in (accum, new))
    linear += grad + 2 * l2_shrinkage_regularization_strength * param
    linear -= (new_power - power) / learning_rate * param
    quadratic = new_power / learning_rate + 2 * l2_regularization_strength
    shrunk = jnp.sign(linear) * l1_regularization_strength - linear
    active = jnp.abs(linear) > l1_regularization_strength
    target = jnp.where(active, shrunk / quadratic, 0)
    return (
        (target - param).astype(grad.dtype),
        new.astype(accum.dtype),
        linear.astype(accum.dtype),
    )

  def update_fn(updates, state, params=None, **extra_args):
    del extra_args
    if params is None:
      raise ValueError('`update` of `ftrl` must be given the parameters.')
    advanced = jax.tree.map(advance, updates, state.accum, state.linear, params)
    updates, accum, linear = jax.tree.transpose(
        jax.tree.structure(updates), jax.tree.structure((0, 0, 0)), advanced
    )
    return updates, FtrlState(accum, linear)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)
