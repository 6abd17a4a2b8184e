"""The ways in which JAX binds a mapped axis, as one function."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

AXIS = 'data'
HOSTS = ('host', 'core')
NAMES = ('vmap', 'pmap', 'shard_map', 'shard_map_unchecked')
UNTRACKED_MODES = ('vmap', 'pmap', 'shard_map_unchecked')
# Those of JAX under which results have another dtype, or none.
SETTINGS = {
    'x64': lambda: jax.enable_x64(True),
    'strict': lambda: jax.numpy_dtype_promotion('strict'),
}


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
    mode: One of `NAMES`, or 'hosts' for the axes `HOSTS`.
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

  if mode == 'hosts':
    return map_over_hosts(fn)
  return _map_over(mesh(num_shards), AXIS, fn, mode == 'shard_map')


def map_over_hosts(
    fn: Callable[..., Any], check_vma: bool = True
) -> Callable[[Any, Any], Any]:
  """As `map_shards`, over the axes `HOSTS` of 2 hosts x 4 cores."""
  auto = (jax.sharding.AxisType.Auto,) * 2
  return _map_over(jax.make_mesh((2, 4), HOSTS, auto), HOSTS, fn, check_vma)


def _map_over(mesh, axes, fn, check_vma):
  def one_shard(shared, own):
    out = fn(shared, jax.tree.map(lambda x: x[0], own))
    return jax.tree.map(lambda x: x[None], out)

  mapped = jax.shard_map(
      one_shard,
      mesh=mesh,
      in_specs=(P(), P(axes)),
      out_specs=P(axes),
      check_vma=check_vma,
  )
  return jax.jit(mapped)
