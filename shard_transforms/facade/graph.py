"""Graphs: collections of variables, and the scopes of their names."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
import contextlib
import dataclasses
import re
import threading
from typing import Any

import jax

from shard_transforms.facade import contexts
from shard_transforms.facade import frames
from shard_transforms.facade import leaves
from shard_transforms.facade import passes


@dataclasses.dataclass
class _Unnamed:
  """An item of a collection without a name.

  Attributes:
    value: The item.
    name: The prefix of names around, if a step has added it.
    line: The line of the program that has added it.
  """

  value: Any
  name: str | None
  line: Any


@dataclasses.dataclass
class VariableScope:
  """Where `get_variable` looks, and what it takes by default.

  Attributes:
    name: The prefix of names of `get_variable`, without the last slash.
    graph: The graph that it is of.
    names: The prefix of names of `Variable`.
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
    """The prefix of names of `get_variable`."""
    return f'{self.name}/' if self.name else ''

  def reuse_variables(self) -> None:
    """Makes `get_variable` refuse new names from here to the scope's end."""
    self.reuse = True


class Graph:
  """A model's collections of variables, and the names in use.

  There is no graph of operations: computations are Python functions. An item
  that a step or a loss adds to a collection is there until that ends; the next
  call adds its own. Variables that a step makes stay, but the next call of a
  `function` sees them only from the line on that makes or uses them, as if it
  built the graph. In a loss, what a line adds takes the place of what the same
  line has added before the loss.

  Attributes:
    seed: A number for the initial values of variables without an initializer.
    variables: All variables by name, those of no collection too.
    shared: The variables of `get_variable`, by the name that it was asked for.
    scope: The `VariableScope` around all others.
    lock: Excludes other threads while a variable is made or looked up.
    update_lock: Excludes other threads while an optimizer with `use_locking`
      updates variables of the graph.

  Examples:
    >>> from shard_transforms import facade
    >>> with facade.Graph().as_default():
    ...   w = facade.Variable(1.0, name='w')
    >>> with facade.Graph().as_default():
    ...   print(w.name, facade.trainable_variables())
    w:0 []

  References:
    `tf.Graph` of TensorFlow 1.15.
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
    """Returns a copy of a collection; unknown ones are empty.

    Args:
      name: Its name.
      scope: A regular expression, if only items whose name begins with it are
        wanted. In a step, that of an array is where it was added, such as
        `'tower_0/'`.

    Raises:
      ValueError: If items are wanted by name, and arrays have none.
    """
    kept = [
        x
        for x in self._collections.get(name, ())
        if not (
            isinstance(x, leaves.Leaf) and passes.is_hidden((self, name, x))
        )
    ]
    found = _latest([kept, *frames.collected((self, name))])
    if scope:
      if any(_is_unnamed(x) for x in found):
        raise ValueError(
            f'`scope` must be left out for collection {name!r}, got {scope!r}:'
            ' it has arrays, which have no name outside of a step.'
        )
      found = [
          x for x in found if re.match(scope, getattr(x, 'name', None) or '')
      ]
    items = _values(found)
    if not leaves.is_step():
      return items
    # A regularization loss has a name. It would be a constant if it were
    # computed before the loss that is differentiated.
    in_loss = contexts.around.loss is not None
    return [
        x() if isinstance(x, leaves.Rate) and (in_loss or not x.name) else x
        for x in items
    ]

  def get_collection_ref(self, name: str) -> list[Any]:
    """Returns a collection itself."""
    collection = self._collections.setdefault(name, [])
    # Other threads may add to it: it is left as it is where it can be.
    if any(isinstance(x, _Unnamed) for x in collection):
      collection[:] = _values(collection)
    return collection

  def add_to_collection(self, name: str, value: Any) -> None:
    """Appends a value to a collection.

    Inside a step, the next one appends its own again: other values than
    variables are there until its end, and variables once.

    Args:
      name: The name of the collection.
      value: The value.
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
    """Appends a variable to collections, for good."""
    self.variables[variable.op.name] = variable
    for name in collections:
      self.keep(name, variable, variable)

  def keep(self, name: str, item: Any, of: Any = None) -> None:
    """Appends an item to a collection for good, as a part of a variable."""
    self._collections.setdefault(name, []).append(item)
    entry = self, name, item
    self._entries.setdefault(of, []).append(entry)
    passes.keep(entry)

  def show(self, variable: Any) -> None:
    """Lets a step see a variable from here on, and what was made with it."""
    passes.show(self._entries.get(variable, ()))

  def unique_name(self, name: str) -> str:
    """Takes a name: itself, or the first free one of `name_1`, `name_2`, ..."""
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
    with contexts.replaced(graph=self), frames.renamed():
      yield self


