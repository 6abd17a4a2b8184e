"""Which batch comes next, and what becomes of its gradient.

There are two kinds: new gradients, and those of a journal, which are computed
again.
"""

import collections
from collections.abc import Collection
from collections.abc import Iterator
import math
from typing import Any, NamedTuple

import numpy as np

from shard_transforms._src.asynchronous import options as options_lib
from shard_transforms._src.asynchronous import outcomes
from shard_transforms._src.asynchronous import parameter_server
from shard_transforms._src.asynchronous import run_folder
from shard_transforms._src.asynchronous import task

# How many workers of a batch may die or hang until the run ends.
_MAX_LOST = 5

_Outcome = outcomes.Outcome


class Assignment(NamedTuple):
  """A batch that a worker computes, or that waits for a worker.

  Attributes:
    batch: The number of the batch.
    local_step: The global step of the parameters that the worker is given.
    published: These parameters, as published; see `ParameterServer.publish`.
    worker: The number of the worker; -1 if there is none yet.
    start: When it was assigned, in seconds.
    num_lost: How many workers have died or hung at this batch.
  """

  batch: int
  local_step: int = 0
  published: Any = None
  worker: int = -1
  start: float = 0.0
  num_lost: int = 0


class InFlight:
  """What each worker computes. It iterates over what is in flight."""

  def __init__(self):
    self._assigned: dict[int, Assignment] = {}
    # The latest duration of each worker; 0 if it has computed only one
    # gradient, which includes compilation and says nothing of its speed.
    self._seconds: dict[int, float] = {}

  def __len__(self) -> int:
    return len(self._assigned)

  def __iter__(self) -> Iterator[Assignment]:
    return iter(self._assigned.values())

  def idle(self, workers: Collection[int]) -> list[int]:
    """Returns the workers that have nothing to do, the fastest first."""
    idle = set(workers) - self._assigned.keys()
    # A worker whose speed is unknown comes first.
    return sorted(
        idle, key=lambda worker: (self._seconds.get(worker, 0), worker)
    )

  def start(self, assigned: Assignment) -> None:
    """Starts an assignment."""
    self._assigned[assigned.worker] = assigned

  def end(self, worker: int, now: float, *, is_lost: bool) -> Assignment:
    """Ends the assignment of a worker, and returns it.

    Args:
      worker: The worker.
      now: The time.
      is_lost: Whether the worker has died, and its successor compiles again.
    """
    assigned = self._assigned.pop(worker)
    is_first = self._seconds.pop(worker, None) is None
    if not is_lost:
      self._seconds[worker] = 0 if is_first else now - assigned.start
    return assigned

  def hung(self, started_before: float) -> list[int]:
    """Returns the workers that have computed since before a time."""
    return [x.worker for x in self if x.start < started_before]


