"""Per-shard gradients under plain `jax.jit`, where no axis is mapped."""

from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Hashable
from collections.abc import Sequence
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import mapping
from shard_transforms._src.base import stacked as stacked_lib
from shard_transforms._src.base import weights
from shard_transforms._src.transforms import split_arguments


def stacked_value_and_grad(
    grad_fn: Callable[..., tuple[Any, Any]],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    axes: tuple[Hashable, ...],
    mesh: mapping.AnyMesh,
    argnums: Collection[int],
    in_axes: Sequence[Any] | None,
    is_weighted: bool,
) -> tuple[Any, stacked_lib.Stacked]:
  """Returns the mean loss, and the gradients of all shards as a `Stacked`.

  Args:
    grad_fn: A function of the arguments of one shard, called inside a map over
      `axes`, that returns the pair (value, gradient). The value is the loss, or
      a tuple of the loss and other results.
    args: Global positional arguments. For a `Stacked`, `grad_fn` receives the
      entry of its shard.
    kwargs: Global keyword arguments.
    axes: The axes of the mesh over which the batch is sharded.
    mesh: The mesh.
    argnums: The positions of the parameters.
    in_axes: As in `value_and_grad`.
    is_weighted: Whether the second result is the weight of the shard.
  """
  splits = split_arguments.split_arguments(
      args, kwargs, axes, mesh, argnums, in_axes
  )
  leaves, treedef = jax.tree.flatten((args, kwargs))

  def of_shard(args, kwargs):
    args, kwargs = jax.tree.map(
        stacked_lib.shard_value, (args, kwargs), is_leaf=stacked_lib.is_stacked
    )
    return jax.tree.map(_with_shard_axis, grad_fn(*args, **kwargs))

  explaining = mapping.translate_closure_error(
      'The loss of `value_and_grad`',
      'Pass them to the function as keyword arguments, or make them inside the'
      ' loss.',
  )
  with mapping.set_if_explicit(mesh), explaining:
    leaves = map(functools.partial(mapping.reshard, axes), leaves, splits)
    # The map does not check types, because a loss that is written for one
    # device has constants in the carries of its loops, which JAX types as the
    # same on all shards.
    value, grads = mapping.call(
        of_shard,
        treedef.unflatten(leaves),
        in_specs=treedef.unflatten([P(axes) if x else P() for x in splits]),
        out_specs=P(axes),
        mesh=mesh,
        axes=axes,
        check_vma=False,
    )
    grads = stacked_lib.Stacked(grads, axes, is_weighted)
    if not isinstance(value, tuple):
      return _mean_loss(value), grads
    losses, *others = value
    loss = _mean_loss(losses, others[0] if is_weighted else None)
    return (loss, *others), grads


def _with_shard_axis(x):
  # JAX returns float0 gradients as arrays, and does not convert others.
  if leaves_lib.dtype_of_number(x) is not None and not leaves_lib.is_float0(x):
    x = jnp.asarray(x)
  return lax.expand_dims(x, (0,)) if isinstance(x, jax.Array) else x


# Constants need devices, and an abstract mesh has devices only under tracing.
@jax.jit
def _mean_loss(losses, weight=None):
  """Returns the (weighted) mean of the losses [shards]."""
  if weight is None:
    return jnp.mean(losses)
  weighed = jax.vmap(lambda w, x: weights.scale_by_weight(w)(x))(weight, losses)
  divisor = weights.safe_divisor(jnp.sum(weight))
  return jnp.sum(weighed) / divisor.astype(losses.dtype)
