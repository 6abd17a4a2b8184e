"""Trains a classifier of handwritten digits in four ways that agree.

(a) on one device with the large batch, (b) over shards with `cross_shard_mean`,
(c) over shards with `tower_reduce`, (d) over shards with `drop_stale`, its
gradients taken at old parameters. (b) and (c) must end where (a) does.

With `--reproducible`, it trains in one way instead, to the same bits on any
number of shards: (e) with `reproducible.tower_reduce`.

With `--processes 2`, the shards are those of two processes, which this program
starts; on a cluster, `shard_transforms.launch.join_processes` says what to set.
With `--checkpoint_dir`, the same command resumes where the last one ended. With
`--log_dir`, each way writes a CSV of its metrics, a row a call.
"""

from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
import csv
import functools
import itertools
import math
import os
import pathlib
import sys
from typing import Any, NamedTuple

from absl import app
from absl import flags
from absl import logging
import checkpoints
import digits
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import tqdm

import shard_transforms
from shard_transforms import monitoring
from shard_transforms.contrib import reproducible

AXIS = 'data'
NUM_TOWERS = 4
STALENESS = 3
MAX_AGE = 6
# Of a step with `--reproducible`, on any number of shards.
NUM_MICRO_BATCHES = 16
LOG_EVERY = 50
STEPS = 500
MIN_ACCURACY = 0.96
MAX_DIFFERENCE = 1e-5

_SHARDS = flags.DEFINE_integer(
    'shards',
    None,
    'Number of shards, those of all processes together; by default as many as'
    ' there are devices, if the batch can be divided among them. Without an'
    ' accelerator, this many virtual devices are started, or 8.',
    lower_bound=1,
)
_PROCESSES = flags.DEFINE_integer(
    'processes',
    1,
    'Number of processes to start on this host; of no effect where the'
    ' environment names a cluster to join.',
    lower_bound=1,
)
_STEPS = flags.DEFINE_integer(
    'steps',
    STEPS,
    'Number of large batches; with fewer than by default, the accuracy is not'
    ' checked.',
    lower_bound=1,
)
_MODE = flags.DEFINE_enum(
    'mode',
    'shard_map',
    ['shard_map', 'shard_map_unchecked', 'pmap'],
    'How steps are mapped over the shards.',
)
_OUTPUT_DIR = flags.DEFINE_string(
    'output_dir', 'digits_out', 'Folder that the figure is written to.'
)
_BATCH_SIZE = flags.DEFINE_integer(
    'batch_size', 256, 'Size of a large batch.', lower_bound=4, upper_bound=1024
)
_LEARNING_RATE = flags.DEFINE_float(
    'learning_rate', 0.05, 'Learning rate.', lower_bound=0
)
_SEED = flags.DEFINE_integer('seed', 0, 'Seed of all chance.', lower_bound=0)
_REPRODUCIBLE = flags.DEFINE_boolean(
    'reproducible',
    False,
    f'Whether to train to the same bits on 1, 2, 4, 8 or {NUM_MICRO_BATCHES}'
    ' shards, with a digest beside the loss; the same command with another'
    ' `--shards` or `--processes` resumes it, but for `--mode=pmap`.',
)
_CHECKPOINT_DIR = flags.DEFINE_string(
    'checkpoint_dir',
    None,
    'Folder of checkpoints, to go on from where there are any; all processes'
    ' must see the same. By default, there are none.',
)
_LOG_DIR = flags.DEFINE_string(
    'log_dir',
    None,
    'Folder that the metrics of each way are written to; by default, none are.',
    # `absl.logging` has one of this name, for files that are not written here.
    allow_override=True,
)
_CHECKPOINT_EVERY = flags.DEFINE_integer(
    'checkpoint_every',
    50,
    'Number of calls between checkpoints.',
    lower_bound=1,
)


