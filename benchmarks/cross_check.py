"""Times training steps with `cross_check` against those without it.

A step is the gradient of a dense network, its mean over eight virtual devices
of the CPU, and momentum, under `jax.shard_map`; a call runs a hundred steps in
a `lax.scan`, so that it holds a hundredth of checks at `every=100`. All
programs run in turn in one process; beside each ratio of the medians stands an
interval that holds 95 % of bootstrap resamples of the rounds, and the second
row is the program without checks again.
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
import numpy as np
import optax
import timing

import shard_transforms
from shard_transforms import contrib

AXIS, SHARDS, STEPS = 'data', 8, 100
WIDTH, LAYERS, BATCH = 256, 4, 64
EVERY = {'plain': None, 'plain, A/A': None, 'every=100': 100, 'every=10': 10}

_ROUNDS = flags.DEFINE_integer(
    'rounds', 15, 'Timed runs of each program.', lower_bound=2
)


def loss_fn(params: list[jax.Array], x: jax.Array) -> jax.Array:
  """Returns the loss of a batch."""
  for w in params:
    x = jnp.tanh(x @ w)
  return jnp.mean(x**2)


def training(every: int | None) -> Callable[[], Any]:
  """Returns a call of a hundred steps, checked every so many."""
  mesh = jax.make_mesh((SHARDS,), (AXIS,), (jax.sharding.AxisType.Auto,))
  gradient = shard_transforms.value_and_grad(loss_fn, AXIS)
  check = contrib.cross_check(gradient, AXIS, every=every or 1)
  tx = optax.chain(
      shard_transforms.cross_shard_mean(AXIS), optax.sgd(0.01, momentum=0.9)
  )

  def step(carry, _):
    params, state, checks, x = carry
    if every is None:
      _, grads = gradient(params, x)
    else:
      (_, grads), checks = check.apply(checks, params, x)
    updates, state = tx.update(grads, state, params)
    return (optax.apply_updates(params, updates), state, checks, x), None

  def run(params, x):
    carry = params, tx.init(params), check.init(SHARDS), x
    (params, _, checks, _), _ = lax.scan(step, carry, length=STEPS)
    return params, checks.num_checks

  mapped = jax.jit(
      jax.shard_map(
          run,
          mesh=mesh,
          in_specs=(jax.P(), jax.P(AXIS)),
          out_specs=jax.P(),
      )
  )
  rng = np.random.default_rng(0)
  params = [
      jnp.asarray(rng.normal(size=(WIDTH, WIDTH)) / WIDTH**0.5, jnp.float32)
      for _ in range(LAYERS)
  ]
  params = jax.device_put(params, jax.NamedSharding(mesh, jax.P()))
  x = rng.normal(size=(SHARDS * BATCH, WIDTH)).astype(np.float32)
  x = jax.device_put(x, jax.NamedSharding(mesh, jax.P(AXIS)))
  return lambda: mapped(params, x)


def main(argv: Sequence[str]) -> None:
  """Prints the table."""
  timing.begin(argv, SHARDS)
  calls = [training(every) for every in EVERY.values()]
  for call in calls:
    jax.block_until_ready(call())
  walls = timing.seconds_in_turn(calls, _ROUNDS.value)
  cpus = timing.seconds_in_turn(calls, _ROUNDS.value, clock=time.process_time)
  print(timing.setting(f'{LAYERS} x {WIDTH} x {WIDTH}, {BATCH} rows a shard'))
  print(f'{"":12}{"milliseconds":>13}{"wall":^22}{"CPU":^22}')
  for name, wall, cpu in zip(EVERY, walls, cpus, strict=True):
    print(
        f'{name:12}{1e3 * np.median(wall) / STEPS:13.2f}'
        f'{timing.ratio(wall, walls[0]):^22}{timing.ratio(cpu, cpus[0]):^22}'
    )


if __name__ == '__main__':
  app.run(main)
