"""Shards of mesh axes of type `Explicit` that nothing maps, as their types say.

A gradient of each shard is a global array that is typed `unreduced`, in the
shape of its parameter. JAX adds such arrays up without communication.
"""

from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Sequence
import math
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import partition_specs


def are_here(axes: Sequence[Hashable]) -> bool:
  """Whether all of `axes` are of type `Explicit`, and none is mapped."""
  types = axes_lib.types_on(jax.sharding.get_abstract_mesh())
  return all(
      types.get(axis) == AxisType.Explicit and not axes_lib.is_bound(axis)
      for axis in axes
  )


def check_mesh(caller: str) -> None:
  """Checks that all axes of the mesh in use are of type `Explicit`.

  Raises:
    ValueError: If one is of another type, or no mesh is in use.
  """
  types = axes_lib.types_on(jax.sharding.get_abstract_mesh())
  if set(types.values()) != {AxisType.Explicit}:
    raise ValueError(
        f'`{caller}` must be called with a mesh in use whose axes are all of'
        f' type `Explicit`, or inside `jax.shard_map`, got {types}. Call it'
        ' inside `with jax.set_mesh(mesh)`; on axes of type `Auto`, take'
        ' gradients by `shard_transforms.accumulated_value_and_grad`.'
    )


def check_whole(tree: Any, axes: Sequence[Hashable], caller: str) -> None:
  """Checks that no parameter is sharded over `axes`.

  Raises:
    ValueError: If one is.
  """
  for path, leaf in jax.tree.leaves_with_path(tree):
    spec = spec_of(leaf)
    if partition_specs.axes_of(spec).intersection(axes):
      raise ValueError(
          f'`params` of `{caller}` must not be sharded over {list(axes)!r}, got'
          f' {leaves_lib.name_of(path)} with {spec!r}. For such parameters'
          ' (FSDP), take `shard_transforms.accumulated_value_and_grad`: it'
          ' gathers them, and reduces their gradients, once a window.'
      )


def spec_of(leaf: Any) -> P:
  """Returns how the type of a leaf says that it is sharded."""
  return P(*jax.typeof(leaf).sharding.spec.partitions)


def pending_axes(tree: Any, caller: str) -> tuple[Hashable, ...]:
  """Returns the axes over which all leaves are still to be summed, in order.

  Raises:
    ValueError: If these are not the same for all leaves, or one is float0.
  """
  found = [
      (path, leaf, axes_lib.pending_axes(leaf))
      for path, leaf in jax.tree.leaves_with_path(tree)
  ]
  axes = frozenset().union(*(pending for *_, pending in found))
  for path, leaf, pending in found:
    # XLA ends the process if it is to reinterpret such a leaf.
    if axes and leaves_lib.is_float0(leaf):
      raise ValueError(
          f'`updates` of `{caller}` must have gradients if they are unreduced,'
          f' got float0 at {leaves_lib.name_of(path)}. Pass integers in'
          ' another argument, which is not differentiated.'
      )
    if missing := axes - pending:
      raise ValueError(
          f'`updates` of `{caller}` must all be unreduced over the same axes,'
          f' got {leaves_lib.name_of(path)} {list(jnp.shape(leaf))}, which is'
          f' reduced over {sorted(missing, key=str)} already. Take all'
          ' gradients by `shard_transforms.value_and_grad`.'
      )
  return axes_lib.in_mesh_order(tuple(axes))


def rows_of(tree: Any, axes: Sequence[Hashable]) -> Any:
  """Returns what each shard adds to unreduced leaves, [shards, ...]."""

  def rows(leaf):
    spec = spec_of(leaf)
    given = P(*spec, unreduced=frozenset(axes))
    return _reinterpreted(_with_axis, leaf, given, P(tuple(axes), *spec))

  return jax.tree.map(rows, tree)


def unreduced_of(tree: Any, axes: Sequence[Hashable]) -> Any:
  """Returns unreduced leaves, given what each shard adds, [shards, ...]."""

  def unreduced(leaf):
    spec = spec_of(leaf)
    result = P(*spec[1:], unreduced=frozenset(axes))
    return _reinterpreted(own_row, leaf, spec, result)

  return jax.tree.map(unreduced, tree)


def is_row(x: Any, axes: Sequence[Hashable]) -> bool:
  """Whether an array has one element for each shard, [shards, ...]."""
  if not jnp.ndim(x):
    return False
  sizes = jax.sharding.get_abstract_mesh().shape
  lead = P(*spec_of(x).partitions[:1])
  num_shards = math.prod(sizes[axis] for axis in axes)
  return partition_specs.axes_of(lead) == set(axes) and len(x) == num_shards


def own_row(x: jax.Array) -> jax.Array:
  """Returns a shard's row, given one of [1, ...]."""
  return lax.squeeze(x, (0,))


def _with_axis(x):
  return lax.expand_dims(x, (0,))


def _reinterpreted(fn, x, given, result):
  # JAX 0.10 has unreduced arguments where all axes are mapped, and no version
  # of it has a cast from unreduced to varying.
  mapped = jax.shard_map(
      fn, in_specs=(given,), out_specs=result, check_vma=False
  )
  return mapped(x)


def map_shards(
    fn: Callable[..., Any],
    axes: Sequence[Hashable],
    args: Sequence[Any],
    out_specs: Any,
    out_shardings: Any,
) -> Any:
  """Calls `fn` on each shard; the compiler shards it over the other axes.

  The types of `args` say how they are sharded. Results have `out_specs` over
  `axes`, and `out_shardings` over all axes.
  """
  specs = jax.tree.map(spec_of, tuple(args))
  mapped = jax.shard_map(
      fn,
      axis_names=set(axes),
      in_specs=partition_specs.restricted(specs, axes),
      out_specs=out_specs,
  )
  mapped = jax.sharding.auto_axes(mapped, out_sharding=out_shardings)
  # JAX 0.10 maps some of the axes of a mesh under `jax.jit` alone.
  return jax.jit(mapped)(*args)
