"""How a leaf that depends on the number of shards fits another number.

A rule takes the name of a leaf, its old values, and its new shape and sharding,
and returns its new values.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

MADE_FOR_OTHERS = (
    '`state` of `resize_state` must be made by this transformation for these'
    ' parameters, got '
)


def refuse(name: str, old: np.ndarray, target: Any) -> np.ndarray:
  """Says why a leaf cannot be carried over.

  Raises:
    ValueError: Always.
  """
  _check_fits(_are_rows(old, target), name, old, target)
  raise ValueError(
      '`resize_state` must know what a leaf is that depends on the number of'
      f' shards, got the shape {old.shape} instead of {target.shape} at {name},'
      ' of which it does not. Go on with as many as before, or begin this'
      ' part anew with `init_state`.'
  )


def begin_anew(name: str, old: np.ndarray, target: Any) -> np.ndarray:
  """Returns zeros."""
  del name
  return np.zeros(target.shape, old.dtype)


def refuse_cut(name: str, old: np.ndarray, target: Any) -> np.ndarray:
  """Returns a leaf that is not cut.

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
  return old


def merge(
    combine: Callable[..., Any],
    empty: Any,
    name: str,
    old: np.ndarray,
    target: Any,
) -> np.ndarray:
  """Combines the rows of neighbouring shards, or adds empty ones.

  Raises:
    ValueError: If they are not of the same parameters.
  """
  _check_fits(_are_rows(old, target), name, old, target)
  num_new = target.shape[0] - len(old)
  if num_new > 0:
    rows = np.full((num_new, *old.shape[1:]), empty, old.dtype)
    return np.concatenate([old, rows])
  parts = np.array_split(old, target.shape[0])
  return np.stack([combine(part, axis=0) for part in parts]).astype(old.dtype)


def merge_unweighted(
    reduction: str | None, name: str, old: np.ndarray, target: Any
) -> np.ndarray:
  """Merges the totals of a window that has no weights.

  Raises:
    ValueError: If it is not known how they are reduced, or they are not of the
      same parameters.
  """
  if reduction is None:
    raise ValueError(
        "`reduction` of `resize_state` must be 'mean', 'sum' or 'weighted', got"
        f' None: the window that was begun without weights, at {name}, ends'
        ' with the same result only if it is known how its shards are reduced.'
    )
  merged = merge(np.sum, 0, name, old, target)
  # A mean will divide by another number of shards.
  factor = len(merged) / len(old) if reduction == 'mean' else 1
  return merged * np.asarray(factor, old.dtype)


def cut_anew(name: str, old: np.ndarray, target: Any) -> np.ndarray:
  """Joins the slices of a leaf, and cuts it into others.

  Raises:
    ValueError: If they are not of the same parameters.
  """
  _check_fits(_are_of_one_leaf(old, target), name, old, target)
  # What is behind the last element of the leaf never counts.
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
  """Whether two leaves can be slices of the same one, or one of them that."""
  is_cut = _has_rows(target)
  # One element is its own slice, and gets no axis.
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
