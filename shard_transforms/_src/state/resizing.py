"""Resizing of per-shard state when the number of shards changes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shard_transforms._src.base import states
from shard_transforms._src.state import fields

_COMBINE = {'sum': np.sum, 'mean': np.sum, 'minimum': np.min, 'maximum': np.max}


def resize_rules_of(
    node: Any, like: Any, reduction: states.ResizeReduction | None
) -> dict[str, states.Rule]:
  """Returns the rules of the fields of a node that are resized.

  Raises:
    TypeError: If the `resize` function of a rule does not return a `Rule` or a
      function.
    ValueError: If part of the state is on other processes.
  """
  rules = {
      name: rule
      for name, rule in states.rules_of(node).items()
      if rule.resize != 'keep' or rule.reason
  }
  changed = {
      name
      for name in rules
      if fields.types_of(getattr(node, name))
      != fields.types_of(getattr(like, name))
  }
  if not changed:
    return {}
  # Rules may depend on values.
  for leaf in jax.tree.leaves(node):
    _check_addressable(leaf, type(node).__name__)
  for name, rule in rules.items():
    if callable(rule.resize):
      result = rule.resize(node, reduction)
      result = states.Rule(resize=result) if callable(result) else result
      states.check_rule(node, name, result)
      rules[name] = result
  reset = {name for name, rule in rules.items() if rule.resize == 'reset'}
  # If only fields that are reset have changed, the parameters differ, and not
  # the number of shards. Such fields are not initialized again.
  return rules if changed - reset else {}


def resized(
    rule: states.Rule, name: str, leaf: np.ndarray | jax.Array, like: Any
) -> np.ndarray | jax.Array:
  """Converts a leaf to another number of shards.

  Args:
    rule: The rule that is declared for the leaf.
    name: The name of the leaf, for error messages.
    leaf: The values of the leaf.
    like: The type of the leaf on the new shards, with its sharding.

  Raises:
    TypeError: If the leaf has another dtype.
    ValueError: If the leaf cannot be converted, is on other processes, or was
      created for other parameters, or if a function of the rule returns rows of
      another shape.
  """
  fields.check_dtype(name, leaf, like)
  if jnp.shape(leaf) == like.shape and rule.resize != 'reset':
    return leaf
  _check_addressable(leaf, name)
  if rule.resize == 'reset':
    empty = 0 if rule.empty is None else rule.empty
    return np.full(like.shape, empty, leaf.dtype)
  if rule.reason:
    raise ValueError(rule.reason.replace('{name}', name))
  if not _are_rows(leaf, like):
    got = f'the shape {leaf.shape}'
    raise ValueError(fields.mismatch(name, got, like.shape))
  if rule.resize == 'keep':
    raise ValueError(
        f'{name} has the shape {leaf.shape} instead of {like.shape}: its shape'
        ' depends on the number of shards, but the class of the state does not'
        ' declare a rule for it. Declare a `state_rules.Rule` in `rules` of the'
        ' class, continue with as many shards as before, or create this part of'
        ' the state again with `init_state`.'
    )
  num_shards = like.shape[0]
  if isinstance(leaf, jax.Array) and is_key(leaf):
    return _resized_keys(leaf, num_shards)
  if callable(rule.resize):
    rows = np.asarray(rule.resize(leaf, num_shards))
    if rows.shape not in (like.shape, like.shape[1:]):
      raise ValueError(
          f'The function that the rule of {name} declares as `resize` must'
          f' return rows of the shape {like.shape}, or one row of the shape'
          f' {like.shape[1:]}, got the shape {rows.shape}.'
      )
  else:
    rows = _merged_or_extended(rule, leaf, num_shards)
  if rows.dtype.kind == 'f' and not jnp.issubdtype(leaf.dtype, jnp.inexact):
    rows = np.rint(rows)
  return np.broadcast_to(rows, like.shape).astype(leaf.dtype)


def _resized_keys(keys, num_shards):
  """Returns a random key for each shard.

  If the keys of the shards differ, every added shard gets a new key. If all
  shards have the same key, added shards get this key, too.
  """
  data = np.asarray(jax.random.key_data(keys))
  repetition, row = np.divmod(np.arange(num_shards), len(data))
  repeated = jax.random.wrap_key_data(
      jnp.asarray(data[row]), impl=jax.random.key_impl(keys)
  )
  is_new = (repetition > 0) & np.any(data != data[:1])
  new_keys = jax.vmap(jax.random.fold_in)(repeated, repetition)
  return jnp.where(is_new, new_keys, repeated)


def _merged_or_extended(rule, rows, num_shards):
  """Combines the rows of neighbouring shards, or adds empty rows."""
  combine = _COMBINE[rule.resize]
  if num_shards > len(rows):
    empty = rule.empty
    if empty is None:
      empty = 0 if combine is np.sum else combine(rows, axis=0)
    shape = num_shards - len(rows), *rows.shape[1:]
    added = np.broadcast_to(empty, shape).astype(rows.dtype)
    new_rows = np.concatenate([rows, added])
  else:
    parts = np.array_split(rows, num_shards)
    new_rows = np.stack([combine(part, axis=0) for part in parts])
  # The mean over the new shards divides by another number of shards.
  is_mean = rule.resize == 'mean'
  return new_rows * (num_shards / len(rows)) if is_mean else new_rows


def _are_rows(leaf, like):
  """Whether two leaves have equal rows along a leading axis of shards."""
  same_rows = leaf.ndim == like.ndim and leaf.shape[1:] == like.shape[1:]
  is_sharded = any(like.sharding.spec[:1])
  return (
      same_rows and is_sharded and like.sharding.shard_shape(like.shape)[0] == 1
  )


def _check_addressable(leaf, name):
  """Checks that this process can read the whole leaf.

  Raises:
    ValueError: If part of the leaf is on other processes.
  """
  if not is_addressable(leaf):
    raise ValueError(
        f'{name} is partly on other processes, but the number of shards'
        ' changes, so its values must be read. Restore the checkpoint as NumPy'
        ' arrays.'
    )


def is_addressable(leaf: Any) -> bool:
  """Whether this process can read the whole leaf."""
  if not isinstance(leaf, jax.Array):
    return True
  return leaf.is_fully_addressable or leaf.is_fully_replicated


def is_key(leaf: Any) -> bool:
  """Whether a leaf is a random key or an array of random keys."""
  return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
