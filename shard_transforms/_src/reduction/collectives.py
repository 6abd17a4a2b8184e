"""Collectives over shards; only this file and `exchanges` call those of JAX.

Values vary over all axes where JAX tracks this.
"""

from collections.abc import Hashable
from collections.abc import Sequence
import math
from typing import Any, Literal

import jax
from jax import lax
import jax.numpy as jnp

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib

Axes = tuple[Hashable, ...]
# A partition of the shards along one axis, into groups of one size.
Groups = tuple[tuple[int, ...], ...]


def total(x: jax.Array, axes: Axes) -> jax.Array:
  """Returns the sum of one array over the shards; itself without axes."""
  return psum(axes_lib.to_varying(x, axes), axes) if axes else x


def agreed(decision: jax.Array) -> jax.Array:
  """Returns the logical AND over the shards that may decide differently."""
  axes = tuple(axes_lib.varying_axes(decision))
  return lax.pmin(decision.astype(jnp.int32), axes) > 0 if axes else decision


def oldest(
    local_step: jax.Array,
    updates: Any,
    axes: Axes = (),
    weight: jax.Array | None = None,
) -> jax.Array:
  """Returns the smallest local step of the shards whose updates are the same.

  Updates that are already reduced are made of the gradients of these shards,
  without those of weight zero. If all weights are zero, the result is the
  largest int32.

  Args:
    local_step: The local step of this shard, int32 [].
    updates: The updates, some of which may be reduced.
    axes: The axes over which each shard keeps its own local step.
    weight: The weight of this shard in the reduction, [].
  """

  def reduced_axes(x):
    varying = map(axes_lib.varying_axes, jax.tree.leaves(updates))
    return tuple(axes_lib.varying_axes(x).difference(axes, *varying))

  if not reduced_axes(local_step):
    return local_step
  if weight is not None:
    largest_step = jnp.iinfo(jnp.int32).max
    local_step = jnp.where(weight > 0, local_step, largest_step)
  return lax.pmin(local_step, reduced_axes(local_step))


def largest(x: jax.Array) -> jax.Array:
  """Returns the maximum over the shards that may hold different numbers."""
  axes = (*axes_lib.varying_axes(x), *axes_lib.untracked_axes())
  return lax.pmax(x, axes) if axes else x


def combine(
    x: jax.Array,
    axes: Axes,
    kind: Literal['sum', 'mean', 'minimum', 'maximum'],
) -> jax.Array:
  """Returns a reduction of a kind over shards; `x` itself without axes."""
  if not axes:
    return x
  send = {
      'sum': lax.psum,
      'mean': lax.pmean,
      'minimum': lax.pmin,
      'maximum': lax.pmax,
  }[kind]
  return send(axes_lib.to_varying(x, axes), axes)


def spread(x: jax.Array, axes: Axes) -> jax.Array:
  """Returns max minus min over shards, of integers."""
  # The minimum has the largest complement, so that one collective is enough.
  both = axes_lib.to_varying(jnp.stack([x, ~x]), axes)
  most, complement = lax.pmax(both, axes)
  return most - ~complement


def psum(x: jax.Array, axes: Axes) -> jax.Array:
  """Returns the sum of `x` over the shards; itself without axes.

  Raises:
    NotImplementedError: If JAX has no sum over these axes.
  """
  if not axes:
    return x
  try:
    return lax.psum(x, axes)
  except (AssertionError, ValueError) as error:
    raise NotImplementedError(_no_sum(x, axes)) from error


def psum_in_groups(x: jax.Array, axis: Hashable, groups: Groups) -> jax.Array:
  """Returns the sum of `x` over the shards of each shard's own group."""
  if axes_lib.on_mapped_mesh((axis,)):
    part = scatter(parts(x, len(groups[0])), (axis,), groups)
    return leaves_lib.join(gather(part, (axis,), groups), x)
  # `vmap` has no collectives in groups, and slices of a leaf would gather what
  # is sharded over a mesh axis that is not mapped. There is a row for a group.
  own = _group_index(axis, groups)
  numbers = lax.broadcasted_iota(jnp.int32, (len(groups),) + (1,) * x.ndim, 0)
  return lax.psum(jnp.where(numbers == own, x[None], 0), axis)[own]


