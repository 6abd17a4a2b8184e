"""Tickets: which worker computes which batch, and since when."""

import collections
from collections.abc import Collection
from collections.abc import Iterable
import math
from typing import Literal, NamedTuple

from shard_transforms._src.asynchronous import patience as patience_lib

OnDrop = Literal['again', 'forget']


class Ticket(NamedTuple):
  """A batch that a worker has been given.

  Attributes:
    batch: The number of the batch.
    attempt: How often it has been handed out, this time included.
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

  A batch is ready, then in flight, and then done, unless it must be computed
  again. With `pace`, a ticket is handed out only if this cannot make a gradient
  in flight older than `staleness`:

    global step + number in flight - oldest local step <= staleness

  where the local step of the new ticket is the global step. A gradient that
  comes back adds one to the first term and takes one from the second, so the
  inequality stays true.

  A ticket that takes `patience` times the median is late: another worker gets
  its batch, and its own gradient is ignored; see `Patience`.
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
    self._patience = patience_lib.Patience(patience)
    self._on_drop = on_drop
    self._next_batch = next_batch
    self._ready = collections.deque((number, 1) for number in ready)
    self._in_flight: dict[int, Ticket] = {}
    self._late: dict[int, Ticket] = {}
    self._seconds: dict[int, float] = {}

  @property
  def next_batch(self) -> int:
    """The number of the first batch that was never handed out."""
    return self._next_batch

  @property
  def ready(self) -> list[int]:
    """The numbers of earlier batches that are to be computed again."""
    return [number for number, _ in self._ready]

  @property
  def num_in_flight(self) -> int:
    """The number of gradients in flight that count."""
    return len(self._in_flight)

  def idle(self, workers: Collection[int]) -> list[int]:
    """Returns those workers that have nothing to do, the fastest first."""
    idle = set(workers) - self._in_flight.keys() - self._late.keys()
    # A worker whose speed is not known yet comes first.
    return sorted(
        idle, key=lambda worker: (self._seconds.get(worker, 0), worker)
    )

  def may_start(self, global_step: int, num_updates: int) -> bool:
    """Whether to hand out a ticket, in a run of `num_updates` updates."""
    num_in_flight = len(self._in_flight)
    if global_step + num_in_flight >= num_updates:
      return False
    oldest = self.oldest(global_step)
    if not self._pace:
      return True
    return global_step + num_in_flight - oldest <= self._staleness

  def oldest(self, global_step: int) -> int:
    """Returns the oldest local step in flight, or else the global step."""
    steps = [ticket.local_step for ticket in self._in_flight.values()]
    return min(steps, default=global_step)

  def start(self, worker: int, global_step: int, now: float) -> Ticket:
    """Hands out the next batch."""
    if self._ready:
      number, attempt = self._ready.popleft()
    else:
      number, attempt = self._next_batch, 1
      self._next_batch += 1
    ticket = Ticket(number, attempt, global_step, worker, now)
    self._in_flight[worker] = ticket
    return ticket

  def finish(self, worker: int, now: float) -> tuple[Ticket, bool]:
    """Takes back the ticket of a worker; returns it, and whether it counts."""
    counts = worker in self._in_flight
    ticket = (self._in_flight if counts else self._late).pop(worker)
    seconds = now - ticket.start
    self._patience.note(worker, seconds)
    # A worker's first gradient includes its compilation: it is not timed.
    self._seconds[worker] = seconds if worker in self._seconds else 0
    return ticket, counts

  def lose(self, worker: int) -> tuple[Ticket, bool]:
    """Takes back the ticket of a worker that has died, as `finish`."""
    self._seconds.pop(worker, None)
    self._patience.forget(worker)
    counts = worker in self._in_flight
    return (self._in_flight if counts else self._late).pop(worker), counts

  def is_open(self, batch: int) -> bool:
    """Whether a batch is in flight or ready, after another attempt at it."""
    in_flight = [ticket.batch for ticket in self._in_flight.values()]
    return batch in in_flight or batch in self.ready

  def do_again(self, ticket: Ticket) -> None:
    """Queues the batch of a ticket before all others."""
    self._ready.appendleft((ticket.batch, ticket.attempt + 1))

  def drop(self, ticket: Ticket) -> None:
    """Queues the batch of a stale gradient again, or forgets it."""
    if self._on_drop == 'again':
      self.do_again(ticket)

  def make_late(self, now: float) -> list[Ticket]:
    """Takes the tickets that are late; queues their batches again."""
    late = [
        ticket
        for ticket in self._in_flight.values()
        if now - ticket.start > self._limit(ticket)
    ]
    for ticket in late:
      self._late[ticket.worker] = self._in_flight.pop(ticket.worker)
      self.do_again(ticket)
    return late

  def hung(self, now: float) -> list[int]:
    """Returns the workers that hang."""
    return [
        ticket.worker
        for ticket in self._late.values()
        if now - ticket.start
        > self._patience.hung_after(ticket.worker, ticket.attempt)
    ]

  def seconds_left(self, now: float) -> float:
    """Returns the seconds until the next ticket is late."""
    ends = [t.start + self._limit(t) for t in self._in_flight.values()]
    return max(min(ends, default=math.inf) - now, 0)

  def _limit(self, ticket):
    """Returns the seconds after which a ticket is late."""
    return self._patience.late_after(ticket.worker, ticket.attempt)
