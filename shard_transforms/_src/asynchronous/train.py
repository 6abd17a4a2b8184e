"""`train`, `replay` and `read_checkpoint`: what users call."""

from collections.abc import Callable
from collections.abc import Mapping
import functools
import os
from typing import Any, Literal
import warnings

import numpy as np
import optax

from shard_transforms._src.asynchronous import driver
from shard_transforms._src.asynchronous import job
from shard_transforms._src.asynchronous import learner
from shard_transforms._src.asynchronous import options as options_lib
from shard_transforms._src.asynchronous import outcomes
from shard_transforms._src.asynchronous import run_folder
from shard_transforms._src.asynchronous import task as task_lib


def train(
    task: task_lib.Task,
    tx: optax.GradientTransformation | learner.Learner,
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
    start: outcomes.Result | None = None,
    resources: Mapping[str, Any] | None = None,
    on_progress: Callable[[outcomes.Report], outcomes.Command] | None = None,
) -> outcomes.Result:
  r"""Trains asynchronously, by workers that do not wait for each other.

  Each worker computes a gradient at the parameters that it was given last. When
  the gradient comes back, `drop_stale(staleness)` decides whether it is
  accepted, by its age in updates:

  .. math:: \text{global step} - \text{local step} \le \text{staleness}

  Once `merge` gradients are accepted, `tower_reduce(merge, tx)` applies their
  mean, and the global step grows by one. A metric named `weight` is the weight
  of a gradient. The state is that of `drop_stale(staleness, tx)`, to rounding.

  With a `folder`, the outcome of each gradient is written to a journal before
  the new parameters are published. Parameters and state are written to a
  checkpoint at intervals. The same call resumes where the last one ended, even
  if it was killed: no accepted update is lost, and no batch counts twice.
  `replay` computes the same bits from the journal.

  A worker that dies or hangs is replaced, and its batch computed again. With a
  folder, the *driver* is replaced, too: the process that holds the parameters.
  An exception of a function of the task ends the run.

  Args:
    task: The functions of the training.
    tx: The optimizer, or a `Learner`. An optimizer gets the extra argument
      `local_step`, that of the oldest gradient of an update. If it uses
      `read_params` as `compensate_delay` does, `merge` must be 1, and it gets
      the parameters that the gradient was computed from; these are then kept
      until that gradient is back.
    num_updates: Number of updates after which the run ends.
    num_workers: Number of workers.
    staleness: The age up to which gradients are accepted, in updates; `None`
      for any age.
    merge: How many gradients make an update. With as many as workers, few wait,
      and most gradients are at most one update old.
    group: How many batches in a row belong together. Their gradients wait for
      each other; all of them are accepted, or all of them dropped.
    grace: Seconds after the first gradient of an update after which the update
      is made of those that are there; `None` waits for `merge` of them. What
      comes too late for several updates is dropped.
    pace: Whether a worker waits if its gradient could become too old because of
      the updates of the others. Then no gradient is dropped, except with
      `grace`.
    time_limit: The seconds in which a worker must compute a gradient; the first
      includes compilation. A worker that takes longer counts as hung. Workers
      of this process have no limit.
    cluster: `'local'` starts Ray on this machine, on loopback, and stops it at
      the end of the call. `'host:port'` joins a Ray cluster, on whose nodes
      this package and the modules of the task must be installed. `None`
      computes in this process, without Ray: the workers take turns.
    folder: The folder of the journal and the checkpoints, on this host. Each
      run needs its own. `None` keeps nothing.
    save_every: Number of updates between checkpoints, at least. Before each
      checkpoint, only batches that complete an update are assigned, or none
      with `grace`, until all gradients in flight are back.
    start: A `Result` of the same parameters and kind of optimizer: the run
      starts with its parameters, state and global step, unless `folder` has a
      journal. The first batch has the number of the global step times `merge`.
    resources: The options of the Ray actor of a worker; by default
      `{'num_cpus': 1}`.
    on_progress: Takes a `Report`, at most fifty times a second and at the end,
      after the first update. If it returns `'params'`, the next report comes at
      once and has the parameters. If it returns `'stop'`, the run ends with its
      result; with a folder, the same call goes on. Otherwise, it returns
      `None`.

  Returns:
    The parameters, the state, and a report.

  Raises:
    ConnectionError: If the cluster cannot be reached within two minutes.
    ImportError: If `cluster` needs Ray, and it is not installed: the extra
      `ray` has it.
    OSError: If `folder` cannot be written; if `folder` or `cluster` is used on
      a system that is not POSIX.
    RuntimeError: If a function of the task raises an exception, or does not
      return a gradient; if a batch loses five workers; if no worker starts; if
      the driver dies without a folder, or repeatedly.
    TypeError: If an argument is of the wrong kind.
    ValueError: If an argument has a wrong value; if `folder` is of another
      task, optimizer or machine, is damaged or in use; if nodes have other
      versions of Python, packages or modules.

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
  given = dict(locals())
  options_lib.check_kinds(on_progress=on_progress)
  del given['on_progress']
  options = options_lib.Options(**given)
  _warn_if_idle(options)
  return job.run(options, functools.partial(driver.drive, options), on_progress)


def _warn_if_idle(options):
  """Warns if pacing never lets all workers compute."""
  most = (options.staleness + 1) * options.merge
  if options.pace and most < options.num_workers:
    warnings.warn(
        f'With `staleness={options.staleness}` and `merge={options.merge}`, at'
        f' most {most} of {options.num_workers} workers can compute at a time.'
        f' Merge as many gradients: `merge={options.num_workers}`.',
        stacklevel=3,
    )


def replay(
    folder: str | os.PathLike[str],
    task: task_lib.Task,
    tx: optax.GradientTransformation | learner.Learner,
) -> outcomes.Result:
  """Computes an asynchronous run again from its journal, to the bit.

  It runs in this process, without Ray. It starts from the initial parameters,
  and applies the accepted gradients in the order of the journal. Each is
  computed at the same parameters as in the run, and must have the same bits. It
  reads no checkpoint, except the `start` of the run, if there was one.

  Args:
    folder: The folder of the run, which need not have ended.
    task: The task of the run.
    tx: Its optimizer.

  Returns:
    The parameters, the state, and how the run went.

  Raises:
    FileNotFoundError: If there is no journal in `folder`.
    OSError: If the system is not POSIX.
    RuntimeError: If a function of the task raises an exception.
    TypeError: If an argument is of the wrong kind.
    ValueError: If the journal is damaged, or of another task, optimizer or
      machine; or a gradient has other bits.

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
  journal = outcomes.read_records(options.folder)
  return job.run(options, functools.partial(driver.redrive, options, journal))


