"""How often a branch is taken where a counter decides.

The decision `counter % 10 == 3` holds once in ten steps. It is known by the
operations behind it, whoever wrote them: an integer that the program is given,
numbers that are added to it, the remainder by a number, and a comparison.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from shard_transforms._src.analysis import inlining
from shard_transforms._src.analysis import interpreter


class Period(NamedTuple):
  """In which steps a decision holds.

  Attributes:
    every: It holds once in this many steps.
    phase: The remainder of the counter in these steps.
  """

  every: int
  phase: int


class _Position(NamedTuple):
  """An integer `rem(counter + before, every) + after`.

  Attributes:
    before: The number that is added to the counter.
    every: The divisor; `None` if there is no remainder yet.
    after: The number that is added to the remainder.
  """

  before: int = 0
  every: int | None = None
  after: int = 0

  def plus(self, number: int) -> '_Position':
    if self.every is None:
      return self._replace(before=self.before + number)
    return self._replace(after=self.after + number)

  def equals(self, number: int) -> Period | None:
    """Returns when it is this number, for counters that are not negative."""
    remainder = number - self.after
    if self.every is None or not 0 <= remainder < self.every:
      return None
    return Period(self.every, (remainder - self.before) % self.every)


def find(program: interpreter.Program) -> dict[inlining.Value, Period]:
  """Returns the decisions of a program that hold once in some steps."""
  found: dict[inlining.Value, Any] = {
      x: _Position() for x in program.inputs if _is_integer(x)
  }
  for step in program.steps:
    if all(map(_is_integer, step.outputs)):
      known = _follow(step.name, [_known(x, found) for x in step.inputs])
      found.update({x: known for x in step.outputs if known is not None})
  return {x: known for x, known in found.items() if isinstance(known, Period)}


def _is_integer(value):
  dtype = value.aval.dtype
  is_whole = any(jnp.issubdtype(dtype, kind) for kind in (jnp.integer, bool))
  return is_whole and not value.aval.shape


def _known(value, found):
  if value.number is None or not _is_integer(value):
    return found.get(value)
  return int(np.asarray(value.number))


def _follow(name: str, given: list[Any]) -> int | _Position | Period | None:
  """Returns what is known of a result, given what is known of the operands."""
  match name, given:
    case ('convert_element_type' | 'broadcast_in_dim'), [known]:
      return known
    case 'add', [_Position() as position, int(number)]:
      return position.plus(number)
    case 'add', [int(number), _Position() as position]:
      return position.plus(number)
    case 'sub', [_Position() as position, int(number)]:
      return position.plus(-number)
    case 'rem', [_Position(every=None) as position, int(number)]:
      return position._replace(every=number) if number > 0 else None
    case 'rem', [int(start), int(number)]:
      # A counter that begins in the program: its state is made there.
      return _Position(start, number) if number > 0 else None
    case 'eq', [int(number), int(other)]:
      return number == other
    case 'eq', [_Position() as position, int(number)]:
      return position.equals(number)
    case 'eq', [int(number), _Position() as position]:
      return position.equals(number)
    case 'select_n', [int(chosen), *cases]:
      return cases[chosen]
    case 'select_n', [_, _Position(every=int(every)) as position, other]:
      # `%` adds the divisor to remainders that are negative.
      return position if other == position.plus(every) else None
  return None
