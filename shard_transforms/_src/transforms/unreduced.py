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
        f'`{caller}` got updates that are unreduced over different axes:'
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
  weight = 1.0 if weight is None else weight

  # In one `jax.jit`, so that weights that are not on devices are placed with
  # the gradients.
  @jax.jit
  def stack_all(terms, weight):
    weight = jnp.broadcast_to(weights.sanitized(weight), (num_shards,))
    factors = jnp.where(weight > 0, jnp.sum(weight) / weight, 0)
    factors = mapping.reshard(axes, factors, is_split=True)

    def stack(term):
      spec = jax.typeof(term).sharding.spec
      x = jax.shard_map(
          lambda x: x[None],
          in_specs=spec,
          out_specs=P(axes, *axes_lib.partitions(spec)),
          check_vma=False,
      )(term)
      return x * factors.astype(x.dtype).reshape(-1, *(1,) * term.ndim)

    return jax.tree.map(stack, terms)

  def with_empty(x, stack):
    if stack is None:
      return np.zeros((num_shards, *x.shape), x.dtype)
    return stack

  terms = jax.tree.map(lambda x: None if leaves_lib.is_float0(x) else x, tree)
  with mapping.set_if_explicit(mesh):
    stacks = stack_all(terms, weight)
  return stacked.Stacked(jax.tree.map(with_empty, tree, stacks), axes)
