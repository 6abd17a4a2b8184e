"""Collectives over shards.

Only this file and `exchanges` call JAX's collectives. Where JAX tracks varying
axes, the inputs are expected to vary over all axes of a collective.
"""

from collections.abc import Hashable
from collections.abc import Sequence
import functools
import math
from typing import Any, Literal

import jax
from jax import lax
import jax.numpy as jnp

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import weights

Axes = tuple[Hashable, ...]
# A partition of the shards along one axis into groups of equal size.
Groups = tuple[tuple[int, ...], ...]


def agreed(decision: jax.Array) -> jax.Array:
  """Returns the logical AND over all shards between which a decision varies."""
  axes = tuple(axes_lib.varying_axes(decision))
  return lax.pmin(decision.astype(jnp.int32), axes) > 0 if axes else decision


def oldest(
    local_step: jax.Array,
    updates: Any,
    axes: Axes,
    weight: Any,
    caller: str,
) -> jax.Array:
  """Returns the smallest local step of the shards that share reduced updates.

  Updates that are already reduced combine the gradients of these shards, except
  shards with weight zero. If all weights are zero, the result is the largest
  int32.

  Args:
    local_step: The local step of this shard, int32 [].
    updates: The updates, some of which may be reduced.
    axes: The axes over which local steps are not combined.
    weight: The weight of this shard in the reduction, [], or `None`.
    caller: The public name, for errors.

  Raises:
    TypeError: If `weight` is needed, and is not a real number.
    ValueError: If `weight` is needed, and is not a scalar, or is a concrete
      value that is negative or not finite.
  """

  def reduced_axes(x):
    varying = map(axes_lib.varying_axes, jax.tree.leaves(updates))
    return tuple(axes_lib.varying_axes(x).difference(axes, *varying))

  if not reduced_axes(local_step):
    return local_step
  if weight is not None:
    largest_step = jnp.iinfo(jnp.int32).max
    counts = weights.as_weight(weight, (), caller) > 0
    local_step = jnp.where(counts, local_step, largest_step)
  return lax.pmin(local_step, reduced_axes(local_step))


def largest(x: jax.Array) -> jax.Array:
  """Returns the maximum over all shards that may have different values."""
  axes = (*axes_lib.varying_axes(x), *axes_lib.untracked_axes())
  return lax.pmax(x, axes) if axes else x


def combine(
    x: jax.Array,
    axes: Axes,
    kind: Literal['sum', 'mean', 'minimum', 'maximum'],
) -> jax.Array:
  """Reduces `x` over the shards by `kind`; returns `x` itself without axes."""
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
  """Returns the maximum minus the minimum of an integer over the shards."""
  # The minimum has the largest complement, so one collective suffices.
  both = axes_lib.to_varying(jnp.stack([x, ~x]), axes)
  most, complement = lax.pmax(both, axes)
  return most - ~complement


def psum(x: jax.Array, axes: Axes) -> jax.Array:
  """Returns the sum of `x` over the shards; `x` itself without axes.

  Raises:
    NotImplementedError: If JAX does not support a sum over these axes.
  """
  if not axes:
    return x
  if not axes_lib.varying_axes(x).issuperset(axes):
    x = axes_lib.to_varying(x, axes)
  try:
    return lax.psum(x, axes)
  except (AssertionError, ValueError) as error:
    raise NotImplementedError(_no_sum(x, axes)) from error


def sum_scalars(tree: Any, axes: Axes) -> Any:
  """Returns the sums of the scalars of a tree, float32, by one collective."""
  scalars, treedef = jax.tree.flatten(tree)
  as_float32 = functools.partial(jnp.asarray, dtype=jnp.float32)
  totals = psum(jnp.stack(list(map(as_float32, scalars))), axes)
  return treedef.unflatten(list(totals))


def psum_in_groups(x: jax.Array, axis: Hashable, groups: Groups) -> jax.Array:
  """Returns the sum of `x` over the shards of the group of this shard."""
  if axes_lib.on_mapped_mesh((axis,)):
    part = scatter(parts(x, len(groups[0])), (axis,), groups)
    return leaves_lib.join_slices(gather(part, (axis,), groups), x)
  # `vmap` does not support groups in collectives, and slicing a leaf would
  # gather it over mesh axes that are not mapped. Instead, sum an array with one
  # row per group.
  group = _group_index(axis, groups)
  indices = lax.broadcasted_iota(jnp.int32, (len(groups),) + (1,) * x.ndim, 0)
  return lax.psum(jnp.where(indices == group, x[None], 0), axis)[group]


def parts(x: jax.Array, number: int) -> jax.Array:
  """Splits an array into equal parts, which consist of whole rows if possible.

  XLA for TPUs scatters and gathers whole rows.
  """
  if x.ndim < 2 or math.prod(x.shape[:-1]) % number:
    return leaves_lib.slice_evenly(x.ravel(), number)
  return x.reshape(number, -1, x.shape[-1])


def scatter(
    rows: jax.Array, axes: Axes, groups: Groups | None = None
) -> jax.Array:
  """Returns the row of this shard, summed over all shards or over its group.

  The input has one row per shard, [shards, ...], in mesh order; see
  `row_index`. With groups, it has one row per member, [group size, ...].
  """
  if groups is not None:
    if axes_lib.on_mapped_mesh(axes):
      return _scatter(rows, axes[0], 0, axis_index_groups=groups)
    return psum_in_groups(rows, axes[0], groups)[row_index(axes, groups)]
  left = list(axes_lib.in_mesh_order(axes))
  if len(axes) > 1:
    sizes = map(lax.axis_size, left)
    rows = lax.reshape(rows, (*sizes, *rows.shape[1:]))
  # Scatter over the last axis, which is the fastest, first; the other axes then
  # only communicate a part.
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
  """Returns this shard's part of the sum of `x` over the shards along an axis.

  The parts are the entries along `dimension`, which the result does not have;
  if `tiled`, the parts are slices along `dimension`. With `axis_index_groups`,
  the sum is over each group.

  Raises:
    NotImplementedError: If JAX does not support a sum over this axis.
  """
  try:
    return _scatter(x, axis, dimension, tiled, **groups)
  except (AssertionError, ValueError) as error:
    raise NotImplementedError(_no_sum(x, (axis,))) from error


