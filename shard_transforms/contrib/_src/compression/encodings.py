"""Compressors that quantize or select elements."""

import chex
import jax
from jax import lax
import jax.numpy as jnp

from shard_transforms._src.base import arguments
from shard_transforms._src.base import axes as axes_lib
from shard_transforms.contrib._src import exchanges
from shard_transforms.contrib._src.compression import (
    compressor as compressor_lib,
)


def scaled_sign(block: int = 1024) -> compressor_lib.Compressor:
  r"""Returns a compressor that sends signs, and one scale per block.

  .. math:: C(p) = \frac{\lVert p \rVert_1}{B} \operatorname{sign}(p),
     \quad \delta = \frac{\lVert p \rVert_1^2}{B \lVert p \rVert_2^2}
     \ge \frac{1}{B}

  with sign(0) = 1, for each block of B elements: one bit per element, and 4
  bytes per block. Without feedback it does not converge on simple problems.
  With feedback it needs a smaller learning rate than the mean does, especially
  with momentum; see `docs/compression.md`.

  Args:
    block: The number of elements that share a scale, a multiple of 8.

  Returns:
    A `Compressor`.

  Raises:
    TypeError: If `block` is not an integer.
    ValueError: If `block` is not a multiple of 8, or less than 8.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from shard_transforms.contrib import compression
    >>> sign = compression.scaled_sign(8)
    >>> key = jax.random.key(0)
    >>> rows = jnp.array([[1.0, -2.0, 3.0, -4.0, 0.5, 0.5, -0.5, -0.5]])
    >>> bits, scale = payload = sign.encode(rows, key, key)
    >>> print(bits, scale)
    [[53]] [[1.5]]
    >>> print(sign.decode(payload, key))
    [[ 1.5 -1.5  1.5 -1.5  1.5  1.5 -1.5 -1.5]]

  References:
    Karimireddy et al., Error Feedback Fixes SignSGD and other Gradient
    Compression Schemes, 2019, https://arxiv.org/abs/1901.09847.
  """
  block = _as_block(block, multiple=8)

  def encode(rows, common_key, own_key):
    del common_key, own_key
    scale = jnp.mean(jnp.abs(rows), axis=1, keepdims=True)
    return exchanges.pack_integers(rows >= 0, 8), scale

  def decode(payload, common_key):
    del common_key
    bits, scale = payload
    return jnp.where(exchanges.unpack_integers(bits, 8) > 0, scale, -scale)

  return compressor_lib.Compressor(block, encode, decode)


def quantize(
    bits: int, *, block: int = 256, stochastic: bool = False
) -> compressor_lib.Compressor:
  r"""Returns a compressor that sends integers, and one scale per block.

  .. math:: C(p) = s \operatorname{round}(p / s), \quad
     s = \max |p| / L, \quad L = 2^{\text{bits} - 1} - 1

  for each block of B elements, whose scale s takes 4 more bytes, and
  :math:`\delta \ge \max(1/B, 1 - B / (2 L)^2)`. With `stochastic`, a value
  between two integers is rounded up with a probability equal to its fraction,
  so that the expected value of C(p) is p. A block whose largest element is less
  than about 1.5e-36 is sent as zeros on hardware that flushes subnormal values,
  such as the scale of the block, to zero, as CPUs do.

  Args:
    bits: The number of bits per element, 8 or 4.
    block: The number of elements that share a scale, even.
    stochastic: Whether to round up or down at random.

  Returns:
    A `Compressor`.

  Raises:
    TypeError: If `bits` or `block` are not integers, or `stochastic` is not a
      boolean.
    ValueError: If `bits` is neither 8 nor 4, or `block` is odd or less than 2.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from shard_transforms.contrib import compression
    >>> int4 = compression.quantize(4, block=4)
    >>> key = jax.random.key(0)
    >>> payload = int4.encode(jnp.array([[7.0, -3.2, 0.4, 0.0]]), key, key)
    >>> print(int4.decode(payload, key))
    [[ 7. -3.  0.  0.]]

  References:
    Alistarh et al., QSGD: Communication-Efficient SGD via Gradient Quantization
    and Encoding, 2017, https://arxiv.org/abs/1610.02132.
  """
  bits = arguments.as_int('bits', bits)
  if bits not in (4, 8):
    raise ValueError(f'`bits` must be 8 or 4, got {bits!r}.')
  arguments.check_bool('stochastic', stochastic)
  block = _as_block(block, multiple=2)
  max_level = 2 ** (bits - 1) - 1

  def encode(rows, common_key, own_key):
    del common_key
    largest = jnp.max(jnp.abs(rows), axis=1, keepdims=True)
    scale = largest / max_level
    # The reciprocal of a subnormal scale would be infinite.
    levels = rows / jnp.where(scale == 0, 1, scale)
    if stochastic:
      levels = jnp.floor(levels + jax.random.uniform(own_key, rows.shape))
    levels = jnp.clip(jnp.round(levels), -max_level, max_level).astype(jnp.int8)
    if bits == 8:
      return levels, scale
    return (
        exchanges.pack_integers((levels + max_level).astype(jnp.uint8), 2),
        scale,
    )

  def decode(payload, common_key):
    del common_key
    levels, scale = payload
    if bits == 4:
      levels = exchanges.unpack_integers(levels, 2).astype(jnp.int8) - max_level
    return levels.astype(jnp.float32) * scale

  return compressor_lib.Compressor(block, encode, decode)


