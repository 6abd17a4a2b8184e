"""The driver of a run: holds the parameters, and assigns batches to workers."""

from collections.abc import Generator
from collections.abc import Sequence
import contextlib
import time
from typing import Any

import numpy as np

from shard_transforms._src.asynchronous import (
    contributions as contributions_lib,
)
from shard_transforms._src.asynchronous import job
from shard_transforms._src.asynchronous import options as options_lib
from shard_transforms._src.asynchronous import outcomes
from shard_transforms._src.asynchronous import parameter_server
from shard_transforms._src.asynchronous import run_folder
from shard_transforms._src.asynchronous import task as task_lib

# Seconds: between reports, of waiting for an event, and without any worker
# until the run ends.
_BETWEEN_REPORTS = 0.02
_WAIT = 1.0
_WITHOUT_WORKERS = 300.0

# They yield at intervals, and return the contributions that wait for an update.
_Window = Sequence[parameter_server.Contribution]
_Rolling = Generator[None, None, _Window]
_Recovery = Generator[None, None, tuple[run_folder.RunFolder | None, _Window]]


def drive(
    options: options_lib.Options, workers: task_lib.Workers
) -> job.Messages:
  """Trains to the end; yields reports at intervals, and finally the result.

  The answer to a report is what `on_progress` returns.

  Raises:
    OSError: If the folder cannot be written.
    RuntimeError: If a function of the task fails, a batch loses too many
      workers, or there are no workers.
    ValueError: If `folder` is of another run, damaged or in use; if `start` has
      other parameters or another optimizer; if a worker cannot compute the
      task.
  """
  driver = Driver(options, workers)
  given: run_folder.Checkpoint | None = None
  if (start := options.start) is not None:
    state: Any = start.opt_state
    states = dict(start.report.worker_states)
    trees = {'params': start.params, 'state': state, 'workers': states}
    like = run_folder.with_workers(driver.like, states)
    parameter_server.check_layout(task_lib.layout(trees), like, '`start`')
    step = int(state.global_step)
    given = run_folder.Checkpoint(step, 0, 0, step * options.merge, trees=trees)
  with contextlib.ExitStack() as stack:
    yield from driver.reports(_recover(driver, given, stack))
  # The last checkpoint is written by now.
  yield driver.result()


def redrive(
    options: options_lib.Options,
    journal: outcomes.Journal,
    workers: task_lib.Workers,
) -> job.Messages:
  """Replays a journal, and yields the result.

  Raises:
    RuntimeError: If a function of the task fails, or a batch loses too many
      workers.
    ValueError: If it is of another task, optimizer or machine, or damaged.
  """
  driver = Driver(options, workers)
  run_folder.check(journal, run_folder.manifest_of(driver.server))
  start = run_folder.read_start(journal, driver.like)
  for _ in _catch_up(driver, journal, start, start):
    pass
  driver.tally.add_all(journal.records)
  yield driver.result()


