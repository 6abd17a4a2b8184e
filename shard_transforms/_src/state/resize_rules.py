"""How a leaf of a state is resized to another number of shards."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from shard_transforms._src.base import state_rules

MADE_FOR_OTHERS = (
    '`state` of `resize_state` must be made by this transformation for these'
    ' parameters, got '
)
_COMBINE = {'sum': np.sum, 'mean': np.sum, 'minimum': np.min, 'maximum': np.max}


def apply(
    rule: state_rules.ResizeRule, name: str, old: np.ndarray, target: Any
) -> np.ndarray:
  """Returns the values of a leaf for another number of shards.

  Args:
    rule: How it is resized.
    name: Its name in errors.
    old: Its values.
    target: Its new shape and sharding.

  Raises:
    ValueError: If it cannot be carried over, or was not made for the same
      parameters.
  """
  match rule.kind:
    case 'begin_anew':
      empty = 0 if rule.empty is None else rule.empty
      return np.full(target.shape, empty, old.dtype)
    case 'cut_anew':
      return _cut_anew(name, old, target)
    case 'keep' | 'refuse':
      _refuse(rule, name, old, target)
    case 'average':
      return _average(rule, name, old, target)
  return _merge(rule, name, old, target)


def check_not_cut(name: str, old: np.ndarray, target: Any) -> None:
  """Checks that a leaf is not a slice.

  Raises:
    ValueError: If it is.
  """
  # Slices of the same shape may be of other parts of a sharded parameter.
  if _has_rows(target) or old.ndim != target.ndim:
    raise ValueError(
        '`in_specs` of `resize_state` must not shard parameters of which'
        f' `shard_update` keeps slices, got {old.shape} at {name}. Go on with'
        ' the same mesh, or begin anew with `init_state`.'
    )
  _check_fits(old.shape == target.shape, name, old, target)


def _refuse(rule, name, old, target):
  """Raises with the reason why a leaf cannot be carried over.

  Raises:
    ValueError: Always.
  """
  _check_fits(_are_rows(old, target), name, old, target)
  if rule.reason:
    raise ValueError(rule.reason.replace('{name}', name))
  raise ValueError(
      '`resize_state` must know what a leaf is that depends on the number of'
      f' shards, got the shape {old.shape} instead of {target.shape} at {name},'
      ' of which it does not. Go on with as many as before, or begin this'
      ' part anew with `init_state`.'
  )


def _merge(rule, name, old, target):
  """Combines the rows of neighbouring shards, or adds empty ones."""
  _check_fits(_are_rows(old, target), name, old, target)
  combine = _COMBINE[rule.kind]
  num_new = target.shape[0] - len(old)
  if num_new > 0:
    rows = np.broadcast_to(_empty(rule, old), (num_new, *old.shape[1:]))
    merged = np.concatenate([old, rows.astype(old.dtype)])
  else:
    parts = np.array_split(old, target.shape[0])
    merged = np.stack([combine(part, axis=0) for part in parts])
  if rule.kind == 'mean':
    # The new mean divides by another number of shards.
    is_exact = not jnp.issubdtype(old.dtype, jnp.inexact)
    factor = np.asarray(len(merged) / len(old), None if is_exact else old.dtype)
    merged = np.rint(merged * factor) if is_exact else merged * factor
  return merged.astype(old.dtype)


def _average(rule, name, old, target):
  """Returns the mean of all rows that are finite in place of each row."""
  _check_fits(_are_rows(old, target), name, old, target)
  rows = old.reshape(len(old), -1)
  row = rows[0]
  # Equal rows keep their bits.
  if not np.all(rows == row):
    is_finite = np.isfinite(rows).all(axis=-1)
    counts = is_finite if is_finite.any() else np.ones(len(old), bool)
    weights = rule.row_weights
    if weights is None or not np.any(weights[counts]):
      weights = np.ones(len(old))
    row = np.average(rows[counts], axis=0, weights=weights[counts])
    if not jnp.issubdtype(old.dtype, jnp.inexact):
      row = np.rint(row)
  return np.broadcast_to(row.reshape(old.shape[1:]), target.shape).astype(
      old.dtype
  )


def _empty(rule, old):
  """Returns what a shard that is added begins with."""
  if rule.empty is not None:
    return rule.empty
  if rule.kind in ('minimum', 'maximum'):
    return _COMBINE[rule.kind](old, axis=0)
  return 0


def _cut_anew(name, old, target):
  """Joins the slices of a leaf, and slices it again."""
  _check_fits(_are_of_one_leaf(old, target), name, old, target)
  # Padding after the last element of the leaf never counts.
  flat = np.pad(np.ravel(old), (0, target.size))[: target.size]
  return flat.reshape(target.shape)


def _check_fits(fits, name, old, target):
  """Checks that a leaf may have been made for the same parameters."""
  if not fits:
    raise ValueError(
        f'{MADE_FOR_OTHERS}the shape {old.shape} at {name}, which does not go'
        f' into {target.shape}.'
    )


def _has_rows(target):
  """Whether a leaf has a leading axis of shards."""
  is_sharded = any(target.sharding.spec[:1])
  return is_sharded and target.sharding.shard_shape(target.shape)[0] == 1


def _are_rows(old, target):
  is_same = old.ndim == target.ndim and old.shape[1:] == target.shape[1:]
  return is_same and _has_rows(target)


def _are_of_one_leaf(old, target):
  """Whether both can be slices of one leaf, or one the leaf of the other."""
  is_cut = _has_rows(target)
  # A single element is its own slice, without a further axis.
  can_be_one = old.ndim == target.ndim and (is_cut or target.size == 1)
  if can_be_one and {*old.shape[1:], *target.shape[1:]} <= {1}:
    return True
  rank = target.ndim - is_cut
  if {rank, old.ndim, target.ndim} != {rank, rank + 1} or not rank:
    return False
  if old.ndim > rank and set(old.shape[1:-1]) - {1}:
    return False
  # Each shard but the first can have one element of padding.
  fewest = [x.size - (x.shape[0] - 1) * (x.ndim > rank) for x in (old, target)]
  return max(fewest) <= min(old.size, target.size)
