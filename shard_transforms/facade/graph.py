"""Graphs: collections of variables and other objects, and the used names."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
import contextlib
import dataclasses
import re
import threading
from typing import Any

import jax

from shard_transforms.facade import arrays as arrays_lib
from shard_transforms.facade import contexts
from shard_transforms.facade import frames
from shard_transforms.facade import passes


class GraphKeys:
  """The names of collections: `tf.GraphKeys`.

  Attributes:
    GLOBAL_VARIABLES: All variables.
    TRAINABLE_VARIABLES: The variables that optimizers update by default.
    GLOBAL_STEP: The global step.
    MOVING_AVERAGE_VARIABLES: The variables that have an average.
    REGULARIZATION_LOSSES: The results of the regularizers of variables.
    LOCAL_VARIABLES: Empty until a program adds to it, like all that follow.
    LOSSES: Losses.
    SUMMARIES: Summaries.
    TRAIN_OP: Training operations.
    UPDATE_OPS: Updates of moving averages.
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


@dataclasses.dataclass
class _Unnamed:
  """An item of a collection that does not have a name.

  Attributes:
    value: The item.
    name: The name prefix of the current scope, if a step has added the item.
    line: The line of the program that has added the item.
  """

  value: Any
  name: str | None
  line: Any


@dataclasses.dataclass
class VariableScope:
  """The scope of `get_variable`: `tf.VariableScope`.

  Attributes:
    name: The name prefix of `get_variable`, without the last slash.
    graph: The graph of the scope.
    names: The name prefix of `Variable`.
    reuse: Whether variables must exist.
    initializer: The default initializer.
    regularizer: The default regularizer.
    dtype: The default dtype.
  """

  name: str
  graph: 'Graph'
  names: str = ''
  reuse: bool = False
  initializer: Any = None
  regularizer: Callable[[Any], Any] | None = None
  dtype: jax.typing.DTypeLike | None = None

  @property
  def prefix(self) -> str:
    """The name prefix of `get_variable`, with the last slash."""
    return f'{self.name}/' if self.name else ''

  def reuse_variables(self) -> None:
    """Makes `get_variable` refuse new names until the end of the scope."""
    self.reuse = True


class Graph:
  """The collections of a model and the names in use: `tf.Graph`.

  It does not contain operations: computations are Python functions. An item
  that a step or a loss adds to a collection stays until the step or the loss
  ends; the next call adds its own. Variables that a step creates stay, but the
  next call of a `function` sees each of them only from the line that creates or
  uses it, as if that call built the graph. In a loss, an item replaces the one
  that the same line has added before the loss.

  Attributes:
    seed: The seed of initial values for variables without an initializer.
    variables: All variables by name, including those in no collection.
    shared: The variables of `get_variable` by name.
    scope: The outermost `VariableScope`.
    lock: Excludes other threads while a variable is created or looked up.
    update_lock: Excludes other threads while an optimizer with `use_locking`
      updates variables of the graph.
  """

  def __init__(self):
    self._collections = {}
    self._entries = {}
    self._names = {}
    self.seed = 0
    self.variables = {}
    self.shared = {}
    self.scope = VariableScope('', self)
    self.lock = threading.RLock()
    self.update_lock = threading.RLock()

  def get_collection(self, name: str, scope: str | None = None) -> list[Any]:
    """Returns a copy of a collection, empty if nothing was added.

    Args:
      name: The name of the collection.
      scope: A regular expression; only items whose name begins with a match are
        returned. In a step, an array has the name of the scope in which it was
        added, such as `'tower_0/'`.

    Raises:
      ValueError: If `scope` is given and an array was added outside of a step,
        so that it does not have a name.
    """
    visible = [
        x
        for x in self._collections.get(name, ())
        if not (
            isinstance(x, arrays_lib.Leaf) and passes.is_hidden((self, name, x))
        )
    ]
    items = _latest([visible, *frames.collected((self, name))])
    if scope:
      if any(_is_unnamed(x) for x in items):
        raise ValueError(
            f'Collection {name!r} cannot be filtered by `scope` ({scope!r}):'
            ' it contains arrays that were added outside of a step and'
            ' therefore do not have names. Leave `scope` out.'
        )
      items = [
          x for x in items if re.match(scope, getattr(x, 'name', None) or '')
      ]
    values = _values(items)
    if not arrays_lib.is_step():
      return values
    # Regularization losses have names. Computed outside of the loss that is
    # differentiated, they would be constants.
    in_loss = contexts.current.loss is not None
    return [
        x() if isinstance(x, arrays_lib.Rate) and (in_loss or not x.name) else x
        for x in values
    ]

  def get_collection_ref(self, name: str) -> list[Any]:
    """Returns a collection itself."""
    collection = self._collections.setdefault(name, [])
    # Other threads may be adding to it, so it is only replaced if needed.
    if any(isinstance(x, _Unnamed) for x in collection):
      collection[:] = _values(collection)
    return collection

  def add_to_collection(self, name: str, value: Any) -> None:
    """Appends a value to a collection.

    Inside a step, values other than variables stay until its end, because the
    next step appends its own; variables are added once.
    """
    collection = self._collections.setdefault(name, [])
    is_open = frames.is_open()
    if not hasattr(value, 'name'):
      names = scope_of(self).names if is_open else None
      value = _Unnamed(value, names, contexts.line())
    op_name = getattr(getattr(value, 'op', None), 'name', None)
    if not is_open or self.variables.get(op_name) is not value:
      frames.collect((self, name), collection, value)
    elif any(item is value for item in collection):
      passes.show([(self, name, value)])
    else:
      self.keep(name, value)

  def add_variable(self, variable: Any, collections: Iterable[str]) -> None:
    """Appends a variable to collections permanently."""
    self.variables[variable.op.name] = variable
    for name in collections:
      self.keep(name, variable, variable)

  def keep(self, name: str, item: Any, variable: Any = None) -> None:
    """Appends an item to a collection permanently.

    Args:
      name: The name of the collection.
      item: The item.
      variable: The variable with which the item becomes visible to a step.
    """
    self._collections.setdefault(name, []).append(item)
    entry = self, name, item
    self._entries.setdefault(variable, []).append(entry)
    passes.keep(entry)

  def show(self, variable: Any) -> None:
    """Makes a variable, and the items created with it, visible to a step."""
    passes.show(self._entries.get(variable, ()))

  def unique_name(self, name: str) -> str:
    """Reserves a name: the first free one of `name`, `name_1`, `name_2`, ..."""
    with self.lock:
      unique = name
      while unique in self._names:
        unique = f'{name}_{self._names[name]}'
        self._names[name] += 1
      self._names[unique] = 1
      return unique

  @contextlib.contextmanager
  def as_default(self) -> Iterator['Graph']:
    """Makes this graph the default of the calling thread, inside `with`."""
    with contexts.replaced(graph=self), frames.names_change():
      yield self


