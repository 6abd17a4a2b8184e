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
from typing import IO, Any, NamedTuple
import warnings
import zlib

import numpy as np

_FILE = 'journal.bin'
_MAGIC = b'shard_transforms journal 3 '
_SEGMENT = 'segment_'

_FIELDS = {
    '<i8': ('sequence', 'batch'),
    '<i4': ('local_step', 'global_step', 'worker', 'attempt', 'fate'),
    '<f4': ('weight', 'seconds'),
    '<u4': ('checksum', 'crc'),
}
RECORD = np.dtype([(name, t) for t in _FIELDS for name in _FIELDS[t]])


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
  """Where a segment starts.

  Attributes:
    num_records: How many records of the segment before it still count.
    global_step: Its first global step.
    reason: Why the run began it. Without a reason, it starts with the initial
      parameters; otherwise, with a checkpoint.
  """

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
        record['sequence'] != i or record['crc'] != crc_of(record)
        for i, record in enumerate(self.records)
    ]
    return np.array(found, bool)

  @property
  def last_crc(self) -> int:
    """The `crc` of the last record, or 0."""
    return int(self.records['crc'][-1]) if len(self.records) else 0

  def cut(self, num_records: int | None) -> 'Segment':
    """Returns the segment up to a number of records."""
    return dataclasses.replace(self, records=self.records[:num_records])

  def check(self, num_records: int = 0, last_crc: int = 0) -> None:
    """Checks that it has the records of a checkpoint, and is intact after it.

    Args:
      num_records: The number of records before the checkpoint.
      last_crc: The `crc` of the last of them, or 0.

    Raises:
      ValueError: If the checkpoint is of another run, or a record is damaged.
    """
    if self.cut(num_records).last_crc != last_crc:
      raise ValueError(
          'The checkpoints must be of the same run as the journal, got one that'
          f' was written after {num_records} records, which {str(self.path)!r}'
          ' does not have. Put back its journal, or name another folder.'
      )
    for bad in num_records + np.flatnonzero(self.is_damaged[num_records:]):
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
  later = range(1, last_segment(folder) + 1)
  segments = [read_segment(folder, number) for number in (0, *later)]
  ends = [*(segment.start.num_records for segment in segments[1:]), None]
  return [s.cut(end) for s, end in zip(segments, ends, strict=True)]


def read_segment(folder: pathlib.Path, number: int) -> Segment:
  """Returns a segment.

  Raises:
    FileNotFoundError: If there is none.
    ValueError: If it is another file, or damaged in its header.
  """
  path = segment_folder(folder, number) / _FILE
  header, _, data = path.read_bytes().partition(b'\n')
  crc, _, about = header.removeprefix(_MAGIC).partition(b' ')
  if crc != str(zlib.crc32(about)).encode():
    raise ValueError(
        f'`folder` must hold the journal of a run, got {str(path)!r}, which is'
        ' another file, written by another version of this package, or damaged'
        ' in its header.'
    )
  manifest, start = json.loads(about)
  records = np.frombuffer(data, RECORD, len(data) // RECORD.itemsize)
  num_bytes = len(header) + 1 + records.nbytes
  return Segment(path, manifest, Start(*start), records, num_bytes)


def create_segment(
    folder: pathlib.Path, number: int, manifest: Mapping[str, Any], start: Start
) -> Segment:
  """Returns a new segment without records.

  Raises:
    OSError: If it cannot be written.
  """
  about = json.dumps([manifest, start], sort_keys=True).encode()
  with replacing(segment_folder(folder, number) / _FILE) as file:
    file.write(_MAGIC + b'%d %s\n' % (zlib.crc32(about), about))
  return read_segment(folder, number)


def crc_of(record: np.ndarray) -> int:
  """Returns the `crc` of a record: the checksum of its other fields."""
  return zlib.crc32(record.tobytes()[: -RECORD['crc'].itemsize])


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
  return folder / f'{_SEGMENT}{number}' if number > 0 else folder


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


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[IO[bytes]]:
  """Yields a new file, which takes its place once it is on the disk.

  Raises:
    OSError: If it cannot be written; nothing is then changed.
  """
  # After a call that was killed, the next one replaces it.
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
      # Not every file system can.
      with contextlib.suppress(OSError):
        os.fsync(folder)
      os.close(folder)
    finally:
      new.unlink(missing_ok=True)
