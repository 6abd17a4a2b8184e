"""Clipping of TensorFlow 1: of values, by norms, and in an optimizer."""

from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy.typing as npt
import optax

from shard_transforms._src.tf1 import ties
from shard_transforms.facade import bases
from shard_transforms.facade import optimizer as optimizer_lib
from shard_transforms.facade import variables as variables_lib

Variable = variables_lib.Variable


def clip_by_global_norm(
    t_list: Sequence[npt.ArrayLike | None],
    clip_norm: chex.Numeric,
    use_norm: chex.Numeric | None = None,
    name: str | None = None,
) -> tuple[list[jax.Array | None], jax.Array]:
  """Scales a list of gradients so that its global norm is at most `clip_norm`.

  Between `compute_gradients` and `apply_gradients`, each shard or tower clips
  by the norm of its own, scaled gradients.

  Args:
    t_list: Arrays of any shapes; `None` stays.
    clip_norm: The largest norm, a positive number.
    use_norm: The norm, if it is known already.
    name: Ignored.

  Returns:
    The list of scaled arrays, and the norm before, []. If the norm is not
    finite (in float32, that of numbers above 1.8e19 overflows), all elements
    are NaN.

  Raises:
    TypeError: If `t_list` is not a sequence of floating-point arrays.

  Examples:
    >>> from shard_transforms import facade
    >>> clipped, norm = facade.clip_by_global_norm([3.0, None, 4.0], 1.0)
    >>> print([None if c is None else f'{c:.1f}' for c in clipped], norm)
    ['0.6', None, '0.8'] 5.0

  References:
    `tf.clip_by_global_norm` of TensorFlow 1.15.
  """
  arrays = _arrays(t_list)
  norm = optax.tree.norm(arrays) if use_norm is None else jnp.asarray(use_norm)
  scale = jnp.minimum(clip_norm / norm, 1)
  # As in TensorFlow: zeros would hide that the step went wrong.
  scale = jnp.where(jnp.isfinite(norm), scale, jnp.nan)
  clipped = [x if x is None else (scale * x).astype(x.dtype) for x in arrays]
  return clipped, norm


def global_norm(
    t_list: Sequence[npt.ArrayLike | None], name: str | None = None
) -> jax.Array:
  """Returns the norm of all elements of a list of arrays.

  Args:
    t_list: Arrays of any shapes; `None` counts for nothing.
    name: Ignored.

  Returns:
    The norm, [].

  Raises:
    TypeError: If `t_list` is not a sequence of floating-point arrays.

  Examples:
    >>> from shard_transforms import facade
    >>> print(facade.global_norm([3.0, None, [0.0, 4.0]]))
    5.0

  References:
    `tf.global_norm` of TensorFlow 1.15.
  """
  return optax.tree.norm(_arrays(t_list))


def clip_by_norm(
    t: npt.ArrayLike,
    clip_norm: chex.Numeric,
    axes: int | Sequence[int] | None = None,
    name: str | None = None,
) -> jax.Array:
  """Scales an array so that its norm is at most `clip_norm`.

  Args:
    t: The array.
    clip_norm: The largest norm, a positive number.
    axes: The dimensions that a norm is taken over; all if `None`.
    name: Ignored.

  Returns:
    The scaled array, of the shape of `t`.

  Examples:
    >>> from shard_transforms import facade
    >>> print(facade.clip_by_norm([3.0, 4.0], 2.5))
    [1.5 2. ]

  References:
    `tf.clip_by_norm` of TensorFlow 1.15.
  """
  array = jnp.asarray(t)
  axes = tuple(axes) if isinstance(axes, Sequence) else axes
  norm = optax.safe_norm(array, 0.0, axis=axes, keepdims=True)
  return array * (clip_norm / jnp.maximum(norm, clip_norm))


