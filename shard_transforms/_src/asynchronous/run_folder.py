"""The folder of a run: its journal, its checkpoints, and its lock."""

from collections.abc import Mapping
from concurrent import futures
import contextlib
import os
import pathlib
import time
from typing import Any

import numpy as np

from shard_transforms._src.asynchronous import checkpoints
from shard_transforms._src.asynchronous import journal as journal_lib
from shard_transforms._src.asynchronous import options as options_lib
from shard_transforms._src.asynchronous import outcomes
from shard_transforms._src.asynchronous import parameter_server

_Outcome = outcomes.Outcome


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
    self._files = contextlib.ExitStack()
    self._files.callback(os.close, _lock(folder))
    # It writes one checkpoint at a time, while the run goes on.
    self._writer = self._files.enter_context(futures.ThreadPoolExecutor(1))
    self._pending: futures.Future[None] | None = None
    self._saved_at = time.monotonic()
    self.saved = checkpoints.Checkpoint()
    self.next_batch = 0
    self.ready: list[int] = []

  def open(self, number: int, start: journal_lib.Start) -> None:
    """Opens a segment, which is created if it does not exist."""
    self.number = number
    self.journal = journal_lib.Journal(self.path, number, self.manifest, start)
    self._files.callback(self.journal.close)

  def begin(self, reason: str) -> None:
    """Begins a segment at the latest checkpoint, or at the start of the run.

    Raises:
      OSError: If that checkpoint cannot be written.
    """
    # A segment must not begin at a checkpoint that is never written.
    self._wait()
    saved = self.saved
    start = journal_lib.Start(
        saved.segment, saved.num_records, saved.global_step, reason
    )
    self.open(journal_lib.last_segment(self.path) + 1, start)
    self.next_batch, self.ready = saved.next_batch, [*saved.ready]

  def restore(self, server: parameter_server.ParameterServer) -> None:
    """Restores the latest intact checkpoint, if there is one."""
    found = checkpoints.read_latest(self.path, server.trees())
    if found.trees:
      server.restore(**found.trees)
    self.saved = found._replace(trees={})

  def is_due(self, step: int, options: options_lib.Options) -> bool:
    """Returns whether a checkpoint is due at a global step."""
    seconds = time.monotonic() - self._saved_at
    num_updates = step - self.saved.global_step
    is_due = num_updates >= options.save_every
    return is_due and seconds >= options.save_seconds

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
    self._wait()
    self.saved = checkpoints.Checkpoint(
        self.number,
        server.global_step,
        self.journal.num_records,
        self.journal.last_crc,
        next_batch,
        ready,
        metrics,
    )
    self._pending = self._writer.submit(
        checkpoints.write, self.path, self.saved._replace(trees=server.trees())
    )
    self._saved_at = time.monotonic()

  def close(self) -> None:
    """Finishes pending writes and unlocks the folder.

    Raises:
      OSError: If the last checkpoint could not be written.
    """
    with self._files:
      self._wait()

  def check_records(self) -> None:
    """Checks that the journal is that of the latest checkpoint.

    Raises:
      ValueError: If it is not.
    """
    records, saved = self.journal.segment.records, self.saved
    if saved.num_records > len(records):
      raise ValueError(
          f'The journal must have at least {saved.num_records} records, as when'
          f' its latest checkpoint was written, got {len(records)}.'
      )
    last = records['crc'][: saved.num_records][-1:].tolist() or [0]
    if last != [saved.last_crc]:
      raise ValueError(
          'The checkpoints must be of the same run as the journal, got one of'
          f' {saved.global_step} updates of another run. Put back its journal,'
          ' or name another folder.'
      )

  def set_batches(self, tail: np.ndarray, on_drop: options_lib.OnDrop) -> None:
    """Finds the batches that are left after the records since `saved`."""
    ends = [_Outcome.ACCEPTED]
    if on_drop == 'forget':
      ends.append(_Outcome.DROPPED)
    done = set(tail['batch'][np.isin(tail['fate'], ends)].tolist())
    before = self.saved.next_batch
    self.next_batch = max([before, *(tail['batch'] + 1).tolist()])
    started = [*self.saved.ready, *range(before, self.next_batch)]
    self.ready = [batch for batch in started if batch not in done]

  def _wait(self):
    """Waits until the pending checkpoint is written, or raises its error."""
    pending, self._pending = self._pending, None
    if pending is not None:
      pending.result()


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
