"""Which shards own which parameter, and what they keep of the state."""

import collections
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Hashable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import heapq
import math
from typing import Any, NamedTuple
import zlib

import jax
from jax import lax
import jax.numpy as jnp

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.owners import costs as costs_lib
from shard_transforms._src.owners import dependence
from shard_transforms._src.owners import layout as layout_lib
from shard_transforms._src.owners import owner_reduction

# More owners than this part of the work or memory less would not help.
_TOLERANCE = 1.25


@dataclasses.dataclass(frozen=True)
class Owners:
  """Which owner has which parameter.

  Attributes:
    numbers: The number of each parameter by its name, in the order of their
      tree; -1 for a scalar, or one without a gradient.
    owner_of: The owner of each parameter; -1 for one that all shards update.
    stacks: Matrices of one type, of which all owners have as many, those of an
      owner one after the other.
    reduction: How owners are reached.
    axes: The mapped axes over which what an owner has varies.
  """

  numbers: Mapping[str, int]
  owner_of: Sequence[int]
  stacks: Sequence[Sequence[int]]
  reduction: owner_reduction.OwnerReduction
  axes: tuple[Hashable, ...]

  @property
  def all(self) -> range:
    """The numbers of the owners."""
    return range(self.reduction.num_owners)

  def of(self, tree: Any) -> list[int]:
    """Returns the number of the parameter of each leaf, or -1.

    Raises:
      ValueError: If there is no such parameter.
    """
    names = [leaves_lib.name_of(x) for x, _ in jax.tree.leaves_with_path(tree)]
    for name in names:
      if name not in self.numbers:
        raise ValueError(
            '`updates` of `owned_update` must be of the parameters, got'
            f' {name}, which is none of them.'
        )
    return [self.numbers[name] for name in names]

  def is_owned(self, number: int) -> bool:
    """Whether what belongs to this parameter has an owner."""
    return number >= 0 and self.owner_of[number] >= 0

  def varies(self, number: int) -> bool:
    """Whether shards have what belongs to this parameter, or several, apart."""
    return number == dependence.MIXED or self.is_owned(number)

  def on_own_shard(self, fn: Callable[[int], Any]) -> Any:
    """Returns `fn(owner)` of this shard's owner, which must not send."""

    def branch(owner):
      return lambda: axes_lib.to_varying(fn(owner), self.axes)

    branches = list(map(branch, self.all))
    if len(branches) == 1:
      return branches[0]()
    return lax.switch(self.reduction.owner(), branches)

  def adds(self, owner: int, params: Collection[int]) -> bool:
    """Whether an owner is to add up what belongs to some parameters."""
    # By the word of who assumes it, numbers of none are added up once, and
    # those of several by all.
    if not params:
      return owner == 0
    first = min(params)
    return len(params) > 1 or first < 0 or self.owner_of[first] == owner

  def layout(
      self, of: Sequence[int], kinds: Sequence[Any], first: int = 0
  ) -> layout_lib.Layout:
    """Returns the layout of those arrays that have an owner.

    Args:
      of: What each array belongs to.
      kinds: The type of each array.
      first: The number of the first array.
    """
    arrays = {
        i: (param, kind)
        for i, (param, kind) in enumerate(zip(of, kinds, strict=True), first)
        if self.is_owned(param)
    }
    stack_of = self._stacks_of(arrays)
    members = collections.Counter(stack_of.values())
    ends, places, rows = collections.Counter(), {}, {}
    # In stacks, leaves stand in the order of the parameters.
    for i, (param, kind) in sorted(arrays.items(), key=lambda x: x[1][0]):
      owner, name = self.owner_of[param], stack_of.get(i, kind.dtype.name)
      place = layout_lib.Place(
          *(param, owner, len(self.all)), name, ends[owner, name], kind.shape
      )
      places[i], ends[owner, name] = place, place.end
      length = max(ends[k, name] for k in self.all)
      if length > layout_lib.TILE:
        length += -length % layout_lib.TILE
      is_stack, number = i in stack_of, members[name] // len(self.all)
      shape = (number, *kind.shape) if is_stack else (length,)
      rows[name] = jax.ShapeDtypeStruct(shape, kind.dtype)
    # Rows of other owners must not be taken for these, as from a checkpoint.
    shards = self.reduction.num_shards(), self.reduction.groups
    where = *shards, *places.values()
    mark = f'_{zlib.crc32(repr(where).encode()):08x}'
    return layout_lib.Layout(
        {
            i: dataclasses.replace(x, row=x.row + mark)
            for i, x in places.items()
        },
        {name + mark: row for name, row in rows.items()},
        self.axes,
        frozenset(name + mark for name in stack_of.values()),
    )

  def _stacks_of(self, arrays):
    """Returns the names of the stacks in which arrays stand, by number."""
    number_of = {x: i for i, stack in enumerate(self.stacks) for x in stack}
    # The arrays of a parameter have an order, and those of one type and place
    # in it may stand in a stack.
    order, found = collections.Counter(), collections.defaultdict(list)
    for i, (param, kind) in arrays.items():
      if param in number_of:
        name = f'{kind.dtype.name}_{number_of[param]}_{order[param]}'
        found[name, number_of[param], kind.shape].append(i)
        order[param] += 1
    return {
        i: name
        for (name, number, _), members in found.items()
        if len(members) == len(self.stacks[number])
        for i in members
    }


