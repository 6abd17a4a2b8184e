"""The exchange of slices: all-to-all, combine, all-gather.

After the all-to-all, each shard holds the values of all shards for its slice of
the elements. What it combines them to is gathered. Both together send the bytes
of an all-reduce.
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
    leaves: This shard's arrays.
    axes: The axes of the shards.

  Returns:
    Arrays of the same shapes, the same on all shards.
  """

  def send(buffer, _):
    rows = collectives.exchange(cut(buffer, axes_lib.size(axes, '')), axes)
    return join(collectives.gather(combine(rows), axes), buffer)

  if not is_cut(leaves, axes):
    return [combine(collectives.gather(leaf, axes)) for leaf in leaves]
  return bucketing.map_packed(send, leaves, keys(leaves), levels())


def is_cut(leaves: Sequence[jax.Array], axes: Axes) -> bool:
  """Whether arrays are sliced; otherwise each shard gathers them whole."""
  # Under `vmap` on one device nothing is sent, and flattening would gather what
  # is sharded over a mesh axis that is not mapped.
  return all(axes_lib.on_own_mesh(leaf, axes) for leaf in leaves)


def cut(x: jax.Array, num_shards: int) -> jax.Array:
  """Returns the slices of an array, [number of shards, elements]."""
  return jnp.pad(x.ravel(), (0, -x.size % num_shards)).reshape(num_shards, -1)


def join(rows: jax.Array, like: jax.Array) -> jax.Array:
  """Returns the array of the shape of `like` of which these are the slices."""
  return rows.ravel()[: like.size].reshape(like.shape)


def keys(leaves: Sequence[jax.Array]) -> list[Hashable]:
  """Returns for each leaf what must be equal for leaves to share a buffer."""
  return [(leaf.dtype, axes_lib.varying_axes(leaf)) for leaf in leaves]


def levels() -> tuple[bucketing.Level, ...]:
  """Returns the steps in which leaves are packed."""
  return bucketing.levels('auto', axes_lib.between_processes())
