"""Times training steps of two processes that reduce their gradients over gloo.

The processes meet on loopback, one CPU device and one compute thread each. A
step is the forward and backward pass of an MLP over the process's own batch,
the mean of the gradients and the update of Adam. Programs differ in the mean:

* local: none, so that each process trains alone;
* by hand: `lax.pmean` of each leaf;
* library: `cross_shard_mean`; and once more, which shows what noise does (A/A);
* torch local and DDP, where PyTorch is installed: the same model and batch
  without a mean, and in `DistributedDataParallel` over its own gloo;
* psum: no step, but the sum of one buffer of as many bytes as the gradients.

All programs run in turn, all processes start each call together, and the
slowest process counts. What a mean costs is the time above the local step of
its framework. Intervals hold 95 % of bootstrap resamples of the rounds.
"""

from collections.abc import Callable
from collections.abc import Sequence
import functools
import importlib
import importlib.metadata
import importlib.util
import os
import re
import sys
import tempfile
from typing import Any

from absl import app
from absl import flags
import jax
from jax import lax
from jax.experimental import multihost_utils
import jax.numpy as jnp
import numpy as np
import optax
import timing

import shard_transforms
from shard_transforms.contrib import reproducible

AXIS = 'data'
LEARNING_RATE = 1e-3

_MODELS = flags.DEFINE_list(
    'models',
    ['60x128', '20x512', '100x64'],
    'MLPs to train, each the number of layers and their width.',
)
_PROCESSES = flags.DEFINE_integer(
    'processes', 2, 'Processes, one a shard.', lower_bound=2
)
_BATCH_SIZE = flags.DEFINE_integer(
    'batch_size', 32, 'Rows of the batch of a process.', lower_bound=1
)
_ROUNDS = flags.DEFINE_integer(
    'rounds', 41, 'Timed calls of each program.', lower_bound=2
)
_TREE = flags.DEFINE_bool(
    'tree', False, 'Whether the library adds in the order of a tree.'
)
_PIN = flags.DEFINE_bool(
    'pin', True, 'Whether each process, with all its threads, has one core.'
)
_RENDEZVOUS = flags.DEFINE_string(
    'rendezvous', None, 'Set for the processes: the file where torch meets.'
)

_LAYERS_X_WIDTH = re.compile(r'([1-9]\d*)x([1-9]\d*)')


@flags.validator('models', message="must hold layers and width, as in '60x128'")
def _are_models(names):
  return all(_LAYERS_X_WIDTH.fullmatch(name) for name in names or [''])


def loss_fn(params: Any, inputs: jax.Array, targets: jax.Array) -> jax.Array:
  """Returns the mean squared error of the MLP."""
  *hidden, last = params
  for layer in hidden:
    inputs = jax.nn.relu(inputs @ layer['w'] + layer['b'])
  return jnp.mean((inputs @ last['w'] + last['b'] - targets) ** 2)


def random_params(num_layers: int, width: int) -> list[dict[str, np.ndarray]]:
  """Returns the same parameters on all processes."""
  rng = np.random.default_rng(0)
  scale = np.float32(np.sqrt(2 / width))
  return [
      {
          'w': scale * rng.standard_normal((width, width), np.float32),
          'b': np.zeros(width, np.float32),
      }
      for _ in range(num_layers)
  ]


