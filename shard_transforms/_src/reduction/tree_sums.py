"""Sums in the order of a balanced binary tree, whatever the number of shards.

Numbers are added in pairs, the sums of pairs in pairs, and so on. A shard that
has 2**m of them in a row adds its own subtree, and shards add the rest of the
tree: the same additions on any number of shards. Only the order within a pair
may differ, which changes no bit.
"""

import math
from typing import Any, Literal, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.reduction import collectives

Order = Literal['tree'] | None


class TreeOrder(NamedTuple):
  """State of a reduction in the order of a tree, by which gates know it."""


def check_order(order: Any) -> None:
  """Checks the order of a sum, as the user gives it.

  Raises:
    ValueError: If it is neither `'tree'` nor `None`.
  """
  if order not in ('tree', None):
    raise ValueError(f"`order` must be 'tree' or None, got {order!r}.")


def check_power_of_two(name: str, value: int) -> None:
  """Checks a number of summands.

  Raises:
    ValueError: If it is not a power of two.
  """
  if value & (value - 1):
    raise ValueError(
        f"{name} must be a power of two with `order='tree'`, whose sums are of"
        f' pairs, got {value}. Take {1 << (value.bit_length() - 1)} or'
        f' {1 << value.bit_length()}.'
    )


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


def scatter_in_pairs(
    rows: jax.Array,
    axes: collectives.Axes,
    groups: collectives.Groups | None = None,
) -> jax.Array:
  """Returns what `collectives.scatter` does, added in the order of a tree.

  By recursive halving: at each level, two shards swap halves of their rows and
  add, at first neighbours, then pairs of them. Sends the same bytes.

  Args:
    rows: As in `collectives.scatter`; the number of shards is a power of two.
    axes: As in `collectives.scatter`.
    groups: As in `collectives.scatter`.
  """
  members = groups or (tuple(range(len(rows))),)
  rank, distance = collectives.row_index(axes, groups), 1
  while len(rows) > 1:
    halves = lax.reshape(rows, (len(rows) // 2, 2, *rows.shape[1:]))
    bit = (rank // distance) % 2
    keep, give = (
        lax.dynamic_index_in_dim(halves, i, 1, keepdims=False)
        for i in (bit, 1 - bit)
    )
    pairs = [
        (group[i ^ distance], shard)
        for group in members
        for i, shard in enumerate(group)
    ]
    rows, distance = keep + collectives.permute(give, axes, pairs), 2 * distance
  return lax.squeeze(rows, (0,))


def sum_in_pairs(
    x: jax.Array,
    axes: collectives.Axes,
    groups: collectives.Groups | None = None,
) -> jax.Array:
  """Returns what `collectives.psum` does, added in the order of a tree."""
  if not axes:
    return x
  size = (
      math.prod(map(lax.axis_size, axes)) if groups is None else len(groups[0])
  )
  if x.size < size:
    # Fewer collectives.
    return sum_rows(collectives.gather(x, axes, groups))
  part = scatter_in_pairs(leaves_lib.cut(x.ravel(), size), axes, groups)
  return leaves_lib.join(collectives.gather(part, axes, groups), x)
