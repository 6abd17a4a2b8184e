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
  if not levels:
    return [fn(leaf, key) for leaf, key in zip(leaves, keys, strict=True)]
  level, *further = levels
  lead = () if num_rows is None else (num_rows,)
  shared = buckets(leaves, keys, level, growth)
  buffers = [_join([leaves[i] for i in bucket], lead) for bucket in shared]
  bucket_keys = [keys[bucket[0]] for bucket in shared]
  packed = map_packed(fn, buffers, bucket_keys, further, num_rows, growth)
  results = {}
  for bucket, result in zip(shared, packed, strict=True):
    shapes = [leaves[i].shape[len(lead) :] for i in bucket]
    results.update(zip(bucket, _split(result, shapes), strict=True))
  return [results[i] for i in range(len(leaves))]


def buckets(
    leaves: Sequence[jax.Array],
    keys: Sequence[Hashable],
    level: thresholds.Level,
    growth: int = 1,
) -> list[list[int]]:
  """Groups the positions of leaves with equal keys by the buffer they share.

  The arguments are those of `map_packed`.
  """
  sizes = [leaf.size * leaf.dtype.itemsize * growth for leaf in leaves]
  found, filled = [], {}
  for i, (key, size) in enumerate(zip(keys, sizes, strict=True)):
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


def _join(members, lead):
  """Returns one leaf as it is, several as one buffer [*lead, elements]."""
  if len(members) == 1:
    return members[0]
  return jnp.concatenate([x.reshape((*lead, -1)) for x in members], axis=-1)


def _split(buffer, shapes):
  """Returns the parts of a buffer in their shapes, with its rows, if any."""
  if len(shapes) == 1:
    return [buffer]
  parts = lax.split(buffer, list(map(math.prod, shapes)), buffer.ndim - 1)
  return [
      part.reshape(part.shape[:-1] + shape)
      for part, shape in zip(parts, shapes, strict=True)
  ]
