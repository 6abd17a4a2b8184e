"""A stack of matrices, and their communication between shards and owners.

The first rows of a stack belong to the first owner, the next rows to the second
owner, and so on.

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
from shard_transforms.contrib._src.owners import matrix_layout


@dataclasses.dataclass(frozen=True)
class Stack:
  """Matrices of one layout, each with an owner.

  Attributes:
    layout: The layout of the matrices.
    members: For each matrix, the index of its parameter, and the index of its
      layer among those on a shard.
    num_owners: The number of owners.
    by_rows: Whether gradients are reduce-scattered by rows of the stack;
      otherwise, each gradient is reduce-scattered to slices, which are then
      exchanged.
    reduction: The reduction of gradients over the axes of the transformation.
    divides_slices: Whether the gradients of slices are sums of which the means
      are wanted.
  """

  layout: matrix_layout.MatrixLayout
  members: tuple[tuple[int, int], ...]
  num_owners: int
  by_rows: bool
  reduction: sharded_reduction.ShardedReduction
  divides_slices: bool

  @property
  def length(self) -> int:
    """The number of rows per owner; the last rows may be padding."""
    return -(-len(self.members) // self.num_owners)

  @functools.cached_property
  def params(self) -> list[int]:
    """The indices of the parameters in the stack."""
    return list(dict.fromkeys(param for param, _ in self.members))

  def members_of(self, owner: int) -> Sequence[tuple[int, int]]:
    """Returns the members of an owner, in the order of its rows."""
    return self.members[owner * self.length : (owner + 1) * self.length]

  @functools.cached_property
  def _over_reduced(self):
    return dataclasses.replace(self.reduction, axes=self.layout.reduced)

  @functools.cached_property
  def _division(self):
    """The division of a shard's slice over the axes that reduce it."""
    sizes = map(lax.axis_size, self.layout.reduced[::-1])
    return divisions.divide(self.layout.local_shape, tuple(sizes))

  @property
  def _scatters(self):
    """The axes that scatter gradients to slices, and the dimension of each."""
    return list(
        zip(self.layout.reduced[::-1], self._division.dims, strict=True)
    )

  def owner(self) -> jax.Array:
    """Returns the index of this shard among the owners, int32 []."""
    axes, groups = self.layout.owner_axes, self.reduction.groups
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
    reduction, layout = self._over_reduced, self.layout
    if not any(leaf_sums.sent_over(leaf, reduction) for leaf in leaves):
      return self._scaled(self.own(leaves))
    x = jnp.stack(axes_lib.to_varying(leaves, reduction.axes))
    if self.by_rows:
      x = self._by_owner(x)
      (x,) = leaf_sums.reduce([x], share, reduction, self._scattered_rows)
      return self._scaled(self._unsharded(self._sent(x, layout.sliced)))
    (x,) = leaf_sums.reduce([x], share, reduction, self._scattered)
    x = self._sent(self._by_owner(x), layout.owner_axes)
    return self._scaled(self._joined(x))

  def _scaled(self, x):
    """Divides gradients of slices that are sums, if means are wanted."""
    sliced = (*self.layout.sliced, *self.layout.layer_axes)
    summed = [axis for axis in self.reduction.axes if axis in sliced]
    return divided(x, summed) if summed and self.divides_slices else x

  def own(self, leaves: Sequence[jax.Array]) -> jax.Array:
    """Returns the owner's rows of reduced gradients or parameters, [rows, ...].

    Args:
      leaves: This shard's slice of each member, the same over the axes that do
        not slice it.
    """
    reduced, x = self.layout.reduced, self._by_owner(jnp.stack(leaves))
    if reduced:
      x = x.reshape(-1, *x.shape[len(reduced) :])
      index = collectives.row_index(reduced, self.reduction.groups)
      x = lax.dynamic_index_in_dim(x, index, keepdims=False)
    return self._unsharded(self._sent(x, self.layout.sliced))

  def switch(self, fn: Callable[[int], Any]) -> Any:
    """Returns `fn(owner)` for this shard; `fn` must not communicate."""

    def branch(owner):
      return lambda: axes_lib.to_varying(fn(owner), self.layout.axes)

    return lax.switch(self.owner(), list(map(branch, range(self.num_owners))))

  def returned(self, rows: jax.Array) -> list[jax.Array]:
    """Returns this shard's slice of each member, from the rows of owners."""
    layout, number = self.layout, len(self.members)
    if self.by_rows:
      x = self._sent(self._cut(rows), layout.sliced)
      if layout.reduced:
        x = collectives.gather(x, layout.reduced, self.reduction.groups)
      x = x.reshape(-1, *layout.local_shape)
    else:
      x = self._sent(self._cut(rows), layout.owner_axes)
      x = x.reshape(-1, *self._division.slice_shape)[:number]
      for axis, dim in reversed(self._scatters):
        x = collectives.join_along(x, axis, 1 + dim)
      x = jax.vmap(self._division.crop)(x)
    return [x[i] for i in range(number)]

  def _by_owner(self, x):
    """Pads a stack [K, ...] with zeros to the shape [*owners, rows, ...]."""
    length, num_owners = self.length, self.num_owners
    if padding := length * num_owners - len(x):
      x = jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1))
    sizes = tuple(map(lax.axis_size, self.layout.owner_axes))
    if self.reduction.groups is not None:
      sizes = (num_owners,)
    return x.reshape(*sizes, length, *x.shape[1:])

  def _scattered_rows(self, x, axes):
    """Returns the owner's rows of the sums, without the axes of `reduced`."""
    rows = x.reshape(self._over_reduced.num_shards(), -1, *x.shape[-2:])
    rows = self._over_reduced.scatter_over(rows, axes)
    return rows.reshape(x.shape[len(self.layout.reduced) :])

  def _scattered(self, x, axes):
    """Returns each shard's slices of the sums of a stack."""
    del axes  # Always those of `reduced`.
    x = jax.vmap(self._division.pad)(x)
    for axis, dim in self._scatters:
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
    number, last = len(self.layout.reduced), len(self.layout.owner_axes) + 1
    x = jnp.moveaxis(x, range(number), range(last - number, last))
    lead, parts = x.shape[: last - number], x.shape[last - number : last]
    of_slice = self._division.slice_shape
    x = x.reshape(-1, math.prod(parts), *of_slice)
    x = jax.vmap(self._division.join)(x)
    return self._unsharded(x.reshape(*lead, *self.layout.local_shape))

  def _unsharded(self, x):
    """Joins slices along dimensions, [*shards, rows, ...], to rows."""
    x = x.transpose(self._order())
    x = x.reshape(self.length, *self.layout.shape)
    # XLA would fuse the transpose with each of its uses, and transpose as many
    # times: benchmarks/hardware.py
    #   v5e:2x4 --shapes=layers 'sharded, owned_update(muon)'
    return lax.optimization_barrier(x)

  def _order(self):
    """Returns the permutation to rows, and each dimension after its shards."""
    sliced, order = self.layout.sliced, [len(self.layout.sliced)]
    for dim, axes in enumerate(self.layout.slicing):
      order += [sliced.index(axis) for axis in axes]
      order.append(len(sliced) + 1 + dim)
    return order

  def _cut(self, rows):
    """Cuts the owner's rows to slices; the inverse of `_joined`."""
    layout, shape = self.layout, [self.length]
    for axes, size in zip(layout.slicing, layout.local_shape, strict=True):
      shape += [*map(lax.axis_size, axes), size]
    order = self._order()
    x = rows.reshape(shape).transpose(
        [order.index(i) for i in range(len(order))]
    )
    if self.by_rows:
      return x
    lead = x.shape[: len(layout.sliced) + 1]
    parts = jax.vmap(self._division.rows)(x.reshape(-1, *layout.local_shape))
    sizes = map(lax.axis_size, layout.reduced)
    x = parts.reshape(*lead, *sizes, *self._division.slice_shape)
    number = len(layout.reduced)
    return jnp.moveaxis(x, range(len(lead), len(lead) + number), range(number))


def divided(x: jax.Array, axes: Sequence[Hashable]) -> jax.Array:
  """Divides a sum over the shards of some axes by their number."""
  return x / x.dtype.type(math.prod(map(lax.axis_size, axes)))


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