def clip_by_value(
    t: npt.ArrayLike,
    clip_value_min: jax.typing.ArrayLike,
    clip_value_max: jax.typing.ArrayLike,
    name: str | None = None,
) -> jax.Array:
  """Limits the elements of an array.

  An element at a limit has a gradient, as in TensorFlow; that of
  `jax.numpy.clip` is half as large.

  Args:
    t: The array.
    clip_value_min: The least value, a scalar or of the shape of `t`.
    clip_value_max: The largest value, the same.
    name: Ignored.

  Returns:
    The array with limited elements, of the shape of `t`.

  Examples:
    >>> from shard_transforms import facade
    >>> print(facade.clip_by_value([-3.0, 0.5, 4.0], -1.0, 1.0))
    [-1.   0.5  1. ]

  References:
    `tf.clip_by_value` of TensorFlow 1.15.
  """
  array = jnp.asarray(t)
  return ties.maximum(ties.minimum(array, clip_value_max), clip_value_min)


def clip_gradient_norms(
    gradients_to_variables: Iterable[tuple[npt.ArrayLike | None, Variable]],
    max_norm: chex.Numeric,
) -> list[tuple[jax.Array | None, Variable]]:
  """Scales each gradient by itself so that its norm is at most `max_norm`.

  Args:
    gradients_to_variables: Pairs of a gradient and its variable; a gradient
      that is `None` stays.
    max_norm: The largest norm, a positive number.

  Returns:
    The pairs, with scaled gradients.

  Examples:
    >>> from shard_transforms import facade
    >>> w = facade.Variable([1.0, 1.0])
    >>> [(grad, _)] = facade.clip_gradient_norms([([3.0, 4.0], w)], 2.5)
    >>> print(grad)
    [1.5 2. ]

  References:
    `tf.contrib.training.clip_gradient_norms` of TensorFlow 1.15.
  """
  return [
      (None if grad is None else clip_by_norm(grad, max_norm), variable)
      for grad, variable in gradients_to_variables
  ]


class _ClippedOptimizer(bases.Wrapper):
  """An optimizer that clips by the global norm before it applies."""

  def __init__(self, opt, clip_norm):
    super().__init__(opt, False, f'ClipByNorm{opt.get_name()}')
    self._clip_norm = clip_norm
    self._gathers = opt._gathers

  def _apply(self, pairs, global_step, name):
    grads, variables = zip(*pairs, strict=True)
    clipped, _ = clip_by_global_norm(grads, self._clip_norm)
    pairs = list(zip(clipped, variables, strict=True))
    return super()._apply(pairs, global_step, name)


def clip_gradients_by_norm(
    optimizer: optimizer_lib.Optimizer, clip_norm: chex.Numeric
) -> optimizer_lib.Optimizer:
  """Returns an optimizer that clips by the global norm before it applies.

  In `CrossShardOptimizer`, the sum over the shards is clipped.

  Args:
    optimizer: The optimizer inside.
    clip_norm: The largest norm, a positive number.

  Returns:
    An optimizer whose slots are those of the one inside.

  Raises:
    TypeError: If `optimizer` is no optimizer of the façade.

  Examples:
    >>> from shard_transforms import facade
    >>> w = facade.Variable([1.0, 1.0])
    >>> opt = facade.GradientDescentOptimizer(1.0)
    >>> opt = facade.clip_gradients_by_norm(opt, 0.5)
    >>> opt.apply_gradients([([3.0, 4.0], w)])
    >>> print(w)
    [0.7 0.6]

  References:
    `tf.contrib.estimator.clip_gradients_by_norm` of TensorFlow 1.15.
  """
  opt = bases.check_optimizer('optimizer', optimizer, True)
  return _ClippedOptimizer(opt, clip_norm)


def _arrays(t_list):
  """Returns a list of floating-point arrays, and `None` in its places."""
  if not isinstance(t_list, Sequence) or isinstance(t_list, str):
    raise TypeError(f'`t_list` must be a sequence, got {t_list!r}.')
  arrays: Any = [None if t is None else jnp.asarray(t) for t in t_list]
  for i, array in enumerate(arrays):
    if array is not None and not jnp.issubdtype(array.dtype, jnp.floating):
      raise TypeError(
          '`t_list` must hold floating-point arrays, got one of'
          f' {array.dtype} at {i}.'
      )
  return arrays