def exchange_along(
    x: jax.Array, axis: Hashable, dimension: int, **groups: Any
) -> jax.Array:
  """Returns the parts addressed to this shard, ordered by sender.

  Along `dimension`, there is one part per shard, or, with `axis_index_groups`,
  one part per member of the group.
  """
  # JAX returns the wrong shape if `vmap` does not batch the operand.
  x = jnp.where(lax.axis_index(axis) < 0, jnp.zeros_like(x), x)
  return lax.all_to_all(x, axis, dimension, dimension, **groups)


def rotate(x: jax.Array, axes: Axes, distance: int) -> jax.Array:
  """Returns the array of the shard `distance` positions ahead on the ring."""
  order = axes_lib.in_mesh_order(axes)
  num_shards = axes_lib.num_shards(order, '')
  pairs = [((i + distance) % num_shards, i) for i in range(num_shards)]
  return permute(x, order, pairs)


def permute(
    x: jax.Array, axes: Axes, pairs: Sequence[tuple[int, int]]
) -> jax.Array:
  """Sends arrays between shards, by pairs of a source and a destination."""
  return lax.ppermute(x, axes_lib.in_mesh_order(axes), pairs)


def gather_along(x: jax.Array, axis: Hashable, dimension: int) -> jax.Array:
  """Concatenates the slices of all shards of an axis along a dimension."""
  return lax.all_gather(x, axis, axis=dimension, tiled=True)


def gather(
    row: jax.Array, axes: Axes, groups: Groups | None = None
) -> jax.Array:
  """Returns the rows of all shards, [shards, ...], or of this shard's group."""
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
  """Like `gather_along`, but the result is typed as invariant over `axis`."""
  return _all_gather(x, axis, dimension, tiled=True)


def row_index(axes: Axes, groups: Groups | None = None) -> jax.Array:
  """Returns the row index of this shard in `scatter` and `gather`, int32 []."""
  if groups is not None:
    ranks = {shard: i for group in groups for i, shard in enumerate(group)}
    return _entry_of_shard(ranks, axes[0])
  return lax.axis_index(axes_lib.in_mesh_order(axes))


def _no_sum(x, axes):
  """Returns the error message for a sum that JAX does not support."""
  return (
      f'JAX cannot sum {jax.typeof(x)} over the axes {axes!r} here. An axis of'
      ' `jax.vmap` inside `jax.shard_map` needs `check_vma=False`.'
  )


def _group_index(axis, groups):
  indices = {shard: i for i, group in enumerate(groups) for shard in group}
  return _entry_of_shard(indices, axis)


def _entry_of_shard(entries, axis):
  """Returns the entry of this shard in {shard: integer}, int32 []."""
  in_order = [entries[shard] for shard in range(len(entries))]
  return jnp.asarray(in_order, jnp.int32)[lax.axis_index(axis)]


# Over all chips of many TPU slices, such as 4x4, 8x8, 16x16, 2x2x4 and 4x4x8,
# XLA does not reduce-scatter: it all-reduces the whole array and then slices
# it. XLA does reduce-scatter over every second chip and then over pairs, which
# communicates as many bytes as a single reduce-scatter. With more columns, the
# second stage has more data, but is too small for a reduce-scatter on v6e:
# benchmarks/hardware.py
#   v5e:4x4 --shapes=large shard_update (and v6e:4x4, v5p:2x2x4)
_LEAST_SHARDS, _COLUMNS = 16, 2


def _is_in_two_steps(axis):
  """Whether a reduce-scatter over an axis is split into two stages."""
  mesh = jax.sharding.get_abstract_mesh()
  num_shards = lax.axis_size(axis)
  is_alone = axes_lib.on_mapped_mesh((axis,)) and mesh.size == num_shards
  is_large = num_shards >= _LEAST_SHARDS and num_shards % _COLUMNS == 0
  return is_alone and is_large and axes_lib.platform() == 'tpu'


def _scatter_in_two(x, axis, dimension):
  """Reduce-scatters over columns of shards, and then over rows.

  The result equals a single reduce-scatter: columns split an array into one
  part per row of shards, in order, and each row splits its part further.
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
    # With `tiled=False`, JAX inserts the axis of an outer `vmap` in the wrong
    # position.
    return part if tiled else lax.squeeze(part, (dimension,))
  if tiled:
    before, after = x.shape[:dimension], x.shape[dimension:]
    x = x.reshape(*before, lax.axis_size(axis), -1, *after[1:])
  # An exchange communicates as many bytes as the reduce-scatter of gloo, and
  # takes 0.13 to 0.98 of the time, for 16 KiB to 16 MiB between two or four
  # processes.
  parts = exchange_along(x, axis, dimension, **groups)
  return jnp.sum(parts, dimension, dtype=x.dtype)


def _all_gather(x, axis, dimension, tiled=False):
  """All-gathers; the result is typed as invariant if `axis` is tracked."""
  to = {'to': 'invarying'} if axis in axes_lib.varying_axes(x) else {}
  return lax.all_gather(x, axis, axis=dimension, tiled=tiled, **to)
