"""Variables: named arrays that a computation reads and assigns."""

from collections.abc import Callable
from collections.abc import Iterable
import math
import operator
from typing import Any, NamedTuple

import jax
from jax import core
import numpy.typing as npt

from shard_transforms.facade import arrays as arrays_lib
from shard_transforms.facade import contexts
from shard_transforms.facade import frames
from shard_transforms.facade import graph as graph_lib
from shard_transforms.facade import passes


class Operation(NamedTuple):
  """The operation of a variable: its name without the number of an output.

  Attributes:
    name: The name in checkpoints of TensorFlow 1.
  """

  name: str


class Shape(tuple[int, ...]):
  """The shape of a variable: a tuple with the methods of `tf.TensorShape`."""

  @property
  def ndims(self) -> int:
    """The number of dimensions."""
    return len(self)

  def as_list(self) -> list[int]:
    """Returns the sizes as a list."""
    return list(self)

  def num_elements(self) -> int:
    """Returns the number of elements."""
    return math.prod(self)


class Variable(arrays_lib.ArrayLeaf):
  """A named array that can be assigned: `tf.Variable`.

  It can be used wherever an array can: in arithmetic, in functions of
  `jax.numpy` and NumPy, and as an argument of functions under `jax.jit` and
  `jax.grad`. (The primitives of `jax.lax` accept only arrays: pass `value()`.)
  In a tree it is one leaf, which `jax.tree.map` treats as an array; use
  `facade.get_values` to save variables.

  Shape and dtype never change. With the groups of `CrossShardOptimizer`, a
  variable has one value per shard; `value` then raises, and `shard_values`
  returns all of them.

  Attributes:
    name: The name with the output's number, `'w:0'`.
    op: Its `name` is the name without that number, `'w'`.
    trainable: Whether optimizers update it by default.
    constraint: A function that is applied after each update, if any.
    num_parts: The number of shards between which it may differ, or `None`.
    graph: The graph whose collections contain it.
    stored: The array that the variable holds outside of traced calls.
    shape: The shape of the array.
    dtype: The dtype of the array.

  Args:
    initial_value: An array, or a function of no arguments that returns one.
    trainable: Whether to add it to the trainable variables.
    collections: The names of further collections; by default, the global
      variables.
    validate_shape: Ignored.
    caching_device: Ignored.
    name: The name; if it is taken, a number is appended.
    dtype: The dtype; that of `initial_value` if `None`.
    constraint: A function of the array, applied after each update.
    use_resource: Ignored.

  Raises:
    TypeError: If the value is not an array of numbers.
    ValueError: In a function that runs at each step, which would create a new
      variable each time. Use `tf.get_variable` there.

  Examples:
    >>> import jax.numpy as jnp
    >>> from shard_transforms.facade import tf
    >>> with tf.Graph().as_default():
    ...   w = tf.Variable([1.0, 2.0], name='w')
    >>> print(w.name, jnp.sum(3 * w), w.assign_add([1.0, 1.0]))
    w:0 9.0 [2. 3.]
  """

  def __init__(
      self,
      initial_value: npt.ArrayLike | Callable[[], npt.ArrayLike],
      trainable: bool = True,
      collections: Iterable[str] | None = None,
      validate_shape: bool = True,
      caching_device: Any = None,
      name: str | None = None,
      *,
      dtype: jax.typing.DTypeLike | None = None,
      constraint: Callable[[jax.Array], jax.Array] | None = None,
      use_resource: bool | None = None,
  ):
    is_repeated = contexts.current.call is not None
    if frames.is_tracing() or is_repeated or frames.is_staged():
      raise ValueError(
          f'`tf.Variable` ({name or "without a name"!r}) was called inside a'
          ' function that runs at each step, which would create a new variable'
          ' each time. Create it outside, or use `tf.get_variable`, which'
          ' finds it again.'
      )
    value = initial_value() if callable(initial_value) else initial_value
    self.stored = arrays_lib.converted(
        value, dtype, f'The initial value of {name or "Variable"!r}'
    )
    if isinstance(self.stored, core.Tracer):
      raise ValueError(
          f'The initial value of {name or "Variable"!r} is the traced array'
          f' {self.stored!r}. Create the variable outside of functions that JAX'
          ' traces.'
      )
    self.shape = Shape(self.stored.shape)
    self.dtype = self.stored.dtype
    self.trainable = trainable
    self.constraint = constraint
    self.num_parts: int | None = None
    self.graph = graph_lib.get_default_graph()
    prefix = graph_lib.scope_of(self.graph).names
    self.op = Operation(self.graph.unique_name(prefix + (name or 'Variable')))
    self.name = f'{self.op.name}:0'
    if collections is None:
      collections = [graph_lib.GraphKeys.GLOBAL_VARIABLES]
    if trainable:
      collections = [*collections, graph_lib.GraphKeys.TRAINABLE_VARIABLES]
    self.graph.add_variable(self, dict.fromkeys(collections))

  @property
  def ndim(self) -> int:
    """The number of dimensions."""
    return len(self.shape)

  @property
  def size(self) -> int:
    """The number of elements."""
    return self.shape.num_elements()

  @property
  def is_per_shard(self) -> bool:
    """Whether it has one value per shard at this point."""
    return frames.read(self).ndim > self.ndim

  def value(self) -> jax.Array:
    """Returns the current array.

    Raises:
      ValueError: If there is one value per shard, or in a function under
        `jax.jit`, where the value would become a constant.
    """
    array = frames.read(self)
    if frames.is_staged():
      raise ValueError(
          f'Variable {self.name!r} was read inside a function that JAX'
          ' compiles, where its present value would become a constant. Compile'
          ' the function with `facade.function`, or pass the variable as an'
          ' argument.'
      )
    if array.ndim > self.ndim:
      raise ValueError(
          f'Variable {self.name!r} has one value for each of {len(array)}'
          ' shards, because a `CrossShardOptimizer` with `group_assignment`'
          ' updated it. Read the values with `shard_values()`, or set one value'
          ' on all shards with `assign`.'
      )
    self.graph.show(self)
    passes.warn_if_written(self)
    return array

  read_value = initialized_value = value

  def get_shape(self) -> Shape:
    """Returns the shape."""
    return self.shape

  def shard_values(self) -> jax.Array:
    """Returns the values of all shards, [number of shards, ...].

    Raises:
      ValueError: If all shards share one value.
    """
    array = frames.read(self)
    if array.ndim == self.ndim:
      raise ValueError(
          f'Variable {self.name!r} has one value for all shards. Use `value()`.'
      )
    return array

  def assign(
      self,
      value: npt.ArrayLike,
      use_locking: bool = False,
      name: str | None = None,
      read_value: bool = True,
  ) -> jax.Array:
    """Sets the value on all shards and returns it.

    Raises:
      TypeError: If the value is not an array of numbers, or would change its
        kind, such as from float to integer.
      ValueError: If it has another shape.
    """
    array = arrays_lib.converted(
        value, self.dtype, f'The value of {self.name!r}'
    )
    if array.shape != self.shape:
      raise ValueError(
          f'Variable {self.name!r} has the shape {self.shape}, but the assigned'
          f' value has the shape {array.shape}.'
      )
    frames.write(self, array)
    self.graph.show(self)
    passes.write(self)
    return array

  def assign_add(self, delta: npt.ArrayLike, **ignored: Any) -> jax.Array:
    """Adds to the value and returns the sum."""
    return self._change(operator.add, delta)

  def assign_sub(self, delta: npt.ArrayLike, **ignored: Any) -> jax.Array:
    """Subtracts from the value and returns the difference."""
    return self._change(operator.sub, delta)

  def _change(self, operation, delta):
    """Assigns the result of an operation, atomically as in TensorFlow."""
    delta = arrays_lib.operand(delta)
    with passes.after_assignments():
      return self.assign(operation(self, delta))

  def __reduce__(self):
    raise TypeError(
        f'Variable {self.name!r} cannot be copied or pickled, because its graph'
        ' and its optimizers refer to it by identity. Save its value with'
        ' `facade.get_values`.'
    )

  def __str__(self) -> str:
    return repr(self) if self.is_per_shard else str(self.value())

  def __repr__(self) -> str:
    note = ' with a value per shard' if self.is_per_shard else ''
    return (
        f'<Variable {self.name!r} shape={self.shape} dtype={self.dtype}{note}>'
    )
