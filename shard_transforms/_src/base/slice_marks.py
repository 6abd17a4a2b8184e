"""Which arrays of a traced `init` are slices, and of what.

Shapes do not tell a slice from a row that each shard keeps. The transformation
that slices knows, and marks what it makes; who traces its `init` reads that.
"""

from collections.abc import Hashable
from collections.abc import Iterator
import contextlib
import contextvars
import dataclasses
from typing import Any

from shard_transforms._src.base import divisions


@dataclasses.dataclass(frozen=True)
class Mark:
  """What an array is a slice of.

  Attributes:
    division: How the leaf is divided, as this shard would have all of it.
    axes: The mapped axes over which it is, in the order of the division.
  """

  division: divisions.Division
  axes: tuple[Hashable, ...]


@dataclasses.dataclass
class Marks:
  """The marks of the arrays that are made while they are collected."""

  # With the arrays, whose `id` would else be given to others.
  _found: dict[int, tuple[Any, Mark]] = dataclasses.field(default_factory=dict)

  def add(self, leaf: Any, found: Mark) -> None:
    """Marks an array."""
    self._found[id(leaf)] = leaf, found

  def of(self, leaf: Any) -> Mark | None:
    """Returns the mark of an array, or `None`."""
    return self._found.get(id(leaf), (None, None))[1]


_collecting = contextvars.ContextVar[Marks | None]('marks', default=None)


@contextlib.contextmanager
def collected() -> Iterator[Marks]:
  """Collects the marks of what is made in this context."""
  marks = Marks()
  token = _collecting.set(marks)
  try:
    yield marks
  finally:
    _collecting.reset(token)


def mark(leaf: Any, division: divisions.Division, axes: Any) -> None:
  """Marks an array as a slice, if somebody wants to know."""
  marks = _collecting.get()
  if marks is not None and leaf.shape == division.of_slice:
    marks.add(leaf, Mark(division, tuple(axes)))
