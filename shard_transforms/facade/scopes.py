"""Scopes of names: `variable_scope`, `name_scope`."""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import dataclasses
from typing import Any

import jax

from shard_transforms.facade import contexts
from shard_transforms.facade import frames
from shard_transforms.facade import graph as graph_lib


@dataclasses.dataclass
class VariableScope:
  """Where `get_variable` looks, and what it takes by default.

  Attributes:
    name: What names of `get_variable` begin with, without the last slash.
    graph: The graph that it is of.
    names: What names of `Variable` begin with.
    reuse: Whether variables must exist.
    initializer: The default initializer.
    regularizer: The default regularizer.
    dtype: The default dtype.
  """

  name: str
  graph: graph_lib.Graph
  names: str = ''
  reuse: bool = False
  initializer: Any = None
  regularizer: Callable[[Any], Any] | None = None
  dtype: jax.typing.DTypeLike | None = None

  @property
  def prefix(self) -> str:
    """What names of `get_variable` begin with."""
    return f'{self.name}/' if self.name else ''

  def reuse_variables(self) -> None:
    """Makes `get_variable` refuse new names from here to the scope's end."""
    self.reuse = True


def of(graph: graph_lib.Graph) -> VariableScope:
  """Returns the innermost scope of a graph around the caller."""
  for scope in reversed(contexts.scopes()):
    if scope.graph is graph:
      return scope
  graph.scope = graph.scope or VariableScope('', graph)
  return graph.scope


def get_variable_scope() -> VariableScope:
  """Returns the innermost scope of the default graph.

  Returns:
    The scope, with `name`, `reuse` and `reuse_variables()`.

  Examples:
    >>> from shard_transforms import facade
    >>> with facade.variable_scope('a'), facade.variable_scope('b'):
    ...   print(facade.get_variable_scope().name)
    a/b

  References:
    `tf.get_variable_scope` of TensorFlow 1.15.
  """
  return of(graph_lib.get_default_graph())


@contextlib.contextmanager
def variable_scope(
    name_or_scope: str | VariableScope,
    default_name: str | None = None,
    values: Any = None,
    initializer: Any = None,
    regularizer: Callable[[Any], Any] | None = None,
    reuse: bool | None = None,
    dtype: jax.typing.DTypeLike | None = None,
) -> Iterator[VariableScope]:
  """Puts a name and a slash before those of variables that are made inside.

  `get_variable` finds a variable again wherever it exists, because a step runs
  often: only `reuse=True` makes a difference.

  Args:
    name_or_scope: The name, or a scope that another `variable_scope` gave.
    default_name: Ignored.
    values: Ignored.
    initializer: The default initializer; that of the scope around if `None`.
    regularizer: The default regularizer, the same.
    reuse: Whether variables must exist, here and in scopes inside.
    dtype: The default dtype, the same.

  Yields:
    The scope.

  Raises:
    ValueError: If there is no name: the next step would need the same one.

  Examples:
    >>> from shard_transforms import facade
    >>> with facade.Graph().as_default(), facade.variable_scope('layer'):
    ...   print(facade.get_variable('w', initializer=1.0).name)
    layer/w:0

  References:
    `tf.variable_scope` of TensorFlow 1.15.
  """
  del values
  if name_or_scope is None:
    raise ValueError(
        '`name_or_scope` must be given, got None with the default'
        f' {default_name!r}: a step that runs again would find other names.'
    )
  around = get_variable_scope()
  if isinstance(name_or_scope, VariableScope):
    base, name = name_or_scope, name_or_scope.name
    names = name.rpartition('/')[2]
  else:
    base, names = around, name_or_scope
    name = around.prefix + names if names else around.name
  scope = dataclasses.replace(
      base,
      name=name,
      names=_unique(around, names),
      reuse=bool(reuse) or around.reuse or base.reuse,
      initializer=base.initializer if initializer is None else initializer,
      regularizer=base.regularizer if regularizer is None else regularizer,
      dtype=base.dtype if dtype is None else dtype,
  )
  with contexts.scopes_are(*contexts.scopes(), scope):
    yield scope


@contextlib.contextmanager
def name_scope(
    name: str | None, default_name: str | None = None, values: Any = None
) -> Iterator[str]:
  """Puts a name and a slash before those of `Variable`s that are made inside.

  The names of `get_variable` stay, and no operations have names here.

  Args:
    name: The name; a number is appended if it is taken. An empty one, or
      `None` without a default, leaves all scopes.
    default_name: The name if `name` is `None`.
    values: Ignored.

  Yields:
    What names begin with.

  Examples:
    >>> from shard_transforms import facade
    >>> with facade.Graph().as_default(), facade.name_scope('layer'):
    ...   print(facade.Variable(1.0, name='w').name)
    layer/w:0

  References:
    `tf.name_scope` of TensorFlow 1.15.
  """
  del values
  around = get_variable_scope()
  chosen = default_name if name is None else name
  names = _unique(around, chosen) if chosen else ''
  scope = dataclasses.replace(around, names=names)
  with contexts.scopes_are(*contexts.scopes(), scope):
    yield names


def _unique(around, name):
  """Returns what names in a scope inside another one begin with."""
  if not name:
    return around.names
  if name.endswith('/'):
    return name
  whole = around.names + name
  # No `Variable` is made in a step, which must not use up names.
  is_step = frames.is_open() or contexts.is_repeated()
  return (whole if is_step else around.graph.unique_name(whole)) + '/'
