"""The journal of a run: one record for the outcome of each gradient."""

from collections.abc import Iterator
from collections.abc import Mapping
import contextlib
import dataclasses
import enum
import json
import os
import pathlib
from typing import IO
import zlib

import numpy as np

JOURNAL_FILE = 'journal.bin'
_MAGIC = b'shard_transforms journal 6 '

_FIELDS = {
    '<i8': ('sequence', 'batch'),
    '<i4': ('local_step', 'global_step', 'worker', 'fate', 'merged'),
    '<f4': ('seconds',),
    '<u4': ('checksum', 'crc'),
}
RECORD = np.dtype([(name, t) for t in _FIELDS for name in _FIELDS[t]])

# The remedy if a run cannot continue in its folder.
RESTART_HINT = (
    'Or start a new run in a new folder from the last checkpoint:'
    ' `train(..., start=read_checkpoint(folder, task, tx))`.'
)


class Outcome(enum.IntEnum):
  """The outcome of a gradient: the field `fate` of a journal."""

  ACCEPTED = 0
  DROPPED = 1  # Too old.
  LOST = 2  # Its worker died or hung.
  UPDATED = 3  # Not of a gradient: an update was made after `grace`.


def read_journal(folder: str | os.PathLike[str]) -> np.ndarray:
  """Returns the journal of an asynchronous run.

  The journal may be read during the run. An incomplete last record, as after a
  crash, is ignored.

  Args:
    folder: The folder of the run.

  Returns:
    A structured array with one row per gradient, in the order of the
    decisions. The fields are `sequence` (0, 1, 2, ...), `batch`, `local_step`
    and `global_step` (the age is their difference), `worker`, `fate` (0
    accepted, 1 dropped as too old, 2 lost with its worker), `merged` (the
    number of gradients in the update that ends with this row, or 0), `seconds`
    since the program was started, `checksum` of the gradient, and `crc` of the
    record. A row of fate 3 does not belong to a gradient: it ends an update
    after the `grace` time.

  Raises:
    FileNotFoundError: If there is no journal.
    ValueError: If the file is not a journal, or is damaged.

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
    ...       task, optax.sgd(0.1), num_updates=5, num_workers=2, staleness=1,
    ...       cluster=None, folder=folder)
    ...   journal = asynchronous.read_journal(folder)
    >>> print(journal['global_step'] - journal['local_step'])
    [0 1 0 1 0]
  """
  return read(pathlib.Path(folder)).records


@dataclasses.dataclass(frozen=True)
class Journal:
  """A journal as read from the disk.

  Attributes:
    path: The file.
    manifest: Settings that must be equal when the run resumes or is replayed.
    start: The global step of the checkpoint that the run starts with; `None`
      for the initial parameters.
    records: The complete records.
    num_bytes: The size of the file up to the last complete record.
  """

  path: pathlib.Path
  manifest: Mapping[str, str]
  start: int | None
  records: np.ndarray
  num_bytes: int

  def last_crc(self, num_records: int) -> int:
    """Returns the `crc` of the last of the first records, or 0."""
    return int(self.records['crc'][:num_records][-1:].sum())

  def check(self, num_records: int, last_crc: int) -> None:
    """Checks that the journal has the records of a checkpoint.

    Args:
      num_records: The number of records before the checkpoint.
      last_crc: The `crc` of the last of these records, or 0.

    Raises:
      ValueError: If the checkpoint belongs to another run.
    """
    if self.last_crc(num_records) != last_crc:
      raise ValueError(
          f'The checkpoint was written after {num_records} records that'
          f' {str(self.path)!r} does not have: it belongs to another run. Put'
          ' back the journal of the checkpoint, or use another folder.'
      )


def read(folder: pathlib.Path) -> Journal:
  """Returns the journal in a folder.

  Raises:
    FileNotFoundError: If there is no journal.
    ValueError: If the file is not a journal, or is damaged.
  """
  path = folder / JOURNAL_FILE
  header, _, data = path.read_bytes().partition(b'\n')
  crc, _, about = header.removeprefix(_MAGIC).partition(b' ')
  if crc != str(zlib.crc32(about)).encode():
    raise ValueError(
        f'{str(path)!r} cannot be read: it is not a journal, was written by'
        ' another version of this package, or is damaged in its header. Put'
        f' back a copy. {RESTART_HINT}'
    )
  manifest, start = json.loads(about)
  records = np.frombuffer(data, RECORD, len(data) // RECORD.itemsize)
  for i, record in enumerate(records):
    if record['sequence'] != i or record['crc'] != crc_of(record):
      raise ValueError(
          f'{str(path)!r} is damaged at record {i} of {len(records)}: bits have'
          f' changed since it was written. Put back a copy. {RESTART_HINT}'
      )
  num_bytes = len(header) + 1 + records.nbytes
  return Journal(path, manifest, start, records, num_bytes)


def create(
    folder: pathlib.Path, manifest: Mapping[str, str], start: int | None
) -> None:
  """Writes a journal without records.

  Raises:
    OSError: If the file cannot be written.
  """
  about = json.dumps([manifest, start], sort_keys=True).encode()
  with replacing(folder / JOURNAL_FILE) as file:
    file.write(_MAGIC + b'%d %s\n' % (zlib.crc32(about), about))


def crc_of(record: np.void) -> int:
  """Returns the `crc` of a record: the checksum of its other fields."""
  return zlib.crc32(record.tobytes()[: -RECORD['crc'].itemsize])


@contextlib.contextmanager
def naming(path: pathlib.Path) -> Iterator[None]:
  """Adds the name of a file to an `OSError`.

  Raises:
    OSError: If the body of the `with` statement raises one.
  """
  try:
    yield
  except OSError as error:
    text = error.strerror or str(error)
    raise OSError(error.errno, text, str(path)) from error


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[IO[bytes]]:
  """Yields a new file, which replaces `path` once it is on the disk.

  Raises:
    OSError: If the file cannot be written; `path` is then unchanged.
  """
  # If a call is killed, the next one overwrites this file.
  new = path.with_name('incomplete')
  with naming(new):
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
      with open(new, 'wb') as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
      new.rename(path)
      folder = os.open(path.parent, os.O_RDONLY)
      # Not every file system can sync a folder.
      with contextlib.suppress(OSError):
        os.fsync(folder)
      os.close(folder)
    finally:
      new.unlink(missing_ok=True)
