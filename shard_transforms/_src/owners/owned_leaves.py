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

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import full_rules
from shard_transforms._src.base import states


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Place:
  """Where a leaf is kept: which part of which shard's row.

  It is a tree without leaves, so that the state of a program says where it is.

  Args:
    of: The name of the parameter that it belongs to.
    shard: The shard that keeps it.
    row: The name of the row: its dtype, and a mark of where all leaves are.
    start: Where it begins there.
    shape: Its shape.

  Examples:
    >>> import jax
    >>> from shard_transforms.owners import Place
    >>> place = Place("['w']", 3, 'float32_5f9c1a0e', 128, (4, 8))
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


class OwnedLeaves(NamedTuple):
  """The state of an optimizer whose leaves are each kept by one shard.

  Attributes:
    leaves: The state as `inner` has it. What belongs to one parameter is kept
      by the owner of the parameter: a `Place` says where. All else, such as
      counters, is the same on all shards, and is here.
    rows: For each dtype, the leaves of a shard, one behind the other, [1,
      elements]: a leading axis, of length 1 inside the mapped function and of
      the number of shards outside. Their names depend on where all leaves are,
      so that rows of other owners are not taken for them.

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
    >>> print([row.shape for row in state.rows.values()])
    [(8, 30)]
    >>> place = optax.tree_utils.tree_get(state, 'mu')['b']
    >>> print(place.shard, place.start, place.shape)
    1 0 (5,)
  """

  leaves: Any
  # A leaf in place of the mapping where there are no parameters.
  rows: Any


def is_place(leaf: Any) -> bool:
  """Whether a leaf is kept elsewhere, for the `is_leaf` of a tree map."""
  return isinstance(leaf, Place)


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


def _full(kept, one_shard, name):
  """Returns the state as `inner` has it.

  Raises:
    ValueError: If its rows are of other leaves.
  """
  del one_shard
  if not isinstance(kept, OwnedLeaves):
    return kept
  leaves, treedef = jax.tree.flatten(kept.leaves, is_leaf=is_place)
  places = [leaf for leaf in leaves if is_place(leaf)]
  for row in {place.row for place in places}:
    length = max(place.end for place in places if place.row == row)
    shape = jnp.shape(kept.rows.get(row))
    if shape[1:] != (length,):
      got = f'the shape {shape} of the row {row!r}'
      raise ValueError(
          f'{full_rules.made_for_others(got, name)}, whose owners keep'
          f' {length} elements.'
      )

  def read(leaf):
    if not is_place(leaf):
      return leaf
    row = kept.rows[leaf.row][leaf.shard]
    return row[leaf.start : leaf.end].reshape(leaf.shape)

  return treedef.unflatten(map(read, leaves))


def _place(full, target):
  """Returns the state as owners keep it, at the places of `target`."""
  leaves, treedef = jax.tree.flatten(target.leaves, is_leaf=is_place)
  values = treedef.flatten_up_to(full)
  places = {i: leaf for i, leaf in enumerate(leaves) if is_place(leaf)}
  # Without parameters, there is no mapping of rows.
  if not places:
    return OwnedLeaves(full, jax.tree.map(jnp.zeros_like, target.rows))
  lengths = {
      name: (row.shape[1], row.dtype) for name, row in target.rows.items()
  }
  (num_shards,) = {row.shape[0] for row in target.rows.values()}
  rows = Layout(places, lengths, ()).pack(
      range(num_shards), dict(enumerate(values))
  )
  rows = {name: row.reshape(num_shards, -1) for name, row in rows.items()}
  kept = [places.get(i, x) for i, x in enumerate(values)]
  return OwnedLeaves(treedef.unflatten(kept), rows)


# Full, the leaves of all owners are the state of `inner`.
FULL_RULE = states.Rule(full=_full, place=_place)
