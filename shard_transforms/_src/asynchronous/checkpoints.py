"""The checkpoints of a segment of a run: one file of `numpy.savez` each."""

from collections.abc import Mapping
from collections.abc import Sequence
import json
import pathlib
from typing import Any, NamedTuple
import warnings

import numpy as np

from shard_transforms._src.asynchronous import journal
from shard_transforms._src.asynchronous import parameter_server
from shard_transforms._src.asynchronous import task as task_lib

_FOLDER = 'checkpoints'
_START = 'start'

# The arguments of `ParameterServer.restore`.
Trees = Mapping[str, Any]


class Checkpoint(NamedTuple):
  """A checkpoint; by default, the start of a run.

  Attributes:
    global_step: Its global step.
    num_records: Number of records that the segment had.
    last_crc: The `crc` of the last of them, or 0.
    next_batch: The first batch that had not been assigned.
    ready: The earlier batches that had to be computed again.
    metrics: The metrics of the last update.
    trees: Its parameters and its state.
  """

  global_step: int = 0
  num_records: int = 0
  last_crc: int = 0
  next_batch: int = 0
  ready: Sequence[int] = ()
  metrics: Mapping[str, float] = {}
  trees: Mapping[str, Any] = {}


def write(folder: pathlib.Path, checkpoint: Checkpoint) -> None:
  """Writes a checkpoint; keeps the one before it and that of the start.

  Args:
    folder: The folder of the segment.
    checkpoint: The checkpoint.

  Raises:
    OSError: If it cannot be written.
  """
  _write(_path(folder, checkpoint.global_step), checkpoint)
  steps = _steps(folder)
  # Later ones are damaged: the run would have gone on from them.
  kept = [step for step in steps if step <= checkpoint.global_step][-2:]
  for step in set(steps) - set(kept):
    _path(folder, step).unlink()


def begin_segment(
    folder: pathlib.Path,
    manifest: Mapping[str, Any],
    reason: str,
    saved: Checkpoint | None,
) -> journal.Segment:
  """Begins a segment of a run at a checkpoint, or at the initial parameters.

  Raises:
    OSError: If it cannot be written; nothing has then begun.
  """
  number = journal.last_segment(folder) + 1
  path = _path(journal.segment_folder(folder, number), _START)
  start = journal.Start()
  if saved is not None:
    _write(path, saved._replace(num_records=0, last_crc=0))
    start = journal.Start(saved.num_records, saved.global_step, reason)
  segment = journal.create_segment(folder, number, manifest, start)
  if saved is None:
    # Another one is of a call that was killed.
    path.unlink(missing_ok=True)
  return segment


def check_unused(folder: pathlib.Path) -> None:
  """Checks that a folder without a journal has no checkpoints.

  Raises:
    ValueError: If it has some.
  """
  if _steps(folder):
    raise ValueError(
        'The checkpoints must be of the same run as the journal, got'
        f' {str(folder)!r}, which has no journal. Put it back, or name another'
        ' folder.'
    )


def read_latest(
    folder: pathlib.Path, like: Trees, *, has_start: bool = True
) -> Checkpoint | None:
  """Returns the latest intact checkpoint of a segment, if there is one.

  Args:
    folder: The folder of the segment.
    like: Trees of the same structures, shapes and dtypes.
    has_start: Whether the segment starts from a checkpoint. If not, one that is
      there is of a call that was killed.

  Raises:
    ValueError: If it has leaves of other names, shapes or dtypes.
  """
  starts = [_START] if has_start else []
  for name in [*reversed(_steps(folder)), *starts]:
    path = _path(folder, name)
    if path.exists() and (found := _read(path, like)):
      return found
  return None


def read_start(segment: journal.Segment, initial: Trees) -> Checkpoint:
  """Returns the checkpoint at which a segment starts.

  Args:
    segment: The segment.
    initial: The trees at the start of the first segment.

  Raises:
    ValueError: If it is damaged or lost, or has other leaves.
  """
  if not segment.start.reason:
    return Checkpoint(trees=initial)
  path = _path(segment.path.parent, _START)
  found = _read(path, initial)
  if found is None or found.global_step != segment.start.global_step:
    raise ValueError(
        f'{str(path)!r} must be an intact checkpoint of step'
        f' {segment.start.global_step}: a segment of the journal starts from'
        ' it. Put it back, or name another folder. With'
        " `on_change='continue'`, `train` goes on from a later checkpoint, if"
        ' there is one.'
    )
  return found


def _write(path, checkpoint):
  about = checkpoint._replace(trees={})._asdict()
  about['layout'] = task_lib.layout(checkpoint.trees)
  # Not the tree: another optimizer may have more nodes without leaves.
  leaves = parameter_server.leaves_of(checkpoint.trees)
  with journal.replacing(path) as file:
    # NumPy does not know all dtypes, such as `bfloat16`.
    data = [np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in leaves]
    np.savez(file, json.dumps(about), *data)


def _read(path, like):
  """Returns a checkpoint; warns and returns `None` if it is no such one."""
  try:
    # It compares a checksum of each array.
    with np.load(path) as file:
      about = json.loads(str(file['arr_0']))
      layout = about.pop('layout')
      step = about['global_step']
      if path.stem not in (_START, str(step)):
        raise ValueError(f'it is checkpoint {step}.')
      found = [file[f'arr_{i + 1}'] for i in range(len(layout))]
  except Exception as error:  # What is damaged raises many kinds.
    line = f'{type(error).__name__}: {error}'.splitlines()[0]
    warnings.warn(
        f'{str(path)!r} cannot be used: {line}', RuntimeWarning, stacklevel=3
    )
    return None
  what = f'Checkpoint {path.stem} of {str(path.parent)!r}'
  parameter_server.check_layout(layout, like, what)
  leaves = [
      x.view(due.dtype).reshape(due.shape)
      for x, due in zip(found, parameter_server.leaves_of(like), strict=True)
  ]
  about['trees'] = parameter_server.with_leaves(like, leaves)
  return Checkpoint(*(about[name] for name in Checkpoint._fields))


def _path(folder, name):
  return folder / _FOLDER / f'{name}.npz'


def _steps(folder):
  """Returns the global steps of the checkpoints of a segment, in order."""
  paths = _path(folder, _START).parent.glob('*.npz')
  return sorted(int(path.stem) for path in paths if path.stem.isdecimal())
