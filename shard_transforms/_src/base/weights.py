"""How much shards and towers count.

Each has a scalar weight; 0 leaves it out. Everything that decides how much an
update counts is a weight that is passed on to the reduction: a number of
tokens, the age of a stale update, a shard that is not finite. So all of them
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

Kind = Literal['mean', 'sum']


def as_weight(
    weight: chex.Numeric, shape: tuple[int, ...], caller: str
) -> jax.Array:
  """Returns `weight` as `usable`; a bad one that is known is an error.

  Raises:
    TypeError: If it is no real number.
    ValueError: If it has another shape, or is known to be negative or not
      finite.
  """
  name = f'`weight` of `{caller}`'
  # An array of booleans says which shards count; `True` alone is a flag that
  # was meant for another argument.
  is_flag = isinstance(weight, (bool, np.bool_))
  dtype = None if is_flag else leaves.dtype_of_number(weight)
  kinds = (np.bool_, jnp.integer, jnp.floating)
  if dtype is None or not any(jnp.issubdtype(dtype, kind) for kind in kinds):
    raise TypeError(f'{name} must be a real number, got {weight!r}.')
  if jnp.shape(weight) != shape:
    raise ValueError(
        f'{name} must have the shape {shape}, got {jnp.shape(weight)}. It is'
        ' one number for each shard and tower.'
    )
  if not isinstance(weight, core.Tracer):
    known = np.asarray(weight, np.float64)
    if not np.all((known >= 0) & (known <= np.finfo(np.float32).max)):
      raise ValueError(
          f'{name} must be finite and not negative, got {weight!r}.'
      )
    weight = known
  return usable(jnp.asarray(weight, _dtype_of_weight(dtype)))


def _dtype_of_weight(dtype):
  """Returns the dtype in which weights of a dtype are kept: at least float32.

  float32 rounds integers of 32 bits, too: with 64 bits, these are float64.
  """
  is_exact = jnp.issubdtype(dtype, jnp.integer)
  is_wide = dtype.itemsize > 4 or (is_exact and dtype.itemsize == 4)
  return jax.dtypes.canonicalize_dtype(jnp.float64 if is_wide else jnp.float32)


def dtype_for(tree: Any) -> np.dtype:
  """Returns the dtype of a weight that multiplies all leaves of a tree.

  It is float64 if a leaf has 64 bits or, if it is complex, parts of 64 bits.
  """
  kinds = map(leaves.dtype_of, jax.tree.leaves(tree))
  floating = [jnp.finfo(x) for x in kinds if jnp.issubdtype(x, jnp.inexact)]
  is_wide = any(x.bits > 32 for x in floating)
  return np.dtype(np.float64 if is_wide else np.float32)


@functools.partial(jax.jit, inline=True)
def usable(weight: jax.Array) -> jax.Array:
  """Returns a weight; all but positive normal numbers of float32 become 0.

  The reciprocal of a subnormal number is infinite.
  """
  tiny = jnp.finfo(jnp.float32).tiny
  # Leaves of 32 bits may be multiplied by a wider weight.
  narrow = weight.astype(jnp.float32)
  return jnp.where(jnp.isfinite(narrow) & (narrow >= tiny), weight, 0)


def weighing(weight: jax.Array | None) -> Callable[[jax.Array], jax.Array]:
  """Returns a function that multiplies by a weight; 0 gives 0, for NaN too."""
  if weight is None:
    return lambda x: x
  zero_unless_counted = leaves.zeroing_unless(weight > 0)
  in_dtype = functools.cache(weight.astype)
  return lambda x: zero_unless_counted(lax.mul(in_dtype(x.dtype), x))


def safe_divisor(total_weight: jax.Array) -> jax.Array:
  """Returns a total weight to divide by: 1 in place of 0, as 0 / 1 is 0."""
  return jnp.where(total_weight > 0, total_weight, 1)


def passed_on(total_weight: jax.Array, reduction: Kind) -> jax.Array:
  """Returns the weight of a reduced update: a mean's total, 1 or 0 for a sum.

  A sum already contains its weights: later reductions only need to know whether
  there were any.
  """
  return jnp.sign(total_weight) if reduction == 'sum' else total_weight


def check_not_in_chain(weight: chex.Numeric | None, caller: str) -> None:
  """Checks that a wrapper without `inner` is given no weight.

  Raises:
    ValueError: If it is given one.
  """
  if weight is not None:
    raise ValueError(
        f'`weight` of `{caller}` must come with `inner`: a link of a chain'
        ' cannot pass the total weight to the next link. Write'
        f' `{caller}(num_towers, optax.chain(...))`.'
    )


def given(**extra_args: Any) -> dict[str, Any]:
  """Returns those extra arguments that are not `None`.

  Some transformations reject the keyword `weight`, even if it is `None`.
  """
  return {name: x for name, x in extra_args.items() if x is not None}
