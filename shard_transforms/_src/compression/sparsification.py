"""Compressors that send few of the elements."""

import chex
import jax
from jax import lax
import jax.numpy as jnp

from shard_transforms._src.base import arguments
from shard_transforms._src.compression import compressor as compressor_lib
from shard_transforms._src.compression import quantization


def top_k(fraction: float, *, block: int = 1024) -> compressor_lib.Compressor:
  """Returns the compressor that sends the largest elements of each block.

  Of B elements, the k = round(fraction B) of the largest magnitude, at least 1,
  in 6 bytes each: their values and their places. delta >= k / B. Sorting takes
  more time than any other compressor here; `group_max` sends as few elements in
  less.

  Args:
    fraction: The part of the elements that is sent, above 0 and at most 1.
    block: The number of elements among which the largest are chosen, at most
      65536.

  Returns:
    A `Compressor`.

  Raises:
    TypeError: If an argument is not a number.
    ValueError: If it is out of its range.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from shard_transforms import compression
    >>> top = compression.top_k(0.5, block=4)
    >>> key = jax.random.key(0)
    >>> payload = top.encode(jnp.array([[1.0, -3.0, 0.5, 2.0]]), key, key)
    >>> print(top.decode(payload, key))
    [[ 0. -3.  0.  2.]]

  References:
    Lin et al., Deep Gradient Compression, 2018,
    https://arxiv.org/abs/1712.01887.
  """
  block = _as_indexed_block(block)
  num_sent = _num_sent(fraction, block)

  def encode(rows, common_key, own_key):
    del common_key, own_key
    _, places = lax.top_k(jnp.abs(rows), num_sent)
    return jnp.take_along_axis(rows, places, axis=1), places.astype(jnp.uint16)

  def decode(payload, common_key):
    del common_key
    values, places = payload
    row = jnp.arange(len(values))[:, None]
    zeros = jnp.zeros((len(values), block), jnp.float32)
    return zeros.at[row, places.astype(jnp.int32)].set(
        values, unique_indices=True, mode='promise_in_bounds'
    )

  return compressor_lib.Compressor(block, encode, decode)


def group_max(group: int = 32) -> compressor_lib.Compressor:
  """Returns the compressor that sends the largest element of each group.

  Of each group of neighbours, the first one of the largest magnitude, in 5
  bytes: its value and its place. delta >= 1 / group. It takes one pass and no
  sort.

  Args:
    group: The number of elements in a group, 1 to 256. One of them is sent.

  Returns:
    A `Compressor`.

  Raises:
    TypeError: If `group` is not an integer.
    ValueError: If it is less than 1 or more than 256.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from shard_transforms import compression
    >>> largest = compression.group_max(4)
    >>> key = jax.random.key(0)
    >>> payload = largest.encode(jnp.array([[1.0, -3.0, 0.5, 2.0]]), key, key)
    >>> print(largest.decode(payload, key))
    [[ 0. -3.  0.  0.]]

  References:
    Chen et al., AdaComp: Adaptive Residual Gradient Compression for
    Data-Parallel Distributed Training, 2017, https://arxiv.org/abs/1712.02679,
    which sends at least the largest element of each bin.
  """
  group = arguments.as_at_least('group', group, 1)
  if group > 256:
    raise ValueError(
        f'`group` must be at most 256, got {group!r}: a place in it is sent in'
        ' one byte.'
    )

  def encode(rows, common_key, own_key):
    del common_key, own_key
    places = jnp.argmax(jnp.abs(rows), axis=1, keepdims=True)
    return jnp.take_along_axis(rows, places, axis=1), places.astype(jnp.uint8)

  def decode(payload, common_key):
    del common_key
    values, places = payload
    is_sent = places == jnp.arange(group, dtype=jnp.uint8)[None, :]
    return jnp.where(is_sent, values, 0)

  return compressor_lib.Compressor(group, encode, decode)


def random_k(
    fraction: float, *, block: int = 1024
) -> compressor_lib.Compressor:
  """Returns the compressor that sends the elements at common, random places.

  Of B elements, k = round(fraction B), at least 1, in 4 bytes each. All shards
  draw the same places, others in each step, so that no places are sent and the
  result is the plain mean at these. The mean of delta over the draws is k / B.

  It is for experiments: with the same number of elements, `top_k` keeps at
  least as much of the gradient.

  Args:
    fraction: The part of the elements that is sent, above 0 and at most 1.
    block: The number of elements after which the places repeat.

  Returns:
    A `Compressor`.

  Raises:
    TypeError: If an argument is not a number.
    ValueError: If it is out of its range.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from shard_transforms import compression
    >>> some = compression.random_k(0.5, block=4)
    >>> key = jax.random.key(0)
    >>> payload = some.encode(jnp.array([[1.0, 2.0, 3.0, 4.0]]), key, key)
    >>> print(payload.shape, jnp.count_nonzero(some.decode(payload, key)))
    (1, 2) 2

  References:
    Stich et al., Sparsified SGD with Memory, 2018,
    https://arxiv.org/abs/1809.07599.
  """
  block = _as_indexed_block(block)
  num_sent = _num_sent(fraction, block)

  def draw(common_key):
    return jax.random.permutation(common_key, block)[:num_sent]

  def encode(rows, common_key, own_key):
    del own_key
    return jnp.take(rows, draw(common_key), axis=1)

  def decode(payload, common_key):
    zeros = jnp.zeros((len(payload), block), jnp.float32)
    return zeros.at[:, draw(common_key)].set(payload, unique_indices=True)

  return compressor_lib.Compressor(block, encode, decode)


def _as_indexed_block(block):
  block = quantization.as_block(block, multiple=1)
  if block > 65536:
    raise ValueError(
        f'`block` must be at most 65536, got {block!r}: a place in it is sent'
        ' in two bytes.'
    )
  return block


def _num_sent(fraction: chex.Numeric, block: int) -> int:
  """Returns how many elements of a block are sent.

  Raises:
    TypeError: If `fraction` is no real number that is known.
    ValueError: If it is not above 0 and at most 1.
  """
  if isinstance(fraction, jax.Array):
    raise TypeError(
        f'`fraction` must be a Python number, got the array {fraction!r}. It'
        ' decides the shapes of what is sent.'
    )
  fraction = float(arguments.as_positive('fraction', fraction))
  if fraction > 1:
    raise ValueError(f'`fraction` must be at most 1, got {fraction!r}.')
  return max(1, round(fraction * block))
