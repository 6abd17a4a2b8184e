"""Copies of arrays on the host or on devices."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def refuse_elsewhere(name: str) -> None:
  """Raises because part of a state to be resized is on other processes.

  Raises:
    ValueError: Always.
  """
  raise ValueError(
      '`state` must be on this process where the number of shards changes, got'
      f' a part of {name}. Restore it as arrays of NumPy.'
  )


def is_here(leaf: Any) -> bool:
  """Whether this process can read the whole leaf."""
  if not isinstance(leaf, jax.Array):
    return True
  return leaf.is_fully_addressable or leaf.is_fully_replicated


def on_host(leaf: Any) -> Any:
  """Returns a leaf as a NumPy array if this process can read the whole leaf."""
  is_array = isinstance(leaf, jax.Array)
  if is_array and (is_key(leaf) or not is_here(leaf)):
    return leaf
  return np.asarray(leaf, dtype_of(leaf))


def is_on_devices(field: Any) -> bool:
  """Whether a field has JAX arrays other than random keys."""
  leaves = jax.tree.leaves(field)
  return any(isinstance(x, jax.Array) and not is_key(x) for x in leaves)


def copied(leaf: Any) -> Any:
  """Copies a leaf without moving it; returns a type unchanged."""
  if isinstance(leaf, jax.ShapeDtypeStruct):
    return leaf
  if isinstance(leaf, jax.Array):
    return _copy(leaf)
  return np.array(leaf, dtype_of(leaf))


def put(leaf: Any, sharding: jax.sharding.Sharding) -> jax.Array:
  """Returns a copy of a leaf, placed with a sharding."""
  if not is_here(leaf):
    return jax.jit(_copy, out_shardings=sharding)(leaf)
  if isinstance(leaf, jax.Array) and is_key(leaf):
    # `jax.device_put` of a random key could share its memory.
    bits = put(np.asarray(jax.random.key_data(leaf)), sharding)
    return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(leaf))
  # JAX may alias the memory of a NumPy array.
  values = np.array(leaf)
  return jax.make_array_from_callback(
      values.shape, sharding, values.__getitem__, dtype=values.dtype
  )


def is_key(leaf: Any) -> bool:
  """Whether a leaf is a random key or an array of random keys."""
  return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _copy(leaf):
  if not is_key(leaf):
    return jnp.copy(leaf)
  bits = jnp.copy(jax.random.key_data(leaf))
  return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(leaf))


def dtype_of(leaf: Any) -> Any:
  """Returns the dtype of a leaf, which may be a random key."""
  return getattr(leaf, 'dtype', None) or jnp.result_type(leaf)
