"""The values of an array that this process can read.

Of an array over the devices of several processes, each of them holds a part:
its addressable shards.
"""

from collections.abc import Iterator

import chex
import jax
import numpy as np


def pieces(x: chex.Array) -> Iterator[tuple[int, np.ndarray]]:
  """Yields the parts on this process, each with its first row's number."""
  if not isinstance(x, jax.Array):
    yield 0, np.asarray(x)
    return
  for shard in x.addressable_shards:
    start = shard.index[0].start if shard.index else 0
    yield start or 0, np.asarray(shard.data)


def largest(x: chex.Array) -> int:
  """Returns the largest of the integers that are on this process."""
  return max(int(np.max(piece)) for _, piece in pieces(x))
