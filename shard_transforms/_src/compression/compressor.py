"""`Compressor`: what turns rows of numbers into fewer bytes, and back."""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax

from shard_transforms._src.base import arguments


@dataclasses.dataclass(frozen=True)
class Compressor:
  r"""Two functions that turn rows of numbers into fewer bytes, and back.

  With :math:`C(p)` for what `decode` makes of what `encode` makes of p, there
  must be :math:`C(0) = 0`, to the bit, and :math:`C(p)` finite where p is. Each
  row must be compressed on its own, in the same way wherever it stands among
  others. With feedback, training converges as without compression if each row
  shrinks,

  .. math:: \lVert p - C(p) \rVert^2 \le (1 - \delta) \lVert p \rVert^2,
     \quad \delta > 0

  The keys are new in each step. What `encode` draws from the own key differs
  between shards; what both draw from the common key, such as which elements to
  send, is the same on all of them and need not be sent. A compressor that draws
  nothing ignores the keys.

  Args:
    block: The length of a row, at least 1. The end of a leaf is filled up with
      zeros to whole rows, which are left out again.
    encode: Takes rows, float32 [r, block], the common and the own key; gives
      a payload, a tree of arrays [r, ...] of numbers of whole bytes.
    decode: Takes a payload of any number of rows, and the common key; gives
      rows, float32 [r, block].

  Raises:
    TypeError: If the block is no integer, or a function cannot be called.
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


def check(compressor: Any, caller: str) -> None:
  """Checks that an argument is a compressor.

  Raises:
    TypeError: If it is none.
  """
  if not isinstance(compressor, Compressor):
    raise TypeError(
        f'`compressor` of `{caller}` must be a `Compressor`, got'
        f' {compressor!r}. Call its factory, as in `scaled_sign()`.'
    )
