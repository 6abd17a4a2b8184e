"""Counters of events, which saturate at the largest int32."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

MAX = jnp.iinfo(jnp.int32).max
# Stands for the number of a step where there has been none.
NEVER = -1


def zero() -> jax.Array:
  """Returns a counter at 0, int32 []."""
  return jnp.zeros([], jnp.int32)


@functools.partial(jax.jit, inline=True)
def add(counter: jax.Array, number: Any) -> jax.Array:
  """Returns the counter plus a number, or plus 1 for `True`."""
  number = jnp.asarray(number, jnp.int32)
  return jnp.minimum(counter, MAX - number) + number
