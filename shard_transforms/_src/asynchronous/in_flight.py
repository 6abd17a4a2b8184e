"""The batches in flight, and how long their gradients may take."""

import collections
from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Iterable
import dataclasses
import itertools
import math
import statistics
from typing import Literal, NamedTuple

import numpy as np

OnDrop = Literal['again', 'forget']
OnChange = Literal['raise', 'continue']

# A worker hangs if it takes this many times the limit, and at least this many
# seconds: a pause of the whole machine must not replace every worker.
_HANGS = 5
_LEAST_HANG = 5.0
# Extra seconds for a worker's first gradient.
_COMPILATION = 120.0
# The median is over this many of the latest durations.
_NUM_DURATIONS = 101


@dataclasses.dataclass(frozen=True)
class Options:
  """Arguments of `train`; `staleness` is infinite for `None`."""

  num_updates: int
  staleness: float = math.inf
  pace: bool = True
  patience: float = 4.0
  save_every: int = 100
  save_seconds: float = 5.0
  on_change: OnChange = 'raise'
  on_drop: OnDrop = 'again'
  max_attempts: int = 3
  weight: Callable[[int], float] | None = None
  driver_devices: int = 1

  def without_patience(self) -> 'Options':
    """Returns the same for workers that take turns, which are never late."""
    return dataclasses.replace(self, patience=math.inf)


class Assignment(NamedTuple):
  """A batch that a worker computes.

  Attributes:
    batch: The number of the batch.
    attempt: The number of the attempt at it; the first is 1.
    local_step: The global step of the parameters that the worker was given.
    worker: The number of the worker.
    start: When it was assigned, in seconds.
  """

  batch: int
  attempt: int
  local_step: int
  worker: int
  start: float


