"""Reductions of gradients of many shapes, and what they send."""

import collections
from collections.abc import Callable
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import modes
import shard_transforms as st

GROUPS = ((0, 4), (1, 5), (2, 6), (3, 7))

WEIGHT = np.array([3, 1, 0, 5, 0.1, 2, 0.7, 4], np.float32)


def make_params(shards: tuple[int, ...] = ()) -> dict[str, Any]:
  """Returns parameters of many shapes and dtypes, or gradients for `shards`."""
  normal = np.random.default_rng(0).normal

  def some(*shape, dtype='float32'):
    x = normal(size=(*shards, *shape))
    if dtype == 'complex64':
      x = x + 1j * normal(size=x.shape)
    return x.astype(jnp.dtype(dtype))

  return {
      'w': some(3, 5),
      'b': some(),
      'v': some(71),
      'half': some(4, 2, dtype='bfloat16'),
      'halves': [some(3, dtype='bfloat16'), some(6, dtype='float16')],
      'complex': [some(2, dtype='complex64'), some(dtype='complex64')],
      'empty': some(0, 3),
  }


def loss(params: Any, data: Any) -> jax.Array:
  # The gradient is the data, whatever the shape and the dtype.
  pairs = zip(jax.tree.leaves(params), jax.tree.leaves(data), strict=True)
  return sum(jnp.real(jnp.sum(w * x)).astype('float32') for w, x in pairs)


def count_sent(fn: Callable[..., Any], *args: Any) -> dict[str, int]:
  """Counts the collectives that a function would send."""
  text = str(jax.make_jaxpr(fn)(*args))
  names = re.findall(r'\b(psum|reduce_scatter|all_gather)\w*\[', text)
  return collections.Counter(names)


def reduce(
    tx: Any,
    params: Any,
    data: Any,
    weight: Any = None,
    leaf_by_leaf: bool = False,
) -> Any:
  """Returns the reduced gradient, of a shard with the given data.

  Args:
    tx: The reduction.
    params: The parameters.
    data: The data of a shard, which is its gradient.
    weight: The weight of a shard.
    leaf_by_leaf: Whether to call `tx` for each leaf, so that no leaves are sent
      in one buffer.
  """
  grad = st.value_and_grad(loss, modes.AXIS)
  _, grads = grad(params, data)

  def update(grads, params):
    return tx.update(grads, tx.init(params), params, weight=weight)[0]

  return (
      jax.tree.map(update, grads, params)
      if leaf_by_leaf
      else update(grads, params)
  )


def map_reductions(
    mode: str, *transformations: Any, leaf_by_leaf: bool = False
) -> Callable[..., Any]:
  """Maps `reduce` by each transformation over 8 shards."""

  def shard(params, inputs):
    data, weight = inputs
    return [
        reduce(tx, params, data, weight, leaf_by_leaf) for tx in transformations
    ]

  return modes.map_shards(mode, shard)


def with_data(*leaves: np.ndarray) -> tuple[list[np.ndarray], Any]:
  """Returns parameters, and data without weights for 8 shards."""
  data = [np.broadcast_to(leaf, (8, *leaf.shape)) for leaf in leaves]
  return list(leaves), (data, None)
