"""Leaves as rows of blocks, and back.

A leaf is cut flat into a slice for each shard, as by `flat_slices`, and each
slice filled up with zeros to whole blocks. So all elements of a block are of
one leaf and one owner, wherever its row is sent.
"""

from collections.abc import Sequence
import math

import chex
import jax
from jax import lax
import jax.numpy as jnp

from shard_transforms._src.reduction import flat_slices


def slice_length(shape: tuple[int, ...], num_shards: int) -> int:
  """Returns the number of elements in each slice of a leaf."""
  return -(-math.prod(shape) // num_shards)


def cut(leaves: Sequence[chex.Array], num_shards: int, block: int) -> jax.Array:
  """Returns the rows of leaves, [num_shards, rows, block]."""
  slices = [
      flat_slices.cut(leaf, num_shards).reshape(num_shards, -1)
      for leaf in leaves
  ]
  return cut_slices(slices, block)


def join(rows: jax.Array, shapes: Sequence[tuple[int, ...]]) -> list[jax.Array]:
  """Returns the leaves of rows; the reverse of `cut`."""
  lengths = [slice_length(shape, len(rows)) for shape in shapes]
  slices = join_slices(rows, lengths)
  return [
      flat_slices.join(part, jax.ShapeDtypeStruct(shape, rows.dtype))
      for part, shape in zip(slices, shapes, strict=True)
  ]


def cut_slices(slices: Sequence[jax.Array], block: int) -> jax.Array:
  """Returns the rows [..., rows, block] of slices [..., elements]."""
  parts = [_cut_slice(part, block) for part in slices]
  return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-2)


def join_slices(rows: jax.Array, lengths: Sequence[int]) -> list[jax.Array]:
  """Returns the slices of rows; the reverse of `cut_slices`."""
  *lead, _, block = rows.shape
  num_rows = [-(-length // block) for length in lengths]
  parts = lax.split(rows, num_rows, axis=rows.ndim - 2)
  return [
      part.reshape(*lead, -1)[..., :length]
      for part, length in zip(parts, lengths, strict=True)
  ]


def _cut_slice(part, block):
  *lead, length = part.shape
  if padding := -length % block:
    part = jnp.pad(part, [*[(0, 0)] * len(lead), (0, padding)])
  return part.reshape(*lead, -1, block)


def without_padding(
    part: jax.Array, shape: tuple[int, ...], owner: jax.Array
) -> jax.Array:
  """Returns an owner's slice with zeros behind the last element of the leaf.

  Args:
    part: The slice, [elements].
    shape: The shape of the leaf.
    owner: Which slice it is.
  """
  place = owner * len(part) + jnp.arange(len(part))
  return jnp.where(place < math.prod(shape), part, 0)
