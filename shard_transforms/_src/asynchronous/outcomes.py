"""The outcomes of gradients: a report counts them, a journal records each."""

import collections
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import dataclasses
import enum
import itertools
import json
import os
import pathlib
import time
from typing import IO, Any, Literal, NamedTuple
import zlib

import numpy as np
import optax

JOURNAL_FILE = 'journal.bin'
_MAGIC = b'shard_transforms journal 6 '

_FIELDS = {
    '<i8': ('sequence', 'batch'),
    '<i4': ('local_step', 'global_step', 'worker', 'fate', 'merged'),
    '<f4': ('seconds',),
    '<u4': ('checksum', 'crc'),
}
RECORD = np.dtype([(name, t) for t in _FIELDS for name in _FIELDS[t]])

# What to do if a run cannot go on in its folder.
WAY_ON = (
    'Or start a new run in a new folder from the last checkpoint:'
    ' `train(..., start=read_checkpoint(folder, task, tx))`.'
)


class Outcome(enum.IntEnum):
  """The outcome of a gradient: the field `fate` of a journal."""

  ACCEPTED = 0
  DROPPED = 1  # Too old.
  LOST = 2  # Its worker died or hung.
  UPDATED = 3  # None: an update was made of fewer contributions than usual.


# What `on_progress` may return.
Command = Literal['params', 'stop'] | None


@dataclasses.dataclass(frozen=True)
class Report:
  """The progress of an asynchronous run.

  Args:
    global_step: Number of updates, including those before a restart.
    num_dropped: Number of gradients that were too old.
    num_lost: Number of gradients whose worker died or hung.
    num_recovered: Number of updates that were computed again from the journal
      when the run resumed.
    mean_age: Mean staleness of the accepted gradients, in updates.
    seconds: Seconds since the run was started or resumed.
    metrics: The metrics of the latest update, means over its gradients; empty
      before the first.
    params: The parameters, if `on_progress` asked for them; the last report has
      them in any case.
    worker_states: The states that workers keep, by their numbers, in the last
      report.

  `num_recovered` and `seconds` start at zero when a run resumes. The others
  include what came before; the counts do so once the run has caught up with its
  journal.

  Examples:
    >>> from shard_transforms import asynchronous
    >>> report = asynchronous.Report(global_step=30, num_dropped=10)
    >>> merge = 3  # As in `train`, without `grace`.
    >>> num_accepted = report.global_step * merge
    >>> print(report.num_dropped / (num_accepted + report.num_dropped))
    0.1
  """

  global_step: int
  num_dropped: int = 0
  num_lost: int = 0
  num_recovered: int = 0
  mean_age: float = 0.0
  seconds: float = 0.0
  metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
  params: Any = dataclasses.field(default=None, compare=False, repr=False)
  worker_states: Mapping[int, Any] = dataclasses.field(
      default_factory=dict, compare=False, repr=False
  )


class Result(NamedTuple):
  """The result of a run.

  Attributes:
    params: The parameters, in NumPy arrays.
    opt_state: A `DropStaleState` around the state of the optimizer, in NumPy
      arrays. `optax.tree_utils.tree_get` finds what is in it.
    report: How the run went.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> from shard_transforms import asynchronous
    >>> task = asynchronous.Task(
    ...     init=lambda: jnp.zeros(2),
    ...     gradient=lambda params, batch: (params - batch, {}),
    ...     batch=lambda number: jnp.ones(2))
    >>> result = asynchronous.train(
    ...     task, optax.sgd(1.0), num_updates=1, num_workers=1, staleness=0,
    ...     cluster=None)
    >>> print(result.params, result.report.global_step)
    [1. 1.] 1
  """

  params: Any
  opt_state: optax.OptState
  report: Report


class Tally:
  """Counts the outcomes and the seconds of a run."""

  def __init__(self):
    self._start = time.monotonic()
    self._counts = collections.Counter[int]()
    self._total_age = 0
    self.num_recovered = 0
    # `None` before the first update.
    self.metrics: Mapping[str, float] | None = None

  def add_all(self, records: np.ndarray) -> None:
    """Counts records."""
    for fate, step, local_step in records[
        ['fate', 'global_step', 'local_step']
    ]:
      self._counts[int(fate)] += 1
      if fate == Outcome.ACCEPTED:
        self._total_age += int(step - local_step)

  def seconds(self) -> float:
    """Returns the seconds since the run was started or resumed."""
    return time.monotonic() - self._start

  def report(self, global_step: int, **trees: Any) -> Report:
    """Returns the report at a global step, with some trees."""
    counts = self._counts
    mean_age = self._total_age / max(counts[Outcome.ACCEPTED], 1)
    lost = counts[Outcome.DROPPED], counts[Outcome.LOST], self.num_recovered
    times = mean_age, self.seconds(), self.metrics or {}
    return Report(global_step, *lost, *times, **trees)


