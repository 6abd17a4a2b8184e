"""Which shard owns which parameter, and what it keeps of the state."""

from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Hashable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import heapq
import math
from typing import Any
import warnings
import zlib

import chex
import jax
from jax import core
import jax.numpy as jnp
import numpy as np

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.owners import leaf_program
from shard_transforms._src.owners import owned_leaves
from shard_transforms._src.reduction import sharded_reduction

# Takes the shapes of the parameters; gives a number for each of them.
Cost = Callable[[Any], chex.ArrayTree]

# Below, a leaf is updated in no time, whoever owns it.
_LARGE = 2**20


@dataclasses.dataclass(frozen=True)
class Owners:
  """Which shard owns which parameter.

  Attributes:
    numbers: The number of each parameter by its name, in the order of their
      tree; -1 for one without an owner, which all shards update.
    shards: The owner of each parameter, or -1.
    num_shards: The number of shards.
    axes: The mapped axes over which what an owner has varies.
  """

  numbers: Mapping[str, int]
  shards: Sequence[int]
  num_shards: int
  axes: tuple[Hashable, ...]

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
          '`updates` and the state of `owned_update` must be of the parameters,'
          f' got {name}, which is none of them.'
      )
    return self.numbers[name]

  def has(self, shard: int, params: Collection[int]) -> bool:
    """Whether a shard is to add up what belongs to some parameters."""
    # By the word of who assumes it, numbers of several are added up by all.
    return len(params) != 1 or self.shards[min(params)] == shard

  def layout(
      self, of: Sequence[int], kinds: Sequence[Any], first: int = 0
  ) -> owned_leaves.Layout:
    """Returns the layout of those arrays that have an owner.

    Args:
      of: The number of the parameter of each array; those with a negative one
        have no owner.
      kinds: The type of each array.
      first: The number of the first array.
    """
    ends, places, rows, names = {}, {}, {}, tuple(self.numbers)
    for i, (param, kind) in enumerate(zip(of, kinds, strict=True), first):
      if param < 0:
        continue
      shard, name = self.shards[param], jnp.dtype(kind.dtype).name
      place = owned_leaves.Place(
          names[param], shard, name, ends.get((shard, name), 0), kind.shape
      )
      ends[shard, name] = place.end
      length, _ = rows.get(name, (0, None))
      rows[name] = max(length, place.end), kind.dtype
      places[i] = place
    # Rows of other owners must not be taken for these, as from a checkpoint.
    mark = zlib.crc32(repr([*places.values()]).encode())
    places = {
        i: dataclasses.replace(place, row=f'{place.row}_{mark:08x}')
        for i, place in places.items()
    }
    rows = {f'{name}_{mark:08x}': rows[name] for name in sorted(rows)}
    return owned_leaves.Layout(places, rows, self.axes)


def assign(
    params: Any,
    updates: Any,
    reduction: sharded_reduction.ShardedReduction,
    cost: Cost | None,
) -> Owners:
  """Returns the owners of parameters.

  The costliest leaf goes first, to the shard with the least cost so far; among
  equals to the one with the fewest elements.

  Args:
    params: The parameters.
    updates: The updates, if any.
    reduction: How these are reduced.
    cost: As for `owned_update`.

  Raises:
    TypeError: If `cost` does not give real numbers.
    ValueError: If it gives another tree, or a number that is negative or not
      finite; or if some leaves differ between shards of another axis, and some
      do not.
  """
  axes, num_shards = _axes((params, updates), reduction), reduction.num_shards()
  found = jax.tree.leaves_with_path(params)
  # Neither scalars, which are sent with others, nor what has no gradient.
  owned = [i for i, (_, x) in enumerate(found) if leaves_lib.is_cut(x, 2)]
  costs = _costs(params, cost)
  sizes = [math.prod(jnp.shape(leaf)) for _, leaf in found]
  loads = [(0.0, 0, shard) for shard in range(num_shards)]
  shards = [-1] * len(found)
  for i in sorted(owned, key=lambda i: (-costs[i], -sizes[i], i)):
    load, size, shards[i] = heapq.heappop(loads)
    heapq.heappush(loads, (load + costs[i], size + sizes[i], shards[i]))
  names = [leaves_lib.name_of(path) for path, _ in found]
  if num_shards > 1 and owned:
    _warn_of_one(names, owned, costs, sizes, num_shards)
  numbers = {x: i if shards[i] >= 0 else -1 for i, x in enumerate(names)}
  return Owners(numbers, shards, num_shards, axes)


