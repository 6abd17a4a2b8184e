"""Stacks of matrices with equal layouts, and the owner of each matrix.

The matrices of one layout form a stack [K, ...]. Its first rows belong to the
first owner, the next rows to the second owner, and so on.
"""

import collections
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import partition_specs as specs_lib
from shard_transforms._src.reduction import sharded_reduction
from shard_transforms.contrib._src.owners import matrix_layout

# The parameter of an array that belongs to no single parameter, or to one that
# all shards update. Such an array is the same on all shards.
SHARED = -1


@dataclasses.dataclass(frozen=True)
class Stack:
  """Matrices of one layout, each with an owner.

  Attributes:
    layout: The layout of the matrices.
    members: For each matrix, the index of its parameter, and the index of its
      layer among those on a shard.
    num_owners: The number of owners.
    by_rows: Whether gradients are reduce-scattered by rows of the stack;
      otherwise, each gradient is reduce-scattered to slices, which are then
      exchanged.
  """

  layout: matrix_layout.MatrixLayout
  members: tuple[tuple[int, int], ...]
  num_owners: int
  by_rows: bool

  @property
  def length(self) -> int:
    """The number of rows per owner; the last rows may be padding."""
    return -(-len(self.members) // self.num_owners)

  @property
  def params(self) -> list[int]:
    """The indices of the parameters in the stack."""
    return list(dict.fromkeys(param for param, _ in self.members))

  def members_of(self, owner: int) -> Sequence[tuple[int, int]]:
    """Returns the members of an owner, in the order of its rows."""
    return self.members[owner * self.length : (owner + 1) * self.length]


@dataclasses.dataclass(frozen=True)
class Stacks:
  """The stacks of a tree of parameters.

  Attributes:
    layouts: The layout of each parameter, in the order of `jax.tree.leaves`.
    names: The name of each parameter.
    stacks: All stacks.
    reduction: The reduction of gradients.
  """

  layouts: Sequence[matrix_layout.ParamLayout]
  names: Sequence[str]
  stacks: Sequence[Stack]
  reduction: sharded_reduction.ShardedReduction

  @functools.cached_property
  def rows(self) -> Mapping[int, list[tuple[int, int]]]:
    """The stack and the row of each layer, for parameters with owners."""
    rows = collections.defaultdict(list)
    for s, stack in enumerate(self.stacks):
      for row, (param, _) in enumerate(stack.members):
        rows[param].append((s, row))
    return dict(rows)

  @functools.cached_property
  def axes(self) -> matrix_layout.Axes:
    """All axes over which gradients are reduced, or parameters sliced."""
    slicing = itertools.chain(*(layout.slicing for layout in self.layouts))
    axes = (*self.reduction.axes, *itertools.chain(*slicing))
    return axes_lib.in_mesh_order(tuple(dict.fromkeys(axes)))

  @property
  def same_axes(self) -> matrix_layout.Axes:
    """The axes over whose shards reduced gradients are the same."""
    return () if self.reduction.groups else self.reduction.axes

  def axes_of(self, param: int) -> matrix_layout.Axes:
    """Returns the axes over which arrays of a parameter differ."""
    layout = self.layouts[param].matrix if param in self.rows else None
    return layout.axes if layout else ()

  def params_of(self, tree: Any) -> list[int]:
    """Returns the index of the parameter at the position of each leaf.

    Raises:
      ValueError: If there is no parameter at the position of a leaf.
    """
    names = [leaves_lib.name_of(x) for x, _ in jax.tree.leaves_with_path(tree)]
    if unknown := [name for name in names if name not in self._indices]:
      raise ValueError(
          f'`updates` of `{self.reduction.caller}` have a leaf at'
          f' {unknown[0]}, where there is no parameter. Pass updates with the'
          ' tree of the parameters.'
      )
    return [self._indices[name] for name in names]

  @functools.cached_property
  def _indices(self):
    return {name: i for i, name in enumerate(self.names)}

  def matrices(
      self, stack: Stack, arrays: Mapping[int, jax.Array]
  ) -> list[jax.Array]:
    """Returns the matrices of a stack, as a shard holds them, in one dtype.

    Args:
      stack: The stack.
      arrays: For each parameter its array; if it is missing, it is zero.

    Raises:
      ValueError: If an array does not have the shape of its parameter.
    """
    shape, matrices = stack.layout.local_shape, []
    for param, layer in stack.members:
      if param not in arrays:
        matrices.append(jnp.zeros(shape, stack.layout.dtype))
        continue
      x, layers = jnp.asarray(arrays[param]), self.layouts[param].local_layers
      expected = (*layers, *shape[len(layers) :])
      if x.shape != expected:
        raise ValueError(
            f'`updates` of `{self.reduction.caller}` must have the shapes of'
            f' the parameters, got {list(x.shape)} instead of'
            f' {list(expected)} at {self.names[param]}.'
        )
      matrices.append(x.reshape(-1, *shape)[layer])
    with jax.numpy_dtype_promotion('standard'):
      dtype = jnp.result_type(*matrices)
    return [leaves_lib.as_dtype(x, dtype) for x in matrices]

  def types(self, tree: Any, all_layers: bool = False) -> Any:
    """Returns the types of unsharded leaves, the same on all shards.

    Args:
      tree: A tree of parameters or gradients, as a shard holds them.
      all_layers: Whether the types have all layers instead of one.
    """
    ignored_axes = () if self.reduction.groups else self.axes
    make = functools.cache(_array_type)
    leaves, treedef = jax.tree.flatten(tree)

    def typed(x, param):
      if leaves_lib.is_float0(x):
        return jax.typeof(x)
      layout = self.layouts[param]
      return make(
          layout.shape if all_layers else layout.inner_shape,
          leaves_lib.dtype_of(x),
          axes_lib.varying_axes(x).difference(ignored_axes),
      )

    return treedef.unflatten(map(typed, leaves, self.params_of(tree)))

  def owner_types(self, types: Any, params: Sequence[int] | None = None) -> Any:
    """Returns the types of leaves, of which each owner has its own.

    Args:
      types: The types of the leaves on all shards.
      params: The parameter of each leaf; by default, the one at its position.
    """
    make = functools.cache(_array_type)

    def typed(kind, param):
      if param not in self.rows:
        return kind
      axes = axes_lib.varying_axes(kind).union(self.axes_of(param))
      return make(kind.shape, kind.dtype, axes)

    leaves, treedef = jax.tree.flatten(types)
    params = self.params_of(types) if params is None else params
    return treedef.unflatten(map(typed, leaves, params))

  def locations(self, param: int) -> list[tuple[int, int, int]]:
    """Returns the locations of the layers of a parameter, in their order.

    A location is the index of the stack, the index of the shard along all axes
    of the stack, and the index of the row on this shard.
    """
    layout, locations = self.layouts[param], []
    sizes = layout.local_layers
    rows = dict(zip(np.ndindex(sizes), self.rows[param], strict=True))
    for layer in np.ndindex(layout.shape[: len(sizes)]):
      parts = list(map(divmod, layer, sizes))
      s, row = rows[tuple(local for _, local in parts)]
      stack = self.stacks[s]
      shard, slot = divmod(row, stack.length)
      if self.reduction.groups is None:
        index = _unravel(shard, stack.layout.owner_axes)
        for axes, (i, _) in zip(layout.slicing, parts, strict=False):
          index |= _unravel(i, axes)
        shard = 0
        for axis in stack.layout.axes:
          shard = shard * lax.axis_size(axis) + int(index[axis])
      locations.append((s, shard, slot))
    return locations


def find(
    params: Any,
    param_specs: specs_lib.SpecTree,
    reduction: sharded_reduction.ShardedReduction,
    whole_dims: int | None,
    are_params: bool = True,
) -> Stacks:
  """Returns the stacks of parameters; see `matrix_layout.param_layouts`."""
  layouts = matrix_layout.param_layouts(
      params, param_specs, reduction, whole_dims, are_params
  )
  members = collections.defaultdict(list)
  for param, layout in enumerate(layouts):
    if layout.matrix is not None:
      layers = range(math.prod(layout.local_layers))
      members[layout.matrix].extend((param, layer) for layer in layers)
  stacks = [
      stack
      for layout, of_layout in members.items()
      for stack in _split(layout, of_layout, layouts, reduction)
  ]
  paths = [path for path, _ in jax.tree.leaves_with_path(params)]
  names = list(map(leaves_lib.name_of, paths))
  return Stacks(layouts, names, stacks, reduction)


def _split(layout, members, layouts, reduction):
  """Yields the stacks of the matrices of one layout."""
  num_reduced = math.prod(map(lax.axis_size, layout.reduced))
  num_owners = num_reduced * math.prod(map(lax.axis_size, layout.sliced))
  if reduction.groups is not None:
    num_reduced = num_owners = reduction.num_shards()
  num_rest = len(members) % num_owners
  alone = members[-1:] if len(members) == 1 or num_rest == 1 else []
  # If all shards update a single matrix, they send less than to an owner.
  if alone and not layouts[alone[0][0]].local_layers:
    members, num_rest = members[:-1], 0
  # Rows of padding are reduce-scattered, too. Slices are not padded until they
  # are exchanged, and then a shard holds 1 / `num_reduced` of the rows.
  in_rows = num_owners <= num_rest + num_owners / num_reduced
  if in_rows or reduction.groups is not None:
    num_rest = 0
  num_full = len(members) - num_rest
  if num_full:
    yield Stack(layout, tuple(members[:num_full]), num_owners, True)
  if num_rest:
    yield Stack(layout, tuple(members[num_full:]), num_owners, False)


def _array_type(shape, dtype, axes):
  """Returns the type of an array that varies over some axes."""
  return jax.eval_shape(
      lambda: axes_lib.to_varying(jnp.zeros(shape, dtype), (*axes,))
  )


def _unravel(flat, axes):
  """Returns the index along each axis."""
  sizes = tuple(map(lax.axis_size, axes))
  return dict(zip(axes, np.unravel_index(flat, sizes), strict=True))
