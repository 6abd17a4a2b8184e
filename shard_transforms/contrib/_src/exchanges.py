"""Exchanges of rows between shards, in pieces, and packing of small integers.

A long row is communicated in pieces, and several small integers share a byte.
"""

import math

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.reduction import collectives

# The size of a piece between processes with gloo. In larger pieces, receiving
# hardly overlaps with sending. Compared to unsplit rows, `quantize(8)` takes
# 0.65 of the time over a link of 100 Mbit/s (python benchmarks/wire.py), but
# 1.5 to 2.4 times as long over loopback (python benchmarks/thresholds.py).
_PIECE_BYTES = 256 * 1024


def piece_bytes() -> int | None:
  """Returns the maximum size of a piece, or `None` for no limit.

  The size depends on the platform for which JAX currently traces.
  """
  return _PIECE_BYTES if axes_lib.between_processes() else None


def exchange(rows: jax.Array, axes: collectives.Axes) -> jax.Array:
  """Returns the rows addressed to this shard, ordered by sender.

  The input has one row per shard, [shards, ...], in mesh order; see
  `collectives.row_index`.
  """
  order = axes_lib.in_mesh_order(axes)
  if not axes_lib.on_mapped_mesh(axes):
    return _exchange_by_axes(rows, order)
  return _in_pieces(lambda rows: lax.all_to_all(rows, order, 0, 0), rows, 1)


def gather(row: jax.Array, axes: collectives.Axes) -> jax.Array:
  """Returns the rows of all shards, like `collectives.gather`."""
  return _in_pieces(lambda row: collectives.gather(row, axes), row, 0)


def _exchange_by_axes(rows, order):
  """Exchanges one axis at a time, for partly mapped meshes and `vmap`."""
  sizes = map(lax.axis_size, order)
  parts = lax.reshape(rows, (*sizes, *rows.shape[1:]))
  for dimension, axis in enumerate(order):
    parts = collectives.exchange_along(parts, axis, dimension)
  return lax.reshape(parts, rows.shape)


def _in_pieces(send, rows, num_leading):
  """Returns `send(rows)`, [shards, ...], computed in pieces if rows are long.

  The pieces are processed in a loop, so that the number of operations to
  compile does not depend on the number of pieces.
  """
  lead, shape = rows.shape[:num_leading], rows.shape[num_leading:]
  most = piece_bytes() or rows.nbytes
  length = math.prod(shape)
  num_pieces = math.ceil(length / max(most // rows.dtype.itemsize, 1))
  if num_pieces <= 1:
    return send(rows)
  # All pieces have the same size and are processed by the loop. With a smaller
  # last piece after the loop, processes received pieces of the wrong size, and
  # gloo aborted.
  size = math.ceil(length / num_pieces)
  padding = [*[(0, 0)] * len(lead), (0, num_pieces * size - length)]
  flat = jnp.pad(rows.reshape(*lead, length), padding)
  pieces = flat.reshape(*lead, num_pieces, size)
  sent = lax.map(send, jnp.moveaxis(pieces, -2, 0))
  sent = jnp.moveaxis(sent, 0, 1)
  return sent.reshape(len(sent), -1)[:, :length].reshape(-1, *shape)


def pack_integers(values: jax.Array, num_values: int) -> jax.Array:
  """Packs small integers [..., n] into bytes [..., n / num_values].

  Values that share a byte are far apart in the row, so that large parts of the
  row are combined by one vector operation. Values are booleans, or integers
  below 2 ** (8 / num_values). A byte has 2, 4 or 8 values.
  """
  *lead, length = values.shape
  shifts = np.arange(0, 8, 8 // num_values, dtype=np.uint8)
  shifts = shifts.reshape(*(1,) * len(lead), num_values, 1)
  parts = values.astype(jnp.uint8)
  parts = parts.reshape(*lead, num_values, length // num_values)
  return jnp.sum(parts << shifts, axis=-2, dtype=jnp.uint8)


def unpack_integers(packed: jax.Array, num_values: int) -> jax.Array:
  """Unpacks the integers [..., num_values * n] in bytes [..., n]."""
  bits = 8 // num_values
  mask = np.uint8(2**bits - 1)
  parts = [(packed >> np.uint8(i * bits)) & mask for i in range(num_values)]
  return jnp.concatenate(parts, axis=-1)