@flags.multi_flags_validator(
    ['batch_size', 'shards', 'processes', 'reproducible']
)
def _can_be_divided(values):
  parts = (values['shards'] or values['processes']) * NUM_TOWERS
  if values['reproducible']:
    num_shards = values['shards'] or values['processes']
    if (
        values['batch_size'] % NUM_MICRO_BATCHES
        or NUM_MICRO_BATCHES % num_shards
    ):
      raise flags.ValidationError(
          f'`--batch_size` with `--reproducible` must be a multiple of'
          f' {NUM_MICRO_BATCHES} micro-batches, and these a multiple of'
          ' `--shards` and `--processes`.'
      )
  elif values['batch_size'] % parts:
    raise flags.ValidationError(
        f'`--batch_size` must be a multiple of shards x {NUM_TOWERS} towers ='
        f' {parts}.'
    )
  return True


class Train(NamedTuple):
  """The state that is carried from call to call."""

  params: Any
  opt_state: Any
  # The latest parameters, those of step s at index s modulo the length.
  history: Any = None


class Run(NamedTuple):
  """One of the four ways."""

  name: str
  place: Callable[..., tuple[Any, ...]]
  tx: optax.GradientTransformationExtraArgs
  step: Callable[..., tuple[Train, dict[str, jax.Array]]]
  num_towers: int = 1


def shard_gradient(params: Any, images: jax.Array, labels: jax.Array) -> Any:
  """Returns the loss over all shards, and the gradient of the shard's own."""
  value_and_grad = shard_transforms.value_and_grad(digits.loss_fn, AXIS)
  loss, grads = value_and_grad(params, images, labels)
  return shard_transforms.shard_mean(loss, AXIS), grads


def train_step(tx, gradient, axis_name, train, images, labels):
  """Trains with the gradient at the current parameters."""
  loss, grads = gradient(train.params, images, labels)
  updates, opt_state = tx.update(grads, train.opt_state, train.params)
  params = optax.apply_updates(train.params, updates)
  told = monitoring.metrics(opt_state, axis_name=axis_name)
  return Train(params, opt_state), {'loss': loss, **told}


def stale_step(tx, gradient, axis_name, train, images, labels):
  """Trains with a gradient at parameters that are 0 to `MAX_AGE` steps old."""
  params, state, history = train
  num_calls = state.global_step + state.stale_count
  key = jax.random.fold_in(jax.random.key(_SEED.value), num_calls)
  age = jax.random.randint(key, (), 0, MAX_AGE + 1)
  local_step = jnp.maximum(state.global_step - age, 0)
  old_params = jax.tree.map(lambda h: h[local_step % len(h)], history)

  loss, grads = gradient(old_params, images, labels)
  updates, opt_state = tx.update(grads, state, params, local_step=local_step)
  params = optax.apply_updates(params, updates)

  history = jax.tree.map(
      lambda h, p: h.at[opt_state.global_step % len(h)].set(p), history, params
  )
  metrics = {
      'loss': loss,
      'staleness': state.global_step - local_step,
      'dropped': opt_state.stale_count > state.stale_count,
      **monitoring.metrics(opt_state, axis_name=axis_name),
  }
  return Train(params, opt_state, history), metrics


def reproducible_step(
    num_towers, tx, gradient, axis_name, train, images, labels
):
  """Trains on the micro-batches of a step; its loss is the mean over all."""
  del gradient, axis_name
  value_and_grad = shard_transforms.value_and_grad(digits.loss_fn, AXIS)

  def tower(carry, batch):
    loss, grads = value_and_grad(carry.params, *batch)
    updates, state = tx.update(grads, carry.opt_state, carry.params)
    return Train(optax.apply_updates(carry.params, updates), state), loss

  towers = [x.reshape(num_towers, -1, *x.shape[1:]) for x in (images, labels)]
  train, losses = jax.lax.scan(tower, train, towers)
  mean = reproducible.cross_shard_mean(AXIS, num_towers=num_towers)
  loss, _ = mean.update(losses, mean.init(losses[0]))
  return train, {'loss': jnp.asarray(loss)}


