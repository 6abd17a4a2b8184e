"""The driver: holds the parameters, and assigns batches to workers."""

from collections.abc import Generator
from collections.abc import Sequence
import contextlib
import time
from typing import Any

import numpy as np

from shard_transforms._src.asynchronous import (
    contributions as contributions_lib,
)
from shard_transforms._src.asynchronous import journal as journal_lib
from shard_transforms._src.asynchronous import options as options_lib
from shard_transforms._src.asynchronous import parameter_server
from shard_transforms._src.asynchronous import report as report_lib
from shard_transforms._src.asynchronous import run_folder
from shard_transforms._src.asynchronous import task as task_lib

# Seconds between reports, seconds to wait for an event, and seconds without any
# worker after which the run ends.
_BETWEEN_REPORTS = 0.02
_WAIT = 1.0
_WITHOUT_WORKERS = 300.0

# The contributions that wait for an update, and generators that yield at
# intervals and return them.
_Window = Sequence[parameter_server.Contribution]
_Rolling = Generator[None, None, _Window]
_Recovery = Generator[None, None, tuple[run_folder.RunFolder | None, _Window]]


def drive(
    options: options_lib.Options, workers: task_lib.Workers
) -> report_lib.Messages:
  """Trains to the end; yields reports at intervals, and finally the result.

  The answer to a report is the value that `on_progress` returned.

  Raises:
    OSError: If the folder cannot be written.
    RuntimeError: If a function of the task fails, a batch loses too many
      workers, or there are no workers.
    ValueError: If `folder` belongs to another run, is damaged, or is in use; if
      `start` has other parameters or another optimizer; if a worker cannot
      compute the task.
  """
  driver = Driver(options, workers)
  checkpoint: run_folder.Checkpoint | None = None
  if (start := options.start) is not None:
    state: Any = start.opt_state
    states = dict(start.report.worker_states)
    trees = {'params': start.params, 'state': state, 'workers': states}
    like = run_folder.with_workers(driver.like, states)
    parameter_server.check_layout(task_lib.layout(trees), like, '`start`')
    step = int(state.global_step)
    checkpoint = run_folder.Checkpoint(
        step, next_batch=step * options.merge, trees=trees
    )
  with contextlib.ExitStack() as stack:
    yield from driver.reports(_recover(driver, checkpoint, stack))
  # The last checkpoint is written by now.
  yield driver.result()


def redrive(
    options: options_lib.Options,
    journal: journal_lib.Journal,
    workers: task_lib.Workers,
) -> report_lib.Messages:
  """Replays a journal, and yields the result.

  Raises:
    RuntimeError: If a function of the task fails, or a batch loses too many
      workers.
    ValueError: If the journal belongs to another task, optimizer or machine, or
      is damaged.
  """
  driver = Driver(options, workers)
  run_folder.check(journal, run_folder.manifest_of(driver.server))
  start = run_folder.read_start(journal, driver.like)
  for _ in _catch_up(driver, journal, start, start):
    pass
  driver.tally.add_all(journal.records)
  yield driver.result()