def cast(dtype: jax.typing.DTypeLike) -> compressor_lib.Compressor:
  """Returns a compressor that casts each element to another dtype.

  Values beyond the largest finite value of the dtype are clipped to it. If all
  elements are in the normal range of the dtype, with its relative precision
  eps, the delta of `Compressor` is 1 - eps^2. Float32 sends all elements
  unchanged.

  Args:
    dtype: A real dtype with a sign, of 8, 16 or 32 bits, such as `'bfloat16'`.

  Returns:
    A `Compressor`.

  Raises:
    TypeError: If `dtype` is not a dtype.
    ValueError: If `dtype` is complex, is an integer type, has no sign, or has
      another number of bits.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from shard_transforms.contrib import compression
    >>> half = compression.cast('bfloat16')
    >>> key = jax.random.key(0)
    >>> payload = half.encode(jnp.full((1, 64), 1.01), key, key)
    >>> print(payload.dtype, half.decode(payload, key)[0, 0])
    bfloat16 1.0078125
  """
  dtype = jnp.dtype(dtype)
  info = jnp.finfo(dtype) if jnp.issubdtype(dtype, jnp.floating) else None
  if info is None or info.bits not in (8, 16, 32) or float(info.min) >= 0:
    raise ValueError(
        '`dtype` must be real, signed, and of 8, 16 or 32 bits, got'
        f' {dtype.name}.'
    )
  max_value = float(jnp.finfo(dtype).max)

  def encode(rows, common_key, own_key):
    del common_key, own_key
    return jnp.clip(rows, -max_value, max_value).astype(dtype)

  def decode(payload, common_key):
    del common_key
    return payload.astype(jnp.float32)

  return compressor_lib.Compressor(64, encode, decode)


def top_k(fraction: float, *, block: int = 1024) -> compressor_lib.Compressor:
  """Returns a compressor that sends the largest elements of each block.

  For a block of B elements, it sends the k = round(fraction B) elements of the
  largest magnitude, at least one, with their indices: 6 bytes each. The delta
  of `Compressor` is at least k / B. Because of the sorting, it takes more time
  than any other compressor of this module.

  Args:
    fraction: The fraction of the elements that is sent, above 0 and at most 1.
    block: The number of elements among which the largest are chosen, at most
      65536.

  Returns:
    A `Compressor`.

  Raises:
    TypeError: If an argument is not a number.
    ValueError: If an argument is out of range.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from shard_transforms.contrib import compression
    >>> top = compression.top_k(0.5, block=4)
    >>> key = jax.random.key(0)
    >>> payload = top.encode(jnp.array([[1.0, -3.0, 0.5, 2.0]]), key, key)
    >>> print(top.decode(payload, key))
    [[ 0. -3.  0.  2.]]

  References:
    Lin et al., Deep Gradient Compression, 2018,
    https://arxiv.org/abs/1712.01887.
  """
  block = _as_block(block, multiple=1)
  if block > 65536:
    raise ValueError(
        '`block` must be at most 65536, because an index in a block is sent in'
        f' two bytes, got {block!r}.'
    )
  num_selected = _num_selected(fraction, block)

  def encode(rows, common_key, own_key):
    del common_key, own_key
    _, indices = lax.top_k(jnp.abs(rows), num_selected)
    indices = indices.astype(jnp.uint16)
    if axes_lib.platform() == 'tpu':
      return jnp.sum(rows[:, None], 2, where=_one_hot(indices, block)), indices
    return jnp.take_along_axis(rows, indices, axis=1), indices

  def decode(payload, common_key):
    del common_key
    values, indices = payload
    if axes_lib.platform() == 'tpu':
      return jnp.sum(values[..., None], 1, where=_one_hot(indices, block))
    row = jnp.arange(len(values), dtype=jnp.int32)[:, None]
    zeros = jnp.zeros((len(values), block), jnp.float32)
    return zeros.at[row, indices.astype(jnp.int32)].set(
        values, unique_indices=True, mode='promise_in_bounds'
    )

  return compressor_lib.Compressor(block, encode, decode)


def _one_hot(indices, block):
  """Returns the one-hot encoding of indices, bool [rows, indices, block].

  With sums over it instead of a gather and a scatter, XLA for TPUs compiles a
  step in half of the time: python benchmarks/hardware.py v5e:2x4 'top_k(0.01)'
  """
  return indices[..., None] == lax.broadcasted_iota(
      indices.dtype, (1, 1, block), 2
  )


def _as_block(block: int, multiple: int) -> int:
  """Checks and returns the length of a block.

  Raises:
    TypeError: If it is not an integer.
    ValueError: If it is not a positive multiple of `multiple`.
  """
  block = arguments.as_at_least('block', block, multiple)
  if block % multiple:
    raise ValueError(
        f'`block` must be a multiple of {multiple}, got {block!r}.'
    )
  return block


def _num_selected(fraction: chex.Numeric, block: int) -> int:
  """Returns the number of elements that are sent per block.

  Raises:
    TypeError: If `fraction` is not a Python number.
    ValueError: If it is not above 0 and at most 1.
  """
  if isinstance(fraction, jax.Array):
    raise TypeError(
        '`fraction` must be a Python number, because it determines the shapes'
        f' of the payload, got the array {fraction!r}.'
    )
  fraction = float(arguments.as_positive('fraction', fraction))
  if fraction > 1:
    raise ValueError(f'`fraction` must be at most 1, got {fraction!r}.')
  return max(1, round(fraction * block))
