"""Lookup of variables in a graph, by name or by collection."""

from collections.abc import Callable
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from shard_transforms.facade import frames
from shard_transforms.facade import graph as graph_lib
from shard_transforms.facade import variables

_KEYS = graph_lib.GraphKeys


def get_variable(
    name: str,
    shape: Iterable[int] | None = None,
    dtype: jax.typing.DTypeLike | None = None,
    initializer: npt.ArrayLike | Callable[..., npt.ArrayLike] | None = None,
    *,
    trainable: bool = True,
) -> variables.Variable:
  """Returns the variable of a name in the default graph; creates it if needed.

  Use it in traced functions and in the `model_fn` of `replicate_model_fn`:
  every call, and every tower, gets the same variable.

  Args:
    name: The name.
    shape: The shape for the initializer; an existing variable must have it.
    dtype: The dtype for the initializer, float32 if `None`.
    initializer: The initial value: an array, or a function of no arguments, or,
      with `shape`, of the shape and the dtype.
    trainable: Whether it joins the trainable variables.

  Returns:
    The `Variable`.

  Raises:
    ValueError: If it does not exist and there is no initializer, if it exists
      in another shape, or if the initializer returns another shape.

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
  shape = None if shape is None else tuple(shape)
  graph = graph_lib.get_default_graph()
  with graph.lock:
    for variable in graph.get_collection(_KEYS.GLOBAL_VARIABLES):
      if variable.op.name == name:
        _check_shape(variable.shape, shape, name)
        return variable
    if initializer is None:
      raise ValueError(f'`initializer` of {name!r} must be given, got None.')
    with frames.outside():
      if shape is not None and callable(initializer):
        initializer = initializer(shape, dtype or jnp.float32)
      value = initializer() if callable(initializer) else initializer
      _check_shape(np.shape(value), shape, name)
      return variables.Variable(value, trainable, name=name, dtype=dtype)


def _check_shape(found, wanted, name):
  if wanted not in (None, found):
    raise ValueError(f'`shape` of {name!r} must be {found}, got {wanted}.')


def global_variables(scope: str | None = None) -> list[variables.Variable]:
  """Returns all variables of the default graph, oldest first.

  Args:
    scope: A regular expression that their names have to begin with, if given.

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
  graph = graph_lib.get_default_graph()
  return graph.get_collection(_KEYS.GLOBAL_VARIABLES, scope)


def trainable_variables(scope: str | None = None) -> list[variables.Variable]:
  """Returns the trainable variables of the default graph, oldest first.

  Args:
    scope: A regular expression that their names have to begin with, if given.

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
  graph = graph_lib.get_default_graph()
  return graph.get_collection(_KEYS.TRAINABLE_VARIABLES, scope)


def get_global_step(
    graph: graph_lib.Graph | None = None,
) -> variables.Variable | None:
  """Returns the global step of a graph, or `None` without one.

  Args:
    graph: The graph; the default one if `None`.

  Returns:
    The `Variable`, an integer [].

  Examples:
    >>> from shard_transforms import facade
    >>> with facade.Graph().as_default():
    ...   print(facade.get_global_step())
    None

  References:
    `tf.train.get_global_step` of TensorFlow 1.15.
  """
  graph = graph or graph_lib.get_default_graph()
  found = graph.get_collection(_KEYS.GLOBAL_STEP)
  return found[0] if found else None


def get_or_create_global_step(
    graph: graph_lib.Graph | None = None,
) -> variables.Variable:
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
      graph.add_to_collection(_KEYS.GLOBAL_STEP, step)
    return step
