"""Runs that start, resume where their folder ends, or are replayed."""

import contextlib
import functools
import pathlib
from typing import Any

import optax

from shard_transforms._src.asynchronous import checkpoints
from shard_transforms._src.asynchronous import driver as driver_lib
from shard_transforms._src.asynchronous import in_flight
from shard_transforms._src.asynchronous import job
from shard_transforms._src.asynchronous import journal
from shard_transforms._src.asynchronous import manifest
from shard_transforms._src.asynchronous import options as options_lib
from shard_transforms._src.asynchronous import outcomes
from shard_transforms._src.asynchronous import parameter_server
from shard_transforms._src.asynchronous import run_folder
from shard_transforms._src.asynchronous import task as task_lib
from shard_transforms._src.asynchronous import workers as workers_lib


def drive(
    task: task_lib.Task,
    tx: optax.GradientTransformation,
    options: options_lib.Options,
    folder: pathlib.Path | None,
    start: outcomes.Result | None,
    workers: workers_lib.Workers,
) -> job.Messages:
  """Trains to the end; yields reports at intervals, and finally the result.

  The answer to a report is what `on_progress` returns.

  Raises:
    OSError: If the folder cannot be written.
    RuntimeError: If a function of the task fails too often, or there are no
      workers.
    ValueError: If `folder` is of another run, damaged or in use; if `start` has
      other parameters or another optimizer.
  """
  driver = driver_lib.Driver(task, tx, options, workers)
  given: checkpoints.Checkpoint | None = None
  if start is not None:
    trees: dict[str, Any] = {'params': start.params, 'state': start.opt_state}
    parameter_server.check_layout(
        task_lib.layout(trees), driver.server.trees(), '`start`'
    )
    step = int(trees['state'].global_step)
    given = checkpoints.Checkpoint(step, next_batch=step, trees=trees)
  with contextlib.ExitStack() as stack:
    yield from driver.reports(_recover(driver, folder, given, stack))
  # The last checkpoint is written by now.
  yield driver.result()


def redrive(
    task: task_lib.Task,
    tx: optax.GradientTransformation,
    options: options_lib.Options,
    segments: list[journal.Segment],
    workers: workers_lib.Workers,
) -> job.Messages:
  """Replays the last of some segments of a journal, and yields the result.

  Raises:
    RuntimeError: If a function of the task fails, or a worker dies or hangs, at
      each attempt at a batch.
    ValueError: If it is of another task, optimizer or machine, or damaged.
  """
  driver = driver_lib.Driver(task, tx, options, workers)
  manifest.check(segments[-1], manifest.manifest(driver.server))
  start = checkpoints.read_start(segments[-1], driver.server.trees())
  for _ in _catch_up(driver, segments[-1], start, start):
    pass
  driver.tally.add_all(segments)
  yield driver.result()


def _recover(driver, folder, given, stack):
  """Restores the latest checkpoint, and rolls forward to the journal's end.

  Args:
    driver: Has the initial parameters.
    folder: The folder of the run, or `None`.
    given: Where the run starts if the folder has no journal, or `None`.
    stack: Closes the folder.

  Yields:
    At intervals.

  Returns:
    What writes to the folder.

  Raises:
    OSError: If the folder cannot be written.
    RuntimeError: If a function of the task fails, or a worker dies or hangs,
      at each attempt at a batch.
    ValueError: If the folder is damaged, or was written by another task,
      optimizer or machine, and `on_change` is `'raise'`.
    WorkerError: If a worker cannot compute the task.
  """
  if folder is None:
    if given is not None:
      driver.server.restore(**given.trees)
    return None
  run_folder.lock(folder, stack)
  initial, options = driver.server.trees(), driver.options
  found = manifest.manifest(driver.server)
  begin = functools.partial(checkpoints.begin_segment, folder, found)
  number = journal.last_segment(folder)
  if number < 0:
    if options.on_change == 'raise':
      checkpoints.check_unused(folder)
    segment = begin('It starts from the result of another run.', given)
  else:
    segment = journal.read_segment(folder, number)
  try:
    manifest.check(segment, found)
    start = checkpoints.read_start(segment, initial)
    saved = _latest(segment, initial) or start
    yield from _catch_up(driver, segment, start, saved)
  except workers_lib.WorkerError:
    # A new segment would lose updates, and would not help.
    raise
  except ValueError as error:
    if options.on_change == 'raise':
      raise
    saved = _latest(segment, initial)
    saved = saved or checkpoints.read_start(segment, initial)
    driver.reset(**saved.trees)
    segment = begin(str(error), saved)
  driver.tally.add_all(journal.read_segments(folder))
  run = run_folder.RunFolder(segment, saved, options.on_drop)
  stack.callback(run.close)
  return run


def _latest(segment, initial):
  """Returns the latest intact checkpoint of a segment, if there is one."""
  folder, has_start = segment.path.parent, bool(segment.start.reason)
  return checkpoints.read_latest(folder, initial, has_start=has_start)


def _catch_up(driver, segment, start, saved):
  """Goes on from a checkpoint of a segment to its end.

  Args:
    driver: The driver.
    segment: The segment.
    start: The checkpoint at which it starts.
    saved: A later one, or the same.

  Yields:
    At intervals.

  Raises:
    RuntimeError: If a function of the task fails, or a worker dies or hangs,
      at each attempt at a batch.
    ValueError: If the segment is damaged, or of another task.
  """
  segment.check(saved.num_records, saved.last_crc)
  durations = in_flight.durations(segment.records)
  if saved.num_records:
    # Without this, a run whose checkpoint has everything would go on with
    # another task. One gradient shows whether the task is the same.
    driver.server.restore(**start.trees)
    yield from driver.roll_forward(_first(segment), durations)
  driver.restore(**saved.trees)
  yield from driver.roll_forward(
      segment.records[saved.num_records :], durations
  )


def _first(segment):
  """Returns the first intact record of a gradient at the start of a segment."""
  records = segment.records[~segment.is_damaged]
  is_first = records['local_step'] == segment.start.global_step
  is_first &= records['fate'] == outcomes.Outcome.ACCEPTED
  first = records[is_first][:1].copy()
  first['global_step'] = segment.start.global_step
  return first
