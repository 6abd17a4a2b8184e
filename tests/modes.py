"""The ways in which JAX binds a mapped axis, as one function."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

AXIS = 'data'
NAMES = ('vmap', 'pmap', 'shard_map', 'shard_map_unchecked')
# Those in which a collective that not all shards reach hangs.
PARALLEL_MODES = NAMES[1:]
UNTRACKED_MODES = ('vmap', 'pmap', 'shard_map_unchecked')


def mesh(num_shards: int = 8) -> jax.sharding.Mesh:
  """Returns a mesh of one axis over the first virtual devices."""
  auto = (jax.sharding.AxisType.Auto,)
  devices = jax.devices()[:num_shards]
  return jax.make_mesh((num_shards,), (AXIS,), auto, devices=devices)


def map_shards(
    mode: str, fn: Callable[..., Any], num_shards: int = 8
) -> Callable[[Any, Any], Any]:
  """Maps `fn(shared, own)` over shards.

  Args:
    mode: One of `NAMES`.
    fn: Takes a tree that is the same on all shards, and a shard's own slice of
      a tree, without the axis of shards.
    num_shards: The size of the axis.

  Returns:
    A compiled function of the shared tree and of a tree with a leading axis of
    shards; its results have that axis as well.
  """
  if mode == 'vmap':
    return jax.jit(jax.vmap(fn, (None, 0), axis_name=AXIS))
  if mode == 'pmap':
    devices = jax.devices()[:num_shards]
    return jax.pmap(fn, AXIS, in_axes=(None, 0), devices=devices)

  def one_shard(shared, own):
    out = fn(shared, jax.tree.map(lambda x: x[0], own))
    return jax.tree.map(lambda x: x[None], out)

  return jax.jit(
      jax.shard_map(
          one_shard,
          mesh=mesh(num_shards),
          in_specs=(P(), P(AXIS)),
          out_specs=P(AXIS),
          check_vma=mode == 'shard_map',
      )
  )
