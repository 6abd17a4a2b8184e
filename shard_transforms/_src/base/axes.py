"""Mapped axes: their names, their sizes, and arrays that vary over them.

This module handles the binding of axes, and most differences between versions
of JAX.
"""

from collections.abc import Hashable
from collections.abc import Sequence
import functools
import importlib
import math
from typing import Any, Literal

import jax
from jax import core
from jax import lax
import jax.numpy as jnp

AxisName = Hashable | Sequence[Hashable]

# 'untracked': types carry no information about the axis, as under `pmap`,
# `vmap` and `shard_map(check_vma=False)`. 'invariant': the value is the same on
# all shards, because it was reduced or replicated.
Variance = Literal['varying', 'invariant', 'unreduced', 'untracked']


def as_axes(axis_name: AxisName) -> tuple[Hashable, ...]:
  """Returns an axis name, or a sequence of axis names, as a tuple.

  Raises:
    TypeError: If a name is not a valid axis name.
    ValueError: If the sequence is empty or contains a name twice.
  """
  if isinstance(axis_name, Sequence) and not isinstance(axis_name, str):
    axes = tuple(axis_name)
  else:
    axes = (axis_name,)
  # JAX's collectives treat integers as positional axes, not as mapped axes.
  if any(
      not isinstance(axis, Hashable) or axis is None or isinstance(axis, int)
      for axis in axes
  ):
    raise TypeError(
        '`axis_name` must be the name of a mapped axis or a sequence of names,'
        f' none of them an integer, got {axis_name!r}.'
    )
  if not axes or len(set(axes)) < len(axes):
    raise ValueError(
        '`axis_name` must name at least one axis and none twice, got'
        f' {axis_name!r}.'
    )
  return axes


def optional_axes(axis_name: AxisName | None) -> tuple[Hashable, ...]:
  """Returns `as_axes(axis_name)`, or an empty tuple for `None`."""
  return () if axis_name is None else as_axes(axis_name)


def check_bound(axes: Sequence[Hashable], caller: str) -> None:
  """Checks that axes are bound, as inside of `jax.shard_map`.

  Raises:
    NameError: If an axis is not bound.
  """
  for axis in axes:
    try:
      lax.axis_size(axis)
    except NameError as error:
      mapped = jax.sharding.get_abstract_mesh().manual_axes
      raise NameError(
          f'`{caller}` needs the axis {axis!r}, which is not mapped here'
          f' (mapped axes of the mesh: {mapped}). Under plain `jax.jit`, wrap'
          ' the transformation in `shard_transforms.on_mesh(tx, mesh)`, compute'
          ' the gradients with `shard_transforms.value_and_grad`, and set a'
          ' mesh that has this axis with `jax.set_mesh(mesh)`, or pass it as'
          ' `mesh`. Inside `jax.shard_map`, `jax.pmap` or `jax.vmap`, map an'
          ' axis with this name.'
      ) from error


def num_shards(axes: Sequence[Hashable], caller: str) -> int:
  """Returns the total number of shards over `axes`, which must be bound."""
  check_bound(axes, caller)
  return math.prod(map(lax.axis_size, axes))


def is_bound(axis: Hashable) -> bool:
  """Whether a mapped axis of this name is bound in the current trace."""
  try:
    lax.axis_size(axis)
  except NameError:
    return False
  return True


def on_mapped_mesh(axes: Sequence[Hashable]) -> bool:
  """Whether `axes` belong to a mesh whose axes are all mapped."""
  mapped = jax.sharding.get_abstract_mesh().manual_axes
  return set(axes).issubset(mapped) and not unmapped_axes(axes)


def unmapped_axes(axes: Sequence[Hashable]) -> tuple[Hashable, ...]:
  """Returns the mesh axes beside `axes` that are left to the compiler."""
  mesh = jax.sharding.get_abstract_mesh()
  is_mapped = len(mesh.manual_axes) == len(mesh.axis_names)
  if is_mapped or not set(axes).issubset(mesh.manual_axes):
    return ()
  # An `Auto` axis of length 1 shards nothing. An `Explicit` axis of length 1
  # still appears in types, and prevents reshapes.
  auto = (axis for axis in mesh.auto_axes if mesh.shape[axis] > 1)
  return (*mesh.explicit_axes, *auto)


def in_mesh_order(axes: Sequence[Hashable]) -> tuple[Hashable, ...]:
  """Returns `axes` in the order in which arrays are sharded over them."""
  names = jax.sharding.get_abstract_mesh().axis_names
  if not set(axes).issubset(names):
    return tuple(axes)
  return tuple(sorted(axes, key=names.index))


