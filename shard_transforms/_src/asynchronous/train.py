"""`train`, `replay` and `read_checkpoint`, the public functions."""

from collections.abc import Callable
from collections.abc import Mapping
import functools
import os
from typing import Any, Literal
import warnings

import numpy as np
import optax

from shard_transforms._src.asynchronous import driver
from shard_transforms._src.asynchronous import driver_process
from shard_transforms._src.asynchronous import journal as journal_lib
from shard_transforms._src.asynchronous import options as options_lib
from shard_transforms._src.asynchronous import report
from shard_transforms._src.asynchronous import run_folder
from shard_transforms._src.asynchronous import task as task_lib


def train(
    task: task_lib.Task,
    tx: optax.GradientTransformation | task_lib.Learner,
    *,
    num_updates: int,
    num_workers: int,
    staleness: int | None,
    merge: int = 1,
    group: int = 1,
    grace: float | None = None,
    pace: bool = True,
    time_limit: float = 600.0,
    cluster: Literal['local'] | str | None = 'local',
    folder: str | os.PathLike[str] | None = None,
    save_every: int = 100,
    start: report.Result | None = None,
    resources: Mapping[str, Any] | None = None,
    on_progress: Callable[[report.Report], report.Command] | None = None,
) -> report.Result:
  r"""Trains asynchronously, with workers that do not wait for each other.

  Each worker computes gradients at the latest published parameters. When a
  gradient comes back, `drop_stale(staleness)` accepts or drops it depending on
  its age in updates:

  .. math:: \text{global step} - \text{local step} \le \text{staleness}

  Once `merge` gradients are accepted, `tower_reduce(merge, tx)` applies their
  mean, and the global step grows by one. A metric named `weight` is the weight
  of a gradient. The state equals that of `drop_stale(staleness, tx)`, up to
  rounding.

  With a `folder`, the outcome of each gradient is written to a journal before
  the new parameters are published. Parameters and state are written to a
  checkpoint at intervals. The same call resumes where the previous one ended,
  even if that was killed: no accepted update is lost, and no batch counts
  twice. `replay` computes the same bits from the journal.

  A worker that dies or hangs is replaced, and its batch is computed again. With
  a folder, the *driver*, the process that holds the parameters, is also
  replaced. An exception in a function of the task ends the run.

  Args:
    task: The functions of the training.
    tx: The optimizer, or a `Learner`. An optimizer receives the extra argument
      `local_step`, the local step of the oldest gradient of the update. If the
      optimizer uses `read_params`, like `compensate_delay`, `merge` must be 1.
      It then receives the parameters at which the gradient was computed, which
      are kept until that gradient is back.
    num_updates: Number of updates after which the run ends.
    num_workers: Number of workers.
    staleness: The largest age of an accepted gradient, in updates; `None` for
      any age.
    merge: Number of gradients that make an update. If it equals the number of
      workers, few workers wait, and most gradients are at most one update old.
    group: Number of consecutive batches that belong together. Their gradients
      wait for each other, and are accepted or dropped as a whole.
    grace: Seconds after the first gradient of an update, after which the update
      is made even from fewer than `merge` gradients; `None` always waits for
      `merge` gradients. A gradient that is late by several updates may be
      dropped.
    pace: Whether a worker waits if its gradient could become too old through
      the updates of other workers. No gradient is then dropped, except with
      `grace`.
    time_limit: Seconds that a worker may take for a gradient; the first
      gradient includes compilation. A worker that takes longer counts as hung.
      Not used with `cluster=None`.
    cluster: `'local'` starts Ray on this machine, on loopback, and stops it at
      the end of the call. `'host:port'` joins a Ray cluster, on whose nodes
      this package and the modules of the task must be installed. With `None`,
      the workers compute one after the other in this process, without Ray.
    folder: The folder of the journal and the checkpoints, on this host. Each
      run needs its own folder. With `None`, nothing is written.
    save_every: Minimum number of updates between checkpoints. Before a
      checkpoint, only batches that complete an update are assigned, or none
      with `grace`, until all gradients in flight are back.
    start: A `Result` with the same parameters and type of optimizer. The run
      starts with its parameters, state and global step, unless `folder` has a
      journal. The first batch has the number of the global step times `merge`.
    resources: The options of the Ray actor of a worker; by default
      `{'num_cpus': 1}`.
    on_progress: Takes a `Report`, at most fifty times per second, from the
      first update on and at the end. If it returns `'params'`, the next report
      comes at once and has the parameters. If it returns `'stop'`, the run ends
      with its result; with a folder, the same call continues it. Otherwise, it
      returns `None`.

  Returns:
    A `Result`: the parameters, the state, and a report.

  Raises:
    ConnectionError: If the cluster cannot be reached within two minutes.
    ImportError: If `cluster` needs Ray, and Ray is not installed. Install the
      extra `ray`.
    OSError: If `folder` cannot be written, or if `folder` or `cluster` is used
      on a system that is not POSIX.
    RuntimeError: If a function of the task raises an exception or returns a
      wrong result, if a batch loses five workers, if no worker starts, or if
      the driver dies without a folder or repeatedly.
    TypeError: If an argument has the wrong type.
    ValueError: If an argument has a wrong value, if `folder` belongs to another
      task, optimizer or machine, is damaged, or is in use, or if nodes have
      other versions of Python or packages.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> from shard_transforms import asynchronous
    >>> task = asynchronous.Task(
    ...     init=lambda: jnp.zeros(2),
    ...     gradient=lambda params, batch: (params - batch, {}),
    ...     batch=lambda number: jnp.full(2, number % 2, jnp.float32))
    >>> params, state, report = asynchronous.train(
    ...     task, optax.sgd(0.1), num_updates=100, num_workers=4, merge=4,
    ...     staleness=4, cluster=None)
    >>> print(params.round(1), state.global_step, report.num_dropped)
    [0.5 0.5] 100 0

  References:
    Ho et al., More Effective Distributed ML via a Stale Synchronous Parallel
    Parameter Server, 2013;
    `tf.contrib.opt.DropStaleGradientOptimizer` of TensorFlow 1.15.
  """
  arguments = dict(locals())
  options_lib.check_types(on_progress=on_progress)
  del arguments['on_progress']
  options = options_lib.Options(**arguments)
  _warn_if_idle(options)
  drive = functools.partial(driver.drive, options)
  return driver_process.run(options, drive, on_progress)


