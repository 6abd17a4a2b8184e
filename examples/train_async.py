"""Trains a classifier of handwritten digits asynchronously.

There are four modes: (a) each gradient counts at any age, (b) gradients that
are too old are dropped, (c) each update merges as many gradients as there are
workers, and no gradient becomes too old, (d) old gradients count less. The
workers are Ray processes. Each run writes a journal, from which (c) is replayed
and must end with the same bits. With `--kill`, a worker and the process that
holds the parameters are killed during (c). The test accuracy is measured during
training: `--stop_at` ends a run that has reached it, and `--logdir` writes
losses and accuracies for TensorBoard.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import functools
import pathlib
import signal
import tempfile
import time
from typing import Any, NamedTuple

from absl import app
from absl import flags
from absl import logging
import digits
import jax
import matplotlib.axes
import matplotlib.figure
import matplotlib.patches
import numpy as np
import optax
import psutil
import tensorboardX
import tqdm

import shard_transforms as st
from shard_transforms import asynchronous

UPDATES = 400
MIN_ACCURACY = 0.95
OUTCOMES = {
    0: ('accepted', '0.75'),
    1: ('dropped', 'k'),
    2: ('lost', 'crimson'),
}
# Seconds that the plot of workers shows.
WINDOW = 2.5
# Updates between two evaluations.
EVALUATE_EVERY = 50
# Ray's name for the processes of workers, and the module of the driver.
WORKER = 'ray::_Computer.gradient'
DRIVER = 'shard_transforms._src.asynchronous.ray_cluster'

_WORKERS = flags.DEFINE_integer(
    'workers', 4, 'Number of workers.', lower_bound=1
)
_UPDATES = flags.DEFINE_integer(
    'updates',
    UPDATES,
    'Number of updates of each mode; with fewer updates than the default, the'
    ' accuracy is not checked.',
    lower_bound=1,
)
_STALENESS = flags.DEFINE_integer(
    'staleness',
    2,
    'The age, in updates, up to which (b) and (c) accept gradients.',
    lower_bound=0,
)
_WAIT = flags.DEFINE_float(
    'wait',
    20,
    'Mean time in milliseconds that a gradient sleeps, uniformly distributed'
    ' from zero to twice the mean, to simulate more work of varying length.',
    lower_bound=0,
)
_CLUSTER = flags.DEFINE_string(
    'cluster',
    'local',
    "Where the workers are: 'local' starts Ray on this machine, 'host:port'"
    ' joins a cluster, on whose nodes the module `digits` can be imported, and'
    " 'none' computes in this process, one gradient after the other.",
)
_WAYS = flags.DEFINE_string(
    'ways', 'abcd', 'The modes to run, which must include (c).'
)
_KILL = flags.DEFINE_boolean(
    'kill', False, 'Whether to kill a worker and the driver during (c).'
)
_STOP_AT = flags.DEFINE_float(
    'stop_at', None, 'The test accuracy at which a run ends early.'
)
_LOGDIR = flags.DEFINE_string(
    'logdir', None, 'Folder that curves for TensorBoard are written to.'
)
_OUTPUT_DIR = flags.DEFINE_string(
    'output_dir', 'digits_out', 'Folder that the figure is written to.'
)
_BATCH_SIZE = flags.DEFINE_integer(
    'batch_size', 64, 'Size of a batch.', lower_bound=1, upper_bound=1024
)
_LEARNING_RATE = flags.DEFINE_float(
    'learning_rate',
    0.1,
    'Learning rate; by default so large that old gradients do harm.',
    lower_bound=0,
)
_SEED = flags.DEFINE_integer('seed', 0, 'Seed of all chance.', lower_bound=0)


@flags.validator('ways', '`--ways` must be letters of abcd, with c.')
def _are_ways(value):
  return 'c' in value and set(value) <= set('abcd')


@flags.multi_flags_validator(['kill', 'cluster'])
def _can_be_killed(values):
  if values['kill'] and values['cluster'] != 'local':
    raise flags.ValidationError(
        '`--kill` needs `--cluster=local`, where the processes belong to this'
        ' program.'
    )
  return True


class Way(NamedTuple):
  """One of the four modes."""

  name: str
  tx: optax.GradientTransformation
  options: Mapping[str, Any]


class Run(NamedTuple):
  """The results of one of the modes.

  Attributes:
    name: The name of the mode.
    result: The result of `asynchronous.train`.
    journal: The journal of the run.
    losses: The numbers of some updates, and losses of their batches [2, n].
    rate: Updates per second.
  """

  name: str
  result: asynchronous.Result
  journal: np.ndarray
  losses: np.ndarray
  rate: float


def make_ways() -> list[Way]:
  """Returns the modes that `--ways` selects."""
  bound = _STALENESS.value
  # Momentum suffers from stale gradients.
  tx = optax.sgd(_LEARNING_RATE.value, momentum=0.9)
  weighted = optax.chain(st.contrib.scale_by_staleness('inverse'), tx)
  unbounded = {'staleness': None, 'pace': False}
  merging = {'staleness': bound, 'merge': _WORKERS.value}
  ways = [
      Way('(a) no bound', tx, unbounded),
      Way(f'(b) dropping beyond {bound}', tx, unbounded | {'staleness': bound}),
      Way(f'(c) merging, within {bound}', tx, merging),
      Way('(d) weights by age', weighted, unbounded),
  ]
  return [way for way in ways if letter(way) in _WAYS.value]


def letter(way: Way | Run) -> str:
  """Returns the letter of a mode or of a run."""
  return way.name[1]


def make_task(seed: int, batch_size: int, wait: float) -> asynchronous.Task:
  """Returns a task whose gradients sleep for `wait` seconds on average."""
  # Takes values instead of flags, because workers do not parse flags.
  return asynchronous.Task(
      init=functools.partial(digits.init_params, seed),
      gradient=gradient,
      batch=functools.partial(make_batch, seed, batch_size, wait),
  )


def make_batch(
    seed: int, batch_size: int, wait: float, number: int
) -> tuple[float, list[np.ndarray]]:
  """Returns the seconds to sleep, images and labels of a batch number."""
  rng = np.random.default_rng([seed, number])
  data, _ = digits.load_data(seed)
  chosen = rng.choice(len(data[0]), batch_size, replace=False)
  return rng.uniform(0, 2 * wait), [x[chosen] for x in data]


def gradient(
    params: Any, batch: tuple[float, list[np.ndarray]]
) -> tuple[Any, dict[str, jax.Array]]:
  """Returns the gradient at a batch, and the loss."""
  seconds, (images, labels) = batch
  time.sleep(seconds)
  loss, grads = value_and_grad(params, images, labels)
  return grads, {'loss': loss}


value_and_grad = jax.jit(jax.value_and_grad(digits.loss_fn))


class Progress:
  """Shows the progress of a run, and collects its losses."""

  def __init__(self, bar: tqdm.tqdm):
    self._bar = bar
    self._losses: dict[int, float] = {}
    self._start = time.monotonic()
    self._first_step = 0

  def __call__(self, report: asynchronous.Report) -> None:
    """Shows a report."""
    if not self._first_step:
      # Workers have started.
      self._start = time.monotonic()
      self._first_step = report.global_step
      self._bar.unpause()
    # After a kill, the global step is lower for a while.
    self._bar.update(report.global_step - self._bar.n)
    self._bar.set_postfix_str(
        f'dropped {report.num_dropped}, mean age {report.mean_age:.1f}'
    )
    self._losses[report.global_step] = report.metrics['loss']

  def rate(self) -> float:
    """Returns the updates per second, from the first to the last update."""
    return (self._bar.n - self._first_step) / max(self._seconds(), 1e-3)

  def losses(self) -> np.ndarray:
    """Returns steps and losses [2, n]."""
    return np.reshape(sorted(self._losses.items()), (-1, 2)).T

  def _seconds(self):
    return time.monotonic() - self._start


class Evaluation:
  """Measures the test accuracy during a run, and may end the run."""

  def __init__(self, name: str):
    self._test_data = digits.load_data(_SEED.value)[1]
    self._due = EVALUATE_EVERY
    self._writer = None
    if _LOGDIR.value is not None:
      self._writer = tensorboardX.SummaryWriter(f'{_LOGDIR.value}/{name[1]}')

  def __call__(self, report: asynchronous.Report) -> Any:
    """Returns whether to stop, or to send the parameters."""
    self._log('loss', report.metrics['loss'], report.global_step)
    if report.params is not None:
      accuracy = digits.accuracy(report.params, *self._test_data)
      self._log('test accuracy', accuracy, report.global_step)
      if _STOP_AT.value is not None and accuracy >= _STOP_AT.value:
        return 'stop'
    if report.global_step < self._due:
      return None
    self._due = report.global_step + EVALUATE_EVERY
    return 'params'

  def _log(self, name, value, step):
    if self._writer is not None:
      self._writer.add_scalar(name, value, step)


class Killer:
  """Kills a worker after a third of a run, and the driver after two thirds."""

  def __init__(self, num_updates: int):
    third = num_updates // 3
    self._due = [(third, 'worker', WORKER), (2 * third, 'driver', DRIVER)]

  def __call__(self, report: asynchronous.Report) -> None:
    """Kills the process that is due at a report."""
    if not self._due or report.global_step < self._due[0][0]:
      return
    _, role, name = self._due[0]
    processes = find_processes(name)
    if processes:
      del self._due[0]
      processes[0].send_signal(signal.SIGKILL)
      tqdm.tqdm.write(
          f'Killed the {role} (process {processes[0].pid}) after update'
          f' {report.global_step}.'
      )

  def is_done(self) -> bool:
    """Returns whether both processes have been killed."""
    return not self._due


def find_processes(name: str) -> list[psutil.Process]:
  """Returns the processes below this one that run an actor or a module."""
  processes = []
  for process in psutil.Process().children(recursive=True):
    try:
      command = process.cmdline()
      if command and (command[0].startswith(name) or name in command[2:3]):
        processes.append(process)
    except psutil.Error:  # The process has ended in the meantime.
      continue
  return processes


def train(
    way: Way,
    folder: str,
    killer: Callable[[asynchronous.Report], None] | None,
) -> Run:
  """Trains in one of the modes, with the journal in a folder."""
  with tqdm.tqdm(total=_UPDATES.value, desc=way.name, unit=' updates') as bar:
    progress, evaluation = Progress(bar), Evaluation(way.name)

    def on_progress(report):
      progress(report)
      if killer is not None:
        killer(report)
      return evaluation(report)

    result = asynchronous.train(
        make_task(_SEED.value, _BATCH_SIZE.value, _WAIT.value / 1000),
        way.tx,
        num_updates=_UPDATES.value,
        num_workers=_WORKERS.value,
        cluster=None if _CLUSTER.value == 'none' else _CLUSTER.value,
        folder=folder,
        on_progress=on_progress,
        **way.options,
    )
    rate = progress.rate()
  journal = asynchronous.read_journal(folder)
  return Run(way.name, result, journal, progress.losses(), rate)


def is_replayed(way: Way, run: Run, folder: str) -> bool:
  """Returns whether the replay of a run has the same bits."""
  # The replay does not sleep, which does not change the bits.
  task = make_task(_SEED.value, _BATCH_SIZE.value, wait=0)
  again = asynchronous.replay(folder, task, way.tx)
  return all(
      x.tobytes() == y.tobytes()
      for x, y in zip(
          jax.tree.leaves((run.result.params, run.result.opt_state)),
          jax.tree.leaves((again.params, again.opt_state)),
          strict=True,
      )
  )


def print_table(runs: Sequence[Run], accuracies: Sequence[float]) -> None:
  """Prints a row for each run."""
  row = '{:23}{:>13}{:>11}{:>10}{:>9}{:>6}{:>10}'
  print(
      row.format(
          *('', 'test accuracy', 'updates/s', 'updates', 'dropped'),
          *('lost', 'mean age'),
      )
  )
  for run, accuracy in zip(runs, accuracies, strict=True):
    report = run.result.report
    print(
        row.format(
            *(run.name, f'{accuracy:.2%}', f'{run.rate:.0f}'),
            *(report.global_step, report.num_dropped, report.num_lost),
            f'{report.mean_age:.2f}',
        )
    )


def plot(runs: Sequence[Run], path: pathlib.Path) -> None:
  """Plots losses, ages, and the gradients of each worker."""
  figure = matplotlib.figure.Figure(figsize=(12, 9), layout='constrained')
  bounded = [run for run in runs if letter(run) in 'bc']
  grid = figure.add_gridspec(1 + len(bounded), 5)
  plot_losses(figure.add_subplot(grid[0, :3]), runs)
  plot_ages(figure.add_subplot(grid[0, 3:]), runs)
  for row, run in enumerate(bounded, start=1):
    plot_workers(figure.add_subplot(grid[row, :]), run)
  figure.savefig(path, dpi=120)


def plot_losses(axes: matplotlib.axes.Axes, runs: Sequence[Run]) -> None:
  """Plots the losses of the reported updates."""
  for run in runs:
    axes.plot(*run.losses, label=run.name, linewidth=1)
  axes.set(yscale='log', title='Loss of a batch')
  axes.set(xlabel='updates', ylabel='cross entropy')
  axes.legend()


def plot_ages(axes: matplotlib.axes.Axes, runs: Sequence[Run]) -> None:
  """Plots a histogram of the ages of the accepted gradients."""
  of_runs = [
      (run.journal['global_step'] - run.journal['local_step'])[
          run.journal['fate'] == 0
      ]
      for run in runs
  ]
  bins = np.arange(max(map(np.max, of_runs)) + 2) - 0.5
  axes.hist(of_runs, bins=bins, label=[run.name for run in runs])
  axes.set(title='Ages of the gradients that were accepted')
  axes.set(xlabel='staleness (updates)', ylabel='gradients')
  axes.legend()


def plot_workers(axes: matplotlib.axes.Axes, run: Run) -> None:
  """Plots the gradients of each worker over time, colored by outcome."""
  starts, ends = when(run.journal)
  for outcome, (_, color) in OUTCOMES.items():
    chosen = run.journal['fate'] == outcome
    axes.barh(
        run.journal['worker'][chosen],
        (ends - starts)[chosen],
        left=starts[chosen],
        color=color,
        edgecolor='w',
    )
  # After a third of the updates, where `--kill` kills a worker.
  step = run.journal['global_step']
  middle = ends[np.argmax(step >= step[-1] // 3)]
  begin = max(min(middle - WINDOW / 3, ends[-1] - WINDOW), 0)
  handles = [
      matplotlib.patches.Patch(color=color, label=name)
      for outcome, (name, color) in OUTCOMES.items()
      if outcome in run.journal['fate']
  ]
  axes.legend(handles=handles, ncols=len(handles), loc='upper right')
  axes.set(title=f'{run.name}: gradients of each worker, {WINDOW} s of the run')
  axes.set(xlabel='seconds', ylabel='worker', yticks=range(_WORKERS.value))
  axes.set(ylim=(-0.6, _WORKERS.value + 0.5), xlim=(begin, begin + WINDOW))


def when(journal: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Returns the seconds at which gradients started and ended.

  A journal has the seconds at which gradients came back. Each gradient started
  as soon as its parameters existed and its worker was idle. The first gradient
  of a worker, which compiles, is drawn with the median duration.
  """
  seconds = journal['seconds'].astype(float)
  # The clock starts at zero in a new driver.
  is_restart = np.append(False, np.diff(seconds) < 0)
  before = np.append(0, seconds[:-1])
  ends = seconds + np.cumsum(np.where(is_restart, before, 0))
  starts = np.full_like(ends, np.nan)
  idle, reached = {}, {}
  for i, record in enumerate(journal):
    if is_restart[i]:
      idle, reached = {}, {}
    worker = int(record['worker'])
    starts[i] = np.fmax(
        idle.get(worker, np.nan),
        reached.get(int(record['local_step']), np.nan),
    )
    idle[worker] = ends[i]
    if record['merged']:
      reached[int(record['global_step']) + 1] = ends[i]
  usual = np.nanmedian(ends - starts)
  return np.where(np.isnan(starts), ends - usual, starts), ends


