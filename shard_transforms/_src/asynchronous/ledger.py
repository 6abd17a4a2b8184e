"""The progress of a run: counters, a journal and checkpoints."""

from collections.abc import Iterator
from collections.abc import Mapping
import math
import pathlib
import time
from typing import Any

from shard_transforms._src.asynchronous import journal
from shard_transforms._src.asynchronous import options as options_lib
from shard_transforms._src.asynchronous import parameter_server
from shard_transforms._src.asynchronous import report
from shard_transforms._src.asynchronous import task as task_lib
from shard_transforms._src.asynchronous import tickets as tickets_lib
from shard_transforms._src.asynchronous import workers as workers_lib


class Ledger:
  """Counts the fates of gradients, and saves them if the run has a folder."""

  def __init__(self):
    self._start = time.monotonic()
    self._tally = report.Tally()
    self._store = None

  def open(self, folder: pathlib.Path, header: Mapping[str, Any]) -> None:
    """Begins a journal, or continues the one in the folder.

    Raises:
      OSError: If `folder` cannot be written.
      ValueError: If `folder` belongs to another run, is damaged or is in use.
    """
    # Saving needs orbax, an optional dependency.
    from shard_transforms._src.asynchronous import store

    self._store = store.Store(folder, header)

  def recover(
      self,
      server: parameter_server.ParameterServer,
      workers: workers_lib.Workers,
      options: options_lib.Options,
  ) -> Iterator[Any]:
    """Resumes where the journal ends; see `recovery`."""
    if self._store is None:
      return
    # Saving needs orbax, an optional dependency.
    from shard_transforms._src.asynchronous import recovery

    yield from recovery.recover(server, self._store, workers, options)
    self._tally.num_recovered = server.global_step - self._store.saved_step
    self._tally.add_all(self._store.records)

  def note(
      self,
      ticket: tickets_lib.Ticket,
      global_step: int,
      fate: journal.Fate,
      outcome: task_lib.Outcome | None = None,
      weight: float | None = None,
  ) -> None:
    """Counts the fate of a gradient, and writes it to the journal.

    Raises:
      OSError: If it cannot be written.
    """
    if self._store is not None:
      self._store.write(
          batch=ticket.batch,
          local_step=ticket.local_step,
          global_step=global_step,
          worker=ticket.worker,
          attempt=ticket.attempt,
          fate=fate,
          weight=math.nan if weight is None else weight,
          seconds=time.monotonic() - self._start,
          checksum=0 if outcome is None else outcome.checksum,
      )
    self._tally.add(fate, global_step - ticket.local_step)
    if outcome is not None and fate == journal.Fate.ACCEPTED:
      self._tally.metrics = outcome.metrics

  def num_unsaved(self, global_step: int) -> int:
    """Returns the updates since the last checkpoint; 0 without a folder."""
    return 0 if self._store is None else global_step - self._store.saved_step

  def save(
      self,
      server: parameter_server.ParameterServer,
      tickets: tickets_lib.Tickets,
  ) -> None:
    """Starts to write a checkpoint, if there is a folder.

    Raises:
      OSError: If the journal or the previous checkpoint cannot be written.
    """
    if self._store is not None:
      self._store.save(server, tickets)

  def progress(self, global_step: int) -> report.Report:
    """Returns the progress of the run."""
    return self._tally.report(global_step, time.monotonic() - self._start)

  def close(self) -> None:
    """Finishes pending writes and unlocks the folder."""
    if self._store is not None:
      self._store.close()