def place_on_one_device(run, params, history, devices):
  """Returns the step, its initial `Train`, and how to move data to devices."""
  del devices
  gradient = jax.value_and_grad(digits.loss_fn)
  step = functools.partial(run.step, run.tx, gradient, None)
  train = Train(params, run.tx.init(params), history)
  return jax.jit(step, donate_argnums=0), train, jax.device_put, jax.device_get


def place_with_shard_map(run, params, history, devices):
  """Does the same for shards on a mesh."""
  mesh = jax.make_mesh((len(devices),), (AXIS,), devices=devices)
  specs = Train(P(), shard_transforms.state_specs(run.tx, params, mesh), P())
  step = jax.shard_map(
      functools.partial(run.step, run.tx, shard_gradient, AXIS),
      mesh=mesh,
      in_specs=(specs, P(AXIS), P(AXIS)),
      out_specs=(specs, P()),
      check_vma=_MODE.value == 'shard_map',
  )
  opt_state = shard_transforms.init_state(run.tx, params, mesh)
  params, history = jax.device_put((params, history), NamedSharding(mesh, P()))

  def put(batch):
    # Each process has all of the batch, and places what its shards need.
    sharding = NamedSharding(mesh, P(AXIS))
    return [
        jax.make_array_from_callback(x.shape, sharding, x.__getitem__)
        for x in batch
    ]

  def get(tree):
    return jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), tree)

  train = Train(params, opt_state, history)
  return jax.jit(step, donate_argnums=0), train, put, get


def place_with_pmap(run, params, history, devices):
  """Does the same for shards of `jax.pmap`."""
  pmap = functools.partial(jax.pmap, axis_name=AXIS, devices=devices)
  step = functools.partial(run.step, run.tx, shard_gradient, AXIS)
  here = [d.process_index == jax.process_index() for d in devices]
  params, history = jax.tree.map(
      lambda x: jnp.stack([x] * sum(here)), (params, history)
  )

  def put(batch):
    # `jax.pmap` takes the parts of the shards of this process alone.
    return [x.reshape(len(devices), -1, *x.shape[1:])[here] for x in batch]

  def get(tree):
    return jax.tree.map(lambda x: np.asarray(x.addressable_data(0))[0], tree)

  def init(params, history):
    return Train(params, run.tx.init(params), history)

  train = pmap(init)(params, history)
  return pmap(step, donate_argnums=0), train, put, get


def make_runs(num_shards: int) -> list[Run]:
  """Returns the ways (a), (b), (c) and (d), or (e)."""
  shards = f'{num_shards} shards'
  place = place_with_pmap if _MODE.value == 'pmap' else place_with_shard_map
  sgd = optax.sgd(_LEARNING_RATE.value, momentum=0.9)
  if _REPRODUCIBLE.value:
    num_towers = NUM_MICRO_BATCHES // num_shards
    tx = reproducible.tower_reduce(num_towers, sgd, AXIS)
    step = functools.partial(reproducible_step, num_towers)
    name = f'(e) reproducible, {shards} x {num_towers} towers'
    return [Run(name, place, tx, step)]
  mean_sgd = optax.chain(shard_transforms.cross_shard_mean(AXIS), sgd)
  towers = shard_transforms.tower_reduce(NUM_TOWERS, mean_sgd, axis_name=AXIS)
  fresh = shard_transforms.drop_stale(STALENESS, mean_sgd)
  towers_name = f'(c) tower_reduce, {shards} x {NUM_TOWERS} towers'
  return [
      Run('(a) one device', place_on_one_device, sgd, train_step),
      Run(f'(b) cross_shard_mean, {shards}', place, mean_sgd, train_step),
      Run(towers_name, place, towers, train_step, NUM_TOWERS),
      Run(f'(d) drop_stale, {shards}', place, fresh, stale_step),
  ]


