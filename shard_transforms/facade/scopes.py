"""Scopes of names: `variable_scope` and `name_scope`."""

from collections.abc import Callable
from collections.abc import Iterator
import contextlib
import dataclasses
from typing import Any

import jax

from shard_transforms.facade import contexts
from shard_transforms.facade import frames
from shard_transforms.facade import graph as graph_lib


def get_variable_scope() -> graph_lib.VariableScope:
  """`tf.get_variable_scope`: the innermost scope of the default graph."""
  return graph_lib.scope_of(graph_lib.get_default_graph())


@contextlib.contextmanager
def variable_scope(
    name_or_scope: str | graph_lib.VariableScope,
    default_name: str | None = None,
    values: Any = None,
    initializer: Any = None,
    regularizer: Callable[[Any], Any] | None = None,
    reuse: bool | None = None,
    dtype: jax.typing.DTypeLike | None = None,
) -> Iterator[graph_lib.VariableScope]:
  """`tf.variable_scope`: a name prefix and defaults for variables.

  `get_variable` returns a variable that exists, because a step runs often: only
  `reuse=True` makes a difference. A name is required, because a step that runs
  again would get another default name. `default_name` and `values` have no
  effect.

  Raises:
    ValueError: If `name_or_scope` is `None`.
  """
  if name_or_scope is None:
    raise ValueError(
        f'`tf.variable_scope` got only the default name {default_name!r}, which'
        ' would differ each time the step runs. Pass the name as'
        ' `name_or_scope`.'
    )
  outer = get_variable_scope()
  loss = contexts.current.loss
  if isinstance(name_or_scope, graph_lib.VariableScope):
    loss = loss and dataclasses.replace(loss, is_explicit=True)
    base, name = name_or_scope, name_or_scope.name
    names = name.rpartition('/')[2]
  else:
    base, names = outer, name_or_scope
    name = outer.prefix + names if names else outer.name
  scope = dataclasses.replace(
      base,
      name=name,
      names=_unique(outer, names),
      reuse=bool(reuse) or outer.reuse or base.reuse,
      initializer=base.initializer if initializer is None else initializer,
      regularizer=base.regularizer if regularizer is None else regularizer,
      dtype=base.dtype if dtype is None else dtype,
  )
  scopes = *contexts.current.scopes, scope
  with contexts.replaced(scopes=scopes, loss=loss), frames.names_change():
    yield scope


@contextlib.contextmanager
def name_scope(
    name: str | None, default_name: str | None = None, values: Any = None
) -> Iterator[str]:
  """`tf.name_scope`: a prefix for the names of each `Variable`.

  Names of `get_variable` do not change, and operations do not have names here.
  An empty name, or `None` without a default, leaves all scopes.
  """
  outer = get_variable_scope()
  name_or_default = default_name if name is None else name
  names = _unique(outer, name_or_default) if name_or_default else ''
  scope = dataclasses.replace(outer, names=names)
  with contexts.replaced(scopes=(*contexts.current.scopes, scope)):
    yield names


def slot_scope() -> contextlib.AbstractContextManager[str]:
  """Prefixes names with those of the variable scopes only, as for slots."""
  return name_scope(get_variable_scope().prefix)


def loss_prefixes() -> tuple[str, ...]:
  """Returns the name prefixes of the scopes that may surround a loss.

  TensorFlow built the loss either in the scopes around the optimizer, or before
  some of them; a loss inside another loss combines the prefixes of both.
  """
  graph, loss = graph_lib.get_default_graph(), contexts.current.loss
  scopes = [s for s in contexts.current.scopes if s.graph is graph]
  outer = loss.prefixes if loss else ('',)
  inner = [
      s.prefix.removeprefix(outer[-1])
      for s in (graph.scope, *scopes)
      if s.prefix.startswith(outer[-1])
  ]
  return tuple(dict.fromkeys(x + y for x in outer for y in inner or ['']))


def _unique(outer, name):
  """Returns the name prefix in a scope inside another one."""
  if not name:
    return outer.names
  if name.endswith('/'):
    return name
  full_name = outer.names + name
  # A step cannot create a `Variable`, and must not reserve names.
  if not frames.is_step():
    full_name = outer.graph.unique_name(full_name)
  return f'{full_name}/'
