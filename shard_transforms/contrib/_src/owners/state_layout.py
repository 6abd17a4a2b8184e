"""The stacks in which owners keep the leaves of a state."""

import collections
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import math
from typing import Any
import zlib

import jax
import jax.numpy as jnp

from shard_transforms._src.base import states
from shard_transforms.contrib._src.owners import owned_leaves
from shard_transforms.contrib._src.owners import stacks as stacks_lib


def keys_of(
    stacks: stacks_lib.Stacks,
    params: Sequence[int],
    types: Sequence[Any],
    prefix: str = '',
) -> dict[int, str]:
  """Returns a key for each array that belongs to a parameter with an owner.

  Arrays of the members of a stack that have the same key can be stacked.

  Args:
    stacks: The stacks of the parameters.
    params: The parameter of each array.
    types: The type of each array.
    prefix: The beginning of all keys.

  Returns:
    By index of the array: its position among the arrays of its parameter, its
    dtype and its shape.
  """
  counts, keys = collections.Counter(), {}
  for i, (param, kind) in enumerate(zip(params, types, strict=True)):
    if param in stacks.rows:
      keys[i] = f'{prefix}{counts[param]} {kind.dtype} {kind.shape}'
      counts[param] += 1
  return keys


@dataclasses.dataclass(frozen=True)
class StateLayout:
  """The stacks in which owners keep the leaves of a state.

  Attributes:
    stacks: The stacks of the parameters.
    types: The types of the state of `inner` for one layer of each parameter.
    params: The parameter of each leaf.
    keys: For each leaf with an owner, its key, by index.
    names: The name of the stack of state, by stack of parameters and key.
    row_types: For each name, the shape and dtype of a row.
    places: For each leaf with an owner, its place, by index.
  """

  stacks: stacks_lib.Stacks
  types: Any
  params: Sequence[int]
  keys: Mapping[int, str]
  names: Mapping[tuple[int, str], str]
  row_types: Mapping[str, Any]
  places: Mapping[int, owned_leaves.Place]

  def stored(
      self,
      rows: Sequence[Mapping[str, jax.Array]],
      shared: Mapping[int, jax.Array],
  ) -> owned_leaves.OwnedLeaves:
    """Returns the state, in the form in which a shard stores it.

    Args:
      rows: For each stack of parameters, the owner's rows of state, by key.
      shared: The leaves of the state without owners, by index.
    """
    leaves, stored = {**shared, **self.places}, {}
    for s, stack in enumerate(self.stacks.stacks):
      of_stack = {
          name: rows[s][key] for (t, key), name in self.names.items() if s == t
      }
      stored |= states.with_shard_axis(of_stack, stack.layout.axes)
    tree = jax.tree.structure(self.types)
    tree = tree.unflatten([leaves[i] for i in range(tree.num_leaves)])
    return owned_leaves.OwnedLeaves(tree, stored)

  def loaded(
      self, state: owned_leaves.OwnedLeaves, first: int
  ) -> tuple[dict[int, jax.Array], list[dict[int, jax.Array]]]:
    """Returns the leaves without owners, and the rows of each stack.

    Args:
      state: The state, in the form in which a shard stores it.
      first: The index of the first leaf in the result.
    """
    leaves = jax.tree.leaves(state.leaves, is_leaf=owned_leaves.is_place)
    leaves = enumerate(leaves)
    shared = {first + i: x for i, x in leaves if i not in self.places}
    reduction, rows = self.stacks.reduction, [{} for _ in self.stacks.stacks]
    stored = states.without_shard_axis(
        state.stacks, reduction.axes, reduction.caller
    )
    for i, key in self.keys.items():
      for s, _ in self.stacks.rows[self.params[i]]:
        rows[s][first + i] = stored[self.names[s, key]]
    return shared, rows


def layout_of(
    stacks: stacks_lib.Stacks,
    params: Sequence[int],
    types: Any,
    full_types: Any,
) -> StateLayout:
  """Returns the layout of a state.

  Args:
    stacks: The stacks of the parameters.
    params: The parameter of each leaf.
    types: The types of the state if `inner` receives one layer of parameters.
    full_types: The types of the state if `inner` receives all layers.

  Raises:
    ValueError: If a leaf does not have a part for each layer of its parameter.
  """
  leaf_types, names, places = jax.tree.leaves(types), {}, {}
  full_shapes = [x.shape for x in jax.tree.leaves(full_types)]
  keys = keys_of(stacks, params, leaf_types)
  for i, key in keys.items():
    for s, _ in stacks.rows[params[i]]:
      number = sum(stack == s for stack, _ in names)
      names.setdefault((s, key), f'{leaf_types[i].dtype}_{s}_{number}')
    locations, shape = stacks.locations(params[i]), leaf_types[i].shape
    if len(locations) * math.prod(shape) != math.prod(full_shapes[i]):
      raise ValueError(
          f'With `whole_dims`, `inner` of `{stacks.reduction.caller}` must have'
          ' separate state for each layer, but its state for'
          f' {stacks.layouts[params[i]].name} has the shape {full_shapes[i]}'
          f' for {len(locations)} layers, and {shape} for one layer. Leave out'
          ' `whole_dims`.'
      )
    at = tuple((names[s, key], shard, row) for s, shard, row in locations)
    places[i] = owned_leaves.Place(params[i], full_shapes[i], at)
  # Stacks for other owners, as in a checkpoint, must have other names.
  reduction = stacks.reduction
  where = reduction.num_shards(), reduction.groups, *places.values()
  mark = f'_{zlib.crc32(repr(where).encode()):08x}'
  for i, place in places.items():
    at = tuple((name + mark, shard, row) for name, shard, row in place.at)
    places[i] = dataclasses.replace(place, at=at)
  names = {key: name + mark for key, name in names.items()}
  row_types = {
      names[s, key]: (leaf_types[i].shape, leaf_types[i].dtype)
      for i, key in keys.items()
      for s, _ in stacks.rows[params[i]]
  }
  return StateLayout(stacks, types, params, keys, names, row_types, places)


def read(
    state: Any,
    stacks: stacks_lib.Stacks,
    types: Any,
    full_types: Any,
    advice: str,
) -> tuple[StateLayout, Any]:
  """Returns the layout of a state, and the types of its leaves.

  Args:
    state: The state.
    stacks: The stacks of the parameters.
    types: The types of the state of `inner` for one layer of each parameter.
    full_types: The types for all layers.
    advice: The end of the error message.

  Raises:
    ValueError: If the state was made for other parameters or other owners.
  """

  def check(got, expected):
    if got != expected:
      raise ValueError(
          f'The state of `{stacks.reduction.caller}` does not fit these'
          ' parameters, this number of shards or these `param_specs`: got'
          f' {got} instead of {expected}. {advice}'
      )

  check(type(state).__name__, owned_leaves.OwnedLeaves.__name__)
  leaves, tree = jax.tree.flatten(state.leaves, is_leaf=owned_leaves.is_place)
  check(tree, jax.tree.structure(types))
  params = [
      x.of if owned_leaves.is_place(x) else stacks_lib.SHARED for x in leaves
  ]
  layout = layout_of(stacks, params, types, full_types)
  leaf_types = jax.tree.leaves(types)
  for i, leaf in enumerate(leaves):
    if owned_leaves.is_place(leaf):
      check(leaf, layout.places.get(i))
    else:
      check(jnp.shape(leaf), leaf_types[i].shape)
      leaf_types[i] = jax.typeof(leaf)
  rows = {name: (x.shape[2:], x.dtype) for name, x in state.stacks.items()}
  check(rows, layout.row_types)
  return layout, tree.unflatten(leaf_types)
