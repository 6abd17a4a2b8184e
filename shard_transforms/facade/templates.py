"""What a function makes, and finds again at its next call."""

import collections
from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Iterator
import contextlib
import threading
from typing import Any


class Template:
  """Remembers what a function makes, so that each call finds it again.

  TensorFlow 1 built a graph once and ran it often. Here, the function itself
  runs again: the n-th object of a kind that one call makes is the n-th that
  every other call gets.
  """

  def __init__(self):
    self._made = {}
    self._lock = threading.Lock()

  def find(self, key: Hashable, make: Callable[[], Any]) -> Any:
    """Returns what was made under a key; makes it if needed."""
    with self._lock:
      if key not in self._made:
        self._made[key] = make()
      return self._made[key]


class _Thread(threading.local):
  """The calls that are under way in this thread, with what they have made."""

  def __init__(self):
    self.calls: list[tuple[Template | None, collections.Counter]] = []


_thread = _Thread()


@contextlib.contextmanager
def call_of(template: Template | None) -> Iterator[None]:
  """Counts from the start: what follows is one call of a function.

  Without a template, nothing that it would have to find again may be made.
  """
  _thread.calls.append((template, collections.Counter()))
  try:
    yield
  finally:
    _thread.calls.pop()


def is_within() -> bool:
  """Whether a call is under way, which will run again."""
  return bool(_thread.calls)


@contextlib.contextmanager
def suspended() -> Iterator[None]:
  """Makes what is made inside belong to no call."""
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
