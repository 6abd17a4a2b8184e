"""Bucketing: packs small leaves into shared buffers for collectives.

Every operand of a collective has a fixed cost. Small leaves with equal keys are
therefore packed into a flat buffer. A large leaf is communicated separately and
keeps its shape.
"""

from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Sequence
import functools
import math
import operator

import jax
from jax import lax
import jax.numpy as jnp

from shard_transforms._src.reduction import thresholds


def map_packed(
    fn: Callable[[jax.Array, Hashable], jax.Array],
    leaves: Sequence[jax.Array],
    keys: Sequence[Hashable],
    levels: Sequence[thresholds.Level],
    num_rows: int | None = None,
    growth: int = 1,
) -> list[jax.Array]:
  """Applies a function to leaves, with small leaves packed into buffers.

  Args:
    fn: Takes an array and its key, and returns an array of the same dtype in
      which each element depends only on the elements at the same position, as
      in a sum over shards. The function may reduce rows, [num_rows, ...], to
      one row, or expand one row to several.
    leaves: Arrays, none of which is empty.
    keys: One key per leaf. Only leaves with equal keys, and therefore equal
      dtypes, share a buffer.
    levels: The levels of packing, which are applied in order. A leaf that is
      too large to share a buffer is passed to `fn` separately, in its shape.
    num_rows: The number of rows of each leaf, along its first axis, or `None`.
    growth: The ratio of the size of a result to the size of its leaf.
  """
  lead = () if num_rows is None else (num_rows,)
  joined = []
  for level in levels:
    shared = buckets(leaves, keys, level, growth)
    joined.append((shared, leaves))
    buffers, buffer_keys = [], []
    for bucket in shared:
      buffers.append(_join(leaves, bucket, lead))
      buffer_keys.append(keys[bucket[0]])
    leaves, keys = buffers, buffer_keys
  results = list(map(fn, leaves, keys))
  for shared, members in reversed(joined):
    parts = list(members)
    for bucket, result in zip(shared, results, strict=True):
      _split(parts, bucket, result, lead)
    results = parts
  return results


def buckets(
    leaves: Sequence[jax.Array],
    keys: Sequence[Hashable],
    level: thresholds.Level,
    growth: int = 1,
) -> list[list[int]]:
  """Assigns leaves to buffers; returns the positions of the leaves of each one.

  The arguments are as in `map_packed`.
  """
  assigned, open_buckets = [], {}
  for i, (key, leaf) in enumerate(zip(keys, leaves, strict=True)):
    size = leaf.size * leaf.dtype.itemsize * growth
    bucket, room = open_buckets.get(key, ([], 0))
    if size >= level.leaf_bytes:
      assigned.append([i])
      continue
    if size > room or len(bucket) == level.num_leaves:
      bucket, room = [], level.bucket_bytes
      assigned.append(bucket)
    bucket.append(i)
    open_buckets[key] = bucket, room - size
  return assigned


def _join(leaves, bucket, lead):
  """Packs leaves into a buffer [*lead, elements]; keeps a single leaf as is."""
  if len(bucket) == 1:
    return leaves[bucket[0]]
  flatten = functools.partial(lax.collapse, start_dimension=len(lead))
  flat = list(map(flatten, operator.itemgetter(*bucket)(leaves)))
  return jnp.concatenate(flat, axis=-1)


def _split(leaves, bucket, buffer, lead):
  """Replaces the leaves of a bucket by their parts of a buffer.

  Each part has the shape of its leaf, with the rows of the buffer, if any.
  """
  if len(bucket) == 1:
    leaves[bucket[0]] = buffer
    return
  shapes = [leaves[i].shape[len(lead) :] for i in bucket]
  parts = lax.split(buffer, list(map(math.prod, shapes)), buffer.ndim - 1)
  for i, part, shape in zip(bucket, parts, shapes, strict=True):
    leaves[i] = part.reshape(part.shape[:-1] + shape)
