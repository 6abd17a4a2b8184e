"""How a sharded part of a state gets the shapes of the replicated state."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from shard_transforms._src.base import divisions
from shard_transforms._src.base import states


def made_for_others(got: str, name: str) -> str:
  """Returns what errors say of state that is made for other parameters."""
  return (
      '`state` must be made by this transformation for these parameters, got'
      f' {got} at {name}'
  )


def rule(
    join: Callable[[Any, Any], Any], place: Callable[[Any, Any], Any]
) -> states.Rule:
  """Returns the rule of a part whose leaves are joined, and placed again.

  Args:
    join: Takes a leaf and its type on one shard; returns it in that shape, or
      `None` if it is of another.
    place: Its reverse: takes the full leaf, and its type on the new shards.

  Raises:
    ValueError: In `full` of the rule, if a part is of another tree, or a leaf
      of a shape that is not joined.
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
            ' State that `groups` divide has no full form.'
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


# Each leaf is divided as by `shard_update`: along its dimensions, or as a row
# of its elements.
DIVIDED = rule(_crop, lambda leaf, like: divisions.padded(leaf, like.shape))
