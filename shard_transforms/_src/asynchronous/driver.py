"""The driver of a run: holds the parameters, and assigns batches to workers."""

from collections.abc import Generator
from collections.abc import Iterator
from collections.abc import Mapping
import math
import time
from typing import Any

import numpy as np
import optax

from shard_transforms._src.asynchronous import in_flight as in_flight_lib
from shard_transforms._src.asynchronous import outcomes
from shard_transforms._src.asynchronous import parameter_server
from shard_transforms._src.asynchronous import run_folder
from shard_transforms._src.asynchronous import task as task_lib
from shard_transforms._src.asynchronous import workers as workers_lib

_Outcome = outcomes.Outcome

# Seconds: between reports, of waiting for an event, and without any worker
# until the run ends.
_BETWEEN_REPORTS = 0.1
_WAIT = 1.0
_WITHOUT_WORKERS = 300.0


class Driver:
  """Assigns batches to workers, and applies their gradients.

  It applies gradients as they come back. Where it rolls a journal forward, it
  applies them in the order of the journal.
  """

  def __init__(
      self,
      task: task_lib.Task,
      tx: optax.GradientTransformation,
      options: in_flight_lib.Options,
      workers: workers_lib.Workers,
  ):
    # It counts the seconds from here.
    self.tally = outcomes.Tally()
    self.server = parameter_server.ParameterServer(
        tx,
        task_lib.init_params(task),
        model_state=task.model_state,
        num_devices=options.driver_devices,
    )
    self.options = options
    self._workers = workers
    self._folder: run_folder.RunFolder | None = None
    self._attempts = outcomes.Attempts(options.max_attempts)
    self._begin()

  def _begin(self):
    self._in_flight = in_flight_lib.InFlight(self.options)
    # What workers were given, by the global step of the parameters.
    self._published: dict[int, Any] = {}
    # Rolling forward: the records that are left, in order, and the gradients
    # and metrics that have come back before their turn, by batch.
    self._records: dict[int, np.void] = {}
    self._early: dict[int, tuple[Any, Mapping[str, float]]] = {}

  def reset(self, params: Any, state: Any) -> None:
    """Gives up what is in flight, and restores parameters and state."""
    self._workers.reset()
    self._begin()
    self.server.restore(params, state)

  def result(self) -> outcomes.Result:
    """Returns where the run is."""
    params = self.server.params
    report = self.tally.report(self.server.global_step, params)
    return outcomes.Result(params, self.server.state, report)

  def reports(
      self, recovery: Generator[None, None, run_folder.RunFolder | None]
  ) -> Generator[outcomes.Report, outcomes.Command, None]:
    """Trains to the end, and yields its progress at intervals.

    Args:
      recovery: Resumes where the folder ends, and returns it, if there is one.

    Raises:
      OSError: If the journal or a checkpoint cannot be written.
      RuntimeError: If a function of the task fails too often, or there are no
        workers.
      ValueError: If the journal is of another task or machine.
    """
    reported = last_ready = time.monotonic()
    command = None
    for has_recovered in self._turns(recovery):
      now = time.monotonic()
      if self._workers.ready():
        last_ready = now
      elif now - last_ready > _WITHOUT_WORKERS:
        raise RuntimeError(
            f'No worker was ready for {_WITHOUT_WORKERS:.0f} s. Check that the'
            ' cluster has the `resources` that a worker needs.'
        )
      is_due = now - reported >= _BETWEEN_REPORTS or command == 'params'
      if is_due and self.tally.metrics is not None:
        reported = now
        params = self.server.params if command == 'params' else None
        step = self.server.global_step
        # Until then, a new segment may replace the updates.
        is_certain = has_recovered or self.options.on_change == 'raise'
        command = yield self.tally.report(step, params, has_history=is_certain)
        if command == 'stop':
          break
    # Before it has recovered, the folder has more than the server.
    if self._folder is not None:
      self._in_flight.abandon()
      self._save()

  def roll_forward(
      self, records: np.ndarray, durations: list[float]
  ) -> Iterator[None]:
    """Applies the accepted gradients of a journal, computed by any workers.

    Args:
      records: Those of the journal. The parameters of the first are those that
        the server has, or later ones.
      durations: About how many seconds gradients take.

    Yields:
      After each turn but the last.

    Raises:
      RuntimeError: If a function of the task fails, or a worker dies or hangs
        at each attempt at a batch.
      ValueError: If a gradient has other bits than before.
    """
    for _ in records[records['fate'] == _Outcome.DROPPED]:
      self.server.drop()
    accepted = records[records['fate'] == _Outcome.ACCEPTED]
    for step, record in enumerate(accepted, self.server.global_step):
      if step != record['global_step']:
        raise ValueError(
            f'Record {record["sequence"]} of the journal must be of global step'
            f' {step}, got {record["global_step"]}. A part of the journal is'
            ' missing.'
        )
    self._records = dict(zip(accepted['batch'].tolist(), accepted, strict=True))
    self._published = {}
    self._in_flight.plan(accepted['batch'], accepted['local_step'], durations)
    while self._records:
      self._turn()
      if self._records:
        yield

  def _turns(self, recovery):
    """Yields after each turn whether the run has recovered."""
    folder = yield from recovery
    step = self.server.global_step
    if folder is None:
      self._in_flight.resume(step, [])
    else:
      self.tally.rewind(step)
      self._in_flight.resume(folder.next_batch, folder.ready)
      self.tally.num_recovered = step - folder.saved.global_step
      if self.tally.metrics is None:
        self.tally.metrics = folder.saved.metrics or None
      self._folder = folder
    while self.server.global_step < self.options.num_updates:
      self._turn()
      yield True

  def _turn(self):
    """Assigns batches, and settles what comes back meanwhile."""
    self._assign()
    seconds = self._in_flight.seconds_left(time.monotonic())
    for event in self._workers.wait(min(seconds, _WAIT)):
      self._settle(event)
    now = time.monotonic()
    for assigned in self._in_flight.make_late(now):
      self._record(assigned, _Outcome.LATE)
    for worker in self._in_flight.hung(now):
      self._workers.replace(worker)

  def _assign(self):
    """Gives batches to idle workers, unless a checkpoint is due first."""
    step = self.server.global_step
    if self._folder is not None and self._folder.is_due(step, self.options):
      if len(self._in_flight):
        return
      self._save()
    for worker in self._in_flight.idle(self._workers.ready()):
      if not self._in_flight.may_start(step):
        return
      assigned = self._in_flight.start(worker, step, time.monotonic())
      if assigned.local_step == step:
        self._publish()
      published = self._published[assigned.local_step]
      self._workers.start(worker, published, assigned.batch)

  def _publish(self):
    """Publishes the parameters of the global step, once."""
    step = self.server.global_step
    if step not in self._published:
      self._published[step] = self._workers.publish(self.server.publish())

  def _save(self):
    assert self._folder is not None
    self._folder.save(
        self.server,
        next_batch=self._in_flight.next_batch,
        ready=self._in_flight.ready,
        metrics=self.tally.metrics or {},
    )

  def _settle(self, event):
    """Decides on a gradient; records its outcome before it takes effect."""
    reply = event.reply
    if reply is None:
      assigned, counts = self._in_flight.lose(event.worker)
    else:
      assigned, counts = self._in_flight.finish(event.worker, time.monotonic())
    if not counts:
      if reply is None and self._in_flight.has(assigned.batch):
        self._attempts.add(assigned, None)
      return
    age = self.server.global_step - assigned.local_step
    limit = math.inf if self._records else self.options.staleness
    outcome = outcomes.outcome_of(reply, age, limit)
    grads = event.fetch() if outcome == _Outcome.ACCEPTED else None
    if outcome == _Outcome.ACCEPTED and grads is None:
      outcome, reply = _Outcome.LOST, None
    settle = self._settle_again if self._records else self._settle_new
    settle(assigned, outcome, reply, grads)

  def _settle_new(self, assigned, outcome, reply, grads):
    """Records an outcome before it takes effect."""
    weight = None
    if outcome == _Outcome.ACCEPTED:
      age = self.server.global_step - assigned.local_step
      weight = _weight_at(age, self.options.weight)
    self._record(assigned, outcome, reply, weight)
    if outcome == _Outcome.ACCEPTED:
      self._apply(grads, reply.metrics, assigned.local_step, weight)
    elif outcome == _Outcome.DROPPED:
      self.server.drop()
      if self.options.on_drop == 'again':
        self._in_flight.retry(assigned)
    else:
      self._attempts.add(assigned, reply and reply.failure)
      self._in_flight.retry(assigned)

  def _settle_again(self, assigned, outcome, reply, grads):
    """Applies a gradient of a record, and those that waited for it."""
    if outcome == _Outcome.LOST:
      self._attempts.add(assigned, None)
      self._in_flight.retry(assigned)
      return
    if outcome == _Outcome.FAILED:
      raise RuntimeError(
          f'`{reply.failure.function}` of `task` must do again what it did for'
          f' batch {assigned.batch}, got {reply.failure.message}\n'
          f'{reply.failure.trace}'
      )
    record = self._records[assigned.batch]
    if reply.checksum != record['checksum']:
      raise ValueError(
          f'The gradient at batch {record["batch"]} must have the bits that it'
          f' had in record {record["sequence"]} of the journal (local step'
          f' {record["local_step"]}), got others. The task, its data or the'
          ' machine is another, or its functions are not pure.'
      )
    self._early[assigned.batch] = grads, reply.metrics
    while self._records and (batch := next(iter(self._records))) in self._early:
      # Others are still to be computed at these parameters.
      step = self.server.global_step
      if step in self._in_flight.planned_steps(step):
        self._publish()
      record = self._records[batch]
      weight = None if np.isnan(record['weight']) else float(record['weight'])
      self._apply(*self._early.pop(batch), int(record['local_step']), weight)
      del self._records[batch]

  def _apply(self, grads, metrics, local_step, weight):
    """Applies a gradient; frees parameters that are no longer in use."""
    self.server.accept(grads, local_step, weight)
    step = self.server.global_step
    self.tally.update(step, metrics)
    needed = self._in_flight.needed_steps(step)
    # Those that have come back before their turn are applied later.
    needed |= {int(self._records[n]['local_step']) for n in self._early}
    self.server.forget(needed)
    self._published = {
        s: published for s, published in self._published.items() if s in needed
    }

  def _record(self, assigned, outcome, reply=None, weight=None):
    """Writes an outcome to the journal and counts it, if it is new."""
    if self._records:
      return
    step = self.server.global_step
    if self._folder is not None:
      self._folder.write(
          batch=assigned.batch,
          local_step=assigned.local_step,
          global_step=step,
          worker=assigned.worker,
          attempt=assigned.attempt,
          fate=outcome,
          weight=math.nan if weight is None else weight,
          seconds=self.tally.seconds(),
          checksum=0 if reply is None else reply.checksum,
      )
    self.tally.add(outcome, step - assigned.local_step)


def _weight_at(age, weight):
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
