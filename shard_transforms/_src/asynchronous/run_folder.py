"""The folder of a run: its journal and checkpoints, and how it resumes."""

from collections.abc import Iterator
from collections.abc import Mapping
import contextlib
import os
import pathlib
import time
from typing import Any

import numpy as np

from shard_transforms._src.asynchronous import checkpoints as checkpoints_lib
from shard_transforms._src.asynchronous import in_flight as in_flight_lib
from shard_transforms._src.asynchronous import journal as journal_lib
from shard_transforms._src.asynchronous import manifest as manifest_lib
from shard_transforms._src.asynchronous import outcomes
from shard_transforms._src.asynchronous import parameter_server
from shard_transforms._src.asynchronous import roll_forward
from shard_transforms._src.asynchronous import workers as workers_lib

_Outcome = outcomes.Outcome
_Checkpoint = checkpoints_lib.Checkpoint


class RunFolder:
  """The journal and the checkpoints of a run, locked against other runs.

  Attributes:
    path: The folder.
    manifest: What must be equal in all of a segment.
    journal: The segment of the journal that is open.
    number: The number of that segment.
    saved: The latest checkpoint, without its trees.
    next_batch: The first batch that was never assigned.
    ready: The earlier batches that are still to be computed.
  """

  journal: journal_lib.Journal
  _checkpoints: checkpoints_lib.Checkpoints
  number: int

  def __init__(self, folder: pathlib.Path, manifest: Mapping[str, Any]):
    """Locks a folder, which is created if it does not exist.

    Raises:
      OSError: If it cannot be written.
      ValueError: If it is in use.
    """
    self.path = folder
    self.manifest = manifest
    folder.mkdir(parents=True, exist_ok=True)
    self._lock = _lock(folder)
    # The files of the segment that is open.
    self._files = contextlib.ExitStack()
    self._saved_at = time.monotonic()
    self.saved = _Checkpoint()
    self.next_batch = 0
    self.ready: list[int] = []

  def save(
      self,
      server: parameter_server.ParameterServer,
      next_batch: int,
      ready: list[int],
      metrics: Mapping[str, float],
  ) -> None:
    """Starts to write a checkpoint, after waiting for the previous one.

    No gradient that counts may be in flight.

    Raises:
      OSError: If the journal or the previous checkpoint cannot be written.
    """
    if server.global_step == self.saved.global_step:
      return
    self.journal.sync()
    position = checkpoints_lib.Position(
        self.journal.num_records,
        self.journal.last_crc,
        next_batch,
        ready,
        metrics,
    )
    self._checkpoints.save(server, position)
    self.saved = _Checkpoint(self.number, server.global_step, position)
    self._saved_at = time.monotonic()

  def is_due(self, step: int, options: in_flight_lib.Options) -> bool:
    """Returns whether a checkpoint is due at a global step."""
    seconds = time.monotonic() - self._saved_at
    num_updates = step - self.saved.global_step
    is_due = num_updates >= options.save_every
    return is_due and seconds >= options.save_seconds

  def close(self) -> None:
    """Finishes pending writes and unlocks the folder.

    Raises:
      OSError: If the last checkpoint could not be written.
    """
    try:
      self._files.close()
    finally:
      os.close(self._lock)

  def open(self, number: int, start: journal_lib.Start) -> None:
    """Opens a segment, which is created if it does not exist."""
    self._files.close()
    self.number = number
    self.journal = journal_lib.Journal(self.path, number, self.manifest, start)
    self._files.callback(self.journal.close)
    self._checkpoints = checkpoints_lib.Checkpoints(self.path, number)
    self._files.callback(self._checkpoints.close)

  def begin(self, reason: str) -> None:
    """Begins a segment at the latest checkpoint, or at the start of the run."""
    position = self.saved.position
    start = journal_lib.Start(
        self.saved.segment,
        position.num_records,
        self.saved.global_step,
        reason,
    )
    self.open(journal_lib.last_segment(self.path) + 1, start)
    self.next_batch, self.ready = position.next_batch, [*position.ready]

  def restore(self, server: parameter_server.ParameterServer) -> None:
    """Restores the latest intact checkpoint, if there is one."""
    found = checkpoints_lib.read_latest(self.path, server)
    if found.trees:
      server.restore(**found.trees)
    self.saved = found._replace(trees={})


