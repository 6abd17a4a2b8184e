"""Optax transformations with the arithmetic of TensorFlow 1."""

from collections.abc import Callable
import functools
import inspect
import math
from typing import Any, NamedTuple, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import optax

from shard_transforms._src.base import arguments

_Arguments = ParamSpec('_Arguments')
_Result = TypeVar('_Result')


def _checked(
    factory: Callable[_Arguments, _Result],
) -> Callable[_Arguments, _Result]:
  """Makes a factory refuse arguments that are NaN.

  Raises:
    ValueError: When the factory is called, if an argument is NaN.
  """

  @functools.wraps(factory)
  def make(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
    bound = inspect.signature(factory).bind(*args, **kwargs)
    for name, value in bound.arguments.items():
      if isinstance(value, float) and math.isnan(value):
        raise ValueError(f'`{name}` of `{factory.__name__}` is NaN.')
    return factory(*args, **kwargs)

  return make


class AdamState(NamedTuple):
  r"""State of `adam`.

  Attributes:
    beta1_power: :math:`\beta_1^{t+1}` after t updates, float32 [].
    beta2_power: :math:`\beta_2^{t+1}` after t updates, float32 [].
    m: The first moment, a tree like the parameters.
    v: The second moment, a tree like the parameters.
  """

  beta1_power: jax.Array
  beta2_power: jax.Array
  m: optax.Updates
  v: optax.Updates


@_checked
def adam(
    learning_rate: Any, beta1: Any, beta2: Any, epsilon: Any
) -> optax.GradientTransformationExtraArgs:
  r"""Adam as TensorFlow 1 computes and saves it.

  .. math:: u = -\eta \frac{\sqrt{1 - \beta_2^t}}{1 - \beta_1^t}
     \frac{m}{\sqrt{v} + \epsilon}

  It differs from `optax.adam` in three ways. Epsilon is added before the bias
  correction of the second moment (the "epsilon hat" of the paper). The betas
  are subtracted from 1 in the dtype of the parameters, which makes `v` smaller
  by a factor of 1.3e-5 for a `beta2` of 0.999. The state contains the powers of
  the betas instead of a count, like checkpoints of TensorFlow 1.

  Args:
    learning_rate: The learning rate, like all arguments a number or a scalar
      array.
    beta1: The decay of the first moment.
    beta2: The decay of the second moment.
    epsilon: A number that is added to the divisor.

  Returns:
    An `optax.GradientTransformationExtraArgs` with an `AdamState`.

  Raises:
    ValueError: If an argument is NaN.

  Examples:
    >>> import jax.numpy as jnp
    >>> from shard_transforms import facade
    >>> tx = facade.adam(0.5, 0.9, 0.999, 1e-8)
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
    squares = jax.tree.map(jnp.square, updates)
    m = jax.tree.map(functools.partial(_move, beta1), state.m, updates)
    v = jax.tree.map(functools.partial(_move, beta2), state.v, squares)
    rate = learning_rate * jnp.sqrt(1 - state.beta2_power)
    rate /= 1 - state.beta1_power

    def step(m, v):
      wide = jnp.float32 if m.dtype.itemsize < 4 else m.dtype
      root = (jnp.sqrt(v) + epsilon).astype(wide)
      return (-rate.astype(wide) * m.astype(wide) / root).astype(m.dtype)

    updates = jax.tree.map(step, m, v)
    powers = state.beta1_power * beta1, state.beta2_power * beta2
    return updates, AdamState(*powers, m, v)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _move(decay, average, value):
  """Updates a moving average.

  As in TensorFlow, 1 - `decay` is computed in the dtype of the average: for
  0.999 in float32, it is 1.3e-5 (relative) below 0.001.
  """
  # In 16 bits, 0.999 rounds to 1, and the average would not change.
  wide = jnp.float32 if average.dtype.itemsize < 4 else average.dtype
  change = (value - average).astype(wide) * (1 - jnp.asarray(decay, wide))
  return average + change.astype(average.dtype)


class FtrlState(NamedTuple):
  """State of `ftrl`.

  Attributes:
    accum: The sum of squared gradients, a tree like the parameters.
    linear: The linear term :math:`z`, a tree like the parameters.
  """

  accum: optax.Updates
  linear: optax.Updates


@_checked
def ftrl(
    learning_rate: Any,
    learning_rate_power: float = -0.5,
    initial_accumulator_value: float = 0.1,
    l1_regularization_strength: float = 0.0,
    l2_regularization_strength: float = 0.0,
    l2_shrinkage_regularization_strength: float = 0.0,
) -> optax.GradientTransformationExtraArgs:
  r"""FTRL-proximal as TensorFlow 1 computes it.

  With the exponent :math:`p` = -`learning_rate_power` and the shrunk gradient
  :math:`g' = g + 2 \lambda_s x`,

  .. math:: n' = n + g^2, \quad z' = z + g' - (n'^p - n^p) x / \eta

  .. math::
    x' = \frac{\operatorname{sign}(z') \lambda_1 - z'}
              {n'^p / \eta + 2 \lambda_2} [|z'| > \lambda_1]

  and the update is :math:`x' - x`.

  Args:
    learning_rate: The rate :math:`\eta`, a number or a scalar array.
    learning_rate_power: The exponent of the decay, not positive.
    initial_accumulator_value: The initial :math:`n`, not negative.
    l1_regularization_strength: :math:`\lambda_1`, not negative.
    l2_regularization_strength: :math:`\lambda_2`, not negative.
    l2_shrinkage_regularization_strength: :math:`\lambda_s`, not negative.

  Returns:
    An `optax.GradientTransformationExtraArgs` with an `FtrlState`. Its `update`
    needs the parameters.

  Raises:
    ValueError: If an argument has the wrong sign or is NaN; in `update`,
      without parameters.

  Examples:
    >>> import jax.numpy as jnp
    >>> from shard_transforms import facade
    >>> tx, w = facade.ftrl(0.5), jnp.zeros(1)
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
  for name, value in {
      'initial_accumulator_value': initial_accumulator_value,
      'l1_regularization_strength': l1_regularization_strength,
      'l2_regularization_strength': l2_regularization_strength,
      'l2_shrinkage_regularization_strength': (
          l2_shrinkage_regularization_strength
      ),
  }.items():
    arguments.as_not_negative(name, value)

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
    _check_params('ftrl', params)
    advanced = jax.tree.map(advance, updates, state.accum, state.linear, params)
    updates, accum, linear = (
        jax.tree.map(lambda _, x, i=i: x[i], updates, advanced)
        for i in range(3)
    )
    return updates, FtrlState(accum, linear)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


