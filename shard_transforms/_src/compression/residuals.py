"""What residuals tell from outside: whether they are finite, and how large."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shard_transforms._src.base import addressable
from shard_transforms._src.base import axes as axes_lib


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
    residual: Any, update_norm: Any
) -> tuple[jax.Array | None, jax.Array | None]:
  """Returns the squared norms of what each shard holds back, and of its update.

  Args:
    residual: A tree of arrays [shards, ...].
    update_norm: The norms of the leaves of the update, [shards], or [shards
      times those of a model axis], in the order of the shards.

  Returns:
    Two arrays [shards], or `None` where there are no residuals.
  """
  leaves = jax.tree.leaves(residual)
  if not leaves:
    return None, None
  num_shards = len(leaves[0])
  held = [jnp.square(x).reshape(num_shards, -1).sum(1) for x in leaves]
  norms = [
      jnp.square(x).reshape(num_shards, -1).sum(1)
      for x in jax.tree.leaves(update_norm)
  ]
  return sum(held[1:], held[0]), sum(norms[1:], norms[0])


def next_norm(update: jax.Array, before: jax.Array) -> jax.Array:
  """Returns the norm of an update, or that of the last one if it is zero.

  Args:
    update: A leaf of the update.
    before: The norm of its last update that was not zero, float32 [].
  """
  after = norm(update)
  return jnp.where(after == 0, before, after)


def norm(x: jax.Array) -> jax.Array:
  """Returns the norm of an array, float32 []."""
  return jnp.sqrt(jnp.sum(jnp.square(x))).astype(jnp.float32)


def no_norm(param: jax.Array) -> jax.Array:
  """Returns the norm before the first update, which varies as the parameter."""
  zero = jnp.zeros([], jnp.float32)
  return axes_lib.to_varying(zero, tuple(axes_lib.varying_axes(param)))
