"""Saving and restoring the values of variables."""

from collections.abc import Iterable
from collections.abc import Mapping

import jax
from jax import core
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from shard_transforms.facade import frames
from shard_transforms.facade import variables as variables_lib

Variable = variables_lib.Variable


def get_values(variables: Iterable[Variable]) -> dict[str, jax.Array]:
  """Returns the arrays of variables by name, for a checkpoint.

  Args:
    variables: The variables, such as `tf.global_variables()`.

  Returns:
    The arrays by `op.name`, which `flax.serialization` or Orbax can save. A
    variable with one value per shard gives all of them, along a leading axis; a
    random key gives its key data.

  Raises:
    ValueError: If two variables, of two graphs, have the same name.

  Examples:
    >>> from shard_transforms import facade
    >>> from shard_transforms.facade import tf
    >>> with tf.Graph().as_default():
    ...   w = tf.Variable(1.0, name='w')
    >>> saved = facade.get_values([w])
    >>> _ = w.assign(5.0)
    >>> facade.set_values([w], saved)
    >>> print(saved['w'], w)
    1.0 1.0
  """
  arrays = {name: frames.read(v) for name, v in _by_name(variables).items()}
  return {
      name: jax.random.key_data(array) if _is_key(array) else array
      for name, array in arrays.items()
  }


def set_values(
    variables: Iterable[Variable],
    values: Mapping[str, npt.ArrayLike],
) -> None:
  """Restores variables from the result of `get_values`, all or none.

  Slots must exist: `build` of a `function` creates the variables and slots of a
  first call without running it.

  Args:
    variables: The variables that were passed to `get_values`.
    values: The arrays by name.

  Raises:
    ValueError: If a name is missing, unknown or that of two variables, or an
      array has another shape or a value that the dtype of its variable cannot
      represent. No variable changes then.

  Examples:
    >>> from shard_transforms import facade
    >>> from shard_transforms.facade import tf
    >>> with tf.Graph().as_default():
    ...   w = tf.Variable([1.0, 2.0], name='w')
    >>> facade.set_values([w], {'w': [3.0, 4.0]})
    >>> print(w)
    [3. 4.]
  """
  by_name = _by_name(variables)
  if by_name.keys() != values.keys():
    raise ValueError(
        '`values` must have one array for each of `variables`. Missing arrays:'
        f' {sorted(by_name.keys() - values.keys())}; arrays without a variable:'
        f' {sorted(values.keys() - by_name.keys())}. If the latter are slots of'
        ' an optimizer, create its variables with'
        ' `facade.function(...).build(...)` first.'
    )
  arrays = {n: _restored(v, values[n]) for n, v in by_name.items()}
  for name, variable in by_name.items():
    frames.write(variable, arrays[name])


def _by_name(variables):
  named = {}
  for variable in variables:
    if named.setdefault(variable.op.name, variable) is not variable:
      raise ValueError(
          f'Two variables have the name {variable.op.name!r}. Save the'
          ' variables of each graph separately.'
      )
  return named


def _is_key(array):
  return jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


def _restored(variable, value):
  """Converts a saved value to an array for `variable`.

  Raises:
    ValueError: If its shape differs, or the dtype cannot represent it.
  """
  if _is_key(variable):
    impl = jax.random.key_impl(variable.stored)
    array = saved = jax.random.wrap_key_data(jnp.asarray(value), impl=impl)
  elif isinstance(value, core.Tracer):
    array = saved = value
  else:
    saved = np.asarray(value)
    array = saved.astype(variable.dtype)
  per_shard = variable.num_parts and (variable.num_parts, *variable.shape)
  if saved.shape not in (variable.shape, per_shard):
    raise ValueError(
        f'Variable {variable.name!r} has the shape {variable.shape}, but the'
        f' value to restore has the shape {saved.shape}. Pass the value that'
        ' was saved for a variable of this shape.'
    )
  if array is not saved and not np.array_equal(array, saved, equal_nan=True):
    raise ValueError(
        f'Variable {variable.name!r} has the dtype {variable.dtype}, which'
        f' cannot represent the value to restore, {saved.dtype} {saved!r}.'
    )
  if frames.is_tracing() or saved.shape != variable.stored.shape:
    return jnp.asarray(array)
  # An array on other devices would recompile a step.
  committed = variable.stored.committed
  return jax.device_put(array, variable.stored.sharding if committed else None)