def parts(x: jax.Array, number: int) -> jax.Array:
  """Returns equal parts of an array: whole lines of it where that can be."""
  # XLA for TPUs scatters and gathers lines.
  if x.ndim < 2 or math.prod(x.shape[:-1]) % number:
    return leaves_lib.cut(x.ravel(), number)
  return x.reshape(number, -1, x.shape[-1])


def scatter(
    rows: jax.Array, axes: Axes, groups: Groups | None = None
) -> jax.Array:
  """Returns the row of each shard, summed over all shards or a group of them.

  There is a row for each shard, [shards, ...], in the order of the mesh; see
  `row_index`. Groups are of one size, [size of a group, ...].
  """
  if groups is not None:
    if axes_lib.on_mapped_mesh(axes):
      return _scatter(rows, axes[0], 0, axis_index_groups=groups)
    return psum_in_groups(rows, axes[0], groups)[row_index(axes, groups)]
  left = list(axes_lib.in_mesh_order(axes))
  if len(axes) > 1:
    sizes = map(lax.axis_size, left)
    rows = lax.reshape(rows, (*sizes, *rows.shape[1:]))
  # The last axis is the fast one; the other axes then sum only a part.
  for axis in reversed(axes):
    rows = scatter_along(rows, axis, left.index(axis))
    left.remove(axis)
  return rows


def scatter_along(
    x: jax.Array,
    axis: Hashable,
    dimension: int,
    tiled: bool = False,
    **groups: Any,
) -> jax.Array:
  """Returns each shard's part of the sum of `x` over the shards along an axis.

  Parts lie along a dimension, which the result does not have; if they are
  `tiled`, they are slices of it. With `axis_index_groups`, each group sums.

  Raises:
    NotImplementedError: If JAX has no sum over this axis.
  """
  try:
    return _scatter(x, axis, dimension, tiled, **groups)
  except (AssertionError, ValueError) as error:
    raise NotImplementedError(_no_sum(x, (axis,))) from error


def exchange_along(
    x: jax.Array, axis: Hashable, dimension: int, **groups: Any
) -> jax.Array:
  """Returns the parts addressed to this shard, ordered by sender.

  There is a part for each shard along a dimension, or for each of its group
  with `axis_index_groups`.
  """
  # For an operand that `vmap` does not batch, JAX returns the wrong shape.
  x = jnp.where(lax.axis_index(axis) < 0, jnp.zeros_like(x), x)
  return lax.all_to_all(x, axis, dimension, dimension, **groups)


def rotate(x: jax.Array, axes: Axes, distance: int) -> jax.Array:
  """Returns the array of the shard that is so far ahead, in a ring of all."""
  order = axes_lib.in_mesh_order(axes)
  num_shards = axes_lib.size(order, '')
  pairs = [((i + distance) % num_shards, i) for i in range(num_shards)]
  return permute(x, order, pairs)


def permute(
    x: jax.Array, axes: Axes, pairs: Sequence[tuple[int, int]]
) -> jax.Array:
  """Returns what each shard is sent: pairs of a source and a destination."""
  return lax.ppermute(x, axes_lib.in_mesh_order(axes), pairs)


def gather_along(x: jax.Array, axis: Hashable, dimension: int) -> jax.Array:
  """Returns the slices along a dimension of all shards along an axis."""
  return lax.all_gather(x, axis, axis=dimension, tiled=True)


def gather(
    row: jax.Array, axes: Axes, groups: Groups | None = None
) -> jax.Array:
  """Returns the rows of all shards, [shards, ...], or of each one's group."""
  if groups is not None:
    if axes_lib.on_mapped_mesh(axes):
      return lax.all_gather(row, axes[0], axis_index_groups=groups)
    members = jnp.asarray(groups)[_group_index(axes[0], groups)]
    return lax.all_gather(row, axes[0])[members]
  order, gathered, rows = axes_lib.in_mesh_order(axes), set(), row
  for axis in axes:
    before = order[: order.index(axis)]
    rows = _all_gather(rows, axis, len(gathered.intersection(before)))
    gathered.add(axis)
  num_rows = math.prod(rows.shape[: len(axes)])
  return lax.reshape(rows, (num_rows, *row.shape))


