"""Rates that decay with a step, by the formulas of TensorFlow 1.

They are pure: Optax takes each as a schedule, for example
`lambda count: exponential_decay(0.1, count, 100, 0.96)`. The façade reads their
arguments at each update.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

# A number, a scalar array or, in the façade, a variable or a function.
_Number = Any


def exponential_decay(
    learning_rate: _Number,
    global_step: _Number,
    decay_steps: _Number,
    decay_rate: _Number,
    staircase: bool = False,
    name: str | None = None,
) -> jax.Array:
  r"""A rate that falls by a factor every `decay_steps`.

  .. math:: \eta r^{t / T}

  Args:
    learning_rate: The rate :math:`\eta` at step 0, a scalar.
    global_step: The step t, a scalar.
    decay_steps: The steps T until the rate is `decay_rate` times as large.
    decay_rate: The factor r.
    staircase: Whether t / T is rounded down.
    name: Ignored.

  Returns:
    The rate, []. In the façade, outside of a step, a function of no arguments
    that gives it: it reads the arguments, which may be variables or functions,
    at each update.

  Raises:
    ValueError: In the façade, if `global_step` is `None`, or an array that is
      made outside of a step, which never changes.

  Examples:
    >>> from shard_transforms import facade
    >>> with facade.Graph().as_default():
    ...   step = facade.get_or_create_global_step()
    >>> rate = facade.exponential_decay(0.5, step, 10, 0.5, staircase=True)
    >>> _ = step.assign(20)
    >>> print(rate())
    0.125

  References:
    `tf.train.exponential_decay` of TensorFlow 1.15.
  """
  return learning_rate * decay_rate ** _progress(
      global_step, decay_steps, staircase
  )


def natural_exp_decay(
    learning_rate: _Number,
    global_step: _Number,
    decay_steps: _Number,
    decay_rate: _Number,
    staircase: bool = False,
    name: str | None = None,
) -> jax.Array:
  r"""A rate that falls exponentially.

  .. math:: \eta e^{-r t / T}

  Args:
    learning_rate: The rate :math:`\eta` at step 0, a scalar.
    global_step: The step t, a scalar.
    decay_steps: The steps T of one unit of the exponent.
    decay_rate: The exponent r of one unit.
    staircase: Whether t / T is rounded down.
    name: Ignored.

  Returns:
    The rate, as `exponential_decay` does.

  Raises:
    ValueError: As `exponential_decay` does.

  Examples:
    >>> from shard_transforms import facade
    >>> print(f'{facade.natural_exp_decay(1.0, lambda: 10, 10, 2.0)():.4f}')
    0.1353

  References:
    `tf.train.natural_exp_decay` of TensorFlow 1.15.
  """
  return learning_rate * jnp.exp(
      -decay_rate * _progress(global_step, decay_steps, staircase)
  )


def inverse_time_decay(
    learning_rate: _Number,
    global_step: _Number,
    decay_steps: _Number,
    decay_rate: _Number,
    staircase: bool = False,
    name: str | None = None,
) -> jax.Array:
  r"""A rate that falls as the inverse of the step.

  .. math:: \frac{\eta}{1 + r t / T}

  Args:
    learning_rate: The rate :math:`\eta` at step 0, a scalar.
    global_step: The step t, a scalar.
    decay_steps: The steps T of one unit.
    decay_rate: What one unit adds to the divisor, r.
    staircase: Whether t / T is rounded down.
    name: Ignored.

  Returns:
    The rate, as `exponential_decay` does.

  Raises:
    ValueError: As `exponential_decay` does.

  Examples:
    >>> from shard_transforms import facade
    >>> print(facade.inverse_time_decay(1.0, lambda: 30, 10, 1.0)())
    0.25

  References:
    `tf.train.inverse_time_decay` of TensorFlow 1.15.
  """
  return learning_rate / (
      1 + decay_rate * _progress(global_step, decay_steps, staircase)
  )


def polynomial_decay(
    learning_rate: _Number,
    global_step: _Number,
    decay_steps: _Number,
    end_learning_rate: _Number = 0.0001,
    power: _Number = 1.0,
    cycle: bool = False,
    name: str | None = None,
) -> jax.Array:
  r"""A rate that falls to an end value as a power of the remaining steps.

  .. math:: (\eta - \eta_e) (1 - t / T)^p + \eta_e

  Args:
    learning_rate: The rate :math:`\eta` at step 0, a scalar.
    global_step: The step t, a scalar.
    decay_steps: The steps T until the end.
    end_learning_rate: The rate :math:`\eta_e` at the end.
    power: The power p.
    cycle: Whether T grows to its next multiple when it is reached; otherwise
      the rate stays at its end value.
    name: Ignored.

  Returns:
    The rate, as `exponential_decay` does.

  Raises:
    ValueError: As `exponential_decay` does.

  Examples:
    >>> from shard_transforms import facade
    >>> print(facade.polynomial_decay(1.0, lambda: 5, 10, 0.0)())
    0.5

  References:
    `tf.train.polynomial_decay` of TensorFlow 1.15.
  """
  step = jnp.asarray(global_step, jnp.float32)
  if cycle:
    rounds = jnp.maximum(jnp.ceil(step / decay_steps), 1)
    decay_steps = decay_steps * rounds
  left = 1 - jnp.minimum(step, decay_steps) / decay_steps
  return (learning_rate - end_learning_rate) * left**power + end_learning_rate


def piecewise_constant(
    x: _Number,
    boundaries: Sequence[_Number],
    values: Sequence[_Number],
    name: str | None = None,
) -> jax.Array:
  """A constant rate for each interval; a boundary ends the interval before it.

  Args:
    x: The step, a scalar.
    boundaries: The last step of each interval but the last, increasing.
    values: The rate of each interval.
    name: Ignored.

  Returns:
    The rate, as `exponential_decay` does.

  Raises:
    ValueError: If there is not one value more than boundaries; and as
      `exponential_decay` does.

  Examples:
    >>> from shard_transforms import facade
    >>> for step in (10, 11):
    ...   print(facade.piecewise_constant(lambda: step, [10], [0.5, 0.25])())
    0.5
    0.25

  References:
    `tf.train.piecewise_constant` of TensorFlow 1.15.
  """
  if len(values) != len(boundaries) + 1:
    raise ValueError(
        '`values` must be one more than `boundaries`, got'
        f' {len(values)} for {len(boundaries)}.'
    )
  ends = jnp.asarray(boundaries)
  return jnp.asarray(values)[jnp.searchsorted(ends, jnp.asarray(x))]


def cosine_decay(
    learning_rate: _Number,
    global_step: _Number,
    decay_steps: _Number,
    alpha: _Number = 0.0,
    name: str | None = None,
) -> jax.Array:
  r"""A rate that falls by half a period of the cosine, and stays.

  .. math:: \eta \left((1 - \alpha) \frac{1 + \cos(\pi t / T)}{2}
     + \alpha\right)

  Args:
    learning_rate: The rate :math:`\eta` at step 0, a scalar.
    global_step: The step t, a scalar.
    decay_steps: The steps T until the end.
    alpha: The rate at the end, as a part of the first one.
    name: Ignored.

  Returns:
    The rate, as `exponential_decay` does.

  Raises:
    ValueError: As `exponential_decay` does.

  Examples:
    >>> from shard_transforms import facade
    >>> print(facade.cosine_decay(1.0, lambda: 10, 10, alpha=0.25)())
    0.25

  References:
    `tf.train.cosine_decay` of TensorFlow 1.15; Loshchilov and Hutter, SGDR:
    stochastic gradient descent with warm restarts, 2016,
    https://arxiv.org/abs/1608.03983.
  """
  progress = jnp.minimum(_progress(global_step, decay_steps), 1)
  return learning_rate * _above(alpha, _half_cosine(progress))


def cosine_decay_restarts(
    learning_rate: _Number,
    global_step: _Number,
    first_decay_steps: _Number,
    t_mul: float = 2.0,
    m_mul: _Number = 1.0,
    alpha: _Number = 0.0,
    name: str | None = None,
) -> jax.Array:
  """A cosine decay that starts again at each of its ends.

  Args:
    learning_rate: The rate at step 0, a scalar.
    global_step: The step, a scalar.
    first_decay_steps: The length of the first decay.
    t_mul: How many times as long each decay is as the one before.
    m_mul: How many times as high each starts.
    alpha: The rate at the ends, as a part of the first one.
    name: Ignored.

  Returns:
    The rate, as `exponential_decay` does.

  Raises:
    ValueError: As `exponential_decay` does.

  Examples:
    >>> from shard_transforms import facade
    >>> print(facade.cosine_decay_restarts(1.0, lambda: 30, 10, m_mul=0.5)())
    0.25

  References:
    `tf.train.cosine_decay_restarts` of TensorFlow 1.15; Loshchilov and Hutter,
    SGDR: stochastic gradient descent with warm restarts, 2016,
    https://arxiv.org/abs/1608.03983.
  """
  progress = _progress(global_step, first_decay_steps)
  if t_mul == 1:
    restarts = jnp.floor(progress)
    progress = progress - restarts
  else:
    # After i restarts, 1 + ... + t_mul^(i - 1) first lengths have passed.
    restarts = jnp.floor(
        jnp.log(1 - progress * (1 - t_mul)) / jnp.log(jnp.float32(t_mul))
    )
    length = t_mul**restarts
    progress = (progress - (1 - length) / (1 - t_mul)) / length
  cosine = m_mul**restarts * _half_cosine(progress)
  return learning_rate * _above(alpha, cosine)


def _progress(step, decay_steps, staircase=False):
  progress = jnp.asarray(step, jnp.float32) / decay_steps
  return jnp.floor(progress) if staircase else progress


def _half_cosine(progress):
  return (1 + jnp.cos(jnp.pi * progress)) / 2


def _above(alpha, part):
  return (1 - alpha) * part + alpha
