"""Per-shard gradients under plain `jax.jit`, where no axis is mapped."""

from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import mapping
from shard_transforms._src.base import stacked as stacked_lib
from shard_transforms._src.base import weights


def map_shards(
    fn: Callable[..., Any],
    axes: tuple[Hashable, ...],
    mesh: mapping.AnyMesh,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    splits: Sequence[bool | None],
) -> Any:
  """Maps a function over the shards, and stacks its results, [shards, ...].

  Args:
    fn: A function of `args` and `kwargs`, called inside a map over `axes`.
    axes: The axes of the mesh over which the batch is sharded.
    mesh: The mesh.
    args: Positional arguments. For a `Stacked`, the function receives the entry
      of its shard.
    kwargs: Keyword arguments.
    splits: One entry per leaf of `(args, kwargs)`: whether the leaf is split
      over the shards, or `None` for a leaf that is not an array, which is
      passed unchanged.
  """
  leaves, treedef = jax.tree.flatten((args, kwargs))
  if mesh.explicit_axes:
    leaves = [
        x if split is None else mapping.resharded(x, axes, split)
        for x, split in zip(leaves, splits, strict=True)
    ]

  def of_shard(args, kwargs):
    args, kwargs = jax.tree.map(
        stacked_lib.local_entry, (args, kwargs), is_leaf=stacked_lib.is_stacked
    )
    results = jax.tree.map(_as_array, fn(*args, **kwargs))
    return jax.tree.map(_with_shard_axis, results)

  # The map does not check types, because a loss that is written for one device
  # has constants in the carries of its loops, which JAX types as the same on
  # all shards.
  specs = [s if s is None else P(axes) if s else P() for s in splits]
  explaining = mapping.explaining_closures(
      'The loss of `value_and_grad`',
      'Pass them to the function as keyword arguments, or make them inside the'
      ' loss.',
  )
  with explaining:
    return mapping.call(
        of_shard,
        treedef.unflatten(leaves),
        specs,
        P(axes),
        mesh,
        axes,
        check_vma=False,
    )


# Constants need devices, and an abstract mesh has devices only under tracing.
@jax.jit
def mean_loss(losses: jax.Array, weight: jax.Array | None = None) -> jax.Array:
  """Returns the (weighted) mean of the losses [shards]."""
  if weight is None:
    return jnp.mean(losses)
  weighed = jax.vmap(lambda w, x: weights.scale_by_weight(w)(x))(weight, losses)
  divisor = weights.safe_divisor(jnp.sum(weight))
  return jnp.sum(weighed) / divisor.astype(losses.dtype)


def _with_shard_axis(x):
  return lax.expand_dims(x, (0,)) if isinstance(x, jax.Array) else x


def _as_array(x):
  is_number = leaves_lib.dtype_of_number(x) is not None
  return jnp.asarray(x) if is_number and not leaves_lib.is_float0(x) else x
