"""How long the update of each leaf takes."""

from collections.abc import Callable
from collections.abc import Sequence
import math
from typing import Any
import warnings

import chex
import jax
from jax import core
import jax.numpy as jnp
import numpy as np

from shard_transforms._src.base import leaves as leaves_lib

# Takes the shapes of the parameters; gives a number for each of them.
Cost = Callable[[Any], chex.ArrayTree]

# Below, a leaf is updated in no time, whoever owns it.
_LARGE = 2**20


def costs_of(params: Any, cost: Cost | None) -> list[float]:
  """Returns the cost of each leaf, as numbers of Python.

  Raises:
    TypeError: If `cost` does not give real numbers.
    ValueError: If it gives another tree, or a number that is negative or not
      finite.
  """
  if cost is None:
    return [_cost_of(jnp.shape(leaf)) for leaf in jax.tree.leaves(params)]
  found = cost(params)
  if jax.tree.structure(found) != jax.tree.structure(params):
    raise ValueError(
        '`cost` of `owned_update` must give a tree like the parameters,'
        f' {jax.tree.structure(params)}, got {jax.tree.structure(found)}.'
    )
  return [
      _as_cost(path, value) for path, value in jax.tree.leaves_with_path(found)
  ]


def _as_cost(path, value):
  dtype = leaves_lib.dtype_of_number(value)
  got = f'got {value!r} at {leaves_lib.name_of(path)}'
  is_real = dtype is not None and dtype.kind in 'iuf' and not np.ndim(value)
  if not is_real or isinstance(value, core.Tracer):
    raise TypeError(
        f'`cost` of `owned_update` must give a real number a leaf, {got}.'
    )
  if not (math.isfinite(value) and value >= 0):
    raise ValueError(
        '`cost` of `owned_update` must give finite numbers of at least 0,'
        f' {got}.'
    )
  return float(value)


def _cost_of(shape):
  # Of products of a matrix with its own kind, such as Newton-Schulz.
  return float(math.prod(shape) * (min(shape[-2:]) if len(shape) > 1 else 1))


def warn_of_one(
    owned: Sequence[int],
    names: Sequence[str],
    costs: Sequence[float],
    sizes: Sequence[int],
    num_shards: int,
) -> None:
  """Warns if one leaf decides how long all shards take."""
  largest = max(owned, key=costs.__getitem__)
  total = sum(costs[i] for i in owned)
  num_costly = sum(2 * costs[i] > costs[largest] for i in owned)
  # Where many leaves cost the same, there are just few leaves.
  decides = costs[largest] > 2 * total / num_shards and num_costly <= 2
  if sizes[largest] < _LARGE or not decides:
    return
  warnings.warn(
      '`owned_update` waits for the owner of one leaf,'
      f' {names[largest]} of {sizes[largest]:,} elements, which is'
      f' {100 * costs[largest] / total:.0f} % of the work of all'
      f' {num_shards} shards. Give it to `shard_update`, by `optax.partition`,'
      ' if that fits; or tell its `cost`, if it is less.',
      UserWarning,
      stacklevel=2,
  )
