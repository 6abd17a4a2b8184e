"""Rolling forward: applies the updates of a journal once more, in its order."""

import bisect
import collections
from collections.abc import Iterator
from collections.abc import Mapping
import time
from typing import Any

import numpy as np

from shard_transforms._src.asynchronous import in_flight as in_flight_lib
from shard_transforms._src.asynchronous import outcomes
from shard_transforms._src.asynchronous import parameter_server
from shard_transforms._src.asynchronous import workers as workers_lib

# Seconds to wait for an event before assigning more.
_WAIT = 1.0


def roll_forward(
    server: parameter_server.ParameterServer,
    records: np.ndarray,
    workers: workers_lib.Workers,
    limits: in_flight_lib.TimeLimits,
    max_attempts: int,
) -> Iterator[Mapping[str, float] | None]:
  """Applies the accepted gradients of a journal, computed by any workers.

  Args:
    server: Has the parameters before the first record.
    records: Those of the journal. The parameters of the first are those that
      `server` has, or later ones.
    workers: Compute the gradients, all of those at once whose parameters exist.
    limits: After how long a worker hangs, and is replaced.
    max_attempts: Number of attempts at a batch whose worker dies or hangs.

  Yields:
    The metrics of each update, and `None` at intervals.

  Raises:
    RuntimeError: If a function of the task fails, or a worker dies or hangs at
      each attempt at a batch.
    ValueError: If a gradient has other bits than before.
  """
  accepted = records[records['fate'] == outcomes.Outcome.ACCEPTED]
  gradients = _Gradients(accepted, workers, limits, max_attempts)
  for _ in records[records['fate'] == outcomes.Outcome.DROPPED]:
    server.drop()
  for place, record in enumerate(accepted):
    if server.global_step != record['global_step']:
      raise ValueError(
          f'Record {record["sequence"]} of the journal must be of global step'
          f' {server.global_step}, got {record["global_step"]}. A part of the'
          ' journal is missing.'
      )
    gradients.publish(server)
    while place not in gradients.done:
      gradients.turn()
      yield
    weight = record['weight']
    grads, metrics = gradients.done.pop(place)
    server.accept(
        grads,
        int(record['local_step']),
        None if np.isnan(weight) else float(weight),
    )
    still_needed = accepted['local_step'][place + 1 :]
    server.forget(int(still_needed.min(initial=server.global_step)))
    yield metrics


class _Gradients:
  """Gradients of records, computed as soon as their parameters exist."""

  def __init__(self, records, workers, limits, max_attempts):
    self._records = records
    self._workers = workers
    self._limits = limits
    self._attempts = outcomes.Attempts(max_attempts)
    # Places of records: all that nobody computes, and what is computed.
    self._waiting = list(range(len(records)))
    self.done: dict[int, Any] = {}
    # The place of the record and the assignment, by worker.
    self._in_flight: dict[int, tuple[int, in_flight_lib.Assignment]] = {}
    # Parameters, and how many gradients still need them, by global step.
    self._published: dict[int, Any] = {}
    self._num_uses = collections.Counter(records['local_step'].tolist())

  def publish(self, server):
    """Publishes the current parameters, if a record was computed at them."""
    step = server.global_step
    if self._num_uses[step] and step not in self._published:
      self._published[step] = self._workers.publish(server.publish())

  def turn(self):
    """Assigns the gradients that can be computed, and collects results."""
    for worker in sorted(self._workers.ready() - self._in_flight.keys()):
      self._start(worker)
    for event in self._workers.wait(_WAIT):
      self._take(event)
    now = time.monotonic()
    for worker, (_, assigned) in self._in_flight.items():
      if now > self._limits.hung_at(assigned):
        self._workers.replace(worker)

  def _start(self, worker):
    """Assigns the first gradient near the front whose parameters exist."""
    # Gradients far ahead would fill the memory until their turn comes.
    near = self._waiting[: len(self._workers.ready())]
    steps = self._records['local_step']
    place = next((p for p in near if int(steps[p]) in self._published), None)
    if place is None:
      return
    self._waiting.remove(place)
    batch, step = map(int, self._records[['batch', 'local_step']][place])
    attempt = self._attempts.num_failed(batch) + 1
    self._in_flight[worker] = place, in_flight_lib.Assignment(
        batch, attempt, step, worker, time.monotonic()
    )
    self._workers.start(worker, self._published[step], batch)

  def _take(self, event):
    """Keeps the gradient of an event; assigns it again if it is lost."""
    place, assigned = self._in_flight.pop(event.worker)
    reply = event.reply
    if reply is not None and reply.failure is not None:
      failure = reply.failure
      raise RuntimeError(
          f'`{failure.function}` of `task` must do again what it did for batch'
          f' {assigned.batch}, got {failure.message}\n{failure.trace}'
      )
    grads = None if reply is None else event.fetch()
    if reply is None or grads is None:
      self._attempts.add(assigned, None)
      self._limits.restart(assigned.worker)
      bisect.insort(self._waiting, place)
      return
    record = self._records[place]
    if reply.checksum != record['checksum']:
      raise ValueError(
          f'The gradient at batch {record["batch"]} must have the bits that it'
          f' had in record {record["sequence"]} of the journal (local step'
          f' {record["local_step"]}), got others. The task, its data or the'
          ' machine is another, or its functions are not pure.'
      )
    self._limits.add(assigned.worker, time.monotonic() - assigned.start)
    self.done[place] = grads, reply.metrics
    step = assigned.local_step
    self._num_uses[step] -= 1
    if not self._num_uses[step]:
      del self._published[step]
