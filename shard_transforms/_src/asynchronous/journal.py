"""The journal of a run: the outcome of each gradient, in order."""

from collections.abc import Mapping
import json
import os
import pathlib
from typing import Any
import zlib

import numpy as np

from shard_transforms._src.asynchronous import manifest as manifest_lib

_FILE = 'journal.bin'
_MAGIC = b'shard_transforms journal 1\n'


RECORD = np.dtype(
    [
        ('sequence', '<i8'),
        ('batch', '<i8'),
        ('local_step', '<i4'),
        ('global_step', '<i4'),
        ('worker', '<i4'),
        ('attempt', '<i4'),
        ('fate', '<i4'),
        ('weight', '<f4'),
        ('seconds', '<f4'),
        ('checksum', '<u4'),
        ('crc', '<u4'),
    ]
)
_SIGNED = RECORD.itemsize - RECORD['crc'].itemsize


def read_journal(folder: str | os.PathLike[str]) -> np.ndarray:
  """Returns the journal of an asynchronous run.

  It may be read during the run. An incomplete last record, as after a crash, is
  ignored.

  Args:
    folder: The folder of the run.

  Returns:
    A structured array [number of gradients], in the order in which they came
    back, with the fields `sequence` (0, 1, 2, ...), `batch`, `local_step` and
    `global_step` (the age is their difference), `worker`, `attempt`, `fate` (0
    accepted, 1 dropped as too old, 2 late, 3 lost with its worker, 4 failed),
    `weight`, `seconds` since the program was started, `checksum` of the
    gradient, and `crc` of the record.

  Raises:
    FileNotFoundError: If there is no journal.
    ValueError: If it is damaged.

  Examples:
    >>> import tempfile
    >>> import jax.numpy as jnp
    >>> import optax
    >>> from shard_transforms import asynchronous
    >>> task = asynchronous.Task(
    ...     init=lambda: jnp.zeros(3),
    ...     gradient=lambda params, batch: (params - batch, {}),
    ...     batch=lambda number: jnp.full(3, number % 2, jnp.float32))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...   _ = asynchronous.train(
    ...       task, optax.sgd(0.1), num_updates=5, num_workers=3, staleness=1,
    ...       cluster=None, folder=folder)
    ...   journal = asynchronous.read_journal(folder)
    >>> print(journal['global_step'] - journal['local_step'])
    [0 1 0 1 0]
  """
  return _parse(_path(folder))[1]


def read_manifest(folder: str | os.PathLike[str]) -> dict[str, Any]:
  """Returns the manifest of the run that wrote a journal.

  Raises:
    FileNotFoundError: If there is no journal.
    ValueError: If it is damaged.
  """
  return _parse(_path(folder))[0]


class Journal:
  """The open journal of a run, locked against other runs.

  Records survive a crash of the process once `write` returns, and a crash of
  the machine once `sync` does.
  """

  def __init__(self, folder: pathlib.Path, manifest: Mapping[str, Any]):
    """Opens the journal of a folder, or creates one.

    Args:
      folder: The folder of the run.
      manifest: What must be equal when the run resumes.

    Raises:
      OSError: If it cannot be written.
      ValueError: If it is damaged, of another run, or in use.
    """
    path = _path(folder)
    self._file = open(path, 'a+b', buffering=0)  # noqa: SIM115
    try:
      _lock(self._file, path)
      self._file.seek(0)
      if _MAGIC.startswith(self._file.read(len(_MAGIC) + 1)):
        # Empty, or cut off in its first line: there are no records to lose.
        self._begin(manifest)
      found, self.records, self._size = _parse(path)
      manifest_lib.check(found, manifest, folder)
      self._file.truncate(self._size)
    except BaseException:
      self.close()
      raise
    # The number of records, including those before a restart.
    self.num_records = len(self.records)
    # The `crc` of the last record, or 0.
    self.last_crc = int(self.records[-1]['crc']) if self.num_records else 0

  def write(self, **fields: Any) -> None:
    """Adds a record.

    Raises:
      OSError: If it cannot be written; the journal is then unchanged.
    """
    record = np.zeros((), RECORD)
    record['sequence'] = self.num_records
    for name, value in fields.items():
      record[name] = value
    record['crc'] = zlib.crc32(record.tobytes()[:_SIGNED])
    self._write_or_truncate(record.tobytes(), self._size)
    self._size += RECORD.itemsize
    self.num_records += 1
    self.last_crc = int(record['crc'])

  def sync(self) -> None:
    """Waits until all records are on the disk."""
    os.fsync(self._file.fileno())

  def close(self) -> None:
    """Closes and unlocks the journal."""
    self._file.close()

  def _begin(self, manifest):
    """Writes the lines before the records, or nothing if the disk is full."""
    self._file.truncate(0)
    line = json.dumps(manifest, sort_keys=True).encode()
    data = _MAGIC + line + f'\n{zlib.crc32(line)}\n'.encode()
    self._write_or_truncate(data, 0)

  def _write_or_truncate(self, data, size):
    """Writes all bytes, or restores the size of the file."""
    try:
      # On a disk that fills up, one call writes a part.
      while data:
        data = data[self._file.write(data) :]
    except OSError:
      self._file.truncate(size)
      raise


def _path(folder):
  return pathlib.Path(folder) / _FILE


def _lock(file, path):
  # Windows has none, and nothing but a lock needs it.
  import fcntl

  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError as error:
    raise ValueError(
        f'`folder` must not be in use, got {str(path.parent)!r}, which another'
        ' run writes to.'
    ) from error


def _parse(path):
  """Returns the manifest, the records, and where the last complete one ends.

  Raises:
    FileNotFoundError: If there is no journal.
    ValueError: If it is damaged before its end.
  """
  data = path.read_bytes()
  lines = data.split(b'\n', 3)
  if len(lines) < 4 or not data.startswith(_MAGIC):
    raise ValueError(
        f'`folder` must hold the journal of a run, got {str(path)!r}, which is'
        ' another file, or has lost its first bytes.'
    )
  if lines[2] != str(zlib.crc32(lines[1])).encode():
    raise ValueError(f'{str(path)!r} is damaged in its header.')
  start = len(data) - len(lines[3])
  size = len(lines[3]) // RECORD.itemsize * RECORD.itemsize
  records = np.frombuffer(lines[3][:size], RECORD)
  bad = [
      i
      for i, record in enumerate(records)
      if record['sequence'] != i
      or record['crc'] != zlib.crc32(record.tobytes()[:_SIGNED])
  ]
  if bad:
    raise ValueError(
        f'{str(path)!r} is damaged at record {bad[0]} of {len(records)}: its'
        f' bits have changed since they were written. To resume from the record'
        f' before, truncate the file to {start + bad[0] * RECORD.itemsize}'
        ' bytes, and delete later checkpoints.'
    )
  return json.loads(lines[1]), records, start + size