def _values(items):
  return [x.value if isinstance(x, _Unnamed) else x for x in items]


def _is_unnamed(item):
  value = item.value if isinstance(item, _Unnamed) else item
  return isinstance(value, jax.Array) and getattr(item, 'name', None) is None


def _latest(collections):
  """Returns the items of collections, the innermost last.

  A step may call a loss to make its variables, before it is differentiated:
  what a line adds takes the place of what it has added outside.
  """
  found, lines = [], set()
  for items in reversed(collections):
    own = [getattr(item, 'line', None) for item in items]
    pairs = zip(items, own, strict=True)
    found[:0] = [item for item, line in pairs if line not in lines]
    lines |= {line for line in own if line is not None}
  return found


_shared = [Graph()]


def get_default_graph() -> Graph:
  """Returns the graph that variables are made in.

  It is the innermost `Graph.as_default()` of the calling thread; outside of
  any, one that all threads share.

  Returns:
    The graph.

  Examples:
    >>> from shard_transforms import facade
    >>> with facade.Graph().as_default() as graph:
    ...   print(facade.get_default_graph() is graph)
    True

  References:
    `tf.get_default_graph` of TensorFlow 1.15.
  """
  return contexts.around.graph or _shared[0]


def get_collection(key: str, scope: str | None = None) -> list[Any]:
  """Returns a copy of a collection of the default graph.

  An item that a step or a loss has added is in it until that ends.
  Regularization losses are computed from the present values of variables;
  outside of a loss, each is a function of no arguments.

  Args:
    key: The name of the collection, such as `GraphKeys.LOSSES`.
    scope: A regular expression, if only items whose name begins with it are
      wanted.

  Returns:
    A new list; an empty one if nothing was added.

  Raises:
    ValueError: With `scope`, if arrays were added outside of a step.

  Examples:
    >>> from shard_transforms import facade
    >>> with facade.Graph().as_default():
    ...   facade.add_to_collection(facade.GraphKeys.LOSSES, 2.5)
    ...   print(facade.get_collection(facade.GraphKeys.LOSSES))
    [2.5]

  References:
    `tf.get_collection` of TensorFlow 1.15.
  """
  return get_default_graph().get_collection(key, scope)


def add_to_collection(name: str, value: Any) -> None:
  """Appends a value to a collection of the default graph.

  Inside a step or a loss, it is there until that ends, unless it is a variable.

  Args:
    name: The name of the collection.
    value: The value.

  Examples:
    >>> from shard_transforms import facade
    >>> with facade.Graph().as_default():
    ...   step = facade.function(lambda: facade.add_to_collection('seen', 1))
    ...   step()
    ...   print(facade.get_collection('seen'))
    []

  References:
    `tf.add_to_collection` of TensorFlow 1.15.
  """
  get_default_graph().add_to_collection(name, value)