def mean_metrics(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
  """Returns the mean of each metric over those that have it."""
  values = collections.defaultdict[str, list[float]](list)
  for name, value in itertools.chain(*(x.items() for x in metrics)):
    values[name].append(value)
  return {name: sum(found) / len(found) for name, found in values.items()}


def read_journal(folder: str | os.PathLike[str]) -> np.ndarray:
  """Returns the journal of an asynchronous run.

  It may be read during the run. An incomplete last record, as after a crash, is
  ignored.

  Args:
    folder: The folder of the run.

  Returns:
    A structured array, with a row for each gradient in the order in which they
    were decided on. The fields are `sequence` (0, 1, 2, ...), `batch`,
    `local_step` and `global_step` (the age is their difference), `worker`,
    `fate` (0 accepted, 1 dropped as too old, 2 lost with its worker), `merged`
    (how many gradients make the update that the row ends, or 0), `seconds`
    since the program was started, `checksum` of the gradient, and `crc` of the
    record. A row of fate 3 is not of a gradient: an update was made of those
    before it.

  Raises:
    FileNotFoundError: If there is no journal.
    ValueError: If it is another file, or damaged.

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
  return read_records(pathlib.Path(folder)).records


@dataclasses.dataclass(frozen=True)
class Journal:
  """A journal, as it is on the disk.

  Attributes:
    path: The file.
    manifest: What must be equal when the run resumes or is replayed.
    start: The global step of the checkpoint that the run starts with; `None`
      for the initial parameters.
    records: Its complete records.
    num_bytes: The size of the file up to the last complete record.
  """

  path: pathlib.Path
  manifest: Mapping[str, str]
  start: int | None
  records: np.ndarray
  num_bytes: int

  def last_crc(self, num_records: int) -> int:
    """Returns the `crc` of the last of some records, or 0."""
    return int(self.records['crc'][:num_records][-1:].sum())

  def check(self, num_records: int, last_crc: int) -> None:
    """Checks that it has the records of a checkpoint.

    Args:
      num_records: The number of records before the checkpoint.
      last_crc: The `crc` of the last of them, or 0.

    Raises:
      ValueError: If the checkpoint is of another run.
    """
    if self.last_crc(num_records) != last_crc:
      raise ValueError(
          'The checkpoints must be of the same run as the journal, got one that'
          f' was written after {num_records} records, which {str(self.path)!r}'
          ' does not have. Put back its journal, or name another folder.'
      )


def read_records(folder: pathlib.Path) -> Journal:
  """Returns the journal in a folder.

  Raises:
    FileNotFoundError: If there is none.
    ValueError: If it is another file, or damaged.
  """
  path = folder / JOURNAL_FILE
  header, _, data = path.read_bytes().partition(b'\n')
  crc, _, about = header.removeprefix(_MAGIC).partition(b' ')
  if crc != str(zlib.crc32(about)).encode():
    raise ValueError(
        f'`folder` must hold the journal of a run, got {str(path)!r}, which is'
        ' another file, written by another version of this package, or damaged'
        f' in its header. Put back a copy. {WAY_ON}'
    )
  manifest, start = json.loads(about)
  records = np.frombuffer(data, RECORD, len(data) // RECORD.itemsize)
  for i, record in enumerate(records):
    if record['sequence'] != i or record['crc'] != crc_of(record):
      raise ValueError(
          f'{str(path)!r} is damaged at record {i} of {len(records)}: its bits'
          f' have changed since they were written. Put back a copy. {WAY_ON}'
      )
  num_bytes = len(header) + 1 + records.nbytes
  return Journal(path, manifest, start, records, num_bytes)


def create_journal(
    folder: pathlib.Path, manifest: Mapping[str, str], start: int | None
) -> None:
  """Writes a journal without records.

  Raises:
    OSError: If it cannot be written.
  """
  about = json.dumps([manifest, start], sort_keys=True).encode()
  with replacing(folder / JOURNAL_FILE) as file:
    file.write(_MAGIC + b'%d %s\n' % (zlib.crc32(about), about))


def crc_of(record: np.void) -> int:
  """Returns the `crc` of a record: the checksum of its other fields."""
  return zlib.crc32(record.tobytes()[: -RECORD['crc'].itemsize])


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