class Driver:
  """Assigns batches to workers, and merges what they contribute."""

  def __init__(self, options: options_lib.Options, workers: task_lib.Workers):
    # It counts the seconds from here.
    self.tally = outcomes.Tally()
    params = task_lib.init_params(options.task)
    given = options.tx, params, options.staleness, options.merge
    self.server = parameter_server.ParameterServer(*given)
    # What a checkpoint has; under `workers`, the state of one.
    state = task_lib.worker_state(options.task, params)
    self.like = {**self.server.trees(), 'workers': state}
    self.options = options
    self._workers = workers
    self._run = contributions_lib.Run(options, self.server, self.tally, workers)
    self._in_flight: contributions_lib.InFlight = {}
    # There are none until the run has recovered.
    self._new: contributions_lib.Contributions | None = None

  def result(self) -> outcomes.Result:
    """Returns where the run is."""
    params, state, states = self.server.trees().values()
    also = {'params': params, 'worker_states': states}
    report = self.tally.report(self.server.global_step, **also)
    return outcomes.Result(params, state, report)

  def reports(
      self, recovery: _Recovery
  ) -> Generator[outcomes.Report, outcomes.Command, None]:
    """Trains to the end, and yields its progress at intervals.

    Args:
      recovery: Resumes where the folder ends, and returns it, if there is one,
        and the contributions that wait for an update.

    Raises:
      OSError: If the journal or a checkpoint cannot be written.
      RuntimeError: If a function of the task fails, a batch loses too many
        workers, or there are no workers.
      ValueError: If the journal is of another task or machine.
    """
    reported = last_ready = time.monotonic()
    command = None
    for _ in self._turns(recovery):
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
          # It ends with the update that has begun.
          self.options.num_updates = step + 1
    # Before it has recovered, the folder has more than the server.
    if self._new is not None:
      self._new.give_back(self._in_flight)
      # A checkpoint does not have contributions that wait for an update.
      if not self._new.window:
        self._new.save()

  def roll_forward(self, records: np.ndarray) -> _Rolling:
    """Merges the accepted contributions of a journal, computed by any workers.

    Args:
      records: Those of the journal. The parameters of the first are those that
        the server has, or later ones.

    Yields:
      After each turn but the last.

    Returns:
      The contributions that wait for an update.

    Raises:
      RuntimeError: If a function of the task fails, or a batch loses too many
        workers.
      ValueError: If a gradient has other bits than before.
    """
    is_dropped = records['fate'] == outcomes.Outcome.DROPPED
    self.server.count_dropped(int(is_dropped.sum()))
    recorded = contributions_lib.RecordedContributions(self._run, records)
    while recorded.left:
      self._turn(recorded)
      if recorded.left:
        yield
    return recorded.window

  def _turns(self, recovery):
    """Recovers and trains; yields after each turn."""
    folder, window = yield from recovery
    if folder is not None:
      saved = folder.saved
      self.tally.num_recovered = self.server.global_step - saved.global_step
      if self.tally.metrics is None:
        self.tally.metrics = saved.metrics or None
    new = contributions_lib.Contributions(self._run, folder, window)
    self._new = new
    while self.server.global_step < self.options.num_updates:
      self._turn(new)
      if new.seconds_left() <= 0:
        new.update_early()
      yield

  def _turn(self, contributions):
    """Assigns batches, and settles what comes back meanwhile."""
    self._assign(contributions)
    wait = max(min(_WAIT, contributions.seconds_left()), 0.0)
    self._settle(contributions, self._workers.wait(wait))
    if self._hung():
      # After a pause of this process, their replies may have come in time.
      while events := self._workers.wait(_WAIT):
        self._settle(contributions, events)
    for worker in self._hung():
      self._workers.replace(worker)
      lost = task_lib.Event(worker, reason='It took too long.')
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
    """Decides on what has come back, or is lost."""
    for event in events:
      contributions.settle(self._in_flight.pop(event.worker), event)

  def _hung(self):
    """Returns the workers that compute for longer than the time limit."""
    latest = time.monotonic() - self.options.time_limit
    return [w for w, x in self._in_flight.items() if x.start < latest]


def _recover(driver, given, stack):
  """Restores the latest checkpoint, and rolls forward to the journal's end.

  Args:
    driver: Has the initial parameters.
    given: Where the run starts if the folder has no journal, or `None`.
    stack: Closes the folder.

  Yields:
    At intervals.

  Returns:
    What writes to the folder, and the contributions that wait for an update.

  Raises:
    OSError: If the folder cannot be written.
    RuntimeError: If a function of the task fails, or a batch loses too many
      workers.
    ValueError: If the folder is damaged, or was written by another task,
      optimizer or machine; if a worker cannot compute the task.
  """
  if (folder := driver.options.folder) is None:
    if given is not None:
      driver.server.restore(**given.trees)
    return None, ()
  run_folder.lock(folder, stack)
  manifest = run_folder.manifest_of(driver.server)
  journal = run_folder.read_or_create(folder, manifest, given)
  start = run_folder.read_start(journal, driver.like)
  saved = run_folder.read_latest(folder, driver.like) or start
  earlier = run_folder.read_latest(folder, driver.like, saved.global_step)
  window = yield from _catch_up(driver, journal, earlier or start, saved)
  driver.tally.add_all(journal.records)
  run = run_folder.RunFolder(journal, saved)
  stack.callback(run.close)
  return run, window


def _catch_up(driver, journal, earlier, saved):
  """Goes on from a checkpoint of a run to the end of its journal.

  Args:
    driver: The driver.
    journal: The journal.
    earlier: A checkpoint.
    saved: A later one, or the same.

  Yields:
    At intervals.

  Returns:
    The contributions that wait for an update.

  Raises:
    RuntimeError: If a function of the task fails, or a batch loses too many
      workers.
    ValueError: If the journal is damaged, or of another task.
  """
  journal.check(saved.num_records, saved.last_crc)
  if saved.num_records:
    # Without this, a run whose checkpoint has everything would go on with
    # another task. One gradient shows whether the task is the same.
    driver.server.restore(**earlier.trees)
    yield from driver.roll_forward(_first(journal, earlier))
    driver.tally.metrics = None
  driver.server.restore(**saved.trees)
  records = journal.records[saved.num_records :]
  return (yield from driver.roll_forward(records))


def _first(journal, saved):
  """Returns the first record of a gradient at the step of a checkpoint."""
  records = journal.records[saved.num_records :]
  is_first = records['local_step'] == saved.global_step
  is_first &= records['fate'] == outcomes.Outcome.ACCEPTED
  first = records[is_first][:1].copy()
  first['global_step'], first['merged'] = saved.global_step, 0
  return first
