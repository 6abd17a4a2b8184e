"""Trains digits and a transformer with parameters of 16 bits.

`python benchmarks/master_weights.py` prints a table of Markdown: the part of
the digits of the test that is classified correctly, and the loss of the
transformer of `examples/` over the last batches, by the dtype of the parameters
and by where float32 copies of them are kept. All train by Adam on the same
batches. Each figure is the mean of several seeds, with the least and the most.
"""

from collections.abc import Callable
from collections.abc import Sequence
import functools
import os
import sys
from typing import Any

from absl import app
from absl import flags
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import timing

import shard_transforms as st

sys.path.append(os.path.join(os.path.dirname(__file__), '..', 'examples'))
import digits
import transformer

_SEEDS = flags.DEFINE_integer('seeds', 3, 'Number of seeds.', lower_bound=1)
_STEPS = flags.DEFINE_integer('steps', 400, 'Number of steps.', lower_bound=1)
_LEARNING_RATE = flags.DEFINE_float('learning_rate', 3e-4, 'Of Adam.')

BATCH_SIZE, SHARDS = 256, 8


def averaged(tx: optax.GradientTransformation) -> Any:
  """Returns the mean over shards, and then `tx`."""
  return optax.chain(st.cross_shard_mean('data'), tx)


def ways() -> dict[str, tuple[Any, Any, int]]:
  """Returns a transformation, a dtype and a number of shards by name."""
  adam = optax.adam(_LEARNING_RATE.value)
  masters = st.contrib.master_weights(adam)
  half = jnp.bfloat16
  return {
      'float32, one device': (averaged(adam), jnp.float32, 1),
      'bfloat16, `master_weights`, one device': (averaged(masters), half, 1),
      'bfloat16, `shard_update(master_weights)`, 8 shards': (
          st.shard_update(masters, 'data'),
          half,
          SHARDS,
      ),
      'bfloat16, 8 shards': (averaged(adam), half, SHARDS),
  }


def train(
    tx: Any,
    params: Any,
    loss_fn: Callable[..., jax.Array],
    batches: Sequence[Any],
    num_shards: int,
) -> tuple[Any, np.ndarray]:
  """Returns the parameters after training, and the loss of each step."""
  devices = jax.devices()[:num_shards]
  mesh = jax.make_mesh((num_shards,), ('data',), devices=devices)
  params = jax.device_put(params, NamedSharding(mesh, P()))
  specs = st.state_specs(tx, params, mesh)

  def step(params, state, batch):
    loss, grads = st.value_and_grad(loss_fn, 'data')(params, batch)
    updates, state = tx.update(grads, state, params)
    params = optax.apply_updates(params, updates)
    return params, state, st.shard_mean(loss.astype(jnp.float32), 'data')

  mapped = jax.shard_map(
      step,
      mesh=mesh,
      in_specs=(P(), specs, P('data')),
      out_specs=(P(), specs, P()),
  )
  jitted = jax.jit(mapped, donate_argnums=(0, 1))
  state, losses = st.init_state(tx, params, mesh), []
  for batch in batches:
    batch = jax.device_put(batch, NamedSharding(mesh, P('data')))
    params, state, loss = jax.block_until_ready(jitted(params, state, batch))
    losses.append(float(loss))
  return jax.device_get(params), np.asarray(losses)


def digits_accuracy(tx: Any, dtype: Any, num_shards: int, seed: int) -> float:
  """Returns the accuracy in % on the digits of the test."""
  (images, labels), test = digits.load_data(seed)
  params = optax.tree.cast(digits.init_params(seed), dtype)
  rng = np.random.default_rng(seed)
  rows = rng.integers(len(labels), size=(_STEPS.value, BATCH_SIZE))

  def loss_fn(params, batch):
    return digits.loss_fn(params, batch[0].astype(dtype), batch[1])

  batches = [(images[x], labels[x]) for x in rows]
  params, _ = train(tx, params, loss_fn, batches, num_shards)
  # What the parameters are worth, not how they are multiplied.
  return 100 * digits.accuracy(optax.tree.cast(params, jnp.float32), *test)


def transformer_loss(tx: Any, dtype: Any, num_shards: int, seed: int) -> float:
  """Returns the mean loss of the last tenth of the steps."""
  data = transformer.load_data(seed)
  params = optax.tree.cast(transformer.init_params(seed), dtype)
  rng = np.random.default_rng(seed)
  batches = [rng.choice(data, 64) for _ in range(_STEPS.value)]
  _, losses = train(tx, params, transformer.loss_fn, batches, num_shards)
  return losses[-max(1, _STEPS.value // 10) :].mean()


def cell(measure: Callable[[int], float], digits: int) -> str:
  """Returns a mean over the seeds, with the least and the most."""
  found = [measure(seed) for seed in range(_SEEDS.value)]
  low, mean, high = (f'{f(found):.{digits}f}' for f in (min, np.mean, max))
  return f'{mean} [{low}, {high}]'


def main(argv: Sequence[str]) -> None:
  """Prints the table."""
  del argv
  print(timing.setting())
  print(
      '| parameters | digits, % | transformer, loss |',
      '|---|---|---|',
      sep='\n',
  )
  for name, way in ways().items():
    accuracy = cell(functools.partial(digits_accuracy, *way), 2)
    loss = cell(functools.partial(transformer_loss, *way), 3)
    print(f'| {name} | {accuracy} | {loss} |', flush=True)


if __name__ == '__main__':
  jax.config.update('jax_platforms', 'cpu')
  jax.config.update('jax_num_cpu_devices', SHARDS)
  app.run(main)
