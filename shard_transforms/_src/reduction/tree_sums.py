"""Sums in the order of a balanced binary tree, whatever the number of shards.

Numbers are added in pairs, the sums of pairs in pairs, and so on. A shard that
has 2**m of them in a row adds its own subtree, and shards add the rest of the
tree: the same additions on any number of shards. Only the order within a pair
may differ, which changes no bit.
"""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import state_rules

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


def is_in_order(state: Any) -> bool:
  """Whether a state is of a transformation that sums over shards by a tree."""
  return any(
      True for _ in state_rules.nodes(state, lambda x: isinstance(x, TreeOrder))
  )


def rounded(x: jax.Array) -> jax.Array:
  """Returns a number rounded to its dtype; every NaN becomes the same one.

  A compiler may join a product and a sum into one operation, which rounds once
  and gives other bits. Whether it does depends on the program around them, and
  so on the number of shards. It cannot across a comparison; XLA for CPUs does
  across `lax.optimization_barrier` (JAX 0.10) and `lax.reduce_precision`.
  """
  return jnp.where(x == x, x, jnp.nan)  # noqa: PLR0124


def sum_rows(rows: jax.Array) -> jax.Array:
  """Returns the sum over the first axis, whose length is a power of two."""
  while len(rows) > 1:
    pairs = lax.reshape(rows, (len(rows) // 2, 2, *rows.shape[1:]))
    rows = pairs[:, 0] + pairs[:, 1]
  return rows[0]


def num_levels(num_towers: int) -> int:
  """Returns the number of partial sums that a window of towers keeps."""
  return num_towers.bit_length() - 1


def empty(tree: Any, num_towers: int) -> Any:
  """Returns the partial sums of no towers, [levels, ...] for each leaf."""
  levels = num_levels(num_towers)

  def stack(zeros):
    return jnp.broadcast_to(zeros, (levels, *zeros.shape))

  return jax.tree.map(stack, leaves_lib.accumulators(tree))


def add(levels: jax.Array, x: jax.Array, tower: jax.Array) -> jax.Array:
  """Returns the partial sums of a window with one more tower.

  They are a binary counter: row l holds the sum of 2**l towers, and counts if
  bit l of the number of towers is 1. The full sum of the window replaces the
  last row.

  Args:
    levels: The partial sums, [levels, ...].
    x: What is added, [...].
    tower: How many towers have been added, int32 [].
  """
  carry, full = rounded(x), jnp.bool_(True)
  level = jnp.int32(0)
  for i, row in enumerate(levels):
    full &= (tower >> i) & 1 == 1
    carry = jnp.where(full, row + carry, carry)
    level += full
  return lax.dynamic_update_index_in_dim(levels, carry, level, 0)


def of_window(levels: Any) -> Any:
  """Returns the sums of a full window."""
  return jax.tree.map(lambda x: x[-1], levels)
