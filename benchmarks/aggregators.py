"""Aggregators where shards lie: accuracy on digits, bytes and time.

Eight shards train a small network on handwritten digits; none to three of them
send a lie in place of their gradient: its opposite, a hundred times it, noise a
hundred times as large, or NaN. The accuracy is on test data; `guard` is the
mean in a guard that leaves out shards that are not finite. Bytes and time are
those of one reduction of large leaves under `jax.shard_map`, beside the mean,
all programs in turn in one process; beside each ratio of the medians stands an
interval that holds 95 % of bootstrap resamples of the rounds, and the second
row is the mean again.
"""

from collections.abc import Callable
from collections.abc import Sequence
import time
from typing import Any

from absl import app
from absl import flags
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
from sklearn import datasets
import timing

import shard_transforms
from shard_transforms import aggregators
from shard_transforms import monitoring

AXIS = 'data'
SHARDS = 8
MAX_LIARS = 3
LIES = ('flipped', 'x 100', 'noise', 'NaN')

_STEPS = flags.DEFINE_integer('steps', 150, 'Steps of training.', lower_bound=1)
_LEAVES = flags.DEFINE_integer('leaves', 20, 'Number of leaves.', lower_bound=1)
_ELEMENTS = flags.DEFINE_integer(
    'elements', 262_144, 'Number of elements of a leaf.', lower_bound=1
)
_ROUNDS = flags.DEFINE_integer(
    'rounds', 15, 'Timed runs of each program.', lower_bound=2
)


def reductions() -> dict[str, tuple[optax.GradientTransformation, float]]:
  """Returns each reduction, and the learning rate that suits it."""
  mean = shard_transforms.cross_shard_mean(AXIS)
  return {
      'mean': (mean, 0.5),
      'guard': (shard_transforms.guard(mean, AXIS, on_bad='exclude'), 0.5),
      'coordinate_median': (aggregators.coordinate_median(AXIS), 0.5),
      'trimmed_mean(2)': (aggregators.trimmed_mean(AXIS, 2), 0.5),
      'majority_vote': (aggregators.majority_vote(AXIS), 0.005),
      'adasum': (aggregators.adasum(AXIS), 0.25),
  }


def load_digits() -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
  """Returns images and labels to train on, [shards, n, ...], and to test."""
  images, labels = datasets.load_digits(return_X_y=True)
  images, labels = np.asarray(images), np.asarray(labels)
  order = np.random.default_rng(0).permutation(len(labels))
  images = np.asarray(images[order] / 8 - 1, np.float32)
  labels = labels[order]
  shards = images[:1408].reshape(SHARDS, -1, 64), labels[:1408].reshape(8, -1)
  return shards, (images[1408:], labels[1408:])


def init_params() -> Any:
  """Returns the parameters of two dense layers."""
  keys = jax.random.split(jax.random.key(0))
  return [
      jax.random.normal(keys[0], (64, 48)) / 8,
      jax.random.normal(keys[1], (48, 10)) / 7,
  ]


def predict(params: Any, images: jax.Array | np.ndarray) -> jax.Array:
  """Returns logits [n, 10]."""
  return jax.nn.relu(images @ params[0]) @ params[1]


def loss_fn(
    params: Any, images: jax.Array | np.ndarray, labels: jax.Array
) -> jax.Array:
  """Returns the mean cross entropy of a batch."""
  return optax.softmax_cross_entropy_with_integer_labels(
      predict(params, images), labels
  ).mean()


def told(
    grads: Any,
    lie: jax.Array,
    num_liars: jax.Array,
    step: jax.Array,
) -> Any:
  """Returns what a shard sends: its gradient, or a lie."""
  shard = lax.axis_index(AXIS)
  key = jax.random.fold_in(jax.random.fold_in(jax.random.key(1), step), shard)

  def tell(grad):
    noise = 100 * jnp.std(grad) * jax.random.normal(key, grad.shape)
    lies = jnp.stack([-grad, 100 * grad, noise, jnp.full_like(grad, jnp.nan)])
    return jnp.where(shard < num_liars, lies[lie], grad)

  return jax.tree.map(tell, grads)


