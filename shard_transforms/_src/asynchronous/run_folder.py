"""The folder of a run: its lock, its journal, and its checkpoints.

A checkpoint is one file of `numpy.savez`.
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

from shard_transforms._src.asynchronous import options as options_lib
from shard_transforms._src.asynchronous import outcomes
from shard_transforms._src.asynchronous import parameter_server
from shard_transforms._src.asynchronous import task as task_lib

_FOLDER = 'checkpoints'
# The name of the checkpoint that a run starts with.
_START = 'start'
_INITIAL = 'initial parameters'
_OPTIMIZER = 'operations or numbers of the optimizer'
_PROCESSORS = pathlib.Path('/proc/cpuinfo')

# The arguments of `ParameterServer.restore`.
Trees = Mapping[str, Any]


class Checkpoint(NamedTuple):
  """A checkpoint; by default, the start of a run.

  Attributes:
    global_step: Its global step.
    num_records: Number of records that the journal had.
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


class RunFolder:
  """Writes the journal and the checkpoints of a run.

  Records survive a crash of the process once `write` returns. They survive a
  crash of the machine once a later checkpoint is written.

  Attributes:
    saved: The latest checkpoint, without its trees.
    next_batch: The first batch that was never assigned.
    ready: The earlier batches that are still to be computed.
  """

  def __init__(self, journal: outcomes.Journal, saved: Checkpoint):
    """Goes on at the end of a journal, which has this latest checkpoint."""
    self.saved = saved._replace(trees={})
    tail = journal.records[saved.num_records :]
    is_accepted = tail['fate'] == outcomes.Outcome.ACCEPTED
    done = set(tail['batch'][is_accepted].tolist())
    self.next_batch = max([saved.next_batch, *(tail['batch'] + 1).tolist()])
    started = [*saved.ready, *range(saved.next_batch, self.next_batch)]
    self.ready = [batch for batch in started if batch not in done]
    self._path = journal.path
    self._num_records = len(journal.records)
    self._last_crc = journal.last_crc(self._num_records)
    self._file = open(journal.path, 'r+b', buffering=0)  # noqa: SIM115
    self._file.seek(journal.num_bytes)
    # It writes one checkpoint at a time, while the run goes on.
    self._writer = futures.ThreadPoolExecutor(1)
    self._pending: futures.Future[None] | None = None

  def write(self, rows: np.ndarray) -> None:
    """Adds records to the journal, all of them or none.

    Args:
      rows: The records, to which it adds `sequence` and `crc`.

    Raises:
      OSError: If they cannot be written; the journal is then unchanged.
    """
    for number, row in enumerate(rows, self._num_records):
      row['sequence'] = number
      row['crc'] = outcomes.crc_of(row)
    data, end = rows.tobytes(), self._file.tell()
    with outcomes.naming(self._path):
      try:
        # On a disk that fills up, one call writes a part.
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

  def save(self, server: parameter_server.ParameterServer, *run: Any) -> None:
    """Starts to write a checkpoint, after waiting for the previous one.

    No gradient may be in flight.

    Args:
      server: The parameters and the state.
      *run: `next_batch`, `ready` and `metrics`, as in a checkpoint.

    Raises:
      OSError: If the journal or the previous checkpoint cannot be written.
    """
    if server.global_step == self.saved.global_step:
      return
    with outcomes.naming(self._path):
      os.fsync(self._file.fileno())
    self._wait()
    written = self._num_records, self._last_crc
    self.saved = Checkpoint(server.global_step, *written, *run)
    saved = self.saved._replace(trees=server.trees())
    self._pending = self._writer.submit(write, self._path.parent, saved)

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
    with outcomes.naming(folder):
      fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError as error:
    raise ValueError(
        f'`folder` must not be in use by another run, got {str(folder)!r}.'
    ) from error


def read_or_create(
    folder: pathlib.Path, manifest: Mapping[str, str], given: Checkpoint | None
) -> outcomes.Journal:
  """Returns the journal in a folder; if there is none, it begins one.

  Args:
    folder: The folder.
    manifest: The manifest of this run.
    given: What a new run starts with; `None` for the initial parameters.

  Raises:
    OSError: If it cannot be written; nothing has then begun.
    ValueError: If the folder has checkpoints without a journal, or is of
      another run.
  """
  if not (folder / outcomes.JOURNAL_FILE).exists():
    if _steps(folder):
      raise ValueError(
          'The checkpoints must be of the same run as the journal, got none in'
          f' {str(folder)!r}. Put it back, or name another folder.'
      )
    start = _path(folder, _START)
    if given is None:
      # Another one is of a call that was killed.
      start.unlink(missing_ok=True)
    else:
      _write(start, given)
    step = None if given is None else given.global_step
    outcomes.create_journal(folder, manifest, step)
  journal = outcomes.read_records(folder)
  check(journal, manifest)
  return journal


