"""Traversal of the fields of a state and of the rules declared for them."""

from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from shard_transforms._src.base import full_rules
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import states
from shard_transforms._src.state import copies


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


def resize_rules_of(
    node: Any, like: Any, reduction: states.Reduction | None
) -> dict[str, states.Rule]:
  """Returns the rules of the fields of a node that are resized.

  Raises:
    TypeError: If the `resize` function of a rule does not return a `Rule`.
    ValueError: If part of the state is on other processes.
  """
  rules = {
      name: rule
      for name, rule in states.rules_of(node).items()
      if rule.resize != 'keep'
  }
  changed = {
      name
      for name in rules
      if types_of(getattr(node, name)) != types_of(getattr(like, name))
  }
  if not changed:
    return {}
  # Rules may depend on values.
  if not all(map(copies.is_here, jax.tree.leaves(node))):
    copies.refuse_elsewhere(type(node).__name__)
  for name, rule in rules.items():
    if callable(rule.resize):
      rules[name] = rule.resize(node, reduction)
      states.check_rule(node, name, rules[name])
  begun = {name for name, rule in rules.items() if rule.resize == 'reset'}
  # If only fields that begin anew have changed, the parameters differ, and not
  # the number of shards. Such fields are not initialized again.
  return rules if changed - begun else {}


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
        f'{full_rules.made_for_others(got, leaves_lib.name_of(path))} instead'
        f' of {jax.tree.structure(like)}.'
    )


def check_dtype(name: str, leaf: Any, like: Any) -> None:
  """Checks that a leaf has the expected dtype.

  Raises:
    TypeError: If the dtypes differ.
  """
  dtype = copies.dtype_of(leaf)
  if dtype != like.dtype:
    got = f'{dtype.name} instead of {like.dtype.name}'
    raise TypeError(f'{full_rules.made_for_others(got, name)}.')


def types_of(tree: Any) -> list[tuple[tuple[int, ...], Any]]:
  """Returns the shapes and dtypes of the leaves of a tree."""
  return [(jnp.shape(x), copies.dtype_of(x)) for x in jax.tree.leaves(tree)]


def without_shardings(tree: Any) -> Any:
  """Returns the types of a tree of arrays, without their shardings."""
  return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
