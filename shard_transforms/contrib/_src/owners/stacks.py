"""The stacks of the parameters, and the owner of each matrix."""

import collections
from collections.abc import Hashable
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
from shard_transforms._src.reduction import sharded_reduction
from shard_transforms.contrib._src.owners import matrix_layout
from shard_transforms.contrib._src.owners import stack as stack_lib

# The parameter of an array that belongs to no single parameter, or to one that
# all shards update. Such an array is the same on all shards.
SHARED = -1


@dataclasses.dataclass(frozen=True)
class Stacks:
  """The stacks of a tree of parameters.

  Attributes:
    layouts: The layout of each parameter, in the order of `jax.tree.leaves`.
    stacks: All stacks.
    reduction: The reduction of gradients.
    divides_slices: Whether the gradients of slices are sums of which the means
      are wanted.
  """

  layouts: Sequence[matrix_layout.ParamLayout]
  stacks: Sequence[stack_lib.Stack]
  reduction: sharded_reduction.ShardedReduction
  divides_slices: bool

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

  def summed_axes(self, param: int) -> list[Hashable]:
    """Returns the axes of the reduction that slice a parameter.

    The gradients of its slices are already sums or means over these axes.
    """
    axes = {*itertools.chain(*self.layouts[param].slicing)}
    return [axis for axis in self.reduction.axes if axis in axes]

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
    return {layout.name: i for i, layout in enumerate(self.layouts)}

  def matrices(
      self, stack: stack_lib.Stack, arrays: Mapping[int, jax.Array]
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
            f' {list(expected)} at {self.layouts[param].name}.'
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
    layouts: Sequence[matrix_layout.ParamLayout],
    reduction: sharded_reduction.ShardedReduction,
    divides_slices: bool,
) -> Stacks:
  """Returns the stacks of parameters.

  Args:
    layouts: The layouts of the parameters.
    reduction: The reduction of gradients.
    divides_slices: Whether the gradients of slices are sums of which the means
      are wanted.
  """
  members = collections.defaultdict(list)
  for param, layout in enumerate(layouts):
    if layout.matrix is not None:
      layers = range(math.prod(layout.local_layers))
      members[layout.matrix].extend((param, layer) for layer in layers)
  stacks = [
      stack_lib.Stack(*part, reduction, divides_slices)
      for layout, of_layout in members.items()
      for part in _parts(layout, of_layout, layouts, reduction)
  ]
  return Stacks(layouts, stacks, reduction, divides_slices)


def _parts(layout, members, layouts, reduction):
  """Yields the parts of the matrices of one layout: by rows, or as slices."""
  num_reduced = math.prod(map(lax.axis_size, layout.reduced))
  num_owners = num_reduced * math.prod(map(lax.axis_size, layout.sliced))
  if reduction.groups is not None:
    num_reduced = num_owners = reduction.num_shards()
  num_rest = len(members) % num_owners
  is_alone = len(members) == 1 or num_rest == 1
  # If all shards update a single matrix, they send less than to an owner.
  if is_alone and not layouts[members[-1][0]].has_layers:
    members, num_rest = members[:-1], 0
  # Rows of padding are reduce-scattered, too. Slices are not padded until they
  # are exchanged, and then a shard holds 1 / `num_reduced` of the rows.
  in_rows = num_owners <= num_rest + num_owners / num_reduced
  if in_rows or reduction.groups is not None:
    num_rest = 0
  num_full = len(members) - num_rest
  for part, by_rows in (members[:num_full], True), (members[num_full:], False):
    if part:
      yield layout, tuple(part), num_owners, by_rows


def _array_type(shape, dtype, axes):
  """Returns the type of an array that varies over some axes."""
  return jax.eval_shape(
      lambda: axes_lib.to_varying(jnp.zeros(shape, dtype), (*axes,))
  )


def _unravel(flat, axes):
  """Returns the index along each axis."""
  sizes = tuple(map(lax.axis_size, axes))
  return dict(zip(axes, np.unravel_index(flat, sizes), strict=True))
