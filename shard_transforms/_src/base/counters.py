"""Counters of events, which stay at the largest int32 once they are there."""

from typing import Any

import jax
import jax.numpy as jnp

MAX = jnp.iinfo(jnp.int32).max
# Stands for the number of a step that there has not been.
NEVER = -1


def zero() -> jax.Array:
  """Returns a counter of nothing so far, int32 []."""
  return jnp.zeros([], jnp.int32)


def add(counter: jax.Array, number: Any) -> jax.Array:
  """Returns the counter, higher by a number, or by 1 for an event."""
  number = jnp.asarray(number, jnp.int32)
  return jnp.minimum(counter, MAX - number) + number
