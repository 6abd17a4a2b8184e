"""Payloads of compressors as bytes, and back."""

import math
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from shard_transforms._src.compression import compressor as compressor_lib


def encode(
    compressor: compressor_lib.Compressor,
    rows: jax.Array,
    common_key: jax.Array,
    own_key: jax.Array,
) -> Any:
  """Returns the checked payload of rows, float32 [r, block].

  Raises:
    TypeError: If it is not made of numbers of whole bytes.
    ValueError: If an array of it has not as many rows.
  """
  payload = compressor.encode(rows, common_key, own_key)
  for leaf in jax.tree.leaves(payload):
    if not _has_whole_bytes(jnp.result_type(leaf)):
      raise TypeError(
          '`encode` of a `Compressor` must give real numbers of whole bytes,'
          f' got {jnp.result_type(leaf).name}.'
      )
    if jnp.shape(leaf)[:1] != (len(rows),):
      raise ValueError(
          f'`encode` of a `Compressor` must give arrays of {len(rows)} rows,'
          f' got the shape {jnp.shape(leaf)}.'
      )
  return payload


def decode(
    compressor: compressor_lib.Compressor, payload: Any, common_key: jax.Array
) -> jax.Array:
  """Returns the checked rows of a payload, float32 [r, block].

  Raises:
    ValueError: If they are of another shape or dtype.
  """
  rows = compressor.decode(payload, common_key)
  num_rows = len(jax.tree.leaves(payload)[0])
  shape = num_rows, compressor.block
  if jnp.shape(rows) != shape or jnp.result_type(rows) != jnp.float32:
    raise ValueError(
        f'`decode` of a `Compressor` must give float32{list(shape)}, got'
        f' {jnp.result_type(rows).name}{list(jnp.shape(rows))}.'
    )
  return rows


def to_bytes(payload: Any, num_parts: int) -> jax.Array:
  """Returns a payload as uint8 [num_parts, bytes], each part of whole rows.

  In a part, the arrays of the payload come one after the other. Rows of several
  arrays, one after the other, take XLA on CPU three times as long to decode.

  Args:
    payload: Of a multiple of `num_parts` rows.
    num_parts: Into how many parts of as many rows it is cut.
  """
  leaves = [_leaf_to_bytes(x, num_parts) for x in jax.tree.leaves(payload)]
  return leaves[0] if len(leaves) == 1 else jnp.concatenate(leaves, axis=1)


def from_bytes(parts: jax.Array, like: Any, num_parts: int) -> Any:
  """Returns the payload, of as many parts as there are, of uint8 [parts, ...].

  Args:
    parts: Bytes as `to_bytes` gives them.
    like: A payload of `num_parts` parts.
    num_parts: How many these are.
  """
  leaves, treedef = jax.tree.flatten(like)
  sizes = [leaf.dtype.itemsize * leaf.size // num_parts for leaf in leaves]
  columns = lax.split(parts, sizes, axis=1)
  return treedef.unflatten(map(_leaf_from_bytes, columns, leaves))


def _has_whole_bytes(dtype):
  if jnp.issubdtype(dtype, jnp.integer):
    return jnp.iinfo(dtype).bits % 8 == 0
  is_real = jnp.issubdtype(dtype, jnp.floating)
  return is_real and jnp.finfo(dtype).bits % 8 == 0


def _leaf_to_bytes(leaf, num_parts):
  leaf = lax.bitcast_convert_type(leaf, jnp.uint8)
  return lax.reshape(leaf, (num_parts, leaf.size // num_parts))


def _leaf_from_bytes(column, leaf):
  size = leaf.dtype.itemsize
  num_rows = column.size // (size * math.prod(leaf.shape[1:]))
  shape = num_rows, *leaf.shape[1:], *((size,) if size > 1 else ())
  return lax.bitcast_convert_type(lax.reshape(column, shape), leaf.dtype)
