"""`Compressor`: turns rows of numbers into fewer bytes, and back."""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from shard_transforms._src.base import arguments

_LINE = 128


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
    ValueError: If it has no elements, or one of its arrays has another number
      of rows.
  """
  payload = compressor.encode(rows, common_key, own_key)
  sizes = [jnp.size(leaf) for leaf in jax.tree.leaves(payload)]
  if not sizes or 0 in sizes:
    raise ValueError(
        '`encode` of a `Compressor` must give arrays with elements, got'
        f' {payload!r}. Decode zeros from an array of zeros.'
    )
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


def to_words(payload: Any, num_parts: int) -> jax.Array:
  """Returns a payload as unsigned integers [num_parts, lines, 128].

  A word is as wide as a number of the narrowest array. In a part, of whole
  rows, the arrays of the payload come one after the other, each filled up with
  zeros to whole lines. Rows of several arrays, one after the other, take XLA on
  CPU three times as long to decode. XLA for TPUs takes 20 times as long to
  compile the exchange of bytes that are not in lines, and of numbers whose
  bytes are neighbours.

  Args:
    payload: Of a multiple of `num_parts` rows.
    num_parts: Into how many parts of as many rows it is cut.
  """
  leaves = jax.tree.leaves(payload)
  size = _word_size(leaves)
  lines = [_to_lines(leaf, num_parts, size) for leaf in leaves]
  return lines[0] if len(lines) == 1 else jnp.concatenate(lines, axis=1)


def from_words(parts: jax.Array, like: Any, num_parts: int) -> Any:
  """Returns the payload, of as many parts as there are.

  Args:
    parts: Words as `to_words` gives them, [parts, lines, 128].
    like: A payload of `num_parts` parts.
    num_parts: How many these are.
  """
  leaves, treedef = jax.tree.flatten(like)
  size = _word_size(leaves)
  num_words = [leaf.nbytes // size // num_parts for leaf in leaves]
  lines = lax.split(parts, [-(-n // _LINE) for n in num_words], axis=1)
  flat = [
      x.reshape(len(x), -1)[:, :n]
      for x, n in zip(lines, num_words, strict=True)
  ]
  return treedef.unflatten(map(_from_flat, flat, leaves))


def _has_whole_bytes(dtype):
  if jnp.issubdtype(dtype, jnp.integer):
    return jnp.iinfo(dtype).bits % 8 == 0
  is_real = jnp.issubdtype(dtype, jnp.floating)
  return is_real and jnp.finfo(dtype).bits % 8 == 0


def _word_size(leaves):
  return min(leaf.dtype.itemsize for leaf in leaves)


def _to_lines(leaf, num_parts, size):
  """Returns the lines of an array: first the low words of all its numbers."""
  wide = lax.bitcast_convert_type(leaf, _unsigned(leaf.dtype.itemsize))
  wide = wide.reshape(num_parts, -1)
  shifts = range(0, leaf.dtype.itemsize, size)
  words = [(wide >> 8 * i).astype(_unsigned(size)) for i in shifts]
  flat = words[0] if len(words) == 1 else jnp.concatenate(words, axis=1)
  if padding := -flat.shape[1] % _LINE:
    flat = jnp.pad(flat, ((0, 0), (0, padding)))
  return flat.reshape(num_parts, -1, _LINE)


def _from_flat(flat, leaf):
  """Returns the rows like those of an array, of words [parts, words]."""
  size, kind = flat.dtype.itemsize, _unsigned(leaf.dtype.itemsize)
  words = jnp.split(flat, leaf.dtype.itemsize // size, axis=1)
  shifted = [x.astype(kind) << 8 * size * i for i, x in enumerate(words)]
  wide = functools.reduce(lax.bitwise_or, shifted)
  return lax.bitcast_convert_type(wide.reshape(-1, *leaf.shape[1:]), leaf.dtype)


def _unsigned(size):
  return jnp.dtype(f'uint{8 * size}')
