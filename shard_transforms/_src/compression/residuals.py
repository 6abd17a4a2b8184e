"""What residuals tell from outside: whether they are finite, and how large."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shard_transforms._src.base import addressable


def problem(residuals: Any) -> str | None:
  """Returns what is wrong if a residual of a shard here is not finite.

  Args:
    residuals: Arrays whose first axis is that of the shards.
  """
  bad = {
      start + i
      for leaf in jax.tree.leaves(residuals)
      for start, piece in addressable.pieces(leaf)
      for i, row in enumerate(piece)
      if not np.all(np.isfinite(row))
  }
  if not bad:
    return None
  return (
      f'The residuals of the shards {sorted(bad)} are not finite: a bad update'
      ' has reached them, and stays in all later ones. Go back to a checkpoint,'
      ' and put `shard_transforms.guard` around the compression.'
  )


def squares(
    residual: Any, update_norm: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns the squared norms of what each shard holds back, and of its update.

  Args:
    residual: A tree of arrays [shards, ...].
    update_norm: The norm of the update, [shards].
  """
  total = jnp.zeros_like(update_norm)
  for leaf in jax.tree.leaves(residual):
    total += jnp.sum(jnp.square(leaf), axis=tuple(range(1, leaf.ndim)))
  return total, jnp.square(update_norm)


def norm(values: Sequence[jax.Array]) -> jax.Array:
  """Returns the norm of all elements of some arrays, float32 []."""
  squares = [jnp.sum(jnp.square(x)).astype(jnp.float32) for x in values]
  return jnp.sqrt(sum(squares, jnp.float32(0)))
