"""Scopes that say how often a meeting of `local_updates` is held."""

import re
from typing import NamedTuple

_SCOPE = re.compile(r'meeting_(?P<number>\d+)_of_(?P<every>\d+)_steps')


class Meeting(NamedTuple):
  """One of several that are held in turn.

  Attributes:
    number: Which of them it is.
    every: It is held once in this many steps.
  """

  number: int
  every: int


def scope(number: int, every: int | None) -> str:
  """Returns the scope of a meeting; `None` is for steps that are not known."""
  return f'meeting_{number}_of_{every or 1}_steps'


def parse(scopes: str) -> Meeting | None:
  """Returns the meeting in some scopes, if there is one."""
  found = _SCOPE.search(scopes)
  if found is None:
    return None
  return Meeting(int(found['number']), int(found['every']))
