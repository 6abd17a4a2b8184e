"""Measures which share of the time of asynchronous workers becomes updates.

The parts:

* simulated: the driver, with eight workers whose gradients take a simulated
  time, beside a model of it in a few lines, and beside a synchronous barrier.
  Each cell has the share of the time of all workers that became accepted work,
  the share of the model, and the mean age of a gradient in updates;
* sleeping: accepted gradients a second of eight workers of Ray whose gradients
  sleep for a lognormal time, with `merge=8` and `staleness=8`, over those with
  `merge=1` and `staleness=2`;
* server: updates a second with a folder, over those of a parameter server on
  Ray that is written by hand in 40 lines.
"""

import collections
from collections.abc import Callable
from collections.abc import Sequence
import functools
import heapq
import itertools
import multiprocessing
import os
import tempfile
import time
from typing import Any
import warnings

from absl import app
from absl import flags
import asynchronous_programs as programs
import jax
import numpy as np
import optax
import timing

from shard_transforms import asynchronous
from shard_transforms._src.asynchronous import driver
from shard_transforms._src.asynchronous import options as options_lib
from shard_transforms._src.asynchronous import task as task_lib

PARTS = ('simulated', 'sleeping', 'server')
_PARTS = flags.DEFINE_multi_enum('parts', PARTS, PARTS, 'What is measured.')
_UPDATES = flags.DEFINE_integer(
    'updates', 600, 'Updates of a simulated run.', lower_bound=1
)
_ROUNDS = flags.DEFINE_integer('rounds', 5, 'Runs on Ray.', lower_bound=2)
_SIZES = flags.DEFINE_multi_enum(
    'size', ['1e3', '1e6', '1e7'], ['1e3', '1e6', '1e7'], 'Floats of a server.'
)
_SECONDS = flags.DEFINE_float('seconds', 10.0, 'About how long these are.')

NUM_WORKERS = 8
DURATIONS = {
    'even ±10 %': lambda rng: rng.uniform(0.9, 1.1),
    'lognormal, sigma 1': lambda rng: rng.lognormal(),
    '10 % take 10 times as long': lambda rng: rng.choice(
        [1.0, 10.0], p=[0.9, 0.1]
    ),
}
# Merged gradients, staleness, and whether workers are paced.
WAYS = [
    *((1, 2, True), (1, 8, True), (1, 2, False), (1, 8, False)),
    *((4, 4, True), (8, 2, True), (8, 4, True), (8, 8, True)),
    *((8, 2, False), (8, 4, False), (8, 8, False)),
]
# The median of what sleeping workers sleep.
SLEEP = 0.5
SIZES = {'1e3': 1_000, '1e6': 1_000_000, '1e7': 10_000_000}
Duration = Callable[[np.random.Generator], float]


class SimulatedWorkers:
  """Workers whose gradients take a simulated time."""

  def __init__(self, duration: Duration):
    self._duration, self._rng = duration, np.random.default_rng(0)
    self._ends = []
    self._number = itertools.count()
    self.now = 0.0
    # The durations of the gradients, by worker and batch.
    self.seconds = {}

  def ready(self) -> set[int]:
    """Returns all workers."""
    return set(range(NUM_WORKERS))

  def publish(self, params: Any) -> Any:
    """Returns the parameters."""
    return params

  def start(self, worker: int, published: Any, batch: int, state: Any) -> None:
    """Starts a worker."""
    del published, state
    seconds = self._duration(self._rng)
    self.seconds[worker, batch] = seconds
    entry = self.now + seconds, next(self._number), worker
    heapq.heappush(self._ends, entry)

  def wait(self, seconds: float) -> list[task_lib.Event]:
    """Returns the next gradient that is ready."""
    del seconds
    if not self._ends:
      return []
    self.now, _, worker = heapq.heappop(self._ends)
    result = np.zeros(1, np.float32), None
    return [task_lib.Event(worker, task_lib.Reply({}, 1), lambda: result)]

  def replace(self, worker: int) -> None:
    """Is never called: no worker hangs."""
    raise NotImplementedError


def zeros() -> np.ndarray:
  """Returns parameters."""
  return np.zeros(1, np.float32)


def drive(
    duration: Duration, merge: int, staleness: int, pace: bool
) -> tuple[float, float]:
  """Returns the share of accepted work and the mean age, of the driver."""
  workers = SimulatedWorkers(duration)
  task = asynchronous.Task(zeros, lambda params, batch: (params, {}), int)
  with tempfile.TemporaryDirectory() as folder:
    options = options_lib.Options(
        task,
        optax.identity(),
        _UPDATES.value * 8 // merge,
        NUM_WORKERS,
        staleness,
        merge=merge,
        pace=pace,
        folder=folder,
        save_every=10**9,
    )
    collections.deque(driver.drive(options, workers), maxlen=0)
    journal = asynchronous.read_journal(folder)
  accepted = journal[journal['fate'] == 0]
  useful = sum(
      workers.seconds[pair] for pair in accepted[['worker', 'batch']].tolist()
  )
  ages = accepted['global_step'] - accepted['local_step']
  return useful / (NUM_WORKERS * workers.now), float(ages.mean())


