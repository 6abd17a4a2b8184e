"""`adam` and `ftrl`; and by norms of layers, `lars`, `lamb` and `adafactor`."""

from collections.abc import Callable
import functools
from typing import Any, NamedTuple

import chex
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
    _check_params('ftrl', params)
    advanced = jax.tree.map(advance, updates, state.accum, state.linear, params)
    updates, accum, linear = jax.tree.transpose(
        jax.tree.structure(updates), jax.tree.structure((0, 0, 0)), advanced
    )
    return updates, FtrlState(accum, linear)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


_Mask = Any | Callable[[optax.Params], Any]


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

  The norm of the gradient and that of the decay are added. In `optax.lars`, the
  divisor is the norm of their sum; the two trained up to 3.4e-2 apart in 8
  steps of a shrunk residual network. Momentum holds the rate.

  Args:
    learning_rate: The rate :math:`\eta`, a number or a scalar array.
    momentum: The decay of the momentum, the same.
    weight_decay: The decay :math:`\lambda` of the weights, the same.
    eeta: The factor :math:`\epsilon_\eta` of the ratio, the same.
    epsilon: The number that keeps the divisor from zero, the same.
    mask: Which leaves have a rate of their own and decay, a tree of booleans
      or a function of the parameters that returns one; the others take
      `learning_rate` as it is.
    nesterov: Whether to use Nesterov momentum.

  Returns:
    An `optax.GradientTransformationExtraArgs` with the state of `optax.trace`.
    Its `update` needs the parameters.

  Raises:
    ValueError: In `update`, without parameters.

  Examples:
    >>> import jax.numpy as jnp
    >>> from shard_transforms import tf1
    >>> tx = tf1.lars(1.0, momentum=0.0, weight_decay=0.0, eeta=0.5)
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
    known = (weight > 0) & (gradient > 0)
    ratio = jnp.where(known, eeta * weight / jnp.where(known, divisor, 1), 1)
    return (ratio * (grad + weight_decay * param)).astype(grad.dtype)

  def adapted(updates, params):
    _check_params('lars', params)
    return jax.tree.map(adapt, updates, params)

  return optax.with_extra_args_support(
      optax.chain(
          optax.masked(optax.stateless(adapted), mask),
          optax.scale(learning_rate),
          optax.trace(momentum, nesterov),
          optax.scale(-1.0),
      )
  )


class LambMoments(NamedTuple):
  """State of `lamb`.

  Attributes:
    adam_m: The first moment, a tree like the parameters.
    adam_v: The second moment, the same.
  """

  adam_m: optax.Updates
  adam_v: optax.Updates


def lamb(
    learning_rate: Any,
    weight_decay_rate: Any = 0.0,
    beta_1: Any = 0.9,
    beta_2: Any = 0.999,
    epsilon: Any = 1e-6,
    decay_mask: _Mask = True,
    adaptation_mask: _Mask = True,
) -> optax.GradientTransformationExtraArgs:
  r"""LAMB as the programs of TensorFlow 1 compute it: no bias is corrected.

  .. math:: r = \frac{m}{\sqrt{v} + \epsilon} + \lambda w, \quad
     u = -\eta \frac{|w|}{|r|} r

  In `optax.lamb`, the moments are divided by :math:`1 - \beta^t`, which the
  norms cancel but for epsilon and the decay.

  Args:
    learning_rate: The rate :math:`\eta`, a number or a scalar array.
    weight_decay_rate: The decay :math:`\lambda` of the weights, the same.
    beta_1: The decay of the first moment, the same.
    beta_2: The decay of the second moment, the same.
    epsilon: The number that keeps the divisor from zero, the same.
    decay_mask: Which leaves decay, a tree of booleans or a function of the
      parameters that returns one.
    adaptation_mask: Which leaves have a rate of their own, the same.

  Returns:
    An `optax.GradientTransformationExtraArgs` whose state has two moments,
    `adam_m` and `adam_v`. Its `update` needs the parameters.

  Raises:
    ValueError: In `update`, without parameters.

  Examples:
    >>> import jax.numpy as jnp
    >>> from shard_transforms import tf1
    >>> tx = tf1.lamb(0.1)
    >>> w = jnp.array([3.0, 4.0])
    >>> updates, _ = tx.update(jnp.array([0.0, 2.0]), tx.init(w), w)
    >>> print(updates)
    [-0.  -0.5]

  References:
    You et al., Large batch optimization for deep learning: training BERT in 76
    minutes, 2019, https://arxiv.org/abs/1904.00962; `LAMBOptimizer` of
    https://github.com/google-research/albert.
  """

  def init_fn(params):
    zeros = optax.tree.zeros_like(params)
    return LambMoments(zeros, optax.tree.zeros_like(params))

  def update_fn(updates, state, params=None):
    _check_params('lamb', params)
    m = optax.tree.update_moment(updates, state.adam_m, beta_1, 1)
    v = optax.tree.update_moment_per_elem_norm(updates, state.adam_v, beta_2, 2)
    updates = jax.tree.map(
        lambda m, v: (m / (jnp.sqrt(v) + epsilon)).astype(m.dtype), m, v
    )
    return updates, LambMoments(m, v)

  return optax.with_extra_args_support(
      optax.chain(
          optax.GradientTransformation(init_fn, update_fn),
          optax.add_decayed_weights(weight_decay_rate, decay_mask),
          optax.masked(optax.scale_by_trust_ratio(), adaptation_mask),
          optax.scale(-learning_rate),
      )
  )


