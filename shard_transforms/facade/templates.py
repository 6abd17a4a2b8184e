"""Templates: objects that a function creates once and reuses in each call."""

import collections
from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Iterator
import contextlib
import threading
from typing import Any


class Template:
  """Keeps the objects that a function creates, for each call to reuse.

  TensorFlow 1 built a graph once and ran it often. Here, the function itself
  runs again: the n-th object of a kind that a call creates is the n-th that
  every other call gets.
  """

  def __init__(self):
    self._made = {}
    self._lock = threading.Lock()

  def find(self, key: Hashable, make: Callable[[], Any]) -> Any:
    """Returns the object of a key; creates it if needed."""
    with self._lock:
      if key not in self._made:
        self._made[key] = make()
      return self._made[key]


class _Thread(threading.local):
  """The calls in progress in this thread, with their objects."""

  def __init__(self):
    self.calls: list[tuple[Template | None, collections.Counter]] = []


_thread = _Thread()


@contextlib.contextmanager
def call_of(template: Template | None) -> Iterator[None]:
  """Starts to count objects anew, for one call of a function.

  Without a template, no object that must be reused may be created.
  """
  _thread.calls.append((template, collections.Counter()))
  try:
    yield
  finally:
    _thread.calls.pop()


def is_within() -> bool:
  """Whether a call is in progress, which will run again."""
  return bool(_thread.calls)


@contextlib.contextmanager
def suspended() -> Iterator[None]:
  """Lets objects that are created inside belong to no call."""
  calls, _thread.calls = _thread.calls, []
  try:
    yield
  finally:
    _thread.calls = calls


def subtemplate() -> Template | None:
  """Returns the template of a function inside the one around, if any."""
  if not _thread.calls or _thread.calls[-1][0] is None:
    return None
  return persistent('template', Template)


def persistent(kind: Hashable, make: Callable[[], Any]) -> Any:
  """Returns a new object; inside a template, the one of its earlier calls.

  Raises:
    ValueError: In a call without a template.
  """
  if not _thread.calls:
    return make()
  template, counts = _thread.calls[-1]
  if template is None:
    raise ValueError(
        'An optimizer must not be made in a computation that `shard` runs by'
        ' itself: its slots would start anew at each call. Make it outside, or'
        ' call `shard` in a `function`.'
    )
  counts[kind] += 1
  return template.find((kind, counts[kind]), make)
