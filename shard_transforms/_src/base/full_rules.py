"""Rules that convert sharded state to the shapes of the replicated state."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from shard_transforms._src.base import divisions
from shard_transforms._src.base import states


def made_for_others(got: str, name: str) -> str:
  """Returns the error message for state that was made for other parameters."""
  return (
      '`state` must be made by this transformation for these parameters, got'
      f' {got} at {name}'
  )


def rule(
    join: Callable[[Any, Any], Any], place: Callable[[Any, Any], Any]
) -> states.Rule:
  """Returns a rule that joins the leaves of a field, and places them again.

  Args:
    join: Takes a leaf and its type on one shard. Returns the leaf in the shape
      of this type, or `None` if the shapes do not match.
    place: The inverse of `join`: takes the full leaf, and its type on the new
      shards.

  Raises:
    ValueError: In `full` of the rule, if a field has another tree, or a leaf
      cannot be joined to the shape on one shard.
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
  """Removes the padding of a leaf; `None` if the shapes do not match."""
  if not like.shape or not divisions.is_padded(jnp.shape(leaf), like.shape):
    return None
  return divisions.cropped(leaf, like.shape)


# Divides each leaf like `shard_update`: along its dimensions, or flattened.
DIVIDED = rule(_crop, lambda leaf, like: divisions.padded(leaf, like.shape))