class AdafactorState(NamedTuple):
  """State of `adafactor`; `None` stands for a moment that a leaf lacks.

  Attributes:
    m: The first moment, if `beta1` is not 0, [...].
    vr: The mean of squares along the last dimension, [..., rows].
    vc: The mean of squares along the dimension before it, [..., columns].
    v: The mean of squares of leaves that are not factored, [...].
  """

  m: optax.Updates
  vr: optax.Updates
  vc: optax.Updates
  v: optax.Updates


def adafactor(
    learning_rate: chex.Numeric,
    decay_rate: chex.Numeric,
    multiply_by_parameter_scale: bool = True,
    beta1: float = 0.0,
    clipping_threshold: float | None = 1.0,
    factored: bool = True,
    epsilon1: chex.Numeric = 1e-30,
    epsilon2: chex.Numeric = 1e-3,
) -> optax.GradientTransformationExtraArgs:
  """Adafactor as the programs of TensorFlow 1 compute it.

  `optax.adafactor` factors the two largest dimensions, and only if both are at
  least 128; this one the last two, of any size. The rate of decay is a number,
  and momentum holds the rate.

  Args:
    learning_rate: The rate, a number or a scalar array.
    decay_rate: The decay of the second moment, the same;
      1 - (t + 1)^-0.8 at step t is the usual one.
    multiply_by_parameter_scale: Whether updates are multiplied by the root
      mean square of the parameter.
    beta1: The decay of the first moment; 0 for none.
    clipping_threshold: The largest root mean square of an update before the
      rate; `None` for any.
    factored: Whether leaves of two or more dimensions keep means of rows and of
      columns alone.
    epsilon1: What is added to squared gradients.
    epsilon2: The smallest root mean square of a parameter.

  Returns:
    An `optax.GradientTransformationExtraArgs` whose state has, in float32, the
    moments `m`, `vr`, `vc` and `v` that a leaf needs. Its `update` needs the
    parameters.

  Raises:
    ValueError: In `update`, without parameters.

  Examples:
    >>> import jax.numpy as jnp
    >>> from shard_transforms import tf1
    >>> tx = tf1.adafactor(0.5, decay_rate=0.0)
    >>> w = jnp.full((2, 2), 4.0)
    >>> updates, _ = tx.update(w / 4, tx.init(w), w)
    >>> print(updates)
    [[-2. -2.]
     [-2. -2.]]

  References:
    Shazeer and Stern, Adafactor: adaptive learning rates with sublinear memory
    cost, 2018, https://arxiv.org/abs/1804.04235; `AdafactorOptimizer` of
    https://github.com/tensorflow/tensor2tensor.
  """

  def init_leaf(param):
    shape = jnp.shape(param)
    zeros = functools.partial(jnp.zeros, dtype=jnp.float32)
    m = zeros(shape) if beta1 else None
    if factored and len(shape) >= 2:
      return m, zeros(shape[:-1]), zeros((*shape[:-2], shape[-1])), None
    return m, None, None, zeros(shape)

  def update_leaf(grad, param, m, vr, vc, v):
    grad, param = (x.astype(jnp.float32) for x in (grad, param))
    square = grad * grad + epsilon1
    if v is None:
      vr = decay_rate * vr + (1 - decay_rate) * jnp.mean(square, -1)
      vc = decay_rate * vc + (1 - decay_rate) * jnp.mean(square, -2)
      rows = jax.lax.rsqrt(vr / jnp.mean(vr, -1, keepdims=True))
      x = grad * rows[..., None] * jax.lax.rsqrt(vc)[..., None, :]
    else:
      v = decay_rate * v + (1 - decay_rate) * square
      x = grad * jax.lax.rsqrt(v)
    if clipping_threshold is not None:
      x /= jnp.maximum(1, _rms(x) / clipping_threshold)
    x *= learning_rate
    if multiply_by_parameter_scale:
      x *= jnp.maximum(_rms(param), epsilon2)
    if m is not None:
      x = m = beta1 * m + (1 - beta1) * x
    return -x, m, vr, vc, v

  def init_fn(params):
    leaves, treedef = jax.tree.flatten(params)
    return _state(treedef, [init_leaf(x) for x in leaves])

  def update_fn(updates, state, params=None, **extra_args):
    del extra_args
    _check_params('adafactor', params)
    leaves, treedef = jax.tree.flatten(updates)
    trees = [treedef.flatten_up_to(tree) for tree in (params, *state)]
    found = [update_leaf(*x) for x in zip(leaves, *trees, strict=True)]
    updates = [
        x.astype(g.dtype) for (x, *_), g in zip(found, leaves, strict=True)
    ]
    state = _state(treedef, [of_leaf for _, *of_leaf in found])
    return treedef.unflatten(updates), state

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def default_rate(step: chex.Numeric) -> jax.Array:
  """Returns the usual rate at a step, for updates that parameters scale."""
  return jnp.minimum(jax.lax.rsqrt(step + 1.0), 0.01)


def default_decay_rate(step: chex.Numeric) -> jax.Array:
  """Returns the usual decay of the second moment at a step."""
  return 1 - jnp.power(step + 1.0, -0.8)


def _state(treedef, by_leaf):
  return AdafactorState(
      *(treedef.unflatten([x[i] for x in by_leaf]) for i in range(4))
  )


def _rms(x):
  return jnp.sqrt(jnp.mean(x * x))


def _check_params(name, params):
  if params is None:
    raise ValueError(f'`update` of `{name}` must be given the parameters.')
