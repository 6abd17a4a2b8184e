"""How a leaf is divided among shards: along a dimension for each mapped axis.

The slices of all shards, side by side, are the leaf: state that is sliced so
has the shapes of the replicated state, and a `PartitionSpec`. Slices along a
dimension are what XLA for TPUs reduces and scatters; of flat ones it sums the
whole; docs/measurements.md has what it makes of both.
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


def dimension(
    sizes: Sequence[int], num_slices: int, is_used: Sequence[bool]
) -> int:
  """Returns the dimension along which an array is divided.

  It is the one that needs the least padding, which is none where its size can
  be divided; among equals the first one that is not divided over another axis.
  """
  return min(
      range(len(sizes)),
      key=lambda d: (-sizes[d] % num_slices / max(sizes[d], 1), is_used[d]),
  )


def divide(shape: tuple[int, ...], num_slices: Sequence[int]) -> 'Division':
  """Returns how a leaf is divided, given the number of shards of each axis."""
  left, dims = list(shape), []
  for number in num_slices:
    is_used = [x < y for x, y in zip(left, shape, strict=True)]
    dim = dimension(left, number, is_used)
    left[dim] = -(-left[dim] // number)
    dims.append(dim)
  return Division(shape, tuple(num_slices), tuple(dims), tuple(left))


@dataclasses.dataclass(frozen=True)
class Division:
  """How a leaf is divided among shards.

  Attributes:
    shape: Its shape.
    num_slices: The number of shards along each axis, the last one of the mesh
      first. It is scattered first, so that the others send only a part.
    dims: The dimension that each axis divides. Of two axes that divide one, the
      first divides it into larger parts.
    of_slice: The shape of a slice.
  """

  shape: tuple[int, ...]
  num_slices: tuple[int, ...]
  dims: tuple[int, ...]
  of_slice: tuple[int, ...]

  @property
  def padded(self) -> tuple[int, ...]:
    """The shape of all slices side by side."""
    shape = list(self.of_slice)
    for number, dim in zip(self.num_slices, self.dims, strict=True):
      shape[dim] *= number
    return tuple(shape)

  def spec(self, axes: Sequence[Hashable], spec: P = P()) -> P:
    """Returns the spec of slices of a leaf that is itself a part by `spec`."""
    entries = partition_specs.entries(spec)
    entries += [()] * (len(self.shape) - len(entries))
    for axis, dim in zip(axes, self.dims, strict=True):
      entries[dim] += (axis,)
    while not entries[-1]:
      entries.pop()
    return P(*((e[0] if len(e) == 1 else e) or None for e in entries))

  def pad(self, leaf: chex.Array) -> jax.Array:
    """Returns a leaf with zeros at the ends of its dimensions."""
    return padded(leaf, self.padded)

  def crop(self, leaf: jax.Array) -> jax.Array:
    """Returns a leaf without the zeros that `pad` has added."""
    return cropped(leaf, self.shape)

  def own(self, leaf: jax.Array, index: Sequence[chex.Numeric]) -> jax.Array:
    """Returns the slice of a shard, given its index along each axis."""
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
    return lax.reshape(x, (math.prod(self.num_slices), *self.of_slice))

  def join(self, rows: jax.Array) -> jax.Array:
    """Returns the leaf, given its slices, [shards, ...]."""
    x = lax.reshape(rows, (*reversed(self.num_slices), *self.of_slice))
    for i in reversed(range(len(self.dims))):
      at = i + self.dims[i]
      x = jnp.moveaxis(x, 0, at)
      x = x.reshape(*x.shape[:at], -1, *x.shape[at + 2 :])
    return self.crop(x)


def padded(leaf: chex.Array, shape: tuple[int, ...]) -> jax.Array:
  """Returns an array with zeros at the ends of its dimensions."""
  if jnp.shape(leaf) == shape:
    return jnp.asarray(leaf)
  return jnp.pad(
      leaf, [(0, y - x) for x, y in zip(jnp.shape(leaf), shape, strict=True)]
  )


def cropped(leaf: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """Returns an array without the ends of its dimensions."""
  return leaf[tuple(map(slice, shape))] if leaf.shape != shape else leaf
