"""The batches in flight, and how long their gradients may take."""

import collections
from collections.abc import Collection
from collections.abc import Iterable
from collections.abc import Iterator
import math
import statistics
from typing import Any, NamedTuple

import numpy as np

# A worker hangs if it takes this many times the limit, and at least this many
# seconds: a pause of the whole machine must not replace every worker.
_HANGS = 5
_LEAST_HANG = 5.0
# Extra seconds for a worker's first gradient.
_COMPILATION = 120.0
# The median is over this many of the latest durations.
_NUM_DURATIONS = 101


class Assignment(NamedTuple):
  """A batch that a worker computes, or that waits for a worker.

  Attributes:
    batch: The number of the batch.
    attempt: The number of the attempt at it; the first is 1.
    local_step: The global step of the parameters that the worker is given.
    published: These parameters, as published; see `ParameterServer.publish`.
    worker: The number of the worker; -1 if there is none yet.
    start: When it was assigned, in seconds.
  """

  batch: int
  attempt: int = 1
  local_step: int = 0
  published: Any = None
  worker: int = -1
  start: float = 0.0


class TimeLimits:
  """The time limits of gradients: multiples of the median duration.

  Before the first gradient has come back there is no median, and no limit. Each
  attempt at a batch has twice the time of the one before, because the batch
  itself may be slow.

  Attributes:
    seconds: The latest duration of each worker; 0 if it has computed only one
      gradient, which includes compilation and says nothing of its speed.
  """

  def __init__(self, patience: float):
    self._patience = patience
    self._durations = collections.deque[float](maxlen=_NUM_DURATIONS)
    # First durations include compilation. They are better than no limit.
    self._first_durations = collections.deque[float](maxlen=_NUM_DURATIONS)
    # Earlier ones are perhaps of another machine. They count until then.
    self._earlier = collections.deque[float](maxlen=_NUM_DURATIONS)
    self.seconds: dict[int, float] = {}

  def extend(self, durations: Iterable[float]) -> None:
    """Adds the durations of earlier gradients."""
    self._earlier.extend(durations)

  def add(self, worker: int, seconds: float) -> None:
    """Adds the duration of a gradient."""
    if worker in self.seconds:
      self._durations.append(seconds)
      self.seconds[worker] = seconds
    else:
      self._first_durations.append(seconds)
      self.seconds[worker] = 0

  def restart(self, worker: int) -> None:
    """Gives a worker that has died the time to compile again."""
    self.seconds.pop(worker, None)

  def late_at(self, assigned: Assignment) -> float:
    """Returns the time after which a gradient is late."""
    return self._start(assigned) + self._limit(assigned.attempt)

  def hung_at(self, assigned: Assignment) -> float:
    """Returns the time after which a worker counts as hung."""
    limit = max(_HANGS * self._limit(assigned.attempt), _LEAST_HANG)
    return self._start(assigned) + limit

  def _start(self, assigned):
    is_compiled = assigned.worker in self.seconds
    return assigned.start + (0.0 if is_compiled else _COMPILATION)

  def _limit(self, attempt):
    known = self._durations or self._first_durations or self._earlier
    if not known:
      return math.inf
    return self._patience * statistics.median(known) * 2 ** (attempt - 1)


def durations(records: np.ndarray) -> list[float]:
  """Returns about how many seconds the gradients of a journal took.

  It takes the time between two records of a worker, which includes the time in
  which the worker waited.
  """
  found = []
  for worker in np.unique(records['worker']):
    found += np.diff(records['seconds'][records['worker'] == worker]).tolist()
  # The clock starts at zero with each start of the program.
  return [seconds for seconds in found if seconds > 0]


class InFlight:
  """What each worker computes. It iterates over what is in flight.

  A gradient is late after `patience` times the median duration: then it is no
  longer in flight, and does not count. Its worker gets nothing else until it is
  back.

  Attributes:
    limits: The time limits.
  """

  def __init__(self, patience: float):
    self.limits = TimeLimits(patience)
    # By worker.
    self._in_flight: dict[int, Assignment] = {}
    self._late: dict[int, Assignment] = {}

  def __len__(self) -> int:
    return len(self._in_flight)

  def __iter__(self) -> Iterator[Assignment]:
    return iter(self._in_flight.values())

  def idle(self, workers: Collection[int]) -> list[int]:
    """Returns the workers that have nothing to do, the fastest first."""
    idle = set(workers) - self._in_flight.keys() - self._late.keys()
    # A worker whose speed is unknown comes first.
    seconds = self.limits.seconds
    return sorted(idle, key=lambda worker: (seconds.get(worker, 0), worker))

  def start(self, assigned: Assignment) -> None:
    """Starts an assignment."""
    self._in_flight[assigned.worker] = assigned

  def end(
      self, worker: int, now: float, *, is_lost: bool
  ) -> tuple[Assignment, bool]:
    """Ends an assignment; returns it, and whether its gradient counts.

    Args:
      worker: The worker.
      now: The time.
      is_lost: Whether the worker has died.
    """
    counts = worker in self._in_flight
    assigned = (self._in_flight if counts else self._late).pop(worker)
    if is_lost:
      self.limits.restart(worker)
    else:
      self.limits.add(worker, now - assigned.start)
    return assigned, counts

  def make_late(self, now: float) -> list[Assignment]:
    """Returns the assignments that have become late."""
    late = [x for x in self if now > self.limits.late_at(x)]
    for assigned in late:
      del self._in_flight[assigned.worker]
      # Nobody needs the parameters again.
      self._late[assigned.worker] = assigned._replace(published=None)
    return late

  def hung(self, now: float) -> list[int]:
    """Returns the workers that hang."""
    limits = self.limits
    return [w for w, x in self._late.items() if now > limits.hung_at(x)]

  def seconds_left(self, now: float) -> float:
    """Returns the seconds until the next gradient is late."""
    ends = map(self.limits.late_at, self)
    return max(min(ends, default=math.inf) - now, 0)
