"""Groups: a partition of the shards into sets that reduce separately."""

import collections
from collections.abc import Sequence
from typing import Any

import numpy as np

from shard_transforms._src.base import arguments

Groups = tuple[tuple[int, ...], ...]
# The types that users may pass.
GroupsLike = Sequence[Sequence[int]] | np.ndarray


def as_groups(groups: Any) -> Groups:
  """Returns groups of equal size as tuples.

  Raises:
    TypeError: If `groups` is not a sequence of sequences of integers.
    ValueError: If `groups` is not a partition of `range(number of ids)`, or the
      groups have different sizes.
  """
  checked = tuple(
      tuple(
          arguments.as_int(f'groups[{i}][{j}]', shard)
          for j, shard in enumerate(_items(group, groups))
      )
      for i, group in enumerate(_items(groups, groups))
  )
  ids = [shard for group in checked for shard in group]
  if not ids or not all(checked):
    raise ValueError(
        '`groups` must contain at least one group, and each group must contain'
        f' at least one shard, got {groups!r}.'
    )
  counts = collections.Counter(ids)
  expected = range(len(ids))
  if wrong := sorted(
      shard
      for shard in counts.keys() | set(expected)
      if counts[shard] != (shard in expected)
  ):
    raise ValueError(
        f'`groups` must contain every id from 0 to {len(ids) - 1} exactly once,'
        f' but the ids {wrong} are missing, repeated or outside of this range'
        f' in {groups!r}.'
    )
  if len(set(map(len, checked))) > 1:
    raise ValueError(
        f'All groups in `groups` must have the same size, got {groups!r}.'
    )
  return checked


def check_size(groups: Groups, num_shards: int) -> None:
  """Checks that `groups` covers an axis with `num_shards` shards.

  Raises:
    ValueError: If ids are missing, or exceed the number of shards.
  """
  ids = {shard for group in groups for shard in group}
  wrong = sorted(ids ^ set(range(num_shards)))
  if wrong:
    problem = 'are missing' if num_shards > len(ids) else 'are not shards'
    raise ValueError(
        f'`groups` must be a partition of the {num_shards} shards of the axis,'
        f' but the ids {wrong} {problem}.'
    )


def _items(value, groups):
  """Returns a sequence of groups or of ids.

  Raises:
    TypeError: If `value` is not a sequence.
  """
  if isinstance(value, np.ndarray):
    value = value.tolist()
  if isinstance(value, str) or not isinstance(value, Sequence):
    raise TypeError(
        '`groups` must be a sequence of sequences of shard ids, got'
        f' {groups!r}.'
    )
  return value
