"""How a shard keeps all leaves that it owns in rows.

Shards keep arrays of the same shapes, and own leaves of different ones. Leaves
of one shape, of which each owner has as many, stand in a stack. A row a dtype
holds all others, one after the other; the owner with the most elements decides
its length.
"""

from collections.abc import Hashable
from collections.abc import Mapping
from collections.abc import Sequence
from collections.abc import Set
import dataclasses
import math
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from shard_transforms._src.base import axes as axes_lib

# Elements of a tile of TPUs, 8 lines of 128.
TILE = 1024


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Place:
  """Where a leaf is kept: which part of which shard's row.

  It is a tree without leaves, so that the state of a program says where it is.

  Args:
    of: The number of the parameter that it belongs to, in the order of
      `jax.tree.leaves`.
    shard: The first shard that keeps it, the number of its owner.
    num_owners: How many owners there are. Each `num_owners`-th shard from there
      on keeps a copy.
    row: The name of the row: its dtype, for a stack its number, and a mark of
      where all leaves are.
    start: With which element of the row it begins.
    shape: Its shape.

  Examples:
    >>> import jax
    >>> from shard_transforms.owners import Place
    >>> place = Place(7, 3, 8, 'float32_5f9c1a0e', 128, (4, 8))
    >>> print(place.size, jax.tree.leaves(place))
    32 []
  """

  of: int
  shard: int
  num_owners: int
  row: str
  start: int
  shape: tuple[int, ...]

  @property
  def size(self) -> int:
    """The number of its elements."""
    return math.prod(self.shape)

  @property
  def end(self) -> int:
    """Where it ends in the row."""
    return self.start + self.size


def is_place(leaf: Any) -> bool:
  """Whether a leaf is kept elsewhere, for the `is_leaf` of a tree map."""
  return isinstance(leaf, Place)


@dataclasses.dataclass(frozen=True)
class Layout:
  """How owners keep leaves in rows.

  Attributes:
    places: Where each leaf is kept, by its number.
    rows: The types of the rows, by name. That of a stack is [leaves, ...].
    axes: The mapped axes over which rows vary.
    stacks: The names of the rows that are stacks.
  """

  places: Mapping[int, Place]
  rows: Mapping[str, Any]
  axes: tuple[Hashable, ...] = ()
  stacks: frozenset[str] = frozenset()

  def of_owner(self, owner: int) -> list[int]:
    """Returns the numbers of the leaves that an owner keeps, as they stand."""
    own = [i for i, place in self.places.items() if place.shard == owner]
    return sorted(own, key=lambda i: self.places[i].start)

  def stack_of(self, number: int) -> str | None:
    """Returns the name of the stack in which a leaf stands, if it does."""
    place = self.places.get(number)
    return place.row if place and place.row in self.stacks else None

  def pack(
      self,
      owners: Sequence[int],
      leaves: Mapping[int, jax.Array],
      left_out: Set[str] = frozenset(),
  ) -> dict[str, jax.Array]:
    """Returns the rows of some owners, one after the other.

    Args:
      owners: The numbers of the owners.
      leaves: Their leaves, by number.
      left_out: The names of rows that are not wanted.
    """
    rows = {}
    # In one order in all processes, which must run the same program.
    for name in [name for name in self.rows if name not in left_out]:
      (length, *dims), dtype = self.rows[name].shape, self.rows[name].dtype
      parts = []
      for owner in owners:
        own = [i for i in self.of_owner(owner) if self.places[i].row == name]
        lengths = [self.places[i].size // self._line(name) for i in own]
        for i, number in zip(own, lengths, strict=True):
          parts.append(lax.reshape(leaves[i], (number, *dims)))
        if left := length - sum(lengths):
          parts.append(jnp.zeros((left, *dims), dtype))
      rows[name] = jnp.concatenate(parts)
    return axes_lib.to_varying(rows, self.axes)

  def _line(self, row):
    """Returns how many elements of a row are one element of its first axis."""
    return math.prod(self.rows[row].shape[1:]) or 1

  def unpack(
      self, owners: Sequence[int], rows: Mapping[str, jax.Array]
  ) -> dict[int, jax.Array]:
    """Returns the leaves of some owners by number; the reverse of `pack`."""
    found = {}
    for k, owner in enumerate(owners):
      for number in self.of_owner(owner):
        place = self.places[number]
        first, line = k * self.rows[place.row].shape[0], self._line(place.row)
        start, end = (first + x // line for x in (place.start, place.end))
        part = lax.slice_in_dim(rows[place.row], start, end)
        found[number] = lax.reshape(part, place.shape)
    return found
