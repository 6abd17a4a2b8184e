"""Bucketing: small leaves share a buffer, so that one collective sends them.

A collective has a cost per leaf. Small leaves of one kind are therefore sent
together in a flat buffer, and large ones alone, in their own shape.
"""

from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Sequence
import math

import jax
from jax import lax
import jax.numpy as jnp

from shard_transforms._src.base import thresholds


def map_packed(
    fn: Callable[[jax.Array, Hashable], jax.Array],
    leaves: Sequence[jax.Array],
    keys: Sequence[Hashable],
    levels: Sequence[thresholds.Level],
    num_rows: int | None = None,
    growth: int = 1,
) -> list[jax.Array]:
  """Applies a function to leaves, small ones packed together.

  Args:
    fn: Takes an array and its key and returns an array of the same dtype, in
      which each element depends only on the elements at the same place, as in a
      sum over shards. It may take rows, [num_rows, ...], and return one of
      them, or take one and return rows.
    leaves: Arrays, none of size zero.
    keys: Only leaves with equal keys, so of one dtype, share a buffer.
    levels: The steps in which they are packed. A leaf that is too large to
      share a buffer is sent alone, in its own shape.
    num_rows: How many rows each leaf has, along its first axis, or `None`.
    growth: The size of a result divided by the size of its leaf.
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
  """Groups the positions of leaves with equal keys by the buffer they share.

  The arguments are those of `map_packed`.
  """
  found, filled = [], {}
  for i, (key, leaf) in enumerate(zip(keys, leaves, strict=True)):
    size = leaf.size * leaf.dtype.itemsize * growth
    bucket, room = filled.get(key, ([], 0))
    if size >= level.leaf_bytes:
      found.append([i])
      continue
    if size > room or len(bucket) == level.num_leaves:
      bucket, room = [], level.bucket_bytes
      found.append(bucket)
    bucket.append(i)
    filled[key] = bucket, room - size
  return found


def _join(leaves, bucket, lead):
  """Returns one leaf as it is, several as one buffer [*lead, elements]."""
  if len(bucket) == 1:
    return leaves[bucket[0]]
  flat = [leaves[i].reshape((*lead, -1)) for i in bucket]
  return jnp.concatenate(flat, axis=-1)


def _split(leaves, bucket, buffer, lead):
  """Puts the parts of a buffer in the places of its leaves, in their shapes.

  A part has the rows of the buffer, if any.
  """
  if len(bucket) == 1:
    leaves[bucket[0]] = buffer
    return
  shapes = [leaves[i].shape[len(lead) :] for i in bucket]
  parts = lax.split(buffer, list(map(math.prod, shapes)), buffer.ndim - 1)
  for i, part, shape in zip(bucket, parts, shapes, strict=True):
    leaves[i] = part.reshape(part.shape[:-1] + shape)
