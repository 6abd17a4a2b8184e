"""How a sharded part of a state gets the shapes of the replicated state."""

import math

import jax
from jax import lax
import jax.numpy as jnp

from shard_transforms._src.base import states


def made_for_others(got: str, name: str) -> str:
  """Returns what errors say of state that is made for other parameters."""
  return (
      '`state` must be made by this transformation for these parameters, got'
      f' {got} at {name}'
  )


def _join(slices, one_shard, name):
  """Returns leaves that were cut, in the shapes of one shard.

  Raises:
    ValueError: If they are slices of others.
  """
  found = jax.tree.structure(slices), jax.tree.structure(one_shard)
  if found[0] != found[1]:
    raise ValueError(
        f'{made_for_others(f"the tree {found[0]}", name)}, instead of'
        f' {found[1]}.'
    )

  def join(path, leaf, like):
    if jnp.shape(leaf) == like.shape:
      return leaf
    if not _are_slices(jnp.shape(leaf), like.shape):
      got = f'the shape {jnp.shape(leaf)}'
      at = name + jax.tree_util.keystr(path)
      raise ValueError(
          f'{made_for_others(got, at)}, which does not go into {like.shape}.'
      )
    # Padding after the last element never counts.
    return leaf.reshape(-1)[: math.prod(like.shape)].reshape(like.shape)

  return jax.tree.map_with_path(join, slices, one_shard)


def _are_slices(shape, whole):
  """Whether a shape is [slices, 1, ..., 1, elements] of such a leaf."""
  if not whole or not math.prod(shape):
    return False
  # What has a leading axis of shards on one shard has no further one.
  ranks = {len(whole), len(whole) + 1} if whole[0] == 1 else {len(whole) + 1}
  elements = -(-math.prod(whole) // shape[0])
  kept = (shape[0], *(1,) * (len(shape) - 2), elements)[: len(shape)]
  return len(shape) in ranks and shape == kept


def _cut(full, target):
  def cut(leaf, like):
    if leaf.shape == like.shape:
      return leaf
    flat = jnp.pad(leaf.ravel(), (0, math.prod(like.shape) - leaf.size))
    return lax.reshape(flat, like.shape)

  return jax.tree.map(cut, full, target)


# Each shard has a slice of each leaf, as of `shard_update`: [slices, 1, ..., 1,
# elements], flattened and padded at its end.
SLICES = states.Rule(full=_join, place=_cut)
