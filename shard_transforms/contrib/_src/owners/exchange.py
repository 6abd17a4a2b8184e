"""Communication of matrices between shards and owners.

Each mesh axis is treated on its own. Over an axis that slices a matrix, an
all-to-all sends slices of the gradient to the owner, and another one returns
slices of the update. Over an axis along which a matrix is replicated, gradients
are reduce-scattered and updates all-gathered. Over an axis whose shards hold
different layers, nothing is sent.

A stack is reduce-scattered by rows if that needs little padding. Otherwise, the
gradient of each matrix is reduce-scattered to slices, which are then exchanged
like slices of parameters: a padded all-to-all sends 1 / N of what a
reduce-scatter of padded rows sends.
"""

from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Sequence
import dataclasses
import functools
import math
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import divisions
from shard_transforms._src.reduction import collectives
from shard_transforms._src.reduction import leaf_sums
from shard_transforms._src.reduction import sharded_reduction
from shard_transforms.contrib._src.owners import stacks as stacks_lib

Reduction = sharded_reduction.ShardedReduction


@dataclasses.dataclass(frozen=True)
class Exchange:
  """Communication of one stack.

  Attributes:
    stack: The stack.
    reduction: The reduction of gradients over the axes of the transformation.
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
    """The division of a shard's slice over the axes that reduce it."""
    sizes = map(lax.axis_size, self._layout.reduced[::-1])
    return divisions.divide(self._layout.local_shape, tuple(sizes))

  def owner(self) -> jax.Array:
    """Returns the index of this shard among the owners, int32 []."""
    axes, groups = self._layout.owner_axes, self.reduction.groups
    if not axes:
      return jnp.int32(0)
    if groups is not None:
      return collectives.row_index(axes, groups)
    # Owners are numbered along `owner_axes`, which need not be in mesh order.
    return lax.axis_index(axes)

  def reduced(
      self, leaves: Sequence[jax.Array], share: leaf_sums.Share
  ) -> jax.Array:
    """Returns the owner's rows of the sums or means, [rows, ...].

    Args:
      leaves: This shard's slice of the gradient of each member.
      share: The weight of this shard.
    """
    reduction, layout = self._over_reduced, self._layout
    if not any(leaf_sums.sent_over(leaf, reduction) for leaf in leaves):
      return self._scaled(self.own(leaves))
    x = jnp.stack(axes_lib.to_varying(leaves, reduction.axes))
    if self.stack.by_rows:
      x = self._by_owner(x)
      (x,) = leaf_sums.reduce([x], share, reduction, self._scattered_rows)
      return self._scaled(self._unsharded(self._sent(x, layout.sliced)))
    (x,) = leaf_sums.reduce([x], share, reduction, self._scattered)
    x = self._sent(self._by_owner(x), layout.owner_axes)
    return self._scaled(self._joined(x))

  def _scaled(self, x):
    """Divides gradients of slices that are sums, if means are wanted."""
    sliced = {*self._layout.sliced, *self._layout.layer_axes}
    sliced.intersection_update(self.reduction.axes)
    if not (sliced and self.are_summed and self.reduction.kind == 'mean'):
      return x
    return x / x.dtype.type(math.prod(map(lax.axis_size, sliced)))

  def own(self, leaves: Sequence[jax.Array]) -> jax.Array:
    """Returns the owner's rows of reduced gradients or parameters, [rows, ...].

    Args:
      leaves: This shard's slice of each member, the same over the axes that do
        not slice it.
    """
    reduced, x = self._layout.reduced, self._by_owner(jnp.stack(leaves))
    if reduced:
      x = x.reshape(-1, *x.shape[len(reduced) :])
      index = collectives.row_index(reduced, self.reduction.groups)
      x = lax.dynamic_index_in_dim(x, index, keepdims=False)
    return self._unsharded(self._sent(x, self._layout.sliced))

  def switch(self, fn: Callable[[int], Any]) -> Any:
    """Returns `fn(owner)` for this shard; `fn` must not communicate."""

    def branch(owner):
      return lambda: axes_lib.to_varying(fn(owner), self._layout.axes)

    branches = [branch(owner) for owner in range(self.stack.num_owners)]
    if len(branches) == 1:
      return branches[0]()
    return lax.switch(self.owner(), branches)

  def returned(self, rows: jax.Array) -> list[jax.Array]:
    """Returns this shard's slice of each member, from the rows of owners."""
    layout, number = self._layout, len(self.stack.members)
    if self.stack.by_rows:
      x = self._sent(self._cut(rows), layout.sliced)
      if layout.reduced:
        x = collectives.gather(x, layout.reduced, self.reduction.groups)
      x = x.reshape(-1, *layout.local_shape)
    else:
      x = self._sent(self._cut(rows), layout.owner_axes)
      x = x.reshape(-1, *self._division.slice_shape)[:number]
      order = list(zip(layout.reduced[::-1], self._division.dims, strict=True))
      for axis, dim in reversed(order):
        x = collectives.join_along(x, axis, 1 + dim)
      x = jax.vmap(self._division.crop)(x)
    return [x[i] for i in range(number)]

  def _by_owner(self, x):
    """Pads a stack [K, ...] with zeros to the shape [*owners, rows, ...]."""
    length, num_owners = self.stack.length, self.stack.num_owners
    if padding := length * num_owners - len(x):
      x = jnp.pad(x, [(0, padding), *[(0, 0)] * (x.ndim - 1)])
    sizes = tuple(map(lax.axis_size, self._layout.owner_axes))
    if self.reduction.groups is not None:
      sizes = (num_owners,)
    return x.reshape(*sizes, length, *x.shape[1:])

  def _scattered_rows(self, x, axes):
    """Returns the owner's rows of the sums, without the axes of `reduced`."""
    rows = x.reshape(self._over_reduced.num_shards(), -1, *x.shape[-2:])
    rows = self._over_reduced.scatter_over(rows, axes)
    return rows.reshape(x.shape[len(self._layout.reduced) :])

  def _scattered(self, x, axes):
    """Returns each shard's slices of the sums of a stack."""
    del axes  # Always those of `reduced`.
    x, division = jax.vmap(self._division.pad)(x), self._division
    order = zip(self._layout.reduced[::-1], division.dims, strict=True)
    for axis, dim in order:
      x = collectives.scatter_along(x, axis, 1 + dim, tiled=True)
    return x

  def _sent(self, x: jax.Array, axes: Sequence[Hashable]) -> jax.Array:
    """Exchanges slices of rows, [*shards, rows, ...], over some axes.

    The leading dimensions are the receivers of the slices before the exchange,
    and their senders afterwards.
    """
    if len(axes) > 1 and axes_lib.on_mapped_mesh(axes):
      rows = x.reshape(-1, *x.shape[len(axes) :])
      rows = collectives.exchange_along(rows, tuple(axes), 0)
      return rows.reshape(x.shape)
    for position, axis in enumerate(axes):
      x = collectives.exchange_along(x, axis, position)
    return x

  def _joined(self, x):
    """Joins all slices of rows, [*owners, rows, ...], to the owner's rows."""
    number, last = len(self._layout.reduced), len(self._layout.owner_axes) + 1
    x = jnp.moveaxis(x, range(number), range(last - number, last))
    lead, parts = x.shape[: last - number], x.shape[last - number : last]
    of_slice = self._division.slice_shape
    x = x.reshape(-1, math.prod(parts), *of_slice)
    x = jax.vmap(self._division.join)(x)
    return self._unsharded(x.reshape(*lead, *self._layout.local_shape))

  def _unsharded(self, x):
    """Joins slices along dimensions, [*shards, rows, ...], to rows."""
    x = x.transpose(self._order())
    x = x.reshape(self.stack.length, *self._layout.shape)
    # XLA would fuse the transpose with each of its uses, and transpose as many
    # times: benchmarks/hardware.py
    #   v5e:2x4 --shapes=layers 'sharded, owned_update(muon)'
    return lax.optimization_barrier(x)

  def _order(self):
    """Returns the permutation to rows, and each dimension after its shards."""
    sliced, order = self._layout.sliced, [len(self._layout.sliced)]
    for dim, axes in enumerate(self._layout.slicing):
      order += [sliced.index(axis) for axis in axes]
      order.append(len(sliced) + 1 + dim)
    return order

  def _cut(self, rows):
    """Cuts the owner's rows to slices; the inverse of `_joined`."""
    layout, shape = self._layout, [self.stack.length]
    for axes, size in zip(layout.slicing, layout.local_shape, strict=True):
      shape += [*map(lax.axis_size, axes), size]
    order = self._order()
    x = rows.reshape(shape).transpose(
        [order.index(i) for i in range(len(order))]
    )
    if self.stack.by_rows:
      return x
    lead = x.shape[: len(layout.sliced) + 1]
    parts = jax.vmap(self._division.rows)(x.reshape(-1, *layout.local_shape))
    sizes = map(lax.axis_size, layout.reduced)
    x = parts.reshape(*lead, *sizes, *self._division.slice_shape)
    number = len(layout.reduced)
    return jnp.moveaxis(x, range(len(lead), len(lead) + number), range(number))


def gathered(
    leaf: jax.Array, slicing: Sequence[tuple[Hashable, ...]]
) -> jax.Array:
  """Gathers the slices of an array; the result is the same on all shards."""
  for dim, axes in enumerate(slicing):
    for axis in reversed(axes):
      leaf = collectives.join_along(leaf, axis, dim)
  return leaf


def sliced(
    leaf: jax.Array, slicing: Sequence[tuple[Hashable, ...]]
) -> jax.Array:
  """Returns this shard's slice of an array that is the same on all shards."""
  for dim, axes in enumerate(slicing):
    for axis in axes:
      size = leaf.shape[dim] // lax.axis_size(axis)
      start = lax.axis_index(axis) * size
      leaf = lax.dynamic_slice_in_dim(leaf, start, size, dim)
  return leaf
