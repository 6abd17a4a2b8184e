"""How a leaf is divided among shards: along a dimension for each mapped axis.

Where dimensions are too short, a row of all elements is divided. The slices of
all shards, side by side, are the leaf: state that is sliced so has the shapes
of the replicated state, and a `PartitionSpec`. Slices along a dimension are
what XLA for TPUs reduces and scatters; of flat ones it sums the whole.
"""

from collections.abc import Hashable
from collections.abc import Iterable
from collections.abc import Sequence
import dataclasses
import math

import chex
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from shard_transforms._src.base import partition_specs

# Of the elements of a leaf that is divided along its dimensions.
_MOST_PADDING = 1 / 16
# That a state without a mesh may have been made for.
_MOST_SHARDS, _MOST_AXES = 2**16, 3


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
  """Returns how a leaf is divided, given the number of shards of each axis.

  Where its dimensions are too short, all its elements are divided as one row.
  """
  division = along_dimensions(shape, num_slices)
  if is_tight(division.padded, shape) or len(shape) == 1:
    return division
  row = _row(shape)
  of_slice = (*row[:-1], -(-row[-1] // math.prod(num_slices)))
  dims = (len(shape) - 1,) * len(division.dims)
  return dataclasses.replace(division, laid=row, dims=dims, of_slice=of_slice)


def along_dimensions(
    shape: tuple[int, ...], num_slices: Sequence[int]
) -> 'Division':
  """Returns how a leaf is divided along its dimensions, however padded."""
  left, dims = list(shape), []
  for number in num_slices:
    is_used = [x < y for x, y in zip(left, shape, strict=True)]
    dim = dimension(left, number, is_used)
    left[dim] = -(-left[dim] // number)
    dims.append(dim)
  return Division(shape, shape, tuple(num_slices), tuple(dims), tuple(left))


def is_tight(padded_shape: tuple[int, ...], shape: tuple[int, ...]) -> bool:
  """Whether there is little padding."""
  added = math.prod(padded_shape) - math.prod(shape)
  return added <= _MOST_PADDING * math.prod(shape)


@dataclasses.dataclass(frozen=True)
class Division:
  """How a leaf is divided among shards.

  Attributes:
    shape: Its shape.
    laid: The shape that is divided: its own, or that of one row of its
      elements, [1, ..., 1, elements].
    num_slices: The number of shards along each axis, the last one of the mesh
      first. It is scattered first, so that the others send only a part.
    dims: The dimension that each axis divides. Of two axes that divide one, the
      first divides it into larger parts.
    of_slice: The shape of a slice.
  """

  shape: tuple[int, ...]
  laid: tuple[int, ...]
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
    if self.laid != self.shape:
      entries = [()] * (len(entries) - 1) + [sum(entries, ())]
    for axis, dim in zip(axes, self.dims, strict=True):
      entries[dim] += (axis,)
    while not entries[-1]:
      entries.pop()
    return P(*((e[0] if len(e) == 1 else e) or None for e in entries))

  def pad(self, leaf: chex.Array) -> jax.Array:
    """Returns a leaf, laid as it is divided, with zeros at its ends."""
    return padded(leaf, self.padded)

  def crop(self, leaf: jax.Array) -> jax.Array:
    """Returns the leaf that `pad` has laid and padded."""
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
  """Returns an array in the shape of all its slices, with zeros at its ends."""
  leaf = jnp.asarray(leaf)
  if any(x > y for x, y in zip(leaf.shape, shape, strict=True)):
    leaf = leaf.reshape(_row(leaf.shape))
  if leaf.shape == shape:
    return leaf
  return jnp.pad(
      leaf, [(0, y - x) for x, y in zip(leaf.shape, shape, strict=True)]
  )


def cropped(leaf: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """Returns the array of this shape that `padded` has padded."""
  if leaf.shape == shape:
    return leaf
  is_row = any(x < y for x, y in zip(leaf.shape, shape, strict=True))
  kept = leaf[tuple(map(slice, _row(shape) if is_row else shape))]
  return kept.reshape(shape)


def is_padded(found: tuple[int, ...], shape: tuple[int, ...]) -> bool:
  """Whether a shape may be that of a leaf of another, divided and padded."""
  if len(found) != len(shape):
    return False
  is_long = [
      all(x >= y for x, y in zip(found, like, strict=True))
      for like in (shape, _row(shape))
  ]
  # Of a row, the padding depends on the number of shards alone.
  is_row = is_long[1] and found[:-1] == _row(shape)[:-1]
  return is_row or (is_long[0] and is_tight(found, shape))


def is_of_one_mesh(
    pairs: Iterable[tuple[tuple[int, ...], tuple[int, ...]]],
) -> bool:
  """Whether some numbers of shards give all these shapes of padded leaves.

  Args:
    pairs: For each leaf, the shape that is found, and its own.
  """
  padded = {(found, shape) for found, shape in pairs if found != shape}
  # Without any, all shapes are those of one shard.
  total = math.gcd(*(math.prod(found) for found, _ in padded)) or 1
  most = min(total, _MOST_SHARDS)
  numbers = [n for n in range(1, most + 1) if total % n == 0]
  return any(
      all(divide(shape, split).padded == found for found, shape in padded)
      for split in _splits(total, numbers, _MOST_AXES)
  )


def _splits(total, numbers, num_axes):
  """Yields numbers of shards along axes whose product divides the total."""
  if not num_axes:
    yield ()
    return
  for number in numbers:
    if total % number == 0:
      for others in _splits(total // number, numbers, num_axes - 1):
        yield number, *others


def _row(shape):
  """Returns the shape of one row of the elements of an array."""
  return (*(1,) * (len(shape) - 1), math.prod(shape))
