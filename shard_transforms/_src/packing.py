"""Leaves to fused buffers and back.

A collective pays a price per leaf. Small leaves of one kind therefore travel
together in a flat buffer, and large ones alone, in their own shape.
"""

import collections
from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Sequence
import functools
import numbers
import operator

import jax
import jax.numpy as jnp

# What 'auto' means, for one process with XLA on CPU, where every operand of an
# all-reduce pays for a meeting of all threads, and a buffer for two copies.
# Leaves of 16 kB still gain, those of 48 kB lose, larger buffers gain no more:
# python benchmarks/reduce.py --shapes=100x4_000,100x8_000,100x12_000
#   --bucket_bytes=131072
_AUTO_LEAF_BYTES = 32 * 1024
_AUTO_BUCKET_BYTES = 128 * 1024

# How many leaves may share a buffer. XLA on CPU fuses a concatenation of up to
# 8 operands with what makes them, which is slow to compile.
_NUM_LEAVES = range(9, 33)


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
  leaf_bytes = bucket_bytes
  if bucket_bytes == 'auto':
    leaf_bytes, bucket_bytes = _AUTO_LEAF_BYTES, _AUTO_BUCKET_BYTES
  sizes = [leaf.size * leaf.dtype.itemsize for leaf in leaves]
  buckets = []
  small = collections.defaultdict(list)
  for i, (key, size) in enumerate(zip(keys, sizes, strict=True)):
    if size < leaf_bytes:
      small[key].append(i)
    else:
      buckets.append([i])
  for positions in small.values():
    fillings = [_fill(positions, sizes, bucket_bytes, n) for n in _NUM_LEAVES]
    buckets += min(fillings, key=functools.partial(_cost, leaves=leaves))
  return sorted(buckets)


def _fill(positions, sizes, bucket_bytes, num_leaves):
  """Cuts `positions` into buckets that break neither limit."""
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
  """Weighs the time of a step, by buckets, against that of compilation.

  XLA compiles a kernel for each place in a buffer, but one for all buffers that
  are alike. The layers of a network repeat, and so can its buffers.
  """
  kinds = {tuple(leaves[i].shape for i in bucket) for bucket in buckets}
  return 2 * len(buckets) + sum(len(kind) for kind in kinds)


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
