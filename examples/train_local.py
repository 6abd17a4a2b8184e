"""Trains digits with an all-reduce once in 20 steps instead of in each step.

(a) `cross_shard_mean` in each step, (b) DiLoCo: `local_updates` with rounds of
20 steps, (c) streaming DiLoCo: the same in 4 fragments, of which one is sent
every 5 steps, (d) islands: a mean over the cores of each host in each step, and
local SGD between hosts. All take the same number of steps; the figure is the
loss against the bytes that a shard has sent between hosts. With `--processes
2`, the hosts are those of two processes, which this program starts.
"""

from collections.abc import Sequence
import math
import os
import pathlib
import sys
from typing import Any, NamedTuple

from absl import app
from absl import flags
from absl import logging
import digits
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

import shard_transforms

# Hosts are joined by a slow link, and the cores of each by a fast one.
AXES = {'host': 4, 'core': 2}
BY_SHARD = P(tuple(AXES))
BATCH_SIZE, EVERY, FRAGMENTS = 256, 20, 4
STEPS = 600
# In percentage points, behind the mean in each step.
MAX_BEHIND = 1.5
WIDTHS = (64, 96, 96, 96, 96, 10)

_PROCESSES = flags.DEFINE_integer(
    'processes', 1, 'Number of processes to start on this host.', lower_bound=1
)
_STEPS = flags.DEFINE_integer(
    'steps',
    STEPS,
    'Number of steps; with fewer than by default, the accuracy is not checked.',
    lower_bound=1,
)
_SEEDS = flags.DEFINE_integer(
    'seeds', 1, 'Number of runs that are averaged.', lower_bound=1
)
_OUTPUT_DIR = flags.DEFINE_string(
    'output_dir', 'digits_out', 'Folder that the figure is written to.'
)


class Way(NamedTuple):
  """One of the ways to train."""

  name: str
  tx: optax.GradientTransformationExtraArgs
  is_local: bool = True


def make_ways() -> list[Way]:
  """Returns the ways to compare."""

  def synchronous(*axes):
    mean = shard_transforms.cross_shard_mean(axes)
    return optax.chain(mean, optax.adam(2e-3))

  def local(inner, outer, *axes, **options):
    mean = shard_transforms.cross_shard_mean(axes)
    return shard_transforms.contrib.local_updates(
        inner, optax.chain(mean, outer), axes, every=EVERY, **options
    )

  diloco = optax.adam(2e-3), optax.sgd(0.7, 0.9, nesterov=True), *AXES
  streaming = {'fragments': FRAGMENTS, 'mixing': 0.5}

  return [
      Way('(a) cross_shard_mean', synchronous(*AXES), False),
      Way(f'(b) DiLoCo, {EVERY} steps', local(*diloco)),
      Way(f'(c) streaming, {FRAGMENTS} fragments', local(*diloco, **streaming)),
      Way(
          '(d) islands of 2 cores',
          local(synchronous('core'), optax.sgd(1.0), 'host'),
      ),
  ]


def init_params(seed: int) -> list[dict[str, jax.Array]]:
  """Returns the parameters of a perceptron."""
  keys = jax.random.split(jax.random.key(seed), len(WIDTHS) - 1)
  return [
      {
          'w': jax.random.normal(key, (num_in, num_out)) * (2 / num_in) ** 0.5,
          'b': jnp.zeros((1, num_out)),
      }
      for key, num_in, num_out in zip(keys, WIDTHS, WIDTHS[1:], strict=False)
  ]


def predict(params: Any, images: jax.Array) -> jax.Array:
  """Returns logits [n, 10] for images [n, 8, 8, 1]."""
  *hidden_layers, last = params
  hidden = images.reshape(len(images), -1)
  for layer in hidden_layers:
    hidden = jax.nn.gelu(hidden @ layer['w'] + layer['b'])
  return hidden @ last['w'] + last['b']


def loss_fn(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
  """Returns the mean cross entropy of a batch."""
  return optax.softmax_cross_entropy_with_integer_labels(
      predict(params, images), labels
  ).mean()


def train_step(way, params, state, images, labels):
  """Returns the parameters and the state after a step, and the loss."""
  own = params
  if way.is_local:
    own = shard_transforms.contrib.local_params(params, state)
  gradient = shard_transforms.value_and_grad(loss_fn, tuple(AXES))
  loss, grads = gradient(own, images, labels)
  updates, state = way.tx.update(grads, state, params)
  params = optax.apply_updates(params, updates)
  return params, state, shard_transforms.shard_mean(loss, tuple(AXES))


def train(way: Way, mesh: jax.sharding.Mesh, seed: int) -> tuple[Any, Any]:
  """Returns the parameters after all steps, and the losses [steps]."""
  params = init_params(seed)
  specs = shard_transforms.state_specs(way.tx, params, mesh)
  step = jax.shard_map(
      lambda *args: train_step(way, *args),
      mesh=mesh,
      in_specs=(P(), specs, BY_SHARD, BY_SHARD),
      out_specs=(P(), specs, P()),
  )
  step = jax.jit(step, donate_argnums=(0, 1))
  state = shard_transforms.init_state(way.tx, params, mesh)
  params = jax.device_put(params, NamedSharding(mesh, P()))
  (images, labels), _ = digits.load_data(0)
  rng, losses = np.random.default_rng(seed), []
  for _ in range(_STEPS.value):
    chosen = rng.choice(len(labels), BATCH_SIZE, replace=False)
    batch = [
        jax.make_array_from_callback(
            x.shape, NamedSharding(mesh, BY_SHARD), x.__getitem__
        )
        for x in (images[chosen], labels[chosen])
    ]
    params, state, loss = step(params, state, *batch)
    losses.append(float(loss))
  here = jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), params)
  return here, losses