def _warn_if_idle(options):
  """Warns if pacing keeps some workers idle at all times."""
  limit = (options.staleness + 1) * options.merge
  if options.pace and limit < options.num_workers:
    warnings.warn(
        f'With `staleness={options.staleness}` and `merge={options.merge}`, at'
        f' most {limit} of {options.num_workers} workers can compute at a time.'
        ' Merge as many gradients as there are workers:'
        f' `merge={options.num_workers}`.',
        stacklevel=3,
    )


def replay(
    folder: str | os.PathLike[str],
    task: task_lib.Task,
    tx: optax.GradientTransformation | task_lib.Learner,
) -> report.Result:
  """Computes an asynchronous run again from its journal, with the same bits.

  The replay runs in this process, without Ray. It starts from the initial
  parameters, and applies the accepted gradients in the order of the journal.
  Each gradient is computed at the same parameters as in the run, and must have
  the same bits. Checkpoints are not read, except the `start` of the run.

  Args:
    folder: The folder of the run, which need not have ended.
    task: The task of the run.
    tx: The optimizer or the `Learner` of the run.

  Returns:
    A `Result`: the parameters, the state, and a report.

  Raises:
    FileNotFoundError: If there is no journal in `folder`.
    OSError: If the system is not POSIX.
    RuntimeError: If a function of the task raises an exception.
    TypeError: If an argument has the wrong type.
    ValueError: If the journal is damaged or belongs to another task, optimizer
      or machine, or if a gradient has other bits.

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
  options = options_lib.Options(task=task, tx=tx, folder=folder)
  journal = journal_lib.read(options.folder)
  drive = functools.partial(driver.redrive, options, journal)
  return driver_process.run(options, drive)


def read_checkpoint(
    folder: str | os.PathLike[str],
    task: task_lib.Task,
    tx: optax.GradientTransformation | task_lib.Learner,
) -> report.Result:
  """Returns the latest checkpoint of an asynchronous run, for any machine.

  The checkpoint may be read during the run. Nothing is computed again, so that
  later updates in the journal are not included. Continue in plain JAX, where
  `opt_state.inner_state` is the state of `tx`, or by `train(..., start=...)`.

  Args:
    folder: The folder of the run.
    task: A task with parameters of the same names, shapes and dtypes.
    tx: An optimizer whose state has the same names, shapes and dtypes.

  Returns:
    A `Result`: the parameters, the state, and a report with only the global
    step, the metrics and the states of the workers.

  Raises:
    FileNotFoundError: If there is no intact checkpoint.
    TypeError: If an argument has the wrong type.
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
  options = options_lib.Options(task, tx, folder=folder)
  workers = task_lib.LocalWorkers(options.task, 1)
  initial = driver.Driver(options, workers).like
  checkpoint = run_folder.read_latest(options.folder, initial)
  if checkpoint is None:
    raise FileNotFoundError(
        f'There is no intact checkpoint in {str(options.folder)!r}. Pass the'
        ' `folder` of a run that has reached its first checkpoint.'
    )
  _warn_of_hyperparams(checkpoint.trees['state'], initial['state'])
  params, state, worker_states = checkpoint.trees.values()
  last_report = report.Report(
      checkpoint.global_step,
      metrics=dict(checkpoint.metrics),
      worker_states=worker_states,
  )
  return report.Result(params, state, last_report)


def _warn_of_hyperparams(saved, initial):
  """Warns of hyperparameters that differ between checkpoint and optimizer."""
  get = optax.tree_utils.tree_get_all_with_path
  pairs = zip(
      get(saved, 'hyperparams'), get(initial, 'hyperparams'), strict=True
  )
  states = get(initial, 'hyperparams_states')
  scheduled = {name for _, x in states for name in x}
  for (_, old), (_, new) in pairs:
    for name in sorted(new.keys() - scheduled):
      if np.any(old[name] != new[name]):
        warnings.warn(
            f'The result has `{name}={old[name]}` of the checkpoint, not'
            f' `{name}={new[name]}` of `tx`. To change it, call'
            f' `optax.tree_utils.tree_set(opt_state, {name}=...)`.',
            stacklevel=3,
        )
