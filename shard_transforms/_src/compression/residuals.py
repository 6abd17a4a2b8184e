"""Residuals seen from outside: whether they are finite, and their norms."""

from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import state_rules


def problem(residuals: Any) -> str | None:
  """Returns what is wrong if a residual of a shard here is not finite.

  Args:
    residuals: Arrays with a leading axis of shards.
  """
  bad = {
      start + i
      for leaf in jax.tree.leaves(residuals)
      for start, piece in state_rules.parts_here(leaf)
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


def squares(residual: Any) -> jax.Array | None:
  """Returns the squared norm of the residual of each shard, [shards].

  Args:
    residual: A tree of arrays [shards, ...], or of none.
  """
  found = [
      jnp.square(x).reshape(len(x), -1).sum(1)
      for x in jax.tree.leaves(residual)
  ]
  return sum(found[1:], found[0]) if found else None


def norm_squares(norms: Any, like: Any) -> jax.Array | None:
  """Returns the sum of the squares of the norms of each shard, [shards].

  Args:
    norms: The norms of leaves, each [shards], or [shards times those of a model
      axis], in the order of the mesh.
    like: A tree of arrays [shards, ...], one for each of these leaves.

  Raises:
    ValueError: If the order of norms of parts of a leaf cannot be told.
  """
  pairs = zip(jax.tree.leaves(norms), jax.tree.leaves(like), strict=True)
  found = [jnp.square(_by_shard(*pair)).sum(1) for pair in pairs]
  return sum(found[1:], found[0]) if found else None


def _by_shard(norms, like):
  """Returns the norms [shards, parts] of a leaf.

  Raises:
    ValueError: If their order cannot be told.
  """
  if len(norms) == len(like):
    return norms.reshape(-1, 1)
  sharding, of_shards = (getattr(x, 'sharding', None) for x in (norms, like))
  if not (_is_named(sharding) and _is_named(of_shards)):
    raise ValueError(
        '`state` must have arrays that are placed on a mesh where parameters'
        f' are sharded, got {len(norms)} norms for {len(like)} shards, in an'
        ' order that cannot be told. Give it as a step has returned it, outside'
        ' of `jax.jit`.'
    )
  all_axes, shard_axes = map(_lead, (sharding, of_shards))
  sizes = [sharding.mesh.shape[axis] for axis in all_axes]
  places = [all_axes.index(axis) for axis in shard_axes]
  by_axes = jnp.moveaxis(norms.reshape(sizes), places, range(len(places)))
  return by_axes.reshape(len(like), -1)


def _is_named(sharding: Any) -> TypeGuard[jax.sharding.NamedSharding]:
  return isinstance(sharding, jax.sharding.NamedSharding)


def _lead(sharding):
  """Returns the axes over which the first dimension is sharded."""
  entry = sharding.spec[0]
  return entry if isinstance(entry, tuple) else (entry,)


def next_norm(before: jax.Array, update: jax.Array) -> jax.Array:
  """Returns the norm of an update, or the last norm if the update is zero.

  Args:
    before: The norm of the last update of a leaf that was not zero, float32 [].
    update: The leaf.
  """
  after = norm(update)
  return jnp.where(after == 0, before, after)


def norm(x: jax.Array) -> jax.Array:
  """Returns the norm of an array, float32 []."""
  return jnp.sqrt(jnp.sum(jnp.square(x))).astype(jnp.float32)


def no_norm(param: jax.Array) -> jax.Array:
  """Returns a norm of 0 that varies over the same axes as the parameter."""
  zero = jnp.zeros([], jnp.float32)
  return axes_lib.to_varying(zero, tuple(axes_lib.varying_axes(param)))
