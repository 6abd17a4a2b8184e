"""`ftrl`: follow the regularized leader, which Optax does not have."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax


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
