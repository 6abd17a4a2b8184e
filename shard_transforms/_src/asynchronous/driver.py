"""The driver of a run: holds the parameters, and assigns batches to workers."""

from collections.abc import Generator
from collections.abc import Iterator
from collections.abc import Mapping
import contextlib
import math
import pathlib
import time
from typing import Any

import optax

from shard_transforms._src.asynchronous import in_flight as in_flight_lib
from shard_transforms._src.asynchronous import journal
from shard_transforms._src.asynchronous import manifest
from shard_transforms._src.asynchronous import outcomes
from shard_transforms._src.asynchronous import parameter_server
from shard_transforms._src.asynchronous import task as task_lib
from shard_transforms._src.asynchronous import workers as workers_lib

_Outcome = outcomes.Outcome

# Seconds: between reports, of waiting for an event, and without any worker
# until the run ends.
_BETWEEN_REPORTS = 0.1
_WAIT = 1.0
_WITHOUT_WORKERS = 300.0


def drive(
    task: task_lib.Task,
    tx: optax.GradientTransformation,
    options: in_flight_lib.Options,
    folder: pathlib.Path | None,
    start: outcomes.Result | None,
    workers: workers_lib.Workers,
) -> Generator[outcomes.Report | outcomes.Result, outcomes.Command, None]:
  """Trains to the end; yields reports at intervals, and finally the result.

  The answer to a report is what `on_progress` returns.

  Raises:
    OSError: If the folder cannot be written.
    RuntimeError: If a function of the task fails too often, or there are no
      workers.
    ValueError: If `folder` is of another run, damaged or in use; if `start` has
      other parameters or another optimizer.
  """
  # It counts the seconds from here.
  tally = outcomes.Tally()
  params = task_lib.init_params(task)
  server = parameter_server.ParameterServer(
      tx,
      params,
      model_state=task.model_state,
      num_devices=options.driver_devices,
  )
  if start is not None:
    found = {'params': start.params, 'state': start.opt_state}
    parameter_server.check_layout(
        parameter_server.layout(found), server.trees(), '`start`'
    )
  with contextlib.ExitStack() as stack:
    kept, recovery = None, iter(())
    if folder is not None:
      # It needs orbax, an optional dependency.
      from shard_transforms._src.asynchronous import run_folder

      kept = run_folder.RunFolder(folder, manifest.manifest(params, server))
      stack.callback(kept.close)
      recovery = run_folder.recover(kept, server, workers, options, start)
    elif start is not None:
      server.restore(start.params, start.opt_state)
    run = _Run(server, options, kept, tally)
    yield from run.reports(workers, recovery)
    params = server.params
    report = tally.report(server.global_step, params)
    result = outcomes.Result(params, server.state, report)
  # The last checkpoint is written by now.
  yield result


