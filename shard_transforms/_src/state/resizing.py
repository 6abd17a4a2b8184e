"""Resizing of per-shard state when the number of shards changes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shard_transforms._src.base import states
from shard_transforms._src.state import fields

_COMBINE = {'sum': np.sum, 'mean': np.sum, 'minimum': np.min, 'maximum': np.max}


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
      if fields.types_of(getattr(node, name))
      != fields.types_of(getattr(like, name))
  }
  if not changed:
    return {}
  # Rules may depend on values.
  if not all(map(is_here, jax.tree.leaves(node))):
    refuse_elsewhere(type(node).__name__)
  for name, rule in rules.items():
    if callable(rule.resize):
      rules[name] = rule.resize(node, reduction)
      states.check_rule(node, name, rules[name])
  begun = {name for name, rule in rules.items() if rule.resize == 'reset'}
  # If only fields that begin anew have changed, the parameters differ, and not
  # the number of shards. Such fields are not initialized again.
  return rules if changed - begun else {}


def apply_rule(
    rule: states.Rule, name: str, old: np.ndarray | jax.Array, target: Any
) -> np.ndarray | jax.Array:
  """Converts a leaf to another number of shards.

  Args:
    rule: The rule that is declared for the leaf.
    name: The name of the leaf, for error messages.
    old: The values of the leaf.
    target: The new shape and sharding of the leaf.

  Raises:
    ValueError: If the leaf cannot be converted, or was made for other
      parameters.
  """
  if rule.resize == 'reset':
    empty = 0 if rule.empty is None else rule.empty
    return np.full(target.shape, empty, old.dtype)
  if rule.resize != 'error' and not _are_rows(old, target):
    got = f'the shape {old.shape}'
    raise ValueError(
        f'{fields.made_for_others(got, name)}, which does not go into'
        f' {target.shape}.'
    )
  if rule.resize in ('keep', 'error'):
    raise ValueError(_reason(rule, name, old, target))
  if isinstance(old, jax.Array) and is_key(old):
    return _keys(old, target.shape[0])
  if rule.resize == 'average':
    resized = _average(rule, old)
  elif rule.resize == 'split':
    resized = _share(rule, old, target.shape[0])
  else:
    resized = _merge(rule, old, target.shape[0])
  if resized.dtype.kind == 'f' and not jnp.issubdtype(old.dtype, jnp.inexact):
    resized = np.rint(resized)
  return np.broadcast_to(resized, target.shape).astype(old.dtype)


def _keys(old, num_shards):
  """Returns a random key for each shard.

  If the keys of the shards differ, every added shard gets a new key. If all
  shards have the same key, added shards get this key, too.
  """
  data = np.asarray(jax.random.key_data(old))
  turn, row = np.divmod(np.arange(num_shards), len(data))
  bits = jnp.asarray(data[row])
  keys = jax.random.wrap_key_data(bits, impl=jax.random.key_impl(old))
  is_new = (turn > 0) & np.any(data != data[:1])
  return jnp.where(is_new, jax.vmap(jax.random.fold_in)(keys, turn), keys)


def _reason(rule, name, old, target):
  """Returns the reason why a leaf cannot be converted, for the error."""
  if rule.reason:
    return rule.reason.replace('{name}', name)
  return (
      'A leaf that depends on the number of shards must have a rule, got none'
      f' and the shape {old.shape} instead of {target.shape} at {name}. Go on'
      ' with as many shards as before, or start this part again with'
      ' `init_state`.'
  )


def _merge(rule, old, num_shards):
  """Combines the rows of neighbouring shards, or adds empty rows."""
  combine = _COMBINE[rule.resize]
  if num_shards > len(old):
    empty = rule.empty
    if empty is None:
      empty = 0 if combine is np.sum else combine(old, axis=0)
    rows = np.broadcast_to(empty, (num_shards - len(old), *old.shape[1:]))
    merged = np.concatenate([old, rows.astype(old.dtype)])
  else:
    parts = np.array_split(old, num_shards)
    merged = np.stack([combine(part, axis=0) for part in parts])
  # The mean over the new shards divides by another number of shards.
  return merged * (num_shards / len(old)) if rule.resize == 'mean' else merged


def _share(rule, old, num_shards):
  """Returns an equal part of the weighted sum of all rows."""
  weights = np.ones(len(old)) if rule.row_weights is None else rule.row_weights
  return np.tensordot(weights, old.astype(np.float64), 1) / num_shards


def _average(rule, old):
  """Returns the weighted mean of all finite rows."""
  # The mean of equal rows must be bitwise equal to them.
  if np.all(old == old[:1]):
    return old[0]
  is_finite = np.isfinite(old.reshape(len(old), -1)).all(axis=-1)
  counts = is_finite if is_finite.any() else np.ones(len(old), bool)
  weights = rule.row_weights
  if weights is None or not np.any(weights[counts]):
    weights = np.ones(len(old))
  return np.average(old[counts], axis=0, weights=weights[counts])


def _are_rows(old, target):
  """Whether `old` and `target` have a leading axis of shards and equal rows."""
  is_same = old.ndim == target.ndim and old.shape[1:] == target.shape[1:]
  is_sharded = any(target.sharding.spec[:1])
  return (
      is_same
      and is_sharded
      and target.sharding.shard_shape(target.shape)[0] == 1
  )


def refuse_elsewhere(name: str) -> None:
  """Raises because part of a state to be resized is on other processes.

  Raises:
    ValueError: Always.
  """
  raise ValueError(
      '`state` must be on this process where the number of shards changes, got'
      f' a part of {name}. Restore it as arrays of NumPy.'
  )


def is_here(leaf: Any) -> bool:
  """Whether this process can read the whole leaf."""
  if not isinstance(leaf, jax.Array):
    return True
  return leaf.is_fully_addressable or leaf.is_fully_replicated


def is_key(leaf: Any) -> bool:
  """Whether a leaf is a random key or an array of random keys."""
  return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
