"""Gradients that JAX types as unreduced: each device has one term of a sum."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import mapping
from shard_transforms._src.base import stacked
from shard_transforms._src.base import weights


def axes_of(tree: Any, caller: str) -> tuple[Any, ...]:
  """Returns the axes of the mesh over which leaves are unreduced.

  Raises:
    ValueError: If leaves are unreduced over different axes.
  """
  by_name = {
      leaves_lib.name_of(path): jax.typeof(x).sharding.spec.unreduced
      for path, x in jax.tree.leaves_with_path(tree)
      if not leaves_lib.is_float0(x)
  }
  if len(set(by_name.values())) > 1:
    names = {name: sorted(axes, key=str) for name, axes in by_name.items()}
    raise ValueError(
        f'`updates` of `{caller}` must all be unreduced over the same axes, got'
        f' {names}. Differentiate with respect to parameters that are all'
        ' typed `jax.P(..., reduced={...})`.'
    )
  unreduced = next(iter(by_name.values()), frozenset())
  return tuple(sorted(unreduced, key=str))


def to_stacked(
    tree: Any, axes: tuple[Any, ...], mesh: mapping.AnyMesh, weight: Any
) -> stacked.Stacked:
  """Converts unreduced gradients to a stack of the gradients of the shards.

  The term of a shard is its gradient divided by the number of shards or, with
  weights, multiplied by its fraction of the total weight. This factor is
  undone. Nothing is communicated.
  """
  num_shards = mapping.num_shards(mesh, axes)

  def stack(part, factors):
    spec = jax.typeof(part).sharding.spec
    to_leading = jax.shard_map(
        lambda x: x[None],
        in_specs=spec,
        out_specs=P(axes, *axes_lib.partitions(spec)),
        check_vma=False,
    )
    x = to_leading(part)
    if factors is None:
      return x * num_shards
    factor = factors.astype(x.dtype)
    return x * factor.reshape(num_shards, *(1,) * part.ndim)

  # In one `jax.jit`, so that weights that are not on devices are placed with
  # the gradients.
  @jax.jit
  def stack_all(parts, weight):
    factors = None
    if weight is not None:
      weight = jnp.broadcast_to(weights.sanitized(weight), (num_shards,))
      factors = jnp.where(weight > 0, jnp.sum(weight) / weight, 0)
      factors = mapping.resharded(factors, axes, is_split=True)
    return jax.tree.map(lambda part: stack(part, factors), parts)

  def with_empty(x, stack):
    if stack is None:
      return np.zeros((num_shards, *x.shape), x.dtype)
    return stack

  parts = jax.tree.map(lambda x: None if leaves_lib.is_float0(x) else x, tree)
  with mapping.in_use(mesh):
    stacks = stack_all(parts, weight)
  return stacked.Stacked(jax.tree.map(with_empty, tree, stacks), axes)