def join_along(x: jax.Array, axis: Hashable, dimension: int) -> jax.Array:
  """Returns the slices of all shards, typed as the same on all of them."""
  return _all_gather(x, axis, dimension, tiled=True)


def row_index(axes: Axes, groups: Groups | None = None) -> jax.Array:
  """Returns which row of `scatter` and `gather` is a shard's own, int32 []."""
  if groups is not None:
    ranks = {shard: i for group in groups for i, shard in enumerate(group)}
    return _own_entry(ranks, axes[0])
  return lax.axis_index(axes_lib.in_mesh_order(axes))


def _no_sum(x, axes):
  """Returns what to do where JAX has no sum."""
  return (
      f'JAX cannot sum {jax.typeof(x)} over the axes {axes!r} here. An axis of'
      ' `jax.vmap` inside `jax.shard_map` needs `check_vma=False`.'
  )


def _group_index(axis, groups):
  indices = {shard: i for i, group in enumerate(groups) for shard in group}
  return _own_entry(indices, axis)


def _own_entry(entries, axis):
  """Returns a shard's own of the integers {shard: integer}, int32 []."""
  in_order = [entries[shard] for shard in range(len(entries))]
  return jnp.asarray(in_order, jnp.int32)[lax.axis_index(axis)]


# Over all chips of many TPU slices, such as 4x4, 8x8, 16x16, 2x2x4 and 4x4x8,
# XLA has no reduce-scatter: it sums all of an array, and then takes a part. It
# has one over every second chip, and then over pairs, which send as much as one
# of a single step; with more columns, more is left for a second step that is
# too small for a reduce-scatter on v6e: benchmarks/hardware.py
#   v5e:4x4 --shapes=large shard_update (and v6e:4x4, v5p:2x2x4)
_LEAST_SHARDS, _COLUMNS = 16, 2


def _is_in_two_steps(axis):
  """Whether a reduce-scatter over an axis takes two steps."""
  mesh = jax.sharding.get_abstract_mesh()
  num_shards = lax.axis_size(axis)
  is_alone = axes_lib.on_mapped_mesh((axis,)) and mesh.size == num_shards
  is_large = num_shards >= _LEAST_SHARDS and num_shards % _COLUMNS == 0
  return is_alone and is_large and axes_lib.platform() == 'tpu'


def _scatter_in_two(x, axis, dimension):
  """Returns what a reduce-scatter does, of columns of shards and then rows.

  A shard's part is the same: columns divide an array into one part for each
  row of shards, in their order, and rows divide that.
  """
  shards = range(lax.axis_size(axis))
  rows = [shards[i : i + _COLUMNS] for i in shards[::_COLUMNS]]
  for groups in zip(*rows, strict=True), rows:
    x = lax.psum_scatter(
        x,
        axis,
        scatter_dimension=dimension,
        axis_index_groups=list(map(list, groups)),
        tiled=True,
    )
  return x


def _scatter(x, axis, dimension, tiled=False, **groups):
  if axes_lib.scatters_are_safe():
    if not groups and _is_in_two_steps(axis):
      part = _scatter_in_two(x, axis, dimension)
    else:
      part = lax.psum_scatter(
          x, axis, scatter_dimension=dimension, tiled=True, **groups
      )
    # Without tiles, JAX puts the axis of another `vmap` in the wrong place.
    return part if tiled else lax.squeeze(part, (dimension,))
  if tiled:
    before, after = x.shape[:dimension], x.shape[dimension:]
    x = x.reshape(*before, lax.axis_size(axis), -1, *after[1:])
  # The same bytes, in 0.13 to 0.98 of the time of gloo's own, between two and
  # between four processes, for 16 KiB to 16 MiB.
  parts = exchange_along(x, axis, dimension, **groups)
  return jnp.sum(parts, dimension, dtype=x.dtype)


def _all_gather(x, axis, dimension, tiled=False):
  """Gathers; the result is typed as the same on all shards, if tracked."""
  to = {'to': 'invarying'} if axis in axes_lib.varying_axes(x) else {}
  return lax.all_gather(x, axis, axis=dimension, tiled=tiled, **to)
