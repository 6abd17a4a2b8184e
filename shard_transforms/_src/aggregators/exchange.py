"""Each shard gets a slice of all shards' arrays, and hands back one.

Slices travel all-to-all, so that a shard sees all values of its elements, and
what it makes of them is gathered: the bytes of an all-reduce.
"""

from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.reduction import bucketing
from shard_transforms._src.reduction import collectives

Axes = tuple[Hashable, ...]


def map_elements(
    combine: Callable[[jax.Array], jax.Array],
    leaves: Sequence[jax.Array],
    axes: Axes,
) -> list[jax.Array]:
  """Combines the values that all shards have of each element.

  Args:
    combine: Takes values [number of shards, ...] and gives one of each [...].
    leaves: Arrays, of each shard its own.
    axes: The axes of the shards.

  Returns:
    Arrays of the same shapes, the same on all shards.
  """

  def send(buffer, _):
    rows = collectives.exchange(cut(buffer, axes_lib.size(axes, '')), axes)
    return join(collectives.gather(combine(rows), axes), buffer)

  if not is_cut(axes):
    return [combine(collectives.gather(leaf, axes)) for leaf in leaves]
  return bucketing.map_packed(send, leaves, keys(leaves), levels())


def is_cut(axes: Axes) -> bool:
  """Whether arrays are cut; else each shard gets those of all, whole."""
  # Under `vmap` nothing travels, and flattening would gather what a mesh axis
  # that is not mapped shards.
  return axes_lib.on_mapped_mesh(axes)


def cut(x: jax.Array, num_shards: int) -> jax.Array:
  """Returns the slices of an array, [number of shards, elements]."""
  return jnp.pad(x.ravel(), (0, -x.size % num_shards)).reshape(num_shards, -1)


def join(rows: jax.Array, like: jax.Array) -> jax.Array:
  """Returns the array of the shape of `like` of which these are the slices."""
  return rows.ravel()[: like.size].reshape(like.shape)


def keys(leaves: Sequence[jax.Array]) -> list[Hashable]:
  """Returns what leaves must share to travel together."""
  return [(leaf.dtype, axes_lib.varying_axes(leaf)) for leaf in leaves]


def levels() -> tuple[bucketing.Level, ...]:
  """Returns the steps in which leaves are packed."""
  return bucketing.levels('auto', axes_lib.between_processes())
