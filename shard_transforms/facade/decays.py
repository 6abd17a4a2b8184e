"""Decaying learning rates of TensorFlow 1.

Outside of a step, each function returns a rate: a function of no arguments that
reads its arguments, which may be variables or functions, whenever an optimizer
updates. Inside a step, it returns the present number.
"""

from collections.abc import Callable
from collections.abc import Sequence
import functools
import inspect
from typing import Any, ParamSpec

import jax
import jax.numpy as jnp

from shard_transforms.facade import arrays as arrays_lib

_Parameters = ParamSpec('_Parameters')


def _read_at_each_update(
    formula: Callable[_Parameters, jax.Array],
) -> Callable[_Parameters, Any]:
  """Makes a formula return a rate that reads its arguments at each update.

  Inside a step, the formula returns a number.

  Raises:
    ValueError: When called, if the step is `None`, or an array that is made
      outside of a step and therefore never changes.
  """
  signature, name = inspect.signature(formula), formula.__name__
  step_name = 'x' if 'x' in signature.parameters else 'global_step'

  @functools.wraps(formula)
  def decay(*args: Any, **kwargs: Any) -> Any:
    arguments = signature.bind(*args, **kwargs).arguments
    step = arguments[step_name]
    if step is None:
      raise ValueError(
          f'`{step_name}` of `{name}` is None. Pass the variable that'
          ' `tf.train.get_or_create_global_step()` returns.'
      )
    if isinstance(step, jax.Array) and not arrays_lib.is_step():
      raise ValueError(
          f'`{name}` was called outside of a step with the array {step!r} as'
          f' `{step_name}`, which never changes. Pass the variable itself, or a'
          ' function that returns the step.'
      )
    compute: Callable[..., Any] = formula
    rate = arrays_lib.Rate(
        lambda: compute(
            **{k: arrays_lib.present(v) for k, v in arguments.items()}
        )
    )
    # A step calls this function again at each update.
    return rate() if arrays_lib.is_step() else rate

  return decay


# A number, a scalar array, a variable or a function of no arguments.
_Number = Any


@_read_at_each_update
def exponential_decay(
    learning_rate: _Number,
    global_step: _Number,
    decay_steps: _Number,
    decay_rate: _Number,
    staircase: bool = False,
    name: str | None = None,
) -> jax.Array:
  r"""`tf.train.exponential_decay`: :math:`\eta r^{t / T}`.

  Examples:
    >>> from shard_transforms.facade import tf
    >>> with tf.Graph().as_default():
    ...   step = tf.train.get_or_create_global_step()
    >>> rate = tf.train.exponential_decay(0.5, step, 10, 0.5, staircase=True)
    >>> _ = step.assign(20)
    >>> print(rate())
    0.125
  """
  return learning_rate * decay_rate ** _progress(
      global_step, decay_steps, staircase
  )


@_read_at_each_update
def natural_exp_decay(
    learning_rate: _Number,
    global_step: _Number,
    decay_steps: _Number,
    decay_rate: _Number,
    staircase: bool = False,
    name: str | None = None,
) -> jax.Array:
  r"""`tf.train.natural_exp_decay`: :math:`\eta e^{-r t / T}`."""
  return learning_rate * jnp.exp(
      -decay_rate * _progress(global_step, decay_steps, staircase)
  )


@_read_at_each_update
def inverse_time_decay(
    learning_rate: _Number,
    global_step: _Number,
    decay_steps: _Number,
    decay_rate: _Number,
    staircase: bool = False,
    name: str | None = None,
) -> jax.Array:
  r"""`tf.train.inverse_time_decay`: :math:`\eta / (1 + r t / T)`."""
  return learning_rate / (
      1 + decay_rate * _progress(global_step, decay_steps, staircase)
  )


@_read_at_each_update
def polynomial_decay(
    learning_rate: _Number,
    global_step: _Number,
    decay_steps: _Number,
    end_learning_rate: _Number = 0.0001,
    power: _Number = 1.0,
    cycle: bool = False,
    name: str | None = None,
) -> jax.Array:
  r"""`tf.train.polynomial_decay`: a power of the remaining steps.

  .. math:: (\eta - \eta_{end}) (1 - t / T)^p + \eta_{end}

  With `cycle`, T grows to its next multiple when it is reached; otherwise the
  rate stays at its end value.
  """
  step = jnp.asarray(global_step, jnp.float32)
  if cycle:
    rounds = jnp.maximum(jnp.ceil(step / decay_steps), 1)
    decay_steps = decay_steps * rounds
  left = 1 - jnp.minimum(step, decay_steps) / decay_steps
  return (learning_rate - end_learning_rate) * left**power + end_learning_rate


@_read_at_each_update
def piecewise_constant(
    x: _Number,
    boundaries: Sequence[_Number],
    values: Sequence[_Number],
    name: str | None = None,
) -> jax.Array:
  """`tf.train.piecewise_constant`: one rate per interval of steps.

  A boundary is the last step of its interval.

  Raises:
    ValueError: If there is not one value more than boundaries.
  """
  if len(values) != len(boundaries) + 1:
    raise ValueError(
        f'`piecewise_constant` got {len(values)} values for {len(boundaries)}'
        ' boundaries. Pass one value more than boundaries.'
    )
  ends = jnp.asarray(boundaries)
  return jnp.asarray(values)[jnp.searchsorted(ends, jnp.asarray(x))]


@_read_at_each_update
def cosine_decay(
    learning_rate: _Number,
    global_step: _Number,
    decay_steps: _Number,
    alpha: _Number = 0.0,
    name: str | None = None,
) -> jax.Array:
  """`tf.train.cosine_decay`: half a period of the cosine, then constant.

  References:
    Loshchilov and Hutter, SGDR: stochastic gradient descent with warm restarts,
    2016, https://arxiv.org/abs/1608.03983.
  """
  progress = jnp.minimum(_progress(global_step, decay_steps), 1)
  return learning_rate * _above(alpha, _half_cosine(progress))


@_read_at_each_update
def cosine_decay_restarts(
    learning_rate: _Number,
    global_step: _Number,
    first_decay_steps: _Number,
    t_mul: float = 2.0,
    m_mul: _Number = 1.0,
    alpha: _Number = 0.0,
    name: str | None = None,
) -> jax.Array:
  """`tf.train.cosine_decay_restarts`: a cosine decay that restarts."""
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
