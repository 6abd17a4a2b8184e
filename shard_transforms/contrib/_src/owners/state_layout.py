"""Which arrays of a state stand in the stacks of the parameters."""

import collections
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import math
from typing import Any
import zlib

import jax

from shard_transforms.contrib._src.owners import owned_leaves
from shard_transforms.contrib._src.owners import stacks as stacks_lib


def keys_of(
    stacks: stacks_lib.Stacks, of: Sequence[int], kinds: Sequence[Any]
) -> dict[int, str]:
  """Returns the key of each array that belongs to a parameter with owners.

  Arrays of members of a stack that have the same key share one stack.

  Args:
    stacks: The stacks of the parameters.
    of: What each array belongs to.
    kinds: The type of each array.

  Returns:
    For each array, by number: which it is of those of its parameter, and its
    dtype and shape.
  """
  order, keys = collections.Counter(), {}
  for i, (param, kind) in enumerate(zip(of, kinds, strict=True)):
    if param in stacks.places:
      keys[i] = f'{order[param]} {kind.dtype} {kind.shape}'
      order[param] += 1
  return keys


@dataclasses.dataclass(frozen=True)
class StateLayout:
  """How owners keep a state.

  Attributes:
    keys: For each leaf of the state with owners, its key, by number.
    names: For each stack of parameters and key, the name of the stack of state.
    kinds: The type of a row, for each name.
    places: Where each leaf with owners is kept, by number.
  """

  keys: Mapping[int, str]
  names: Mapping[tuple[int, str], str]
  kinds: Mapping[str, Any]
  places: Mapping[int, owned_leaves.Place]


def layout_of(
    stacks: stacks_lib.Stacks,
    of: Sequence[int],
    kinds: Sequence[Any],
    full_kinds: Sequence[Any],
) -> StateLayout:
  """Returns how owners keep a state.

  Args:
    stacks: The stacks of the parameters.
    of: What each leaf of the state belongs to.
    kinds: The type of each leaf, where `inner` is shown one layer of a leaf.
    full_kinds: The same where it is shown all layers.

  Raises:
    ValueError: If a leaf has no part for each layer of its parameter.
  """
  keys = keys_of(stacks, of, kinds)
  found, rows = {}, {}
  for i, key in keys.items():
    for s, _ in stacks.places[of[i]]:
      number = sum(stack == s for stack, _ in found)
      name = found.setdefault((s, key), f'{kinds[i].dtype}_{s}_{number}')
      rows[name] = jax.ShapeDtypeStruct(kinds[i].shape, kinds[i].dtype)
  places = {}
  for i, key in keys.items():
    layers = stacks.shards_of(of[i])
    shape = full_kinds[i].shape
    if len(layers) * math.prod(kinds[i].shape) != math.prod(shape):
      raise ValueError(
          '`inner` of `owned_update` must keep a part of its state for each'
          f' layer with `whole_dims`, got the shape {shape} for'
          f' {len(layers)} layers of {stacks.names[of[i]]}, and'
          f' {kinds[i].shape} for one.'
      )
    at = tuple((found[s, key], shard, row) for s, shard, row in layers)
    places[i] = owned_leaves.Place(of[i], shape, at)
  # Stacks of other owners must not be taken for these, as from a checkpoint.
  reduction = stacks.reduction
  where = reduction.num_shards(), reduction.groups, *places.values()
  mark = f'_{zlib.crc32(repr(where).encode()):08x}'

  def marked(place):
    at = tuple((name + mark, *rest) for name, *rest in place.at)
    return dataclasses.replace(place, at=at)

  return StateLayout(
      keys,
      {at: name + mark for at, name in found.items()},
      {name + mark: kind for name, kind in rows.items()},
      {i: marked(place) for i, place in places.items()},
  )