class TimeLimits:
  """The time limits of gradients: multiples of the median duration.

  Before the first gradient has come back there is no median, and no limit. Each
  attempt at a batch has twice the time of the one before, because the batch
  itself may be slow.
  """

  def __init__(self, patience: float):
    self._patience = patience
    self._durations = collections.deque[float](maxlen=_NUM_DURATIONS)
    self._first_durations = collections.deque[float](maxlen=_NUM_DURATIONS)
    # Earlier ones are perhaps of another machine. They count until then.
    self._earlier: list[float] = []
    self._compiled: set[int] = set()

  def extend(self, durations: Iterable[float]) -> None:
    """Adds the durations of earlier gradients."""
    self._earlier.extend(durations)

  def add(self, worker: int, seconds: float) -> None:
    """Adds the duration of a gradient."""
    if worker in self._compiled:
      self._durations.append(seconds)
    else:
      self._first_durations.append(seconds)
      self._compiled.add(worker)

  def restart(self, worker: int) -> None:
    """Gives a worker that has died the time to compile again."""
    self._compiled.discard(worker)

  def late_at(self, assigned: Assignment) -> float:
    """Returns the time after which a gradient is late."""
    return self._compiled_at(assigned) + self._limit(assigned.attempt)

  def hung_at(self, assigned: Assignment) -> float:
    """Returns the time after which a worker counts as hung."""
    limit = max(_HANGS * self._limit(assigned.attempt), _LEAST_HANG)
    return self._compiled_at(assigned) + limit

  def _compiled_at(self, assigned):
    is_compiled = assigned.worker in self._compiled
    return assigned.start + (0.0 if is_compiled else _COMPILATION)

  def _limit(self, attempt):
    # First durations include compilation. They are better than no limit.
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
  """The batches of a run: ready, in flight, late or done.

  With `pace`, a batch is assigned only if no gradient in flight can become
  older than `staleness`:

    global step + number in flight - oldest local step <= staleness

  where the local step of the new gradient is the global step. A gradient that
  comes back adds one to the first term and takes one from the second, so that
  the inequality stays true.

  A gradient is late after `patience` times the median duration: another worker
  gets the batch, and the late gradient is ignored.

  `plan` takes the batches of a journal, which are computed again: each at the
  parameters of its local step.
  """

  def __init__(self, options: Options):
    self._options = options
    self._limits = TimeLimits(options.patience)
    # The batch, the attempt at it, and its local step if that is planned.
    self._ready = collections.deque[tuple[int, int, int | None]]()
    self._in_flight: dict[int, Assignment] = {}
    self._late: dict[int, Assignment] = {}
    self._seconds: dict[int, float] = {}
    self._is_planned = False
    # The first batch that was never assigned.
    self.next_batch = 0

  def resume(self, next_batch: int, ready: Iterable[int]) -> None:
    """Starts with the batches that an earlier run has left."""
    self._is_planned = False
    self.next_batch = next_batch
    self._ready.clear()
    self._ready += [(batch, 1, None) for batch in ready]

  def plan(
      self,
      batches: np.ndarray,
      local_steps: np.ndarray,
      durations: Iterable[float],
  ) -> None:
    """Starts with batches that have their local steps, and no others.

    They start in the order of their local steps. So no more gradients wait for
    their turn than the run had in flight.

    Args:
      batches: The numbers of the batches [number of batches].
      local_steps: Their local steps [number of batches].
      durations: About how many seconds gradients take.
    """
    self._is_planned = True
    self._limits.extend(durations)
    order = np.argsort(local_steps, kind='stable')
    self._ready.clear()
    self._ready += [(int(batches[i]), 1, int(local_steps[i])) for i in order]

  @property
  def ready(self) -> list[int]:
    """The numbers of earlier batches that must be computed again."""
    return [batch for batch, *_ in self._ready]

  def __len__(self) -> int:
    return len(self._in_flight)

  def idle(self, workers: Collection[int]) -> list[int]:
    """Returns the workers that have nothing to do, the fastest first."""
    idle = set(workers) - self._in_flight.keys() - self._late.keys()
    # A worker whose speed is unknown comes first.
    return sorted(
        idle, key=lambda worker: (self._seconds.get(worker, 0), worker)
    )

  def may_start(self, global_step: int) -> bool:
    """Returns whether to assign another batch."""
    if self._is_planned:
      return bool(self.planned_steps(global_step))
    step_at_end = global_step + len(self)
    if step_at_end >= self._options.num_updates:
      return False
    age = step_at_end - min(self.needed_steps(global_step))
    return age <= self._options.staleness or not self._options.pace

  def planned_steps(self, global_step: int) -> set[int]:
    """Returns the local steps of planned batches up to a global step."""
    steps = (step for _, _, step in self._ready if step is not None)
    return set(itertools.takewhile(lambda step: step <= global_step, steps))

  def needed_steps(self, global_step: int) -> set[int]:
    """Returns the steps up to a global one whose parameters are in use."""
    steps = {assigned.local_step for assigned in self._in_flight.values()}
    return steps | self.planned_steps(global_step) | {global_step}

  def start(self, worker: int, global_step: int, now: float) -> Assignment:
    """Assigns the next batch to a worker."""
    if self._ready:
      batch, attempt, step = self._ready.popleft()
    else:
      batch, attempt, step = self.next_batch, 1, None
      self.next_batch += 1
    step = global_step if step is None else step
    assigned = Assignment(batch, attempt, step, worker, now)
    self._in_flight[worker] = assigned
    return assigned

  def finish(self, worker: int, now: float) -> tuple[Assignment, bool]:
    """Ends the assignment of a worker; returns it, and whether it counts."""
    assigned, counts = self._take(worker)
    seconds = now - assigned.start
    self._limits.add(worker, seconds)
    # A worker's first gradient includes compilation, and says nothing of speed.
    self._seconds[worker] = seconds if worker in self._seconds else 0
    return assigned, counts

  def lose(self, worker: int) -> tuple[Assignment, bool]:
    """Does the same as `finish` for a worker that has died."""
    self._seconds.pop(worker, None)
    self._limits.restart(worker)
    return self._take(worker)

  def abandon(self) -> None:
    """Puts all batches in flight before the others."""
    for assigned in sorted(self._in_flight.values(), reverse=True):
      self.retry(assigned)
    self._in_flight.clear()

  def has(self, batch: int) -> bool:
    """Returns whether a batch is in flight or ready."""
    in_flight = [assigned.batch for assigned in self._in_flight.values()]
    return batch in in_flight or batch in self.ready

  def retry(self, assigned: Assignment) -> None:
    """Puts a batch before all others."""
    step = assigned.local_step if self._is_planned else None
    self._ready.appendleft((assigned.batch, assigned.attempt + 1, step))

  def make_late(self, now: float) -> list[Assignment]:
    """Returns the assignments that have become late; retries their batches."""
    late = [
        assigned
        for assigned in self._in_flight.values()
        if now > self._limits.late_at(assigned)
    ]
    for assigned in late:
      self._late[assigned.worker] = self._in_flight.pop(assigned.worker)
      self.retry(assigned)
    return late

  def hung(self, now: float) -> list[int]:
    """Returns the workers that hang."""
    return [
        worker
        for worker, assigned in self._late.items()
        if now > self._limits.hung_at(assigned)
    ]

  def seconds_left(self, now: float) -> float:
    """Returns the seconds until the next gradient is late."""
    ends = map(self._limits.late_at, self._in_flight.values())
    return max(min(ends, default=math.inf) - now, 0)

  def _take(self, worker):
    counts = worker in self._in_flight
    return (self._in_flight if counts else self._late).pop(worker), counts
