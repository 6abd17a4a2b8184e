"""Leaves to fused buffers and back.

A collective pays a price per leaf. Small leaves of one kind therefore travel
together in a flat buffer, and large ones alone, in their own shape.
"""

from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Sequence
import numbers
import operator

import jax
import jax.numpy as jnp

_AUTO_BUCKET_BYTES = 64 * 1024

# Compile time grows faster than linearly with the operands of a concatenation.
_MAX_BUCKET_LEAVES = 32


def check_bucket_bytes(bucket_bytes: int | str) -> int | str:
  """Validates the size of a buffer.

  Args:
    bucket_bytes: a number of bytes that is at least 0, or 'auto'.

  Returns:
    `bucket_bytes`, an integer of any kind as an `int`.

  Raises:
    TypeError: if `bucket_bytes` is neither an integer nor 'auto'.
    ValueError: if `bucket_bytes` is negative.
  """
  required = "`bucket_bytes` must be 'auto' or an integer of at least 0"
  if isinstance(bucket_bytes, jax.Array):
    raise TypeError(
        f'{required}, got {bucket_bytes!r}. It decides the shapes of buffers'
        " and cannot be an array: name it in `static_args=('bucket_bytes',)`"
        ' of `optax.inject_hyperparams`.'
    )
  if isinstance(bucket_bytes, str) and bucket_bytes == 'auto':
    return bucket_bytes
  if isinstance(bucket_bytes, bool) or not isinstance(
      bucket_bytes, numbers.Integral
  ):
    raise TypeError(f'{required}, got {bucket_bytes!r}.')
  if bucket_bytes < 0:
    raise ValueError(f'{required}, got {bucket_bytes!r}.')
  return operator.index(bucket_bytes)


def map_packed(
    fn: Callable[[jax.Array, Hashable], jax.Array],
    leaves: Sequence[jax.Array],
    keys: Sequence[Hashable],
    bucket_bytes: int | str,
) -> list[jax.Array]:
  """Applies an element-wise function to leaves, small ones packed together.

  Args:
    fn: takes an array and its key, gives an array of the same shape and dtype;
      every element of the result depends on the same element alone (over all
      shards), as in a sum over shards.
    leaves: arrays, none of size zero.
    keys: a key for each leaf; only leaves of equal keys share a buffer, and
      leaves of equal keys have one dtype.
    bucket_bytes: the most that a buffer holds; leaves of at least this size
      travel alone. 0 packs nothing, 'auto' is chosen by measurement.

  Returns:
    The results in the order of `leaves`.
  """
  results = [None] * len(leaves)
  for bucket in _buckets(leaves, keys, bucket_bytes):
    members = [leaves[i] for i in bucket]
    outputs = _apply(fn, members, keys[bucket[0]])
    for i, output in zip(bucket, outputs, strict=True):
      results[i] = output
  return results


def _buckets(leaves, keys, bucket_bytes):
  """Groups the positions of `leaves` by the buffer that they travel in."""
  if bucket_bytes == 'auto':
    bucket_bytes = _AUTO_BUCKET_BYTES
  buckets = []
  open_buckets = {}
  for i, (leaf, key) in enumerate(zip(leaves, keys, strict=True)):
    size = leaf.size * leaf.dtype.itemsize
    if size >= bucket_bytes:
      buckets.append([i])
      continue
    bucket, filled = open_buckets.get(key, (None, 0))
    if (
        bucket is None
        or filled + size > bucket_bytes
        or len(bucket) == _MAX_BUCKET_LEAVES
    ):
      bucket, filled = [], 0
      buckets.append(bucket)
    bucket.append(i)
    open_buckets[key] = (bucket, filled + size)
  return buckets


def _apply(fn, members, key):
  """Applies `fn` to a bucket: one leaf as it is, several as one buffer."""
  if len(members) == 1:
    return [fn(members[0], key)]
  buffer = fn(jnp.concatenate([leaf.ravel() for leaf in members]), key)
  outputs = []
  start = 0
  for leaf in members:
    stop = start + leaf.size
    outputs.append(buffer[start:stop].reshape(leaf.shape))
    start = stop
  return outputs
