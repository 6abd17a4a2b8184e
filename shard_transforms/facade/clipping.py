"""`clip_by_global_norm` of TensorFlow 1, which takes a list."""

from collections.abc import Sequence
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy.typing as npt
import optax


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
    The list of scaled arrays, and the norm before, [].

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
  if not isinstance(t_list, Sequence) or isinstance(t_list, str):
    raise TypeError(f'`t_list` must be a sequence, got {t_list!r}.')
  del name
  arrays: Any = [None if t is None else jnp.asarray(t) for t in t_list]
  for i, array in enumerate(arrays):
    if array is not None and not jnp.issubdtype(array.dtype, jnp.floating):
      raise TypeError(
          '`t_list` must hold floating-point arrays, got one of'
          f' {array.dtype} at {i}.'
      )
  if use_norm is None:
    tx = optax.clip_by_global_norm(clip_norm)
    clipped: Any = tx.update(arrays, tx.init(arrays))[0]
    return clipped, optax.tree.norm(arrays)
  norm = jnp.asarray(use_norm)
  scale = jnp.minimum(clip_norm / norm, 1)
  return optax.tree.scale(scale, arrays), norm