class Gradients:
  """New gradients.

  With `pace`, a batch is assigned only if no gradient in flight can become
  older than `staleness`:

    global step + number in flight - oldest local step <= staleness

  where the local step of the new gradient is the global step. A gradient that
  comes back adds one to the first term and takes one from the second, so that
  the inequality stays true.

  Attributes:
    staleness: The age up to which gradients are accepted.
    waiting: The batches that wait for a worker, in order.
  """

  def __init__(
      self,
      options: options_lib.Options,
      server: parameter_server.ParameterServer,
      tally: outcomes.Tally,
      workers: task.Workers,
      folder: run_folder.RunFolder | None = None,
  ):
    """Starts where a folder ends; without one, at the batch of the step."""
    self.staleness = options.staleness
    self.waiting = collections.deque[Assignment]()
    self._options = options
    self._server = server
    self._tally = tally
    self._workers = workers
    self._folder = folder
    # The first batch that was never assigned.
    self._next_batch = server.global_step
    if folder is not None:
      self._next_batch = folder.next_batch
      self.waiting.extend(map(Assignment, folder.ready))
    self._published: tuple[int, Any] = -1, None

  def next(self, in_flight: InFlight) -> Assignment | None:
    """Returns the batch to be assigned next, or `None` if none may start."""
    step, options = self._server.global_step, self._options
    if self._folder is not None and self._folder.is_due(step, options):
      if len(in_flight):
        return None
      self.save()
    step_at_end = step + len(in_flight)
    oldest = min([step, *(assigned.local_step for assigned in in_flight)])
    must_wait = options.pace and step_at_end - oldest > self.staleness
    if must_wait or step_at_end >= options.num_updates:
      return None
    if not self.waiting:
      self.waiting.append(Assignment(self._next_batch))
      self._next_batch += 1
    batch = self.waiting.popleft()
    return batch._replace(local_step=step, published=self._publish())

  def settle(self, assigned: Assignment, event: task.Event) -> None:
    """Decides on a gradient, and records that before it takes effect.

    Raises:
      RuntimeError: If a function of the task has failed, or the batch has lost
        too many workers.
    """
    reply, grads = event.reply, None
    if reply is None:
      outcome = _Outcome.LOST
    elif reply.failure:
      raise RuntimeError(
          f'{reply.failure} in batch {assigned.batch} on worker'
          f' {assigned.worker}.\n{reply.trace}'.rstrip()
      )
    elif self._server.global_step - assigned.local_step > self.staleness:
      outcome = _Outcome.DROPPED
    elif (grads := event.fetch()) is None:
      outcome, reply = _Outcome.LOST, None
    else:
      outcome = _Outcome.ACCEPTED
    self.record(assigned, outcome, 0 if reply is None else reply.checksum)
    if outcome == _Outcome.ACCEPTED:
      self.accept(assigned, reply, grads)
    elif outcome == _Outcome.DROPPED:
      self._server.drop()
      self.waiting.appendleft(assigned)
    else:
      self._lose(assigned)

  def record(self, assigned: Assignment, outcome: int, checksum: int) -> None:
    """Records an outcome."""
    step = self._server.global_step
    if self._folder is not None:
      self._folder.write(
          batch=assigned.batch,
          local_step=assigned.local_step,
          global_step=step,
          worker=assigned.worker,
          fate=outcome,
          seconds=self._tally.seconds(),
          checksum=checksum,
      )
    self._tally.add(outcome, step - assigned.local_step)

  def accept(self, assigned: Assignment, reply: Any, grads: Any) -> None:
    """Applies a gradient."""
    _, read = assigned.published
    self._server.accept(grads, read, assigned.local_step)
    self._tally.metrics = reply.metrics

  def save(self) -> None:
    """Writes a checkpoint. No gradient may be in flight."""
    if self._folder is not None:
      self._folder.save(
          self._server,
          next_batch=self._next_batch,
          ready=[assigned.batch for assigned in self.waiting],
          metrics=self._tally.metrics or {},
      )

  def _lose(self, assigned):
    """Puts a batch before all others whose worker has died or hung."""
    num_lost = assigned.num_lost + 1
    if num_lost == _MAX_LOST:
      raise RuntimeError(
          f'The worker of batch {assigned.batch} has died or hung {num_lost}'
          ' times. The batch may be the cause. A worker counts as hung if a'
          f' gradient takes longer than `time_limit`, which is'
          f' {self._options.time_limit} s.'
      )
    self.waiting.appendleft(assigned._replace(num_lost=num_lost))

  def _publish(self):
    """Publishes the parameters, once for each global step."""
    step = self._server.global_step
    if self._published[0] != step:
      params, read = self._server.publish()
      self._published = step, (self._workers.publish(params), read)
    return self._published[1]


class RecordedGradients(Gradients):
  """The accepted gradients of a journal, which are applied in its order.

  Each is computed at the parameters of its local step, and must have the same
  bits. They start in the order of these steps. So no more gradients wait for
  their turn than the run had in flight.
  """

  def __init__(self, records: np.ndarray, *parts: Any):
    """Takes the records that follow the global step.

    Raises:
      ValueError: If one is missing.
    """
    super().__init__(*parts)
    self.staleness = math.inf
    accepted = records[records['fate'] == _Outcome.ACCEPTED]
    for step, record in enumerate(accepted, self._server.global_step):
      if step != record['global_step']:
        raise ValueError(
            f'Record {record["sequence"]} of the journal must be of global step'
            f' {step}, got {record["global_step"]}. A part of the journal is'
            ' missing.'
        )
    self._records = {int(record['batch']): record for record in accepted}
    # The batches whose turn is still to come, in order, and the gradients that
    # have come back before it.
    self._left = collections.deque(self._records)
    self._early: dict[int, Any] = {}
    # The batches whose parameters are still to come.
    self._later = collections.deque[Assignment]()
    for i in np.argsort(accepted['local_step'], kind='stable'):
      self._later.append(
          Assignment(*accepted[['batch', 'local_step']][i].item())
      )
    self._release()

  def __len__(self) -> int:
    return len(self._left)

  def next(self, in_flight: InFlight) -> Assignment | None:
    del in_flight
    return self.waiting.popleft() if self.waiting else None

  def record(self, assigned: Assignment, outcome: int, checksum: int) -> None:
    record = self._records[assigned.batch]
    if outcome == _Outcome.ACCEPTED and checksum != record['checksum']:
      raise ValueError(
          f'The gradient at batch {record["batch"]} must have the bits that it'
          f' had in record {record["sequence"]} of the journal (local step'
          f' {record["local_step"]}), got others. Use the task, data and'
          f' devices of the start, and pure functions. {outcomes.WAY_ON}'
      )

  def accept(self, assigned: Assignment, reply: Any, grads: Any) -> None:
    self._early[assigned.batch] = assigned, reply, grads
    while self._left and self._left[0] in self._early:
      super().accept(*self._early.pop(self._left.popleft()))
      self._release()

  def _release(self):
    """Gives the parameters to the batches that are computed at them."""
    step = self._server.global_step
    while self._later and self._later[0].local_step <= step:
      batch = self._later.popleft()
      self.waiting.append(batch._replace(published=self._publish()))
