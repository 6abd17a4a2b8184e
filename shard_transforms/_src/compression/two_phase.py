"""The exchange of compressed rows: an all-to-all and an all-gather.

Each shard sends every other shard the rows that the other one owns; the owner
decodes and averages them, encodes the mean and sends it to all. A shard sends
and receives as much as in an all-reduce of as many bytes.

With `'hierarchical'`, a reduce-scatter over the last axis, the fast one, comes
first, uncompressed, so that each shard encodes and sends only its part over the
other axes.
"""

from collections.abc import Hashable
import functools
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.compression import compressor as compressor_lib
from shard_transforms._src.compression import payload as payload_lib
from shard_transforms._src.reduction import collectives
from shard_transforms._src.reduction import reduction_options


class Exchange(NamedTuple):
  """How rows are sent in one step.

  Attributes:
    compressor: How rows become bytes.
    axes: The mapped axes of the shards.
    key: The common key of the step.
    algorithm: Whether rows are compressed before they are summed over the last
      axis, or after.
  """

  compressor: compressor_lib.Compressor
  axes: tuple[Hashable, ...]
  key: jax.Array
  algorithm: reduction_options.Algorithm = 'flat'

  def num_shards(self) -> int:
    """Returns the number of shards over all axes."""
    return axes_lib.size(self.axes, 'compression')

  def scatter(self, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sends rows to their owners.

    Args:
      rows: This shard's rows for each owner, float32 [shards, rows, block].

    Returns:
      The mean over the shards of what is sent to this one, float32 [rows,
      block], and what this one has sent, like `rows`.
    """
    if self.algorithm == 'flat':
      return self._exchange(rows, self.axes)
    return self._exchange_by_levels(rows)

  def gather(self, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sends an owner's rows to all shards.

    Args:
      rows: Those that this shard owns, float32 [rows, block].

    Returns:
      What all have sent, the same on all shards, float32 [shards, rows, block],
      and what this one has sent, like `rows`.
    """
    payload = self._encode(rows, phase=1)
    sent = payload_lib.to_bytes(payload, 1).ravel()
    gathered = collectives.gather_flat(
        axes_lib.to_varying(sent, self.axes), self.axes
    )
    whole = self._decode_bytes(gathered, payload, 1)
    return whole.reshape(-1, *rows.shape), self._decode(payload)

  def _exchange(self, rows, axes):
    """Returns the mean of what shards send this one, and what it has sent."""
    flat = rows.reshape(-1, rows.shape[-1])
    payload = self._encode(flat, phase=0)
    sent = payload_lib.to_bytes(payload, len(rows))
    received = collectives.exchange(axes_lib.to_varying(sent, axes), axes)
    own = self._decode(payload).reshape(rows.shape)
    return self._mean(received, payload), own

  def _mean(self, received, like):
    """Returns the mean of the rows that each shard has sent in bytes."""
    num_shards = len(received)

    def decode(i):
      return self._decode_bytes(received[i][None], like, num_shards)

    def add(i, total):
      return total + decode(i)

    # On CPU, a sum over the first axis takes JAX 0.10 ten to forty times as
    # long as adding one shard's rows after the other.
    return lax.fori_loop(1, num_shards, add, decode(0)) / num_shards

  def _exchange_by_levels(self, rows):
    """Exchanges as `_exchange`, after a reduce-scatter over the last axis."""
    *slow, fast = self.axes
    num_fast = lax.axis_size(fast)
    order = axes_lib.in_mesh_order(self.axes)
    along = order.index(fast)
    by_axes = rows.reshape(*map(lax.axis_size, order), *rows.shape[1:])
    part = collectives.scatter_along(by_axes, fast, along) / num_fast
    own = part.reshape(-1, *rows.shape[1:])
    mean, sent = self._exchange(own, tuple(slow))
    # The error of a sum is held back by the shard that has encoded it.
    rest = num_fast * (own - sent).reshape(part.shape)
    place = lax.broadcasted_iota(jnp.int32, by_axes.shape, along)
    is_own = place == lax.axis_index(fast)
    rest = jnp.where(is_own, jnp.expand_dims(rest, along), 0)
    return mean, (by_axes - rest).reshape(rows.shape)

  def _encode(self, rows, phase):
    index = collectives.row_index(self.axes)
    own_key = jax.random.fold_in(self.key, 2 * index + phase + 1)
    encode = functools.partial(payload_lib.encode, self.compressor)
    arrays = rows, self.key, own_key
    return collectives.on_each_shard(encode, self.axes, *arrays)

  def _decode(self, payload):
    return payload_lib.decode(self.compressor, payload, self.key)

  def _decode_bytes(self, received, like, num_parts):
    return self._decode(payload_lib.from_bytes(received, like, num_parts))