def batches(
    run: Run, data: list[np.ndarray], num_shards: int
) -> Iterator[list[np.ndarray]]:
  """Yields the batch of each call; every run sees the same large batches."""
  rng = np.random.default_rng(_SEED.value)
  size, order = _BATCH_SIZE.value, np.arange(0)
  for _ in range(_STEPS.value):
    if len(order) < size:
      order = np.append(order, rng.permutation(len(data[0])))
    batch, order = np.split(order, [size])
    # A tower is the same part of the batch of each shard.
    towers = batch.reshape(num_shards, run.num_towers, -1).swapaxes(0, 1)
    for tower in towers:
      yield [x[tower.ravel()] for x in data]


def train_run(
    run: Run,
    data: list[np.ndarray],
    devices: list[Any],
    saved: checkpoints.Checkpoints,
    bar: tqdm.tqdm,
) -> tuple[Train, dict[str, np.ndarray]]:
  """Returns the final state of a run, and its metrics [steps, num_towers]."""
  bar.set_description(run.name)
  params, history = digits.init_params(_SEED.value), None
  if run.step is stale_step:
    history = jax.tree.map(lambda p: jnp.stack([p] * (MAX_AGE + 1)), params)
  step, train, put, get = run.place(run, params, history, devices)
  shape = (_STEPS.value, run.num_towers)
  train, metrics = saved.resume(
      run.name[1],
      math.prod(shape),
      train,
      functools.partial(resized, run) if can_resize() else None,
  )
  bar.update(len(metrics))
  recent = []
  for batch in itertools.islice(
      batches(run, data, len(devices)), len(metrics), None
  ):
    train, metric = step(train, *put(batch))
    recent.append(metric)
    # Virtual devices can hang with more than 32 calls in flight.
    jax.block_until_ready(recent[-8:][0])
    bar.update()
    if _REPRODUCIBLE.value and (len(metrics) + len(recent)) % LOG_EVERY == 0:
      loss, digest = float(get(metric['loss'])), digest_of(get(train))
      bar.write(f'step {len(metrics) + len(recent)}: loss {loss!r}, {digest}')
    if saved.is_due():
      metrics += get(recent)
      recent = []
      saved.save(train, metrics)
  metrics += get(recent)
  return get(train), jax.tree.map(
      lambda *values: np.reshape(values, shape), *metrics
  )


def can_resize() -> bool:
  """Whether checkpoints of another number of shards can be taken up."""
  return _REPRODUCIBLE.value and _MODE.value != 'pmap'


def resized(run: Run, saved: Train, train: Train) -> Train:
  """Returns a saved state, of any number of shards, placed as another is."""
  mesh = train.params['b'].sharding.mesh
  opt_state = shard_transforms.resize_state(
      saved.opt_state, run.tx, saved.params, mesh
  )
  params = jax.tree.map(checkpoints.place, saved.params, train.params)
  return Train(params, opt_state)


def digest_of(train: Train) -> str:
  """Returns the SHA-256 of the parameters and the momentum."""
  return monitoring.digest((train.params, train.opt_state.inner_state))


def difference(params: Any, other: Any) -> float:
  """Returns the largest difference of any parameter."""
  apart = jax.tree.map(lambda x, y: np.max(np.abs(x - y)), params, other)
  return float(np.max(jax.tree.leaves(apart)))


def print_table(
    runs: list[Run],
    accuracies: list[float],
    differences: list[float],
    stale: shard_transforms.DropStaleState,
) -> None:
  """Prints a row for each run."""
  num_gradients = stale.global_step + stale.stale_count
  dropped = (
      f'{stale.stale_count} of {num_gradients}'
      f' (stale_fraction {stale.stale_fraction:.3f})'
  )
  rows = zip(
      [run.name for run in runs],
      [f'{a:.2%}' for a in accuracies],
      ['-', *(f'{d:.1e}' for d in differences), '-'],
      ['-', '-', '-', dropped],
      strict=True,
  )
  for row in (('', 'test accuracy', 'difference from (a)', 'dropped'), *rows):
    print('{:40}{:>13}{:>21}  {}'.format(*row))


