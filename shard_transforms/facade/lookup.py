"""Lookup of variables by name: `get_variable` and the global step."""

from collections.abc import Callable
from collections.abc import Iterable
import inspect
import math
from typing import Any
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from shard_transforms.facade import arrays as arrays_lib
from shard_transforms.facade import contexts
from shard_transforms.facade import frames
from shard_transforms.facade import graph as graph_lib
from shard_transforms.facade import scopes
from shard_transforms.facade import variables as variables_lib

Variable = variables_lib.Variable
_KEYS = graph_lib.GraphKeys


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
  """`tf.get_variable`: returns the variable of this name, or creates it.

  Use it in steps and in the `model_fn` of `replicate_model_fn`: every call, and
  every tower, gets the same variable, as in a scope with `tf.AUTO_REUSE`.

  Args:
    name: The name, after the prefixes of the current scopes.
    shape: The shape for the initializer; an existing variable must have it.
    dtype: The dtype for the initializer, by default that of the scope or
      float32; an existing variable must have it.
    initializer: The initial value: an array, a function of no arguments, or,
      with `shape`, a function of the shape and the dtype or an initializer of
      `jax.nn.initializers`. By default, that of the scope, else zeros for
      integers, and Glorot's uniform distribution by `Graph.seed` and the name.
    regularizer: A function of the variable, whose present result is an item of
      `REGULARIZATION_LOSSES`; by default, that of the scope.
    trainable: Whether to add it to the trainable variables; by default, unless
      it is a local variable.
    collections: The names of further collections; by default, the global
      variables.
    use_resource: Ignored.
    constraint: A function of the array, applied after each update.

  Returns:
    The `Variable`.

  Raises:
    ValueError: If the variable exists with another shape or dtype; if it does
      not exist, and the scope has `reuse` or there is no initializer. In a loss
      that is differentiated in a scope: if it exists neither in that scope nor
      outside, or in both, or elsewhere than the other variables of the loss.
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
      requested_dtype = (
          dtype if dtype is None else jax.dtypes.canonicalize_dtype(dtype)
      )
      _check('dtype', variable.dtype, requested_dtype, name)
      graph.show(variable)
      return variable
    if scope.reuse:
      raise ValueError(
          f'Variable {name!r} does not exist, but its scope has `reuse=True`.'
          ' Create it in a scope without `reuse`, or with `tf.AUTO_REUSE`.'
      )
    dtype = scope.dtype if dtype is None else dtype
    if initializer is None:
      initializer = scope.initializer
    with frames.outside_of_traces(), scopes.name_scope(''):
      initial_value: Any = _initial(initializer, shape, dtype, name, graph)
      _check('shape', np.shape(initial_value), shape, name)
      if trainable is None:
        trainable = _KEYS.LOCAL_VARIABLES not in (collections or ())
      options: Any = {'name': name, 'dtype': dtype, 'constraint': constraint}
      variable = Variable(initial_value, trainable, collections, **options)
      graph.shared[name] = variable
      regularizer_fn: Any = regularizer or scope.regularizer
      if regularizer_fn is not None:
        loss = arrays_lib.Rate(lambda: regularizer_fn(variable), name)
        if regularizer_fn(variable) is not None:
          graph.keep(_KEYS.REGULARIZATION_LOSSES, loss, variable)
  return variable


def _in_loss(graph, name):
  """Returns the full name of a variable that a loss looks up.

  TensorFlow 1 built the loss before the scopes around its optimizer, or in
  them. The existing variables show which of the two a program means.

  Raises:
    ValueError: If variables exist for none or several prefixes, or if the
      variables of the loss have different prefixes.
  """
  loss = contexts.current.loss
  if loss is None or len(loss.prefixes) < 2:
    return name
  *_, call_prefix = loss.prefixes
  if not name.startswith(call_prefix):
    return name
  suffix = name.removeprefix(call_prefix)
  matching = [x for x in loss.prefixes if x + suffix in graph.shared]
  if len(matching) != 1:
    raise ValueError(
        'The loss is differentiated in a variable scope, so it looks for'
        f' exactly one of {[x + suffix for x in loss.prefixes]}, but found'
        f' {[x + suffix for x in matching]}. Create the variables first by'
        ' calling the model once, or leave the scope. For the value of the'
        ' loss, use `return_loss`.'
    )
  expected = call_prefix if loss.is_explicit else loss.prefix
  if expected not in (None, *matching):
    raise ValueError(
        f'The loss found {matching[0] + suffix!r}, but its other variables, or'
        f' the scope object that it enters, require {expected + suffix!r}.'
        ' Create the variables outside of the loss and use them there without'
        ' `get_variable`.'
    )
  if not loss.is_explicit:
    (loss.prefix,) = matching
  return matching[0] + suffix


def _initial(initializer_or_value, shape, dtype, name, graph):
  """Returns the initial value of a variable.

  Raises:
    ValueError: If there is neither an initializer nor a shape.
  """
  initializer: Any = initializer_or_value
  dtype = jax.dtypes.canonicalize_dtype(jnp.float32 if dtype is None else dtype)
  if initializer is None:
    is_float = jnp.issubdtype(dtype, jnp.inexact)
    if shape is None:
      raise ValueError(
          f'Variable {name!r} does not exist, and `initializer` and `shape` are'
          ' both None. Pass one of them to create it.'
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
  # In TensorFlow, the fans of a vector are its length, those of a scalar 1.
  limit = math.sqrt(3 / (math.prod(shape) or 1))
  return jax.random.uniform(key, shape, dtype, -limit, limit)


def _takes_key(initializer):
  """Whether an initializer takes a random key, like `jax.nn.initializers`."""
  try:
    return 'key' in inspect.signature(initializer).parameters
  except ValueError:  # Functions of NumPy do not have signatures.
    return False


def _check(what, actual, requested, name):
  if requested not in (None, actual):
    raise ValueError(
        f'Variable {name!r} has the {what} {actual}, but {requested} was'
        ' requested.'
    )


def global_variables(scope: str | None = None) -> list[Variable]:
  """`tf.global_variables`: all variables of the default graph, oldest first."""
  return graph_lib.get_collection(_KEYS.GLOBAL_VARIABLES, scope)


def local_variables(scope: str | None = None) -> list[Variable]:
  """`tf.local_variables`: the collection `LOCAL_VARIABLES`, oldest first."""
  return graph_lib.get_collection(_KEYS.LOCAL_VARIABLES, scope)


def trainable_variables(scope: str | None = None) -> list[Variable]:
  """`tf.trainable_variables`: the trainable variables, oldest first."""
  return graph_lib.get_collection(_KEYS.TRAINABLE_VARIABLES, scope)


def get_global_step(graph: graph_lib.Graph | None = None) -> Variable | None:
  """`tf.train.get_global_step`: the global step, or `None`.

  It is the item of the collection `GLOBAL_STEP`, or else the variable with the
  name `global_step`.
  """
  graph = graph or graph_lib.get_default_graph()
  all_variables = graph.get_collection(_KEYS.GLOBAL_VARIABLES)
  candidates = graph.get_collection(_KEYS.GLOBAL_STEP) or [
      variable
      for variable in all_variables
      if variable.op.name == 'global_step'
  ]
  step = candidates[0] if candidates else None
  check_step(step)
  return step


def check_step(global_step: object) -> None:
  """Checks that a global step is `None` or a variable that can count.

  Raises:
    TypeError: If it is not a `Variable`.
    ValueError: If it is not an integer scalar.
  """
  if global_step is None:
    return
  if not isinstance(global_step, Variable):
    raise TypeError(
        f'`global_step` must be a `tf.Variable`, got {global_step!r}. Use'
        ' `tf.train.get_or_create_global_step()`.'
    )
  if not jnp.issubdtype(global_step.dtype, jnp.integer) or global_step.shape:
    raise ValueError(
        f'`global_step` must be an integer scalar, got {global_step!r}.'
    )


def get_or_create_global_step(
    graph: graph_lib.Graph | None = None,
) -> Variable:
  """`tf.train.get_or_create_global_step`: an int32 scalar, created at 0."""
  graph = graph or graph_lib.get_default_graph()
  with graph.as_default(), graph.lock:
    step = get_global_step()
    if step is None:
      zero = np.zeros([], np.int32)
      step = get_variable('global_step', initializer=zero, trainable=False)
      if step not in graph.get_collection_ref(_KEYS.GLOBAL_STEP):
        graph.keep(_KEYS.GLOBAL_STEP, step, step)
    return step
