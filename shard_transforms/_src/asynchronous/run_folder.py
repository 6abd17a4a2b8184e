"""The folder of a run: its lock, its journal, and its checkpoints.

Each checkpoint is one file of `numpy.savez`.
"""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
from concurrent import futures
import contextlib
import importlib.metadata
import json
import math
import os
import pathlib
import platform
from typing import Any, NamedTuple
import warnings

import jax
import numpy as np

from shard_transforms._src.asynchronous import journal as journal_lib
from shard_transforms._src.asynchronous import options as options_lib
from shard_transforms._src.asynchronous import parameter_server
from shard_transforms._src.asynchronous import task as task_lib

_FOLDER = 'checkpoints'
# The file name of the checkpoint that a run starts with.
_START = 'start'
# Names of settings in the manifest.
_INITIAL = 'initial parameters'
_OPTIMIZER = 'operations or numbers of the optimizer'
_PROCESSORS = pathlib.Path('/proc/cpuinfo')

# The arguments of `ParameterServer.restore`.
Trees = Mapping[str, Any]


class Checkpoint(NamedTuple):
  """A checkpoint; by default, the start of a run.

  Attributes:
    global_step: The number of updates before the checkpoint.
    num_records: The number of records of the journal before the checkpoint.
    last_crc: The `crc` of the last of these records, or 0.
    next_batch: The first batch that had not been assigned.
    ready: The earlier batches that had to be computed again.
    metrics: The metrics of the last update.
    trees: The parameters and the states.
  """

  global_step: int = 0
  num_records: int = 0
  last_crc: int = 0
  next_batch: int = 0
  ready: Sequence[int] = ()
  metrics: Mapping[str, float] = {}
  trees: Mapping[str, Any] = {}


