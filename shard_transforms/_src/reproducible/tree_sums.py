"""Sums in the order of a balanced binary tree, of rows and over shards.

Numbers are added in pairs, the sums of pairs in pairs, and so on. A shard that
has 2**m of them in a row adds its own subtree, and shards add the rest of the
tree: the same additions on any number of shards. Only the order within a pair
may differ, which changes no bit.
"""

import jax
from jax import lax
import jax.numpy as jnp

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.reduction import collectives


def rounded(x: jax.Array) -> jax.Array:
  """Returns a number rounded to its dtype; every NaN becomes the same one.

  A compiler may join a product and a sum into one operation, which rounds once
  and gives other bits. Whether it does depends on the program around them, and
  so on the number of shards. It cannot across a comparison; XLA for CPUs does
  across `lax.optimization_barrier` (JAX 0.10) and `lax.reduce_precision`.
  """
  return jnp.where(x == x, x, jnp.nan)


def sum_rows(rows: jax.Array) -> jax.Array:
  """Returns the sum over the first axis, whose length is a power of two."""
  while len(rows) > 1:
    pairs = lax.reshape(rows, (len(rows) // 2, 2, *rows.shape[1:]))
    rows = pairs[:, 0] + pairs[:, 1]
  return rows[0]


def scatter(rows: jax.Array, axes: collectives.Axes) -> jax.Array:
  """Returns the row of each shard, summed over all of them.

  By recursive halving: at each level, two shards swap halves of their rows and
  add, at first neighbours, then pairs of them. Sends the bytes of a ring.
  """
  # Along one axis after the other, as nested `vmap`s need it: the fast one, the
  # last, has the neighbours.
  for axis in reversed(axes_lib.in_mesh_order(axes)):
    rows = _halved_along(axis, rows)
  return lax.squeeze(rows, (0,))


def _halved_along(axis, rows):
  """Returns those of the rows that a shard keeps, summed along an axis."""
  shards, distance = range(lax.axis_size(axis)), 1
  while distance < len(shards):
    halves = lax.reshape(rows, (len(rows) // 2, 2, *rows.shape[1:]))
    bit = (lax.axis_index(axis) // distance) % 2
    keep, give = (
        lax.dynamic_index_in_dim(halves, i, 1, keepdims=False)
        for i in (bit, 1 - bit)
    )
    pairs = [(shard ^ distance, shard) for shard in shards]
    rows = keep + collectives.permute(give, (axis,), pairs)
    distance *= 2
  return rows


def psum(x: jax.Array, axes: collectives.Axes) -> jax.Array:
  """Returns the sum of an array over the shards."""
  num_shards = axes_lib.size(axes, '')
  if x.size < num_shards:
    # One collective, in place of two or more.
    return sum_rows(collectives.gather(x, axes))
  if x.ndim == 0 or len(x) % num_shards:
    rows = leaves_lib.cut(x.ravel(), num_shards)
  else:
    # The same cut. Flat rows take XLA for TPUs six times the code.
    rows = lax.reshape(x, (num_shards, len(x) // num_shards, *x.shape[1:]))
  part = scatter(rows, axes)
  return leaves_lib.join(collectives.gather(part, axes), x)
