"""Accuracy on digits where shards lie or compute wrongly, by aggregator.

Eight shards train a small network on handwritten digits, with batches of 32 a
shard; none to three of them send a lie in place of their gradient: its
opposite, a hundred times it, noise a hundred times as large, NaN, a constant,
or "a little", which is the mean of the honest shards minus 1.5 of their
standard deviations. The accuracy is on test data, the mean over seeds and, in
brackets, the least. `guard` is the mean in a guard that leaves out shards that
are not finite; "averaged" reductions are of an average of each shard's
gradients over about ten steps. In the second table, one shard computes one of a
hundred elements with a flipped bit, and the guard leaves out whom
`cross_check`, which checks every tenth step, suspects.
"""

from collections.abc import Callable
from collections.abc import Sequence
import functools
from typing import Any

from absl import app
from absl import flags
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn import datasets
import timing

import shard_transforms
from shard_transforms import contrib

AXIS = 'data'
SHARDS = 8
MAX_LIARS = 3
BATCH = 32
LIES = ('opposite', 'x 100', 'noise', 'NaN', 'constant', 'little')
LITTLE = 1.5
FAULTY, FLIPPED = 5, 0.01
CHECK_EVERY = 10

_STEPS = flags.DEFINE_integer('steps', 150, 'Steps of training.', lower_bound=1)
_SEEDS = flags.DEFINE_integer('seeds', 5, 'Runs of each case.', lower_bound=1)


def reductions() -> dict[str, tuple[optax.GradientTransformation, float]]:
  """Returns each reduction, and the learning rate that suits it."""
  mean = shard_transforms.cross_shard_mean(AXIS)
  return {
      'mean': (mean, 0.5),
      'guard': (shard_transforms.guard(mean, AXIS, on_bad='exclude'), 0.5),
      'coordinate_median': (contrib.coordinate_median(AXIS), 0.5),
      'trimmed_mean(2)': (contrib.trimmed_mean(AXIS, 2), 0.5),
      'majority_vote': (contrib.majority_vote(AXIS), 0.005),
      'adasum': (contrib.adasum(AXIS), 0.25),
  }


def averaged() -> dict[str, tuple[optax.GradientTransformation, float]]:
  """Returns reductions of each shard's average over about ten steps."""
  robust = {
      'coordinate_median': (contrib.coordinate_median(AXIS), 0.5),
      'majority_vote': (contrib.majority_vote(AXIS), 0.005),
  }
  return {
      f'{name}, averaged': (optax.chain(optax.ema(0.9), reduction), rate)
      for name, (reduction, rate) in robust.items()
  }


def load_digits(
    seed: int,
) -> tuple[tuple[np.ndarray, ...], tuple[np.ndarray, ...]]:
  """Returns images and labels to train on, [shards, n, ...], and to test."""
  images, labels = datasets.load_digits(return_X_y=True)
  images, labels = np.asarray(images), np.asarray(labels)
  order = np.random.default_rng(seed).permutation(len(labels))
  images = np.asarray(images[order] / 8 - 1, np.float32)
  labels = labels[order]
  shards = images[:1408].reshape(SHARDS, -1, 64), labels[:1408].reshape(8, -1)
  return shards, (images[1408:], labels[1408:])


def draw(own: tuple[jax.Array, ...], key: jax.Array) -> tuple[jax.Array, ...]:
  """Returns a batch of a shard's images and labels."""
  key = jax.random.fold_in(key, lax.axis_index(AXIS))
  rows = jax.random.randint(key, (BATCH,), 0, len(own[0]))
  return tuple(x[rows] for x in own)


def init_params(seed: jax.Array | int) -> Any:
  """Returns the parameters of two dense layers."""
  keys = jax.random.split(jax.random.key(seed))
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
    key: jax.Array,
) -> Any:
  """Returns what a shard sends: its gradient, or a lie."""
  shard = lax.axis_index(AXIS)
  key = jax.random.fold_in(key, shard)
  honest = shard >= num_liars

  def mean(x):
    return lax.psum(jnp.where(honest, x, 0), AXIS) / (SHARDS - num_liars)

  def tell(grad):
    noise = 100 * jnp.std(grad) * jax.random.normal(key, grad.shape)
    average = mean(grad)
    little = average - LITTLE * jnp.sqrt(mean((grad - average) ** 2))
    nan = jnp.full_like(grad, jnp.nan)
    lies = [-grad, 100 * grad, noise, nan, jnp.ones_like(grad), little]
    return jnp.where(honest, grad, jnp.stack(lies)[lie])

  return jax.tree.map(tell, grads)


def flipped(grads: Any, key: jax.Array) -> Any:
  """Flips a bit in some of the elements that the faulty shard computes."""
  is_faulty = lax.axis_index(AXIS) == FAULTY

  def flip(grad):
    of_elements, of_bits = jax.random.split(key)
    is_hit = jax.random.bernoulli(of_elements, FLIPPED, grad.shape) & is_faulty
    bits = jax.random.randint(of_bits, grad.shape, 0, 32).astype(jnp.uint32)
    mask = jnp.where(is_hit, jnp.uint32(1) << bits, 0)
    words = lax.bitcast_convert_type(grad, jnp.uint32) ^ mask
    return lax.bitcast_convert_type(words, jnp.float32)

  return jax.tree.map(flip, grads)


