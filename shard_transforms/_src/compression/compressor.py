"""`Compressor`: turns rows of numbers into fewer bytes, and back."""

from collections.abc import Callable
import dataclasses
import math
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from shard_transforms._src.base import arguments


@dataclasses.dataclass(frozen=True)
class Compressor:
  r"""Two functions that turn rows of numbers into fewer bytes, and back.

  Let :math:`C(p)` be a row p, encoded and decoded. It must be 0, to the bit,
  where p is, and finite where p is. Each row must be compressed on its own, in
  the same way wherever it stands among others. With feedback, training
  converges as without compression if the error of each row is less than the
  row,

  .. math:: \lVert p - C(p) \rVert^2 \le (1 - \delta) \lVert p \rVert^2,
     \quad \delta > 0

  The keys are new in each step. Numbers that `encode` draws from its own key
  differ between shards. Numbers that both functions draw from the common key,
  such as the places of the elements to send, are the same on all shards and
  need not be sent. A compressor that draws nothing ignores the keys.

  Args:
    block: The length of a row, at least 1. The end of a leaf is filled up with
      zeros to whole rows, which are left out again.
    encode: Takes rows, float32 [r, block], the common and the own key; gives
      a payload, a tree of arrays [r, ...] of numbers of whole bytes.
    decode: Takes a payload of any number of rows, and the common key; gives
      rows, float32 [r, block].

  Raises:
    TypeError: If the block is not an integer, or a function cannot be called.
    ValueError: If the block is less than 1.

  Examples:
    The mean of each row is all that is sent:

    >>> import jax
    >>> import jax.numpy as jnp
    >>> from shard_transforms import compression
    >>> def encode(rows, common_key, own_key):
    ...   return rows.mean(1)
    >>> def decode(means, common_key):
    ...   return jnp.repeat(means[:, None], 4, axis=1)
    >>> row_means = compression.Compressor(4, encode, decode)
    >>> tx = compression.compressed_mean('data', row_means, min_elements=1)
    >>> def step(update):
    ...   return tx.update(update, tx.init(update))[0]
    >>> updates = jnp.arange(16.0).reshape(2, 8)
    >>> print(jax.vmap(step, axis_name='data')(updates)[0])
    [5.5 5.5 5.5 5.5 9.5 9.5 9.5 9.5]
  """

  block: int
  encode: Callable[[jax.Array, jax.Array, jax.Array], Any]
  decode: Callable[[Any, jax.Array], jax.Array]

  def __post_init__(self):
    arguments.as_at_least('block', self.block, 1)
    for name in ('encode', 'decode'):
      if not callable(getattr(self, name)):
        raise TypeError(
            f'`{name}` must be a function, got {getattr(self, name)!r}.'
        )


def check(compressor: Any, caller: str, name: str = 'compressor') -> None:
  """Checks that an argument is a compressor.

  Raises:
    TypeError: If it is not.
  """
  if not isinstance(compressor, Compressor):
    raise TypeError(
        f'`{name}` of `{caller}` must be a `Compressor`, got'
        f' {compressor!r}. Call its factory, as in `scaled_sign()`.'
    )


def encode(
    compressor: Compressor,
    rows: jax.Array,
    common_key: jax.Array,
    own_key: jax.Array,
) -> Any:
  """Returns the checked payload of rows, float32 [r, block].

  Raises:
    TypeError: If it is not made of numbers of whole bytes.
    ValueError: If one of its arrays has another number of rows.
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
    compressor: Compressor, payload: Any, common_key: jax.Array
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
