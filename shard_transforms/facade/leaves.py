"""Objects that stand for an array: the base of variables, and rates."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shard_transforms.facade import contexts
from shard_transforms.facade import frames


def _only_child(_: None, children: Any) -> Any:
  return children[0]


class Leaf(np.lib.mixins.NDArrayOperatorsMixin):
  """An object that stands for an array, in arithmetic and as a leaf of a tree.

  It is compared by identity, as in TensorFlow 1: it can be the key of a dict.
  """

  def __init_subclass__(cls):
    # Unflattened, it is its array: a function that JAX traces cannot assign to
    # its argument.
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


class Rate(Leaf):
  """A number that is computed whenever it is used: a function of no arguments.

  Arithmetic gives another rate. Inside a step, functions of `jax.numpy` read
  its present number.

  Attributes:
    name: The name that a collection knows it by.

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
    """Returns the present number."""
    return jnp.asarray(self._compute())

  def __jax_array__(self) -> jax.Array:
    if not is_step():
      raise ValueError(
          'A rate, or the regularization loss of a variable, must not become an'
          ' array outside of a step, where it would never change again. Write'
          ' `lambda: ...` around the computation. To log its present value,'
          ' call it.'
      )
    return self()

  def __array_ufunc__(
      self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any
  ) -> Any:
    of_jax = getattr(jnp, ufunc.__name__, None)
    if of_jax is None or method != '__call__' or kwargs:
      return NotImplemented
    return Rate(lambda: of_jax(*map(present, inputs)))

  def __repr__(self) -> str:
    return 'Rate(...)'


def is_step() -> bool:
  """Whether the caller is in a step, which computes its numbers again."""
  is_making = contexts.around.is_making
  return is_making or frames.is_step() or frames.is_staged()


def present(value: Any) -> Any:
  """Returns the present value of a variable, rate or function."""
  if callable(value):
    return present(value())
  if isinstance(value, Leaf):
    return value.__jax_array__()
  if isinstance(value, list | tuple):
    return [present(x) for x in value]
  return value
