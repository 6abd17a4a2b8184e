"""Division of leaves among shards, along one dimension per mapped axis.

If no dimension divides well, the leaf is flattened and split. The slices of all
shards, side by side, form the leaf, so sliced state has the shapes of the
replicated state (up to padding) and can be described by a `PartitionSpec`. XLA
for TPUs reduce-scatters slices along a dimension, but all-reduces the whole
array for a flattened leaf.
"""

from collections.abc import Hashable
from collections.abc import Sequence
import dataclasses
import math

import chex
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from shard_transforms._src.base import partition_specs

# Maximum padding along dimensions, as a fraction of the elements.
_MOST_PADDING = 1 / 16


def dimension(
    sizes: Sequence[int], num_slices: int, is_used: Sequence[bool]
) -> int:
  """Returns the dimension along which an array is divided.

  This is the dimension that needs the least padding, relative to its size. On
  ties, it is the first dimension that is not divided over another axis yet.
  """
  return min(
      range(len(sizes)),
      key=lambda d: (-sizes[d] % num_slices / max(sizes[d], 1), is_used[d]),
  )


def divide(shape: tuple[int, ...], num_slices: Sequence[int]) -> 'Division':
  """Returns the division of a leaf, given the number of shards of each axis.

  The leaf is flattened if its dimensions would need too much padding.
  """
  division = divide_dimensions(shape, num_slices)
  padding = math.prod(division.padded) - math.prod(shape)
  if padding <= _MOST_PADDING * math.prod(shape) or len(shape) == 1:
    return division
  *ones, num_elements = _flattened(shape)
  return dataclasses.replace(
      division,
      dims=(len(shape) - 1,) * len(division.dims),
      slice_shape=(*ones, -(-num_elements // math.prod(num_slices))),
      is_flattened=True,
  )


def divide_dimensions(
    shape: tuple[int, ...], num_slices: Sequence[int]
) -> 'Division':
  """Returns the division along dimensions, however much padding it needs."""
  sizes, dims = list(shape), []
  for number in num_slices:
    is_used = [x < y for x, y in zip(sizes, shape, strict=True)]
    dim = dimension(sizes, number, is_used)
    sizes[dim] = -(-sizes[dim] // number)
    dims.append(dim)
  return Division(shape, tuple(num_slices), tuple(dims), tuple(sizes))


@dataclasses.dataclass(frozen=True)
class Division:
  """A division of a leaf among shards.

  Attributes:
    shape: The shape of the leaf.
    num_slices: The number of shards along each axis, from the last axis of the
      mesh to the first. Leaves are scattered in this order, so each later axis
      communicates a smaller part.
    dims: The dimension that each axis divides. If two axes divide the same
      dimension, the first axis divides it into larger parts.
    slice_shape: The shape of a slice.
    is_flattened: Whether the leaf is flattened to [1, ..., 1, elements] before
      it is divided.
  """

  shape: tuple[int, ...]
  num_slices: tuple[int, ...]
  dims: tuple[int, ...]
  slice_shape: tuple[int, ...]
  is_flattened: bool = False

  @property
  def padded(self) -> tuple[int, ...]:
    """The shape of the padded leaf: all slices side by side."""
    shape = list(self.slice_shape)
    for number, dim in zip(self.num_slices, self.dims, strict=True):
      shape[dim] *= number
    return tuple(shape)

  def spec(self, axes: Sequence[Hashable], spec: P = P()) -> P:
    """Returns the spec of the slices of a leaf that `spec` already shards."""
    entries = partition_specs.entries(spec)
    entries += [()] * (len(self.shape) - len(entries))
    if self.is_flattened:
      entries = [()] * (len(entries) - 1) + [sum(entries, ())]
    for axis, dim in zip(axes, self.dims, strict=True):
      entries[dim] += (axis,)
    while not entries[-1]:
      entries.pop()
    return partition_specs.from_entries(entries)

  def pad(self, leaf: chex.Array) -> jax.Array:
    """Flattens a leaf if needed, and pads it with zeros at its ends."""
    return padded(leaf, self.padded)

  def crop(self, leaf: jax.Array) -> jax.Array:
    """Restores the leaf from the result of `pad`."""
    return cropped(leaf, self.shape)

  def local_slice(
      self, leaf: jax.Array, index: Sequence[chex.Numeric]
  ) -> jax.Array:
    """Returns the slice of the shard with this index along each axis."""
    x = self.pad(leaf)
    for i, number, dim in zip(index, self.num_slices, self.dims, strict=True):
      size = x.shape[dim] // number
      x = lax.dynamic_slice_in_dim(x, i * size, size, dim)
    return x

  def rows(self, leaf: chex.Array) -> jax.Array:
    """Returns the slices of all shards, [shards, ...], in mesh order."""
    x = self.pad(leaf)
    for i, number in enumerate(self.num_slices):
      at = i + self.dims[i]
      x = x.reshape(*x.shape[:at], number, -1, *x.shape[at + 1 :])
      x = jnp.moveaxis(x, at, 0)
    return lax.reshape(x, (math.prod(self.num_slices), *self.slice_shape))

  def join(self, rows: jax.Array) -> jax.Array:
    """Joins the slices of all shards, [shards, ...], into the leaf."""
    x = lax.reshape(rows, (*reversed(self.num_slices), *self.slice_shape))
    for i in reversed(range(len(self.dims))):
      at = i + self.dims[i]
      x = jnp.moveaxis(x, 0, at)
      x = x.reshape(*x.shape[:at], -1, *x.shape[at + 2 :])
    return self.crop(x)


def padded(leaf: chex.Array, shape: tuple[int, ...]) -> jax.Array:
  """Pads an array with zeros to `shape`; flattens it first if needed."""
  leaf = jnp.asarray(leaf)
  if any(x > y for x, y in zip(leaf.shape, shape, strict=True)):
    leaf = leaf.reshape(_flattened(leaf.shape))
  if leaf.shape == shape:
    return leaf
  return jnp.pad(
      leaf, [(0, y - x) for x, y in zip(leaf.shape, shape, strict=True)]
  )


def cropped(leaf: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """Restores an array of this shape from the result of `padded`."""
  if leaf.shape == shape:
    return leaf
  is_flattened = any(x < y for x, y in zip(leaf.shape, shape, strict=True))
  sizes = _flattened(shape) if is_flattened else shape
  return leaf[tuple(map(slice, sizes))].reshape(shape)


def may_be_padded(
    padded_shape: tuple[int, ...], shape: tuple[int, ...]
) -> bool:
  """Whether a divided leaf of `shape` may have the shape `padded_shape`."""
  return len(padded_shape) == len(shape) and any(
      all(x >= y for x, y in zip(padded_shape, sizes, strict=True))
      for sizes in (shape, _flattened(shape))
  )


def _flattened(shape):
  """Returns the shape of a flattened array, with the same rank."""
  return (*(1,) * (len(shape) - 1), math.prod(shape))
