"""Weights of shards and towers in reductions.

Every shard and every tower has a scalar weight; 0 excludes it. Numbers of
tokens, the age of stale updates and the exclusion of non-finite shards are all
expressed as weights that are passed on to the reduction, so these features
compose.
"""

from collections.abc import Callable
import functools
from typing import Any, Literal

import chex
import jax
from jax import core
from jax import lax
import jax.numpy as jnp
import numpy as np

from shard_transforms._src.base import leaves

MeanOrSum = Literal['mean', 'sum']


def as_weight(
    weight: chex.Numeric, shape: tuple[int, ...], caller: str
) -> jax.Array:
  """Checks a weight, and returns it as an array of usable weights.

  Only concrete values are checked; a traced value that is not usable becomes 0.

  Raises:
    TypeError: If `weight` is not a real number.
    ValueError: If `weight` has another shape, or is concrete and negative or
      not finite.
  """
  name = f'`weight` of `{caller}`'
  # An array of booleans is a mask of shards, but a Python boolean was probably
  # meant for another argument.
  is_flag = isinstance(weight, (bool, np.bool_))
  dtype = None if is_flag else leaves.dtype_of_number(weight)
  real = (np.bool_, jnp.integer, jnp.floating)
  if dtype is None or not any(jnp.issubdtype(dtype, x) for x in real):
    raise TypeError(f'{name} must be a real number, got {weight!r}.')
  if jnp.shape(weight) != shape:
    raise ValueError(
        f'{name} must have the shape {shape}, got {jnp.shape(weight)}. Each'
        ' shard and each tower has one weight.'
    )
  if not isinstance(weight, core.Tracer):
    values = np.asarray(weight, np.float64)
    if not np.all((values >= 0) & (values <= np.finfo(np.float32).max)):
      raise ValueError(
          f'{name} must be finite and not negative, got {weight!r}.'
      )
    weight = values
  return sanitized(jnp.asarray(weight, _dtype_of_weight(dtype)))


def _dtype_of_weight(dtype):
  """Returns the floating-point dtype for weights: float32 or wider.

  Weights of 64 bits become float64 if JAX has 64-bit types. So do 32-bit
  integers, which float32 would round.
  """
  is_exact = jnp.issubdtype(dtype, jnp.integer)
  is_wide = dtype.itemsize > 4 or (is_exact and dtype.itemsize == 4)
  return jax.dtypes.canonicalize_dtype(jnp.float64 if is_wide else jnp.float32)


def dtype_for(tree: Any) -> np.dtype:
  """Returns the dtype of a weight that multiplies all leaves of a tree.

  The dtype is float64 if the tree has a float64 or complex128 leaf, and float32
  otherwise.
  """
  dtypes = map(leaves.dtype_of, jax.tree.leaves(tree))
  inexact = [jnp.finfo(x) for x in dtypes if jnp.issubdtype(x, jnp.inexact)]
  is_wide = any(x.bits > 32 for x in inexact)
  return np.dtype(np.float64 if is_wide else np.float32)


@functools.partial(jax.jit, inline=True)
def sanitized(weight: jax.Array) -> jax.Array:
  """Replaces weights that are not positive normal float32 numbers by 0.

  Subnormal numbers are excluded because their reciprocals may be infinite.
  """
  tiny = jnp.finfo(jnp.float32).tiny
  # A wide weight may be multiplied with 32-bit leaves, so check as float32.
  narrow = weight.astype(jnp.float32)
  return jnp.where(jnp.isfinite(narrow) & (narrow >= tiny), weight, 0)


def scale_by_weight(
    weight: jax.Array | None,
) -> Callable[[jax.Array], jax.Array]:
  """Returns a function that multiplies by a weight; 0 times NaN is 0."""
  if weight is None:
    return lambda x: x
  where_counted = leaves.where_or_zeros_fn(weight > 0)
  in_dtype = functools.cache(weight.astype)
  return lambda x: where_counted(lax.mul(in_dtype(x.dtype), x))


def safe_divisor(total_weight: jax.Array) -> jax.Array:
  """Replaces a total weight of 0 by 1, so that a division by it gives 0."""
  return jnp.where(total_weight > 0, total_weight, 1)


def outgoing_weight(total_weight: jax.Array, reduction: MeanOrSum) -> jax.Array:
  """Returns the weight of a reduced update for later reductions.

  A mean has the total weight. A sum already contains its weights, so its weight
  is 1, or 0 if the total weight is 0.
  """
  return jnp.sign(total_weight) if reduction == 'sum' else total_weight


def check_not_in_chain(weight: chex.Numeric | None, caller: str) -> None:
  """Checks that a wrapper without `inner` does not receive a weight.

  Raises:
    ValueError: If `weight` is not `None`.
  """
  if weight is not None:
    raise ValueError(
        f'`weight` of `{caller}` must come with `inner`, because an element of'
        ' a chain cannot pass the total weight to the next element. Write'
        f' `{caller}(num_towers, optax.chain(...))`.'
    )


def drop_none(**extra_args: Any) -> dict[str, Any]:
  """Returns the extra arguments that are not `None`.

  Some transformations reject the keyword `weight`, even if it is `None`.
  """
  return {name: x for name, x in extra_args.items() if x is not None}
