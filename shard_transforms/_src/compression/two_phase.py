"""The exchange that carries compressed rows: a scatter and a gather.

Each shard sends each other the part of its rows that the other owns; the owner
decodes and averages them, and sends what it encodes of the mean to all. A shard
sends and receives as much as in an all-reduce of as many bytes.
"""

from collections.abc import Hashable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.compression import compressor as compressor_lib
from shard_transforms._src.compression import payload as payload_lib
from shard_transforms._src.reduction import collectives


class Exchange(NamedTuple):
  """How rows travel in one step.

  Attributes:
    compressor: What makes rows to bytes.
    axes: The mapped axes of the shards.
    key: The common key of the step.
  """

  compressor: compressor_lib.Compressor
  axes: tuple[Hashable, ...]
  key: jax.Array

  def scatter(self, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sends rows to their owners.

    Args:
      rows: Those of a shard for each owner, float32 [shards, rows, block].

    Returns:
      The mean over the shards of what is sent to this one, float32 [rows,
      block], and what this one has sent, like `rows`.
    """
    flat = rows.reshape(-1, rows.shape[-1])
    payload = self._encode(flat, phase=0)
    sent = payload_lib.to_bytes(payload).reshape(len(rows), -1)
    received = collectives.exchange(
        axes_lib.to_varying(sent, self.axes), self.axes
    )
    decoded = self._decode_bytes(received, payload).reshape(rows.shape)
    own = self._decode(payload).reshape(rows.shape)
    return jnp.mean(decoded, axis=0), own

  def gather(self, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sends an owner's rows to all shards.

    Args:
      rows: Those that this shard owns, float32 [rows, block].

    Returns:
      What all have sent, the same on all shards, float32 [shards, rows, block],
      and what this one has sent, like `rows`.
    """
    payload = self._encode(rows, phase=1)
    sent = payload_lib.to_bytes(payload).ravel()
    gathered = collectives.gather(
        axes_lib.to_varying(sent, self.axes), self.axes
    )
    whole = self._decode_bytes(gathered, payload)
    return whole.reshape(-1, *rows.shape), self._decode(payload)

  def _encode(self, rows, phase):
    index = collectives.row_index(self.axes)
    own_key = jax.random.fold_in(self.key, 2 * index + phase + 1)
    return payload_lib.encode(self.compressor, rows, self.key, own_key)

  def _decode(self, payload):
    return payload_lib.decode(self.compressor, payload, self.key)

  def _decode_bytes(self, received, like):
    width = payload_lib.to_bytes(like).shape[1]
    rows = received.reshape(-1, width)
    return self._decode(payload_lib.from_bytes(rows, like))