def verdict(
    runs: Sequence[Run],
    accuracies: Sequence[float],
    same: bool,
    killer: Killer | None,
) -> str | None:
  """Returns the messages of failed checks, or `None`."""
  wrong = []
  if not same:
    wrong.append('FAILED: the replay of (c) does not have its bits.')
  if killer is not None and not killer.is_done():
    wrong.append('FAILED: (c) ended too early to be killed. Raise `--updates`.')
  for run, accuracy in zip(runs, accuracies, strict=True):
    is_bounded = (
        letter(run) in 'bc' and run.result.report.global_step >= UPDATES
    )
    if is_bounded and accuracy < MIN_ACCURACY:
      wrong.append(
          f'FAILED: the test accuracy of {run.name} is {accuracy:.2%}, below'
          f' {MIN_ACCURACY:.0%}. Change'
          ' `--learning_rate`, `--staleness` or `--updates`.'
      )
  return '\n'.join(wrong) or None


def main(argv: Sequence[str]) -> str | None:
  """Trains in the selected modes; returns the messages of failed checks."""
  if len(argv) > 1:
    raise app.UsageError(f'Unknown arguments: {argv[1:]}. Pass flags only.')
  # JAX logs each platform that is not available.
  logging.set_verbosity(logging.WARNING)
  path = pathlib.Path(_OUTPUT_DIR.value) / 'train_async.png'
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise app.UsageError(f'Cannot write to `--output_dir`: {error}') from error

  killer = Killer(_UPDATES.value) if _KILL.value else None
  ways = make_ways()
  runs, same = [], True
  try:
    for way in ways:
      with tempfile.TemporaryDirectory() as folder:
        is_c = letter(way) == 'c'
        runs.append(train(way, folder, killer if is_c else None))
        same &= not is_c or is_replayed(way, runs[-1], folder)
  except (ImportError, OSError, RuntimeError, ValueError) as error:
    return f'FAILED: {error}'

  _, test_data = digits.load_data(_SEED.value)
  accuracies = [digits.accuracy(run.result.params, *test_data) for run in runs]
  print_table(runs, accuracies)
  bits = 'same bits' if same else 'other bits'
  print(f'(c), replayed from its journal: {bits}')
  plot(runs, path)
  print(f'Losses, ages and workers: {path}')
  return verdict(runs, accuracies, same, killer)


if __name__ == '__main__':
  app.run(main)