def recover(
    run: RunFolder,
    server: parameter_server.ParameterServer,
    workers: workers_lib.Workers,
    options: in_flight_lib.Options,
    start: outcomes.Result | None = None,
) -> Iterator[Mapping[str, float] | None]:
  """Restores the latest checkpoint, and rolls forward to the journal's end.

  Args:
    run: The folder.
    server: Has the initial parameters.
    workers: Compute again what the checkpoint lacks.
    options: The options of the run.
    start: Where a run starts whose journal has no records yet.

  Yields:
    The metrics of an update, or `None` at intervals.

  Raises:
    OSError: If the folder cannot be written.
    RuntimeError: If a function of the task fails, or a worker dies or hangs
      at each attempt at a batch.
    ValueError: If the folder is damaged, or was written by another task,
      optimizer or machine, and `on_change` is `'raise'`.
  """
  initial = server.trees()
  number = journal_lib.last_segment(run.path)
  run.open(max(number, 0), journal_lib.Start())
  # A journal without records may be of a call that was killed right here.
  is_new = number <= 0 and not run.journal.num_records
  if is_new and start is not None:
    server.restore(start.params, start.opt_state)
    # The segment needs a checkpoint, also at step 0.
    run.saved = _Checkpoint(global_step=-1)
    run.save(server, server.global_step, [], {})
    run.begin('It starts from the result of another run.')
  else:
    try:
      yield from _resume(run, server, workers, options)
    except ValueError as error:
      if options.on_change == 'raise':
        raise
      workers.reset()
      server.restore(**initial)
      run.restore(server)
      if run.saved.segment < 0 <= run.journal.segment.start.segment:
        raise ValueError(
            '`folder` must have an intact checkpoint, because the last segment'
            f' of its journal goes on from one, got {str(run.path)!r}, where'
            ' none is. Put one back, or name another folder.'
        ) from error
      run.begin(str(error))


def _resume(run, server, workers, options):
  """Goes on in the last segment; yields what `recover` does."""
  segment = run.journal.segment
  manifest_lib.check(segment, run.manifest)
  initial = server.trees()
  run.restore(server)
  position = run.saved.position
  num_before = 0
  if run.saved.segment == run.number:
    num_before = position.num_records
    _check_records(segment.records, run.saved)
  elif run.saved[:2] != (segment.start.segment, segment.start.global_step):
    raise ValueError(
        f'Checkpoint {segment.start.global_step}, at which the last segment'
        f' of the journal begins, must be in {str(run.path)!r}. It is'
        ' damaged or lost.'
    )
  segment.check(num_before)

  def roll(records):
    times = in_flight_lib.durations(segment.records)
    limits = in_flight_lib.TimeLimits(options.patience, times)
    return roll_forward.roll_forward(
        server, records, workers, limits, options.max_attempts
    )

  if num_before:
    # Without this, a run whose checkpoint has everything would go on with
    # another task. One gradient shows whether the task is the same.
    restored = server.trees()
    server.restore(**initial)
    checkpoints_lib.restore_start(run.path, segment.start, server)
    for _ in roll(_first(segment)):
      yield None
    server.restore(**restored)
  tail = segment.records[num_before:]
  yield from roll(tail)
  run.next_batch, run.ready = _batches_left(tail, position, options.on_drop)


def _lock(folder):
  """Returns a file descriptor that locks a folder while it is open.

  Raises:
    ValueError: If the folder is in use.
  """
  # Windows has none, and nothing but a lock needs it.
  import fcntl

  lock = os.open(folder, os.O_RDONLY)
  try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError as error:
    os.close(lock)
    raise ValueError(
        f'`folder` must not be in use, got {str(folder)!r}, which another run'
        ' writes to.'
    ) from error
  return lock


def _check_records(records, saved):
  """Raises a `ValueError` if a journal is not that of a checkpoint."""
  num_records = saved.position.num_records
  if num_records > len(records):
    raise ValueError(
        f'The journal must have at least {num_records} records, as when its'
        f' latest checkpoint was written, got {len(records)}.'
    )
  last_crc = records[num_records - 1]['crc'] if num_records else 0
  if saved.position.last_crc != last_crc:
    raise ValueError(
        'The checkpoints must be of the same run as the journal, got one of'
        f' {saved.global_step} updates of another run. Put back its journal, or'
        ' name another folder.'
    )


def _first(segment):
  """Returns the first intact record of a gradient at the start of a segment."""
  records = segment.records[~segment.is_damaged]
  is_first = records['local_step'] == segment.start.global_step
  is_first &= records['fate'] == _Outcome.ACCEPTED
  first = records[is_first][:1].copy()
  first['global_step'] = segment.start.global_step
  return first


def _batches_left(
    tail: np.ndarray,
    before: checkpoints_lib.Position,
    on_drop: in_flight_lib.OnDrop,
) -> tuple[int, list[int]]:
  """Returns the batches that are left after some more records."""
  ends = [_Outcome.ACCEPTED]
  if on_drop == 'forget':
    ends.append(_Outcome.DROPPED)
  done = set(tail['batch'][np.isin(tail['fate'], ends)].tolist())
  next_batch = max([before.next_batch, *(tail['batch'] + 1).tolist()])
  started = [*before.ready, *range(before.next_batch, next_batch)]
  return next_batch, [batch for batch in started if batch not in done]
