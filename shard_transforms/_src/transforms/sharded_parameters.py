"""Gathering of sharded parameters, and reduction of their gradients (FSDP)."""

from collections.abc import Hashable
import functools
from typing import Any

import jax
from jax import lax

from shard_transforms._src.base import mapping
from shard_transforms._src.base import partition_specs
from shard_transforms._src.reduction import collectives
from shard_transforms._src.reduction import leaf_sums


def gather(params: Any, specs: Any, axes: tuple[Hashable, ...]) -> Any:
  """Gathers parameters from the slices of the shards along `axes`."""

  def gather_leaf(x, spec):
    def gather_slices(x):
      for dimension, axis in reversed(_sliced_dimensions(spec, axes)):
        x = collectives.gather_along(x, axis, dimension)
      return x

    return _mapped_over_other_axes(gather_slices, spec, axes)(x)

  return jax.tree.map(gather_leaf, params, specs)


def reduce(
    tree: Any, specs: Any, axes: tuple[Hashable, ...], caller: str
) -> Any:
  """Sums a tree over the shards of `axes`; sharded leaves become slices.

  Args:
    tree: The tree of arrays.
    specs: The spec of each result, a tree or a prefix of one.
    axes: The mapped axes.
    caller: The public name, for errors and profiles.
  """
  is_spec = partition_specs.is_spec
  specs = jax.tree.broadcast(specs, tree, is_leaf=is_spec)
  scatter = functools.partial(_scatter, axes)
  leaves, treedef = jax.tree.flatten(jax.tree.map(scatter, tree, specs))
  axes_of_sums = [
      tuple(axis for axis in axes if axis not in partition_specs.axes_of(spec))
      for spec in jax.tree.leaves(specs, is_leaf=is_spec)
  ]
  for sum_axes in filter(None, dict.fromkeys(axes_of_sums)):
    to_sum = {i: leaves[i] for i, x in enumerate(axes_of_sums) if x == sum_axes}
    sums: Any = leaf_sums.Reduction(caller, 'sum', sum_axes)(to_sum)
    leaves = [sums.get(i, x) for i, x in enumerate(leaves)]
  return treedef.unflatten(leaves)


def constrain(
    grads: Any,
    specs: Any,
    axes: tuple[Hashable, ...],
    mesh: mapping.AnyMesh | None,
) -> Any:
  """Constrains the shardings of gradients that the compiler cannot infer."""

  def constrain_leaf(grad, spec):
    if not _is_mixed(axes, spec):
      return grad
    sharding = spec if mesh is None else jax.NamedSharding(mesh, spec)
    return lax.with_sharding_constraint(grad, sharding)

  return jax.tree.map(constrain_leaf, grads, specs)


def _scatter(axes, x, spec):
  """Reduce-scatters an array over the axes in its spec."""

  def scatter(x):
    for dimension, axis in _sliced_dimensions(spec, axes):
      x = collectives.scatter_along(x, axis, dimension, tiled=True)
    return x

  return _mapped_over_other_axes(scatter, spec, axes)(x)


def _mapped_over_other_axes(fn, spec, axes):
  """Returns `fn`, mapped over the other axes of the spec of a sliced array.

  Without a map over the other axes, the compiler would gather the arrays along
  these axes before the communication in `fn`.
  """
  other_axes = partition_specs.axes_of(spec).difference(axes)
  is_sliced = bool(_sliced_dimensions(spec, axes))
  if not is_sliced or not other_axes or _is_mixed(axes, spec):
    return fn
  other_spec = partition_specs.restricted(spec, other_axes)
  return jax.shard_map(
      fn,
      axis_names=other_axes,
      in_specs=other_spec,
      out_specs=other_spec,
      check_vma=False,
  )


def _is_mixed(axes, spec):
  """Whether a dimension is sliced over `axes` and over other axes as well."""
  return any(
      not set(entry).isdisjoint(axes) and not set(entry) <= set(axes)
      for entry in partition_specs.entries(spec)
  )


def _sliced_dimensions(spec, axes):
  """Returns the pairs (dimension, axis) of a spec whose axis is in `axes`."""
  return [
      (dimension, axis)
      for dimension, entry in enumerate(partition_specs.entries(spec))
      for axis in entry
      if axis in axes
  ]
