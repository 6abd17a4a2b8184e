"""Checkpoints of an asynchronous run, by orbax."""

from collections.abc import Iterator
import contextlib
import pathlib
from typing import Any, NamedTuple
import warnings

import orbax.checkpoint as ocp

from shard_transforms._src.asynchronous import random_keys
from shard_transforms._src.monitoring import digests

_FOLDER = 'checkpoints'


class Checkpoint(NamedTuple):
  """What a run resumes from.

  Attributes:
    params: The parameters, in NumPy arrays.
    state: The state of `drop_stale`, in NumPy arrays.
    num_records: Number of records in the journal at that time.
    last_crc: The `crc` of the last of them, or 0.
    next_batch: The first batch that had not been handed out.
    ready: The earlier batches that were to be computed again.
  """

  params: Any
  state: Any
  num_records: int
  last_crc: int
  next_batch: int
  ready: list[int]


class Checkpoints:
  """The last two checkpoints of a run, written in the background."""

  def __init__(self, folder: pathlib.Path):
    self._manager = ocp.CheckpointManager(
        (folder / _FOLDER).absolute(),
        options=ocp.CheckpointManagerOptions(
            max_to_keep=2,
            create=True,
            cleanup_tmp_directories=True,
            enable_async_checkpointing=True,
        ),
    )

  def save(self, global_step: int, checkpoint: Checkpoint) -> None:
    """Writes a checkpoint, after waiting for the previous one.

    Raises:
      OSError: If the previous one could not be written.
    """
    trees = random_keys.unwrap(
        {'params': checkpoint.params, 'state': checkpoint.state}
    )
    about = {
        'num_records': checkpoint.num_records,
        'last_crc': checkpoint.last_crc,
        'next_batch': checkpoint.next_batch,
        'ready': checkpoint.ready,
        'digest': digests.digest(trees),
    }
    with self._writing():
      self._manager.wait_until_finished()
      self._manager.save(
          global_step,
          args=ocp.args.Composite(
              trees=ocp.args.StandardSave(trees),
              about=ocp.args.JsonSave(about),
          ),
          force=True,
      )

  def restore(self, params: Any, state: Any) -> Iterator[Checkpoint]:
    """Yields the intact checkpoints, the latest first.

    Args:
      params: Parameters of the same tree, shapes and dtypes.
      state: A state of the same tree, shapes and dtypes.
    """
    for step in sorted(self._manager.all_steps(), reverse=True):
      try:
        yield self._read(step, {'params': params, 'state': state})
      except Exception as error:  # Orbax raises many kinds.
        line = f'{type(error).__name__}: {error}'.splitlines()[0]
        warnings.warn(
            f'Checkpoint {step} of {self._manager.directory} cannot be used,'
            f' and the run goes on from before it: {line}',
            RuntimeWarning,
            stacklevel=2,
        )
        self._manager.delete(step)

  def close(self) -> None:
    """Waits until the last checkpoint has been written.

    Raises:
      OSError: If it could not be written.
    """
    with self._writing():
      self._manager.wait_until_finished()
    self._manager.close()

  @contextlib.contextmanager
  def _writing(self):
    """Raises what orbax raises, of many kinds, as `OSError`."""
    try:
      yield
    except Exception as error:
      line = f'{type(error).__name__}: {error}'.splitlines()[0]
      raise OSError(
          f'A checkpoint must be written to {str(self._manager.directory)!r},'
          f' got {line}'
      ) from error

  def _read(self, step, like):
    """Returns a checkpoint whose checksum matches what was written."""
    found = self._manager.restore(
        step,
        args=ocp.args.Composite(
            trees=ocp.args.StandardRestore(random_keys.unwrap(like)),
            about=ocp.args.JsonRestore(),
        ),
    )
    about = dict(found['about'])
    if digests.digest(found['trees']) != about.pop('digest'):
      raise ValueError('its bits have changed since they were written.')
    return Checkpoint(**random_keys.wrap(found['trees'], like), **about)