def _axes(tree, reduction):
  """Returns the axes over which what an owner has varies.

  Raises:
    ValueError: If some leaves vary over further axes, and some do not.
  """
  axes = reduction.axes
  others = {
      axes_lib.varying_axes(leaf).difference(axes)
      for leaf in jax.tree.leaves(tree)
      if leaves_lib.is_cut(leaf, 2)
  }
  more = sorted(frozenset().union(*others), key=str)
  if len(others) > 1:
    raise ValueError(
        '`params` of `owned_update` must be whole on each shard, got some'
        f' leaves that vary over axes of {more!r}, as slices do, and some that'
        ' do not. Leave slices to `shard_update`, with `optax.partition`.'
    )
  return (*axes, *more)


def read(
    state: Any, owners: Owners, kinds: Any, first: int, caller: str
) -> tuple[list[int], Any, owned_leaves.Layout]:
  """Reads what each leaf of a state belongs to, and how it is kept.

  Args:
    state: The state.
    owners: The owners of the parameters.
    kinds: The types of the state of `inner`.
    first: The number of the first leaf in the layout.
    caller: What errors name.

  Returns:
    What each leaf belongs to, their types as this step is given them, and
    their layout.

  Raises:
    ValueError: If it was made for other parameters or other owners.
  """
  made_for_others = (
      f'State of `{caller}` must be made for these parameters, this number of'
      ' shards and this `cost` by'
      ' `shard_transforms.init_state`, mapped with the specs of'
      ' `shard_transforms.state_specs`, and converted by'
      ' `shard_transforms.resize_state`, or for `jax.pmap` be made by'
      ' `jax.pmap(tx.init, axis_name=...)(replicated_params)`, got '
  )
  if not isinstance(state, owned_leaves.OwnedLeaves):
    raise ValueError(f'{made_for_others}{type(state).__name__}.')
  leaves, treedef = jax.tree.flatten(
      state.leaves, is_leaf=owned_leaves.is_place
  )
  if treedef != jax.tree.structure(kinds):
    raise ValueError(f'{made_for_others}the tree {treedef}.')
  types, of, places = jax.tree.leaves(kinds), [], {}
  given = list(types)
  for i, leaf in enumerate(leaves):
    if owned_leaves.is_place(leaf):
      of.append(owners.number_of(leaf.of))
      places[first + i] = leaf
    elif jnp.shape(leaf) == types[i].shape:
      of.append(leaf_program.SHARED)
      given[i] = jax.typeof(leaf)
    else:
      of.append(leaf_program.MIXED)
  layout = owners.layout(of, types, first)
  if places != layout.places:
    different = [x for i, x in places.items() if x != layout.places.get(i)]
    raise ValueError(f'{made_for_others}{different[0]!r}.')
  for name, (length, _) in layout.rows.items():
    if jnp.shape(state.rows.get(name)) != (1, length):
      raise ValueError(
          f'{made_for_others}the shape {jnp.shape(state.rows.get(name))} of'
          f' the row {name!r}, where a shard has {(1, length)}.'
      )
  return of, treedef.unflatten(given), layout


def _costs(params, cost):
  """Returns the cost of each leaf, as numbers of Python."""
  if cost is None:
    return [_cost_of(jnp.shape(leaf)) for leaf in jax.tree.leaves(params)]
  found = cost(params)
  if jax.tree.structure(found) != jax.tree.structure(params):
    raise ValueError(
        '`cost` of `owned_update` must give a tree like the parameters,'
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
        f'`cost` of `owned_update` must give a real number a leaf, {got}.'
    )
  if not (math.isfinite(value) and value >= 0):
    raise ValueError(
        '`cost` of `owned_update` must give finite numbers of at least 0,'
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
      '`owned_update` waits for the owner of one leaf,'
      f' {names[largest]} of {sizes[largest]:,} elements, which is'
      f' {100 * costs[largest] / total:.0f} % of the work of all'
      f' {num_shards} shards. Treat it element by element where that fits, with'
      ' `optax.partition` around `shard_update` and `owned_update`; or tell its'
      ' `cost`, if it is less.',
      UserWarning,
      stacklevel=2,
  )
