"""Bucketing: small leaves share a buffer, so that one collective sends them.

A collective has a cost per leaf. Small leaves of one kind are therefore sent
together in a flat buffer, and large ones alone, in their own shape.
"""

import collections
from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Sequence
import functools
import math
import numbers

import jax
from jax import lax
import jax.numpy as jnp

from shard_transforms._src.base import thresholds


def check_bucket_bytes(bucket_bytes: int | str) -> None:
  """Checks the size of the buffers, as the user gives it."""
  required = "`bucket_bytes` must be 'auto' or an integer of at least 0"
  if isinstance(bucket_bytes, jax.Array):
    raise TypeError(
        f'{required}, got {bucket_bytes!r}. It decides the shapes of buffers:'
        " under `optax.inject_hyperparams`, add 'bucket_bytes' to"
        ' `static_args`.'
    )
  if isinstance(bucket_bytes, str) and bucket_bytes == 'auto':
    return
  if isinstance(bucket_bytes, bool | str) or not isinstance(
      bucket_bytes, numbers.Integral
  ):
    raise TypeError(f'{required}, got {bucket_bytes!r}.')
  if bucket_bytes < 0:
    raise ValueError(f'{required}, got {bucket_bytes!r}.')


def levels(
    bucket_bytes: int | str, measured: tuple[thresholds.Level, ...]
) -> tuple[thresholds.Level, ...]:
  """Returns the steps in which leaves are packed, `measured` for `'auto'`."""
  if bucket_bytes == 'auto':
    return measured
  limit = int(bucket_bytes)
  return (thresholds.Level(limit, limit),) if limit else ()


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
  buckets = _buckets(leaves, keys, level, growth)
  buffers = [_join([leaves[i] for i in bucket], lead) for bucket in buckets]
  bucket_keys = [keys[bucket[0]] for bucket in buckets]
  packed = map_packed(fn, buffers, bucket_keys, further, num_rows, growth)
  results = {}
  for bucket, result in zip(buckets, packed, strict=True):
    shapes = [leaves[i].shape[len(lead) :] for i in bucket]
    results.update(zip(bucket, _split(result, shapes), strict=True))
  return [results[i] for i in range(len(leaves))]


def _buckets(leaves, keys, level, growth):
  """Groups the positions of `leaves` by the buffer that they share."""
  sizes = [leaf.size * leaf.dtype.itemsize * growth for leaf in leaves]
  buckets = []
  small = collections.defaultdict(list)
  for i, (key, size) in enumerate(zip(keys, sizes, strict=True)):
    if size < level.leaf_bytes:
      small[key].append(i)
    else:
      buckets.append([i])
  for positions in small.values():
    fillings = [
        _fill(positions, sizes, level.bucket_bytes, n) for n in level.num_leaves
    ]
    buckets += min(fillings, key=functools.partial(_cost, leaves=leaves))
  return sorted(buckets)


def _fill(positions, sizes, bucket_bytes, num_leaves):
  """Divides `positions` into buckets within both limits."""
  buckets = []
  room = 0
  for i in positions:
    if sizes[i] > room or len(buckets[-1]) == num_leaves:
      buckets.append([])
      room = bucket_bytes
    buckets[-1].append(i)
    room -= sizes[i]
  return buckets


def _cost(buckets, leaves):
  """Returns a cost that combines the time of a step and of compilation.

  XLA compiles a kernel for each place in a buffer, but only once for equal
  buffers. The layers of a network repeat, and so can its buffers.
  """
  kinds = {tuple(leaves[i].shape for i in bucket) for bucket in buckets}
  return 2 * len(buckets) + sum(len(kind) for kind in kinds)


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