_Mask = Any | Callable[[optax.Params], Any]


@_checked
def lars(
    learning_rate: Any,
    momentum: Any = 0.9,
    weight_decay: Any = 0.0001,
    eeta: Any = 0.001,
    epsilon: Any = 0.0,
    mask: _Mask = True,
    nesterov: bool = False,
) -> optax.GradientTransformationExtraArgs:
  r"""LARS as TensorFlow 1 computes it.

  .. math:: u = -\eta \frac{\epsilon_\eta |w|}{|g| + \lambda |w| + \epsilon}
     (g + \lambda w)

  The divisor is the sum of the norms of the gradient and the decay; in
  `optax.lars`, it is the norm of their sum. The momentum contains the learning
  rate.

  Args:
    learning_rate: The learning rate :math:`\eta`. The first five arguments are
      numbers or scalar arrays.
    momentum: The decay of the momentum.
    weight_decay: The decay :math:`\lambda` of the weights.
    eeta: The factor :math:`\epsilon_\eta` of the ratio.
    epsilon: A number that is added to the divisor.
    mask: A tree of booleans, or a function of the parameters that returns one.
      Leaves that are masked out do not decay and take `learning_rate` as it is.
    nesterov: Whether to use Nesterov momentum.

  Returns:
    An `optax.GradientTransformationExtraArgs` with the state of `optax.trace`.
    Its `update` needs the parameters.

  Raises:
    ValueError: If an argument is NaN; in `update`, without parameters.

  Examples:
    >>> import jax.numpy as jnp
    >>> from shard_transforms import facade
    >>> tx = facade.lars(1.0, momentum=0.0, weight_decay=0.0, eeta=0.5)
    >>> w = jnp.array([3.0, 4.0])
    >>> updates, _ = tx.update(jnp.array([0.0, 2.0]), tx.init(w), w)
    >>> print(updates)
    [-0.  -2.5]

  References:
    You et al., Large batch training of convolutional networks, 2017,
    https://arxiv.org/abs/1708.03888; `tf.contrib.opt.LARSOptimizer` of
    TensorFlow 1.15.
  """

  def adapt(grad, param):
    weight, gradient = optax.safe_norm(param, 0.0), optax.safe_norm(grad, 0.0)
    divisor = gradient + weight_decay * weight + epsilon
    is_nonzero = (weight > 0) & (gradient > 0)
    ratio = jnp.where(
        is_nonzero, eeta * weight / jnp.where(is_nonzero, divisor, 1), 1
    )
    return (ratio * (grad + weight_decay * param)).astype(grad.dtype)

  def adapted(updates, params):
    _check_params('lars', params)
    return jax.tree.map(adapt, updates, params)

  def scaled(updates, params):
    del params
    # The learning rate may be an array of another dtype.
    return jax.tree.map(lambda g: (learning_rate * g).astype(g.dtype), updates)

  return optax.with_extra_args_support(
      optax.chain(
          optax.masked(optax.stateless(adapted), mask),
          optax.stateless(scaled),
          optax.trace(momentum, nesterov),
          optax.scale(-1.0),
      )
  )


def _check_params(name, params):
  if params is None:
    raise ValueError(
        f'`{name}` needs the parameters. Call `update(updates, state, params)`.'
    )
