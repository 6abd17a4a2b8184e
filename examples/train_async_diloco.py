"""Trains digits by DiLoCo, synchronously and with workers that do not wait.

Each of three workers takes 20 steps of AdamW, whose moments stay with the
worker, and sends the difference of the parameters. The driver takes a step of
Nesterov momentum with the mean of three differences. In the first run, all
workers wait for the slowest worker (`staleness=0`). In the second run, no
worker waits, and with `--kill`, workers are killed twice. Both runs use the
same number of examples, and the loss of the second run may be at most 10 %
higher. The durations of the workers are lognormal.
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
# The sigma of lognormal durations, and the largest age of a contribution.
SIGMA = 0.7
STALENESS = 6
MAX_LOSS_RATIO = 1.1
UPDATES = 60

_UPDATES = flags.DEFINE_integer(
    'updates', UPDATES, 'Number of outer updates.', lower_bound=2
)
_WAIT = flags.DEFINE_float(
    'wait',
    0.4,
    'Median seconds that 20 steps sleep, to simulate more work.',
    lower_bound=0,
)
_CLUSTER = flags.DEFINE_string(
    'cluster',
    'local',
    "'local' starts Ray; 'none' computes in this process, without Ray.",
)
_KILL = flags.DEFINE_boolean('kill', False, 'Whether to kill a worker twice.')
_OUTPUT_DIR = flags.DEFINE_string(
    'output_dir', 'digits_out', 'Folder that the figure is written to.'
)


class Run(NamedTuple):
  """A run.

  Attributes:
    name: Its name.
    result: The result of `asynchronous.train`.
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
  """Returns the seconds that the steps of a batch number sleep."""
  return wait * np.random.default_rng([1, number]).lognormal(sigma=SIGMA)


def steps(
    wait: float, params: Any, number: int, moments: Any
) -> tuple[Any, Mapping[str, jax.Array], Any]:
  """Returns the difference of the parameters, the loss and the next moments."""
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
  """Takes one step per batch, of images and labels [steps, batch size, ...]."""

  def step(carry, batch):
    new_params, moments = carry
    loss, grads = jax.value_and_grad(digits.loss_fn)(new_params, *batch)
    updates, moments = inner.update(grads, moments, new_params)
    return (optax.apply_updates(new_params, updates), moments), loss

  (new_params, moments), losses = jax.lax.scan(
      step, (params, moments), (images, labels)
  )
  difference = jax.tree.map(jnp.subtract, params, new_params)
  return difference, {'loss': losses.mean()}, moments


def test_loss(params: Any) -> float:
  """Returns the loss on the test data."""
  images, labels = map(jnp.asarray, digits.load_data(0)[1])
  return float(digits.loss_fn(params, images, labels))


class Watcher:
  """Measures test losses, and kills a worker some number of times."""

  def __init__(self, num_kills: int):
    self._start = time.monotonic()
    self._due = [_UPDATES.value * (i + 1) // 3 for i in range(num_kills)]
    self.losses: list[tuple[float, float]] = []
    self.kills: list[float] = []

  def __call__(self, report: asynchronous.Report) -> Any:
    """Processes a report, and requests the parameters with the next report."""
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
  """Returns the processes of the workers that are computing."""
  workers = []
  for process in psutil.Process().children(recursive=True):
    try:
      if process.cmdline()[:1] == ['ray::_Computer.gradient']:
        workers.append(process)
    except psutil.Error:  # The process has ended in the meantime.
      continue
  return workers


def train(name: str, staleness: int, num_kills: int) -> Run:
  """Trains with a bound of the staleness, and replays the run."""
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
    replayed = asynchronous.replay(folder, without_sleep(task), outer)
  print(f'{name}: replay from the journal: {compare_bits(replayed, result)}')
  losses = np.reshape(watcher.losses, (-1, 2)).T
  return Run(name, result, working_share(journal), losses, watcher.kills)


def without_sleep(task: asynchronous.Task) -> asynchronous.Task:
  """Returns a task that does not sleep, which does not change the bits."""
  return asynchronous.Task(
      task.init, functools.partial(steps, 0.0), int, task.init_worker
  )


def compare_bits(
    first: asynchronous.Result, second: asynchronous.Result
) -> str:
  """Compares the parameters and all states of two results."""
  trees = [
      jax.tree.leaves((*x[:2], x.report.worker_states)) for x in (first, second)
  ]
  pairs = zip(*trees, strict=True)
  are_equal = all(np.array_equal(a, b, equal_nan=True) for a, b in pairs)
  return 'same bits' if are_equal else 'other bits'


def working_share(journal: np.ndarray) -> float:
  """Returns the share of the time of workers that became accepted work.

  The first two updates do not count, because workers compile during them.
  """
  accepted = journal[journal['fate'] == 0]
  later = accepted[accepted['local_step'] >= 2]
  if len(later) < 2 or not _WAIT.value:
    return float('nan')
  begin = accepted['seconds'][accepted['global_step'] < 2].max()
  waits = sum(pause(_WAIT.value, int(batch)) for batch in later['batch'])
  # Work that is in flight at the beginning or at the end is counted by half.
  return waits / (NUM_WORKERS * (accepted['seconds'].max() - begin))


def plot(runs: Sequence[Run], path: pathlib.Path) -> None:
  """Plots test losses over time, and the kills."""
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
  """Trains in both ways; returns an error message if a check fails."""
  if len(argv) > 1:
    raise app.UsageError(f'Unknown arguments: {argv[1:]}. Pass flags only.')
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
  if _UPDATES.value >= UPDATES and second > MAX_LOSS_RATIO * first:
    return (
        f'FAILED: the decoupled loss {second:.4f} is more than {MAX_LOSS_RATIO}'
        f' times the synchronous loss {first:.4f}.'
    )
  return None


if __name__ == '__main__':
  app.run(main)