class Driver:
  """Assigns batches to workers, and merges their contributions."""

  def __init__(self, options: options_lib.Options, workers: task_lib.Workers):
    # Counts the seconds from here on.
    self.tally = report_lib.Tally()
    params = task_lib.init_params(options.task)
    self.server = parameter_server.ParameterServer(
        options.tx, params, options.staleness, options.merge
    )
    # The trees of a checkpoint, with the state of one worker under `workers`.
    state = task_lib.worker_state(options.task, params)
    self.like = {**self.server.trees(), 'workers': state}
    self.options = options
    self._workers = workers
    self._run = contributions_lib.Run(options, self.server, self.tally, workers)
    self._in_flight: contributions_lib.InFlight = {}
    # `None` until the run has recovered.
    self._new: contributions_lib.Contributions | None = None

  def result(self) -> report_lib.Result:
    """Returns the result up to the present global step."""
    params, state, worker_states = self.server.trees().values()
    report = self.tally.report(
        self.server.global_step, params=params, worker_states=worker_states
    )
    return report_lib.Result(params, state, report)

  def reports(
      self, recovery: _Recovery
  ) -> Generator[report_lib.Report, report_lib.Command, None]:
    """Trains to the end, and yields reports at intervals.

    Args:
      recovery: Recovers the state at the end of the folder. Returns the folder,
        if there is one, and the contributions that wait for an update.

    Raises:
      OSError: If the journal or a checkpoint cannot be written.
      RuntimeError: If a function of the task fails, a batch loses too many
        workers, or there are no workers.
      ValueError: If the journal belongs to another task or machine.
    """
    reported = last_ready = time.monotonic()
    command = None
    for _ in self._iterate(recovery):
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
        reported, step = now, self.server.global_step
        params = self.server.params if command == 'params' else None
        command = yield self.tally.report(step, params=params)
        if command == 'stop':
          if self._new is None or not self._new.window:
            break
          # The run ends with the update that has begun.
          self.options.num_updates = step + 1
    # Until the run has recovered, the folder is ahead of the server.
    if self._new is not None:
      self._new.reclaim(self._in_flight)
      # Checkpoints do not contain contributions that wait for an update.
      if not self._new.window:
        self._new.save()

  def roll_forward(self, records: np.ndarray) -> _Rolling:
    """Computes the accepted contributions of a journal again, and merges them.

    Args:
      records: The records of the journal after the global step of the server.

    Yields:
      After each iteration except the last.

    Returns:
      The contributions that wait for an update.

    Raises:
      RuntimeError: If a function of the task fails, or a batch loses too many
        workers.
      ValueError: If a gradient has other bits than in the journal.
    """
    is_dropped = records['fate'] == journal_lib.Outcome.DROPPED
    self.server.count_dropped(int(is_dropped.sum()))
    recorded = contributions_lib.RecordedContributions(self._run, records)
    while recorded.remaining:
      self._step(recorded)
      if recorded.remaining:
        yield
    return recorded.window

  def _iterate(self, recovery):
    """Recovers and trains; yields after each iteration."""
    folder, window = yield from recovery
    if folder is not None:
      saved = folder.saved
      self.tally.num_recovered = self.server.global_step - saved.global_step
      if self.tally.metrics is None:
        self.tally.metrics = saved.metrics or None
    new = contributions_lib.Contributions(self._run, folder, window)
    self._new = new
    while self.server.global_step < self.options.num_updates:
      self._step(new)
      if new.seconds_left() <= 0:
        new.update_early()
      yield

  def _step(self, contributions):
    """Assigns batches, waits, and settles the contributions that come back."""
    self._assign(contributions)
    wait = max(min(_WAIT, contributions.seconds_left()), 0.0)
    self._settle(contributions, self._workers.wait(wait))
    if self._hung():
      # If this process has paused, the replies may have come in time.
      while events := self._workers.wait(_WAIT):
        self._settle(contributions, events)
    for worker in self._hung():
      self._workers.replace(worker)
      lost = task_lib.Event(worker, reason='The last worker hung.')
      self._settle(contributions, [lost])

  def _assign(self, contributions):
    """Gives batches to idle workers."""
    for worker in sorted(self._workers.ready() - self._in_flight.keys()):
      batch = contributions.next(worker, self._in_flight)
      if batch is None:
        return
      self._in_flight[worker] = batch = batch._replace(start=time.monotonic())
      state = self.server.worker_states.get(batch.worker)
      self._workers.start(worker, batch.published[0], batch.batch, state)

  def _settle(self, contributions, events):
    """Decides on contributions that have come back or are lost."""
    for event in events:
      contributions.settle(self._in_flight.pop(event.worker), event)

  def _hung(self):
    """Returns the workers that have exceeded the time limit."""
    latest = time.monotonic() - self.options.time_limit
    return [w for w, x in self._in_flight.items() if x.start < latest]


def _recover(driver, checkpoint, stack):
  """Restores the latest checkpoint, and rolls forward to the journal's end.

  Args:
    driver: The driver, with the initial parameters.
    checkpoint: The start of the run if the folder has no journal, or `None`.
    stack: Closes the folder.

  Yields:
    At intervals.

  Returns:
    The folder, if there is one, and the contributions that wait for an update.

  Raises:
    OSError: If the folder cannot be written.
    RuntimeError: If a function of the task fails, or a batch loses too many
      workers.
    ValueError: If the folder is damaged, or was written by another task,
      optimizer or machine; if a worker cannot compute the task.
  """
  if (folder := driver.options.folder) is None:
    if checkpoint is not None:
      driver.server.restore(**checkpoint.trees)
    return None, ()
  run_folder.lock(folder, stack)
  manifest = run_folder.manifest_of(driver.server)
  journal = run_folder.read_or_create(folder, manifest, checkpoint)
  start = run_folder.read_start(journal, driver.like)
  saved = run_folder.read_latest(folder, driver.like) or start
  earlier = run_folder.read_latest(folder, driver.like, saved.global_step)
  window = yield from _catch_up(driver, journal, earlier or start, saved)
  driver.tally.add_all(journal.records)
  run = run_folder.RunFolder(journal, saved)
  stack.callback(run.close)
  return run, window


def _catch_up(driver, journal, earlier, saved):
  """Computes a run again from a checkpoint to the end of its journal.

  Args:
    driver: The driver.
    journal: The journal.
    earlier: The checkpoint before `saved`, or the start of the run.
    saved: The checkpoint.

  Yields:
    At intervals.

  Returns:
    The contributions that wait for an update.

  Raises:
    RuntimeError: If a function of the task fails, or a batch loses too many
      workers.
    ValueError: If the journal is damaged, or belongs to another task.
  """
  journal.check(saved.num_records, saved.last_crc)
  if saved.num_records:
    # If the journal ends with the checkpoint, nothing else is computed again
    # that would show that the task has changed.
    driver.server.restore(**earlier.trees)
    yield from driver.roll_forward(_first(journal, earlier))
    driver.tally.metrics = None
  driver.server.restore(**saved.trees)
  records = journal.records[saved.num_records :]
  return (yield from driver.roll_forward(records))


def _first(journal, saved):
  """Returns the first accepted record at the global step of a checkpoint."""
  records = journal.records[saved.num_records :]
  is_candidate = records['local_step'] == saved.global_step
  is_candidate &= records['fate'] == journal_lib.Outcome.ACCEPTED
  first = records[is_candidate][:1].copy()
  first['global_step'], first['merged'] = saved.global_step, 0
  return first