class _Run:
  """A run: drives the workers of a parameter server."""

  def __init__(self, server, options, folder, tally):
    self._server = server
    self._options = options
    self._folder = folder
    self._tally = tally
    self._attempts = outcomes.Attempts(options.max_attempts)
    self._in_flight = in_flight_lib.InFlight(options)
    self._has_recovered = False
    # The latest parameters for workers, and their global step.
    self._published: tuple[int, Any] = (-1, None)

  def reports(
      self,
      workers: workers_lib.Workers,
      recovery: Iterator[Mapping[str, float] | None],
  ) -> Generator[outcomes.Report, outcomes.Command, None]:
    """Trains to the end, and yields its progress at intervals.

    Raises:
      OSError: If the journal or a checkpoint cannot be written.
      RuntimeError: If a function of the task fails too often, or there are no
        workers.
      ValueError: If the journal is of another task or machine.
    """
    reported = last_ready = time.monotonic()
    command = None
    for _ in self._turns(workers, recovery):
      now = time.monotonic()
      if workers.ready():
        last_ready = now
      elif now - last_ready > _WITHOUT_WORKERS:
        raise RuntimeError(
            f'No worker was ready for {_WITHOUT_WORKERS:.0f} s. Check that the'
            ' cluster has the `resources` that a worker needs.'
        )
      is_due = now - reported >= _BETWEEN_REPORTS or command == 'params'
      if is_due and self._tally.metrics is not None:
        reported = now
        params = self._server.params if command == 'params' else None
        step = self._server.global_step
        # Until then, a new segment may replace the updates.
        is_certain = self._has_recovered or self._options.on_change == 'raise'
        command = yield self._tally.report(step, params, has_history=is_certain)
        if command == 'stop':
          break
    if self._has_recovered:
      # Before that, the folder has more than the server.
      self._in_flight.abandon()
      self._save()

  def _turns(self, workers, recovery):
    """Trains to the end, and yields after each turn."""
    yield from self._recover(recovery)
    self._has_recovered = True
    while self._server.global_step < self._options.num_updates:
      self._assign(workers)
      seconds = self._in_flight.seconds_left(time.monotonic())
      for event in workers.wait(min(seconds, _WAIT)):
        self._settle(event)
      self._replace_stragglers(workers)
      yield

  def _recover(self, recovery):
    """Resumes where the journal ends, if there is one."""
    folder = self._folder
    for metrics in recovery:
      if metrics is not None:
        self._tally.update(self._server.global_step, metrics)
      yield
    if folder is None:
      self._in_flight.resume(self._server.global_step, [])
      return
    self._tally.rewind(self._server.global_step)
    self._in_flight.resume(folder.next_batch, folder.ready)
    saved = folder.saved
    self._tally.num_recovered = self._server.global_step - saved.global_step
    if self._tally.metrics is None:
      self._tally.metrics = saved.position.metrics or None
    self._tally.add_all(journal.read_segments(folder.path))

  def _assign(self, workers):
    """Gives batches to idle workers, unless a checkpoint is due first."""
    step = self._server.global_step
    if self._folder is not None and self._folder.is_due(step, self._options):
      if len(self._in_flight):
        return
      self._save()
    for worker in self._in_flight.idle(workers.ready()):
      if not self._in_flight.may_start(step):
        return
      if self._published[0] != step:
        self._published = step, workers.publish(self._server.publish())
      assigned = self._in_flight.start(worker, step, time.monotonic())
      workers.start(worker, self._published[1], assigned.batch)

  def _save(self):
    if self._folder is not None:
      self._folder.save(
          self._server,
          self._in_flight.next_batch,
          self._in_flight.ready,
          self._tally.metrics or {},
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
    age = self._server.global_step - assigned.local_step
    outcome = outcomes.outcome_of(reply, age, self._options.staleness)
    grads = event.fetch() if outcome == _Outcome.ACCEPTED else None
    if outcome == _Outcome.ACCEPTED and grads is None:
      outcome, reply = _Outcome.LOST, None
    weight = None
    if outcome == _Outcome.ACCEPTED:
      weight = _weight_at(age, self._options.weight)
    self._record(assigned, outcome, reply, weight)
    if outcome == _Outcome.ACCEPTED:
      self._server.accept(grads, assigned.local_step, weight)
      self._tally.update(self._server.global_step, event.reply.metrics)
      self._server.forget(self._in_flight.oldest(self._server.global_step))
    elif outcome == _Outcome.DROPPED:
      self._server.drop()
      if self._options.on_drop == 'again':
        self._in_flight.retry(assigned)
    else:
      self._attempts.add(assigned, reply and reply.failure)
      self._in_flight.retry(assigned)

  def _replace_stragglers(self, workers):
    """Gives late batches to others, and replaces the workers that hang."""
    now = time.monotonic()
    for assigned in self._in_flight.make_late(now):
      self._record(assigned, _Outcome.LATE)
    for worker in self._in_flight.hung(now):
      workers.replace(worker)

  def _record(self, assigned, outcome, reply=None, weight=None):
    """Writes an outcome to the journal, and counts it."""
    step = self._server.global_step
    if self._folder is not None:
      self._folder.journal.write(
          batch=assigned.batch,
          local_step=assigned.local_step,
          global_step=step,
          worker=assigned.worker,
          attempt=assigned.attempt,
          fate=outcome,
          weight=math.nan if weight is None else weight,
          seconds=self._tally.seconds(),
          checksum=0 if reply is None else reply.checksum,
      )
    self._tally.add(outcome, step - assigned.local_step)


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
