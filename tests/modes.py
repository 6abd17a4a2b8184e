"""The ways in which JAX binds a mapped axis, as one function."""

from collections.abc import Callable
import math
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

import cases

AXIS = 'data'
# Under plain `jit`, over an axis of a mesh whose other axis shards the
# parameters.
SPMD_MODES = ('spmd_vmap', 'spmd_vmap_explicit')
NAMES = ('vmap', 'pmap', 'shard_map', 'shard_map_unchecked', *SPMD_MODES)
# For tables of cases: one mode stands for all in the fast tests. A test that
# is fast, or differs between modes, takes `NAMES`.
MODES = tuple(
    mode if mode == 'shard_map' else cases.Repeated(mode) for mode in NAMES
)
# Those in which a collective that not all shards reach hangs.
PARALLEL_MODES = MODES[1:4]
UNTRACKED_MODES = ('vmap', 'pmap', 'shard_map_unchecked', *MODES[4:])


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
  if mode in SPMD_MODES:
    kind = 'Explicit' if mode == 'spmd_vmap_explicit' else 'Auto'
    return _map_spmd(fn, spmd_mesh(kind, math.gcd(num_shards, 4)))
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


def spmd_mesh(
    kind: str, num_shards: int = 4, num_parts: int = 2
) -> jax.sharding.Mesh:
  """Returns a mesh of an axis for the batch and one for the parameters."""
  kinds = (getattr(jax.sharding.AxisType, kind),) * 2
  devices = jax.devices()[: num_shards * num_parts]
  return jax.make_mesh(
      (num_shards, num_parts), (AXIS, 'model'), kinds, devices=devices
  )


def spmd_spec(shape: tuple[int, ...]) -> P:
  """Returns how a parameter is sharded: along the first even dimension."""
  even = [dim for dim, size in enumerate(shape) if size and size % 2 == 0]
  return P(*(None,) * even[0], 'model') if even else P()


def map_spmd(
    fn: Callable[..., Any],
    mesh: jax.sharding.Mesh,
    in_axes: Any,
    out_axes: Any,
    out_sharding: Any,
) -> Callable[..., Any]:
  """Maps `fn` over the first axis of a mesh, whose rest is the compiler's."""
  mapped = jax.vmap(fn, in_axes, out_axes, axis_name=AXIS, spmd_axis_name=AXIS)
  if jax.sharding.AxisType.Explicit in mesh.axis_types:
    # JAX itself has no `psum` over such an axis.
    mapped = jax.sharding.auto_axes(mapped, out_sharding=out_sharding)
  return mapped


def _map_spmd(fn, mesh):
  mapped = jax.jit(map_spmd(fn, mesh, (None, 0), 0, P(AXIS)))
  result = NamedSharding(spmd_mesh('Auto', mesh.shape[AXIS]), P(AXIS))

  def place(x, spec):
    return jax.device_put(x, NamedSharding(mesh, spec))

  def call(shared, own):
    shared = jax.tree.map(lambda x: place(x, spmd_spec(np.shape(x))), shared)
    own = jax.tree.map(lambda x: place(x, P(AXIS)), own)
    leaves = jax.tree.leaves((shared, own))
    if any(isinstance(x, jax.core.Tracer) for x in leaves):
      context = jax.sharding.use_abstract_mesh(mesh.abstract_mesh)
    else:
      context = jax.set_mesh(mesh)
    with context:
      out = mapped(shared, own)
    return jax.device_put(out, result)

  return call
