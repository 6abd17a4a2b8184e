"""Copies: whether devices still hold the same bits of one global array."""

from collections.abc import Hashable
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shard_transforms._src.base import partition_specs as specs_lib
from shard_transforms._src.monitoring import checksums
from shard_transforms._src.reduction import collectives

_CALLER = 'track_divergence'


def copy_divergence(tree: chex.ArrayTree, shardings: Any) -> jax.Array:
  """Returns how far checksums of copies on devices are apart: 0 if they agree.

  For programs under plain `jax.jit`. Each array is compared over the axes of
  the mesh that its sharding does not name. It sends 16 bytes for each set of
  such axes, and no array.

  Args:
    tree: Tree of arrays.
    shardings: A `jax.sharding.NamedSharding` for each of them.

  Returns:
    The largest difference between two copies, uint32 [].

  Raises:
    ValueError: If the trees differ.
  """
  expected, given = jax.tree.structure(shardings), jax.tree.structure(tree)
  if expected != given:
    raise ValueError(
        f'`shardings` of `{_CALLER}` must be a tree like the parameters,'
        f' {given}, got {expected}.'
    )
  shardings = jax.tree.leaves(shardings)
  if not shardings:
    return jnp.zeros([], jnp.uint32)
  axes = tuple(map(_axes_of_copies, shardings))
  with jax.named_scope('copy_divergence'):
    return jax.shard_map(
        functools.partial(_of_own, axes),
        mesh=shardings[0].mesh,
        in_specs=tuple(s.spec for s in shardings),
        out_specs=P(),
    )(*jax.tree.leaves(tree))


def check_shardings(shardings: Any) -> None:
  """Raises unless a tree holds shardings on one mesh.

  Args:
    shardings: The tree.

  Raises:
    TypeError: If it holds anything else.
    ValueError: If they are on different meshes.
  """
  leaves = jax.tree.leaves(shardings)
  for leaf in leaves:
    if not isinstance(leaf, NamedSharding):
      raise TypeError(
          f'`shardings` of `{_CALLER}` must hold a `jax.sharding.NamedSharding`'
          f' for each parameter, got {leaf!r}.'
      )
  meshes = {leaf.mesh for leaf in leaves}
  if len(meshes) > 1:
    raise ValueError(
        f'`shardings` of `{_CALLER}` must be on one mesh, got'
        f' {[dict(mesh.shape) for mesh in meshes]}.'
    )


def _axes_of_copies(sharding: NamedSharding) -> tuple[Hashable, ...]:
  """Returns the axes along which devices hold copies."""
  used = specs_lib.axes_of(sharding.spec)
  return tuple(axis for axis in sharding.mesh.axis_names if axis not in used)


def _of_own(axes, *leaves):
  """Returns the divergence of what one device holds, the same on all."""
  alike = {}
  for leaf_axes, leaf in zip(axes, leaves, strict=True):
    alike.setdefault(leaf_axes, []).append(leaf)
  found = [jnp.zeros([], jnp.uint32)]
  for copied, group in alike.items():
    if copied:
      spread = collectives.spread(checksums.checksum(group), copied).max()
      found.append(collectives.largest(spread))
  return jnp.stack(found).max()
