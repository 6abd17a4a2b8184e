"""Times asynchronous training beside what one would write by hand.

Each run starts new processes and counts accepted updates a second after a
warm-up. Runs take turns; each line has the ratio of the medians of its first
program to its second, an interval that holds 95 % of bootstrap resamples of the
rounds, and as the noise, the ratio of two times the same runs, of the library
or of the first program. The parts:

* ray, pipes, shared: the library, with any staleness, over the programs of
  `asynchronous_programs.py`;
* rpc: the library over PyTorch's RPC, where `torch` is installed;
* journal, checkpoints: with a journal over without, and with a checkpoint after
  so many updates as take about a second as well;
* waiting: four workers over one, where each gradient waits for 50 ms;
* pacing: pacing over dropping, four workers that wait so, and staleness 2;
* slow_worker: the same, where one of them waits ten times as long;
* apply: the time in which the driver applies a gradient over that of the
  plain step of the optimizer, in this process;
* driver: the milliseconds between updates if gradients cost their workers
  nothing;
* memory: the largest size of Ray's object store, and the memory of the driver
  after 1,000 and after 10,000 updates, where `grpcio` is installed.
"""

from collections.abc import Callable
from collections.abc import Sequence
from concurrent import futures
import functools
import importlib.util
import multiprocessing
import os
import sys
import tempfile
from typing import Any

from absl import app
from absl import flags
import asynchronous_programs as programs
import asynchronous_torch
import jax
import jax.numpy as jnp
import numpy as np
import psutil
import timing

from shard_transforms._src.asynchronous import driver_process
from shard_transforms._src.asynchronous import parameter_server

# Programs that are compared with the library, and runs of it that keep
# something, with about how many seconds are between checkpoints.
KEEPS = {'journal': 10**6, 'checkpoints': 1}
OTHERS = ('ray', 'pipes', 'shared', 'rpc', *KEEPS)
PARTS = (
    *OTHERS,
    'apply',
    'driver',
    'waiting',
    'pacing',
    'slow_worker',
    'memory',
)
AIMS = {
    ('ray', 'digits'): 'at least 1.1',
    ('ray', '5M'): 'at least 1.0',
    ('ray', '25M'): 'at least 1.1',
    ('pipes', '5M'): 'at least 1.3',
    ('pipes', '25M'): 'at least 3',
    ('shared', '5M'): 'at least 0.6',
    ('shared', '25M'): 'at least 0.75',
    ('rpc', '5M'): 'at least 0.9',
    ('rpc', '25M'): 'at least 1.5',
    **{('journal', size): 'at least 0.97' for size in programs.MODELS},
}

_PARTS = flags.DEFINE_multi_enum('parts', PARTS, PARTS, 'What is measured.')
_SIZES = flags.DEFINE_multi_enum(
    'size', list(programs.MODELS), list(programs.MODELS), 'Models to train.'
)
_ROUNDS = flags.DEFINE_integer(
    'rounds', 5, 'Runs of each program.', lower_bound=2
)
_SECONDS = flags.DEFINE_float(
    'seconds', 6.0, 'About how long a run is.', lower_bound=1
)

# About how many updates a second two workers make, to choose their number.
SPEEDS = {'digits': 400, '5M': 20, '25M': 5}
NUM_WORKERS = 2
WAIT = 0.05
# Calls in a row that are timed, and rounds, of what takes no process.
STEPS = {'digits': 200, '5M': 8, '25M': 4}
APPLY_ROUNDS = 25
MANY_UPDATES = 10_000
HEADER = (
    f'{"part":12}{"size":8}{"first":>9}{"second":>9}{"first / second":^22}'
    f'{"noise":^22}aim'
)


def in_process(
    program: Callable[..., float], *arguments: Any
) -> Callable[[], float]:
  """Returns a call of a program in a process of its own."""

  def call():
    context = multiprocessing.get_context('spawn')
    with futures.ProcessPoolExecutor(1, context) as pool:
      return pool.submit(program, *arguments).result()

  return call