def bytes_of(way: Way) -> float:
  """Returns the bytes that a step sends between hosts, the mean of a round."""
  params = init_params(0)
  report = shard_transforms.monitoring.communication_report(
      lambda grads: way.tx.update(grads, way.tx.init(grads), grads),
      params,
      axis_sizes={**AXES},
  )
  slow = [c.sent_bytes for c in report.collectives if 'host' in c.axes]
  return sum(slow) / (EVERY if way.is_local else 1)


def plot(
    ways: Sequence[Way],
    sent: Sequence[float],
    losses: Sequence[np.ndarray],
    path: pathlib.Path,
) -> None:
  """Draws the losses against the bytes sent, and against steps."""
  # Only the process that draws needs it.
  import matplotlib.figure

  figure = matplotlib.figure.Figure(figsize=(11, 4.5), layout='constrained')
  by_bytes, by_step = figure.subplots(1, 2, sharey=True)
  steps = 1 + np.arange(_STEPS.value)
  for way, num_bytes, loss in zip(ways, sent, losses, strict=True):
    # Means of rounds: batches differ more than methods do.
    num = len(steps) // EVERY * EVERY
    rounds = loss.mean(axis=0)[:num].reshape(-1, EVERY).mean(axis=1)
    ends = steps[:num].reshape(-1, EVERY)[:, -1]
    by_bytes.plot(ends * num_bytes / 1e6, rounds)
    by_step.plot(ends, rounds, label=way.name)
  by_bytes.set(xscale='log', yscale='log', title='Loss against bytes sent')
  by_bytes.set(xlabel='megabytes sent between hosts', ylabel='cross entropy')
  by_step.set(title='Loss against steps', xlabel='steps')
  by_step.legend(loc='lower left')
  figure.savefig(path, dpi=120)


def print_table(
    ways: Sequence[Way],
    sent: Sequence[float],
    accuracies: np.ndarray,
) -> None:
  """Prints the accuracy, and the bytes that a step sends."""
  print(f'{"":28}  test accuracy  bytes a step')
  for way, num_bytes, accuracy in zip(ways, sent, accuracies, strict=True):
    print(f'{way.name:28}  {accuracy:13.2%}  {num_bytes:12,.0f}')


def verdict(accuracies: np.ndarray) -> str | None:
  """Returns what is wrong, if anything."""
  behind = 100 * (accuracies[0] - accuracies[1:])
  if behind.max() > MAX_BEHIND and _STEPS.value >= STEPS:
    got = ', '.join(f'{points:.2f}' for points in behind)
    return (
        f'FAILED: (b), (c) and (d) must be within {MAX_BEHIND} points of (a),'
        f' got {got}.'
    )
  return None


def supervise() -> str | None:
  """Runs this program in several processes; returns what went wrong, if any."""
  try:
    shard_transforms.launch.run_processes(
        _PROCESSES.value, [sys.executable, *sys.orig_argv[1:]]
    )
  except RuntimeError as error:
    return f'FAILED: {error}'
  return None


def main(argv: Sequence[str]) -> str | None:
  """Trains in all ways; returns what went wrong, if anything."""
  if len(argv) > 1:
    raise app.UsageError(f'There are flags only, got {argv[1:]}.')
  # JAX informs about each platform that it does not find.
  logging.set_verbosity(logging.WARNING)
  num_processes = shard_transforms.launch.join_processes()
  if num_processes == 1 and _PROCESSES.value > 1:
    return supervise()
  if 'JAX_NUM_CPU_DEVICES' not in os.environ:
    num_devices = math.prod(AXES.values()) // num_processes
    jax.config.update('jax_num_cpu_devices', max(num_devices, 1))
  mesh = jax.make_mesh(tuple(AXES.values()), tuple(AXES))

  ways, results = make_ways(), []
  _, test_data = digits.load_data(0)
  for way in ways:
    runs = [train(way, mesh, seed) for seed in range(_SEEDS.value)]
    accuracy = np.mean([_accuracy(params, *test_data) for params, _ in runs])
    results.append((accuracy, np.array([losses for _, losses in runs])))
  if jax.process_index():
    return None
  accuracies = np.array([accuracy for accuracy, _ in results])
  sent = [bytes_of(way) for way in ways]
  print_table(ways, sent, accuracies)
  path = pathlib.Path(_OUTPUT_DIR.value) / 'train_local.png'
  path.parent.mkdir(parents=True, exist_ok=True)
  plot(ways, sent, [losses for _, losses in results], path)
  print(f'Loss against bytes sent: {path}')
  return verdict(accuracies)


def _accuracy(params, images, labels):
  logits = predict(params, jnp.asarray(images))
  return float(np.mean(logits.argmax(axis=-1) == labels))


if __name__ == '__main__':
  app.run(main)
