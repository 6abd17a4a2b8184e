"""Which batch comes next, and what becomes of its gradient.

There are two kinds: new gradients, and those of a journal, which are computed
again.
"""

import collections
import math
from typing import Any

import numpy as np

from shard_transforms._src.asynchronous import in_flight as in_flight_lib
from shard_transforms._src.asynchronous import options as options_lib
from shard_transforms._src.asynchronous import outcomes
from shard_transforms._src.asynchronous import parameter_server
from shard_transforms._src.asynchronous import run_folder
from shard_transforms._src.asynchronous import task as task_lib
from shard_transforms._src.asynchronous import workers as workers_lib

_Assignment = in_flight_lib.Assignment
_InFlight = in_flight_lib.InFlight
_Outcome = outcomes.Outcome
_Reply = task_lib.Reply


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
      workers: workers_lib.Workers,
      folder: run_folder.RunFolder | None = None,
  ):
    """Starts where a folder ends; without one, at the batch of the step."""
    self.staleness = options.staleness
    self.waiting = collections.deque[_Assignment]()
    self._options = options
    self._server = server
    self._tally = tally
    self._workers = workers
    self._folder = folder
    # The first batch that was never assigned.
    self._next_batch = server.global_step
    if folder is not None:
      self._next_batch = folder.next_batch
      self.waiting.extend(map(_Assignment, folder.ready))
    self._num_failed = collections.Counter[int]()
    self._published: tuple[int, Any] = -1, None

  def next(self, in_flight: _InFlight) -> _Assignment | None:
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
      self.waiting.append(_Assignment(self._next_batch))
      self._next_batch += 1
    batch = self.waiting.popleft()
    return batch._replace(local_step=step, published=self._publish())

  def retry(self, assigned: _Assignment) -> None:
    """Puts a batch before all others."""
    self.waiting.appendleft(assigned._replace(attempt=assigned.attempt + 1))

  def fail(
      self, assigned: _Assignment, failure: task_lib.Failure | None = None
  ) -> None:
    """Counts a failed attempt at a batch.

    Args:
      assigned: The batch and its worker.
      failure: What a function of the task raised; `None` if the worker died or
        hung.

    Raises:
      RuntimeError: If it was the last attempt.
    """
    self._num_failed[assigned.batch] += 1
    attempts = self._num_failed[assigned.batch]
    is_final = failure is not None and failure.is_final
    if attempts < self._options.max_attempts and not is_final:
      return
    if failure is None:
      raise RuntimeError(
          f'The worker of batch {assigned.batch} has died or hung {attempts}'
          ' times. The batch may be the cause. `max_attempts` is the number of'
          ' attempts at a batch.'
      )
    raise RuntimeError(
        f'`{failure.function}` of `task` must work, got {failure.message} in'
        f' batch {assigned.batch} on worker {assigned.worker}, in attempt'
        f' {attempts}.\n{failure.trace}'.rstrip()
    )

  def settle(self, assigned: _Assignment, event: workers_lib.Event) -> None:
    """Decides on a gradient, and records that before it takes effect."""
    reply, grads = event.reply, None
    if reply is None:
      outcome = _Outcome.LOST
    elif reply.failure is not None:
      outcome = _Outcome.FAILED
    elif self._server.global_step - assigned.local_step > self.staleness:
      outcome = _Outcome.DROPPED
    elif (grads := event.fetch()) is None:
      outcome, reply = _Outcome.LOST, None
    else:
      outcome = _Outcome.ACCEPTED
    weight = self.record(assigned, outcome, reply)
    if reply is None or reply.failure is not None:
      self.fail(assigned, reply and reply.failure)
      self.retry(assigned)
    elif outcome == _Outcome.ACCEPTED:
      self.accept(assigned, reply, grads, weight)
    else:
      self._server.drop()
      if self._options.on_drop == 'again':
        self.retry(assigned)

  def record(
      self, assigned: _Assignment, outcome: _Outcome, reply: _Reply | None
  ) -> float:
    """Records an outcome; returns the weight of the gradient, or NaN."""
    step, weight = self._server.global_step, math.nan
    age = step - assigned.local_step
    if outcome == _Outcome.ACCEPTED and self._options.weight is not None:
      weight = float(self._options.weight(age))
      if not 0 <= weight < math.inf:
        raise ValueError(
            '`weight` must give a finite number that is not negative, got'
            f' {weight!r} at age {age}.'
        )
    if self._folder is not None:
      self._folder.write(
          batch=assigned.batch,
          local_step=assigned.local_step,
          global_step=step,
          worker=assigned.worker,
          attempt=assigned.attempt,
          fate=outcome,
          weight=weight,
          seconds=self._tally.seconds(),
          checksum=0 if reply is None else reply.checksum,
      )
    self._tally.add(outcome, age)
    return weight

  def accept(
      self, assigned: _Assignment, reply: _Reply, grads: Any, weight: float
  ) -> None:
    """Applies a gradient."""
    _, read = assigned.published
    self._server.accept(grads, read, assigned.local_step, weight)
    self._tally.update(self._server.global_step, reply.metrics)

  def save(self) -> None:
    """Writes a checkpoint. No gradient that counts may be in flight."""
    if self._folder is not None:
      self._folder.save(
          self._server,
          next_batch=self._next_batch,
          ready=[assigned.batch for assigned in self.waiting],
          metrics=self._tally.metrics or {},
      )

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
    self._later = collections.deque[_Assignment]()
    for i in np.argsort(accepted['local_step'], kind='stable'):
      batch, step = accepted[['batch', 'local_step']][i].tolist()
      self._later.append(_Assignment(batch, local_step=step))
    self._release()

  def __len__(self) -> int:
    return len(self._left)

  def next(self, in_flight: _InFlight) -> _Assignment | None:
    del in_flight
    return self.waiting.popleft() if self.waiting else None

  def record(
      self, assigned: _Assignment, outcome: _Outcome, reply: _Reply | None
  ) -> float:
    if outcome != _Outcome.ACCEPTED or reply is None:
      return math.nan
    record = self._records[assigned.batch]
    if reply.checksum != record['checksum']:
      raise ValueError(
          f'The gradient at batch {record["batch"]} must have the bits that it'
          f' had in record {record["sequence"]} of the journal (local step'
          f' {record["local_step"]}), got others. The task, its data or the'
          ' machine is another, or its functions are not pure.'
      )
    return float(record['weight'])

  def accept(
      self, assigned: _Assignment, reply: _Reply, grads: Any, weight: float
  ) -> None:
    self._early[assigned.batch] = assigned, reply, grads, weight
    while self._left and self._left[0] in self._early:
      super().accept(*self._early.pop(self._left.popleft()))
      self._release()

  def _release(self):
    """Gives the parameters to the batches that are computed at them."""
    step = self._server.global_step
    while self._later and self._later[0].local_step <= step:
      batch = self._later.popleft()
      self.waiting.append(batch._replace(published=self._publish()))
