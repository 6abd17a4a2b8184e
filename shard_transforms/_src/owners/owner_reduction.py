"""Sums that reach K owners, each of them N / K times, and rows of all owners.

Shard s is a copy of owner s % K. A row is summed over K neighbours first, each
of which keeps the part of its owner, and then over the copies of an owner: what
a shard sends, computes and holds does not grow with the number of shards.
"""

from collections.abc import Hashable
from collections.abc import Sequence
import dataclasses

import jax
from jax import lax
import jax.numpy as jnp

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import thresholds
from shard_transforms._src.reduction import bucketing
from shard_transforms._src.reduction import collectives
from shard_transforms._src.reduction import sharded_reduction


@dataclasses.dataclass(frozen=True)
class OwnerReduction(sharded_reduction.ShardedReduction):
  """Reduce-scatter of rows to owners, and all-gather of theirs.

  Attributes:
    num_owners: K, one of `counts`.
  """

  num_owners: int = 1

  def counts(self) -> list[int]:
    """Returns the numbers of owners that there can be: divisors of N.

    Over several axes, owners lie along the fast ones.
    """
    if self.groups is not None:
      return _divisors(self.num_shards())
    found, product = set(), 1
    for axis in reversed(axes_lib.in_mesh_order(self.axes)):
      size = lax.axis_size(axis)
      found.update(product * k for k in _divisors(size))
      product *= size
    return sorted(found)

  @property
  def num_copies(self) -> int:
    """How many shards do the work of the same owner."""
    return self.num_shards() // self.num_owners

  def owner(self) -> jax.Array:
    """Returns the number of this shard's owner, int32 []."""
    # What is chosen by a constant is seen to be the same on all shards. Types
    # say that each has its own.
    is_typed = any(map(axes_lib.is_tracked, self.axes))
    if self.num_owners == 1 and not is_typed:
      return jnp.int32(0)
    index = collectives.row_index(self.axes, self.groups)
    return lax.rem(index, jnp.int32(self.num_owners))

  def copy(self) -> jax.Array:
    """Returns which of the copies of its owner this shard is, int32 []."""
    index = collectives.row_index(self.axes, self.groups)
    return lax.div(index, jnp.int32(self.num_owners))

  def scatter_over(
      self, rows: jax.Array, axes: tuple[Hashable, ...]
  ) -> jax.Array:
    """Returns its owner's row of the sum of rows [K, ...] over the shards."""
    return self._scatter_lines(_lines(rows), axes).reshape(rows.shape[1:])

  def _scatter_lines(self, rows, axes):
    if self.num_owners == 1 or not axes_lib.on_mapped_mesh(axes):
      summed = self.sum_over(rows, axes)
      return lax.dynamic_index_in_dim(summed, self.owner(), keepdims=False)
    # Along the last axis of the mesh, owners differ first; the other axes then
    # sum only a part.
    for axis in reversed(axes_lib.in_mesh_order(axes)):
      groups = self.groups or (tuple(range(lax.axis_size(axis))),)
      beside = min(len(rows), len(groups[0]))
      rows = rows.reshape(-1, beside, *rows.shape[1:])
      rows = _scatter_beside(rows, axis, groups, beside)
      rows = _sum_of_copies(rows, axis, groups, beside)
    return rows[0]

  def gather_rows(self, rows: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the rows of all owners, [K, ...], given those of one."""
    copies, rows = self.num_copies, axes_lib.to_varying(rows, self.axes)
    is_typed = any(map(axes_lib.is_tracked, self.axes))
    # All shards have what one owner has, but types need not say so.
    if self.num_owners == 1 and not is_typed:
      return [row[None] for row in rows]

    def gather(row, _):
      own = _lines(row[None])[0]
      if copies > 1:
        parts = collectives.parts(own, copies)
        own = lax.dynamic_index_in_dim(parts, self.copy(), keepdims=False)
      parts = collectives.gather(own, self.axes, self.groups)
      if copies > 1:
        parts = parts.reshape(copies, self.num_owners, -1)
        parts = jnp.moveaxis(parts, 0, 1).reshape(self.num_owners, -1)
        parts = parts[:, : row.size]
      return parts.reshape(-1, *row.shape)

    keys = [(x.dtype, axes_lib.varying_axes(x)) for x in rows]
    levels = thresholds.levels(self.axes, self.sent)
    growth = self.num_owners
    return bucketing.map_packed(gather, rows, keys, levels, growth=growth)


def _scatter_beside(rows, axis, groups, num_owners):
  """Returns a shard's rows of the sums over others beside it, [m, K, ...]."""
  if num_owners == 1:
    return rows[:, 0]
  starts = range(0, len(groups[0]), num_owners)
  beside = [group[i : i + num_owners] for group in groups for i in starts]
  return collectives.scatter_along(rows, axis, 1, axis_index_groups=beside)


def _sum_of_copies(rows, axis, groups, num_owners):
  """Returns the sums of rows over the copies of their owners."""
  copies = [group[k::num_owners] for group in groups for k in range(num_owners)]
  if len(copies[0]) == 1:
    return rows
  return collectives.psum_in_groups(rows, axis, tuple(copies))


def _lines(rows):
  """Returns rows [K, ...] as lines [K, lines, ...], if they are whole ones."""
  # XLA for TPUs scatters and gathers tiles of 8 lines of 128.
  width = rows.shape[-1] if rows.ndim > 2 else 128
  is_whole = rows.size % (len(rows) * width) == 0
  return rows.reshape(len(rows), -1, width) if is_whole else rows


def _divisors(number):
  return [k for k in range(1, number + 1) if number % k == 0]
