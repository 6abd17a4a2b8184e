"""`adafactor`: Adafactor as the programs of TensorFlow 1 compute it."""

import functools
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax


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
    if params is None:
      raise ValueError('`update` of `adafactor` must be given the parameters.')
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
