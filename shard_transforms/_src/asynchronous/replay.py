"""What reads the folder of a run: `replay` and `read_checkpoint`."""

import functools
import os
import pathlib

import numpy as np
import optax

from shard_transforms._src.asynchronous import checkpoints
from shard_transforms._src.asynchronous import job
from shard_transforms._src.asynchronous import journal
from shard_transforms._src.asynchronous import options as options_lib
from shard_transforms._src.asynchronous import outcomes
from shard_transforms._src.asynchronous import parameter_server
from shard_transforms._src.asynchronous import recovery
from shard_transforms._src.asynchronous import task as task_lib
from shard_transforms._src.base import arguments


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
  run, and must have the same bits. Checkpoints are not read, but for one: a run
  with `start`, or a later segment of the journal (see `on_change` of `train`),
  starts from the checkpoint at which it begins. Only one segment is computed.

  Args:
    folder: The folder of the run, which need not have ended.
    task: The task of the run.
    tx: Its optimizer.
    until: The global step at which to stop, in the segment that leads to it;
      `None` goes to the end of the last segment.
    num_workers: Number of processes of Ray on this machine that compute the
      gradients; 0 computes them in this process, without Ray.

  Returns:
    The parameters, the state, and how the run went.

  Raises:
    FileNotFoundError: If there is no journal in `folder`.
    ImportError: If `num_workers` is positive and Ray is not installed.
    OSError: If `num_workers` is positive and the system is not POSIX.
    RuntimeError: If a function of the task fails, or workers die or hang, three
      times in one batch.
    TypeError: If an argument is of the wrong kind.
    ValueError: If the journal is damaged, of another task, optimizer or
      machine, or has fewer updates than `until`; or a gradient has other bits;
      or there are fewer devices than the `driver_devices` of the run.

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
  options_lib.check_task(task, tx)
  num_workers = arguments.as_at_least('num_workers', num_workers, 0)
  path = pathlib.Path(folder).expanduser().absolute()
  segments = _until(journal.read_segments(path), until)
  devices = segments[-1].manifest.get(parameter_server.DEVICES, 1)
  options = options_lib.Options(
      num_updates=1,
      cluster='local' if num_workers else None,
      driver_devices=int(devices),
  )
  if num_workers:
    options_lib.require_ray('`num_workers`')
  drive = functools.partial(recovery.redrive, task, tx, options, segments)
  return job.run(job.Job(drive, task, max(num_workers, 1), options.cluster))


def read_checkpoint(
    folder: str | os.PathLike[str],
    task: task_lib.Task,
    tx: optax.GradientTransformation,
) -> outcomes.Result:
  """Returns the latest checkpoint of an asynchronous run, for any machine.

  It may be read during the run. Nothing is computed again: what the journal has
  after the checkpoint is not in it. Go on from it in plain JAX, where
  `opt_state.inner_state` is the state of `tx`, or by `train(..., start=...)`.

  Args:
    folder: The folder of the run.
    task: A task with parameters of the same names, shapes and dtypes.
    tx: An optimizer whose state has the same names, shapes and dtypes.

  Returns:
    The parameters, the state, and a report of the global step and the metrics.

  Raises:
    FileNotFoundError: If there is no intact checkpoint.
    TypeError: If an argument is of the wrong kind.
    ValueError: If the parameters or the state have other leaves.

  Examples:
    >>> import tempfile
    >>> import jax.numpy as jnp
    >>> import optax
    >>> from shard_transforms import asynchronous
    >>> task = asynchronous.Task(
    ...     init=lambda: jnp.zeros(3),
    ...     gradient=lambda params, batch: (params - batch, {}),
    ...     batch=lambda number: jnp.full(3, number % 2, jnp.float32))
    >>> tx = optax.sgd(0.5)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...   _ = asynchronous.train(
    ...       task, tx, num_updates=3, num_workers=1, staleness=0,
    ...       cluster=None, folder=folder)
    ...   params, state, report = asynchronous.read_checkpoint(folder, task, tx)
    >>> print(params, report.global_step)
    [0.25 0.25 0.25] 3
  """
  options_lib.check_task(task, tx)
  path = pathlib.Path(folder).expanduser().absolute()
  server = parameter_server.ParameterServer(
      tx, task_lib.init_params(task), model_state=task.model_state
  )
  found = None
  # Those of an earlier segment are better than none.
  for number in range(max(journal.last_segment(path), 0), -1, -1):
    segment = journal.segment_folder(path, number)
    found = found or checkpoints.read_latest(segment, server.trees())
  if found is None:
    raise FileNotFoundError(
        f'`folder` must have an intact checkpoint, got {str(path)!r}.'
    )
  report = outcomes.Report(found.global_step, metrics=dict(found.metrics))
  return outcomes.Result(found.trees['params'], found.trees['state'], report)


def _until(segments, until):
  """Returns segments up to a global step; the last is cut off there.

  Raises:
    TypeError: If `until` is no integer.
    ValueError: If there is no such step.
  """
  if until is None:
    return segments
  first = segments[0].start.global_step
  until = arguments.as_at_least('until', until, first)
  while len(segments) > 1 and until <= segments[-1].start.global_step:
    segments = segments[:-1]
  *before, last = segments
  is_accepted = last.records['fate'] == outcomes.Outcome.ACCEPTED
  num_updates = last.start.global_step + int(is_accepted.sum())
  if until > num_updates:
    raise ValueError(
        f'`until` must be at most the {num_updates} updates of the journal, got'
        f' {until}.'
    )
  is_accepted &= last.records['global_step'] < until
  return [*before, last.cut(max(np.flatnonzero(is_accepted) + 1, default=0))]
