"""The fate of a gradient: accepted, dropped, failed or lost."""

import collections
from collections.abc import Callable
import math

from shard_transforms._src.asynchronous import journal
from shard_transforms._src.asynchronous import task as task_lib
from shard_transforms._src.asynchronous import tickets as tickets_lib


def fate(
    outcome: task_lib.Outcome | None, age: int, staleness: float
) -> journal.Fate:
  """Returns the fate of a gradient.

  Args:
    outcome: The outcome of its ticket; `None` if it is lost.
    age: The number of updates since its parameters were read.
    staleness: The age up to which it is accepted.
  """
  if outcome is None:
    return journal.Fate.LOST
  if outcome.failure is not None:
    return journal.Fate.FAILED
  return journal.Fate.ACCEPTED if age <= staleness else journal.Fate.DROPPED


def weight_at(age: int, weight: Callable[[int], float] | None) -> float | None:
  """Returns the weight of a gradient of this age, if the user gives one.

  Raises:
    ValueError: If it is negative or not finite.
  """
  if weight is None:
    return None
  given = float(weight(age))
  if not (math.isfinite(given) and given >= 0):
    raise ValueError(
        '`weight` must give a finite number that is not negative, got'
        f' {given!r} at age {age}.'
    )
  return given


class Attempts:
  """The failed attempts at each batch."""

  def __init__(self, max_attempts: int):
    self._max_attempts = max_attempts
    self._failed = collections.Counter[int]()

  def num_failed(self, batch: int) -> int:
    """Returns the number of failed attempts at a batch."""
    return self._failed[batch]

  def add(
      self, ticket: tickets_lib.Ticket, failure: task_lib.Failure | None
  ) -> None:
    """Counts a failed attempt.

    Args:
      ticket: The batch and its worker.
      failure: What a function of the task raised; `None` if the worker died or
        hung.

    Raises:
      RuntimeError: If it was the last one allowed.
    """
    self._failed[ticket.batch] += 1
    attempts = self._failed[ticket.batch]
    is_final = failure is not None and failure.is_final
    if attempts < self._max_attempts and not is_final:
      return
    if failure is None:
      raise RuntimeError(
          f'The worker of batch {ticket.batch} has died or hung {attempts}'
          ' times: the batch may be the cause. `max_attempts` says how often it'
          ' is tried.'
      )
    raise RuntimeError(
        f'`{failure.function}` of `task` must work, got {failure.message} in'
        f' batch {ticket.batch} on worker {ticket.worker}, in attempt'
        f' {attempts}.\n{failure.trace}'.rstrip()
    )
