"""Which batch is computed by which worker, and when: tickets."""

import collections
from collections.abc import Collection
from collections.abc import Iterable
import math
import statistics
from typing import Literal, NamedTuple

OnDrop = Literal['again', 'forget']

# A worker that is that many times as late as `patience` allows has hung; not
# before so many seconds, for a pause of the machine is none.
_HANGS = 5
_LEAST_HANG = 5.0
# Seconds that the first of a worker may take longer.
_COMPILATION = 120.0
# The latest durations, whose median is what a gradient takes.
_NUM_DURATIONS = 101


class Ticket(NamedTuple):
  """A batch in the hands of a worker.

  Attributes:
    batch: The number of the batch.
    attempt: How often it has been handed out, with this time.
    local_step: The global step of the parameters that go with it.
    worker: The number of the worker.
    start: When it was handed out, in seconds.
  """

  batch: int
  attempt: int
  local_step: int
  worker: int
  start: float


class Tickets:
  """The tickets of a run.

  A batch is ready, then with a worker, and then done, unless it is to be done
  again. Where `pace` holds, a ticket is handed out only if nothing that is with
  a worker can become older than `staleness` by it:

    global step + number with workers - oldest local step <= staleness

  where the new one's local step is the global step. What comes back adds one to
  the first and takes one from the second, so that it holds on.

  A ticket that takes `patience` times the median is late: another worker gets
  its batch, and what comes of it after all is ignored. Each attempt has twice
  the time of the one before, for it may be the batch that takes long.
  """

  def __init__(
      self,
      *,
      staleness: float,
      pace: bool,
      patience: float,
      on_drop: OnDrop,
      next_batch: int = 0,
      ready: Iterable[int] = (),
  ):
    self._staleness = staleness
    self._pace = pace
    self._patience = patience
    self._on_drop = on_drop
    self._next_batch = next_batch
    self._ready = collections.deque((number, 1) for number in ready)
    self._flying: dict[int, Ticket] = {}
    self._late: dict[int, Ticket] = {}
    self._seconds: dict[int, float] = {}
    self._durations = collections.deque[float](maxlen=_NUM_DURATIONS)

  @property
  def next_batch(self) -> int:
    """The number of the first batch that was never handed out."""
    return self._next_batch

  @property
  def ready(self) -> list[int]:
    """The numbers before it that are to be done again."""
    return [number for number, _ in self._ready]

  @property
  def num_flying(self) -> int:
    """How many workers have a batch that counts."""
    return len(self._flying)

  def idle(self, workers: Collection[int]) -> list[int]:
    """Returns those workers that have nothing to do, the fastest first."""
    idle = set(workers) - self._flying.keys() - self._late.keys()
    # One that has done nothing so far comes first, so that it is known.
    return sorted(
        idle, key=lambda worker: (self._seconds.get(worker, 0), worker)
    )

  def may_start(self, global_step: int, num_updates: int) -> bool:
    """Whether to hand out a ticket at a global step, of so many in the end."""
    num_flying = len(self._flying)
    if global_step + num_flying >= num_updates:
      return False
    oldest = self.oldest(global_step)
    return (
        not self._pace or global_step + num_flying - oldest <= self._staleness
    )

  def oldest(self, global_step: int) -> int:
    """Returns the first local step of which a gradient may still count."""
    steps = [ticket.local_step for ticket in self._flying.values()]
    return min(steps, default=global_step)

  def start(self, worker: int, global_step: int, now: float) -> Ticket:
    """Hands out the next batch."""
    if self._ready:
      number, attempt = self._ready.popleft()
    else:
      number, attempt = self._next_batch, 1
      self._next_batch += 1
    ticket = Ticket(number, attempt, global_step, worker, now)
    self._flying[worker] = ticket
    return ticket

  def finish(self, worker: int, now: float) -> tuple[Ticket, bool]:
    """Takes back the ticket of a worker; returns it, and whether it counts."""
    counts = worker in self._flying
    ticket = (self._flying if counts else self._late).pop(worker)
    if worker in self._seconds and counts:
      self._durations.append(now - ticket.start)
    # The first of a worker is compiled, and tells nothing of the others.
    self._seconds[worker] = now - ticket.start if worker in self._seconds else 0
    return ticket, counts

  def lose(self, worker: int) -> tuple[Ticket, bool]:
    """Takes back the ticket of a worker that is no more, as `finish`."""
    self._seconds.pop(worker, None)
    counts = worker in self._flying
    return (self._flying if counts else self._late).pop(worker), counts

  def do_again(self, ticket: Ticket) -> None:
    """Puts the batch of a ticket before all others."""
    self._ready.appendleft((ticket.batch, ticket.attempt + 1))

  def drop(self, ticket: Ticket) -> None:
    """Puts the batch of a stale gradient where it is to go."""
    if self._on_drop == 'again':
      self.do_again(ticket)

  def make_late(self, now: float) -> list[Ticket]:
    """Returns the tickets that have become late; their batches are ready."""
    late = [
        ticket
        for ticket in self._flying.values()
        if now - ticket.start > self._limit(ticket)
    ]
    for ticket in late:
      self._late[ticket.worker] = self._flying.pop(ticket.worker)
      self.do_again(ticket)
    return late

  def hung(self, now: float) -> list[int]:
    """Returns the workers that have been late for so long that they hang."""
    return [
        ticket.worker
        for ticket in self._late.values()
        if now - ticket.start > max(_HANGS * self._limit(ticket), _LEAST_HANG)
    ]

  def seconds_left(self, now: float) -> float:
    """Returns after how long a ticket becomes late, if none comes back."""
    ends = [t.start + self._limit(t) for t in self._flying.values()]
    return max(min(ends, default=math.inf) - now, 0)

  def _limit(self, ticket):
    """Returns the seconds after which a ticket is late."""
    if not self._durations:
      return math.inf
    median = statistics.median(self._durations)
    is_first = ticket.worker not in self._seconds
    begin = _COMPILATION if is_first else 0
    return begin + self._patience * median * 2 ** (ticket.attempt - 1)
