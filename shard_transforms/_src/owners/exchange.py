"""How matrices reach their owners, and how their updates come back.

One rule, axis by axis. Over an axis that slices a matrix, an all-to-all takes
its slices to the owner, and one takes the slices of the update back. Over an
axis on whose shards a matrix is the same, gradients are reduce-scattered and
updates gathered. Layers that lie on different shards stay there.

A stack is reduce-scattered by rows where that needs no padding. Otherwise each
matrix is, into slices, which are exchanged like those of parameters: a padded
all-to-all sends 1 / N of what padded rows would.
"""

from collections.abc import Hashable
from collections.abc import Sequence
import dataclasses
import functools
import math

import chex
import jax
from jax import lax
import jax.numpy as jnp

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import divisions
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.owners import stacks as stacks_lib
from shard_transforms._src.reduction import collectives
from shard_transforms._src.reduction import leaf_sums
from shard_transforms._src.reduction import sharded_reduction

Reduction = sharded_reduction.ShardedReduction


@dataclasses.dataclass(frozen=True)
class Exchange:
  """The way of the matrices of one stack.

  Attributes:
    stack: The stack.
    reduction: How gradients are reduced over the axes of the transformation.
    are_summed: Whether the gradients of slices are sums over the shards.
  """

  stack: stacks_lib.Stack
  reduction: Reduction
  are_summed: bool

  @functools.cached_property
  def _layout(self):
    return self.stack.layout

  @functools.cached_property
  def _over_reduced(self):
    return dataclasses.replace(self.reduction, axes=self._layout.reduced)

  @functools.cached_property
  def _division(self):
    """How the slice of a shard is divided over the axes that reduce it."""
    sizes = map(lax.axis_size, self._layout.reduced[::-1])
    return divisions.divide(self._layout.local_shape, tuple(sizes))

  @property
  def _sizes(self):
    return tuple(map(lax.axis_size, self._layout.owned_over))

  def owner(self) -> jax.Array:
    """Returns the number of this shard among the owners, int32 []."""
    if not self._layout.owned_over:
      return jnp.int32(0)
    return collectives.row_index(
        self._layout.owned_over, self.reduction.groups
    )

  def reduced(
      self, leaves: Sequence[jax.Array], share: leaf_sums.Share
  ) -> jax.Array:
    """Returns an owner's rows of the sums or means, [rows, ...].

    Args:
      leaves: This shard's slice of the gradient of each member.
      share: How much the shard counts.
    """
    over = self._over_reduced
    if not any(leaf_sums.sent_over(leaf, over) for leaf in leaves):
      return self._scaled(self.own(leaves))
    leaves = axes_lib.to_varying(leaves, over.axes)
    if self.stack.by_rows:
      number = self.stack.num_owners
      rows = _in_lines(self._padded(jnp.stack(leaves)), number)
      (row,) = leaf_sums.scatter([rows], share, over, number)
      return self._scaled(row.reshape(self.stack.length, *self._layout.shape))
    x = jnp.stack(leaves)
    if over.axes:
      (x,) = leaf_sums.reduce_by(self._scattered, [x], share, over)
    return self._scaled(self._joined(self._sent(self._padded(x), ())))

  def _scaled(self, x):
    """Returns the mean of slices, whose gradients are summed already."""
    sliced = {*self._layout.sliced, *self._layout.apart}
    sliced.intersection_update(self.reduction.axes)
    if not (sliced and self.are_summed and self.reduction.kind == 'mean'):
      return x
    return x / x.dtype.type(math.prod(map(lax.axis_size, sliced)))

  def own(self, leaves: Sequence[jax.Array]) -> jax.Array:
    """Returns an owner's rows of what is reduced already, [rows, ...].

    Args:
      leaves: This shard's slice of each member, the same over the axes that do
        not slice it.
    """
    if not self._layout.sliced:
      return self.switch(lambda owner: self._rows_of(owner, leaves))
    x = self._padded(jnp.stack(leaves))
    return self._whole(self._sent(x, self._layout.reduced))

  def switch(self, fn) -> jax.Array:
    """Returns `fn(owner)` of this shard, which must not communicate."""

    def branch(owner):
      return lambda: axes_lib.to_varying(fn(owner), self._layout.axes)

    branches = [branch(owner) for owner in range(self.stack.num_owners)]
    if len(branches) == 1:
      return branches[0]()
    return lax.switch(self.owner(), branches)

  def _rows_of(self, owner, leaves):
    own = [leaves[i] for i in self.stack.of_owner(owner)]
    missing = self.stack.length - len(own)
    padding = [jnp.zeros(self._layout.shape, leaves[0].dtype)] * missing
    return jnp.stack([*own, *padding])

  def returned(self, rows: jax.Array) -> list[jax.Array]:
    """Returns this shard's slice of each member, given an owner's rows."""
    number = len(self.stack.members)
    if self.stack.by_rows:
      if self._layout.owned_over:
        rows = collectives.gather(
            _in_lines(rows, 1)[0], self._layout.reduced, self.reduction.groups
        )
      x = rows.reshape(-1, *self._layout.shape)
      return [x[i] for i in range(number)]
    x = self._sent(self._cut(rows), (), back=True)[:number]
    if reduced := self._layout.reduced:
      order = list(zip(reduced[::-1], self._division.dims, strict=True))
      for axis, dim in reversed(order):
        x = collectives.join_along(x, axis, 1 + dim)
      x = jax.vmap(self._division.crop)(x)
    return [x[i] for i in range(number)]

  def _padded(self, x):
    """Returns a stack [K, ...] with zeros to a multiple of the owners."""
    number = self.stack.length * self.stack.num_owners - len(x)
    return jnp.pad(x, [(0, number), *[(0, 0)] * (x.ndim - 1)]) if number else x

  def _scattered(self, x, axes):
    """Returns each shard's slices of the sums of a stack."""
    del axes  # All of them.
    x, division = jax.vmap(self._division.pad)(x), self._division
    order = zip(self._layout.reduced[::-1], division.dims, strict=True)
    for axis, dim in order:
      x = collectives.scatter_along(x, axis, 1 + dim, tiled=True)
    return x

  def _sent(self, x, same: tuple[Hashable, ...], back: bool = False):
    """Exchanges slices of all members for all slices of some, or back.

    Args:
      x: The slices of all members, [K, ...], or those of an owner's rows,
        [*owners, rows, ...].
      same: The axes on whose shards slices are the same: an owner has its own.
      back: Whether they go back.

    Returns:
      The other form; without an axis of shards for each of `same`.
    """
    if not back:
      x = x.reshape(*self._sizes, self.stack.length, *x.shape[1:])
    position = 0
    for axis in self._layout.owned_over:
      if axis in same:
        index = lax.axis_index(axis)
        x = lax.dynamic_index_in_dim(x, index, position, keepdims=False)
      else:
        x = collectives.exchange_along(x, axis, position)
        position += 1
    return x.reshape(-1, *x.shape[position + 1 :]) if back else x

  def _joined(self, x):
    """Returns an owner's rows, given all their slices, [*owners, rows, ...]."""
    reduced, order = self._layout.reduced, self._layout.owned_over
    if reduced:
      at = [order.index(axis) for axis in reduced]
      x = jnp.moveaxis(x, at, range(len(order) + 1 - len(at), len(order) + 1))
      lead = x.shape[: len(order) + 1 - len(at)]
      parts = x.reshape(-1, math.prod(x.shape[len(lead) : len(order) + 1]),
                        *self._division.of_slice)
      x = jax.vmap(self._division.join)(parts)
      x = x.reshape(*lead, *self._layout.local_shape)
    return self._whole(x)

  def _whole(self, x):
    """Returns rows, given slices along the dimensions, [*shards, rows, ...]."""
    x = x.transpose(self._order())
    return x.reshape(self.stack.length, *self._layout.shape)

  def _order(self):
    """Returns the order of axes: rows, and each dimension behind its shards."""
    sliced, order = self._layout.sliced, [len(self._layout.sliced)]
    for dim, axes in enumerate(self._layout.slicing):
      order += [sliced.index(axis) for axis in axes]
      order.append(len(sliced) + 1 + dim)
    return order

  def _cut(self, rows):
    """Returns all slices of an owner's rows; the reverse of `_joined`."""
    layout, shape = self._layout, [self.stack.length]
    for axes, size in zip(layout.slicing, layout.local_shape, strict=True):
      shape += [*map(lax.axis_size, axes), size]
    order = self._order()
    x = rows.reshape(shape).transpose([order.index(i) for i in range(len(order))])
    if not layout.reduced:
      return x
    lead = x.shape[: len(layout.sliced) + 1]
    parts = jax.vmap(self._division.rows)(x.reshape(-1, *layout.local_shape))
    sizes = map(lax.axis_size, layout.reduced)
    x = parts.reshape(*lead, *sizes, *self._division.of_slice)
    at = [layout.owned_over.index(axis) for axis in layout.reduced]
    return jnp.moveaxis(x, range(len(lead), len(lead) + len(at)), at)


def gathered(leaf: jax.Array, slicing: Sequence[tuple[Hashable, ...]]) -> jax.Array:
  """Returns a whole array, the same on all shards, from slices of it."""
  for dim, axes in enumerate(slicing):
    for axis in reversed(axes):
      leaf = collectives.join_along(leaf, axis, dim)
  return leaf


def sliced(leaf: chex.Array, slicing: Sequence[tuple[Hashable, ...]]) -> jax.Array:
  """Returns a shard's slice of an array that all shards have."""
  for dim, axes in enumerate(slicing):
    for axis in axes:
      size = leaf.shape[dim] // lax.axis_size(axis)
      start = lax.axis_index(axis) * size
      leaf = lax.dynamic_slice_in_dim(leaf, start, size, dim)
  return leaf


def _in_lines(x, num_rows):
  """Returns a stack as rows of whole lines, [num_rows, ...]."""
  # XLA for TPUs scatters and gathers tiles of 8 lines of 128.
  width = x.shape[-1] if x.ndim > 2 else 1
  lines = (width,) if width > 1 else ()
  return x.reshape(num_rows, -1, *lines)
