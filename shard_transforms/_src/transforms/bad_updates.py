"""What a shard finds in its own update, before all of them decide."""

from collections.abc import Hashable
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves
from shard_transforms._src.base import partition_specs
from shard_transforms._src.reduction import collectives


def sliced_over(
    updates: Any, axes: Sequence[Hashable], sharded: Any
) -> tuple[Hashable, ...]:
  """Returns the axes, other than those given, over which leaves are sliced.

  Raises:
    NameError: If an axis of `sharded` is not bound.
    ValueError: If it is missing where types do not tell.
  """
  found = frozenset[Hashable]()
  if sharded is not None:
    told = jax.tree.leaves(sharded, is_leaf=partition_specs.is_spec)
    found = found.union(*map(partition_specs.axes_of, told))
  elif axes:
    found = found.union(*map(axes_lib.varying_axes, jax.tree.leaves(updates)))
    unknown = set(axes_lib.untracked_axes()).difference(axes)
    if unknown:
      raise ValueError(
          '`sharded` of `guard` must say which leaves are sliced over'
          f' {sorted(unknown, key=str)}, because JAX does not track it here,'
          ' got None. Give the `PartitionSpec`s of the leaves, or `P()` for'
          ' none.'
      )
  sliced = tuple(sorted(found.difference(axes), key=str))
  axes_lib.size(sliced, 'guard')
  return sliced


def are_finite(updates: Any, sliced: tuple[Hashable, ...]) -> jax.Array:
  """Whether all elements of all slices are finite."""
  finite = jnp.asarray(True)
  for leaf in jax.tree.leaves(updates):
    if not leaves.is_float0(leaf):
      finite &= jnp.isfinite(leaf).all()
  return collectives.total(jnp.float32(~finite), sliced) == 0


def zero_if(bad: jax.Array, updates: Any) -> Any:
  """Returns zeros in place of updates that are bad."""

  def zero(update):
    # JAX forgets that nothing, chosen by each shard, is each shard's own.
    if leaves.is_float0(update) or not jnp.size(update):
      return update
    return jnp.where(bad, 0, update)

  return jax.tree.map(zero, updates)
