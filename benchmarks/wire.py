"""Times training steps of two processes over a link of a known rate.

Each process has one CPU device, and an end of its own of the link: two network
namespaces of this machine, whose ends send at 100 Mbit/s, for example. A step
is the forward and backward pass of an MLP over the process's own batch and what
an optimizer of `make_optimizers` does. Means are over whole rounds of the
optimizer; the slower process counts. `local` is a step that sends nothing. If
PyTorch is installed, its steps with and without hooks are beside these.

Needs root, `ip` and `tc`. Where these are missing, it says so, and prints the
bytes that steps send alone.
"""

from collections.abc import Callable
from collections.abc import Sequence
import functools
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any, NamedTuple

from absl import app
from absl import flags
from absl import logging
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import shaped_link

import shard_transforms
from shard_transforms import cross_shard_mean
from shard_transforms.contrib import compression
from shard_transforms.contrib import local_updates

AXIS = 'data'
EVERY = 20
PORT = 12355
INT8, POWER_SGD = 'int8', 'PowerSGD 4'

_RATES = flags.DEFINE_list(
    'rates',
    ['none', '1gbit', '100mbit'],
    "What the ends of the link send at, as `tc` writes it, or 'none'.",
)
_LAYERS = flags.DEFINE_integer('layers', 20, 'Layers of the MLP.')
_WIDTH = flags.DEFINE_integer('width', 512, 'Their width.')
_BATCH_SIZE = flags.DEFINE_integer('batch_size', 32, 'Rows of each process.')
_STEPS = flags.DEFINE_integer(
    'steps', 4, 'Timed steps of what sends in each, or a tenth of the others.'
)
_OPTIMIZERS = flags.DEFINE_list(
    'optimizers', None, 'Those to time beside the mean and `local`, or all.'
)
_SECONDS = flags.DEFINE_integer(
    'seconds', 400, 'After how long processes that have not ended are killed.'
)
_RESULTS = flags.DEFINE_string(
    'results', None, 'Set for the processes: the file that times are put in.'
)


class Optimizer(NamedTuple):
  """What is timed.

  Attributes:
    tx: The transformation, with its reduction.
    every: The number of steps of a round.
    at: At which parameters the gradient is taken.
    devices: The devices that train together.
  """

  tx: optax.GradientTransformationExtraArgs
  every: int = 1
  at: Callable[[Any, Any], Any] = lambda params, state: params
  devices: Callable[[], list[Any]] = jax.devices


def _local(mean=None, **options):
  mean = cross_shard_mean(AXIS) if mean is None else mean
  outer = optax.chain(mean, optax.sgd(0.7, 0.9, nesterov=True))
  tx = local_updates(optax.adam(1e-3), outer, AXIS, every=EVERY, **options)
  return Optimizer(tx, EVERY, shard_transforms.contrib.local_params)


def make_optimizers() -> dict[str, Optimizer]:
  """Returns the optimizers; times are relative to the first one."""
  int8, sign = compression.quantize(8), compression.scaled_sign()

  def each(mean):
    return Optimizer(optax.chain(mean, optax.adam(1e-3)))

  def compressed(compressor):
    return compression.compressed_mean(AXIS, compressor)

  mean = each(cross_shard_mean(AXIS))
  return {
      'cross_shard_mean': mean,
      'local': mean._replace(devices=jax.local_devices),
      INT8: each(compressed(int8)),
      'sign': each(compressed(sign)),
      'top-k 1/32': each(compressed(compression.top_k(1 / 32))),
      POWER_SGD: each(compression.power_sgd(AXIS, 4)),
      f'DiLoCo {EVERY}': _local(),
      f'streaming {EVERY} / 4': _local(fragments=4),
      f'DiLoCo {EVERY}, int8': _local(compressed(int8)),
  }


def make_params() -> list[dict[str, jax.Array]]:
  """Returns the parameters, the same on all processes."""
  rng, width = np.random.default_rng(0), _WIDTH.value
  return [
      {
          'w': jnp.float32(rng.normal(size=(width, width)) / width**0.5),
          'b': jnp.zeros(width),
      }
      for _ in range(_LAYERS.value)
  ]


