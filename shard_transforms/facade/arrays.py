"""Conversion of Python and NumPy values to arrays with dtypes of TensorFlow."""

from typing import Any

import jax
from jax import core
import jax.numpy as jnp
import numpy as np

from shard_transforms.facade import leaves


def as_array(value: Any, requirement: str) -> jax.Array:
  """Converts a value to an array.

  Raises:
    TypeError: If it cannot be converted; the message begins with `requirement`.
  """
  try:
    return jnp.asarray(value)
  except (TypeError, ValueError, OverflowError) as error:
    raise TypeError(f'{requirement}, got {value!r}.') from error


def in_32_bits(arrays: Any, value: Any) -> Any:
  """Casts arrays to 32 bits if they were made from Python numbers.

  TensorFlow converts Python numbers to 32 bits. With `jax_enable_x64`, arrays
  keep 64 bits if any part of `value` is an array, or an integer that needs
  them.

  Args:
    arrays: The arrays.
    value: The value that they were made from.
  """
  parts = jax.tree.leaves(value, is_leaf=lambda x: isinstance(x, leaves.Rate))
  # A rate does not have a dtype outside of a step.
  if any(
      isinstance(x, leaves.Rate)
      or (hasattr(x, 'dtype') and not getattr(x, 'weak_type', False))
      for x in parts
  ):
    return arrays
  narrow = {'float64': 'float32', 'int64': 'int32'}
  if any(isinstance(x, int) and not -(2**31) <= x < 2**31 for x in parts):
    del narrow['int64']

  def convert(x):
    name = str(getattr(x, 'dtype', None))
    return x.astype(narrow[name]) if name in narrow else x

  return jax.tree.map(convert, arrays)


def converted(value: Any, dtype: Any, what: str) -> jax.Array:
  """Converts a value to an array that does not alias other memory.

  Args:
    value: The value.
    dtype: The dtype; that of the value if `None`.
    what: What the value is, for errors.

  Raises:
    TypeError: If the value is not an array of numbers, or the conversion would
      change its kind, such as from float to integer.
    ValueError: If an integer does not fit.
  """
  # JAX may alias the memory of a NumPy array.
  copied = np.array(value) if isinstance(value, np.ndarray) else value
  array = as_array(copied, f'{what} must be an array')
  if dtype is None:
    array = in_32_bits(array, value)
  if dtype is None or array.dtype == dtype:
    dtype = array.dtype
  if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
    if dtype != array.dtype:
      raise TypeError(
          f'{what} has the dtype {array.dtype}, but must be {dtype}. Cast it'
          ' first.'
      )
    return array
  dtype = jax.dtypes.canonicalize_dtype(dtype)
  categories = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
  rank, target_rank = (
      next(
          i
          for i, category in enumerate(categories)
          if jnp.issubdtype(t, category)
      )
      for t in (array.dtype, dtype)
  )
  if rank > target_rank:
    raise TypeError(
        f'{what} has the dtype {array.dtype}, but must be {dtype}. Cast it'
        ' first.'
    )
  if target_rank == 1 and not isinstance(array, core.Tracer):
    _check_fits(value, dtype, what)
  # A weak type would be lost at the first assignment, which would recompile.
  return jax.lax.convert_element_type(array, dtype)


def _check_fits(value, dtype, what):
  numbers = np.asarray(value)
  if numbers.dtype != dtype and not np.array_equal(
      numbers.astype(dtype), numbers
  ):
    raise ValueError(f'{what} is {value!r}, which does not fit into {dtype}.')
