"""`ArrayOperators`: makes an object usable wherever an array is."""

import abc
from collections.abc import Iterator
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt


class ArrayOperators(np.lib.mixins.NDArrayOperatorsMixin, abc.ABC):
  """An object that stands for its current value.

  Attributes:
    name: Its name in errors.
  """

  name: str

  @abc.abstractmethod
  def value(self) -> jax.Array:
    """Returns the current array."""

  def __jax_array__(self) -> jax.Array:
    return self.value()

  def __array__(
      self, dtype: npt.DTypeLike | None = None, copy: bool | None = None
  ) -> np.ndarray:
    return np.array(self.value(), dtype, copy=copy)

  def __array_ufunc__(
      self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any
  ) -> Any:
    # All operators come here, and many functions of NumPy.
    if any(isinstance(out, ArrayOperators) for out in kwargs.get('out', ())):
      raise TypeError(
          f'Variable {self.name!r} must not be changed by an operator: use'
          ' `assign`, `assign_add` or `assign_sub`.'
      )
    of_jax = getattr(jnp, ufunc.__name__, None)
    if of_jax is not None and method == '__call__' and 'out' not in kwargs:
      return of_jax(*map(_operand, inputs), **kwargs)
    operands = [np.asarray(_operand(x)) for x in inputs]
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

  def __float__(self) -> float:
    return float(self.value())

  def __index__(self) -> int:
    return operator.index(self.value())

  def __format__(self, spec: str) -> str:
    return format(self.value(), spec)


def _operand(value):
  if isinstance(value, ArrayOperators):
    return value.value()
  return jnp.asarray(value) if isinstance(value, list | tuple) else value