def loss_fn(params: Any, inputs: jax.Array) -> jax.Array:
  """Returns the loss of the MLP."""
  for layer in params:
    inputs = jnp.tanh(inputs @ layer['w'] + layer['b'][None])
  return jnp.mean(inputs**2)


def train_step(optimizer, params, state, inputs):
  """Returns the parameters and the state after a step."""
  at = optimizer.at(params, state)
  _, grads = shard_transforms.value_and_grad(loss_fn, AXIS)(at, inputs)
  updates, state = optimizer.tx.update(grads, state, params)
  return optax.apply_updates(params, updates), state


def seconds_a_step(optimizer: Optimizer) -> float:
  """Returns the time that this process measures, over whole rounds."""
  devices = optimizer.devices()
  mesh = jax.make_mesh((len(devices),), (AXIS,), devices=devices)
  params = make_params()
  specs = shard_transforms.state_specs(optimizer.tx, params, mesh)
  step = jax.shard_map(
      functools.partial(train_step, optimizer),
      mesh=mesh,
      in_specs=(P(), specs, P(AXIS)),
      out_specs=(P(), specs),
  )
  step = jax.jit(step, donate_argnums=(0, 1))
  state = shard_transforms.init_state(optimizer.tx, params, mesh)
  params = jax.device_put(params, jax.NamedSharding(mesh, P()))
  shape = _BATCH_SIZE.value, _WIDTH.value
  own = np.random.default_rng(jax.process_index()).normal(size=shape)
  inputs = jax.make_array_from_process_local_data(
      jax.NamedSharding(mesh, P(AXIS)), np.float32(own)
  )
  num_steps = _STEPS.value if optimizer.every == 1 else 10 * _STEPS.value
  num_steps = -(-num_steps // optimizer.every) * optimizer.every
  # A warm-up of a whole round or some steps, to compile and connect everything
  # and until the allocator has all memory that a step takes.
  for _ in range(max(optimizer.every, 3)):
    params, state = step(params, state, inputs)
  jax.block_until_ready(params)
  start = time.perf_counter()
  for _ in range(num_steps):
    params, state = step(params, state, inputs)
  jax.block_until_ready(params)
  return (time.perf_counter() - start) / num_steps


def measure(results: str) -> None:
  """Times all optimizers in one of the processes, and leaves that in a file."""
  shard_transforms.launch.join_processes()
  optimizers = make_optimizers()
  chosen = _OPTIMIZERS.value or optimizers
  found = {
      name: seconds_a_step(optimizer)
      for name, optimizer in optimizers.items()
      if name in chosen or name in ('cross_shard_mean', 'local')
  }
  pathlib.Path(results).write_text(json.dumps(found))


def times_at(rate: str) -> dict[str, float]:
  """Returns the seconds a step of each optimizer, over a link."""
  with shaped_link.shaped_link(rate) as ends:
    found = slowest_times(ends, start_jax)
    if importlib.util.find_spec('torch') is not None:
      try:
        found |= slowest_times(ends, start_torch)
      except (RuntimeError, subprocess.TimeoutExpired) as error:
        print(f'PyTorch is not timed at {rate}: {error}')
  return found


def slowest_times(
    ends: list[list[str]],
    start: Callable[[list[str], int, str], subprocess.Popen],
) -> dict[str, float]:
  """Runs a process at each end of a link, and returns the larger times.

  Args:
    ends: The words in front of a command that run it there.
    start: Takes such words, the number of the process, and the file in which
      it leaves its times; starts the process.

  Raises:
    RuntimeError: If a process fails.
    subprocess.TimeoutExpired: If one takes too long.
  """
  with tempfile.TemporaryDirectory() as folder:
    files = [pathlib.Path(folder) / str(number) for number in range(2)]
    processes = []
    try:
      for number, (end, file) in enumerate(zip(ends, files, strict=True)):
        processes.append(start(end, number, str(file)))
      stop = time.monotonic() + _SECONDS.value
      if any(p.wait(max(stop - time.monotonic(), 0)) for p in processes):
        raise RuntimeError('A process has failed; see above.')
    finally:
      for process in processes:
        process.kill()
        process.wait()
    found = [json.loads(file.read_text()) for file in files]
  return {name: max(times[name] for times in found) for name in found[0]}


def start_jax(end: list[str], number: int, results: str) -> subprocess.Popen:
  """Starts a process that times the optimizers."""
  return subprocess.Popen(
      [*end, sys.executable, *sys.argv, f'--results={results}'],
      env={
          **os.environ,
          'JAX_PLATFORMS': 'cpu',
          'JAX_COORDINATOR_ADDRESS': f'{shaped_link.ADDRESSES[0]}:{PORT}',
          'JAX_NUM_PROCESSES': '2',
          'JAX_PROCESS_ID': str(number),
          'JAX_CPU_COLLECTIVES_IMPLEMENTATION': 'gloo',
      },
      stdout=subprocess.DEVNULL,
  )


def start_torch(end: list[str], number: int, results: str) -> subprocess.Popen:
  """Starts a process that times PyTorch."""
  program = pathlib.Path(__file__).with_name('wire_torch.py')
  options = {
      'meeting': f'{shaped_link.ADDRESSES[0]}:{PORT + 1}',
      'rank': number,
      'results': results,
      'layers': _LAYERS.value,
      'width': _WIDTH.value,
      'batch_size': _BATCH_SIZE.value,
      'steps': _STEPS.value,
  }
  words = [f'--{name}={value}' for name, value in options.items()]
  return subprocess.Popen(
      [*end, sys.executable, str(program), *words],
      env={**os.environ, 'GLOO_SOCKET_IFNAME': 'wire', 'OMP_NUM_THREADS': '1'},
      stdout=subprocess.DEVNULL,
  )


def print_bytes() -> None:
  """Prints what a step of each optimizer sends."""
  params = jax.eval_shape(make_params)
  print(f'{"":20}  bytes a step')
  for name, optimizer in make_optimizers().items():
    if optimizer.devices is jax.local_devices:
      continue
    report = shard_transforms.monitoring.communication_report(
        lambda grads, tx=optimizer.tx: tx.update(grads, tx.init(grads), grads),
        params,
        axis_sizes={AXIS: 2},
    )
    print(f'{name:20}  {report.total_bytes / optimizer.every:12,.0f}')


def print_against_torch(rate: str, times: dict[str, float]) -> None:
  """Prints how times compare with those of PyTorch, where there are any."""
  if 'PyTorch, local' not in times:
    return
  if POWER_SGD in times:
    own = times[POWER_SGD] - times['local']
    hook = times['PyTorch, PowerSGD 4'] - times['PyTorch, local']
    print(f'{rate}: PowerSGD / the hook, both above local {own / hook:.3f}')
  if INT8 in times:
    ratio = times[INT8] / times['PyTorch, fp16']
    print(f'{rate}: int8 / DDP with the fp16 hook {ratio:.3f}')


def main(argv: Sequence[str]) -> None:
  """Prints what steps send, and how long they take at each rate."""
  # JAX informs about each platform that it does not find.
  logging.set_verbosity(logging.WARNING)
  if len(argv) > 1:
    raise app.UsageError(f'There are flags only, got {argv[1:]}.')
  if _RESULTS.value is not None:
    measure(_RESULTS.value)
    return
  print_bytes()
  if not shaped_link.is_available():
    print('No link can be shaped here: that needs root, `ip` and `tc`.')
    return
  print(f'\n{"":20}  ' + '  '.join(f'{rate:>16}' for rate in _RATES.value))
  columns = [times_at(rate) for rate in _RATES.value]
  for name in columns[0]:
    cells = []
    for times in columns:
      if name not in times:
        cells.append('not timed')
        continue
      ratio = times[name] / next(iter(times.values()))
      cells.append(f'{1e3 * times[name]:8.1f} ms {ratio:.3f}')
    print(f'{name:20}  ' + '  '.join(f'{cell:>16}' for cell in cells))
  for rate, times in zip(_RATES.value, columns, strict=True):
    print_against_torch(rate, times)


if __name__ == '__main__':
  app.run(main)
