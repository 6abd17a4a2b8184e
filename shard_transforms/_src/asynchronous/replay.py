"""`replay`: computes an asynchronous run again from its journal."""

import functools
import math
import os
import pathlib

import numpy as np
import optax

from shard_transforms._src.asynchronous import in_flight
from shard_transforms._src.asynchronous import job
from shard_transforms._src.asynchronous import journal
from shard_transforms._src.asynchronous import manifest
from shard_transforms._src.asynchronous import outcomes
from shard_transforms._src.asynchronous import parameter_server
from shard_transforms._src.asynchronous import roll_forward
from shard_transforms._src.asynchronous import task as task_lib
from shard_transforms._src.asynchronous import train
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
) -> outcomes.Result:
  """Computes an asynchronous run again from its journal, to the bit.

  It starts from the initial parameters, and applies the accepted gradients in
  the order of the journal. Each is computed at the same parameters as in the
  run, and must have the same bits. Checkpoints are not read.

  Args:
    folder: The folder of the run, which need not have ended.
    task: The task of the run.
    tx: Its optimizer.
    until: The number of accepted updates after which to stop; `None` goes to
      the end of the journal.
    num_workers: Number of processes of Ray on this machine that compute the
      gradients; 0 computes them in this process, without Ray.

  Returns:
    The parameters, the state, and how the run went.

  Raises:
    FileNotFoundError: If there is no journal in `folder`.
    ImportError: If `num_workers` is positive and Ray is not installed.
    OSError: If `num_workers` is positive and the system is not POSIX.
    RuntimeError: If a function of the task fails, or workers die or hang three
      times in one batch.
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
  records = _records_until(journal.read_journal(path), until)
  # Workers that take turns never hang.
  patience = math.inf
  if num_workers:
    train.require('ray', '`num_workers`')
    patience = _PATIENCE
  return job.run(
      functools.partial(_drive, task, tx, records, path, patience),
      task,
      max(num_workers, 1),
      cluster='local' if num_workers else None,
  )


def _drive(task, tx, records, folder, patience, workers):
  """Replays the records of a journal, and yields the result.

  Raises:
    ValueError: If the journal is of another task, optimizer or machine.
  """
  tally = outcomes.Tally()
  params = task_lib.init_params(task)
  server = parameter_server.ParameterServer(tx, params)
  expected = manifest.manifest(params, server)
  manifest.check(journal.read_manifest(folder), expected, folder)
  limits = in_flight.TimeLimits(patience, in_flight.durations(records))
  for _ in roll_forward.roll_forward(
      server, records, workers, limits, _MAX_ATTEMPTS
  ):
    pass
  tally.add_all(records)
  report = tally.report(server.global_step)
  yield outcomes.Result(server.params, server.state, report)


def _records_until(records, until):
  """Returns the records up to an accepted one.

  Raises:
    TypeError: If `until` is no integer.
    ValueError: If there is no such record.
  """
  accepted = np.flatnonzero(records['fate'] == outcomes.Outcome.ACCEPTED)
  if until is None:
    return records
  until = arguments.as_at_least('until', until, 0)
  if until > len(accepted):
    raise ValueError(
        f'`until` must be at most the {len(accepted)} updates of the journal,'
        f' got {until}.'
    )
  return records[: accepted[until - 1] + 1] if until else records[:0]
