"""The folder of a run: its journal and checkpoints, and how it resumes."""

from collections.abc import Generator
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import pathlib
from typing import Any, NamedTuple
import warnings

import numpy as np
import optax
import orbax.checkpoint as ocp

from shard_transforms._src.asynchronous import in_flight as in_flight_lib
from shard_transforms._src.asynchronous import journal
from shard_transforms._src.asynchronous import outcomes
from shard_transforms._src.asynchronous import parameter_server
from shard_transforms._src.asynchronous import roll_forward
from shard_transforms._src.asynchronous import workers as workers_lib
from shard_transforms._src.monitoring import digests

_CHECKPOINTS = 'checkpoints'
_Outcome = outcomes.Outcome


class Checkpoint(NamedTuple):
  """What a checkpoint holds besides parameters and state.

  Attributes:
    num_records: Number of records in the journal at that time.
    last_crc: The `crc` of the last of them, or 0.
    next_batch: The first batch that had not been assigned.
    ready: The earlier batches that had to be computed again.
  """

  num_records: int = 0
  last_crc: int = 0
  next_batch: int = 0
  ready: Sequence[int] = ()


class RunFolder:
  """The journal and the last two checkpoints, locked against other runs."""

  def __init__(self, folder: pathlib.Path, manifest: Mapping[str, Any]):
    """Opens a folder, or creates one.

    Raises:
      OSError: If it cannot be written.
      ValueError: If it is damaged, belongs to another run, or is in use.
    """
    folder.mkdir(parents=True, exist_ok=True)
    self.journal = journal.Journal(folder, manifest)
    options = ocp.CheckpointManagerOptions(
        max_to_keep=2, cleanup_tmp_directories=True
    )
    self._checkpoints = ocp.CheckpointManager(
        (folder / _CHECKPOINTS).absolute(), options=options
    )
    # The global step of the latest checkpoint.
    self.saved_step = 0

  def save(
      self,
      server: parameter_server.ParameterServer,
      in_flight: in_flight_lib.InFlight,
  ) -> None:
    """Starts to write a checkpoint, after waiting for the previous one.

    No gradient that counts may be in flight.

    Raises:
      OSError: If the journal or the previous checkpoint cannot be written.
    """
    if server.global_step == self.saved_step:
      return
    self.journal.sync()
    trees = parameter_server.unwrap_keys(
        {'params': server.params, 'state': server.state}
    )
    checkpoint = Checkpoint(
        self.journal.num_records,
        self.journal.last_crc,
        in_flight.next_batch,
        in_flight.ready,
    )
    about = {**checkpoint._asdict(), 'digest': digests.digest(trees)}
    with self._writing():
      self._checkpoints.wait_until_finished()
      self._checkpoints.save(
          server.global_step,
          args=ocp.args.Composite(
              trees=ocp.args.StandardSave(trees),
              about=ocp.args.JsonSave(about),
          ),
          force=True,
      )
    self.saved_step = server.global_step

  def recover(
      self,
      server: parameter_server.ParameterServer,
      workers: workers_lib.Workers,
      options: in_flight_lib.Options,
  ) -> Generator[None, None, tuple[int, list[int]]]:
    """Restores the latest checkpoint, and rolls forward to the journal's end.

    Args:
      server: Has the initial parameters.
      workers: Compute again what the checkpoint lacks.
      options: The options of the run.

    Yields:
      `None` at intervals.

    Returns:
      The first batch that was never assigned, and the earlier batches that are
      still to be computed.

    Raises:
      RuntimeError: If a function of the task fails, or a worker dies or hangs
        at each attempt at a batch.
      ValueError: If the journal was written by another task or machine, or has
        lost records.
    """
    initial = server.params
    records = self.journal.records
    checkpoint = self.restore(server)

    def roll(server, records):
      times = in_flight_lib.durations(self.journal.records)
      limits = in_flight_lib.TimeLimits(options.patience, times)
      return roll_forward.roll_forward(
          server, records, workers, limits, options.max_attempts
      )

    if self.saved_step:
      # Without this, a run whose checkpoint has everything would go on with
      # another task. One gradient shows whether the task is the same.
      yield from roll(*_first(initial, records))
    tail = records[checkpoint.num_records :]
    yield from roll(server, tail)
    return _batches_left(tail, checkpoint, options.on_drop)

  def restore(self, server: parameter_server.ParameterServer) -> Checkpoint:
    """Restores a server from the latest intact checkpoint, if any.

    Raises:
      ValueError: If the journal has lost records that the checkpoint counts, or
        is of another run.
    """
    like = {'params': server.params, 'state': server.state}
    for step in sorted(self._checkpoints.all_steps(), reverse=True):
      try:
        trees, checkpoint = self._read(step, like)
      except Exception as error:  # Orbax raises many kinds.
        warnings.warn(
            f'Checkpoint {step} of {self._checkpoints.directory} cannot be'
            f' used. The run resumes from an earlier one: {_line(error)}',
            RuntimeWarning,
            stacklevel=2,
        )
        self._checkpoints.delete(step)
        continue
      self._check_journal(step, checkpoint)
      server.restore(**trees)
      self.saved_step = step
      return checkpoint
    return Checkpoint()

  def close(self) -> None:
    """Finishes pending writes and unlocks the folder.

    Raises:
      OSError: If the last checkpoint could not be written.
    """
    try:
      with self._writing():
        self._checkpoints.wait_until_finished()
      self._checkpoints.close()
    finally:
      self.journal.close()

  @contextlib.contextmanager
  def _writing(self):
    """Raises the errors of orbax, of many kinds, as `OSError`."""
    try:
      yield
    except Exception as error:
      raise OSError(
          'A checkpoint must be written to'
          f' {str(self._checkpoints.directory)!r}, got {_line(error)}'
      ) from error

  def _read(self, step, like):
    """Returns a checkpoint whose checksum matches what was written."""
    found = self._checkpoints.restore(
        step,
        args=ocp.args.Composite(
            trees=ocp.args.StandardRestore(parameter_server.unwrap_keys(like)),
            about=ocp.args.JsonRestore(),
        ),
    )
    about = dict(found['about'])
    if digests.digest(found['trees']) != about.pop('digest'):
      raise ValueError('its bits have changed since they were written.')
    trees = parameter_server.wrap_keys(found['trees'], like)
    return trees, Checkpoint(**about)

  def _check_journal(self, step, checkpoint):
    """Raises a `ValueError` if the journal is not that of a checkpoint."""
    records = self.journal.records
    if checkpoint.num_records > len(records):
      raise ValueError(
          f'The journal must have at least {checkpoint.num_records} records, as'
          ' when its latest checkpoint was written, got'
          f' {len(records)}.'
      )
    before = records[: checkpoint.num_records]
    if checkpoint.last_crc != (before[-1]['crc'] if len(before) else 0):
      raise ValueError(
          'The checkpoints must be of the same run as the journal, got one of'
          f' {step} updates of another run. Put back its journal, or name'
          ' another folder.'
      )


def _line(error: Exception) -> str:
  """Returns an error in one line."""
  return f'{type(error).__name__}: {error}'.splitlines()[0]


def _first(initial, records):
  """Returns a server before the first accepted gradient, and its record."""
  is_first = records['local_step'] == 0
  is_first &= records['fate'] == _Outcome.ACCEPTED
  first = records[is_first][:1].copy()
  first['global_step'] = 0
  return parameter_server.ParameterServer(optax.identity(), initial), first


def _batches_left(
    tail: np.ndarray, before: Checkpoint, on_drop: in_flight_lib.OnDrop
) -> tuple[int, list[int]]:
  """Returns the batches that are left after some more records."""
  ends = [_Outcome.ACCEPTED]
  if on_drop == 'forget':
    ends.append(_Outcome.DROPPED)
  done = set(tail['batch'][np.isin(tail['fate'], ends)].tolist())
  next_batch = max([before.next_batch, *(tail['batch'] + 1).tolist()])
  started = [*before.ready, *range(before.next_batch, next_batch)]
  return next_batch, [batch for batch in started if batch not in done]
