"""`replay`: computes an asynchronous run again from its journal."""

from collections.abc import Iterator
import functools
import math
import os
import pathlib
import time

import numpy as np
import optax

from shard_transforms._src.asynchronous import journal as journal_lib
from shard_transforms._src.asynchronous import parameter_server
from shard_transforms._src.asynchronous import patience as patience_lib
from shard_transforms._src.asynchronous import program
from shard_transforms._src.asynchronous import report
from shard_transforms._src.asynchronous import roll_forward
from shard_transforms._src.asynchronous import run_header
from shard_transforms._src.asynchronous import task as task_lib
from shard_transforms._src.asynchronous import train
from shard_transforms._src.asynchronous import workers as workers_lib
from shard_transforms._src.base import arguments

# The defaults of `train`.
_PATIENCE = 4.0
_MAX_ATTEMPTS = 3


def replay(
    folder: str | os.PathLike[str],
    task: task_lib.Task,
    tx: optax.GradientTransformation,
    *,
    until: int | None = None,
    num_workers: int = 0,
) -> report.Result:
  """Computes an asynchronous run again from its journal, to the bit.

  Starts from the initial parameters and applies the accepted gradients in the
  order of the journal, each computed at the parameters that it was computed at
  in the run. Each must have the same bits. Checkpoints are not read.

  Args:
    folder: The folder of the run, which may still go on.
    task: The task of the run.
    tx: Its optimizer.
    until: The number of accepted updates after which to stop; `None` goes to
      the end of the journal.
    num_workers: Number of workers, processes of Ray on this machine, that
      compute the gradients; 0 computes them in this process, without Ray.

  Returns:
    The parameters, the state, and how the run went.

  Raises:
    FileNotFoundError: If there is no journal in `folder`.
    ImportError: If Ray is needed and not installed.
    RuntimeError: If a function of the task fails, or a worker dies or hangs
      three times in one batch.
    TypeError: If an argument is of the wrong kind.
    ValueError: If the journal is damaged, of another task, optimizer or
      machine, or has fewer updates than `until`; or a gradient has other bits.

  Examples:
    >>> import tempfile
    >>> import jax.numpy as jnp
    >>> import numpy as np
    >>> import optax
    >>> from shard_transforms import asynchronous
    >>> task = asynchronous.Task(
    ...     init=lambda: jnp.zeros(3),
    ...     gradient=lambda params, batch: (params - batch, {}),
    ...     batch=lambda number: jnp.full(3, number % 2, jnp.float32))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...   first = asynchronous.train(
    ...       task, optax.adam(0.1), num_updates=20, num_workers=3,
    ...       staleness=2, cluster=None, folder=folder)
    ...   again = asynchronous.replay(folder, task, optax.adam(0.1))
    >>> print(np.array_equal(first.params, again.params))
    True
  """
  train.check_task(task, tx)
  num_workers = arguments.as_at_least('num_workers', num_workers, 0)
  path = pathlib.Path(folder).absolute()
  records = _records_until(journal_lib.read_journal(path), until)
  if num_workers:
    train.require('ray', '`num_workers`')
    make = functools.partial(Replay, task, tx, records, path, _PATIENCE)
    job = program.Job(make, task, num_workers, 'local', None, True)
    return program.run(job, None)
  # Workers that take turns never hang.
  replayed = Replay(task, tx, records, path, math.inf)
  for _ in replayed.run(workers_lib.LocalWorkers(task, 1)):
    pass
  return replayed.result()


class Replay:
  """Replays the records of a journal, in the place of a `Holder`."""

  def __init__(
      self,
      task: task_lib.Task,
      tx: optax.GradientTransformation,
      records: np.ndarray,
      folder: pathlib.Path,
      patience: float,
  ):
    """Starts from the initial parameters of the run.

    Raises:
      ValueError: If the journal is of another task, optimizer or machine.
    """
    self._start = time.monotonic()
    self._records = records
    self._patience = patience_lib.Patience(
        patience, patience_lib.durations(records)
    )
    self._tally = report.Tally()
    self._tally.add_all(records)
    params = run_header.init_params(task)
    self._server = parameter_server.ParameterServer(tx, params)
    journal_lib.check_header(
        journal_lib.read_header(folder),
        run_header.header(params, self._server),
        folder,
    )

  def run(self, workers: workers_lib.Workers) -> Iterator[report.Report]:
    """Replays to the end, and yields nothing."""
    for _ in roll_forward.roll_forward(
        self._server, self._records, workers, self._patience, _MAX_ATTEMPTS
    ):
      yield from ()

  def result(self) -> report.Result:
    """Returns the result of the run."""
    return report.Result(
        self._server.params, self._server.state, self._report()
    )

  def close(self) -> None:
    """Does nothing: no file is open."""

  def _report(self):
    return self._tally.report(
        self._server.global_step, time.monotonic() - self._start
    )


def _records_until(records, until):
  """Returns the records up to an accepted one.

  Raises:
    TypeError: If `until` is no integer.
    ValueError: If there is no such record.
  """
  accepted = np.flatnonzero(records['fate'] == journal_lib.Fate.ACCEPTED)
  if until is None:
    return records
  until = arguments.as_at_least('until', until, 0)
  if until > len(accepted):
    raise ValueError(
        f'`until` must be at most the {len(accepted)} updates of the journal,'
        f' got {until}.'
    )
  return records[: accepted[until - 1] + 1] if until else records[:0]
