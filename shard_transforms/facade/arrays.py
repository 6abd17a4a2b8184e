"""Objects that stand for an array, and conversions to arrays."""

from collections.abc import Callable
from collections.abc import Iterator
import operator
from typing import Any

import jax
from jax import core
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from shard_transforms.facade import contexts
from shard_transforms.facade import frames


def _only_child(_: None, children: Any) -> Any:
  return children[0]


class Leaf(np.lib.mixins.NDArrayOperatorsMixin):
  """An object that stands for an array in arithmetic and in trees.

  Like variables of TensorFlow 1, it is compared by identity and can be the key
  of a dict.
  """

  def __init_subclass__(cls):
    # Unflattening gives the array: a traced function cannot assign to its
    # argument.
    jax.tree_util.register_pytree_node(
        cls, lambda leaf: ((leaf.__jax_array__(),), None), _only_child
    )

  def __eq__(self, other: object) -> bool:
    return self is other

  def __ne__(self, other: object) -> bool:
    return self is not other

  def __hash__(self) -> int:
    return id(self)

  def __jax_array__(self) -> jax.Array:
    """Returns the array."""
    raise NotImplementedError

  def __float__(self) -> float:
    return float(self.__jax_array__())


class ArrayLeaf(Leaf):
  """A leaf that can be used like an array: the operators and protocols.

  Attributes:
    name: The name, for errors.
  """

  name: str

  def value(self) -> jax.Array:
    """Returns the current array."""
    raise NotImplementedError

  def __jax_array__(self) -> jax.Array:
    return self.value()

  def __array__(
      self, dtype: npt.DTypeLike | None = None, copy: bool | None = None
  ) -> np.ndarray:
    return np.array(self.value(), dtype, copy=copy)

  def __array_ufunc__(
      self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any
  ) -> Any:
    # NumPy calls this for all operators, and for many of its functions.
    if inputs[0] is self and kwargs.get('out') == (self,):
      del kwargs['out']  # As in TensorFlow, `v *= 2` makes `v` an array.
    if any(isinstance(out, ArrayLeaf) for out in kwargs.get('out', ())):
      raise TypeError(
          f'NumPy cannot write to variable {self.name!r} in place. Use'
          ' `assign`, `assign_add` or `assign_sub`.'
      )
    jax_function = getattr(jnp, ufunc.__name__, None)
    is_plain_call = method == '__call__' and 'out' not in kwargs
    if jax_function is not None and is_plain_call:
      return jax_function(*map(operand, inputs), **kwargs)
    operands = [np.asarray(operand(x)) for x in inputs]
    return getattr(ufunc, method)(*operands, **kwargs)

  def __getitem__(self, index: Any) -> jax.Array:
    return self.value()[index]

  def __iter__(self) -> Iterator[jax.Array]:
    return iter(self.value())

  def __len__(self) -> int:
    return len(self.value())

  def __bool__(self) -> bool:
    return bool(self.value())

  def __int__(self) -> int:
    return int(self.value())

  def __index__(self) -> int:
    return operator.index(self.value())

  def __format__(self, spec: str) -> str:
    return format(self.value(), spec)


def operand(value: Any) -> Any:
  """Returns an operand as an array; variables give their value."""
  if isinstance(value, ArrayLeaf):
    return value.value()
  return jnp.asarray(value) if isinstance(value, list | tuple) else value


class Rate(Leaf):
  """A number that is computed whenever it is used.

  Arithmetic gives another rate. Inside a step, functions of `jax.numpy` read
  its present value.

  Attributes:
    name: The name by which a collection finds it.

  Args:
    compute: A function of no arguments that returns the number.
    name: The name.
  """

  def __init__(
      self, compute: Callable[[], jax.typing.ArrayLike], name: str = ''
  ):
    self._compute = compute
    self.name = name

  def __call__(self) -> jax.Array:
    """Returns the present value."""
    return jnp.asarray(self._compute())

  def __jax_array__(self) -> jax.Array:
    if not is_step():
      raise ValueError(
          'A decaying rate, or the regularization loss of a variable, was used'
          ' as an array outside of a step, where its value would never change'
          ' again. Write `lambda: ...` around the computation. To log its'
          ' present value, call it.'
      )
    return self()

  def __array_ufunc__(
      self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any
  ) -> Any:
    jax_function = getattr(jnp, ufunc.__name__, None)
    if jax_function is None or method != '__call__' or kwargs:
      return NotImplemented
    return Rate(lambda: jax_function(*map(present, inputs)))

  def __repr__(self) -> str:
    return 'Rate(...)'


def is_step() -> bool:
  """Whether the caller is in a step, which recomputes its numbers."""
  is_creating = contexts.current.is_creating
  return is_creating or frames.is_step() or frames.is_staged()


def present(value: Any) -> Any:
  """Returns the present value of a variable, rate or function."""
  if callable(value):
    return present(value())
  if isinstance(value, Leaf):
    return value.__jax_array__()
  if isinstance(value, list | tuple):
    return [present(x) for x in value]
  return value


def as_array(value: Any, requirement: str) -> jax.Array:
  """Converts a value to an array.

  Raises:
    TypeError: If it cannot be converted; the message begins with `requirement`.
  """
  try:
    return jnp.asarray(value)
  except OverflowError as error:
    raise TypeError(
        f'{requirement}, but {value!r} does not fit into the largest integer'
        ' type of JAX.'
    ) from error
  except (TypeError, ValueError) as error:
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
  parts = jax.tree.leaves(value, is_leaf=lambda x: isinstance(x, Rate))
  # A rate does not have a dtype outside of a step.
  if any(
      isinstance(x, Rate)
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
