"""The age of an update in steps, and the factor that goes with it."""

from collections.abc import Callable
from typing import Literal

import chex
import jax
import jax.numpy as jnp

from shard_transforms._src.base import arguments
from shard_transforms._src.base import counters

Kind = Literal['inverse', 'exponential'] | Callable[[jax.Array], chex.Numeric]


def of(local_step: jax.Array, global_step: jax.Array) -> jax.Array:
  """Returns how many steps ago parameters were read, at least 0, int32 []."""
  # The difference may not fit int32; it fits uint32 where it is not negative.
  age = global_step.astype(jnp.uint32) - local_step.astype(jnp.uint32)
  age = jnp.minimum(age, counters.MAX).astype(jnp.int32)
  return jnp.where(local_step < global_step, age, 0)


def as_factor(
    kind: Kind, rate: chex.Numeric | None
) -> Callable[[jax.Array], jax.Array]:
  """Returns a function of the age for the factor, float32 [].

  Raises:
    TypeError: If `kind` is neither a name nor a function, or `rate` no number.
    ValueError: If `kind` is unknown, or `rate` not for it, or not positive.
  """
  if not isinstance(kind, str) and not callable(kind):
    raise TypeError(
        '`kind` of `scale_by_staleness` must be a name or a function of the'
        f' age, got {kind!r}. Under `optax.inject_hyperparams`, name it in'
        ' `static_args`.'
    )
  if isinstance(kind, str) and kind not in ('inverse', 'exponential'):
    raise ValueError(
        "`kind` of `scale_by_staleness` must be 'inverse', 'exponential' or a"
        f' function of the age, got {kind!r}.'
    )
  if (rate is None) == (kind == 'exponential'):
    raise ValueError(
        "`rate` of `scale_by_staleness` must come with 'exponential', and with"
        f' no other `kind`, got {rate!r} with {kind!r}.'
    )
  if kind == 'inverse':
    return lambda age: 1 / jnp.maximum(age, 1).astype(jnp.float32)
  if kind == 'exponential':
    rate = arguments.as_positive('rate', rate)
    return lambda age: jnp.exp(-jnp.asarray(rate, jnp.float32) * age)
  return lambda age: _as_scalar(kind(age))


def _as_scalar(factor):
  """Returns the result of a user's function of the age, checked.

  Raises:
    TypeError: If it is not real.
    ValueError: If it is no scalar.
  """
  name = 'The factor that `kind` of `scale_by_staleness` gives'
  dtype = arguments.dtype_of_number(factor)
  if dtype is None or jnp.issubdtype(dtype, jnp.complexfloating):
    raise TypeError(f'{name} must be a real number, got {factor!r}.')
  if jnp.shape(factor):
    raise ValueError(
        f'{name} must be a scalar, got the shape {jnp.shape(factor)}.'
    )
  return jnp.asarray(factor, jnp.float32)