def manifest_of(server: parameter_server.ParameterServer) -> dict[str, str]:
  """Returns the manifest of a run, of a server with the initial parameters.

  It does not describe the functions of the task: their gradients are compared.
  It has what decides the last bits: processor, device and libraries.
  """
  return {
      _INITIAL: str(task_lib.checksum(server.params)),
      _OPTIMIZER: server.fingerprint,
      'processor': _processor(),
      # With Ray, that of the workers is another: their gradients are compared.
      'device of the driver': jax.devices()[0].device_kind,
      'jaxlib': importlib.metadata.version('jaxlib'),
      'optax': importlib.metadata.version('optax'),
  }


def check(journal: outcomes.Journal, manifest: Mapping[str, str]) -> None:
  """Checks that a journal has the manifest of this run.

  Raises:
    ValueError: If it has not; the message names all that differs.
  """
  differing = [
      f'{name} ({journal.manifest.get(name)!r} instead of {value!r})'
      for name, value in manifest.items()
      if journal.manifest.get(name) != value
      # Those of a run that starts with a checkpoint do not matter.
      and not (name == _INITIAL and journal.start is not None)
  ]
  if differing:
    raise ValueError(
        f'`folder` must be of the same run, got {str(journal.path.parent)!r},'
        f' where these differ: {", ".join(differing)}. Use what the run was'
        f' started with, or name another folder. {outcomes.WAY_ON}'
    )


def write(folder: pathlib.Path, checkpoint: Checkpoint) -> None:
  """Writes a checkpoint; keeps the one before it and that of the start.

  Args:
    folder: The folder of the run.
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


def read_latest(
    folder: pathlib.Path, like: Trees, below: float = math.inf
) -> Checkpoint | None:
  """Returns the latest intact checkpoint of a run, if there is one.

  Args:
    folder: The folder of the run.
    like: Trees of the same structures, shapes and dtypes; see `_read`.
    below: The global step before which it was written.

  Raises:
    ValueError: If it has leaves of other names, shapes or dtypes.
  """
  steps = [step for step in _steps(folder) if step < below]
  for name in [*reversed(steps), _START]:
    path = _path(folder, name)
    if path.exists() and (found := _read(path, like)):
      return found
  return None


def read_start(journal: outcomes.Journal, initial: Trees) -> Checkpoint:
  """Returns the checkpoint with which a run starts.

  Args:
    journal: The journal of the run.
    initial: The trees with which it starts otherwise.

  Raises:
    ValueError: If it is damaged or lost, or has other leaves.
  """
  if journal.start is None:
    return Checkpoint(trees={**initial, 'workers': {}})
  path = _path(journal.path.parent, _START)
  found = _read(path, initial)
  if found is None or found.global_step != journal.start:
    raise ValueError(
        f'{str(path)!r} must be an intact checkpoint of step {journal.start}:'
        f' the run starts with it. Put it back. {outcomes.WAY_ON}'
    )
  return found


def with_workers(like: Trees, workers: Iterable[int]) -> Trees:
  """Returns trees with the state of each worker in place of that of one."""
  return {**like, 'workers': dict.fromkeys(workers, like.get('workers'))}


def _write(path, checkpoint):
  about = checkpoint._replace(trees={})._asdict()
  about['layout'] = task_lib.layout(checkpoint.trees)
  about['workers'] = [*checkpoint.trees.get('workers', {})]
  # Not the tree: another optimizer may have more nodes without leaves.
  leaves = parameter_server.leaves_of(checkpoint.trees)
  with outcomes.replacing(path) as file:
    # NumPy does not know all dtypes, such as `bfloat16`.
    data = [np.ascontiguousarray(x).reshape(-1).view(np.uint8) for x in leaves]
    np.savez(file, json.dumps(about), *data)


def _read(path, like):
  """Returns a checkpoint; warns and returns `None` if it is no such one.

  Args:
    path: The file.
    like: Trees as in the checkpoint; under `workers`, the state of a worker.

  Raises:
    ValueError: If it has leaves of other names, shapes or dtypes.
  """
  try:
    # It compares a checksum of each array.
    with np.load(path) as file:
      about = json.loads(str(file['arr_0']))
      layout, workers = about.pop('layout'), about.pop('workers')
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
  like = with_workers(like, workers)
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
  """Returns the global steps of the checkpoints of a run, in order."""
  names = [path.stem for path in (folder / _FOLDER).glob('*.npz')]
  # Not '007', which no run writes.
  return sorted(int(x) for x in names if x.isdecimal() and str(int(x)) == x)


def _processor():
  """Returns the name of the processor, or its architecture."""
  with contextlib.suppress(OSError):
    for line in _PROCESSORS.read_text().splitlines():
      if line.startswith('model name'):
        return line.split(':', 1)[1].strip()
  return platform.processor() or platform.machine()
