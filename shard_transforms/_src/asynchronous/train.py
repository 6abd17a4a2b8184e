"""`train`: an optimizer over workers that do not wait for each other."""

from collections.abc import Callable
from collections.abc import Mapping
import functools
import os
import pathlib
from typing import Any, Literal

import optax

from shard_transforms._src.asynchronous import job
from shard_transforms._src.asynchronous import options as options_lib
from shard_transforms._src.asynchronous import outcomes
from shard_transforms._src.asynchronous import recovery
from shard_transforms._src.asynchronous import task as task_lib


def train(
    task: task_lib.Task,
    tx: optax.GradientTransformation,
    *,
    num_updates: int,
    num_workers: int,
    staleness: int | None,
    pace: bool = True,
    patience: float = 4.0,
    cluster: Literal['local'] | str | None = 'local',
    folder: str | os.PathLike[str] | None = None,
    save_every: int = 100,
    save_seconds: float = 5.0,
    on_change: options_lib.OnChange = 'raise',
    start: outcomes.Result | None = None,
    on_drop: options_lib.OnDrop = 'again',
    max_attempts: int = 3,
    weight: Callable[[int], float] | None = None,
    resources: Mapping[str, Any] | None = None,
    driver_devices: int = 1,
    on_progress: Callable[[outcomes.Report], outcomes.Command] | None = None,
) -> outcomes.Result:
  r"""Trains asynchronously, by workers that do not wait for each other.

  Each worker computes a gradient at the parameters that it was given last. When
  the gradient comes back, it is accepted if its age is at most `staleness`:

  .. math:: \text{global step} - \text{local step} \le \text{staleness}

  Then `tx` applies it, and the global step grows by one. The state is that of
  `drop_stale(staleness, tx)`, to rounding.

  With a `folder`, the outcome of each gradient is written to a journal before
  the new parameters are published. Parameters and state are written to a
  checkpoint at intervals. The same call resumes where the last one ended, even
  if it was killed: no accepted update is lost, and no batch counts twice. A
  worker that dies is always replaced. With a folder, so is the *driver*, the
  process that holds the parameters. `replay` computes the same bits from the
  journal.

  Args:
    task: The functions of the training.
    tx: The optimizer. It gets the extra argument `local_step` and, if it uses
      `read_params` as `compensate_delay` does, the parameters that the gradient
      was computed from; these are then kept until that gradient is back.
    num_updates: Number of accepted updates after which the run ends.
    num_workers: Number of workers.
    staleness: The age up to which gradients are accepted, in steps; `None` for
      any age.
    pace: Whether a worker waits if its gradient could become too old because of
      the updates of the others. Then no gradient is dropped.
    patience: A gradient is late after this many times the median duration:
      another worker gets its batch. Each further attempt at a batch has twice
      the time. A worker that takes five times as long, and at least 5 seconds,
      is replaced. The first gradient of a worker may take two minutes longer,
      because it includes compilation.
    cluster: `'local'` starts Ray on this machine, on loopback, and stops it at
      the end of the call. `'host:port'` joins a Ray cluster, on whose nodes
      this package and the modules of the task must be installed. `None`
      computes in this process, without Ray: the workers take turns.
    folder: The folder of the journal and the checkpoints, on this host. Each
      run needs its own. `None` keeps nothing.
    save_every: Number of updates between checkpoints, at least. Before each
      checkpoint, no batch is assigned until the gradients in flight are back.
    save_seconds: Number of seconds between checkpoints, at least.
    on_change: What to do if `folder` is of another task, optimizer or machine,
      or its journal is damaged: `'raise'`, or `'continue'` from the last
      checkpoint, where a new segment of the journal begins. It replaces the
      updates after that checkpoint. `Report.segments` says why.
    start: A `Result` of the same parameters and kind of optimizer: the run
      starts with its parameters, state and global step, unless `folder` has a
      journal. The first batch has the number of the global step.
    on_drop: What happens to the batch of a gradient that is too old:
      `'again'` computes it again, `'forget'` leaves it out.
    max_attempts: Number of attempts at a batch whose gradient raises an error,
      or whose worker dies or hangs.
    weight: Takes the age of an accepted gradient, and returns a factor for the
      gradient. `None` for 1.
    resources: The options of the Ray actor of a worker; by default
      `{'num_cpus': 1}`.
    driver_devices: The number of local devices of the driver over which
      parameters, state and updates are divided, as by `state_shardings`. The
      bits depend on it where the optimizer sums over parameters.
    on_progress: Takes a `Report`, at most ten times a second and at the end,
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
    RuntimeError: If a function of the task fails `max_attempts` times in one
      batch, or does not return a gradient; if no worker starts; if the driver
      dies without a folder, or repeatedly.
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
    ...     task, optax.sgd(0.1), num_updates=100, num_workers=4, staleness=2,
    ...     cluster=None)
    >>> print(params.round(1), state.global_step, report.num_dropped)
    [0.5 0.5] 100 0

  References:
    Ho et al., More Effective Distributed ML via a Stale Synchronous Parallel
    Parameter Server, 2013;
    `tf.contrib.opt.DropStaleGradientOptimizer` of TensorFlow 1.15.
  """
  options = options_lib.Options(
      num_updates=num_updates,
      num_workers=num_workers,
      staleness=staleness,
      pace=pace,
      patience=patience,
      cluster=cluster,
      save_every=save_every,
      save_seconds=save_seconds,
      on_change=on_change,
      on_drop=on_drop,
      max_attempts=max_attempts,
      weight=weight,
      resources=resources,
      driver_devices=driver_devices,
  )
  options_lib.check_task(task, tx)
  options_lib.check_kinds(
      ('start', start, outcomes.Result | None, 'a `Result`'),
      ('on_progress', on_progress, Callable | None, 'a function'),
  )
  path = None
  if folder is not None:
    path = pathlib.Path(folder).expanduser().absolute()
    options_lib.require_posix('`folder`')
  if cluster is not None:
    options_lib.require_ray(f'`cluster` {cluster!r}')
  drive = functools.partial(recovery.drive, task, tx, options, path, start)
  given = dict(resources or {'num_cpus': 1})
  is_resumable = path is not None
  return job.run(
      job.Job(drive, task, options.num_workers, cluster, given, is_resumable),
      on_progress,
  )