def accuracy(
    tx: optax.GradientTransformationExtraArgs,
    gradient: Callable[..., Any],
    memory: Any,
    seed: jax.Array,
    test: tuple[jax.Array, jax.Array],
) -> jax.Array:
  """Trains, and returns the accuracy on test data.

  Args:
    tx: Reduces gradients and makes updates of them.
    gradient: Takes its memory, the parameters and a key; returns a gradient,
      its weight, and its next memory.
    memory: The first one.
    seed: Of the parameters and the keys.
    test: Images and labels.
  """

  def step(carry, number):
    params, state, memory = carry
    key = jax.random.fold_in(jax.random.key(seed + 1), number)
    grads, weight, memory = gradient(memory, params, key)
    updates, state = tx.update(grads, state, params, weight=weight)
    return (optax.apply_updates(params, updates), state, memory), None

  params = init_params(seed)
  carry = params, tx.init(params), memory
  (params, *_), _ = lax.scan(step, carry, jnp.arange(_STEPS.value))
  return jnp.mean(predict(params, test[0]).argmax(1) == test[1])


def lying_accuracies(
    reduction: optax.GradientTransformation, learning_rate: float
) -> dict[tuple[str, int], np.ndarray]:
  """Returns the accuracies of all seeds for each lie and number of liars."""
  tx = optax.chain(reduction, optax.sgd(learning_rate, momentum=0.5))

  def train(lie, num_liars, seed, own, test):
    def gradient(memory, params, key):
      grads = jax.grad(loss_fn)(params, *draw(own, key))
      return told(grads, lie, num_liars, key), 1.0, memory

    return accuracy(tx, gradient, (), seed, test)

  mapped = jax.vmap(train, (None, None, None, 0, None), axis_name=AXIS)
  mapped = jax.jit(jax.vmap(mapped, (0, 0, None, None, None)))
  cases = [(0, 0)] + [
      (lie, n) for lie in range(len(LIES)) for n in range(1, MAX_LIARS + 1)
  ]
  lies, nums = map(np.array, zip(*cases, strict=True))
  found = np.stack(
      [mapped(lies, nums, i, *load_digits(i))[:, 0] for i in seeds()], axis=1
  )
  return {(LIES[lie], n): x for (lie, n), x in zip(cases, found, strict=True)}


def faulty_accuracies() -> dict[str, np.ndarray]:
  """Returns the accuracies of all seeds where a shard computes wrongly."""
  mean = shard_transforms.cross_shard_mean(AXIS)
  guard = shard_transforms.guard(mean, AXIS, on_bad='exclude')

  def faulty(params, own):
    *batch, key = own
    key = jax.random.wrap_key_data(key)
    return flipped(jax.grad(loss_fn)(params, *batch), key)

  check = contrib.cross_check(faulty, AXIS, every=CHECK_EVERY)

  def train(reduction, weigh, seed, own, test):
    def gradient(memory, params, key):
      # Each shard has its own key, which travels with its batch.
      own_key = jax.random.fold_in(key, lax.axis_index(AXIS))
      batch = *draw(own, key), jax.random.key_data(own_key)
      grads, memory = check.apply(memory, params, batch)
      return grads, weigh(memory), memory

    tx = optax.chain(reduction, optax.sgd(0.5, momentum=0.5))
    return accuracy(tx, gradient, check.init(SHARDS), seed, test)

  def of_seeds(reduction, weigh):
    fn = functools.partial(train, reduction, weigh)
    fn = jax.jit(jax.vmap(fn, (None, 0, None), axis_name=AXIS))
    return np.stack([fn(i, *load_digits(i))[0] for i in seeds()])

  def without_it(_):
    return jnp.where(lax.axis_index(AXIS) == FAULTY, 0.0, 1.0)

  return {
      'mean': of_seeds(mean, lambda _: 1.0),
      'guard': of_seeds(guard, lambda _: 1.0),
      'guard, cross_check': of_seeds(guard, check.weight),
      'mean of the other seven': of_seeds(guard, without_it),
  }


def seeds() -> range:
  """Returns the seeds of the runs."""
  return range(_SEEDS.value)


def main(argv: Sequence[str]) -> None:
  """Prints a row for each reduction and a column for each case."""
  timing.begin(argv, SHARDS)
  print(timing.setting(f'{_STEPS.value} steps, {_SEEDS.value} seeds'))
  header = 'liars'
  for name, (tx, learning_rate) in {**reductions(), **averaged()}.items():
    found = lying_accuracies(tx, learning_rate)
    if header:
      cells = ''.join(f'{f"{n} {lie}" if n else "0":>12}' for lie, n in found)
      print(f'{header:28}{cells}')
      header = ''
    print(f'{name:28}' + ''.join(map(_cell, found.values())), flush=True)
  print(f'{"faulty shard":28}')
  for name, found in faulty_accuracies().items():
    print(f'{name:28}{_cell(found)}', flush=True)


def _cell(found: np.ndarray) -> str:
  """Returns mean and least of accuracies, in percent."""
  return f'{100 * np.mean(found):7.0f} [{100 * np.min(found):.0f}]'.rjust(12)


if __name__ == '__main__':
  app.run(main)
