"""Rolling forward: the updates of a journal again, in the same order."""

import collections
from collections.abc import Iterator
from typing import Any

import numpy as np

from shard_transforms._src.asynchronous import journal
from shard_transforms._src.asynchronous import parameter_server
from shard_transforms._src.asynchronous import workers as workers_lib

# Seconds to wait for an event before handing out more.
_WAIT = 1.0


def roll_forward(
    server: parameter_server.ParameterServer,
    records: np.ndarray,
    workers: workers_lib.Workers,
) -> Iterator[None]:
  """Applies the accepted gradients of a journal, computed by any workers.

  Args:
    server: Has the parameters before the first record.
    records: Those of the journal, the first of them at parameters that `server`
      has or will have.
    workers: Compute the gradients, as many at a time as there are parameters
      for.

  Yields:
    `None` at intervals.

  Raises:
    RuntimeError: If a function of the task fails.
    ValueError: If a gradient has other bits than before.
  """
  gradients = _Gradients(records, workers)
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

  def __init__(self, records, workers):
    self._records = records
    self._workers = workers
    is_accepted = records['fate'] == journal.Fate.ACCEPTED
    self._waiting: list[int] = np.flatnonzero(is_accepted).tolist()
    self._uses = collections.Counter(
        records['local_step'][is_accepted].tolist()
    )
    self._published: dict[int, Any] = {}
    self._in_flight: dict[int, int] = {}
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
    places = [*self._waiting, *self._in_flight.values(), *self._done]
    steps = self._records['local_step'][places]
    return int(steps.min(initial=global_step))

  def turn(self):
    """Hands out what can be computed, and collects results."""
    for worker in sorted(self._workers.ready() - self._in_flight.keys()):
      place = self._next()
      if place is None:
        break
      self._waiting.remove(place)
      self._in_flight[worker] = place
      record = self._records[place]
      published = self._published[int(record['local_step'])]
      self._workers.start(worker, published, int(record['batch']))
    for event in self._workers.wait(_WAIT):
      self._take(event)

  def _next(self):
    """Returns the first place near the front whose parameters exist."""
    # Gradients that are far ahead would have to be kept.
    near = self._waiting[: len(self._workers.ready())]
    steps = self._records['local_step']
    return next((p for p in near if int(steps[p]) in self._published), None)

  def _take(self, event):
    place = self._in_flight.pop(event.worker)
    record = self._records[place]
    outcome = event.outcome
    grads = None if outcome is None else event.fetch()
    if outcome is not None and outcome.failure is not None:
      failure = outcome.failure
      raise RuntimeError(
          f'`{failure.function}` of `task` must do again what it did for batch'
          f' {record["batch"]}, got {failure.message}\n{failure.trace}'
      )
    if outcome is None or grads is None:
      self._waiting.insert(0, place)
      self._waiting.sort()
      return
    _check_same(outcome.checksum, record)
    self._done[place] = grads
    step = int(record['local_step'])
    self._uses[step] -= 1
    if not self._uses[step]:
      del self._published[step]


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
