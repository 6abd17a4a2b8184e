"""Checksums over the bits of trees."""

import chex
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from shard_transforms._src.base import leaves as leaves_lib

# The first 32 bits after the binary point, made odd: of the golden ratio, for
# multiplicative hashing of places; and of pi and e, which make the two words of
# the checksum independent.
_PLACES = np.uint32(0x9E3779B9)
_SEEDS = np.asarray([0x243F6A89, 0xB7E15163], np.uint32)
# Shifts and factors of `fmix32`, the last step of MurmurHash3 (A. Appleby).
_SHIFTS_AND_FACTORS = ((16, 0x85EBCA6B), (13, 0xC2B2AE35))


def checksum(tree: chex.ArrayTree) -> jax.Array:
  """Returns two words that depend on each bit of a tree and on its place.

  Trees that differ in one element of up to 32 bits alone never have the same
  two words; others do with a probability of about 2**-64.

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
    number = lax.iota(jnp.uint32, words.size) * _PLACES + np.uint32(place)
    # A plain sum would not notice two words that are swapped; so each word is
    # first mixed with its place, which maps no two words to one.
    mixed = [_mix(_mix(words ^ seed) + number) for seed in _SEEDS]
    total += jnp.stack([jnp.sum(x, dtype=jnp.uint32) for x in mixed])
  return total


def _words(leaf):
  """Returns the bits of an array, uint32 [number of words]."""
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
    return lax.bitcast_convert_type(leaf, jnp.uint32).ravel()
  unsigned = lax.bitcast_convert_type(leaf, jnp.dtype(f'uint{bits}'))
  return unsigned.astype(jnp.uint32).ravel()


def _mix(words):
  """Returns a bijection of words in which each bit affects all others."""
  for shift, factor in _SHIFTS_AND_FACTORS:
    words = (words ^ (words >> np.uint32(shift))) * np.uint32(factor)
  return words ^ (words >> np.uint32(16))
