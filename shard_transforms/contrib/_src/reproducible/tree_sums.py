"""Sums of rows and over shards, in the order of a balanced binary tree.

Values are added in pairs, the sums of pairs in pairs, and so on. A shard that
has 2**m consecutive values adds their subtree, and the shards add the rest of
the tree: the same additions on any number of shards. Only the order within a
pair may differ, which does not change the result.
"""

import jax
from jax import lax
import jax.numpy as jnp

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.reduction import collectives


def rounded(x: jax.Array) -> jax.Array:
  """Rounds to the dtype of an array, and makes all NaNs equal.

  A compiler may fuse a product and a sum into one operation, which rounds only
  once and gives different bits. Whether it does depends on the surrounding
  program, and so on the number of shards. It cannot fuse across a comparison;
  XLA for CPUs does fuse across `lax.optimization_barrier` (JAX 0.10) and
  `lax.reduce_precision`.
  """
  return jnp.where(x == x, x, jnp.nan)


def sum_rows(rows: jax.Array) -> jax.Array:
  """Returns the sum over the first axis, whose length is a power of two."""
  while len(rows) > 1:
    pairs = lax.reshape(rows, (len(rows) // 2, 2, *rows.shape[1:]))
    rows = pairs[:, 0] + pairs[:, 1]
  return rows[0]


def scatter(rows: jax.Array, axes: collectives.Axes) -> jax.Array:
  """Returns the row of this shard, summed over all shards.

  Uses recursive halving: at each level, two shards swap halves of their rows
  and add, first neighbours, then neighbouring pairs. Sends as many bytes as a
  ring.
  """
  # One axis after another, as nested `vmap`s require. The last axis comes
  # first, because neighbouring shards are adjacent along it.
  for axis in reversed(axes_lib.in_mesh_order(axes)):
    rows = _halved_along(axis, rows)
  return lax.squeeze(rows, (0,))


def _halved_along(axis, rows):
  """Returns the rows that this shard keeps, summed along an axis."""
  shards, distance = range(lax.axis_size(axis)), 1
  while distance < len(shards):
    halves = lax.reshape(rows, (len(rows) // 2, 2, *rows.shape[1:]))
    bit = (lax.axis_index(axis) // distance) % 2
    kept_half, sent_half = (
        lax.dynamic_index_in_dim(halves, i, 1, keepdims=False)
        for i in (bit, 1 - bit)
    )
    pairs = [(shard ^ distance, shard) for shard in shards]
    rows = kept_half + collectives.permute(sent_half, (axis,), pairs)
    distance *= 2
  return rows


def psum(x: jax.Array, axes: collectives.Axes) -> jax.Array:
  """Returns the sum of an array over the shards."""
  num_shards = axes_lib.num_shards(axes, '')
  if x.size < num_shards:
    # One collective instead of two or more.
    return sum_rows(collectives.gather(x, axes))
  if x.ndim == 0 or len(x) % num_shards:
    rows = leaves_lib.slice_evenly(x.ravel(), num_shards)
  else:
    # The same slices. With flat rows, XLA for TPUs generates six times the
    # code.
    rows = lax.reshape(x, (num_shards, len(x) // num_shards, *x.shape[1:]))
  part = scatter(rows, axes)
  return leaves_lib.join_slices(collectives.gather(part, axes), x)
