"""Counters of events, which stay at the largest int32 once they are there."""

from typing import Any

import jax
import jax.numpy as jnp

MAX = jnp.iinfo(jnp.int32).max


def add(counter: jax.Array, number: Any) -> jax.Array:
  """Returns the counter, higher by a number, or by 1 for an event."""
  number = jnp.asarray(number, jnp.int32)
  return jnp.minimum(counter, MAX - number) + number