def accuracies(
    reduction: optax.GradientTransformation, learning_rate: float
) -> dict[tuple[str, int], float]:
  """Returns the accuracy for each lie and number of liars."""
  shards, (images, labels) = load_digits()
  tx = optax.chain(reduction, optax.sgd(learning_rate, momentum=0.5))

  def train(lie, num_liars, own_images, own_labels):
    def step(carry, number):
      params, state = carry
      grads = jax.grad(loss_fn)(params, own_images, own_labels)
      grads = told(grads, lie, num_liars, number)
      updates, state = tx.update(grads, state, params)
      return (optax.apply_updates(params, updates), state), None

    params = init_params()
    start = params, tx.init(params)
    (params, _), _ = lax.scan(step, start, jnp.arange(_STEPS.value))
    return jnp.mean(predict(params, images).argmax(1) == labels)

  mapped = jax.vmap(train, (None, None, 0, 0), axis_name=AXIS)
  mapped = jax.jit(jax.vmap(mapped, (0, 0, None, None)))
  cases = [(0, 0)] + [
      (lie, n) for lie in range(len(LIES)) for n in range(1, MAX_LIARS + 1)
  ]
  found = mapped(*map(np.array, zip(*cases, strict=True)), *shards)[:, 0]
  return {
      (LIES[lie], n): float(x)
      for (lie, n), x in zip(cases, np.asarray(found), strict=True)
  }


def programs() -> dict[str, Callable[[], object]]:
  """Returns a program for each reduction of large leaves."""
  mesh = jax.make_mesh((SHARDS,), (AXIS,), (jax.sharding.AxisType.Auto,))
  rng = np.random.default_rng(0)
  leaves = [
      jax.device_put(
          rng.normal(size=(SHARDS, _ELEMENTS.value)).astype(np.float32),
          jax.NamedSharding(mesh, P(AXIS)),
      )
      for _ in range(_LEAVES.value)
  ]

  def compiled(tx):
    def fn(leaves):
      own = [x[0] for x in leaves]
      return tx.update(own, shard_state(tx, own))[0]

    mapped = jax.jit(
        jax.shard_map(fn, mesh=mesh, in_specs=P(AXIS), out_specs=P())
    )
    return lambda: mapped(leaves)

  found = {name: compiled(tx) for name, (tx, _) in reductions().items()}
  mean = shard_transforms.cross_shard_mean(AXIS)
  return {'mean': found.pop('mean'), 'mean, A/A': compiled(mean), **found}


def shard_state(tx: optax.GradientTransformation, own: Any) -> optax.OptState:
  """Returns the first state of a shard."""
  return tx.init(jax.tree.map(jnp.zeros_like, own))


def sent_bytes(tx: optax.GradientTransformation) -> float:
  """Returns the bytes that a shard sends for the large leaves."""
  leaf = jax.ShapeDtypeStruct((_ELEMENTS.value,), jnp.float32)
  return monitoring.wire_report(
      lambda own: tx.update(own, shard_state(tx, own))[0],
      [leaf] * _LEAVES.value,
      axis_sizes={AXIS: SHARDS},
  ).total_bytes


def print_accuracies() -> None:
  """Prints a row for each reduction and a column for each case."""
  header = 'liars'
  for name, (tx, learning_rate) in reductions().items():
    found = accuracies(tx, learning_rate)
    if header:
      cells = ''.join(f'{f"{n} {lie}" if n else "0":>10}' for lie, n in found)
      print(f'{header:20}{cells}')
      header = ''
    print(f'{name:20}' + ''.join(f'{x:10.1%}' for x in found.values()))


def print_costs() -> None:
  """Prints bytes and times beside those of the mean."""
  calls = programs()
  for call in calls.values():
    jax.block_until_ready(call())
  walls = timing.seconds_in_turn(list(calls.values()), _ROUNDS.value)
  cpus = timing.seconds_in_turn(
      list(calls.values()), _ROUNDS.value, clock=time.process_time
  )
  sent = {name: sent_bytes(tx) for name, (tx, _) in reductions().items()}
  print(f'{"":20}{"bytes":>14}{"milliseconds":>14}{"wall":^22}{"CPU":^22}')
  for name, wall, cpu in zip(calls, walls, cpus, strict=True):
    print(
        f'{name:20}{sent[name.partition(",")[0]]:14,.0f}'
        f'{1e3 * np.median(wall):14.1f}'
        f'{timing.ratio(wall, walls[0]):^22}{timing.ratio(cpu, cpus[0]):^22}'
    )


def main(argv: Sequence[str]) -> None:
  """Prints both tables."""
  if len(argv) > 1:
    raise app.UsageError(f'There are flags only, got {argv[1:]}.')
  jax.config.update('jax_num_cpu_devices', SHARDS)
  print(timing.setting(f'{_LEAVES.value} leaves of {_ELEMENTS.value}'))
  print_accuracies()
  print_costs()


if __name__ == '__main__':
  app.run(main)