def model(duration: Duration, merge: int, staleness: int, pace: bool) -> float:
  """Returns the share of accepted work of a model of the driver."""
  rng = np.random.default_rng(0)  # The same durations.
  ends, now, step, waiting, useful = [], 0.0, 0, 0, 0.0
  idle = list(range(NUM_WORKERS))
  while step < _UPDATES.value * 8 // merge:
    while idle:
      oldest = min([step, *(entry[2] for entry in ends)])
      at_end = step + (waiting + len(ends)) // merge
      if pace and ends and at_end - oldest > staleness:
        break
      seconds = duration(rng)
      heapq.heappush(ends, (now + seconds, idle.pop(), step, seconds))
    now, worker, local_step, seconds = heapq.heappop(ends)
    idle.append(worker)
    if step - local_step <= staleness:
      useful += seconds
      waiting += 1
      if waiting == merge:
        step, waiting = step + 1, 0
  return useful / (NUM_WORKERS * now)


def barrier(duration: Duration) -> float:
  """Returns the share of the time of workers that wait for the slowest."""
  rng = np.random.default_rng(2)
  seconds = [
      [duration(rng) for _ in range(NUM_WORKERS)] for _ in range(_UPDATES.value)
  ]
  return float(np.sum(seconds) / (NUM_WORKERS * np.max(seconds, axis=1).sum()))


def simulated() -> None:
  """Prints the table of simulated workers."""
  worst = 0.0
  print(f'{"":30}', *DURATIONS, sep=' | ')
  shares = [f'{barrier(duration):.2f}' for duration in DURATIONS.values()]
  print(f'{"synchronous barrier":30}', *shares, sep=' | ')
  for merge, staleness, pace in WAYS:
    cells = []
    for duration in DURATIONS.values():
      share, age = drive(duration, merge, staleness, pace)
      expected = model(duration, merge, staleness, pace)
      worst = max(worst, abs(share - expected))
      cells.append(f'{share:.2f} (model {expected:.2f}, age {age:.1f})')
    how = 'paced' if pace else 'dropping'
    name = f'merge {merge}, staleness {staleness}, {how}'
    print(f'{name:30}', *cells, sep=' | ', flush=True)
  print(f'Driver and model differ by at most {worst:.3f} (aim: 0.05).')


def sleeping_gradient(params: Any, number: int) -> tuple[Any, dict[str, float]]:
  """Returns a gradient after a lognormal time."""
  time.sleep(SLEEP * np.random.default_rng([7, number]).lognormal())
  return np.ones_like(params), {'loss': 0.0}


def rate(task: asynchronous.Task, num_workers: int, **options: Any) -> float:
  """Returns the accepted gradients a second after workers have started."""
  with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
    warnings.simplefilter('ignore')
    asynchronous.train(
        task,
        optax.sgd(1e-3, momentum=0.9),
        num_workers=num_workers,
        folder=folder,
        save_every=10**9,
        **options,
    )
    journal = asynchronous.read_journal(folder)
  accepted = journal['seconds'][journal['fate'] == 0]
  first = len(accepted) // 4
  return (len(accepted) - first) / (accepted[-1] - accepted[first])


def sleeping() -> None:
  """Prints how much more is accepted if gradients are merged."""
  task = asynchronous.Task(zeros, sleeping_gradient, int)
  number = int(_SECONDS.value / SLEEP)
  run = functools.partial(rate, task, NUM_WORKERS)
  merged, paced = in_turn(
      [
          lambda: run(num_updates=number // 2, merge=8, staleness=8),
          lambda: run(num_updates=number, staleness=2),
      ]
  )
  print(
      f'sleeping: merged {np.median(merged):.1f} gradients a second, paced'
      f' {np.median(paced):.1f}: {timing.ratio(merged, paced)} (aim: at least'
      ' 3)',
      flush=True,
  )


def in_turn(calls: Sequence[Callable[[], float]]) -> np.ndarray:
  """Returns the results of calls that take turns, [number of calls, rounds]."""
  found = np.zeros([len(calls), _ROUNDS.value])
  for turn in range(_ROUNDS.value):
    for i in np.roll(np.arange(len(calls)), -turn).tolist():
      found[i, turn] = calls[i]()
  return found


def in_process(size: int, num_workers: int, num_updates: int) -> float:
  """Returns updates a second of the own server, in a new process."""
  with multiprocessing.get_context('spawn').Pool(1) as pool:
    return pool.apply(programs.own_server, (size, num_workers, num_updates))


def server() -> None:
  """Prints updates a second with a folder over those of the own server."""
  for name in _SIZES.value:
    size = SIZES[name]
    number = int(_SECONDS.value * {'1e3': 400, '1e6': 60, '1e7': 8}[name])
    init = functools.partial(programs.zeros, size)
    task = asynchronous.Task(init, programs.constant_gradient, int)
    run = functools.partial(
        rate, task, 2, num_updates=number, staleness=None, pace=False
    )
    rates = in_turn([run, functools.partial(in_process, size, 2, number), run])
    print(
        f'server, {name} floats: {np.median(rates[0]):.1f} over'
        f' {np.median(rates[1]):.1f}: {timing.ratio(rates[0], rates[1])}, noise'
        f' {timing.ratio(rates[2], rates[0])} (aim: at least 1)',
        flush=True,
    )


def main(argv: Sequence[str]) -> None:
  """Prints the parts."""
  timing.refuse_arguments(argv)
  os.environ['JAX_PLATFORMS'] = 'cpu'
  os.environ['RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER'] = '0'
  jax.config.update('jax_platforms', 'cpu')
  measures = {'simulated': simulated, 'sleeping': sleeping, 'server': server}
  for part in dict.fromkeys(_PARTS.value):
    measures[part]()


if __name__ == '__main__':
  app.run(main)
