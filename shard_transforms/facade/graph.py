"""Graphs: collections of variables, which keep two models apart."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
import contextlib
import re
import threading
from typing import Any

from shard_transforms.facade import frames


class GraphKeys:
  """Names of the collections of a graph.

  Attributes:
    GLOBAL_VARIABLES: All variables.
    TRAINABLE_VARIABLES: Those that optimizers update by default.
    GLOBAL_STEP: The global step alone.
    MOVING_AVERAGE_VARIABLES: Those that have an average.
    REGULARIZATION_LOSSES: What the regularizers of variables return.
    LOCAL_VARIABLES: Empty unless you add to it, as all that follow.
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


class Computed:
  """An item of a collection that is computed whenever it is read.

  Args:
    name: Its name.
    compute: A function of no arguments.
  """

  def __init__(self, name: str, compute: Callable[[], Any]):
    self.name = name
    self._compute = compute

  def __call__(self) -> Any:
    """Returns the item, `None` if there is none."""
    return self._compute()


class Graph:
  """A model's collections of variables, and the names in use.

  There is no graph of operations: computations are Python functions. What a
  step or a loss adds to a collection is there until its end; the next call adds
  its own.

  Attributes:
    seed: A number for the initial values of variables without an initializer.
    variables: All variables by name, those of no collection too.
    scope: The scope around all others.
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
    self._names = {}
    self.seed = 0
    self.variables = {}
    self.scope: Any = None
    self.lock = threading.RLock()
    self.update_lock = threading.RLock()

  def get_collection(self, name: str, scope: str | None = None) -> list[Any]:
    """Returns a copy of a collection; unknown ones are empty.

    Args:
      name: Its name.
      scope: A regular expression. Items without a name that begins with it are
        left out.
    """
    found = [*self._collections.get(name, ()), *frames.collected((self, name))]
    if scope:
      found = [x for x in found if re.match(scope, getattr(x, 'name', ''))]
    computed = (x() if isinstance(x, Computed) else x for x in found)
    return [item for item in computed if item is not None]

  def get_collection_ref(self, name: str) -> list[Any]:
    """Returns a collection itself."""
    return self._collections.setdefault(name, [])

  def add_to_collection(self, name: str, value: Any) -> None:
    """Appends a value to a collection.

    Inside a step, the next one appends its own again: other values than
    variables are there until its end, and variables once.

    Args:
      name: The name of the collection.
      value: The value.
    """
    collection = self.get_collection_ref(name)
    op_name = getattr(getattr(value, 'op', None), 'name', None)
    if not frames.is_open() or self.variables.get(op_name) is not value:
      frames.collect((self, name), collection, value)
    elif not any(item is value for item in collection):
      collection.append(value)

  def add_variable(self, variable: Any, collections: Iterable[str]) -> None:
    """Appends a variable to collections, for good."""
    self.variables[variable.op.name] = variable
    for name in collections:
      self.get_collection_ref(name).append(variable)

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
    _thread.graphs.append(self)
    try:
      yield self
    finally:
      _thread.graphs.pop()


class _Thread(threading.local):

  def __init__(self):
    self.graphs = []


_thread = _Thread()
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
  return _thread.graphs[-1] if _thread.graphs else _shared[0]


def get_collection(key: str, scope: str | None = None) -> list[Any]:
  """Returns a copy of a collection of the default graph.

  What a step or a loss has added is in it until that ends. Regularization
  losses are computed from the present values of variables: ask for them where
  the loss is computed.

  Args:
    key: The name of the collection, such as `GraphKeys.LOSSES`.
    scope: A regular expression. Items without a name that begins with it are
      left out.

  Returns:
    A new list; an empty one if nothing was added.

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
  if _thread.graphs:
    raise ValueError(
        '`reset_default_graph` must be called outside `Graph.as_default()`.'
    )
  _shared[0] = Graph()
