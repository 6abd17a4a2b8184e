"""Variables: named arrays that a computation reads and writes in place."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
import math
import operator
from typing import Any, NamedTuple

import jax
from jax import core
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from shard_transforms.facade import contexts
from shard_transforms.facade import frames
from shard_transforms.facade import graph as graph_lib
from shard_transforms.facade import leaves
from shard_transforms.facade import passes


class GraphKeys:
  """Names of the collections of a graph.

  Attributes:
    GLOBAL_VARIABLES: All variables.
    TRAINABLE_VARIABLES: Those that optimizers update by default.
    GLOBAL_STEP: The global step alone.
    MOVING_AVERAGE_VARIABLES: Those that have an average.
    REGULARIZATION_LOSSES: The results of the regularizers of variables.
    LOCAL_VARIABLES: Empty until you add to it; so are all that follow.
    LOSSES: The same.
    SUMMARIES: The same.
    TRAIN_OP: The same.
    UPDATE_OPS: The same.

  Examples:
    >>> from shard_transforms import facade
    >>> with facade.Graph().as_default() as graph:
    ...   w = facade.Variable(1.0, name='w')
    ...   print(graph.get_collection(facade.GraphKeys.TRAINABLE_VARIABLES))
    [<Variable 'w:0' shape=() dtype=float32>]

  References:
    `tf.GraphKeys` of TensorFlow 1.15.
  """

  GLOBAL_VARIABLES = 'variables'
  TRAINABLE_VARIABLES = 'trainable_variables'
  GLOBAL_STEP = 'global_step'
  MOVING_AVERAGE_VARIABLES = 'moving_average_variables'
  REGULARIZATION_LOSSES = 'regularization_losses'
  LOCAL_VARIABLES = 'local_variables'
  LOSSES = 'losses'
  SUMMARIES = 'summaries'
  TRAIN_OP = 'train_op'
  UPDATE_OPS = 'update_ops'


class Operation(NamedTuple):
  """An operation of TensorFlow 1: a name without the number of an output.

  Attributes:
    name: The name, as checkpoints of TensorFlow 1 use it.
  """

  name: str


class Shape(tuple[int, ...]):
  """The shape of a variable: a tuple, with the methods of TensorFlow 1."""

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


class Variable(leaves.Leaf):
  """A named array that can be assigned to.

  It can be used wherever an array can: in arithmetic, in functions of
  `jax.numpy` and NumPy, and as an argument of functions under `jax.jit` and
  `jax.grad`, where it stands for its current value. (The primitives of
  `jax.lax` take only arrays: give them `value()`, which also has the methods of
  an array.) In a tree it is one leaf, which `jax.tree.map` sees as an array;
  use `get_values` to save variables.

  Shape and dtype never change. Where `CrossShardOptimizer` has groups, a
  variable gets one value per shard; reading it as one value then raises, and
  `shard_values` returns all of them.

  Attributes:
    name: The name with the output's number, `'w:0'`.
    op: Its attribute `name` is the name without that number, `'w'`.
    trainable: Whether optimizers update it by default.
    constraint: The function that each update ends with, if any.
    num_parts: The number of shards between which it may differ, `None` if it
      is always the same on all.
    graph: The graph whose collections hold it.
    shape: The shape of the array.
    dtype: The dtype of the array.

  Args:
    initial_value: An array of any shape and dtype, or a function of no
      arguments that returns one.
    trainable: Whether it joins the trainable variables.
    collections: The names of the collections that it joins besides; the global
      variables if `None`.
    validate_shape: Ignored.
    caching_device: Ignored.
    name: Its name; if taken, a number is appended.
    dtype: The dtype; that of `initial_value` if `None`.
    constraint: A function of the array, which each update of an optimizer ends
      with.
    use_resource: Ignored.

  Raises:
    TypeError: If the value is no array of numbers.
    ValueError: If a function that runs at each step makes it. It would be a new
      one at each step; `get_variable` finds the same again.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from shard_transforms import facade
    >>> with facade.Graph().as_default():
    ...   w = facade.Variable([1.0, 2.0], name='w')
    >>> print(w.name, jnp.sum(3 * w), w.assign_add([1.0, 1.0]))
    w:0 9.0 [2. 3.]

  References:
    `tf.Variable` of TensorFlow 1.15.
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
    is_repeated = contexts.around.call is not None
    if frames.is_tracing() or is_repeated or frames.is_staged():
      raise ValueError(
          '`Variable` must not be made inside a function that runs at each'
          f' step, got {name or "one without a name"!r}. Make it outside, or'
          ' use `facade.get_variable`, which finds it again at the next call.'
      )
    value = initial_value() if callable(initial_value) else initial_value
    self.stored = _converted(value, dtype, f'The initial value of {name!r}')
    if isinstance(self.stored, core.Tracer):
      raise ValueError(
          f'The initial value of {name!r} must be known before anything is'
          f' traced, got {self.stored!r}.'
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
      collections = [GraphKeys.GLOBAL_VARIABLES]
    if trainable:
      collections = [*collections, GraphKeys.TRAINABLE_VARIABLES]
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
    """Whether it has one value per shard in this frame."""
    return frames.read(self).ndim > self.ndim

  def value(self) -> jax.Array:
    """Returns the current array.

    Raises:
      ValueError: If there is one a shard, or in a function under `jax.jit`,
        where it would become a constant.
    """
    array = frames.read(self)
    if frames.is_staged():
      raise ValueError(
          f'Variable {self.name!r} must not be read inside a function that JAX'
          ' compiles, where its present value would become a constant. Compile'
          ' with `facade.function`, or pass it as an argument.'
      )
    if array.ndim > self.ndim:
      raise ValueError(
          f'Variable {self.name!r} has a value per shard, {len(array)} of them,'
          ' because a `CrossShardOptimizer` with `group_assignment` updated'
          ' it. Read all with `shard_values()`, or assign one to all.'
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
          f'Variable {self.name!r} has one value for all shards: use `value()`.'
      )
    return array

  def assign(
      self,
      value: npt.ArrayLike,
      use_locking: bool = False,
      name: str | None = None,
      read_value: bool = True,
  ) -> jax.Array:
    """Sets the value, of all shards if there are several, and returns it.

    Args:
      value: An array of the variable's shape.
      use_locking: Ignored.
      name: Ignored.
      read_value: Ignored.

    Returns:
      The value.

    Raises:
      TypeError: If the value is no array of numbers, or would lose its kind.
      ValueError: If it has another shape.
    """
    array = _converted(value, self.dtype, f'The value of {self.name!r}')
    if array.shape != self.shape:
      raise ValueError(
          f'The value of {self.name!r} must have the shape {self.shape}, got'
          f' {array.shape}.'
      )
    frames.write(self, array)
    self.graph.show(self)
    passes.write(self)
    return array

  def assign_add(self, delta: npt.ArrayLike, **ignored: Any) -> jax.Array:
    """Adds to the value, and returns it; takes the arguments of `assign`."""
    return self._change(operator.add, delta)

  def assign_sub(self, delta: npt.ArrayLike, **ignored: Any) -> jax.Array:
    """Subtracts from the value, and returns it, as `assign_add` adds."""
    return self._change(operator.sub, delta)

  def _change(self, operation, delta):
    """Assigns the result of an operation, which TensorFlow does at once."""
    delta = _operand(delta)
    with passes.settled():
      return self.assign(operation(self, delta))

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
    if any(isinstance(out, Variable) for out in kwargs.get('out', ())):
      raise TypeError(
          f'Variable {self.name!r} must not be changed by NumPy: use `assign`,'
          ' `assign_add` or `assign_sub`.'
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

  def __index__(self) -> int:
    return operator.index(self.value())

  def __format__(self, spec: str) -> str:
    return format(self.value(), spec)

  def __reduce__(self):
    raise TypeError(
        f'Variable {self.name!r} must not be copied or pickled: its graph and'
        ' its optimizers know it by identity. Save its value with'
        ' `facade.get_values`.'
    )

  def __str__(self) -> str:
    return repr(self) if self.is_per_shard else str(self.value())

  def __repr__(self) -> str:
    note = ' with a value per shard' if self.is_per_shard else ''
    return (
        f'<Variable {self.name!r} shape={self.shape} dtype={self.dtype}{note}>'
    )


def _operand(value):
  if isinstance(value, Variable):
    return value.value()
  return jnp.asarray(value) if isinstance(value, list | tuple) else value


def as_array(value: Any, requirement: str) -> jax.Array:
  """Returns a value as an array.

  Raises:
    TypeError: If it cannot be one; the message begins with `requirement`.
  """
  try:
    return jnp.asarray(value)
  except (TypeError, ValueError, OverflowError) as error:
    raise TypeError(f'{requirement}, got {value!r}.') from error


def in_32_bits(arrays: Any, value: Any) -> Any:
  """Returns arrays made of `value`; as in TensorFlow, of 32 bits if of Python.

  Where JAX has 64 bits, they have as many if any part of `value` is an array,
  or an integer that needs them.
  """
  parts = jax.tree.leaves(value, is_leaf=lambda x: isinstance(x, leaves.Rate))
  # A rate has no dtype outside of a step.
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


def _converted(value, dtype, what):
  """Returns `value` as an array of `dtype` that aliases no other memory."""
  # JAX may alias the memory of a NumPy array.
  own = np.array(value) if isinstance(value, np.ndarray) else value
  array = as_array(own, f'{what} must be an array')
  if dtype is None:
    array = in_32_bits(array, value)
  if dtype is None or array.dtype == dtype:
    dtype = array.dtype
  if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
    if dtype != array.dtype:
      raise TypeError(f'{what} must be {dtype}, got {array.dtype}.')
    return array
  dtype = jax.dtypes.canonicalize_dtype(dtype)
  kinds = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
  rank, wanted = (
      next(i for i, kind in enumerate(kinds) if jnp.issubdtype(t, kind))
      for t in (array.dtype, dtype)
  )
  if rank > wanted:
    raise TypeError(f'{what} must be {dtype}, got {array.dtype}.')
  if wanted == 1 and not isinstance(array, core.Tracer):
    _check_fits(value, dtype, what)
  # A weak type would be lost at the first assignment, and cause a
  # recompilation.
  return jax.lax.convert_element_type(array, dtype)


def _check_fits(value, dtype, what):
  given = np.asarray(value)
  if given.dtype != dtype and not np.array_equal(given.astype(dtype), given):
    raise ValueError(f'{what} must fit {dtype}, got {value!r}.')