def library(
    model: str,
    num_workers: int,
    num_updates: float,
    wait: float = 0,
    *,
    slow: bool = False,
    **options: Any,
) -> Callable[[], float]:
  """Returns a call of the library, in processes of its own.

  Args:
    model: The name of the model.
    num_workers: The number of workers.
    num_updates: The number of updates.
    wait: Seconds for which each gradient waits.
    slow: Whether one worker waits ten times as long.
    **options: As for `train`; with `save_every`, there is a folder.
  """

  def call():
    with tempfile.TemporaryDirectory() as folder:
      more = dict(options)
      if wait:
        mark = f'{folder}/slow' if slow else None
        more['compute'] = functools.partial(
            programs.waiting_gradient, wait, mark
        )
      if 'save_every' in options:
        more['folder'] = f'{folder}/run'
      return programs.library(model, num_workers, int(num_updates), **more)[0]

  return call


def rates(calls: Sequence[Callable[[], float]], rounds: int) -> np.ndarray:
  """Returns the results of calls that take turns, [number of calls, rounds]."""
  found = np.zeros([len(calls), rounds])
  for turn in range(rounds):
    for i in np.roll(np.arange(len(calls)), -turn).tolist():
      found[i, turn] = calls[i]()
      print(f'round {turn}: {i}: {found[i, turn]:.1f}', file=sys.stderr)
  return found


def line(
    part: str, size: str, first: Any, second: Any, noise: str, aim: str
) -> str:
  """Returns a line of the table."""
  return (
      f'{part:12}{size:8}{np.median(first):9.1f}{np.median(second):9.1f}'
      f'{timing.ratio(first, second):^22}{noise:^22}{aim}'
  )


def compare(
    part: str,
    size: str,
    first: Callable[[], float],
    second: Callable[[], float],
    aim: str,
) -> None:
  """Measures two programs, the first of them twice, and prints their line."""
  one, two, again = rates([first, second, first], _ROUNDS.value)
  noise = timing.ratio(again, one)
  print(line(part, size, one, two, noise, aim), flush=True)


def rivals(parts: Sequence[str]) -> None:
  """Compares two workers of the library with other programs, all in turn.

  The runs of the library, two a round, are the same in all lines of a size.
  """
  for size in _SIZES.value:
    num_updates = int(_SECONDS.value * SPEEDS[size])
    run = functools.partial(library, size, NUM_WORKERS, num_updates)
    others = [
        run(save_every=KEEPS[part] * SPEEDS[size])
        if part in KEEPS
        else in_process(RIVALS[part], size, NUM_WORKERS, num_updates)
        for part in parts
    ]
    plain, again, *found = rates([run(), run(), *others], _ROUNDS.value)
    for part, other in zip(parts, found, strict=True):
      # A journal is compared with none.
      pair = (other, plain) if part in KEEPS else (plain, other)
      aim = AIMS.get((part, size), '')
      noise = timing.ratio(again, plain)
      print(line(part, size, *pair, noise, aim), flush=True)


def waiting(part: str) -> None:
  """Compares four workers with one."""
  updates = _SECONDS.value / WAIT
  many = library('digits', 4, 4 * updates, WAIT)
  one = library('digits', 1, updates, WAIT)
  compare(part, 'digits', many, one, 'at least 3.6')


def pacing(part: str, *, slow: bool, aim: str) -> None:
  """Compares pacing with dropping."""
  run = functools.partial(
      library,
      'digits',
      4,
      _SECONDS.value / WAIT * (1 if slow else 2),
      WAIT,
      staleness=2,
      slow=slow,
  )
  compare(part, 'digits', run(pace=True), run(pace=False), aim)


def driver(part: str) -> None:
  """Prints the seconds for which an update occupies the driver."""
  for size in _SIZES.value:
    num_updates = _SECONDS.value * SPEEDS[size]
    run = library(size, 4, num_updates, compute=programs.free_gradient)
    seconds = 1e3 / rates([run], _ROUNDS.value)[0]
    print(
        f'{part:12}{size:8}{np.median(seconds):9.1f} ms an update'
        f' [{seconds.min():.1f}, {seconds.max():.1f}]',
        flush=True,
    )


def apply(part: str) -> None:
  """Compares the times of `ParameterServer.update` and of a plain step."""
  for size in _SIZES.value:
    calls = accepting(size), plain(size), accepting(size)
    timing.seconds_in_turn(calls, 2)
    seconds = timing.seconds_in_turn(calls, APPLY_ROUNDS)
    first, second, again = 1e3 / STEPS[size] * seconds
    noise = timing.ratio(again, first)
    print(line(part, size, first, second, noise, 'at most 1.15'), flush=True)