def read_checkpoint(
    folder: str | os.PathLike[str],
    task: task_lib.Task,
    tx: optax.GradientTransformation | learner.Learner,
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
  options = options_lib.Options(task, tx, folder=folder)
  workers = task_lib.LocalWorkers(options.task, 1)
  fresh = driver.Driver(options, workers).like
  found = run_folder.read_latest(options.folder, fresh)
  if found is None:
    raise FileNotFoundError(
        f'`folder` must have an intact checkpoint, got {str(options.folder)!r}.'
    )
  _warn_of_hyperparams(found.trees['state'], fresh['state'])
  params, state, states = found.trees.values()
  also = {'metrics': dict(found.metrics), 'worker_states': states}
  report = outcomes.Report(found.global_step, **also)
  return outcomes.Result(params, state, report)


def _warn_of_hyperparams(saved, fresh):
  """Warns of values of `inject_hyperparams` that the optimizer has not."""
  get = optax.tree_utils.tree_get_all_with_path
  pairs = zip(get(saved, 'hyperparams'), get(fresh, 'hyperparams'), strict=True)
  scheduled = {name for _, x in get(fresh, 'hyperparams_states') for name in x}
  for (_, old), (_, new) in pairs:
    for name in sorted(new.keys() - scheduled):
      if np.any(old[name] != new[name]):
        warnings.warn(
            f'`{name}` of the checkpoint, {old[name]}, stays in force, got'
            f' {new[name]} from `tx`. Set it in the result by'
            f' `optax.tree_utils.tree_set(opt_state, {name}=...)`.',
            stacklevel=3,
        )