def assign(
    params: Any,
    updates: Any,
    reduction: owner_reduction.OwnerReduction,
    cost: costs_lib.Cost | None,
) -> Owners:
  """Returns the owners of parameters.

  The costliest leaf goes first, to the owner with the least cost so far; among
  equals to the one with the fewest elements. There are as many owners as lessen
  the work or the memory of a shard.

  Args:
    params: The parameters.
    updates: The updates, if any.
    reduction: How these are reduced.
    cost: As for `owned_update`.

  Raises:
    TypeError: If `cost` does not give real numbers.
    ValueError: If it gives another tree, or a number that is negative or not
      finite; or if leaves differ between shards of another axis, and others do
      not.
  """
  axes = _axes(params, updates, reduction)
  found, num_shards = jax.tree.leaves_with_path(params), reduction.num_shards()
  # Neither scalars, which are sent with others, nor what has no gradient.
  owned = [i for i, (_, x) in enumerate(found) if leaves_lib.is_cut(x, 2)]
  costs = costs_lib.costs_of(params, cost)
  sizes = [math.prod(jnp.shape(leaf)) for _, leaf in found]
  names = [leaves_lib.name_of(path) for path, _ in found]
  numbers = dict.fromkeys(names, -1) | {names[i]: i for i in owned}
  types = [(jnp.shape(x), leaves_lib.dtype_of(x)) for _, x in found]
  owned.sort(key=lambda i: (-costs[i], -sizes[i], str(types[i]), i))
  if num_shards > 1 and owned:
    costs_lib.warn_of_one(owned, names, costs, sizes, num_shards)
  *fewer, most = (_share(owned, costs, sizes, k) for k in reduction.counts())
  best = next((x for x in fewer if x.is_as_good_as(most)), most)
  reduction = dataclasses.replace(reduction, num_owners=best.num_owners)
  owner_of = [best.owner_of.get(i, -1) for i in range(len(found))]
  return Owners(numbers, owner_of, _stacks(best, types), reduction, axes)


class _Shares(NamedTuple):
  """Shares of some number of owners.

  Attributes:
    num_owners: The number.
    owner_of: The owner of each leaf that has one.
    cost: The work of the busiest.
    size: The elements of the one with the most.
  """

  num_owners: int
  owner_of: dict[int, int]
  cost: float
  size: int

  def is_as_good_as(self, other):
    return (
        self.cost <= _TOLERANCE * other.cost
        and self.size <= _TOLERANCE * other.size
    )


def _share(owned, costs, sizes, num_owners):
  """Returns the shares of leaves, the costliest one first."""
  loads, owner_of = [(0.0, 0, owner) for owner in range(num_owners)], {}
  for i in owned:
    cost, size, owner_of[i] = loads[0]
    heapq.heapreplace(loads, (cost + costs[i], size + sizes[i], owner_of[i]))
  all_costs, all_sizes, _ = zip(*loads, strict=True)
  return _Shares(num_owners, owner_of, max(all_costs), max(all_sizes))


def _stacks(shares, types):
  """Returns the matrices of one type, of which all owners have as many."""
  owned, stacks = collections.defaultdict(list), []
  for i, owner in sorted(shares.owner_of.items()):
    if len(types[i][0]) > 1:
      owned[types[i], owner].append(i)
  for kind in dict.fromkeys(kind for kind, _ in [*owned]):
    of_each = [owned[kind, owner] for owner in range(shares.num_owners)]
    length = min(map(len, of_each))
    stacks.append([i for members in of_each for i in members[:length]])
  return [*filter(None, stacks)]


def _axes(params, updates, reduction):
  """Returns the axes over which what an owner has varies.

  Raises:
    ValueError: If leaves vary over further axes, and others do not.
  """

  def further(tree):
    return {
        axes_lib.varying_axes(leaf).difference(reduction.axes)
        for leaf in jax.tree.leaves(tree)
        if leaves_lib.is_cut(leaf, 2)
    }

  others = further(params)
  more = sorted(frozenset().union(*others), key=str)
  if len(others) > 1:
    raise ValueError(
        '`params` of `owned_update` must be whole on each shard, got some'
        f' leaves that vary over axes of {more!r}, as slices do, and some that'
        ' do not. Leave slices to `shard_update`, with `optax.partition`.'
    )
  own = sorted(frozenset().union(*further(updates)).difference(more), key=str)
  if own:
    raise ValueError(
        '`updates` of `owned_update` must be the same over axes over which'
        f' `params` are, got some that vary over {own!r}. Name these axes, too,'
        f' in `axis_name`: {(*own, *reduction.axes)!r}.'
    )
  return (*reduction.axes, *more)
