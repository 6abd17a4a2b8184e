"""Sums and means of trees over shards, in the order of a balanced tree."""

from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.reduction import leaf_sums
from shard_transforms._src.reduction import sharded_reduction
from shard_transforms.contrib._src.reproducible import tree_sums


def check_power_of_two(name: str, value: int) -> None:
  """Checks that a number of summands is a power of two.

  Raises:
    ValueError: If it is not.
  """
  if value & (value - 1):
    least = 1 << (value.bit_length() - 1)
    raise ValueError(
        f'{name} must be a power of two, because summands are added in pairs,'
        f' got {value}. Use {least} or {2 * least}.'
    )


class TreeReduction(sharded_reduction.ShardedReduction):
  """A reduction over shards of the sums over their towers.

  The result is divided once, by the total weight of all towers of all shards.
  """

  def num_shards(self) -> int:
    """Returns the number of shards.

    Raises:
      NameError: If an axis is not bound.
      ValueError: If it is not a power of two.
    """
    num_shards = super().num_shards()
    check_power_of_two(f'The number of shards of `{self.caller}`', num_shards)
    return num_shards

  def sum_over(self, x: jax.Array, axes: tuple[Hashable, ...]) -> jax.Array:
    """Returns the sum of an array over the shards."""
    return tree_sums.psum(tree_sums.rounded(x), axes)

  def scatter_over(
      self, rows: jax.Array, axes: tuple[Hashable, ...]
  ) -> jax.Array:
    """Returns each shard's row of the sum of rows over the shards."""
    return tree_sums.scatter(tree_sums.rounded(rows), axes)

  def sends_in_rows(self, leaf: Any) -> bool:
    """Whether slices are sent as rows: always."""
    del leaf
    return True

  def axes_of_sums(self) -> tuple[Hashable, ...]:
    """Returns the axes over which an optimizer may sum over all slices."""
    # The bits of a sum over slices depend on the number of slices.
    return ()

  def total(self, weight: jax.Array | int) -> jax.Array:
    """Returns the total weight of all shards, float32 [].

    A static total is also returned as an array, so that the arithmetic is the
    same on any number of shards.

    Args:
      weight: The weight of this shard, float32 []; or an integer, if all shards
        have the same weight.
    """
    if isinstance(weight, int):
      return jnp.float32(weight * self.num_shards())
    return self.sum_over(axes_lib.to_varying(weight, self.axes), self.axes)

  def of_sums(
      self,
      sums: optax.Updates,
      total: jax.Array,
      like: optax.Updates,
      *,
      in_slices: bool = False,
  ) -> optax.Updates:
    """Returns the sum or mean of all towers, or each shard's slice of it.

    Args:
      sums: The sums of this shard; `None` where there is no gradient.
      total: The total weight of all shards.
      like: The updates of a tower, which determine the dtypes of the result.
      in_slices: Whether to return slices.
    """
    share = leaf_sums.Share(None, total)
    leaves, treedef = jax.tree.flatten(sums)
    with jax.named_scope(self.caller):
      if in_slices:
        reduced = self.scatter_leaves(leaves, share)
      else:
        reduced = self.reduce(leaves, share)
    return leaves_lib.tree_map(_finished, treedef.unflatten(reduced), like)


def _finished(x: Any, like: Any) -> Any:
  """Returns a reduced leaf, rounded, in the dtype of `like`."""
  if x is None or leaves_lib.is_float0(x):
    return like
  dtype = leaves_lib.dtype_of(like)
  return leaves_lib.as_dtype(tree_sums.rounded(x), dtype)
