"""Partial sums of the towers of a window: a binary counter.

Row l holds the sum of 2**l towers, and counts if bit l of the number of towers
is 1. The sum of a full window takes the next row, or the place of the last.
"""

from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.reproducible import tree_sums


def empty(tree: Any, num_towers: int) -> Any:
  """Returns the sums of no towers, [rows, ...] for each leaf.

  Those of fewer than 32 bits are summed in float32. A leaf that can have no
  gradient is `None`.
  """
  # Checkpoints may refuse arrays without elements.
  num_rows = max(num_towers.bit_length() - 1, 1)

  def stack(zeros):
    return jnp.broadcast_to(zeros, (num_rows, *zeros.shape))

  return jax.tree.map(stack, leaves_lib.accumulators(tree))


def zero(rows: jax.Array) -> jax.Array:
  """Returns a zero of the type of one partial sum."""
  zero = jnp.zeros(rows.shape[1:], rows.dtype)
  return axes_lib.mark_varying(zero, tuple(axes_lib.varying_axes(rows)))


def add(rows: jax.Array, x: jax.Array, tower: jax.Array) -> jax.Array:
  """Returns the partial sums with one more tower.

  Args:
    rows: The partial sums, [rows, ...].
    x: The update of a tower, or its weight, [...].
    tower: How many towers have been added, int32 [].
  """
  carry, full, level = tree_sums.rounded(x), jnp.bool_(True), jnp.int32(0)
  for i, row in enumerate(rows):
    full &= (tower >> i) & 1 == 1
    carry = jnp.where(full, row + carry, carry)
    level += full.astype(jnp.int32)
  return lax.dynamic_update_index_in_dim(rows, carry, level, 0)


def full_row(rows: jax.Array, num_towers: int) -> jax.Array:
  """Returns the sum of all towers of a window that is full."""
  return rows[min(num_towers.bit_length(), len(rows)) - 1]
