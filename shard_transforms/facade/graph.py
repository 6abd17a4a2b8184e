"""Graphs: collections of variables, which keep two models apart."""

from collections.abc import Iterator
import contextlib
import re
import threading
from typing import Any


class GraphKeys:
  """Names of the collections of a graph.

  Attributes:
    GLOBAL_VARIABLES: All variables.
    TRAINABLE_VARIABLES: Those that optimizers update by default.
    GLOBAL_STEP: The global step alone.
    LOCAL_VARIABLES: Empty unless you add to it, as all that follow.
    LOSSES: The same.
    REGULARIZATION_LOSSES: The same.
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
  LOCAL_VARIABLES = 'local_variables'
  LOSSES = 'losses'
  REGULARIZATION_LOSSES = 'regularization_losses'
  SUMMARIES = 'summaries'
  TRAIN_OP = 'train_op'
  UPDATE_OPS = 'update_ops'


class Graph:
  """A model's collections of variables, and the names in use.

  There is no graph of operations: computations are Python functions.

  Attributes:
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
    self.lock = threading.RLock()
    self.update_lock = threading.RLock()

  def get_collection(self, name: str, scope: str | None = None) -> list[Any]:
    """Returns a copy of a collection; unknown ones are empty.

    Args:
      name: Its name.
      scope: A regular expression. Items whose names do not begin with it are
        left out.
    """
    found = list(self._collections.get(name, ()))
    if scope is None:
      return found
    return [item for item in found if re.match(scope, item.name)]

  def get_collection_ref(self, name: str) -> list[Any]:
    """Returns a collection itself."""
    return self._collections.setdefault(name, [])

  def add_to_collection(self, name: str, value: Any) -> None:
    """Appends a value to a collection."""
    self.get_collection_ref(name).append(value)

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
