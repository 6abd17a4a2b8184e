"""Collectives over shards, in any order or in that of a balanced binary tree.

This file and `exchanges` are the only ones that call those of JAX. Values vary
over all axes where JAX tracks this.

In the order of a tree, numbers are added in pairs, the sums of pairs in pairs,
and so on. A shard that has 2**m of them in a row adds its own subtree, and
shards add the rest of the tree: the same additions on any number of shards.
Only the order within a pair may differ, which changes no bit.
"""

from collections.abc import Hashable
from collections.abc import Sequence
import contextlib
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
  return psum(axes_lib.to_varying(x, axes), axes)


def agreed(decision: jax.Array) -> jax.Array:
  """Returns the logical AND over the shards that may decide differently."""
  axes = tuple(axes_lib.varying_axes(decision))
  return lax.pmin(decision.astype(jnp.int32), axes) > 0 if axes else decision


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
  """Returns the sum of `x` over the shards; itself without axes."""
  if not axes:
    return x
  with _explaining(x, axes):
    return lax.psum(x, axes)


def psum_in_groups(x: jax.Array, axis: Hashable, groups: Groups) -> jax.Array:
  """Returns the sum of `x` over the shards of each shard's own group."""
  if axes_lib.on_mapped_mesh((axis,)):
    return _psum_in_slices(scatter, x, (axis,), groups)
  # `vmap` has no collectives in groups, and slices of a leaf would gather what
  # is sharded over a mesh axis that is not mapped. There is a row for a group.
  own = _group_index(axis, groups)
  numbers = lax.broadcasted_iota(jnp.int32, (len(groups),) + (1,) * x.ndim, 0)
  return lax.psum(jnp.where(numbers == own, x[None], 0), axis)[own]


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
    x: jax.Array, axis: Hashable, dimension: int, tiled: bool = False
) -> jax.Array:
  """Returns each shard's part of the sum of `x` over the shards along an axis.

  Parts lie along a dimension, which the result does not have; if they are
  `tiled`, they are slices of it.
  """
  with _explaining(x, (axis,)):
    return _scatter(x, axis, dimension, tiled)


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


def row_index(axes: Axes, groups: Groups | None = None) -> jax.Array:
  """Returns which row of `scatter` and `gather` is a shard's own, int32 []."""
  if groups is not None:
    ranks = {shard: i for group in groups for i, shard in enumerate(group)}
    return _own_entry(ranks, axes[0])
  return lax.axis_index(axes_lib.in_mesh_order(axes))


def rounded(x: jax.Array) -> jax.Array:
  """Returns a number rounded to its dtype; every NaN becomes the same one.

  A compiler may join a product and a sum into one operation, which rounds once
  and gives other bits. Whether it does depends on the program around them, and
  so on the number of shards. It cannot across a comparison; XLA for CPUs does
  across `lax.optimization_barrier` (JAX 0.10) and `lax.reduce_precision`.
  """
  return jnp.where(x == x, x, jnp.nan)


def sum_rows(rows: jax.Array) -> jax.Array:
  """Returns the sum over the first axis, whose length is a power of two."""
  while len(rows) > 1:
    pairs = lax.reshape(rows, (len(rows) // 2, 2, *rows.shape[1:]))
    rows = pairs[:, 0] + pairs[:, 1]
  return rows[0]


def scatter_in_pairs(
    rows: jax.Array, axes: Axes, groups: Groups | None = None
) -> jax.Array:
  """Returns what `scatter` does, added in the order of a tree.

  By recursive halving: at each level, two shards swap halves of their rows and
  add, at first neighbours, then pairs of them. Sends the same bytes.
  """
  members = groups or (tuple(range(len(rows))),)
  rank, distance = row_index(axes, groups), 1
  while len(rows) > 1:
    halves = lax.reshape(rows, (len(rows) // 2, 2, *rows.shape[1:]))
    bit = (rank // distance) % 2
    keep, give = (
        lax.dynamic_index_in_dim(halves, i, 1, keepdims=False)
        for i in (bit, 1 - bit)
    )
    pairs = [
        (group[i ^ distance], shard)
        for group in members
        for i, shard in enumerate(group)
    ]
    rows, distance = keep + permute(give, axes, pairs), 2 * distance
  return lax.squeeze(rows, (0,))


def psum_in_pairs(
    x: jax.Array, axes: Axes, groups: Groups | None = None
) -> jax.Array:
  """Returns the sum of `x` over the shards, added in the order of a tree."""
  if not axes:
    return x
  num_shards = math.prod(map(lax.axis_size, axes))
  if x.size < (num_shards if groups is None else len(groups[0])):
    # One collective, in place of two or more.
    return sum_rows(gather(x, axes, groups))
  return _psum_in_slices(scatter_in_pairs, x, axes, groups)


@contextlib.contextmanager
def _explaining(x, axes):
  """Explains what to do where JAX has no sum."""
  try:
    yield
  except (AssertionError, ValueError) as error:
    raise NotImplementedError(
        f'JAX cannot sum {jax.typeof(x)} over the axes {axes!r} here. An axis'
        ' of `jax.vmap` inside `jax.shard_map` needs `check_vma=False`.'
    ) from error


def _group_index(axis, groups):
  indices = {shard: i for i, group in enumerate(groups) for shard in group}
  return _own_entry(indices, axis)


def _own_entry(entries, axis):
  """Returns a shard's own of the integers {shard: integer}, int32 []."""
  in_order = [entries[shard] for shard in range(len(entries))]
  return jnp.asarray(in_order, jnp.int32)[lax.axis_index(axis)]


def _psum_in_slices(scatter_rows, x, axes, groups=None):
  """Returns the sum over the shards. Each shard adds up one slice.

  Unlike `psum`, it supports groups under `shard_map(check_vma=True)` too.
  """
  num_shards = math.prod(map(lax.axis_size, axes))
  size = num_shards if groups is None else len(groups[0])
  part = scatter_rows(leaves_lib.cut(x.ravel(), size), axes, groups)
  return leaves_lib.join(gather(part, axes, groups), x)


def _scatter(x, axis, dimension, tiled=False, **groups):
  if axes_lib.scatters_wait():
    return lax.psum_scatter(
        x, axis, scatter_dimension=dimension, tiled=tiled, **groups
    )
  if tiled:
    before, after = x.shape[:dimension], x.shape[dimension:]
    x = x.reshape(*before, lax.axis_size(axis), -1, *after[1:])
  # The same bytes, in 0.13 to 0.98 of the time of gloo's own, between two and
  # between four processes, for 16 KiB to 16 MiB.
  parts = exchange_along(x, axis, dimension, **groups)
  return jnp.sum(parts, dimension, dtype=x.dtype)


def _all_gather(x, axis, dimension):
  """Gathers; the result is typed as the same on all shards, if tracked."""
  if axis in axes_lib.varying_axes(x):
    return lax.all_gather(x, axis, axis=dimension, to='invarying')
  return lax.all_gather(x, axis, axis=dimension)