def set_random_seed(seed: int) -> None:
  """Sets the seed of the default graph, for its default initializers.

  Args:
    seed: The seed.

  Examples:
    >>> from shard_transforms import facade
    >>> with facade.Graph().as_default() as graph:
    ...   facade.set_random_seed(3)
    ...   print(graph.seed)
    3

  References:
    `tf.set_random_seed` of TensorFlow 1.15.
  """
  get_default_graph().seed = seed


def reset_default_graph() -> None:
  """Replaces the graph that all threads share by an empty one.

  Raises:
    ValueError: Inside `Graph.as_default()`.

  Examples:
    >>> from shard_transforms import facade
    >>> facade.reset_default_graph()
    >>> print(facade.global_variables())
    []

  References:
    `tf.reset_default_graph` of TensorFlow 1.15.
  """
  if contexts.around.graph is not None:
    raise ValueError(
        '`reset_default_graph` must be called outside `Graph.as_default()`.'
    )
  _shared[0] = Graph()


def scope_of(graph: Graph) -> VariableScope:
  """Returns the innermost scope of a graph around the caller."""
  scopes = reversed(contexts.around.scopes)
  return next((s for s in scopes if s.graph is graph), graph.scope)


def loss_prefixes() -> tuple[str, ...]:
  """Returns the prefixes of names of the scopes that may be around a loss.

  TensorFlow built it in the scopes around the caller, or before some of them;
  inside another loss, that is true of the other one, too.
  """
  graph, loss = get_default_graph(), contexts.around.loss
  scopes = [s for s in contexts.around.scopes if s.graph is graph]
  outer = loss.prefixes if loss else ('',)
  inner = [
      s.prefix.removeprefix(outer[-1])
      for s in (graph.scope, *scopes)
      if s.prefix.startswith(outer[-1])
  ]
  return tuple(dict.fromkeys(x + y for x in outer for y in inner or ['']))


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
  return scope_of(get_default_graph())


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
  """Prefixes a name and a slash to the names of variables made inside.

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
  if name_or_scope is None:
    raise ValueError(
        '`name_or_scope` must be given, got None with the default'
        f' {default_name!r}: a step that runs again would find other names.'
    )
  around = get_variable_scope()
  loss = contexts.around.loss
  if isinstance(name_or_scope, VariableScope):
    loss = loss and dataclasses.replace(loss, is_explicit=True)
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
  scopes = *contexts.around.scopes, scope
  with contexts.replaced(scopes=scopes, loss=loss), frames.renamed():
    yield scope


@contextlib.contextmanager
def name_scope(
    name: str | None, default_name: str | None = None, values: Any = None
) -> Iterator[str]:
  """Prefixes a name and a slash to the names of each `Variable` made inside.

  The names of `get_variable` stay, and no operations have names here.

  Args:
    name: The name; a number is appended if it is taken. An empty one, or
      `None` without a default, leaves all scopes.
    default_name: The name if `name` is `None`.
    values: Ignored.

  Yields:
    The prefix of names.

  Examples:
    >>> from shard_transforms import facade
    >>> with facade.Graph().as_default(), facade.name_scope('layer'):
    ...   print(facade.Variable(1.0, name='w').name)
    layer/w:0

  References:
    `tf.name_scope` of TensorFlow 1.15.
  """
  around = get_variable_scope()
  chosen = default_name if name is None else name
  names = _unique(around, chosen) if chosen else ''
  scope = dataclasses.replace(around, names=names)
  with contexts.replaced(scopes=(*contexts.around.scopes, scope)):
    yield names


def slot_scope() -> contextlib.AbstractContextManager[str]:
  """Prefixes the names of the variable scopes alone, as slots have them."""
  return name_scope(get_variable_scope().prefix)


def _unique(around, name):
  """Returns the prefix of names in a scope inside another one."""
  if not name:
    return around.names
  if name.endswith('/'):
    return name
  whole = around.names + name
  # No `Variable` is made in a step, which must not use up names.
  if not frames.is_step():
    whole = around.graph.unique_name(whole)
  return f'{whole}/'
