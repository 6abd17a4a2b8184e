"""One slice of an array for each shard.

A leaf is flattened, padded with zeros at its end, and split into as many equal
parts as there are shards. A slice keeps the rank of its leaf, with all elements
along the last axis. Scalars are not cut: they have no axis.
"""

import math

import chex
import jax
from jax import lax
import jax.numpy as jnp

from shard_transforms._src.base import leaves as leaves_lib

Leaf = chex.Array | jax.ShapeDtypeStruct


def is_cut(leaf: Leaf, num_slices: int) -> bool:
  """Whether a leaf carries a gradient, and is neither empty nor a scalar."""
  is_inexact = jnp.issubdtype(leaves_lib.dtype_of(leaf), jnp.inexact)
  has_axis = bool(jnp.shape(leaf)) and math.prod(jnp.shape(leaf)) > 0
  return is_inexact and has_axis and num_slices > 1


def cut(leaf: chex.Array, num_slices: int) -> jax.Array:
  """Returns all slices of a leaf, [num_slices, 1, ..., 1, elements]."""
  rows = jnp.asarray(leaf)
  if padding := -rows.size % num_slices:
    rows = jnp.pad(rows.ravel(), (0, padding))
  shape = num_slices, *(1,) * (jnp.ndim(leaf) - 1), rows.size // num_slices
  return lax.reshape(rows, shape)


def join(slices: jax.Array, like: Leaf) -> jax.Array:
  """Returns the array of the shape of `like` of which these are the slices."""
  shape = jnp.shape(like)
  num_elements = math.prod(shape)
  if slices.size > num_elements:
    slices = lax.slice(slices.ravel(), (0,), (num_elements,))
  return lax.reshape(slices, shape)
