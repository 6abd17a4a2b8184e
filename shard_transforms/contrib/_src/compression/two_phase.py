"""The exchange of compressed leaves: an all-to-all and an all-gather.

Each leaf is flattened and divided into one slice per shard, its owner, and each
slice is padded with zeros to rows of whole blocks. A block therefore has one
owner and belongs to one leaf. Each shard sends the rows of every slice to the
owner of the slice, which decodes and averages them, encodes the mean and sends
it to all shards. This takes as many bytes as an all-reduce of the payload.
"""

from collections.abc import Hashable
from collections.abc import Sequence
import math
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.reduction import collectives
from shard_transforms.contrib._src import exchanges
from shard_transforms.contrib._src.compression import (
    compressor as compressor_lib,
)

Shape = tuple[int, ...]


class Exchange(NamedTuple):
  """The exchange of compressed leaves in one step.

  Attributes:
    compressor: The encoding of rows.
    axes: The mapped axes of the shards.
    key: The common key of the step.
  """

  compressor: compressor_lib.Compressor
  axes: tuple[Hashable, ...]
  key: jax.Array

  def num_shards(self) -> int:
    """Returns the number of shards over all axes."""
    return axes_lib.num_shards(self.axes, 'compression')

  def scatter(
      self, leaves: Sequence[jax.Array]
  ) -> tuple[list[jax.Array], list[jax.Array]]:
    """Sends slices of leaves to their owners.

    Args:
      leaves: This shard's leaves, all varying over the same axes.

    Returns:
      The slices that this shard owns of the means, float32 [1, ..., 1,
      elements], with zeros after the last element of a leaf; and the leaves as
      this shard has sent them, float32 of the same shapes.
    """
    num_shards, shapes = self.num_shards(), [leaf.shape for leaf in leaves]
    rows = cut(leaves, num_shards, self.compressor.block)
    payload = self._encode(rows.reshape(-1, rows.shape[-1]), phase=0)
    words = compressor_lib.to_words(payload, num_shards)
    received = exchanges.exchange(
        axes_lib.to_varying(words, self.axes), self.axes
    )
    local_rows = self._decode(payload).reshape(rows.shape)
    mean_rows = self._mean(received, payload)
    lengths = [slice_length(shape, num_shards) for shape in shapes]
    slices = self._owned_slices(_join_slices(mean_rows, lengths), shapes)
    return slices, join(local_rows, shapes)

  def gather(
      self, slices: Sequence[jax.Array], shapes: Sequence[Shape]
  ) -> tuple[list[jax.Array], list[jax.Array]]:
    """Sends an owner's slices to all shards.

    Args:
      slices: The slices that this shard owns, as returned by `scatter`.
      shapes: The shapes of the leaves.

    Returns:
      The leaves as the owners have sent them, float32, the same on all shards;
      and the compression error of this shard's slices, float32, with zeros in
      the padding.
    """
    slices = self._owned_slices(slices, shapes)
    rows = _cut_slices([x.ravel() for x in slices], self.compressor.block)
    payload = self._encode(rows, phase=1)
    words = compressor_lib.to_words(payload, 1)[0]
    gathered = exchanges.gather(
        axes_lib.to_varying(words, self.axes), self.axes
    )
    gathered_rows = self._decode_words(gathered, payload, 1)
    errors = _join_slices(
        rows - self._decode(payload), [x.size for x in slices]
    )
    leaves = join(gathered_rows.reshape(-1, *rows.shape), shapes)
    return leaves, self._owned_slices(errors, shapes)

  def _owned_slices(self, slices, shapes):
    """Returns slices in float32, with zeros in their padding."""
    owner, owned = collectives.row_index(self.axes), []
    for part, shape in zip(slices, shapes, strict=True):
      index = owner * part.size + jnp.arange(part.size, dtype=owner.dtype)
      flat = part.ravel().astype(jnp.float32)
      flat = jnp.where(index < math.prod(shape), flat, 0)
      owned.append(flat.reshape(*(1,) * (len(shape) - 1), -1))
    return owned

  def _mean(self, received, like):
    """Decodes the rows of all shards, and returns their mean."""
    num_shards = len(received)

    def decode(i):
      return self._decode_words(received[i][None], like, num_shards)

    def add(i, total):
      return total + decode(i)

    # On CPU with JAX 0.10, a sum over the first axis takes ten to forty times
    # as long as adding the rows of one shard after another.
    return lax.fori_loop(1, num_shards, add, decode(0)) / num_shards

  def _encode(self, rows, phase):
    index = collectives.row_index(self.axes)
    own_key = jax.random.fold_in(self.key, 2 * index + phase + 1)
    return compressor_lib.encode(self.compressor, rows, self.key, own_key)

  def _decode(self, payload):
    return compressor_lib.decode(self.compressor, payload, self.key)

  def _decode_words(self, received, like, num_parts):
    payload = compressor_lib.from_words(received, like, num_parts)
    return self._decode(payload)


def slice_length(shape: Shape, num_shards: int) -> int:
  """Returns the number of elements in each slice of a leaf."""
  return -(-math.prod(shape) // num_shards)


def cut(leaves: Sequence[jax.Array], num_shards: int, block: int) -> jax.Array:
  """Returns the rows of leaves, float32 [num_shards, rows, block]."""
  slices = [
      leaves_lib.slice_evenly(leaf.astype(jnp.float32), num_shards).reshape(
          num_shards, -1
      )
      for leaf in leaves
  ]
  return _cut_slices(slices, block)


def join(rows: jax.Array, shapes: Sequence[Shape]) -> list[jax.Array]:
  """Returns the leaves of rows; the inverse of `cut`."""
  lengths = [slice_length(shape, len(rows)) for shape in shapes]
  return [
      leaves_lib.join_slices(part, jax.ShapeDtypeStruct(shape, rows.dtype))
      for part, shape in zip(_join_slices(rows, lengths), shapes, strict=True)
  ]


def _cut_slices(slices, block):
  """Returns the rows [..., rows, block] of slices [..., elements]."""
  parts = []
  for part in slices:
    *lead, length = part.shape
    if padding := -length % block:
      part = jnp.pad(part, [*[(0, 0)] * len(lead), (0, padding)])
    parts.append(part.reshape(*lead, -1, block))
  return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-2)


def _join_slices(rows, lengths):
  """Returns the slices of rows; the inverse of `_cut_slices`."""
  *lead, _, block = rows.shape
  num_rows = [-(-length // block) for length in lengths]
  parts = lax.split(rows, num_rows, axis=rows.ndim - 2)
  return [
      part.reshape(*lead, -1)[..., :length]
      for part, length in zip(parts, lengths, strict=True)
  ]
