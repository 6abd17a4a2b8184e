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
    keys: For each leaf with an owner, its key, by index.
    names: The name of the stack of state, by stack of parameters and key.
    types: For each name, the type of a row.
    places: For each leaf with an owner, its place, by index.
    stacks: The stacks of the parameters.
  """

  keys: Mapping[int, str]
  names: Mapping[tuple[int, str], str]
  types: Mapping[str, Any]
  places: Mapping[int, owned_leaves.Place]
  stacks: stacks_lib.Stacks

  def stored(
      self,
      tree: Any,
      rows: Sequence[Mapping[str, jax.Array]],
      shared: Mapping[int, jax.Array],
  ) -> owned_leaves.OwnedLeaves:
    """Returns the state, in the form in which a shard stores it.

    Args:
      tree: The structure of the state of `inner`.
      rows: For each stack of parameters, the owner's rows of state, by key.
      shared: The leaves of the state without owners, by index.
    """
    leaves, stored = {**shared, **self.places}, {}
    for s, stack in enumerate(self.stacks.stacks):
      of_stack = {
          name: rows[s][key] for (t, key), name in self.names.items() if s == t
      }
      stored |= states.with_shard_axis(of_stack, stack.layout.axes)
    leaves = [leaves[i] for i in range(tree.num_leaves)]
    return owned_leaves.OwnedLeaves(tree.unflatten(leaves), stored)

  def loaded(
      self, state: owned_leaves.OwnedLeaves
  ) -> tuple[dict[int, jax.Array], list[dict[int, jax.Array]]]:
    """Returns the leaves without owners, and the rows of each stack."""
    leaves = jax.tree.leaves(state.leaves, is_leaf=owned_leaves.is_place)
    shared = {i: x for i, x in enumerate(leaves) if i not in self.places}
    reduction, rows = self.stacks.reduction, [{} for _ in self.stacks.stacks]
    stored = states.without_shard_axis(
        state.stacks, reduction.axes, reduction.caller
    )
    for i, place in self.places.items():
      for s, _ in self.stacks.rows[place.of]:
        rows[s][i] = stored[self.names[s, self.keys[i]]]
    return shared, rows


def layout_of(
    stacks: stacks_lib.Stacks,
    params: Sequence[int],
    types: Sequence[Any],
    full_types: Sequence[Any],
    mark: str = '',
) -> StateLayout:
  """Returns the layout of a state.

  Args:
    stacks: The stacks of the parameters.
    params: The parameter of each leaf.
    types: The type of each leaf if `inner` receives one layer of parameters.
    full_types: The type of each leaf if `inner` receives all layers.
    mark: The end of the names of stacks; by default, a digest of all places.

  Raises:
    ValueError: If a leaf does not have a part for each layer of its parameter.
  """
  keys = keys_of(stacks, params, types)
  names, row_types = {}, {}
  for i, key in keys.items():
    for s, _ in stacks.rows[params[i]]:
      number = sum(stack == s for stack, _ in names)
      name = f'{types[i].dtype}_{s}_{number}{mark}'
      row_types[names.setdefault((s, key), name)] = types[i]
  places = {}
  for i in keys:
    locations, shape = stacks.locations(params[i]), full_types[i].shape
    if len(locations) * math.prod(types[i].shape) != math.prod(shape):
      raise ValueError(
          f'`inner` of `{stacks.reduction.caller}` must keep a part of its'
          ' state for each layer with `whole_dims`, but its state of'
          f' {stacks.names[params[i]]} has the shape {shape} for'
          f' {len(locations)} layers, and {types[i].shape} for one.'
      )
    at = tuple((names[s, keys[i]], shard, row) for s, shard, row in locations)
    places[i] = owned_leaves.Place(params[i], shape, at)
  if mark:
    return StateLayout(keys, names, row_types, places, stacks)
  # Stacks for other owners, as in a checkpoint, must have other names.
  reduction = stacks.reduction
  where = reduction.num_shards(), reduction.groups, *places.values()
  mark = f'_{zlib.crc32(repr(where).encode()):08x}'
  return layout_of(stacks, params, types, full_types, mark)


def read(
    state: Any, stacks: stacks_lib.Stacks, types: Any, full_types: Any
) -> tuple[list[int], Any, StateLayout]:
  """Returns the parameter of each leaf of a state, its types and its layout.

  Args:
    state: The state.
    stacks: The stacks of the parameters.
    types: The types of the state of `inner` for one layer of each parameter.
    full_types: The types for all layers.

  Raises:
    ValueError: If the state was made for other parameters or other owners.
  """
  prefix = (
      f'State of `{stacks.reduction.caller}` must be made for these parameters,'
      ' this number of shards and these `param_specs`, by'
      ' `shard_transforms.init_state` and `shard_transforms.state_specs`, or'
      ' for `jax.pmap` by'
      ' `jax.pmap(tx.init, axis_name=...)(replicated_params)`, got'
  )
  if not isinstance(state, owned_leaves.OwnedLeaves):
    raise ValueError(f'{prefix} {type(state).__name__}.')
  leaves, tree = jax.tree.flatten(state.leaves, is_leaf=owned_leaves.is_place)
  if tree != jax.tree.structure(types):
    raise ValueError(f'{prefix} the tree {tree}.')
  places = {i: x for i, x in enumerate(leaves) if owned_leaves.is_place(x)}
  params = [
      places[i].of if i in places else stacks_lib.SHARED
      for i in range(len(leaves))
  ]
  leaf_types = jax.tree.leaves(types)
  layout = layout_of(stacks, params, leaf_types, jax.tree.leaves(full_types))
  actual_types = list(leaf_types)
  for i, leaf in enumerate(leaves):
    if i not in places:
      actual_types[i] = jax.typeof(leaf)
    if i in places and leaf != layout.places.get(i):
      raise ValueError(f'{prefix} {leaf!r}.')
    if i not in places and jnp.shape(leaf) != leaf_types[i].shape:
      raise ValueError(
          f'{prefix} a leaf of the shape {jnp.shape(leaf)} instead of'
          f' {leaf_types[i].shape}.'
      )
  rows = jax.tree.map(lambda x: (jnp.shape(x)[2:], x.dtype), state.stacks)
  expected = {name: (x.shape, x.dtype) for name, x in layout.types.items()}
  if rows != expected:
    raise ValueError(f'{prefix} the stacks {rows} instead of {expected}.')
  return params, tree.unflatten(actual_types), layout
