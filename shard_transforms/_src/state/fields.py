"""Fields of state: traversal, comparison, and rules for sharded fields."""

from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from shard_transforms._src.base import divisions
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import states


def map_fields(
    fn: Callable[..., Any],
    rules_of: Callable[[Any, Any], Mapping[str, states.Rule]],
    state: Any,
    like: Any,
    path: tuple[Any, ...] = (),
) -> Any:
  """Maps the fields with a rule, and all other leaves, of a state.

  Args:
    fn: Takes a path, a rule, and the values at this path in `state` and in
      `like`. The values are fields with a declared rule, or leaves, which get
      the default rule.
    rules_of: Takes a node of `state` and the node at the same position in
      `like`, and returns the rules of the node.
    state: The state.
    like: A state with the same tree, except in fields with a rule.
    path: The path of the state.
  """

  def of_node(sub, node, like):
    here = (*path, *sub)
    if not states.declares(node):
      return fn(here, states.Rule(), node, like)

    def is_part(part):
      return part is not node and part is not like

    check_same_trees(here, node, like, is_part)
    rules = rules_of(node, like)

    def of_field(key, field, like):
      # Only the fields of a class have names.
      rule = rules.get(getattr(key[0], 'name', ''))
      if rule is None:
        return map_fields(fn, rules_of, field, like, (*here, *key))
      return fn((*here, *key), rule, field, like)

    return jax.tree.map_with_path(of_field, node, like, is_leaf=is_part)

  is_leaf = states.declares
  check_same_trees(path, state, like, is_leaf)
  return jax.tree.map_with_path(of_node, state, like, is_leaf=is_leaf)


def parts_of(
    rules_of: Callable[[Any, Any], Mapping[str, states.Rule]], state: Any
) -> dict[tuple[Any, ...], tuple[states.Rule, Any]]:
  """Returns the fields of a state that have a full form, by path.

  Args:
    rules_of: As for `map_fields`.
    state: The state.
  """
  parts = {}

  def note(path, rule, field, _):
    if rule.full is not None:
      parts[path] = rule, field

  map_fields(note, rules_of, state, state)
  return parts


def full_rules_of(node: Any, _: Any) -> dict[str, states.Rule]:
  """Returns the rules of the fields of a node that have a full form."""
  rules = states.rules_of(node)
  return {name: rule for name, rule in rules.items() if rule.full is not None}


def check_same_trees(
    path: tuple[Any, ...],
    state: Any,
    like: Any,
    is_leaf: Callable[[Any], bool] | None = None,
) -> None:
  """Checks that a state has the expected tree.

  Raises:
    ValueError: If the trees differ.
  """
  found = jax.tree.structure(state, is_leaf=is_leaf)
  expected = jax.tree.structure(like, is_leaf=is_leaf)
  if found != expected:
    got = f'the tree {jax.tree.structure(state)}'
    raise ValueError(
        f'{made_for_others(got, leaves_lib.name_of(path))} instead'
        f' of {jax.tree.structure(like)}.'
    )


def check_dtype(name: str, leaf: Any, like: Any) -> None:
  """Checks that a leaf has the expected dtype.

  Raises:
    TypeError: If the dtypes differ.
  """
  dtype = dtype_of(leaf)
  if dtype != like.dtype:
    got = f'{dtype.name} instead of {like.dtype.name}'
    raise TypeError(f'{made_for_others(got, name)}.')


def types_of(tree: Any) -> list[tuple[tuple[int, ...], Any]]:
  """Returns the shapes and dtypes of the leaves of a tree."""
  return [(jnp.shape(x), dtype_of(x)) for x in jax.tree.leaves(tree)]


def without_shardings(tree: Any) -> Any:
  """Returns the types of a tree of arrays, without their shardings."""
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def dtype_of(leaf: Any) -> Any:
  """Returns the dtype of a leaf, which may be a random key."""
  return getattr(leaf, 'dtype', None) or jnp.result_type(leaf)


def made_for_others(got: str, name: str) -> str:
  """Returns the error message for state that was made for other parameters."""
  return (
      '`state` must be made by this transformation for these parameters, got'
      f' {got} at {name}'
  )


def full_rule(
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
DIVIDED = full_rule(
    _crop, lambda leaf, like: divisions.padded(leaf, like.shape)
)
