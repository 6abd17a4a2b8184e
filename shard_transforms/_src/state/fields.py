"""Fields of state: traversal, comparison, and rules for sharded fields."""

from collections.abc import Callable
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from shard_transforms._src.base import divisions
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import states

Path = tuple[Any, ...]
# Takes a node of a state and the node at the same position in a similar state.
RulesOf = Callable[[Any, Any], Mapping[str, states.Rule]]


def map_fields(
    fn: Callable[..., Any],
    rules_of: RulesOf,
    state: Any,
    like: Any,
    path: Path = (),
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

  def map_node(subpath, node, like):
    node_path = (*path, *subpath)
    if not states.declares(node):
      return fn(node_path, states.Rule(), node, like)

    def is_child(x):
      return x is not node and x is not like

    check_same_structure(leaves_lib.name_of(node_path), node, like, is_child)
    rules = rules_of(node, like)

    def map_field(key, field, like):
      # Only the fields of a class have names.
      rule = rules.get(getattr(key[0], 'name', ''))
      field_path = (*node_path, *key)
      if rule is None:
        return map_fields(fn, rules_of, field, like, field_path)
      return fn(field_path, rule, field, like)

    return jax.tree.map_with_path(map_field, node, like, is_leaf=is_child)

  name = leaves_lib.name_of(path)
  check_same_structure(name, state, like, states.declares)
  return jax.tree.map_with_path(map_node, state, like, is_leaf=states.declares)


def sharded_fields(
    rules_of: RulesOf, state: Any
) -> dict[Path, tuple[states.Rule, Any]]:
  """Returns the rules and values of the fields that can be unsharded."""
  by_path = {}

  def add(path, rule, field, _):
    if rule.unshard is not None:
      by_path[path] = rule, field

  map_fields(add, rules_of, state, state)
  return by_path


def sharded_rules_of(node: Any, _: Any) -> dict[str, states.Rule]:
  """Returns the rules of the fields of a node that can be unsharded."""
  rules = states.rules_of(node)
  return {name: rule for name, rule in rules.items() if rule.unshard}


def mismatch(name: str, got: Any, expected: Any, advice: str = '') -> str:
  """Returns the error message for a state of other parameters."""
  return (
      '`state` was not created by this transformation for these parameters: got'
      f' {got} instead of {expected} at {name}. Pass the `tx` and the `params`'
      f' with which the state was created.{advice}'
  )


def check_same_structure(
    name: str,
    state: Any,
    like: Any,
    is_leaf: Callable[[Any], bool] | None = None,
    advice: str = '',
) -> None:
  """Checks that a state has the expected tree.

  Raises:
    ValueError: If the trees differ.
  """
  trees = [jax.tree.structure(x, is_leaf=is_leaf) for x in (state, like)]
  if trees[0] != trees[1]:
    got, expected = map(jax.tree.structure, (state, like))
    raise ValueError(mismatch(name, f'the tree {got}', expected, advice))


def check_same_types(
    name: str, state: Any, like: Any, advice: str = ''
) -> None:
  """Checks that a state has the expected tree, with leaves of these types.

  Raises:
    TypeError: If the dtypes differ.
    ValueError: If the trees or the shapes differ.
  """
  check_same_structure(name, state, like, advice=advice)

  def check(path, leaf, like):
    leaf_name = name + jax.tree_util.keystr(path)
    if jnp.shape(leaf) != like.shape:
      got = f'the shape {jnp.shape(leaf)}'
      raise ValueError(mismatch(leaf_name, got, like.shape, advice))
    check_dtype(leaf_name, leaf, like)

  jax.tree.map_with_path(check, state, like)


def check_dtype(name: str, leaf: Any, like: Any) -> None:
  """Checks that a leaf has the expected dtype.

  Raises:
    TypeError: If the dtypes differ.
  """
  dtype = leaves_lib.dtype_of(leaf)
  if dtype != like.dtype:
    raise TypeError(mismatch(name, dtype.name, like.dtype.name))


def types_of(tree: Any) -> list[tuple[tuple[int, ...], Any]]:
  """Returns the shapes and dtypes of the leaves of a tree."""
  return [(jnp.shape(x), leaves_lib.dtype_of(x)) for x in jax.tree.leaves(tree)]


def leaf_rule(
    unshard: Callable[[Any, Any], Any], shard: Callable[[Any, Any], Any]
) -> states.Rule:
  """Returns a rule that unshards and shards each leaf of a field.

  Args:
    unshard: Takes a leaf and its type on one shard. Returns the leaf in the
      shape of this type, or `None` if the shapes do not match.
    shard: The inverse of `unshard`: takes the unsharded leaf, and its type on
      the new shards.

  Raises:
    ValueError: In `unshard` of the rule, if a field has another tree, or a leaf
      does not fit the shape on one shard.
  """

  def unshard_field(field, one_shard, name):
    check_same_structure(name, field, one_shard)

    def unshard_leaf(path, leaf, like):
      if jnp.shape(leaf) == like.shape:
        return leaf
      unsharded = unshard(leaf, like)
      if unsharded is None:
        leaf_name = name + jax.tree_util.keystr(path)
        got = f'the shape {jnp.shape(leaf)}'
        advice = ' A state that is divided by `groups` cannot be unsharded.'
        raise ValueError(mismatch(leaf_name, got, like.shape, advice))
      return unsharded

    return jax.tree.map_with_path(unshard_leaf, field, one_shard)

  def shard_field(field, target):
    return jax.tree.map(shard, field, target)

  return states.Rule(unshard=unshard_field, shard=shard_field)


def _without_padding(leaf, like):
  """Removes the padding of a leaf; `None` if the shapes do not match."""
  if not like.shape or not divisions.may_be_padded(jnp.shape(leaf), like.shape):
    return None
  return divisions.cropped(leaf, like.shape)


# The slices of `shard_update`, divided along dimensions or flattened.
SLICES = leaf_rule(
    _without_padding, lambda leaf, like: divisions.padded(leaf, like.shape)
)
