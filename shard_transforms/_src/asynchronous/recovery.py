"""Runs that start, resume where their folder ends, or are replayed."""

from collections.abc import Iterator
import contextlib
import pathlib

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
  server = driver.server
  if start is not None:
    found = {'params': start.params, 'state': start.opt_state}
    parameter_server.check_layout(
        task_lib.layout(found), server.trees(), '`start`'
    )
  with contextlib.ExitStack() as stack:
    run, recovery = None, iter(())
    if folder is not None:
      run = run_folder.RunFolder(folder, manifest.manifest(server))
      stack.callback(run.close)
      recovery = _recover(run, driver, start)
    elif start is not None:
      server.restore(start.params, start.opt_state)
    yield from driver.reports(run, recovery)
  # The last checkpoint is written by now.
  yield driver.result()


def redrive(
    task: task_lib.Task,
    tx: optax.GradientTransformation,
    options: options_lib.Options,
    folder: pathlib.Path,
    segments: list[journal.Segment],
    workers: workers_lib.Workers,
) -> job.Messages:
  """Replays the last of some segments of a journal, and yields the result.

  Raises:
    RuntimeError: If a function of the task fails, or a worker dies or hangs at
      each attempt at a batch.
    ValueError: If it is of another task, optimizer or machine, or damaged.
  """
  driver = driver_lib.Driver(task, tx, options, workers)
  segment = segments[-1]
  manifest.check(segment, manifest.manifest(driver.server))
  segment.check()
  checkpoints.restore_start(folder, segment.start, driver.server)
  for _ in driver.roll_forward(
      segment.records, in_flight.durations(segment.records)
  ):
    pass
  driver.tally.add_all(segments)
  yield driver.result()


def _recover(
    run: run_folder.RunFolder,
    driver: driver_lib.Driver,
    start: outcomes.Result | None,
) -> Iterator[None]:
  """Restores the latest checkpoint, and rolls forward to the journal's end.

  Args:
    run: The folder.
    driver: Has the initial parameters.
    start: Where a run starts whose journal has no records yet.

  Yields:
    At intervals.

  Raises:
    OSError: If the folder cannot be written.
    RuntimeError: If a function of the task fails, or a worker dies or hangs
      at each attempt at a batch.
    ValueError: If the folder is damaged, or was written by another task,
      optimizer or machine, and `on_change` is `'raise'`.
  """
  server = driver.server
  initial = server.trees()
  number = journal.last_segment(run.path)
  run.open(max(number, 0), journal.Start())
  # A journal without records may be of a call that was killed right here.
  is_new = number <= 0 and not run.journal.num_records
  if is_new and start is not None:
    server.restore(start.params, start.opt_state)
    # The segment needs a checkpoint, also at step 0.
    run.saved = checkpoints.Checkpoint(global_step=-1)
    run.save(server, server.global_step, [], {})
    run.begin('It starts from the result of another run.')
    return
  try:
    yield from _resume(run, driver)
  except ValueError as error:
    if driver.options.on_change == 'raise':
      raise
    driver.reset(**initial)
    run.restore(server)
    if run.saved.segment < 0 <= run.journal.segment.start.segment:
      raise ValueError(
          '`folder` must have an intact checkpoint, because the last segment'
          f' of its journal goes on from one, got {str(run.path)!r}, where'
          ' none is. Put one back, or name another folder.'
      ) from error
    run.begin(str(error))


def _resume(run, driver):
  """Goes on in the last segment; yields what `_recover` does."""
  segment, server = run.journal.segment, driver.server
  start = segment.start
  manifest.check(segment, run.manifest)
  initial = server.trees()
  run.restore(server)
  num_before = 0
  if run.saved.segment == run.number:
    num_before = run.saved.num_records
    run.check_records()
  elif run.saved[:2] != (start.segment, start.global_step):
    raise ValueError(
        f'Checkpoint {start.global_step}, at which the last segment of the'
        f' journal begins, must be in {str(run.path)!r}. It is damaged or lost.'
    )
  segment.check(num_before)
  if num_before:
    # Without this, a run whose checkpoint has everything would go on with
    # another task. One gradient shows whether the task is the same.
    restored = server.trees()
    server.restore(**initial)
    checkpoints.restore_start(run.path, start, server)
    yield from driver.roll_forward(
        _first(segment), in_flight.durations(segment.records)
    )
    driver.restore(**restored)
  tail = segment.records[num_before:]
  yield from driver.roll_forward(tail, in_flight.durations(segment.records))
  run.set_batches(tail, driver.options.on_drop)


def _first(segment):
  """Returns the first intact record of a gradient at the start of a segment."""
  records = segment.records[~segment.is_damaged]
  is_first = records['local_step'] == segment.start.global_step
  is_first &= records['fate'] == outcomes.Outcome.ACCEPTED
  first = records[is_first][:1].copy()
  first['global_step'] = segment.start.global_step
  return first
