"""`train`: an optimizer over workers that do not wait for each other."""

from collections.abc import Callable
from collections.abc import Mapping
import contextlib
import dataclasses
import functools
import importlib.util
import math
import os
import pathlib
from typing import Any, Literal

import optax

from shard_transforms._src.asynchronous import holder as holder_lib
from shard_transforms._src.asynchronous import options as options_lib
from shard_transforms._src.asynchronous import program
from shard_transforms._src.asynchronous import report
from shard_transforms._src.asynchronous import task as task_lib
from shard_transforms._src.asynchronous import tickets
from shard_transforms._src.asynchronous import workers as workers_lib
from shard_transforms._src.base import arguments


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
    on_drop: tickets.OnDrop = 'again',
    max_attempts: int = 3,
    weight: Callable[[int], float] | None = None,
    resources: Mapping[str, Any] | None = None,
    on_progress: Callable[[report.Report], Any] | None = None,
) -> report.Result:
  r"""Trains asynchronously, by workers that do not wait for each other.

  Each worker computes gradients at the parameters that it was given last. When
  one comes back, it is accepted if its age

  .. math:: \text{global\_step} - \text{local\_step} \le \text{staleness}

  and then `tx` applies it, and the global step grows by one. The state is that
  of `drop_stale(staleness, tx)`, to the bit.

  With a `folder`, what becomes of each gradient is written to a journal before
  anybody sees the new parameters, and parameters and state to a checkpoint
  every `save_every` updates. The same call resumes where the last one ended,
  however it ended; no accepted update is lost, and no batch counts twice. A
  worker that dies is replaced at any time; with a folder, so is the process
  that holds the parameters. `replay` computes the same bits from the journal.

  Args:
    task: What is trained, and on what.
    tx: The optimizer. It gets the extra argument `local_step`, and where it
      uses `read_params`, as `compensate_delay` does, the parameters that the
      gradient was computed from, which are then kept that long.
    num_updates: Number of accepted updates after which the run ends.
    num_workers: Number of workers.
    staleness: The age up to which gradients are accepted, in steps; `None` for
      any age.
    pace: Whether a worker waits if its gradient would become too old because of
      the updates of the others. Then no gradient is dropped.
    patience: After how many times the usual duration of a gradient another
      worker gets its batch, with twice the time in each further attempt. One
      that takes five times as long, and at least 5 seconds, is replaced. The
      first gradient of a worker, which is compiled, has two minutes more.
    cluster: `'local'` starts Ray on this machine, on loopback, and ends it with
      the call; `'host:port'` joins a cluster of Ray, on whose nodes this
      package and the modules of the task must be installed. `None` computes
      in this process, without Ray, the workers one after the other.
    folder: The folder of the journal and the checkpoints, for one run alone, on
      this host. `None` keeps nothing.
    save_every: Number of updates between checkpoints. Before each, no batch is
      handed out until those in flight are back.
    on_drop: What becomes of the batch of a gradient that is too old: it is
      computed `'again'`, or `'forget'`.
    max_attempts: How often a batch is tried whose gradient raises an error, or
      whose worker dies or hangs.
    weight: Takes the age of an accepted gradient and returns what the gradient
      is multiplied by. `None` for 1.
    resources: What a worker needs, as the options of a Ray actor; by default
      `{'num_cpus': 1}`.
    on_progress: Takes a `Report`, at most ten times a second and at the end.

  Returns:
    The parameters, the state, and how it went.

  Raises:
    ConnectionError: If the cluster cannot be reached within two minutes.
    ImportError: If what `cluster` or `folder` needs is not installed: the extra
      `ray` has it.
    OSError: If `folder` cannot be written.
    RuntimeError: If a function of the task fails `max_attempts` times in one
      batch, or gives no gradient; if there are no workers, or the process that
      holds the parameters dies without a folder, or again and again.
    TypeError: If an argument is of the wrong kind.
    ValueError: If an argument has a wrong value; if `folder` is of another
      task, optimizer or machine, is damaged or in use; if nodes have other
      versions of Python or jaxlib.

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
  check_task(task, tx)
  options = options_lib.checked(
      num_updates=num_updates,
      staleness=staleness,
      pace=pace,
      patience=patience,
      save_every=save_every,
      on_drop=on_drop,
      max_attempts=max_attempts,
      weight=weight,
  )
  num_workers = arguments.as_at_least('num_workers', num_workers, 1)
  for name, function in ('weight', weight), ('on_progress', on_progress):
    if function is not None and not callable(function):
      raise TypeError(f'`{name}` must be a function, got {function!r}.')
  if resources is not None and not isinstance(resources, Mapping):
    raise TypeError(f'`resources` must be a dict, got {resources!r}.')
  _check_cluster(cluster)
  path = None if folder is None else pathlib.Path(folder).absolute()
  if path is not None:
    require('orbax.checkpoint', '`folder`')
  if cluster is not None:
    require('ray', f'`cluster` {cluster!r}')
    make = functools.partial(holder_lib.Holder, task, tx, options, path)
    job = program.Job(
        make, task, num_workers, cluster, resources, path is not None
    )
    return program.run(job, on_progress)
  # Workers that take turns are never late.
  options = dataclasses.replace(options, patience=math.inf)
  holder = holder_lib.Holder(task, tx, options, path)
  with contextlib.closing(holder):
    for progress in holder.run(workers_lib.LocalWorkers(task, num_workers)):
      if on_progress is not None:
        on_progress(progress)
    result = holder.result()
  if on_progress is not None:
    on_progress(result.report)
  return result


def require(module: str, what: str) -> None:
  """Checks that a library is installed.

  Raises:
    ImportError: If it is not.
  """
  try:
    found = importlib.util.find_spec(module)
  except ModuleNotFoundError:
    found = None
  if found is None:
    raise ImportError(
        f'{what} must have the library {module.split(".")[0]!r}, which is not'
        " installed. Run `pip install 'shard_transforms[ray]'`."
    )


def check_task(task: Any, tx: Any) -> None:
  """Checks the first two arguments.

  Raises:
    TypeError: If one of them is of the wrong kind.
  """
  if not isinstance(task, task_lib.Task):
    raise TypeError(f'`task` must be a `Task`, got {task!r}.')
  if not isinstance(tx, optax.GradientTransformation):
    raise TypeError(
        f'`tx` must be an `optax.GradientTransformation`, got {tx!r}.'
    )


def _check_cluster(cluster):
  is_address = isinstance(cluster, str) and cluster.rpartition(':')[2].isdigit()
  if cluster not in (None, 'local') and not is_address:
    raise ValueError(
        "`cluster` must be None, 'local' or an address 'host:port', got"
        f' {cluster!r}.'
    )
