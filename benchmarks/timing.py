"""Begins a benchmark, times calls side by side, and compares the times."""

from collections.abc import Callable
from collections.abc import Sequence
import os
import shlex
import sys
import time

from absl import app
import jax
import numpy as np


def refuse_arguments(argv: Sequence[str]) -> None:
  """Checks that a command has flags only.

  Raises:
    UsageError: If it has other arguments.
  """
  if len(argv) > 1:
    raise app.UsageError(f'Unknown arguments: {" ".join(argv[1:])}')


def begin(
    argv: Sequence[str], num_devices: int = 1, is_cached: bool = True
) -> None:
  """Refuses arguments, and has JAX run on virtual CPU devices.

  Args:
    argv: The command line.
    num_devices: The number of devices.
    is_cached: Whether programs may come from the cache of compiled ones.
  """
  refuse_arguments(argv)
  jax.config.update('jax_platforms', 'cpu')
  jax.config.update('jax_num_cpu_devices', num_devices)
  jax.config.update('jax_enable_compilation_cache', is_cached)


def seconds_in_turn(
    calls: Sequence[Callable],
    rounds: int,
    before: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> np.ndarray:
  """Times calls in turn, in another order in each round.

  A call may leave the machine in a state in which the next one is slower, so
  that with a fixed order the same call always pays. The orders are the same in
  all processes.

  Args:
    calls: Functions without arguments.
    rounds: How often each is called.
    before: Is called before each, outside its time.
    clock: Returns the time in seconds.

  Returns:
    The seconds, of shape [number of calls, rounds].
  """
  seconds = np.zeros([len(calls), rounds])
  rng = np.random.default_rng(0)
  for turn in range(rounds):
    for i in rng.permutation(len(calls)).tolist():
      before()
      start = clock()
      jax.block_until_ready(calls[i]())
      seconds[i, turn] = clock() - start
  return seconds


def setting(*more: str) -> str:
  """Returns the command line and what it runs on, for the head of a table."""
  where = [f'JAX {jax.__version__}', f'{os.cpu_count()} cores', *more]
  return f'{shlex.join(["python", *sys.argv])}\n{", ".join(where)}'


def ratio(seconds: np.ndarray, reference: np.ndarray) -> str:
  """Returns the ratio of the medians of paired times, and its interval."""
  rng = np.random.default_rng(0)
  draws = rng.integers(len(seconds), size=[2_000, len(seconds)])
  ratios = np.median(seconds[draws], 1) / np.median(reference[draws], 1)
  low, high = np.quantile(ratios, [0.025, 0.975])
  middle = np.median(seconds) / np.median(reference)
  return f'{middle:.2f} [{low:.2f}, {high:.2f}]'
