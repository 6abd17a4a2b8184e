"""The folder of a run: its lock, its journal, and its checkpoints."""

from concurrent import futures
import contextlib
import os
import pathlib
import time
from typing import Any

import numpy as np

from shard_transforms._src.asynchronous import checkpoints
from shard_transforms._src.asynchronous import in_flight as in_flight_lib
from shard_transforms._src.asynchronous import journal
from shard_transforms._src.asynchronous import outcomes
from shard_transforms._src.asynchronous import parameter_server

_Outcome = outcomes.Outcome


class RunFolder:
  """Writes the journal and the checkpoints of a run.

  Records survive a crash of the process once `write` returns. They survive a
  crash of the machine once a later checkpoint is written.

  Attributes:
    saved: The latest checkpoint, without its trees.
    next_batch: The first batch that was never assigned.
    ready: The earlier batches that are still to be computed.
  """

  def __init__(
      self,
      segment: journal.Segment,
      saved: checkpoints.Checkpoint,
      on_drop: in_flight_lib.OnDrop,
  ):
    """Goes on at the end of a segment, which has this latest checkpoint."""
    self.saved = saved._replace(trees={})
    ends = [_Outcome.ACCEPTED]
    if on_drop == 'forget':
      ends.append(_Outcome.DROPPED)
    tail = segment.records[saved.num_records :]
    done = set(tail['batch'][np.isin(tail['fate'], ends)].tolist())
    self.next_batch = max([saved.next_batch, *(tail['batch'] + 1).tolist()])
    started = [*saved.ready, *range(saved.next_batch, self.next_batch)]
    self.ready = [batch for batch in started if batch not in done]
    self._path = segment.path
    self._num_records, self._last_crc = len(segment.records), segment.last_crc
    self._file = open(segment.path, 'r+b', buffering=0)  # noqa: SIM115
    self._file.seek(segment.num_bytes)
    # It writes one checkpoint at a time, while the run goes on.
    self._writer = futures.ThreadPoolExecutor(1)
    self._pending: futures.Future[None] | None = None
    self._saved_at = time.monotonic()

  def write(self, **fields: Any) -> None:
    """Adds a record to the journal.

    Raises:
      OSError: If it cannot be written; the journal is then unchanged.
    """
    record = np.zeros((), journal.RECORD)
    record['sequence'] = self._num_records
    for name, value in fields.items():
      record[name] = value
    record['crc'] = journal.crc_of(record)
    data, end = record.tobytes(), self._file.tell()
    with journal.naming(self._path):
      try:
        # On a disk that fills up, one call writes a part.
        while data:
          data = data[self._file.write(data) :]
      except OSError:
        self._file.truncate(self._file.seek(end))
        raise
    self._num_records += 1
    self._last_crc = int(record['crc'])

  def is_due(self, step: int, options: in_flight_lib.Options) -> bool:
    """Returns whether a checkpoint is due at a global step."""
    num_updates = step - self.saved.global_step
    seconds = time.monotonic() - self._saved_at
    return num_updates >= options.save_every and seconds >= options.save_seconds

  def save(self, server: parameter_server.ParameterServer, **run: Any) -> None:
    """Starts to write a checkpoint, after waiting for the previous one.

    No gradient that counts may be in flight.

    Args:
      server: The parameters and the state.
      **run: `next_batch`, `ready` and `metrics`, as in a checkpoint.

    Raises:
      OSError: If the journal or the previous checkpoint cannot be written.
    """
    if server.global_step == self.saved.global_step:
      return
    os.fsync(self._file.fileno())
    self._wait()
    self.saved = checkpoints.Checkpoint(
        server.global_step, self._num_records, self._last_crc, **run
    )
    saved = self.saved._replace(trees=server.trees())
    folder = self._path.parent
    self._pending = self._writer.submit(checkpoints.write, folder, saved)
    self._saved_at = time.monotonic()

  def close(self) -> None:
    """Finishes pending writes.

    Raises:
      OSError: If the last checkpoint could not be written.
    """
    with self._file, self._writer:
      self._wait()

  def _wait(self):
    """Waits until the pending checkpoint is written, or raises its error."""
    pending, self._pending = self._pending, None
    if pending is not None:
      pending.result()


def lock(folder: pathlib.Path, stack: contextlib.ExitStack) -> None:
  """Locks a folder until the stack is closed; makes it if it does not exist.

  Raises:
    OSError: If it cannot be made.
    ValueError: If it is in use.
  """
  # Windows has none, and nothing but a lock needs it.
  import fcntl

  folder.mkdir(parents=True, exist_ok=True)
  descriptor = os.open(folder, os.O_RDONLY)
  stack.callback(os.close, descriptor)
  try:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError as error:
    raise ValueError(
        f'`folder` must not be in use, got {str(folder)!r}, which another run'
        ' writes to.'
    ) from error
