"""Checks of the numbers that users hand in: counts, weights and local steps."""

import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def as_int(name: str, value: Any) -> int:
  """Returns `value` as a Python integer.

  Raises:
    TypeError: If it is not an integer that is known at construction.
  """
  if isinstance(value, jax.Array):
    raise TypeError(
        f'`{name}` must be a Python integer, got the array {value!r}. Under'
        f' `optax.inject_hyperparams`, name it in `static_args`.'
    )
  try:
    if isinstance(value, (bool, np.bool_)):
      raise TypeError
    return operator.index(value)
  except TypeError as error:
    raise TypeError(f'`{name}` must be an integer, got {value!r}.') from error


def as_num_towers(num_towers: Any) -> int:
  """Returns `num_towers` as a Python integer.

  Raises:
    TypeError: If it is not an integer that is known at construction.
    ValueError: If it is less than 1.
  """
  num_towers = as_int('num_towers', num_towers)
  if num_towers < 1:
    raise ValueError(f'`num_towers` must be at least 1, got {num_towers!r}.')
  return num_towers


def check_reduction(reduction: Any) -> None:
  """Checks a kind of reduction.

  Raises:
    ValueError: If it is not `'mean'` or `'sum'`.
  """
  if reduction not in ('mean', 'sum'):
    raise ValueError(f"`reduction` must be 'mean' or 'sum', got {reduction!r}.")


def as_weight(weight: Any, shape: tuple[int, ...], caller: str) -> jax.Array:
  """Returns `weight` in float32; what is not a positive number is zero.

  Where the value is known while tracing, a bad one is an error instead.

  Raises:
    TypeError: If the weight is not real.
    ValueError: If it is not of `shape`, or is negative or not finite.
  """
  dtype = jnp.result_type(weight)
  real = jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(
      dtype, jnp.integer
  )
  if not real and dtype != bool:
    raise TypeError(
        f'`weight` of `{caller}` must be a real number, got {weight!r}.'
    )
  if jnp.shape(weight) != shape:
    raise ValueError(
        f'`weight` of `{caller}` must have the shape {shape}, got'
        f' {jnp.shape(weight)}. It is one number a shard and tower.'
    )
  if not isinstance(weight, jax.core.Tracer):
    known = np.asarray(weight, np.float64)
    if not np.all(np.isfinite(known) & (known >= 0)):
      raise ValueError(
          f'`weight` of `{caller}` must be finite and not negative, got'
          f' {weight!r}.'
      )
  weight = jnp.asarray(weight, jnp.float32)
  return jnp.where(jnp.isfinite(weight) & (weight > 0), weight, 0)


def as_local_step(local_step: Any, caller: str, ndim: int = 0) -> jax.Array:
  """Returns `local_step` in int32.

  Raises:
    TypeError: If it is missing or not an integer.
    ValueError: If it does not have `ndim` dimensions.
  """
  if local_step is None:
    raise TypeError(
        f'`local_step` of `{caller}` must be the global step at which the'
        ' parameters behind the updates were read, got None. Call'
        ' `tx.update(updates, state, params, local_step=...)`.'
    )
  if not jnp.issubdtype(jnp.result_type(local_step), jnp.integer):
    raise TypeError(
        f'`local_step` of `{caller}` must be an integer, got {local_step!r}.'
    )
  if jnp.ndim(local_step) != ndim:
    raise ValueError(
        f'`local_step` of `{caller}` must have {ndim} dimensions, got the shape'
        f' {jnp.shape(local_step)}. It is one step for all leaves.'
    )
  return jnp.asarray(local_step, jnp.int32)
