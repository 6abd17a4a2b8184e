"""Trains digits by DiLoCo: with a barrier, and with workers that do not wait.

Three workers take 20 steps of AdamW each, whose moments stay with the worker,
and send how far they have come. The driver takes a step of Nesterov momentum
with the mean of three of these. In the first run, workers wait for the slowest
(`staleness=0`). In the second, none waits, and with `--kill`, one worker is
killed twice. Both see equally many examples; the second must end with a loss at
most 10 % higher. The durations of workers are lognormal.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import functools
import pathlib
import tempfile
import time
from typing import Any, NamedTuple

from absl import app
from absl import flags
import digits
import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
import optax
import psutil

from shard_transforms import asynchronous

NUM_WORKERS = 3
INNER_STEPS = 20
BATCH_SIZE = 32
# The spread of durations, and the age up to which contributions are accepted.
SIGMA = 0.7
STALENESS = 6
MOST_LOSS = 1.1
MIN_SHARE = 0.9
UPDATES = 60

_UPDATES = flags.DEFINE_integer(
    'updates', UPDATES, 'Number of outer updates.', lower_bound=2
)
_WAIT = flags.DEFINE_float(
    'wait',
    0.4,
    'Median seconds for which 20 steps wait, as if they were that much work.',
    lower_bound=0,
)
_CLUSTER = flags.DEFINE_string(
    'cluster',
    'local',
    "'local' starts Ray; with 'none', workers take turns in this process.",
)
_KILL = flags.DEFINE_boolean('kill', False, 'Whether to kill a worker twice.')
_OUTPUT_DIR = flags.DEFINE_string(
    'output_dir', 'digits_out', 'Folder that the figure is written to.'
)


class Run(NamedTuple):
  """A run.

  Attributes:
    name: Its name.
    result: What `train` returns.
    share: The share of the time of the workers that became accepted work.
    losses: Seconds and test losses [2, n].
    kills: The seconds at which a worker was killed.
  """

  name: str
  result: asynchronous.Result
  share: float
  losses: np.ndarray
  kills: list[float]


inner = optax.adamw(2e-3)
outer = optax.sgd(0.5, momentum=0.8, nesterov=True)


def pause(wait: float, number: int) -> float:
  """Returns the seconds for which the steps of a number wait."""
  return wait * np.random.default_rng([1, number]).lognormal(sigma=SIGMA)


def steps(
    wait: float, params: Any, number: int, moments: Any
) -> tuple[Any, Mapping[str, jax.Array], Any]:
  """Returns the change by some steps, their loss, and the next moments."""
  time.sleep(pause(wait, number))
  (images, labels), _ = digits.load_data(0)
  chosen = np.random.default_rng([2, number]).choice(
      len(images), (INNER_STEPS, BATCH_SIZE)
  )
  return train_inner(params, moments, images[chosen], labels[chosen])


@jax.jit
def train_inner(
    params: Any, moments: Any, images: jax.Array, labels: jax.Array
) -> tuple[Any, dict[str, jax.Array], Any]:
  """Takes a step with each batch [steps, batch size, ...]."""

  def step(carry, batch):
    now, moments = carry
    loss, grads = jax.value_and_grad(digits.loss_fn)(now, *batch)
    updates, moments = inner.update(grads, moments, now)
    return (optax.apply_updates(now, updates), moments), loss

  carry, losses = jax.lax.scan(step, (params, moments), (images, labels))
  moved = jax.tree.map(jnp.subtract, params, carry[0])
  return moved, {'loss': losses.mean()}, carry[1]


def test_loss(params: Any) -> float:
  """Returns the loss on the test data."""
  images, labels = map(jnp.asarray, digits.load_data(0)[1])
  return float(digits.loss_fn(params, images, labels))


class Watcher:
  """Measures test losses, and kills a worker twice if it is told to."""

  def __init__(self, num_kills: int):
    self._start = time.monotonic()
    self._due = [_UPDATES.value * (i + 1) // 3 for i in range(num_kills)]
    self.losses: list[tuple[float, float]] = []
    self.kills: list[float] = []

  def __call__(self, report: asynchronous.Report) -> Any:
    """Looks at a report, and asks for the parameters of the next."""
    seconds = time.monotonic() - self._start
    if report.params is not None:
      self.losses.append((seconds, test_loss(report.params)))
    if self._due and report.global_step >= self._due[0]:
      workers = find_workers()
      if workers:
        del self._due[0]
        workers[0].kill()
        self.kills.append(seconds)
        print(f'Killed a worker after update {report.global_step}.')
    return 'params'


def find_workers() -> list[psutil.Process]:
  """Returns the processes of the workers that compute."""
  found = []
  for process in psutil.Process().children(recursive=True):
    try:
      if process.cmdline()[:1] == ['ray::_Computer.gradient']:
        found.append(process)
    except psutil.Error:  # It has ended meanwhile.
      continue
  return found


def train(name: str, staleness: int, num_kills: int) -> Run:
  """Trains, with some staleness."""
  task = asynchronous.Task(
      init=functools.partial(digits.init_params, 0),
      gradient=functools.partial(steps, _WAIT.value),
      batch=int,
      init_worker=inner.init,
  )
  watcher = Watcher(num_kills)
  with tempfile.TemporaryDirectory() as folder:
    result = asynchronous.train(
        task,
        outer,
        num_updates=_UPDATES.value,
        num_workers=NUM_WORKERS,
        merge=NUM_WORKERS,
        staleness=staleness,
        cluster=None if _CLUSTER.value == 'none' else _CLUSTER.value,
        folder=folder,
        save_every=10**6,
        on_progress=watcher,
    )
    journal = asynchronous.read_journal(folder)
    again = asynchronous.replay(folder, quick(task), outer)
  same = same_bits(again, result)
  print(f'{name}: computed once more from its journal: {same}')
  losses = np.reshape(watcher.losses, (-1, 2)).T
  return Run(name, result, working_share(journal), losses, watcher.kills)


def quick(task: asynchronous.Task) -> asynchronous.Task:
  """Returns a task that does not wait, which changes no bit."""
  return asynchronous.Task(
      task.init, functools.partial(steps, 0.0), int, task.init_worker
  )


def same_bits(first: asynchronous.Result, second: asynchronous.Result) -> str:
  """Returns whether two results, and the moments of workers, are the same."""
  trees = [
      jax.tree.leaves((*x[:2], x.report.worker_states)) for x in (first, second)
  ]
  pairs = zip(*trees, strict=True)
  same = all(np.array_equal(a, b, equal_nan=True) for a, b in pairs)
  return 'same bits' if same else 'other bits'


def working_share(journal: np.ndarray) -> float:
  """Returns the share of the time of workers that became accepted work.

  It counts from the second update on, when all workers have compiled.
  """
  accepted = journal[journal['fate'] == 0]
  later = accepted[accepted['local_step'] >= 2]
  if len(later) < 2 or not _WAIT.value:
    return float('nan')
  begin = accepted['seconds'][accepted['global_step'] < 2].max()
  waits = sum(pause(_WAIT.value, int(batch)) for batch in later['batch'])
  # Half of what was in flight at the beginning and at the end is not counted.
  return waits / (NUM_WORKERS * (accepted['seconds'].max() - begin))


def plot(runs: Sequence[Run], path: pathlib.Path) -> None:
  """Draws test losses over time and over updates, and kills."""
  figure = matplotlib.figure.Figure(figsize=(10, 4), layout='constrained')
  axes = figure.subplots()
  for run in runs:
    share = '' if np.isnan(run.share) else f', {run.share:.0%} of time works'
    (line,) = axes.plot(*run.losses, label=f'{run.name}{share}')
    for i, seconds in enumerate(run.kills):
      label = None if i else 'a worker is killed'
      color = line.get_color()
      axes.axvline(seconds, color=color, linestyle=':', label=label)
  axes.set(yscale='log', xlabel='seconds', ylabel='test loss')
  axes.set(title=f'DiLoCo, {NUM_WORKERS} workers, {_UPDATES.value} updates')
  axes.legend()
  figure.savefig(path, dpi=120)


def main(argv: Sequence[str]) -> str | None:
  """Trains in both ways; returns what went wrong, if anything."""
  if len(argv) > 1:
    raise app.UsageError(f'There are flags only, got {argv[1:]}.')
  path = pathlib.Path(_OUTPUT_DIR.value) / 'train_async_diloco.png'
  path.parent.mkdir(parents=True, exist_ok=True)
  runs = [
      train('synchronous', staleness=0, num_kills=0),
      train('decoupled', STALENESS, num_kills=2 if _KILL.value else 0),
  ]
  for run in runs:
    report = run.result.report
    loss = test_loss(run.result.params)
    print(
        f'{run.name:12} test loss {loss:.4f}, working'
        f' {run.share:.2f} of the time, mean age {report.mean_age:.2f}, lost'
        f' {report.num_lost}, seconds {report.seconds:.0f}'
    )
  plot(runs, path)
  print(f'Test losses: {path}')
  first, second = (test_loss(run.result.params) for run in runs)
  if _UPDATES.value >= UPDATES and second > MOST_LOSS * first:
    return f'FAILED: the loss must be at most {MOST_LOSS} times as high.'
  return None


if __name__ == '__main__':
  app.run(main)
