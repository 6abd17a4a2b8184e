"""Rolling forward: the updates of a journal again, in the same order."""

import collections
from collections.abc import Iterator
import time
from typing import Any

import numpy as np

from shard_transforms._src.asynchronous import fates
from shard_transforms._src.asynchronous import journal
from shard_transforms._src.asynchronous import parameter_server
from shard_transforms._src.asynchronous import patience as patience_lib
from shard_transforms._src.asynchronous import tickets
from shard_transforms._src.asynchronous import workers as workers_lib

# Seconds to wait for an event before handing out more.
_WAIT = 1.0


def roll_forward(
    server: parameter_server.ParameterServer,
    records: np.ndarray,
    workers: workers_lib.Workers,
    patience: patience_lib.Patience,
    max_attempts: int,
) -> Iterator[None]:
  """Applies the accepted gradients of a journal, computed by any workers.

  Args:
    server: Has the parameters before the first record.
    records: Those of the journal, the first of them at parameters that `server`
      has or will have.
    workers: Compute the gradients, as many at a time as there are parameters
      for.
    patience: When a worker hangs, and is replaced.
    max_attempts: How often a batch is tried whose worker dies or hangs.

  Yields:
    `None` at intervals.

  Raises:
    RuntimeError: If a function of the task fails, or a worker dies at each
      attempt at a batch.
    ValueError: If a gradient has other bits than before.
  """
  attempts = fates.Attempts(max_attempts)
  gradients = _Gradients(records, workers, patience, attempts)
  for place, record in enumerate(records):
    if record['fate'] == journal.Fate.DROPPED:
      server.drop()
    if record['fate'] != journal.Fate.ACCEPTED:
      continue
    if server.global_step != record['global_step']:
      raise ValueError(
          f'Record {record["sequence"]} of the journal must be of global step'
          f' {server.global_step}, got {record["global_step"]}. A part of the'
          ' journal is missing.'
      )
    gradients.publish(server)
    while not gradients.has(place):
      gradients.turn()
      yield
    weight = record['weight']
    server.accept(
        gradients.pop(place),
        int(record['local_step']),
        None if np.isnan(weight) else float(weight),
    )
    server.forget(gradients.oldest(server.global_step))


class _Gradients:
  """Gradients of records, computed as soon as their parameters exist."""

  def __init__(self, records, workers, patience, attempts):
    self._records = records
    self._workers = workers
    self._patience = patience
    self._attempts = attempts
    is_accepted = records['fate'] == journal.Fate.ACCEPTED
    self._waiting: list[int] = np.flatnonzero(is_accepted).tolist()
    self._uses = collections.Counter(
        records['local_step'][is_accepted].tolist()
    )
    self._published: dict[int, Any] = {}
    # The place of the record and the ticket, by worker.
    self._in_flight: dict[int, tuple[int, tickets.Ticket]] = {}
    self._done: dict[int, Any] = {}

  def publish(self, server):
    """Publishes the current parameters, if a record was computed at them."""
    step = server.global_step
    if self._uses[step] and step not in self._published:
      self._published[step] = self._workers.publish(server.publish())

  def has(self, place):
    return place in self._done

  def pop(self, place):
    return self._done.pop(place)

  def oldest(self, global_step):
    """Returns the first local step of a gradient that is still to come."""
    in_flight = [place for place, _ in self._in_flight.values()]
    places = [*self._waiting, *in_flight, *self._done]
    steps = self._records['local_step'][places]
    return int(steps.min(initial=global_step))

  def turn(self):
    """Hands out what can be computed, and collects results."""
    for worker in sorted(self._workers.ready() - self._in_flight.keys()):
      place = self._next()
      if place is None:
        break
      self._start(worker, place)
    for event in self._workers.wait(_WAIT):
      self._take(event)
    self._replace_hung()

  def _start(self, worker, place):
    """Hands a gradient out."""
    self._waiting.remove(place)
    batch, step = map(int, self._records[['batch', 'local_step']][place])
    attempt = self._attempts.num_failed(batch) + 1
    ticket = tickets.Ticket(batch, attempt, step, worker, time.monotonic())
    self._in_flight[worker] = place, ticket
    self._workers.start(worker, self._published[step], batch)

  def _replace_hung(self):
    """Replaces the workers that hang."""
    now = time.monotonic()
    for worker, (_, ticket) in self._in_flight.items():
      if now - ticket.start > self._patience.hung_after(worker, ticket.attempt):
        self._workers.replace(worker)

  def _next(self):
    """Returns the first place near the front whose parameters exist."""
    # Gradients that are far ahead would have to be kept.
    near = self._waiting[: len(self._workers.ready())]
    steps = self._records['local_step']
    return next((p for p in near if int(steps[p]) in self._published), None)

  def _take(self, event):
    place, ticket = self._in_flight.pop(event.worker)
    record = self._records[place]
    outcome = event.outcome
    grads = None if outcome is None else event.fetch()
    if outcome is not None and outcome.failure is not None:
      failure = outcome.failure
      raise RuntimeError(
          f'`{failure.function}` of `task` must do again what it did for batch'
          f' {ticket.batch}, got {failure.message}\n{failure.trace}'
      )
    if outcome is None or grads is None:
      self._lose(place, ticket)
      return
    _check_same(outcome.checksum, record)
    self._patience.note(ticket.worker, time.monotonic() - ticket.start)
    self._done[place] = grads
    step = ticket.local_step
    self._uses[step] -= 1
    if not self._uses[step]:
      del self._published[step]

  def _lose(self, place, ticket):
    """Does a gradient again, unless it was the last attempt."""
    self._attempts.add(ticket, None)
    self._patience.forget(ticket.worker)
    self._waiting.insert(0, place)
    self._waiting.sort()


def _check_same(checksum: int, record: np.void) -> None:
  """Checks that a gradient has the checksum of its record.

  Raises:
    ValueError: If it has other bits.
  """
  if checksum != record['checksum']:
    raise ValueError(
        f'The gradient at batch {record["batch"]} must have the bits that it'
        f' had in record {record["sequence"]} of the journal (local step'
        f' {record["local_step"]}), got others. The task, its data or the'
        ' machine is another, or its functions are not pure.'
    )
