"""How a shard keeps all leaves that it owns in rows.

Shards keep arrays of the same shapes, and own leaves of different ones. A row a
dtype therefore holds all leaves of a shard, one behind the other; the shard
with the most elements decides its length.
"""

from collections.abc import Hashable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import math
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from shard_transforms._src.base import axes as axes_lib


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Place:
  """Where a leaf is kept: which part of which shard's row.

  It is a tree without leaves, so that the state of a program says where it is.

  Args:
    of: The name of the parameter that it belongs to.
    shard: The shard that keeps it.
    row: The name of the row, of its dtype.
    start: Where it begins there.
    shape: Its shape.

  Examples:
    >>> import jax
    >>> from shard_transforms.owners import Place
    >>> place = Place("['w']", 3, 'float32', 128, (4, 8))
    >>> print(place.size, jax.tree.leaves(place))
    32 []
  """

  of: str
  shard: int
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

  def is_of(self, other: 'Place') -> bool:
    """Whether two places, in two layouts, are of the same leaf."""
    return (self.of, self.row, self.shape) == (other.of, other.row, other.shape)


class OwnedLeaves(NamedTuple):
  """The state of an optimizer whose leaves are each kept by one shard.

  Attributes:
    leaves: The state as `inner` has it. What belongs to one parameter is kept
      by the owner of the parameter: a `Place` says where. All else, such as
      counters, is the same on all shards, and is here.
    rows: For each dtype, the leaves of a shard, one behind the other, [1,
      elements]: a leading axis, of length 1 inside the mapped function and of
      the number of shards outside.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import shard_transforms
    >>> from shard_transforms import owners
    >>> mesh = jax.make_mesh((8,), ('data',))
    >>> tx = owners.owned_update(optax.lamb(0.1), 'data')
    >>> params = {'w': jnp.ones((3, 5)), 'b': jnp.ones(5)}
    >>> state = shard_transforms.init_state(tx, params, mesh).inner_state
    >>> print(state.rows['float32'].shape)
    (8, 30)
    >>> print(optax.tree_utils.tree_get(state, 'mu')['b'])
    Place(of="['b']", shard=1, row='float32', start=0, shape=(5,))
    >>> print(optax.tree_utils.tree_get(state.whole(), 'mu')['b'].shape)
    (5,)
  """

  leaves: Any
  # A leaf in place of the mapping where there are no parameters.
  rows: Any

  def whole(self) -> Any:
    """Returns the state as `inner` has it, with arrays of NumPy.

    The arrays must be on this process. It is the same for any number of shards,
    as is its `monitoring.digest`.
    """
    rows = jax.tree.map(_as_rows, self.rows)

    def read(leaf):
      if not isinstance(leaf, Place):
        return np.asarray(leaf)
      row = rows[leaf.row][leaf.shard]
      return row[leaf.start : leaf.end].reshape(leaf.shape)

    return jax.tree.map(read, self.leaves, is_leaf=is_place)

  def laid_out_like(self, other: 'OwnedLeaves') -> 'OwnedLeaves':
    """Returns this state, kept at the places of another, in arrays of NumPy.

    Args:
      other: A state for any number of shards, or the shapes of one.

    Returns:
      A state of the shapes of the other; itself if that is for other
      parameters.
    """
    kept, found = map(_by_position, (self.leaves, other.leaves))
    if kept.keys() != found.keys() or any(
        not found[i].is_of(kept[i]) for i in kept
    ):
      return self
    rows = {
        name: np.zeros(row.shape, row.dtype) for name, row in other.rows.items()
    }
    flat = jax.tree.map(_as_rows, rows)
    whole = jax.tree.leaves(self.whole())
    for i, place in found.items():
      part = slice(place.start, place.end)
      flat[place.row][place.shard, part] = whole[i].ravel()
    leaves, treedef = jax.tree.flatten(self.leaves, is_leaf=is_place)
    leaves = [found.get(i, leaf) for i, leaf in enumerate(leaves)]
    return OwnedLeaves(treedef.unflatten(leaves), rows)


def is_place(leaf: Any) -> bool:
  """Whether a leaf is kept elsewhere, for the `is_leaf` of a tree map."""
  return isinstance(leaf, Place)


def _by_position(tree):
  """Returns the places in a tree, by their number among the leaves."""
  leaves = jax.tree.leaves(tree, is_leaf=is_place)
  return {i: leaf for i, leaf in enumerate(leaves) if is_place(leaf)}


def _as_rows(x):
  # Under `jax.vmap` over an axis of the mesh, [shards, 1, elements].
  x = np.asarray(x)
  return x.reshape(len(x), -1)


@dataclasses.dataclass(frozen=True)
class Layout:
  """How shards keep leaves in rows.

  Attributes:
    places: Where each leaf is kept, by its number.
    rows: The length and the dtype of each row, by its name.
    axes: The mapped axes over which rows vary.
  """

  places: Mapping[int, Place]
  rows: Mapping[str, tuple[int, Any]]
  axes: tuple[Hashable, ...]

  def of_shard(self, shard: int) -> list[int]:
    """Returns the numbers of the leaves that a shard keeps."""
    return [i for i, place in self.places.items() if place.shard == shard]

  def pack(
      self, shards: Sequence[int], leaves: Mapping[int, jax.Array]
  ) -> dict[str, jax.Array]:
    """Returns the rows of some shards, one behind the other.

    Args:
      shards: The numbers of the shards.
      leaves: Their leaves, by number.
    """
    parts = {name: [] for name in self.rows}
    for shard in shards:
      left = {name: length for name, (length, _) in self.rows.items()}
      for number in self.of_shard(shard):
        name, size = self.places[number].row, self.places[number].size
        parts[name].append(lax.reshape(leaves[number], (size,)))
        left[name] -= size
      for name, padding in left.items():
        if padding:
          parts[name].append(jnp.zeros(padding, self.rows[name][1]))
    rows = {name: jnp.concatenate(found) for name, found in parts.items()}
    return axes_lib.to_varying(rows, self.axes)

  def unpack(
      self, shards: Sequence[int], rows: Mapping[str, jax.Array]
  ) -> dict[int, jax.Array]:
    """Returns the leaves of some shards by number; the reverse of `pack`."""
    found = {}
    for k, shard in enumerate(shards):
      for number in self.of_shard(shard):
        place = self.places[number]
        start = k * self.rows[place.row][0] + place.start
        flat = lax.slice(rows[place.row], (start,), (start + place.size,))
        found[number] = lax.reshape(flat, place.shape)
    return found
