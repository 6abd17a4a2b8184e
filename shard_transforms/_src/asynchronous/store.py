"""What is kept of a run: its journal and its checkpoints, in one folder."""

from collections.abc import Mapping
import pathlib
from typing import Any

import numpy as np

from shard_transforms._src.asynchronous import checkpoints
from shard_transforms._src.asynchronous import journal
from shard_transforms._src.asynchronous import parameter_server
from shard_transforms._src.asynchronous import tickets as tickets_lib


class Store:
  """The folder of a run, locked against other runs."""

  def __init__(self, folder: pathlib.Path, header: Mapping[str, Any]):
    """Opens a folder, or creates one.

    Raises:
      OSError: If it cannot be written.
      ValueError: If it is damaged, belongs to another run, or is in use.
    """
    folder.mkdir(parents=True, exist_ok=True)
    self._journal = journal.Journal(folder, header)
    self._checkpoints = checkpoints.Checkpoints(folder)
    # The global step of the latest checkpoint.
    self.saved_step = 0

  @property
  def records(self) -> np.ndarray:
    """The records that the journal had when it was opened."""
    return self._journal.records

  def write(self, **fields: Any) -> None:
    """Adds a record to the journal.

    Raises:
      OSError: If it cannot be written.
    """
    self._journal.write(**fields)

  def save(
      self,
      server: parameter_server.ParameterServer,
      tickets: tickets_lib.Tickets,
  ) -> None:
    """Writes a checkpoint; no gradient that counts may be in flight.

    Raises:
      OSError: If the journal or the previous checkpoint cannot be written.
    """
    if server.global_step == self.saved_step:
      return
    self._journal.sync()
    self._checkpoints.save(
        server.global_step,
        checkpoints.Checkpoint(
            server.params,
            server.state,
            self._journal.num_records,
            self._journal.last_crc,
            tickets.next_batch,
            tickets.ready,
        ),
    )
    self.saved_step = server.global_step

  def restore(
      self, server: parameter_server.ParameterServer
  ) -> checkpoints.Checkpoint | None:
    """Restores a server from the latest intact checkpoint, if any.

    Raises:
      ValueError: If the journal has lost records that were before it, or is
        of another run.
    """
    found = next(self._checkpoints.restore(server.params, server.state), None)
    if found is not None:
      if found.num_records > len(self.records):
        raise ValueError(
            f'The journal must have at least {found.num_records} records, as'
            ' when its latest checkpoint was written, got'
            f' {len(self.records)}.'
        )
      before = self.records[: found.num_records]
      if found.last_crc != (before[-1]['crc'] if len(before) else 0):
        raise ValueError(
            'The checkpoints must be of the same run as the journal, got one of'
            f' {int(found.state.global_step)} updates of another run. Put back'
            ' its journal, or name another folder.'
        )
      server.restore(found.params, found.state)
      self.saved_step = server.global_step
    return found

  def close(self) -> None:
    """Finishes pending writes and unlocks the folder.

    Raises:
      OSError: If the last checkpoint could not be written.
    """
    try:
      self._checkpoints.close()
    finally:
      self._journal.close()