def _values(items):
  return [x.value if isinstance(x, _Unnamed) else x for x in items]


def _is_unnamed(item):
  value = item.value if isinstance(item, _Unnamed) else item
  return isinstance(value, jax.Array) and getattr(item, 'name', None) is None


def _latest(collections):
  """Concatenates collections, the innermost last.

  A step may call a loss to create its variables before the loss is
  differentiated. An item therefore replaces the one that the same line has
  added outside.
  """
  latest, seen_lines = [], set()
  for items in reversed(collections):
    item_lines = [getattr(item, 'line', None) for item in items]
    pairs = zip(items, item_lines, strict=True)
    latest[:0] = [item for item, line in pairs if line not in seen_lines]
    seen_lines |= {line for line in item_lines if line is not None}
  return latest


def scope_of(graph: Graph) -> VariableScope:
  """Returns the innermost current scope of a graph."""
  scopes = reversed(contexts.current.scopes)
  return next((s for s in scopes if s.graph is graph), graph.scope)


_shared = [Graph()]


def get_default_graph() -> Graph:
  """`tf.get_default_graph`: the graph in which variables are created.

  It is the innermost `Graph.as_default()` of the calling thread, or else a
  graph that all threads share.
  """
  return contexts.current.graph or _shared[0]


def get_collection(key: str, scope: str | None = None) -> list[Any]:
  """`tf.get_collection`: a copy of a collection of the default graph.

  An item that a step or a loss has added stays until that ends. Regularization
  losses are computed from the present values of variables; outside of a loss,
  each is a function of no arguments.
  """
  return get_default_graph().get_collection(key, scope)


def add_to_collection(name: str, value: Any) -> None:
  """`tf.add_to_collection`: appends a value to a collection.

  Inside a step or a loss, it stays until that ends, unless it is a variable.

  Examples:
    >>> from shard_transforms import facade
    >>> from shard_transforms.facade import tf
    >>> with tf.Graph().as_default():
    ...   step = facade.function(lambda: tf.add_to_collection('seen', 1))
    ...   step()
    ...   print(tf.get_collection('seen'))
    []
  """
  get_default_graph().add_to_collection(name, value)


def set_random_seed(seed: int) -> None:
  """`tf.set_random_seed`: the seed of default initializers in the graph."""
  get_default_graph().seed = seed


def reset_default_graph() -> None:
  """`tf.reset_default_graph`: replaces the shared default graph.

  Raises:
    ValueError: Inside `Graph.as_default()`.
  """
  if contexts.current.graph is not None:
    raise ValueError(
        '`reset_default_graph` was called inside `Graph.as_default()`. Leave'
        ' the `with` block first.'
    )
  _shared[0] = Graph()
