"""`get_values` and `set_values`: variables for checkpoints."""

from collections.abc import Iterable
from collections.abc import Mapping

import jax
from jax import core
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from shard_transforms.facade import frames
from shard_transforms.facade import variables as variables_lib


def get_values(
    variables: Iterable[variables_lib.Variable],
) -> dict[str, jax.Array]:
  """Returns the arrays to save of variables, by name.

  Args:
    variables: The variables, say `global_variables()`.

  Returns:
    The arrays by `op.name`, to be saved by `flax.serialization` or orbax; where
    a variable has a value a shard, all of them along a leading axis. Random
    keys are given as their key data.

  Raises:
    ValueError: If two variables, of two graphs, have one name.

  Examples:
    >>> from shard_transforms import facade
    >>> with facade.Graph().as_default():
    ...   w = facade.Variable(1.0, name='w')
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
    variables: Iterable[variables_lib.Variable],
    values: Mapping[str, npt.ArrayLike],
) -> None:
  """Restores variables from the result of `get_values`, all of them or none.

  Slots must exist: `function(...).build(...)` creates what a first call would
  create, without running it.

  Args:
    variables: The variables, as they were handed to `get_values`.
    values: The arrays by name.

  Raises:
    ValueError: If a name is missing, of no variable or of two, or an array has
      another shape or a value that the dtype of its variable does not hold.
      Nothing is changed.

  Examples:
    >>> from shard_transforms import facade
    >>> with facade.Graph().as_default():
    ...   w = facade.Variable([1.0, 2.0], name='w')
    >>> facade.set_values([w], {'w': [3.0, 4.0]})
    >>> print(w)
    [3. 4.]
  """
  by_name = _by_name(variables)
  wrong = sorted(by_name.keys() ^ values.keys())
  if wrong:
    raise ValueError(
        f'`values` must hold the names of `variables`, but {wrong} are in one'
        ' of them only. Make slots with `facade.function(...).build(...)`'
        ' before restoring.'
    )
  arrays = {n: _restored(v, values[n]) for n, v in by_name.items()}
  for name, variable in by_name.items():
    frames.write(variable, arrays[name])


def _by_name(variables):
  found = {}
  for variable in variables:
    if found.setdefault(variable.op.name, variable) is not variable:
      raise ValueError(
          f'Two variables have the name {variable.op.name!r}. Save those of'
          ' each graph by themselves.'
      )
  return found


def _is_key(array):
  return jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


def _restored(variable, value):
  """Returns a saved value as an array for `variable`."""
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
        f'The value of {variable.name!r} must have the shape'
        f' {variable.shape}, got {saved.shape}.'
    )
  if array is not saved and not np.array_equal(array, saved, equal_nan=True):
    raise ValueError(
        f'The value of {variable.name!r} must fit {variable.dtype}, got'
        f' {saved.dtype} {saved!r}.'
    )
  if frames.is_tracing() or saved.shape != variable.stored.shape:
    return jnp.asarray(array)
  # On the devices of the variable, to avoid a recompilation.
  committed = variable.stored.committed
  return jax.device_put(array, variable.stored.sharding if committed else None)