def random_batch(width: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns inputs and targets that differ between the processes."""
  rng = np.random.default_rng(1 + jax.process_index())
  shape = (_BATCH_SIZE.value, width)
  inputs, targets = rng.standard_normal((2, *shape), np.float32)
  return inputs, targets


def placed(tree: Any, mesh: jax.sharding.Mesh, spec: jax.P) -> Any:
  """Returns arrays of all processes, from each one's own part."""
  sharding = jax.NamedSharding(mesh, spec)
  return jax.tree.map(
      functools.partial(jax.make_array_from_process_local_data, sharding), tree
  )


def mean_by_hand(grads: Any) -> Any:
  """Returns the mean over the shards, leaf by leaf."""
  return jax.tree.map(lambda g: lax.pmean(g, AXIS), grads)


def library_transform() -> optax.GradientTransformationExtraArgs:
  """Returns the mean over the shards as a transformation."""
  make = (
      reproducible.cross_shard_mean
      if _TREE.value
      else shard_transforms.cross_shard_mean
  )
  return make(AXIS)


def mean_by_library(grads: Any) -> Any:
  """Returns the mean over the shards, through `cross_shard_mean`."""
  tx = library_transform()
  return tx.update(grads, tx.init(grads))[0]


def hand_step(params: Any, state: Any, *batch: jax.Array) -> tuple[Any, Any]:
  """Trains with a mean that is written by hand."""
  grad_fn = shard_transforms.value_and_grad(loss_fn, AXIS)
  _, grads = grad_fn(params, *batch)
  tx = optax.adam(LEARNING_RATE)
  updates, state = tx.update(mean_by_hand(grads), state)
  return optax.apply_updates(params, updates), state


def library_step(params: Any, state: Any, *batch: jax.Array) -> tuple[Any, Any]:
  """Trains with the library's mean."""
  grad_fn = shard_transforms.value_and_grad(loss_fn, AXIS)
  _, grads = grad_fn(params, *batch)
  updates = mean_by_library(grads)
  updates, state = optax.adam(LEARNING_RATE).update(updates, state)
  return optax.apply_updates(params, updates), state


def local_step(params: Any, state: Any, *batch: jax.Array) -> tuple[Any, Any]:
  """Trains each process alone."""
  grads = jax.grad(loss_fn)(params, *batch)
  updates, state = optax.adam(LEARNING_RATE).update(grads, state)
  return optax.apply_updates(params, updates), state


def training(
    step: Callable,
    mesh: jax.sharding.Mesh,
    params: Any,
    batch: Any,
    *,
    check_vma: bool = True,
) -> Callable:
  """Returns a call that trains by one step, in the buffers of the last."""
  mapped = jax.shard_map(
      step,
      mesh=mesh,
      in_specs=(jax.P(), jax.P(), jax.P(AXIS), jax.P(AXIS)),
      out_specs=jax.P(),
      check_vma=check_vma,
  )
  jitted = jax.jit(mapped, donate_argnums=(0, 1))
  batch = placed(batch, mesh, jax.P(AXIS))
  carry = placed(params, mesh, jax.P())
  state = placed(optax.adam(LEARNING_RATE).init(params), mesh, jax.P())
  carry = carry, state

  def call():
    nonlocal carry
    carry = jitted(*carry, *batch)
    return carry

  return call


def raw_psum(mesh: jax.sharding.Mesh, num_elements: int) -> Callable:
  """Returns a call that sums one buffer over the shards."""
  summed = jax.shard_map(
      lambda x: lax.psum(x, AXIS),
      mesh=mesh,
      in_specs=jax.P(AXIS),
      out_specs=jax.P(),
  )
  x = placed(np.ones(num_elements, np.float32), mesh, jax.P(AXIS))
  return functools.partial(jax.jit(summed), x)


def largest_difference(mesh: jax.sharding.Mesh, params: Any, batch: Any) -> str:
  """Compares the two means, relative to the largest element of a leaf."""

  def difference(params, *batch):
    grad_fn = shard_transforms.value_and_grad(loss_fn, AXIS)
    _, grads = grad_fn(params, *batch)
    hand, library = mean_by_hand(grads), mean_by_library(grads)
    errors = jax.tree.map(
        lambda a, b: jnp.abs(a - b).max() / jnp.abs(a).max(), hand, library
    )
    return jnp.stack(jax.tree.leaves(errors)).max()

  mapped = jax.shard_map(
      difference,
      mesh=mesh,
      in_specs=(jax.P(), jax.P(AXIS), jax.P(AXIS)),
      out_specs=jax.P(),
  )
  params = placed(params, mesh, jax.P())
  return f'{jax.jit(mapped)(params, *placed(batch, mesh, jax.P(AXIS))):.0e}'


def torch_training(torch: Any, params: Any, batch: Any, *, ddp: bool) -> Any:
  """Returns a call that trains the same model with PyTorch."""
  layers = []
  for layer in params:
    linear = torch.nn.Linear(*layer['w'].shape)
    with torch.no_grad():
      linear.weight.copy_(torch.from_numpy(layer['w'].T.copy()))
      linear.bias.copy_(torch.from_numpy(layer['b']))
    layers += [linear, torch.nn.ReLU()]
  model = torch.nn.Sequential(*layers[:-1])
  if ddp:
    model = torch.nn.parallel.DistributedDataParallel(model)
  optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
  inputs, targets = (torch.from_numpy(x) for x in batch)

  def call():
    optimizer.zero_grad()
    torch.nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()

  return call


def seconds_of(calls: Sequence[Callable], barrier: Callable) -> np.ndarray:
  """Times calls in turn; the slowest process counts.

  Args:
    calls: Functions without arguments.
    barrier: Returns when all processes have called it.

  Returns:
    The seconds, of shape [number of calls, rounds].
  """
  for call in 2 * list(calls):
    jax.block_until_ready(call())
  seconds = timing.seconds_in_turn(
      calls, _ROUNDS.value, before=lambda: jax.block_until_ready(barrier())
  )
  return np.max(multihost_utils.process_allgather(seconds), axis=0)


def ratio(some: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> str:
  """Returns the ratio of two differences of medians, and its interval.

  Args:
    some: The seconds of all rounds, and those to subtract.
    others: The same.

  Returns:
    The ratio and its interval.
  """

  def quotient(times):
    step, base, other_step, other_base = np.median(times, -1)
    return (step - base) / (other_step - other_base)

  times = np.stack([*some, *others])
  rng = np.random.default_rng(0)
  draws = rng.integers(_ROUNDS.value, size=[2_000, _ROUNDS.value])
  low, high = np.quantile(quotient(times[:, draws]), [0.025, 0.975])
  return f'{quotient(times):.2f} [{low:.2f}, {high:.2f}]'


def report(
    name: str, mesh: jax.sharding.Mesh, barrier: Callable, torch: Any
) -> str:
  """Measures one model and returns its part of the table."""
  num_layers, width = (int(n) for n in name.split('x'))
  params, batch = random_params(num_layers, width), random_batch(width)
  num_elements = sum(x.size for x in jax.tree.leaves(params))
  calls = {
      'local': training(local_step, mesh, params, batch, check_vma=False),
      'by hand': training(hand_step, mesh, params, batch),
      'library': training(library_step, mesh, params, batch),
      'library, A/A': training(library_step, mesh, params, batch),
      'psum': raw_psum(mesh, num_elements),
  }
  if torch is not None:
    calls['torch local'] = torch_training(torch, params, batch, ddp=False)
    calls['DDP'] = torch_training(torch, params, batch, ddp=True)
  times = seconds_of(list(calls.values()), barrier)
  seconds = dict(zip(calls, times, strict=True))
  seconds['nothing'] = np.zeros(_ROUNDS.value)
  above = {
      step: (seconds[step], seconds[base])
      for step, base in BASES.items()
      if step in seconds
  }
  difference = largest_difference(mesh, params, batch)
  lines = [
      f'\n{name}, {4e-6 * num_elements:.2f} MB, largest difference of library'
      f' and by hand: {difference}',
      f'{"":14}{"ms":>9}{"above local":>13}',
  ]
  for step in calls:
    median = f'{step:14}{1e3 * np.median(seconds[step]):9.2f}'
    cost = -np.diff(np.median(above.get(step, [[0], [0]]), -1))[0]
    lines.append(f'{median}{1e3 * cost:13.2f}' if step in above else median)
  lines += [
      f'library / {step}: {ratio(above["library"], above[step])}'
      for step in ('library, A/A', 'by hand', 'psum', 'DDP')
      if step in above
  ]
  return '\n'.join(lines)


# The call whose time is subtracted to give the cost of a mean.
BASES = {
    'by hand': 'local',
    'library': 'local',
    'library, A/A': 'local',
    'psum': 'nothing',
    'DDP': 'torch local',
}


def start_processes() -> None:
  """Runs this program in all processes, and says in what setting."""
  torch = 'no torch'
  if importlib.util.find_spec('torch') is not None:
    torch = f'torch {importlib.metadata.version("torch")}'
  pinned = ', one core each' if _PIN.value else ''
  processes = f'{_PROCESSES.value} processes{pinned}'
  print(
      f'{timing.setting(torch, processes)}\nMedians of {_ROUNDS.value} calls.',
      flush=True,
  )
  # Read when XLA and PyTorch start; gloo's own choice is not loopback.
  os.environ['XLA_FLAGS'] = '--xla_cpu_multi_thread_eigen=false'
  os.environ['OMP_NUM_THREADS'] = '1'
  os.environ['GLOO_SOCKET_IFNAME'] = 'lo'
  with tempfile.TemporaryDirectory() as folder:
    rendezvous = f'--rendezvous={folder}/torch'
    command = [sys.executable, *sys.argv, rendezvous]
    shard_transforms.launch.run_processes(_PROCESSES.value, command)


def main(argv: Sequence[str]) -> None:
  """Prints the table, model by model as it is measured."""
  timing.refuse_arguments(argv)
  if _RENDEZVOUS.value is None:
    start_processes()
    return
  timing.begin(argv, is_cached=False)
  num_cores = os.cpu_count() or 1
  if _PIN.value:
    # Threads that start later inherit it: those of XLA and gloo do.
    process_id = int(os.environ['JAX_PROCESS_ID'])
    os.sched_setaffinity(0, {process_id % num_cores})
  shard_transforms.launch.join_processes()
  torch = None
  if importlib.util.find_spec('torch') is not None:
    torch = importlib.import_module('torch')
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        'gloo',
        init_method=f'file://{_RENDEZVOUS.value}',
        rank=jax.process_index(),
        world_size=_PROCESSES.value,
    )
  mesh = jax.make_mesh(
      (_PROCESSES.value,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,)
  )
  barrier = raw_psum(mesh, 1)
  for name in _MODELS.value:
    print(report(name, mesh, barrier, torch), flush=True)
  if torch is not None:
    torch.distributed.destroy_process_group()


if __name__ == '__main__':
  app.run(main)
