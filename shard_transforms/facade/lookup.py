"""Variables by name: how they are found in a graph, saved and restored."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
import inspect
import math
from typing import Any
import zlib

import jax
from jax import core
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from shard_transforms.facade import contexts
from shard_transforms.facade import frames
from shard_transforms.facade import graph as graph_lib
from shard_transforms.facade import leaves
from shard_transforms.facade import variables as variables_lib

Variable = variables_lib.Variable
_KEYS = variables_lib.GraphKeys


def get_variable(
    name: str,
    shape: Iterable[int] | int | None = None,
    dtype: jax.typing.DTypeLike | None = None,
    initializer: npt.ArrayLike | Callable[..., npt.ArrayLike] | None = None,
    regularizer: Callable[[Any], npt.ArrayLike | None] | None = None,
    trainable: bool | None = None,
    collections: Iterable[str] | None = None,
    *,
    use_resource: bool | None = None,
    constraint: Callable[[jax.Array], jax.Array] | None = None,
) -> Variable:
  """Returns the variable of a name in the default graph; creates it if needed.

  Use it in traced functions and in the `model_fn` of `replicate_model_fn`:
  every call, and every tower, gets the same variable.

  Args:
    name: The name; the scopes around it prefix theirs.
    shape: The shape for the initializer; an existing variable must have it.
    dtype: The dtype for the initializer, that of the scope or else float32 if
      `None`; an existing variable must have the one that is given.
    initializer: The initial value: an array, or a function of no arguments, or,
      with `shape`, of the shape and the dtype, or an initializer of
      `jax.nn.initializers`. If `None`, that of the scope; else zeros for
      integers, else Glorot's uniform numbers by `Graph.seed` and the name.
    regularizer: A function of the variable. What it returns at the time is
      among the `REGULARIZATION_LOSSES`; that of the scope if `None`.
    trainable: Whether it joins the trainable variables; if `None`, it does
      unless it joins the local ones.
    collections: The collections that it joins besides; the global variables if
      `None`.
    use_resource: Ignored.
    constraint: As in `Variable`.

  Returns:
    The `Variable`.

  Raises:
    ValueError: If it does not exist and there is no initializer or the scope
      has `reuse`, if it exists in another shape or dtype, or if the initializer
      returns another shape. In the loss of an optimizer that is called in a
      scope: if it exists neither in that scope nor outside, or in both, or
      elsewhere than the other variables of the loss.

  Examples:
    >>> import jax.numpy as jnp
    >>> from shard_transforms import facade
    >>> with facade.Graph().as_default():
    ...   w = facade.get_variable('w', [2], initializer=jnp.zeros)
    ...   print(w, facade.get_variable('w', [2]) is w)
    [0. 0.] True

  References:
    `tf.get_variable` of TensorFlow 1.15, in a scope with `tf.AUTO_REUSE`.
  """
  if shape is not None:
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
  graph = graph_lib.get_default_graph()
  scope = graph_lib.scope_of(graph)
  with graph.lock:
    name = _in_loss(graph, scope.prefix + name)
    if name in graph.shared:
      variable = graph.shared[name]
      _check('shape', variable.shape, shape, name)
      wanted = dtype if dtype is None else jax.dtypes.canonicalize_dtype(dtype)
      _check('dtype', variable.dtype, wanted, name)
      graph.show(variable)
      return variable
    if scope.reuse:
      raise ValueError(
          f'Variable {name!r} must exist in a scope with `reuse`, got no such'
          ' name. Make it in a scope without, or with `AUTO_REUSE`.'
      )
    dtype = scope.dtype if dtype is None else dtype
    if initializer is None:
      initializer = scope.initializer
    with frames.outside(), graph_lib.name_scope(''):
      value: Any = _initial(initializer, shape, dtype, name, graph)
      _check('shape', np.shape(value), shape, name)
      if trainable is None:
        trainable = _KEYS.LOCAL_VARIABLES not in (collections or ())
      options: Any = {'name': name, 'dtype': dtype, 'constraint': constraint}
      made = Variable(value, trainable, collections, **options)
      graph.shared[name] = made
      regularize: Any = regularizer or scope.regularizer
      if regularize is not None:
        loss = leaves.Rate(lambda: regularize(made), name)
        if regularize(made) is not None:
          graph.keep(_KEYS.REGULARIZATION_LOSSES, loss, made)
  return made


def _in_loss(graph, name):
  """Returns the name of a variable that a loss looks up, or any other.

  TensorFlow 1 built the loss before the scopes around its optimizer, or in
  them. The variables that exist tell which.

  Raises:
    ValueError: If none or several do, or not the same for all variables.
  """
  loss = contexts.around.loss
  if loss is None or len(loss.prefixes) < 2:
    return name
  *_, called_in = loss.prefixes
  if not name.startswith(called_in):
    return name
  own = name.removeprefix(called_in)
  found = [x for x in loss.prefixes if x + own in graph.shared]
  if len(found) != 1:
    raise ValueError(
        '`loss` must find exactly one of the variables'
        f' {[x + own for x in loss.prefixes]}, because it is differentiated in'
        f' a scope, got {[x + own for x in found]}. Call the model once'
        ' before, or leave the scope. For the value of the loss, use'
        ' `return_loss`.'
    )
  wanted = called_in if loss.is_explicit else loss.found
  if wanted not in (None, *found):
    raise ValueError(
        f'`loss` must find {wanted + own!r}, as its other variables or the'
        f' scope object that it enters are there, got {found[0] + own!r}. Make'
        ' them outside, and use them in the loss without `get_variable`.'
    )
  if not loss.is_explicit:
    (loss.found,) = found
  return found[0] + own


def _initial(given, shape, dtype, name, graph):
  """Returns the initial value of a variable."""
  initializer: Any = given
  dtype = jax.dtypes.canonicalize_dtype(jnp.float32 if dtype is None else dtype)
  if initializer is None:
    is_float = jnp.issubdtype(dtype, jnp.inexact)
    if shape is None:
      raise ValueError(
          f'`initializer` or `shape` of {name!r} must be given, got None for'
          ' both.'
      )
    initializer = _glorot_uniform if is_float else jax.nn.initializers.zeros
  if not callable(initializer):
    return initializer
  if shape is None:
    return initializer()
  arguments: list[Any] = [shape, dtype]
  if _takes_key(initializer):
    key = jax.random.key(graph.seed)
    arguments.insert(0, jax.random.fold_in(key, zlib.crc32(name.encode())))
  return initializer(*arguments)


def _glorot_uniform(key, shape, dtype):
  if len(shape) >= 2:
    return jax.nn.initializers.glorot_uniform()(key, shape, dtype)
  # TensorFlow takes the length of a vector for both fans, and 1 for a scalar.
  limit = math.sqrt(3 / (math.prod(shape) or 1))
  return jax.random.uniform(key, shape, dtype, -limit, limit)


def _takes_key(initializer):
  """Whether an initializer is like those of `jax.nn.initializers`."""
  try:
    return 'key' in inspect.signature(initializer).parameters
  except ValueError:  # NumPy does not tell the signatures of its functions.
    return False


def _check(what, found, wanted, name):
  if wanted not in (None, found):
    raise ValueError(f'`{what}` of {name!r} must be {found}, got {wanted}.')


def global_variables(scope: str | None = None) -> list[Variable]:
  """Returns all variables of the default graph, oldest first.

  Args:
    scope: A regular expression that their names must begin with, if given.

  Returns:
    A new list.

  Examples:
    >>> from shard_transforms import facade
    >>> with facade.Graph().as_default():
    ...   step = facade.get_or_create_global_step()
    ...   print(facade.global_variables())
    [<Variable 'global_step:0' shape=() dtype=int32>]

  References:
    `tf.global_variables` of TensorFlow 1.15.
  """
  return graph_lib.get_collection(_KEYS.GLOBAL_VARIABLES, scope)


def local_variables(scope: str | None = None) -> list[Variable]:
  """Returns the variables of the collection `LOCAL_VARIABLES`, oldest first.

  Args:
    scope: A regular expression that their names must begin with, if given.

  Returns:
    A new list.

  Examples:
    >>> from shard_transforms import facade
    >>> local = [facade.GraphKeys.LOCAL_VARIABLES]
    >>> with facade.Graph().as_default():
    ...   count = facade.get_variable('n', initializer=0, collections=local)
    ...   print(facade.local_variables(), facade.global_variables())
    [<Variable 'n:0' shape=() dtype=int32>] []

  References:
    `tf.local_variables` of TensorFlow 1.15.
  """
  return graph_lib.get_collection(_KEYS.LOCAL_VARIABLES, scope)


def trainable_variables(scope: str | None = None) -> list[Variable]:
  """Returns the trainable variables of the default graph, oldest first.

  Args:
    scope: A regular expression that their names must begin with, if given.

  Returns:
    A new list.

  Examples:
    >>> from shard_transforms import facade
    >>> with facade.Graph().as_default():
    ...   w = facade.Variable(1.0, name='w')
    ...   mean = facade.Variable(0.0, trainable=False)
    ...   print(facade.trainable_variables())
    [<Variable 'w:0' shape=() dtype=float32>]

  References:
    `tf.trainable_variables` of TensorFlow 1.15.
  """
  return graph_lib.get_collection(_KEYS.TRAINABLE_VARIABLES, scope)


def get_global_step(graph: graph_lib.Graph | None = None) -> Variable | None:
  """Returns the global step of a graph, or `None` without one.

  It is that of the collection `GLOBAL_STEP`, else the variable `global_step`.

  Args:
    graph: The graph; the default one if `None`.

  Returns:
    The `Variable`, an integer [].

  Raises:
    ValueError: If it cannot count.

  Examples:
    >>> from shard_transforms import facade
    >>> with facade.Graph().as_default():
    ...   print(facade.get_global_step())
    None

  References:
    `tf.train.get_global_step` of TensorFlow 1.15.
  """
  graph = graph or graph_lib.get_default_graph()
  everything = graph.get_collection(_KEYS.GLOBAL_VARIABLES)
  found = graph.get_collection(_KEYS.GLOBAL_STEP) or [
      variable for variable in everything if variable.op.name == 'global_step'
  ]
  step = found[0] if found else None
  check_step(step)
  return step


def check_step(global_step: object) -> None:
  """Checks that a global step is a variable that can count, or `None`.

  Raises:
    TypeError: If it is no `Variable`.
    ValueError: If it is no integer scalar.
  """
  if global_step is None:
    return
  if not isinstance(global_step, Variable):
    raise TypeError(
        f'`global_step` must be a `facade.Variable`, got {global_step!r}.'
    )
  if not jnp.issubdtype(global_step.dtype, jnp.integer) or global_step.shape:
    raise ValueError(
        f'`global_step` must be an integer scalar, got {global_step!r}.'
    )


def get_or_create_global_step(
    graph: graph_lib.Graph | None = None,
) -> Variable:
  """Returns the global step of a graph; creates it at 0 if needed.

  Args:
    graph: The graph; the default one if `None`.

  Returns:
    The `Variable`, int32 [] and not trainable.

  Examples:
    >>> from shard_transforms import facade
    >>> with facade.Graph().as_default():
    ...   step = facade.get_or_create_global_step()
    ...   print(step.name, step.value())
    global_step:0 0

  References:
    `tf.train.get_or_create_global_step` of TensorFlow 1.15.
  """
  graph = graph or graph_lib.get_default_graph()
  with graph.as_default(), graph.lock:
    step = get_global_step()
    if step is None:
      zero = np.zeros([], np.int32)
      step = get_variable('global_step', initializer=zero, trainable=False)
      if step not in graph.get_collection_ref(_KEYS.GLOBAL_STEP):
        graph.keep(_KEYS.GLOBAL_STEP, step, step)
    return step


def get_values(variables: Iterable[Variable]) -> dict[str, jax.Array]:
  """Returns the arrays of variables by name, for a checkpoint.

  Args:
    variables: The variables, such as `global_variables()`.

  Returns:
    The arrays by `op.name`, which `flax.serialization` or orbax can save. A
    variable with one value per shard gives all of them, along a leading axis; a
    random key gives its key data.

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
    variables: Iterable[Variable],
    values: Mapping[str, npt.ArrayLike],
) -> None:
  """Restores variables from the result of `get_values`, all of them or none.

  Slots must exist: `function(...).build(...)` creates what a first call would
  create, without running it.

  Args:
    variables: The variables, as they were given to `get_values`.
    values: The arrays by name.

  Raises:
    ValueError: If a name is missing, unknown or that of two variables, or an
      array has another shape or a value that the dtype of its variable cannot
      hold. No variable changes then.

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
        f'`values` must hold the names of `variables`, but only one of the two'
        f' has {wrong}. Make slots with `facade.function(...).build(...)`'
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
  # An array on other devices would compile a step again.
  committed = variable.stored.committed
  return jax.device_put(array, variable.stored.sharding if committed else None)
