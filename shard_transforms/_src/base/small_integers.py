"""Small integers, such as signs, several in a byte."""

import jax
import jax.numpy as jnp
import numpy as np


def pack(values: jax.Array, num_values: int) -> jax.Array:
  """Returns small integers [..., n] as bytes [..., n / num_values].

  Neighbours in a byte are far apart in the row, so that whole parts of the row
  are combined by one vector operation. Values, or booleans, are below
  2 ** (8 / num_values); a byte has 2, 4 or 8 of them.
  """
  *lead, length = values.shape
  shifts = np.arange(0, 8, 8 // num_values, dtype=np.uint8)
  shifts = shifts.reshape(*(1,) * len(lead), num_values, 1)
  parts = values.astype(jnp.uint8)
  parts = parts.reshape(*lead, num_values, length // num_values)
  return jnp.sum(parts << shifts, axis=-2, dtype=jnp.uint8)


def unpack(packed: jax.Array, num_values: int) -> jax.Array:
  """Returns the integers [..., num_values n] in bytes [..., n]."""
  bits = 8 // num_values
  mask = np.uint8(2**bits - 1)
  parts = [(packed >> np.uint8(i * bits)) & mask for i in range(num_values)]
  return jnp.concatenate(parts, axis=-1)
