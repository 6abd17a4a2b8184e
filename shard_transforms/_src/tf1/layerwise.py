"""`lars` and `lamb`: a rate for each layer, by norms."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

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


def _check_params(name, params):
  if params is None:
    raise ValueError(f'`update` of `{name}` must be given the parameters.')
