"""A sorting network: rows sorted element by element, by minima and maxima.

XLA's sort moves one element at a time on a CPU; a network compares whole rows,
and comparisons whose results are not used are not computed.
"""

from collections.abc import Iterator
from collections.abc import Sequence

import jax
from jax import lax
import jax.numpy as jnp

# The network of n rows has about n log(n)**2 / 4 comparisons to compile.
_MAX_ROWS = 32


def sort(rows: Sequence[jax.Array]) -> list[jax.Array]:
  """Returns rows in ascending order element by element; none may be NaN."""
  if len(rows) > _MAX_ROWS:
    return list(jnp.sort(jnp.stack(rows), axis=0))
  rows = list(rows)
  for i, j in comparisons(len(rows)):
    rows[i], rows[j] = lax.min(rows[i], rows[j]), lax.max(rows[i], rows[j])
  return rows


def comparisons(num_rows: int) -> Iterator[tuple[int, int]]:
  """Yields the pairs of rows to compare, in order.

  This is Batcher's merge exchange: Knuth, The Art of Computer Programming,
  volume 3, section 5.2.2, algorithm M.
  """
  largest = 1 << max((num_rows - 1).bit_length() - 1, 0)
  step = largest
  while step:
    distance, offset, next_step = step, 0, largest
    while True:
      for i in range(num_rows - distance):
        if i & step == offset:
          yield i, i + distance
      if next_step == step:
        break
      distance, offset, next_step = next_step - step, step, next_step // 2
    step //= 2
