"""Which shard owns which leaf, and how a shard keeps all of its leaves in rows.

Shards keep arrays of the same shapes, and own leaves of different ones. A row a
dtype therefore holds all leaves of a shard, one behind the other; the shard
with the most elements decides its length.
"""

from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Hashable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import heapq
import math
from typing import Any, NamedTuple
import warnings

import chex
import jax
from jax import core
from jax import lax
import jax.numpy as jnp
import numpy as np

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib

# Takes the shapes of the parameters; gives a number for each of them.
Cost = Callable[[Any], chex.ArrayTree]

# Below, a leaf is updated in no time, whoever owns it.
_LARGE = 2**20


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
    >>> from shard_transforms import Place
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
  """The state of an optimizer each of whose leaves one shard keeps.

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
    >>> mesh = jax.make_mesh((8,), ('data',))
    >>> tx = shard_transforms.shard_update(
    ...     optax.lamb(0.1), 'data', slices='leaves')
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

  @classmethod
  def of(
      cls, leaves: Mapping[int, 'Owned'], axes: tuple[Hashable, ...]
  ) -> 'Layout':
    """Returns the layout of leaves, given by number."""
    ends = {}
    found, rows = {}, {}
    for number, leaf in leaves.items():
      name = jnp.dtype(leaf.dtype).name
      start = ends.get((leaf.shard, name), 0)
      place = Place(leaf.of, leaf.shard, name, start, leaf.shape)
      ends[leaf.shard, name] = place.end
      length, _ = rows.get(name, (0, None))
      rows[name] = max(length, place.end), leaf.dtype
      found[number] = place
    return cls(found, dict(sorted(rows.items())), axes)

  def of_shard(self, shard: int) -> list[int]:
    """Returns the numbers of the leaves that a shard keeps."""
    return [i for i, place in self.places.items() if place.shard == shard]

  def pack(
      self, shard: int, leaves: Mapping[int, jax.Array]
  ) -> dict[str, jax.Array]:
    """Returns the rows of a shard, given its leaves by number."""
    return self._join([shard], leaves)

  def pack_all(self, leaves: Mapping[int, jax.Array], num_shards: int) -> Any:
    """Returns the rows of all shards, [number of shards, elements]."""
    rows = self._join(range(num_shards), leaves)
    return {name: row.reshape(num_shards, -1) for name, row in rows.items()}

  def _join(self, shards, leaves):
    """Returns the rows of some shards, one behind the other."""
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
      self, shard: int, rows: Mapping[str, jax.Array]
  ) -> dict[int, jax.Array]:
    """Returns the leaves of a shard by number, given its rows."""
    return {i: _part(rows, self.places[i]) for i in self.of_shard(shard)}

  def unpack_all(self, rows: Mapping[str, jax.Array]) -> dict[int, jax.Array]:
    """Returns all leaves by number, given the rows of all shards."""
    flat = {name: row.reshape(-1) for name, row in rows.items()}
    found = {}
    for i, place in self.places.items():
      start = place.shard * self.rows[place.row][0] + place.start
      found[i] = _part(flat, dataclasses.replace(place, start=start))
    return found


class Owned(NamedTuple):
  """A leaf that its owner keeps.

  Attributes:
    of: The name of its parameter.
    shard: Its owner.
    shape: Its shape.
    dtype: Its dtype.
  """

  of: str
  shard: int
  shape: tuple[int, ...]
  dtype: Any


def _part(rows, place):
  flat = lax.slice(rows[place.row], (place.start,), (place.end,))
  return lax.reshape(flat, place.shape)


@dataclasses.dataclass(frozen=True)
class Owners:
  """Which shard owns which parameter.

  Attributes:
    names: The names of the parameters, in the order of their tree.
    shards: The owner of each, or -1 for one that all shards update.
    num_shards: The number of shards.
    axes: The mapped axes over which what an owner has varies.
  """

  names: tuple[str, ...]
  shards: tuple[int, ...]
  num_shards: int
  axes: tuple[Hashable, ...]

  @classmethod
  def of_params(
      cls,
      params: Any,
      num_shards: int,
      axes: tuple[Hashable, ...],
      cost: Cost | None,
  ) -> 'Owners':
    """Returns the owners of parameters.

    The costliest leaf goes first, to the shard with the least cost so far;
    among equals to the one with the fewest elements.

    Args:
      params: The parameters, or their types.
      num_shards: As the attribute.
      axes: As the attribute.
      cost: As for `shard_update`.

    Raises:
      TypeError: If `cost` does not give real numbers.
      ValueError: If it gives another tree, or a number that is negative or not
        finite.
    """
    found = jax.tree.leaves_with_path(params)
    # Neither scalars, which are sent with others, nor what has no gradient.
    owned = [i for i, (_, x) in enumerate(found) if leaves_lib.is_cut(x, 2)]
    costs = _costs(params, cost)
    sizes = [math.prod(jnp.shape(leaf)) for _, leaf in found]
    loads = [(0.0, 0, shard) for shard in range(num_shards)]
    shards = [-1] * len(found)
    for i in sorted(owned, key=lambda i: (-costs[i], -sizes[i], i)):
      load, size, shard = heapq.heappop(loads)
      shards[i] = shard
      heapq.heappush(loads, (load + costs[i], size + sizes[i], shard))
    names = tuple(leaves_lib.name_of(path) for path, _ in found)
    if num_shards > 1 and owned:
      _warn_of_one(names, owned, costs, sizes, num_shards)
    return cls(names, tuple(shards), num_shards, axes)

  def of(self, tree: Any) -> list[int]:
    """Returns the number of the parameter of each leaf; -1 without an owner.

    Raises:
      ValueError: If there is no such parameter.
    """
    return [
        self.number_of(leaves_lib.name_of(path))
        for path, _ in jax.tree.leaves_with_path(tree)
    ]

  def number_of(self, name: str) -> int:
    """Returns the number of a parameter; -1 if it has no owner.

    Raises:
      ValueError: If there is no such parameter.
    """
    if name not in self.numbers:
      raise ValueError(
          '`updates` and the state of `shard_update` must be of the parameters,'
          f' got {name}, which is none of them.'
      )
    number = self.numbers[name]
    return -1 if self.shards[number] < 0 else number

  def has(self, shard: int, params: Collection[int]) -> bool:
    """Whether a shard is to add up what belongs to some parameters."""
    # By the word of who assumes it, numbers of several are added up by all.
    return len(params) != 1 or self.shards[min(params)] == shard

  @functools.cached_property
  def numbers(self) -> Mapping[str, int]:
    """The number of each parameter, by its name."""
    return {name: i for i, name in enumerate(self.names)}

  def layout(self, of: Mapping[int, int], kinds: Sequence[Any]) -> Layout:
    """Returns the layout of those arrays that have an owner.

    Args:
      of: The number of the parameter of each array, by the number of the array;
        those with a negative one have no owner.
      kinds: The type of each array.
    """
    return Layout.of(
        {
            i: Owned(
                self.names[param],
                self.shards[param],
                kinds[i].shape,
                kinds[i].dtype,
            )
            for i, param in of.items()
            if param >= 0
        },
        self.axes,
    )


def _costs(params, cost):
  """Returns the cost of each leaf, as numbers of Python."""
  if cost is None:
    return [_cost_of(jnp.shape(leaf)) for leaf in jax.tree.leaves(params)]
  found = cost(params)
  if jax.tree.structure(found) != jax.tree.structure(params):
    raise ValueError(
        '`cost` of `shard_update` must give a tree like the parameters,'
        f' {jax.tree.structure(params)}, got {jax.tree.structure(found)}.'
    )
  return [
      _as_cost(path, value) for path, value in jax.tree.leaves_with_path(found)
  ]


def _as_cost(path, value):
  dtype = leaves_lib.dtype_of_number(value)
  got = f'got {value!r} at {leaves_lib.name_of(path)}'
  is_real = dtype is not None and dtype.kind in 'iuf' and not np.ndim(value)
  if not is_real or isinstance(value, core.Tracer):
    raise TypeError(
        f'`cost` of `shard_update` must give a real number a leaf, {got}.'
    )
  if not (math.isfinite(value) and value >= 0):
    raise ValueError(
        '`cost` of `shard_update` must give finite numbers of at least 0,'
        f' {got}.'
    )
  return float(value)


def _cost_of(shape):
  # Of products of a matrix with its own kind, such as Newton-Schulz.
  return float(math.prod(shape) * (min(shape[-2:]) if len(shape) > 1 else 1))


def _warn_of_one(names, owned, costs, sizes, num_shards):
  """Warns if one leaf decides how long all shards take."""
  largest = max(owned, key=costs.__getitem__)
  total = sum(costs[i] for i in owned)
  if sizes[largest] < _LARGE or costs[largest] <= 2 * total / num_shards:
    return
  warnings.warn(
      "`shard_update(..., slices='leaves')` waits for the owner of one leaf,"
      f' {names[largest]} of {sizes[largest]:,} elements, which is'
      f' {100 * costs[largest] / total:.0f} % of the work of all'
      f' {num_shards} shards. Treat it element by element where that fits, with'
      ' `optax.partition` around two `shard_update`s; or tell its `cost`, if it'
      ' is less.',
      UserWarning,
      stacklevel=2,
  )
