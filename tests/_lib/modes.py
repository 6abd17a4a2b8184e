"""Mapping a function over shards, in each way that JAX binds an axis."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec as P
import numpy as np

AXIS = 'data'
HOSTS = ('host', 'core')
MAPPED = ('vmap', 'pmap', 'shard_map', 'shard_map_unchecked')
# Plain `jax.jit` with global arrays, on a mesh whose axes are of these types.
PLAIN = {
    'jit': jax.sharding.AxisType.Auto,
    'jit_explicit': jax.sharding.AxisType.Explicit,
}
NAMES = (*MAPPED, *PLAIN)
UNTRACKED_MODES = ('vmap', 'pmap', 'shard_map_unchecked')
# Settings of JAX under which results have another dtype, or raise.
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
  """Maps `fn(shared, per_shard)` over shards.

  Args:
    mode: One of `MAPPED`, or 'hosts' for the axes `HOSTS`.
    fn: A function of a tree that is the same on all shards, and of the slice
      of a tree for a shard, without the axis of shards.
    num_shards: The size of the axis.

  Returns:
    A compiled function of the shared tree and of a tree with a leading axis of
    shards; its results have that axis as well.

  Raises:
    ValueError: If the mode does not map shards.
  """
  if mode not in (*MAPPED, 'hosts'):
    raise ValueError(f'`map_shards` does not map shards in the mode {mode!r}.')
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
  def one_shard(shared, per_shard):
    out = fn(shared, jax.tree.map(lambda x: x[0], per_shard))
    return jax.tree.map(lambda x: x[None], out)

  mapped = jax.shard_map(
      one_shard,
      mesh=mesh,
      in_specs=(P(), P(axes)),
      out_specs=P(axes),
      check_vma=check_vma,
  )
  return jax.jit(mapped)


def plain_mesh(
    mode: str, num_shards: int = 8, axes: Any = AXIS
) -> jax.sharding.Mesh:
  """Returns the mesh of a mode of `PLAIN`: of one axis, or 2 x 4 of `HOSTS`."""
  names = (axes,) if isinstance(axes, str) else axes
  sizes = (num_shards,) if isinstance(axes, str) else (2, num_shards // 2)
  devices = jax.devices()[:num_shards]
  kinds = (PLAIN[mode],) * len(names)
  return jax.make_mesh(sizes, names, kinds, devices=devices)


def place(tree: Any, mesh: jax.sharding.Mesh, *spec: Any) -> Any:
  """Returns a tree on the devices of a mesh."""
  return jax.device_put(tree, jax.NamedSharding(mesh, P(*spec)))


def is_mapped(axes: Any) -> bool:
  """Whether the axes are mapped here, as in all modes of `MAPPED`."""
  try:
    lax.axis_size(axes)
  except NameError:
    return False
  return True


def stack_shards(tree: Any) -> Any:
  """Returns the parts of global arrays on the devices, [shards, ...]."""

  def stack(x):
    if not isinstance(x.sharding, jax.NamedSharding):
      raise AssertionError(f'not on a mesh: {x.sharding}')
    parts = {shard.device: shard.data for shard in x.addressable_shards}
    return np.stack([parts[d] for d in x.sharding.mesh.devices.ravel()])

  return jax.tree.map(stack, tree)