def plot(
    runs: list[Run],
    metrics: Sequence[dict[str, np.ndarray]],
    path: pathlib.Path,
) -> None:
  """Draws the losses, and the staleness of accepted and dropped gradients."""
  # Only the process that draws needs it.
  import matplotlib.figure

  figure = matplotlib.figure.Figure(figsize=(11, 4.5), layout='constrained')
  losses, ages = figure.subplots(1, 2, width_ratios=(3, 2))

  # Three curves coincide, so that those below are drawn wider.
  styles = (('0.8', 7, '-'), ('C0', 3, '-'), ('k', 1, ':'), ('C1', 1, '-'))
  for run, metric, (color, width, line) in zip(
      runs, metrics, styles, strict=True
  ):
    loss = metric['loss'].mean(axis=1)
    losses.plot(loss, line, color=color, linewidth=width, label=run.name)
  losses.set(yscale='log', title='Loss on the training data')
  losses.set(xlabel='large batches', ylabel='cross entropy')
  losses.legend()

  staleness, dropped = metrics[-1]['staleness'], metrics[-1]['dropped']
  ages.hist(
      [staleness[~dropped], staleness[dropped]],
      bins=np.arange(MAX_AGE + 2) - 0.5,
      stacked=True,
      rwidth=0.8,
      color=['C0', 'C1'],
      label=['accepted', 'dropped'],
  )
  ages.set(title=f'(d) drop_stale({STALENESS}): age of the gradients')
  ages.set(xlabel='staleness (steps)', ylabel='gradients')
  ages.margins(y=0.2)
  ages.legend(loc='upper center', ncols=2)
  figure.savefig(path, dpi=120)


def _divides(num_shards):
  """Whether the batch can be divided among so many shards, and their towers."""
  if _REPRODUCIBLE.value:
    return NUM_MICRO_BATCHES % num_shards == 0
  return _BATCH_SIZE.value % (num_shards * NUM_TOWERS) == 0


def start_devices(num_processes: int) -> list[Any]:
  """Starts JAX and returns the shards' devices, as many of each process."""
  # Of no effect where there are accelerators, which JAX lists instead.
  if 'JAX_NUM_CPU_DEVICES' not in os.environ:
    num_devices = (_SHARDS.value or 8) // num_processes
    jax.config.update('jax_num_cpu_devices', max(num_devices, 1))
  # Accelerators otherwise round matrix products to fewer bits than 1e-5 needs.
  jax.config.update('jax_default_matmul_precision', 'highest')
  num_shards = [
      n
      for n in range(num_processes, jax.device_count() + 1, num_processes)
      if _SHARDS.value in (None, n) and _divides(n)
  ]
  if not num_shards:
    rule = (
        f'The batch of {_BATCH_SIZE.value} must be a multiple of shards x'
        f' {NUM_TOWERS}.'
    )
    if _REPRODUCIBLE.value:
      rule = f'They must divide {NUM_MICRO_BATCHES} micro-batches.'
    raise app.UsageError(
        f'`--shards` must be at most {jax.device_count()}, the number of'
        f' {jax.default_backend()} devices, and a multiple of {num_processes},'
        f' the number of processes, got {_SHARDS.value}. {rule}'
    )
  return [
      device
      for process in range(num_processes)
      for device in jax.local_devices(process)[
          : num_shards[-1] // num_processes
      ]
  ]


def write_metrics(
    name: str, metrics: dict[str, np.ndarray], folder: pathlib.Path
) -> None:
  """Writes the metrics of each call of a run, [steps, num_towers], as a CSV."""
  with (folder / f'{name}.csv').open('w', newline='') as file:
    writer = csv.writer(file)
    writer.writerow(['call', *metrics])
    columns = [values.ravel().tolist() for values in metrics.values()]
    writer.writerows(zip(itertools.count(), *columns, strict=False))


