"""The checkpoints of a run: one file of `numpy.savez` each."""

from collections.abc import Mapping
from collections.abc import Sequence
import json
import os
import pathlib
from typing import Any, NamedTuple
import warnings

import numpy as np

from shard_transforms._src.asynchronous import journal
from shard_transforms._src.asynchronous import parameter_server
from shard_transforms._src.asynchronous import task as task_lib

_FOLDER = 'checkpoints'
_END = '.npz'


class Checkpoint(NamedTuple):
  """A checkpoint; by default, there is none.

  Attributes:
    segment: The number of its segment of the journal; -1 if there is none.
    global_step: Its global step.
    num_records: Number of records that the segment had.
    last_crc: The `crc` of the last of them, or 0.
    next_batch: The first batch that had not been assigned.
    ready: The earlier batches that had to be computed again.
    metrics: The metrics of the last update.
    trees: The arguments of `ParameterServer.restore`, if they were read.
  """

  segment: int = -1
  global_step: int = 0
  num_records: int = 0
  last_crc: int = 0
  next_batch: int = 0
  ready: Sequence[int] = ()
  metrics: Mapping[str, float] = {}
  trees: Mapping[str, Any] = {}


class LayoutError(ValueError):
  """A checkpoint is intact, and of other parameters or another optimizer."""


def write(folder: pathlib.Path, checkpoint: Checkpoint) -> None:
  """Writes a checkpoint of a run; keeps the one before it, and no other.

  Raises:
    OSError: If it cannot be written.
  """
  path = _path(folder, checkpoint.segment, checkpoint.global_step)
  about = checkpoint._replace(trees={})._asdict()
  about['layout'] = task_lib.layout(checkpoint.trees)
  new = path.with_suffix('.new')
  try:
    with journal.naming(new):
      path.parent.mkdir(exist_ok=True)
      # Others are of calls that were killed.
      for left in path.parent.glob('*.new'):
        left.unlink()
      with open(new, 'wb') as file:
        # Not the tree: another optimizer may have more nodes without leaves.
        leaves = parameter_server.leaves_of(checkpoint.trees)
        # NumPy does not know all dtypes, such as `bfloat16`.
        np.savez(file, json.dumps(about), *map(_as_bytes, leaves))
        file.flush()
        os.fsync(file.fileno())
      new.rename(path)
  finally:
    new.unlink(missing_ok=True)
  steps = _steps(folder, checkpoint.segment)
  place = steps.index(checkpoint.global_step)
  # Later ones are damaged: the run would have gone on from them.
  for step in steps[: max(place - 1, 0)] + steps[place + 1 :]:
    _path(folder, checkpoint.segment, step).unlink()


def read(
    folder: pathlib.Path, segment: int, step: int, like: Mapping[str, Any]
) -> Checkpoint:
  """Returns the checkpoint of a segment at a global step.

  Args:
    folder: The folder of the run.
    segment: The number of the segment.
    step: The global step.
    like: Trees of the same structures, shapes and dtypes.

  Raises:
    LayoutError: If it has leaves of other names, shapes or dtypes.
    Exception: If it is damaged.
  """
  path = _path(folder, segment, step)
  # It compares a checksum of each array.
  with np.load(path) as file:
    about = json.loads(str(file['arr_0']))
    try:
      parameter_server.check_layout(
          about.pop('layout'),
          like,
          f'Checkpoint {step} of {str(path.parent)!r}',
      )
    except ValueError as error:
      raise LayoutError(str(error)) from error
    leaves = [
        file[f'arr_{i}'].view(x.dtype).reshape(x.shape)
        for i, x in enumerate(parameter_server.leaves_of(like), 1)
    ]
  trees = parameter_server.with_leaves(like, leaves)
  return Checkpoint(**{**about, 'trees': trees})


def read_latest(folder: pathlib.Path, like: Mapping[str, Any]) -> Checkpoint:
  """Returns the latest intact checkpoint of a run; warns of those that are not.

  Raises:
    LayoutError: If it has leaves of other names, shapes or dtypes.
  """
  for segment in range(max(journal.last_segment(folder), 0), -1, -1):
    for step in reversed(_steps(folder, segment)):
      try:
        return read(folder, segment, step, like)
      except LayoutError:
        raise
      except Exception as error:  # What is damaged raises many kinds.
        warnings.warn(
            f'{str(_path(folder, segment, step))!r} cannot be used, an earlier'
            f' checkpoint is: {_line(error)}',
            RuntimeWarning,
            stacklevel=2,
        )
  return Checkpoint()


def restore_start(
    folder: pathlib.Path,
    start: journal.Start,
    server: parameter_server.ParameterServer,
) -> None:
  """Restores a new server as it was where a segment starts.

  Raises:
    ValueError: If that checkpoint is lost, or has other leaves.
  """
  if start.segment < 0:
    return
  try:
    found = read(folder, start.segment, start.global_step, server.trees())
  except Exception as error:  # What is damaged raises many kinds.
    raise ValueError(
        f'Checkpoint {start.global_step} of segment {start.segment} must be in'
        f' {str(folder)!r}, got {_line(error)}'
    ) from error
  server.restore(**found.trees)


def _as_bytes(leaf: np.ndarray) -> np.ndarray:
  return np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)


def _path(folder: pathlib.Path, segment: int, step: int) -> pathlib.Path:
  return journal.segment_folder(folder, segment) / _FOLDER / f'{step}{_END}'


def _steps(folder: pathlib.Path, segment: int) -> list[int]:
  """Returns the global steps of the checkpoints of a segment, in order."""
  paths = _path(folder, segment, 0).parent.glob(f'*{_END}')
  return sorted(int(path.stem) for path in paths if path.stem.isdecimal())


def _line(error: Exception) -> str:
  """Returns an error in one line."""
  return f'{type(error).__name__}: {error}'.splitlines()[0]
