"""Collectives over an axis of `jax.vmap` that the compiler shards.

There a collective is an operation on arrays with one more axis, and what is
sent is up to XLA's partitioner, which looks at how arrays are sharded before
and after an operation. The functions here say how, so that it sends no more
than a collective does.
"""

from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Sequence
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import groups as groups_lib


def is_sharded(x: jax.Array, axis: Hashable) -> bool:
  """Whether `axis`, a bound one, is of `jax.vmap` and of the mesh of `x`."""
  return axes_lib.compiler_mesh(x, axis) is not None


def on_each_shard(
    fn: Callable[..., Any],
    axes: Sequence[Hashable],
    x: jax.Array,
    *rest: Any,
) -> Any:
  """Returns `fn(x, *rest)`, which each shard computes of what is its own.

  Else the partitioner gathers what some operations take, such as `lax.top_k`.
  """
  meshes = [axes_lib.compiler_mesh(x, axis) for axis in axes]
  if all(mesh is not None for mesh in meshes):
    # `spmd_axis_name` adds the axes to the specs.
    fn = jax.shard_map(
        fn,
        mesh=meshes[0],
        axis_names=set(axes),
        in_specs=P(),
        out_specs=P(),
        check_vma=False,
    )
  return fn(x, *rest)


def exchange_along(x: jax.Array, axis: Hashable, dimension: int) -> jax.Array:
  """Returns what all shards have for this one, along a dimension.

  Else the partitioner would move behind it what is then done by each shard: in
  place of the bytes that a compressor makes, it would send the sum of all.
  """
  # Of what is the same on all shards, JAX makes an array of another shape.
  x = jnp.where(lax.axis_index(axis) < 0, jnp.zeros_like(x), x)
  parts = lax.all_to_all(_per_shard(x, axis), axis, dimension, dimension)
  return _per_shard(parts, axis)


def scatter_along(x: jax.Array, axis: Hashable, dimension: int) -> jax.Array:
  """Returns each shard's part of the sum of `x`, as `collectives` does.

  Each part is sent to the shard that sums it. Of `lax.psum_scatter`, XLA on CPU
  makes an all-reduce, of which each shard then takes its part.
  """
  return exchange_along(x, axis, dimension).sum(dimension)


def gather(x: jax.Array, axis: Hashable, dimension: int) -> jax.Array:
  """Returns what all shards have, along a dimension."""
  rows = lax.all_gather(_per_shard(x, axis), axis, axis=dimension)
  # Else the partitioner goes on with them sharded, and gathers more later.
  spec: list = [P.UNCONSTRAINED] * rows.ndim
  spec[dimension] = None
  return _sharded(rows, axis, P(*spec))


def psum_in_groups(
    x: jax.Array, axis: Hashable, groups: groups_lib.Groups
) -> jax.Array | None:
  """Returns the sum over each shard's own group, if groups lie in a grid."""
  grid = _grid(x, axis, groups)
  if grid is None:
    return None
  rows = _rows(x, axis)
  in_grid = rows.reshape(*grid, *x.shape)
  sums = jnp.broadcast_to(in_grid.sum(1, keepdims=True), in_grid.shape)
  return _own_row(sums.reshape(rows.shape), axis)


def scatter_in_groups(
    rows: jax.Array, axis: Hashable, groups: groups_lib.Groups
) -> jax.Array | None:
  """Returns each shard's row of the sum over its group, if that is a block."""
  grid = _grid(rows, axis, groups)
  # Where other shards are in between, the partitioner gathers all rows.
  if grid is None or grid[2] > 1:
    return None
  blocks, size, _ = grid
  every = _rows(rows, axis).reshape(blocks, size, *rows.shape)
  parts = jnp.swapaxes(every, 1, 2).reshape(-1, *rows.shape)
  return _own_row(parts, axis).sum(0)


def gather_in_groups(
    row: jax.Array, axis: Hashable, groups: groups_lib.Groups
) -> jax.Array | None:
  """Returns the rows of each shard's own group, if groups lie in a grid."""
  grid = _grid(row, axis, groups)
  if grid is None:
    return None
  blocks, size, stride = grid
  in_groups = jnp.moveaxis(_rows(row, axis).reshape(*grid, *row.shape), 1, 2)
  shape = blocks, size, stride, size, *row.shape
  every = jnp.broadcast_to(in_groups[:, None], shape)
  return _own_row(every.reshape(-1, size, *row.shape), axis)


def _grid(x, axis, groups):
  return groups_lib.grid(groups) if is_sharded(x, axis) else None


def _rows(x, axis):
  """Returns what all shards have, [number of shards, ...], each where it is."""
  return _one_a_shard(lax.all_gather(x, axis), axis)


def _own_row(rows, axis):
  """Returns each shard's own of rows that are the same on all shards."""
  # As if the first handed them out: of an index, the partitioner does not know
  # that it is that of the shard.
  is_first = lax.axis_index(axis) == 0
  rows = jnp.where(is_first, _one_a_shard(rows, axis), 0)
  return _per_shard(lax.all_to_all(rows, axis, 0, 0)[0], axis)


def _one_a_shard(rows, axis):
  """Says that the rows of what is the same for all shards are divided."""
  return _sharded(rows, axis, P(axis, *[P.UNCONSTRAINED] * (rows.ndim - 1)))


def _per_shard(x, axis):
  """Says that each shard has its own: `spmd_axis_name` adds the axis."""
  return _sharded(x, axis, P(*[P.UNCONSTRAINED] * x.ndim))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _sharded(x, axis, spec):
  mesh = axes_lib.compiler_mesh(x, axis)
  if mesh is None:
    return x
  return lax.with_sharding_constraint(x, NamedSharding(mesh, spec))


@_sharded.defjvp
def _(axis, spec, primals, tangents):
  # Backward, JAX refuses to map a spec that names the axis: what is the same
  # for all shards has a cotangent of each.
  return _sharded(*primals, axis, spec), *tangents
