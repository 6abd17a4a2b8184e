"""How a sharded part of a state gets the shapes of the replicated state."""

import math

import jax
from jax import lax
import jax.numpy as jnp

from shard_transforms._src.base import divisions
from shard_transforms._src.base import states


def made_for_others(got: str, name: str) -> str:
  """Returns what errors say of state that is made for other parameters."""
  return (
      '`state` must be made by this transformation for these parameters, got'
      f' {got} at {name}'
  )


def _rule(join, place):
  """Returns the rule of a part whose leaves are joined, and placed again.

  Args:
    join: Takes a leaf and its type on one shard; returns it in that shape, or
      `None` if it is of another.
    place: Its reverse: takes the full leaf, and its type on the new shards.
  """

  def full(slices, one_shard, name):
    found = jax.tree.structure(slices), jax.tree.structure(one_shard)
    if found[0] != found[1]:
      raise ValueError(
          f'{made_for_others(f"the tree {found[0]}", name)}, instead of'
          f' {found[1]}.'
      )

    def full_leaf(path, leaf, like):
      whole = leaf if jnp.shape(leaf) == like.shape else join(leaf, like)
      if whole is None:
        got = f'the shape {jnp.shape(leaf)}'
        at = name + jax.tree_util.keystr(path)
        raise ValueError(
            f'{made_for_others(got, at)}, which does not go into {like.shape}.'
        )
      return whole

    return jax.tree.map_with_path(full_leaf, slices, one_shard)

  return states.Rule(
      full=full, place=lambda part, target: jax.tree.map(place, part, target)
  )


def _crop(leaf, like):
  """Returns what a leaf has before the zeros at its ends."""
  if not like.shape or not divisions.is_padded(jnp.shape(leaf), like.shape):
    return None
  return divisions.cropped(leaf, like.shape)


def _unflatten(leaf, like):
  """Returns the leaf of flat slices; padding after its end never counts."""
  if not _are_slices(jnp.shape(leaf), like.shape):
    return None
  return leaf.reshape(-1)[: math.prod(like.shape)].reshape(like.shape)


def _are_slices(shape, whole):
  """Whether a shape is [slices, 1, ..., 1, elements] of such a leaf."""
  if not whole or not math.prod(shape):
    return False
  # What has a leading axis of shards on one shard has no further one.
  ranks = {len(whole), len(whole) + 1} if whole[0] == 1 else {len(whole) + 1}
  elements = -(-math.prod(whole) // shape[0])
  kept = (shape[0], *(1,) * (len(shape) - 2), elements)[: len(shape)]
  return len(shape) in ranks and shape == kept


def _flatten(leaf, like):
  if leaf.shape == like.shape:
    return leaf
  flat = jnp.pad(leaf.ravel(), (0, math.prod(like.shape) - leaf.size))
  return lax.reshape(flat, like.shape)


# Each leaf is divided as by `shard_update`: along its dimensions, or as a row
# of its elements.
DIVIDED = _rule(_crop, lambda leaf, like: divisions.padded(leaf, like.shape))

# Each shard has a flat slice of each leaf, [slices, 1, ..., 1, elements]; zeros
# are at its end.
SLICES = _rule(_unflatten, _flatten)
