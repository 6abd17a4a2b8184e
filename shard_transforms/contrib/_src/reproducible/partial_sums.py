"""Partial sums of the towers of a window, organized like a binary counter.

Row l holds the sum of 2**l towers, and is in use if bit l of the number of
towers is 1. The sum of a full window is stored in the next row, or in the last
one.
"""

from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms.contrib._src.reproducible import tree_sums


def empty(tree: Any, num_towers: int) -> Any:
  """Returns the partial sums of an empty window, [rows, ...] for each leaf.

  Leaves of fewer than 32 bits are summed in float32. A leaf that cannot have a
  gradient is `None`.
  """
  # Checkpointing libraries may refuse empty arrays.
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
    tower: The number of towers that have been added, int32 [].
  """
  carry, full, level = tree_sums.rounded(x), jnp.bool_(True), jnp.int32(0)
  for i, row in enumerate(rows):
    full &= (tower >> i) & 1 == 1
    carry = jnp.where(full, row + carry, carry)
    level += full.astype(jnp.int32)
  return lax.dynamic_update_index_in_dim(rows, carry, level, 0)


def full_row(rows: jax.Array, num_towers: int) -> jax.Array:
  """Returns the sum of all towers of a full window."""
  return rows[min(num_towers.bit_length(), len(rows)) - 1]
