"""Gradients of single shards where no axis is mapped, as under `jax.jit`."""

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
  """Returns the results of a function on all shards, [shards, ...].

  Args:
    fn: A function of `args` and `kwargs`, called where `axes` are mapped.
    axes: The axes of the mesh over which the batch is sharded.
    mesh: The mesh.
    args: Positional arguments. Of a `Stacked`, the function gets its own entry.
    kwargs: Keyword arguments.
    splits: For each leaf of both whether it is split; `None` for what is not an
      array, and stays as it is.
  """
  leaves, treedef = jax.tree.flatten((args, kwargs))
  if mesh.explicit_axes:
    leaves = [
        x if split is None else mapping.resharded(x, axes, split)
        for x, split in zip(leaves, splits, strict=True)
    ]

  def of_shard(args, kwargs):
    args, kwargs = jax.tree.map(
        stacked_lib.own, (args, kwargs), is_leaf=stacked_lib.is_stacked
    )
    results = jax.tree.map(_as_array, fn(*args, **kwargs))
    return jax.tree.map(_with_shard_axis, results)

  # Unchecked, because a loss that is written for one device has constants in
  # the carries of its loops, which JAX types as the same on all shards.
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


# Constants need devices, which an abstract mesh has only where JAX traces.
@jax.jit
def mean_loss(losses: jax.Array, weight: jax.Array | None = None) -> jax.Array:
  """Returns the mean of the losses [shards], by the weights if there are."""
  if weight is None:
    return jnp.mean(losses)
  weighed = jax.vmap(lambda w, x: weights.weighing(w)(x))(weight, losses)
  divisor = weights.safe_divisor(jnp.sum(weight))
  return jnp.sum(weighed) / divisor.astype(losses.dtype)


def _with_shard_axis(x):
  return lax.expand_dims(x, (0,)) if isinstance(x, jax.Array) else x


def _as_array(x):
  is_number = leaves_lib.dtype_of_number(x) is not None
  return jnp.asarray(x) if is_number and not leaves_lib.is_float0(x) else x