def accepting(size: str) -> Callable[[], Any]:
  """Returns a call in which a server accepts gradients."""
  params = programs.init(size)
  server = parameter_server.ParameterServer(programs.optimizer(), params)
  grads = from_store(params)
  # This optimizer does not use the parameters that were read.
  _, read = server.publish()
  contribution = parameter_server.Contribution(grads, read=read)

  def call():
    for _ in range(STEPS[size]):
      server.update([contribution._replace(local_step=server.global_step)])
    return server._params

  return call


def plain(size: str) -> Callable[[], Any]:
  """Returns a call of as many steps of the optimizer."""
  tx = programs.optimizer()
  step = jax.jit(functools.partial(programs.apply, tx), donate_argnums=(0, 1))
  params = jax.tree.map(jnp.array, programs.init(size))
  grads = from_store(params)
  ends = [(params, tx.init(params))]

  def call():
    for _ in range(STEPS[size]):
      ends.append(step(*ends.pop(), grads))
    return ends[0]

  return call


def from_store(tree: Any) -> Any:
  """Returns NumPy arrays as they come from Ray: read-only, and aligned."""
  return jax.tree.map(lambda x: np.asarray(jnp.array(x)), tree)


def memory(part: str) -> None:
  """Prints what is held in memory."""
  for size in _SIZES.value:
    if size != 'digits':
      updates = int(_SECONDS.value * SPEEDS[size])
      most, spilled = store_use(size, updates)
      print(
          f'{part:12}{size:8}object store at most {most:.1f} x the parameters,'
          f' {spilled} bytes spilled (aim: at most 5, none)',
          flush=True,
      )
  megabytes = driver_megabytes([1_000, MANY_UPDATES])
  print(
      f'{part:12}{"digits":8}driver after 1,000 and {MANY_UPDATES:,} updates:'
      f' {" and ".join(f"{size:.0f} MB" for size in megabytes)}',
      flush=True,
  )


def store_use(size: str, updates: int) -> tuple[float, int]:
  """Returns the most in the object store, in parameters, and bytes spilled."""
  seen = []
  programs.library(
      size,
      NUM_WORKERS,
      updates,
      compute=programs.watching_gradient,
      on_progress=lambda report: seen.append(report.metrics),
  )
  num_bytes = sum(x.nbytes for x in jax.tree.leaves(programs.init(size)))
  stored, spilled = (
      max(metrics.get(name, 0) for metrics in seen)
      for name in ('stored', 'spilled')
  )
  return stored / num_bytes, int(spilled)


def driver_megabytes(steps: Sequence[int]) -> list[float]:
  """Returns the memory of the driver after so many updates."""
  found = []

  def look(report):
    if len(found) < len(steps) and report.global_step >= steps[len(found)]:
      found.append(_driver().memory_info().rss / 1e6)

  programs.library('digits', NUM_WORKERS, steps[-1] + 200, on_progress=look)
  return found


def _driver():
  """Returns the process that has the parameters."""
  return next(
      process
      for process in psutil.Process().children(recursive=True)
      if driver_process._CHILD in process.cmdline()[2:3]
  )


RIVALS = {
    'ray': programs.ray_server,
    'pipes': programs.pipes,
    'shared': programs.shared_memory,
    'rpc': asynchronous_torch.torch_rpc,
}
MEASURES = {
    'apply': apply,
    'driver': driver,
    'waiting': waiting,
    'pacing': functools.partial(pacing, slow=False, aim='at least 0.9'),
    'slow_worker': functools.partial(pacing, slow=True, aim='at least 0.8'),
    'memory': memory,
}


def main(argv: Sequence[str]) -> None:
  """Prints the table."""
  timing.refuse_arguments(argv)
  os.environ['JAX_PLATFORMS'] = 'cpu'
  jax.config.update('jax_platforms', 'cpu')
  rounds = f'{_ROUNDS.value} rounds'
  print(
      f'{timing.setting(rounds)}\nAccepted updates a second; for "apply",'
      f' milliseconds a gradient.\n\n{HEADER}',
      flush=True,
  )
  parts = list(dict.fromkeys(_PARTS.value))
  # Ray tells how full its store is by `grpcio`, which it does not require.
  for part, module in ('rpc', 'torch'), ('memory', 'grpc'):
    if part in parts and importlib.util.find_spec(module) is None:
      print(f'{part:12}not measured: {module} is not installed', flush=True)
      parts.remove(part)
  others = [part for part in OTHERS if part in parts]
  if others:
    rivals(others)
  for part in parts:
    if part not in OTHERS:
      MEASURES[part](part)


if __name__ == '__main__':
  app.run(main)
