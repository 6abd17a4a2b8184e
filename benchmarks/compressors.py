"""Accuracy of compressed means on digits, and the bytes that they send.

Eight shards train a network of two hidden layers on handwritten digits with
Adam, at equal steps, once a seed; the accuracy is that on test data. Bytes are
those that a shard sends in a step.
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
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
from sklearn import datasets
import timing

import shard_transforms
from shard_transforms import monitoring
from shard_transforms.contrib import compression

AXIS = 'data'
SHARDS = 8
WIDTHS = (64, 256, 256, 10)

_STEPS = flags.DEFINE_integer('steps', 400, 'Steps of training.', lower_bound=5)
_BATCH = flags.DEFINE_integer('batch', 128, 'Rows of a step.', lower_bound=8)
_SEEDS = flags.DEFINE_integer('seeds', 3, 'Runs of each.', lower_bound=1)

Transformation = optax.GradientTransformationExtraArgs


def compressed(
    compressor: compression.Compressor, **options: Any
) -> Transformation:
  """Returns Adam on a compressed mean."""
  mean = compression.compressed_mean(AXIS, compressor, **options)
  return optax.chain(mean, optax.adam(1e-3))


def ways() -> dict[str, Callable[[], Transformation]]:
  """Returns a function that makes each optimizer."""
  sign, top_k = compression.scaled_sign(), compression.top_k(1 / 32)
  plain = shard_transforms.cross_shard_mean(AXIS)
  factors = compression.power_sgd(AXIS, 4)
  return {
      'mean': lambda: optax.chain(plain, optax.adam(1e-3)),
      'bfloat16': lambda: compressed(compression.cast('bfloat16')),
      'int8': lambda: compressed(compression.quantize(8)),
      'int4': lambda: compressed(compression.quantize(4)),
      'sign': lambda: compressed(sign),
      'sign, no feedback': lambda: compressed(sign, feedback=None),
      'top-k 1/32': lambda: compressed(top_k),
      'PowerSGD 4': lambda: optax.chain(factors, optax.adam(1e-3)),
  }


@functools.cache
def load_digits() -> tuple[np.ndarray, np.ndarray]:
  """Returns images [n, 64] and labels [n], those to test on first."""
  images, labels = datasets.load_digits(return_X_y=True)
  images, labels = np.asarray(images), np.asarray(labels)
  order = np.random.default_rng(0).permutation(len(labels))
  return np.asarray(images[order] / 16, np.float32), labels[order]


def init_params(seed: int) -> list[dict[str, jax.Array]]:
  """Returns the parameters of three dense layers."""
  keys = jax.random.split(jax.random.key(seed), len(WIDTHS) - 1)
  return [
      {
          'w': jax.random.normal(key, (num_in, num_out)) * (2 / num_in) ** 0.5,
          'b': jnp.zeros(num_out),
      }
      for key, num_in, num_out in zip(keys, WIDTHS, WIDTHS[1:], strict=False)
  ]


def predict(params: Any, images: jax.Array | np.ndarray) -> jax.Array:
  """Returns logits [n, 10]."""
  *hidden, last = params
  for layer in hidden:
    images = jax.nn.relu(images @ layer['w'] + layer['b'])
  return images @ last['w'] + last['b']


def loss_fn(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
  """Returns the mean cross entropy of a batch."""
  return optax.softmax_cross_entropy_with_integer_labels(
      predict(params, images), labels
  ).mean()


def accuracies(tx: Transformation) -> list[float]:
  """Returns the accuracy in percent for each seed."""
  mesh = jax.make_mesh((SHARDS,), (AXIS,), (jax.sharding.AxisType.Auto,))
  specs = shard_transforms.state_specs(tx, init_params(0), mesh)
  rows = P(None, AXIS)

  @jax.jit
  @jax.shard_map(
      mesh=mesh, in_specs=(P(), specs, rows, rows), out_specs=(P(), specs)
  )
  def train(params, state, images, labels):
    def step(carry, batch):
      params, state = carry
      _, grads = shard_transforms.value_and_grad(loss_fn, AXIS)(params, *batch)
      updates, state = tx.update(grads, state, params)
      return (optax.apply_updates(params, updates), state), None

    return lax.scan(step, (params, state), (images, labels))[0]

  images, labels = load_digits()
  num_test = len(labels) // 5
  found = []
  for seed in range(_SEEDS.value):
    params = init_params(seed)
    state = shard_transforms.init_state(tx, params, mesh)
    chosen = np.random.default_rng(seed).integers(
        num_test, len(labels), (_STEPS.value, _BATCH.value)
    )
    params, _ = train(params, state, images[chosen], labels[chosen])
    logits = predict(params, images[:num_test])
    found.append(100 * float(np.mean(logits.argmax(1) == labels[:num_test])))
  return found


def sent(tx: Transformation) -> int:
  """Returns the bytes that a shard sends in a step, at most."""
  params = init_params(0)

  def step(grads, params):
    return tx.update(grads, tx.init(params), params)[0]

  report = monitoring.communication_report(
      step, params, params, axis_sizes={AXIS: SHARDS}
  )
  return int(report.total_bytes)


def main(argv: Sequence[str]) -> None:
  """Prints the table."""
  timing.begin(argv, SHARDS)
  print(timing.setting(f'{_STEPS.value} steps, {_SEEDS.value} seeds'))
  print(f'{"":20}{"accuracy":>9}{"least":>9}{"most":>9}{"bytes":>12}')
  for name, make in ways().items():
    found = accuracies(make())
    print(
        f'{name:20}{np.mean(found):8.2f}%{min(found):8.2f}%{max(found):8.2f}%'
        f'{sent(make()):12,}',
        flush=True,
    )


if __name__ == '__main__':
  app.run(main)
