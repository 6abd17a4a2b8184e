"""Updates of shards, some of which lie, for the tests of aggregators."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import modes
import shard_transforms

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
  """Maps what makes one of the gradients of all shards, taken inside."""

  def loss(params, data):
    products = jax.tree.map(lambda p, d: jnp.sum(p * d).real, params, data)
    return sum(x.astype('float32') for x in jax.tree.leaves(products))

  def fn(_, own):
    data, weight = own
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), data)
    grads = shard_transforms.value_and_grad(loss, AXIS)(zeros, data)[1]
    return tx.update(grads, tx.init(grads), weight=weight)[0]

  return modes.map_shards(mode, fn, num_shards)


def tree(num_shards: int = 8, seed: int = 0) -> dict[str, np.ndarray]:
  """Returns updates [shards, ...] of shapes that shards do not divide."""
  normal = np.random.default_rng(seed).normal
  shapes = {'b': (), 'v': (3, 7), 'w': (29,)}
  return {
      name: normal(size=(num_shards, *shape)).astype('float32')
      for name, shape in shapes.items()
  }
