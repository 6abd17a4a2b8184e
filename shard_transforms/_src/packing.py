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

import jax
from jax import lax
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


def check_bucket_bytes(bucket_bytes: int | str) -> None:
  """Checks the size of the buffers, as the user gives it.

  Args:
    bucket_bytes: What is to be an integer of at least 0, or `'auto'`.

  Raises:
    TypeError: If it is neither an integer nor `'auto'`.
    ValueError: If it is negative.
  """
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


def map_packed(
    fn: Callable[[jax.Array, Hashable], jax.Array],
    leaves: Sequence[jax.Array],
    keys: Sequence[Hashable],
    bucket_bytes: int | str,
    num_rows: int | None = None,
    growth: int = 1,
) -> list[jax.Array]:
  """Applies a function to leaves, small ones packed together.

  Args:
    fn: Takes an array and its key and returns an array of the same dtype, in
      which each element follows from the elements at the same place alone, as
      in a sum over shards. It may take rows, [num_rows, ...], and give one of
      them, or take one and give rows.
    leaves: Arrays, none of size zero.
    keys: Of each leaf; only leaves of equal keys share a buffer. Equal keys
      imply equal dtypes.
    bucket_bytes: The most that a buffer holds; a leaf of this size or more
      travels alone, in its own shape. 0 packs nothing; `'auto'` packs what
      gains by it.
    num_rows: How many rows each leaf has, along its first axis, all of which
      go to `fn` together; `None` where leaves are no rows.
    growth: How many times as large as a leaf its result is.

  Returns:
    The results, in the order of `leaves`.
  """
  results = {}
  sizes = [leaf.size * leaf.dtype.itemsize * growth for leaf in leaves]
  for bucket in _buckets(leaves, sizes, keys, bucket_bytes):
    members = [leaves[i] for i in bucket]
    outputs = _apply(fn, members, keys[bucket[0]], num_rows)
    results.update(zip(bucket, outputs, strict=True))
  return [results[i] for i in range(len(leaves))]


def _buckets(leaves, sizes, keys, bucket_bytes):
  """Groups the positions of `leaves` by the buffer that they travel in."""
  leaf_bytes = bucket_bytes
  if bucket_bytes == 'auto':
    leaf_bytes, bucket_bytes = _AUTO_LEAF_BYTES, _AUTO_BUCKET_BYTES
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


def _apply(fn, members, key, num_rows):
  """Applies `fn` to a bucket: one leaf as it is, several as one buffer."""
  if len(members) == 1:
    return [fn(members[0], key)]
  lead = () if num_rows is None else (num_rows,)
  shapes = [leaf.shape[len(lead) :] for leaf in members]
  flat = [leaf.reshape((*lead, -1)) for leaf in members]
  buffer = fn(jnp.concatenate(flat, axis=-1), key)
  parts = lax.split(buffer, [leaf.shape[-1] for leaf in flat], buffer.ndim - 1)
  return [
      part.reshape(part.shape[:-1] + shape)
      for part, shape in zip(parts, shapes, strict=True)
  ]