class RunFolder:
  """Writes the journal and the checkpoints of a run.

  Records survive a crash of the process once `write` returns. They survive a
  crash of the machine once a later checkpoint is written.

  Attributes:
    saved: The latest checkpoint, without its trees.
    next_batch: The first batch that was never assigned.
    ready: The earlier batches that have yet to be computed.
  """

  def __init__(self, journal: journal_lib.Journal, saved: Checkpoint):
    """Continues at the end of a journal, whose latest checkpoint is `saved`."""
    self.saved = saved._replace(trees={})
    tail = journal.records[saved.num_records :]
    is_accepted = tail['fate'] == journal_lib.Outcome.ACCEPTED
    done = set(tail['batch'][is_accepted].tolist())
    self.next_batch = max([saved.next_batch, *(tail['batch'] + 1).tolist()])
    started = [*saved.ready, *range(saved.next_batch, self.next_batch)]
    self.ready = [batch for batch in started if batch not in done]
    self._path = journal.path
    self._num_records = len(journal.records)
    self._last_crc = journal.last_crc(self._num_records)
    self._file = open(journal.path, 'r+b', buffering=0)  # noqa: SIM115
    self._file.seek(journal.num_bytes)
    # Writes one checkpoint at a time, while the run continues.
    self._writer = futures.ThreadPoolExecutor(1)
    self._pending: futures.Future[None] | None = None

  def write(self, rows: np.ndarray) -> None:
    """Appends records to the journal, either all or none.

    Args:
      rows: The records; their `sequence` and `crc` are filled in.

    Raises:
      OSError: If the records cannot be written; the journal is then unchanged.
    """
    for number, row in enumerate(rows, self._num_records):
      row['sequence'] = number
      row['crc'] = journal_lib.crc_of(row)
    data, end = rows.tobytes(), self._file.tell()
    with journal_lib.naming(self._path):
      try:
        # On a disk that fills up, one call may write only a part.
        while data:
          data = data[self._file.write(data) :]
      except OSError:
        self._file.truncate(self._file.seek(end))
        raise
    self._num_records += len(rows)
    self._last_crc = int(rows['crc'][-1])

  def is_due(self, step: int, options: options_lib.Options) -> bool:
    """Returns whether a checkpoint is due at a global step."""
    return step - self.saved.global_step >= options.save_every

  def save(self, checkpoint: Checkpoint) -> None:
    """Starts to write a checkpoint, after waiting for the previous one.

    No gradient may be in flight.

    Args:
      checkpoint: The checkpoint, without its number of records.

    Raises:
      OSError: If the journal or the previous checkpoint cannot be written.
    """
    if checkpoint.global_step == self.saved.global_step:
      return
    with journal_lib.naming(self._path):
      os.fsync(self._file.fileno())
    self._wait()
    checkpoint = checkpoint._replace(
        num_records=self._num_records, last_crc=self._last_crc
    )
    self.saved = checkpoint._replace(trees={})
    self._pending = self._writer.submit(write, self._path.parent, checkpoint)

  def close(self) -> None:
    """Waits for pending writes, and closes the journal.

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
  """Locks a folder until the stack is closed; creates a missing folder.

  Raises:
    OSError: If the folder cannot be created or locked.
    ValueError: If another run has locked the folder.
  """
  # Windows does not have this module, and only the lock needs it.
  import fcntl

  folder.mkdir(parents=True, exist_ok=True)
  descriptor = os.open(folder, os.O_RDONLY)
  stack.callback(os.close, descriptor)
  try:
    with journal_lib.naming(folder):
      fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError as error:
    raise ValueError(
        f'`folder` is in use by another run: {str(folder)!r}. Wait until that'
        ' run has ended, or use another folder.'
    ) from error


def read_or_create(
    folder: pathlib.Path, manifest: Mapping[str, str], start: Checkpoint | None
) -> journal_lib.Journal:
  """Returns the journal in a folder, after creating one if there is none.

  Args:
    folder: The folder.
    manifest: The manifest of this run.
    start: The checkpoint that a new run starts with; `None` for the initial
      parameters.

  Raises:
    OSError: If the journal cannot be written; the folder is then unchanged.
    ValueError: If the folder has checkpoints without a journal, or belongs to
      another run.
  """
  if not (folder / journal_lib.JOURNAL_FILE).exists():
    if _steps(folder):
      raise ValueError(
          f'{str(folder)!r} has checkpoints but no journal. Put the journal'
          ' back, or use another folder.'
      )
    path = _path(folder, _START)
    if start is None:
      # A file would be left from a call that was killed.
      path.unlink(missing_ok=True)
    else:
      _write(path, start)
    step = None if start is None else start.global_step
    journal_lib.create(folder, manifest, step)
  journal = journal_lib.read(folder)
  check(journal, manifest)
  return journal


def manifest_of(server: parameter_server.ParameterServer) -> dict[str, str]:
  """Returns the manifest of a run from a server with the initial parameters.

  The manifest has the settings that determine the last bits: processor, device
  and libraries. It does not describe the functions of the task, because their
  gradients are compared.
  """
  return {
      _INITIAL: str(task_lib.checksum(server.params)),
      _OPTIMIZER: server.fingerprint,
      'processor': _processor(),
      # Workers may have other devices, but their gradients are compared.
      'device of the driver': jax.devices()[0].device_kind,
      'jaxlib': importlib.metadata.version('jaxlib'),
      'optax': importlib.metadata.version('optax'),
  }


def check(journal: journal_lib.Journal, manifest: Mapping[str, str]) -> None:
  """Checks that a journal has the manifest of this run.

  Raises:
    ValueError: If the manifests differ; the error names all differences.
  """
  differences = [
      f'{name} ({journal.manifest.get(name)!r} instead of {value!r})'
      for name, value in manifest.items()
      if journal.manifest.get(name) != value
      # A run that starts from a checkpoint does not use them.
      and not (name == _INITIAL and journal.start is not None)
  ]
  if differences:
    raise ValueError(
        f'The run in {str(journal.path.parent)!r} was started with different'
        f' settings: {", ".join(differences)}. Use the settings of that run, or'
        f' another folder. {journal_lib.RESTART_HINT}'
    )


def write(folder: pathlib.Path, checkpoint: Checkpoint) -> None:
  """Writes a checkpoint; keeps the previous one and the start of the run.

  Args:
    folder: The folder of the run.
    checkpoint: The checkpoint.

  Raises:
    OSError: If the checkpoint cannot be written.
  """
  _write(_path(folder, checkpoint.global_step), checkpoint)
  steps = _steps(folder)
  # Later checkpoints are damaged: the run would have resumed from them.
  latest = [step for step in steps if step <= checkpoint.global_step][-2:]
  for step in set(steps) - set(latest):
    _path(folder, step).unlink()


def read_latest(
    folder: pathlib.Path, like: Trees, below: float = math.inf
) -> Checkpoint | None:
  """Returns the latest intact checkpoint of a run, if there is one.

  Args:
    folder: The folder of the run.
    like: Trees of the same structures, shapes and dtypes; see `_read`.
    below: An upper bound of the global step, exclusive.

  Raises:
    ValueError: If leaves have other names, shapes or dtypes.
  """
  steps = [step for step in _steps(folder) if step < below]
  for name in [*reversed(steps), _START]:
    path = _path(folder, name)
    if path.exists() and (checkpoint := _read(path, like)):
      return checkpoint
  return None


def read_start(journal: journal_lib.Journal, initial: Trees) -> Checkpoint:
  """Returns the checkpoint that a run starts with.

  Args:
    journal: The journal of the run.
    initial: The initial trees of the task, for a run without such a checkpoint.

  Raises:
    ValueError: If the checkpoint is damaged or missing, or has other leaves.
  """
  if journal.start is None:
    return Checkpoint(trees={**initial, 'workers': {}})
  path = _path(journal.path.parent, _START)
  checkpoint = _read(path, initial)
  if checkpoint is None or checkpoint.global_step != journal.start:
    raise ValueError(
        f'{str(path)!r} is not the checkpoint of step {journal.start} that the'
        f' run started with, or is damaged. Put it back.'
        f' {journal_lib.RESTART_HINT}'
    )
  return checkpoint


def with_workers(like: Trees, workers: Iterable[int]) -> Trees:
  """Returns trees that have the state of each worker under `workers`."""
  return {**like, 'workers': dict.fromkeys(workers, like.get('workers'))}


def _write(path, checkpoint):
  header = checkpoint._replace(trees={})._asdict()
  header['layout'] = task_lib.layout(checkpoint.trees)
  header['workers'] = [*checkpoint.trees.get('workers', {})]
  # Without the structure: another optimizer may have more empty nodes.
  leaves = parameter_server.leaves_of(checkpoint.trees)
  with journal_lib.replacing(path) as file:
    # NumPy cannot store all dtypes, such as `bfloat16`.
    data = [np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in leaves]
    np.savez(file, json.dumps(header), *data)


def _read(path, like):
  """Returns a checkpoint; warns and returns `None` if the file is damaged.

  Args:
    path: The file.
    like: Trees as in the checkpoint; under `workers`, the state of one worker.

  Raises:
    ValueError: If leaves have other names, shapes or dtypes.
  """
  try:
    # NumPy verifies a checksum of each array.
    with np.load(path) as file:
      header = json.loads(str(file['arr_0']))
      layout, workers = header.pop('layout'), header.pop('workers')
      step = header['global_step']
      if path.stem not in (_START, str(step)):
        raise ValueError(f'it contains checkpoint {step}.')
      arrays = [file[f'arr_{i + 1}'] for i in range(len(layout))]
  except Exception as error:  # Damaged files raise errors of many types.
    line = f'{type(error).__name__}: {error}'.splitlines()[0]
    warnings.warn(
        f'{str(path)!r} cannot be used: {line}', RuntimeWarning, stacklevel=3
    )
    return None
  like = with_workers(like, workers)
  description = f'Checkpoint {path.stem} of {str(path.parent)!r}'
  parameter_server.check_layout(layout, like, description)
  leaves = [
      x.view(leaf.dtype).reshape(leaf.shape)
      for x, leaf in zip(arrays, parameter_server.leaves_of(like), strict=True)
  ]
  trees = parameter_server.with_leaves(like, leaves)
  return Checkpoint(**header)._replace(trees=trees)


def _path(folder, name):
  return folder / _FOLDER / f'{name}.npz'


def _steps(folder):
  """Returns the global steps of the checkpoints of a run, in order."""
  names = [path.stem for path in (folder / _FOLDER).glob('*.npz')]
  # Excludes '007', which a run never writes.
  return sorted(int(x) for x in names if x.isdecimal() and str(int(x)) == x)


def _processor():
  """Returns the name of the processor, or its architecture."""
  with contextlib.suppress(OSError):
    for line in _PROCESSORS.read_text().splitlines():
      if line.startswith('model name'):
        return line.split(':', 1)[1].strip()
  return platform.processor() or platform.machine()