def make_folder(name: str, path: str) -> pathlib.Path:
  """Returns the folder that a flag names.

  Raises:
    UsageError: If it cannot be made.
  """
  folder = pathlib.Path(path)
  try:
    folder.mkdir(parents=True, exist_ok=True)
  except OSError as error:
    raise app.UsageError(f'`--{name}` must be a folder: {error}') from error
  return folder


def verdict(accuracies: list[float], differences: list[float]) -> str | None:
  """Returns what is wrong, if anything."""
  wrong = []
  if not all(d <= MAX_DIFFERENCE for d in differences):
    wrong.append(
        f'FAILED: (b) and (c) must equal (a) within {MAX_DIFFERENCE:g}, got'
        f' differences of {differences[0]:.1e} and {differences[1]:.1e}.'
    )
  if min(accuracies) < MIN_ACCURACY and _STEPS.value >= STEPS:
    wrong.append(
        f'FAILED: the test accuracy must be at least {MIN_ACCURACY:.0%}, got'
        f' {min(accuracies):.2%}. Change `--learning_rate` or `--steps`.'
    )
  return '\n'.join(wrong) or None


def supervise() -> str | None:
  """Runs this program in several processes; returns what went wrong, if any."""
  try:
    # When told to stop, processes save first, and may still be compiling.
    shard_transforms.launch.run_processes(
        _PROCESSES.value, [sys.executable, *sys.orig_argv[1:]], grace=10
    )
  except RuntimeError as error:
    return f'FAILED: {error}'
  return None


def settings(num_shards: int, num_processes: int) -> dict[str, Any]:
  """Returns what must not change between a checkpoint and its training."""
  fixed = _STEPS, _MODE, _BATCH_SIZE, _LEARNING_RATE, _SEED
  found = {flag.name: flag.value for flag in fixed}
  if can_resize():
    return found
  return {'shards': num_shards, 'processes': num_processes, **found}


def main(argv: Sequence[str]) -> str | None:
  """Trains in all four ways; returns what went wrong, if anything."""
  if len(argv) > 1:
    raise app.UsageError(f'There are flags only, got {argv[1:]}.')
  # JAX informs about each platform that it does not find.
  logging.set_verbosity(logging.WARNING)
  num_processes = shard_transforms.launch.join_processes()
  if num_processes == 1 and _PROCESSES.value > 1:
    return supervise()
  devices = start_devices(num_processes)
  is_first = jax.process_index() == 0
  path = make_folder('output_dir', _OUTPUT_DIR.value) / 'train_digits.png'

  data, test_data = digits.load_data(_SEED.value)
  runs = make_runs(len(devices))
  num_calls = _STEPS.value * sum(run.num_towers for run in runs)
  saved = checkpoints.Checkpoints(
      _CHECKPOINT_DIR.value,
      _CHECKPOINT_EVERY.value,
      settings(len(devices), num_processes),
  )
  try:
    with tqdm.tqdm(total=num_calls, unit='call', disable=not is_first) as bar:
      results = [train_run(run, data, devices, saved, bar) for run in runs]
  except checkpoints.CheckpointError as error:
    return f'FAILED: {error}'
  if not is_first:
    return None
  trains, metrics = zip(*results, strict=True)

  accuracies = [digits.accuracy(train.params, *test_data) for train in trains]
  if _REPRODUCIBLE.value:
    print(f'{runs[0].name}: test accuracy {accuracies[0]:.2%}')
    print(f'SHA-256 of parameters and momentum: {digest_of(trains[0])}')
    return None
  differences = [
      difference(train.params, trains[0].params) for train in trains[1:3]
  ]
  print_table(runs, accuracies, differences, trains[-1].opt_state)
  plot(runs, metrics, path)
  if _LOG_DIR.value:
    folder = make_folder('log_dir', _LOG_DIR.value)
    for run, metric in zip(runs, metrics, strict=True):
      write_metrics(run.name[1], metric, folder)
  print(f'Loss curves and staleness: {path}')
  return verdict(accuracies, differences)


if __name__ == '__main__':
  app.run(main)
