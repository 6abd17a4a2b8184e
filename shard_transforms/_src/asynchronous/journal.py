"""The journal of a run: the outcome of each gradient, in order.

A run that goes on with another optimizer or on another machine begins a new
segment of its journal, in a folder of its own.
"""

from collections.abc import Iterator
from collections.abc import Mapping
import contextlib
import dataclasses
import functools
import json
import os
import pathlib
from typing import Any, NamedTuple
import warnings
import zlib

import numpy as np

_FILE = 'journal.bin'
_MAGIC = b'shard_transforms journal 2\n'
_SEGMENT = 'segment_'


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
  ignored. A damaged record is left out, with a warning. Where a segment of the
  journal begins, it replaces the records after its first checkpoint.

  Args:
    folder: The folder of the run.

  Returns:
    A structured array [number of gradients], in the order in which they came
    back, with the fields `sequence` (0, 1, 2, ... in each segment), `batch`,
    `local_step` and `global_step` (the age is their difference), `worker`,
    `attempt`, `fate` (0 accepted, 1 dropped as too old, 2 late, 3 lost with its
    worker, 4 failed), `weight`, `seconds` since the program was started,
    `checksum` of the gradient, and `crc` of the record.

  Raises:
    FileNotFoundError: If there is no journal.
    ValueError: If it is another file, or damaged in its header.

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
  return intact(read_segments(pathlib.Path(folder)))


class Start(NamedTuple):
  """Where a segment starts: at a checkpoint of an earlier one.

  Attributes:
    segment: The number of that segment; -1 if the segment starts with the
      initial parameters.
    num_records: How many of its records lead to the checkpoint.
    global_step: The global step of the checkpoint.
    reason: Why the run began a segment.
  """

  segment: int = -1
  num_records: int = 0
  global_step: int = 0
  reason: str = ''


@dataclasses.dataclass(frozen=True)
class Segment:
  """A segment of a journal, as it is on the disk.

  Attributes:
    path: The file.
    manifest: What was equal in all of it.
    start: Where it starts.
    records: Its complete records.
    num_bytes: The size of the file up to the last complete record.
  """

  path: pathlib.Path
  manifest: Mapping[str, Any]
  start: Start
  records: np.ndarray
  num_bytes: int

  @functools.cached_property
  def is_damaged(self) -> np.ndarray:
    """Whether a record has other bits than were written, bool [records]."""
    found = [
        record['sequence'] != i
        or record['crc'] != zlib.crc32(record.tobytes()[:_SIGNED])
        for i, record in enumerate(self.records)
    ]
    return np.array(found, bool)

  def cut(self, num_records: int) -> 'Segment':
    """Returns the segment up to a number of records."""
    return dataclasses.replace(self, records=self.records[:num_records])

  def check(self, first: int = 0) -> None:
    """Checks that the records from one on are intact.

    Raises:
      ValueError: If one of them is damaged.
    """
    for bad in first + np.flatnonzero(self.is_damaged[first:]):
      raise ValueError(
          f'{str(self.path)!r} is damaged at record {bad} of'
          f' {len(self.records)}: its bits have changed since they were'
          " written. With `on_change='continue'`, `train` goes on from the last"
          ' checkpoint.'
      )


def read_segments(folder: pathlib.Path) -> list[Segment]:
  """Returns the segments of a journal, each cut off where the next one starts.

  Raises:
    FileNotFoundError: If there is no journal.
    ValueError: If a segment is another file, or damaged in its header.
  """
  segments = [read_segment(folder, max(last_segment(folder), 0))]
  while (start := segments[0].start).segment >= 0:
    before = read_segment(folder, start.segment)
    segments.insert(0, before.cut(start.num_records))
  return segments