def platform() -> str:
  """Returns the platform for which JAX currently traces, such as 'cpu'."""
  # Under `jax.vmap`, the mesh has no devices yet.
  device = jax.sharding.get_abstract_mesh().abstract_device
  return jax.default_backend() if device is None else device.platform


def between_processes() -> bool:
  """Whether CPU devices communicate through gloo, as between processes."""
  # A single process also uses gloo after `jax.distributed.initialize`.
  return jax.distributed.is_initialized() and platform() == 'cpu'


def scatters_are_safe() -> bool:
  """Whether a reduce-scatter is correct even if a shard is late."""
  # Before JAX 0.12, the reduce-scatter of gloo fails after 30 seconds
  # (jax#40831), and sometimes silently returns wrong values on shard 0
  # (jax#40830).
  return jax.__version_info__ >= (0, 12) or not between_processes()


def fuses_up_to_barriers() -> bool:
  """Whether XLA respects a `lax.optimization_barrier` when it fuses."""
  # Before JAX 0.12, XLA for CPUs drops barriers before fusion. The cost of a
  # barrier has not been measured on other platforms.
  return jax.__version_info__ >= (0, 12) and platform() == 'cpu'


def untracked_axes() -> tuple[Hashable, ...]:
  """Returns the mapped mesh axes over which JAX does not track variation."""
  return tuple(
      axis
      for axis in jax.sharding.get_abstract_mesh().manual_axes
      if lax.axis_size(axis) > 1 and not is_tracked(axis)
  )


def varying_axes(leaf: Any) -> frozenset[Hashable]:
  """Returns the axes over which an array varies, according to its type."""
  is_type = isinstance(leaf, core.AbstractValue)
  array_type: Any = leaf if is_type else jax.typeof(leaf)
  return frozenset(array_type.manual_axis_type.varying)


def possibly_varying_axes(leaf: Any) -> tuple[Hashable, ...]:
  """Returns the bound axes over which a leaf may vary."""
  untracked = (x for x in _bound_axes() if not is_tracked(x))
  return *sorted(varying_axes(leaf), key=str), *untracked


def _bound_axes():
  # Private in JAX.
  core_internals = importlib.import_module('jax._src.core')
  return tuple(core_internals.get_axis_env().axis_sizes)


def partitions(spec: jax.sharding.PartitionSpec) -> tuple[Any, ...]:
  """Returns the entries of a spec, which may also have unreduced axes."""
  # JAX does not allow indexing a spec with unreduced axes.
  return tuple(getattr(spec, 'partitions', spec))


def unreduced_axes(leaf: Any) -> frozenset[Hashable]:
  """Returns the axes over which `leaf` still has to be summed."""
  return frozenset(jax.typeof(leaf).manual_axis_type.unreduced)


def is_tracked(axis: Hashable) -> bool:
  """Whether JAX tracks in types which values vary over a bound axis."""
  # The index of a shard always varies, so its type shows whether JAX tracks.
  return axis in varying_axes(lax.axis_index(axis))


def variance_of(leaf: Any, axis: Hashable) -> Variance:
  """Returns whether a leaf varies over a bound axis, according to its type."""
  if axis in varying_axes(leaf):
    return 'varying'
  if axis in unreduced_axes(leaf):
    return 'unreduced'
  return 'invariant' if is_tracked(axis) else 'untracked'


def to_varying(tree: Any, axes: Sequence[Hashable]) -> Any:
  """Marks the leaves of a tree as varying over the tracked axes in `axes`."""
  tracked = functools.cache(is_tracked)

  def mark(leaf):
    axis_type = jax.typeof(leaf).manual_axis_type
    invariant = set(axes) - axis_type.varying - axis_type.unreduced
    # Sorted, because the order of axes is part of the jaxpr.
    missing = tuple(sorted(filter(tracked, invariant), key=axes.index))
    return lax.pcast(leaf, missing, to='varying') if missing else leaf

  return jax.tree.map(mark, tree) if axes else tree


def mark_varying(leaf: Any, axes: Sequence[Hashable]) -> Any:
  """Marks a leaf as varying over `axes`, all of which must be tracked."""
  missing = tuple(axis for axis in axes if axis not in varying_axes(leaf))
  return lax.pcast(leaf, missing, to='varying') if missing else leaf


def zeros(array_type: Any) -> jax.Array:
  """Returns invariant zeros of the shape, dtype and sharding of a type."""
  # On mesh axes of type `Explicit`, both branches of a `cond` must have the
  # same sharding.
  return jnp.zeros(
      array_type.shape, array_type.dtype, out_sharding=array_type.sharding
  )
