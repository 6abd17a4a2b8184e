"""Digests of trees: SHA-256 on the host, and a two-word checksum on devices."""

import hashlib

import chex
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from shard_transforms._src.base import leaves as leaves_lib

# The first 32 bits after the binary point, made odd: of the golden ratio, for
# multiplicative hashing of positions; and of pi and e, for two independent
# words of the checksum.
_PLACES = np.uint32(0x9E3779B9)
_SEEDS = np.asarray([0x243F6A89, 0xB7E15163], np.uint32)
# Shifts and factors of `fmix32`, the last step of MurmurHash3 (A. Appleby).
_SHIFTS_AND_FACTORS = ((16, 0x85EBCA6B), (13, 0xC2B2AE35))


def digest(tree: chex.ArrayTree) -> str:
  """Returns a digest of the names, dtypes, shapes and bits of a tree.

  Store it with a checkpoint, and compare it when the checkpoint is restored,
  because disks and file systems can lose bits silently.

  Args:
    tree: Tree of arrays, random keys or numbers. Arrays must be fully
      addressable.

  Returns:
    The SHA-256, as 64 hexadecimal digits.

  Raises:
    TypeError: If a leaf is not an array or a number.

  Examples:
    >>> import numpy as np
    >>> import shard_transforms
    >>> before = {'w': np.zeros(3, np.float32)}
    >>> after = {'w': np.zeros(3, np.float32)}
    >>> shard_transforms.monitoring.digest(before)[:8]
    'af4a442c'
    >>> after['w'][1] = -0.0
    >>> shard_transforms.monitoring.digest(after)[:8]
    '8e24fc78'
  """
  total = hashlib.sha256()
  for path, leaf in jax.tree.leaves_with_path(tree):
    # The dtype of a random key names the generator.
    is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(
        leaf.dtype, jax.dtypes.prng_key
    )
    x = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
    if x.dtype.kind in 'OSU':
      raise TypeError(
          f'`tree` of `digest` must consist of arrays and numbers, got {leaf!r}'
          f' at {leaves_lib.name_of(path)}.'
      )
    kind = leaf.dtype if is_key else x.dtype
    total.update(f'{jax.tree_util.keystr(path)} {kind} {x.shape} '.encode())
    # Not all dtypes support the buffer protocol, such as bfloat16.
    total.update(np.ascontiguousarray(x).reshape(-1).view(np.uint8).data)
  return total.hexdigest()


def checksum(tree: chex.ArrayTree) -> jax.Array:
  """Returns two words that depend on each bit of a tree and its position.

  Trees that differ in only one element of up to 32 bits never have the same
  checksum; other trees do with a probability of about 2**-64.

  Args:
    tree: Tree of arrays of any dtypes and shapes.

  Returns:
    uint32 [2].
  """
  total = jnp.zeros(2, jnp.uint32)
  for place, leaf in enumerate(jax.tree.leaves(tree)):
    if leaves_lib.is_float0(leaf):
      continue
    words = _words(jnp.asarray(leaf))
    # In the shape of the words, which cannot be flattened if a mesh axis is
    # explicit.
    number = lax.iota(jnp.uint32, words.size).reshape(words.shape)
    number = number * _PLACES + np.uint32(place)
    # A plain sum would not detect swapped words. Each word is therefore first
    # mixed with its position, by a bijection.
    mixed = [_mix(_mix(words ^ seed) + number) for seed in _SEEDS]
    total += jnp.stack([jnp.sum(x, dtype=jnp.uint32) for x in mixed])
  return total


def _words(leaf):
  """Returns the bits of an array, uint32, in one or several dimensions."""
  if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
    leaf = jax.random.key_data(leaf)
  if jnp.iscomplexobj(leaf):
    leaf = jnp.stack([leaf.real, leaf.imag])
  if leaf.dtype == jnp.bool_:
    leaf = leaf.astype(jnp.uint8)
  is_int = jnp.issubdtype(leaf.dtype, jnp.integer)
  bits = (jnp.iinfo if is_int else jnp.finfo)(leaf.dtype).bits
  if bits < 8:
    return _words(leaf.astype(jnp.float32))
  if bits == 64:
    return lax.bitcast_convert_type(leaf, jnp.uint32)
  unsigned = lax.bitcast_convert_type(leaf, jnp.dtype(f'uint{bits}'))
  return unsigned.astype(jnp.uint32)


def _mix(words):
  """Mixes words by a bijection in which each bit affects all others."""
  for shift, factor in _SHIFTS_AND_FACTORS:
    words = (words ^ (words >> np.uint32(shift))) * np.uint32(factor)
  return words ^ (words >> np.uint32(16))
