"""Updates of correct and faulty shards, for the tests of aggregators."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import modes

AXIS = modes.AXIS

LIES = {
    'nan': np.nan,
    'infinity': np.inf,
    'minus infinity': -np.inf,
    'large': 1e38,
    'small': -1e38,
}


def aggregated(
    tx: Any, mode: str, updates: Any, weight: Any = None, num_shards: int = 8
) -> Any:
  """Returns the aggregate [shards, ...] of updates [shards, ...]."""
  return jax.device_get(mapped(tx, mode, num_shards)(0.0, (updates, weight)))


def mapped(tx: Any, mode: str, num_shards: int = 8) -> Callable[..., Any]:
  """Maps an aggregator over shards."""

  def fn(_, inputs):
    updates, weight = inputs
    return tx.update(updates, tx.init(updates), weight=weight)[0]

  return modes.map_shards(mode, fn, num_shards)


def tree(num_shards: int = 8, seed: int = 0) -> dict[str, np.ndarray]:
  """Returns updates [shards, ...] of shapes that shards do not divide.

  Two leaves have one shape.
  """
  normal = np.random.default_rng(seed).normal
  shapes = {'a': (29,), 'b': (), 'v': (3, 7), 'w': (29,)}
  return {
      name: normal(size=(num_shards, *shape)).astype('float32')
      for name, shape in shapes.items()
  }