def read_segment(folder: pathlib.Path, number: int) -> Segment:
  """Returns a segment.

  Raises:
    FileNotFoundError: If there is none.
    ValueError: If it is another file, or damaged in its header.
  """
  path = segment_folder(folder, number) / _FILE
  data = path.read_bytes()
  lines = data.split(b'\n', 3)
  if len(lines) < 4 or not data.startswith(_MAGIC):
    raise ValueError(
        f'`folder` must hold the journal of a run, got {str(path)!r}, which is'
        ' another file, or has lost its first bytes.'
    )
  if lines[2] != str(zlib.crc32(lines[1])).encode():
    raise ValueError(f'{str(path)!r} is damaged in its header.')
  manifest, start = json.loads(lines[1])
  size = len(lines[3]) // RECORD.itemsize * RECORD.itemsize
  records = np.frombuffer(lines[3][:size], RECORD)
  return Segment(
      path,
      manifest,
      Start(*start),
      records,
      len(data) - len(lines[3]) + size,
  )


def intact(segments: list[Segment]) -> np.ndarray:
  """Returns the records of segments; warns of those that are damaged."""
  for segment in segments:
    if segment.is_damaged.any():
      warnings.warn(
          f'{int(segment.is_damaged.sum())} records of {str(segment.path)!r}'
          ' are damaged, and left out.',
          RuntimeWarning,
          stacklevel=3,
      )
  return np.concatenate([s.records[~s.is_damaged] for s in segments])


def last_segment(folder: pathlib.Path) -> int:
  """Returns the number of the last segment, or -1."""
  names = [
      path.parent.name.removeprefix(_SEGMENT)
      for path in folder.glob(f'{_SEGMENT}*/{_FILE}')
  ]
  later = [int(name) for name in names if name.isdecimal()]
  return max(later, default=0 if (folder / _FILE).exists() else -1)


def segment_folder(folder: pathlib.Path, number: int) -> pathlib.Path:
  """Returns the folder of a segment; that of the first is the run's."""
  return folder / f'{_SEGMENT}{number}' if number else folder


@contextlib.contextmanager
def naming(path: pathlib.Path) -> Iterator[None]:
  """Adds the name of a file to errors of the disk.

  Raises:
    OSError: If the body of the `with` statement does.
  """
  try:
    yield
  except OSError as error:
    text = error.strerror or str(error)
    raise OSError(error.errno, text, str(path)) from error


class Journal:
  """A segment of the journal that records are added to.

  Records survive a crash of the process once `write` returns, and a crash of
  the machine once `sync` does.
  """

  def __init__(
      self,
      folder: pathlib.Path,
      number: int,
      manifest: Mapping[str, Any],
      start: Start,
  ):
    """Opens a segment, which is created if it does not exist.

    Raises:
      OSError: If it cannot be written.
      ValueError: If it is another file, or damaged in its header.
    """
    path = segment_folder(folder, number) / _FILE
    if not path.exists():
      path.parent.mkdir(exist_ok=True)
      line = json.dumps([manifest, start], sort_keys=True).encode()
      new = path.with_suffix('.new')
      with naming(new):
        new.write_bytes(_MAGIC + line + f'\n{zlib.crc32(line)}\n'.encode())
      new.rename(path)
    self.segment = read_segment(folder, number)
    self._file = open(path, 'r+b', buffering=0)  # noqa: SIM115
    self._size = self.segment.num_bytes
    self._file.seek(self._size)
    records = self.segment.records
    # The number of records, including those before a restart.
    self.num_records = len(records)
    # The `crc` of the last record, or 0.
    self.last_crc = int(records[-1]['crc']) if self.num_records else 0

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
    data = record.tobytes()
    with naming(self.segment.path):
      try:
        # On a disk that fills up, one call writes a part.
        while data:
          data = data[self._file.write(data) :]
      except OSError:
        self._file.truncate(self._size)
        self._file.seek(self._size)
        raise
    self._size += RECORD.itemsize
    self.num_records += 1
    self.last_crc = int(record['crc'])

  def sync(self) -> None:
    """Waits until all records are on the disk."""
    os.fsync(self._file.fileno())

  def close(self) -> None:
    """Closes the file."""
    self._file.close()
