"""Clipping of TensorFlow 1: by value, by norm, and in an optimizer."""

from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy.typing as npt
import optax

from shard_transforms.facade import optimizer as optimizer_lib
from shard_transforms.facade import tf_functions
from shard_transforms.facade import variables as variables_lib
from shard_transforms.facade import wrapper

Variable = variables_lib.Variable


def clip_by_global_norm(
    t_list: Sequence[npt.ArrayLike | None],
    clip_norm: chex.Numeric,
    use_norm: chex.Numeric | None = None,
    name: str | None = None,
) -> tuple[list[jax.Array | None], jax.Array]:
  """`tf.clip_by_global_norm`: scales a list of gradients to a maximal norm.

  Between `compute_gradients` and `apply_gradients`, each shard or tower clips
  by the norm of its own, scaled gradients. If the norm is not finite (in
  float32, the squares of numbers above 1.8e19 overflow), all elements of the
  result are NaN.

  Examples:
    >>> from shard_transforms.facade import tf
    >>> clipped, norm = tf.clip_by_global_norm([3.0, None, 4.0], 1.0)
    >>> print([None if c is None else f'{c:.1f}' for c in clipped], norm)
    ['0.6', None, '0.8'] 5.0
  """
  arrays = _arrays(t_list)
  norm = optax.tree.norm(arrays) if use_norm is None else jnp.asarray(use_norm)
  scale = jnp.minimum(clip_norm / norm, 1)
  # As in TensorFlow: zeros would hide the overflow.
  scale = jnp.where(jnp.isfinite(norm), scale, jnp.nan)
  clipped = [x if x is None else (scale * x).astype(x.dtype) for x in arrays]
  return clipped, norm


def global_norm(
    t_list: Sequence[npt.ArrayLike | None], name: str | None = None
) -> jax.Array:
  """`tf.global_norm`: the norm of all elements of a list of arrays."""
  return optax.tree.norm(_arrays(t_list))


def clip_by_norm(
    t: npt.ArrayLike,
    clip_norm: chex.Numeric,
    axes: int | Sequence[int] | None = None,
    name: str | None = None,
) -> jax.Array:
  """`tf.clip_by_norm`: scales an array to a maximal norm."""
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
  """`tf.clip_by_value`: limits the elements of an array.

  An element at a limit has the gradient 1, as in TensorFlow; for
  `jax.numpy.clip` it is 0.5.
  """
  array = jnp.asarray(t)
  return tf_functions.maximum(
      tf_functions.minimum(array, clip_value_max), clip_value_min
  )


def clip_gradient_norms(
    gradients_to_variables: Iterable[tuple[npt.ArrayLike | None, Variable]],
    max_norm: chex.Numeric,
) -> list[tuple[jax.Array | None, Variable]]:
  """`tf.contrib.training.clip_gradient_norms`: clips each gradient."""
  return [
      (None if grad is None else clip_by_norm(grad, max_norm), variable)
      for grad, variable in gradients_to_variables
  ]


class _ClippedOptimizer(wrapper.Wrapper):
  """An optimizer that clips by the global norm before it updates."""

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
  """`tf.contrib.estimator.clip_gradients_by_norm`: an optimizer that clips.

  Its slots are those of the wrapped optimizer. Inside `CrossShardOptimizer`, it
  clips the sum over the shards.

  Examples:
    >>> from shard_transforms.facade import tf
    >>> w = tf.Variable([1.0, 1.0])
    >>> opt = tf.train.GradientDescentOptimizer(1.0)
    >>> opt = tf.contrib.estimator.clip_gradients_by_norm(opt, 0.5)
    >>> opt.apply_gradients([([3.0, 4.0], w)])
    >>> print(w)
    [0.7 0.6]
  """
  opt = wrapper.check_optimizer('optimizer', optimizer, True)
  return _ClippedOptimizer(opt, clip_norm)


def _arrays(t_list):
  """Converts a list to floating-point arrays; `None` stays.

  Raises:
    TypeError: If it is not a sequence of such arrays.
  """
  if not isinstance(t_list, Sequence) or isinstance(t_list, str):
    raise TypeError(f'`t_list` must be a list of arrays, got {t_list!r}.')
  arrays: Any = [None if t is None else jnp.asarray(t) for t in t_list]
  for i, array in enumerate(arrays):
    if array is not None and not jnp.issubdtype(array.dtype, jnp.floating):
      raise TypeError(
          f'`t_list[{i}]` has the dtype {array.dtype}. A norm needs'
          ' floating-point arrays.'
      )
  return arrays
