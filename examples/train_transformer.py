"""Trains a transformer on 4 x 2 devices, its model sharded by the compiler.

Each step accumulates the gradients of four micro-batches, (a) in a `lax.scan`
under plain `jax.jit`, which reduces each of them over the devices of the batch,
(b) with `tower_reduce` under a `jax.shard_map` over these devices alone, which
reduces once, and (c) by `accumulated_value_and_grad`, which does, too. The
bytes sent and the memory are read from the compiled programs.

With `--muon` it trains by Muon on 8 devices that each hold the whole model: (a)
all of them update all matrices, and (b) each updates those that it owns.
"""

from collections.abc import Callable
from collections.abc import Sequence
import functools
from typing import Any, NamedTuple

from absl import app
from absl import flags
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import tqdm
import transformer

import shard_transforms
from shard_transforms import contrib

AXIS = 'data'
NUM_TOWERS = 4
STEPS = 60
MAX_LOSS = 1.8

_STEPS = flags.DEFINE_integer(
    'steps',
    STEPS,
    'Number of steps; with fewer than by default, the loss is not checked.',
    lower_bound=1,
)
_BATCH_SIZE = flags.DEFINE_integer(
    'batch_size', 64, 'Size of a batch, of four micro-batches.', lower_bound=16
)
_ACCUMULATE = flags.DEFINE_multi_enum(
    'accumulate',
    ['shard_map', 'auto'],
    ['shard_map', 'auto'],
    'Which ways are compared with a `lax.scan` under plain `jax.jit`.',
)
_LAYERS = flags.DEFINE_integer(
    'layers', transformer.LAYERS, 'Number of layers.', lower_bound=1
)
_MUON = flags.DEFINE_bool('muon', False, 'Whether to train by Muon.')
_SEED = flags.DEFINE_integer('seed', 0, 'Seed of all chance.', lower_bound=0)


@flags.multi_flags_validator(
    ['batch_size', 'muon'],
    'batch_size must be a multiple of 4 micro-batches x 4 shards, or x 8 with'
    ' --muon',
)
def _can_be_divided(values):
  num_shards = 8 if values['muon'] else 4
  return values['batch_size'] % (num_shards * NUM_TOWERS) == 0


class Way(NamedTuple):
  """How to train: a step, and its initial state."""

  name: str
  step: Callable[..., Any]
  state: optax.OptState
  mesh: jax.sharding.Mesh


def init_state(tx: Any, params: Any, mesh: jax.sharding.Mesh) -> Any:
  """Returns the state, sharded like the parameters."""
  return shard_transforms.init_state(
      tx, params, mesh, in_specs=transformer.SPECS
  )


def plain(tx: Any, params: Any, mesh: jax.sharding.Mesh) -> Way:
  """Accumulates gradients in a `lax.scan` under plain `jax.jit`."""

  def step(params, state, batches):
    def micro(total, batch):
      loss, grads = jax.value_and_grad(transformer.loss_fn)(params, batch)
      return jax.tree.map(jnp.add, total, grads), loss

    zeros = jax.tree.map(jnp.zeros_like, params)
    total, losses = lax.scan(micro, zeros, batches)
    grads = jax.tree.map(lambda x: x / NUM_TOWERS, total)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state, losses.mean()

  return Way('jit, lax.scan', step, init_state(tx, params, mesh), mesh)


def collecting(tx: Any, params: Any, mesh: jax.sharding.Mesh) -> Way:
  """Accumulates gradients by `tower_reduce`, mapped over the batch axis."""
  inner = optax.chain(shard_transforms.cross_shard_mean(AXIS), tx)
  tx = shard_transforms.tower_reduce(NUM_TOWERS, inner, axis_name=AXIS)
  value_and_grad = shard_transforms.value_and_grad(transformer.loss_fn, AXIS)

  def step(params, state, batches):
    def micro(carry, batch):
      params, state = carry
      loss, grads = value_and_grad(params, batch)
      updates, state = tx.update(grads, state, params)
      carry = optax.apply_updates(params, updates), state
      return carry, loss

    (params, state), losses = lax.scan(micro, (params, state), batches)
    return params, state, shard_transforms.shard_mean(losses.mean(), AXIS)

  specs = shard_transforms.state_specs(tx, params, mesh)
  step = jax.shard_map(
      step,
      mesh=mesh,
      axis_names={AXIS},
      in_specs=(P(), specs, P(None, AXIS)),
      out_specs=(P(), specs, P()),
  )
  return Way('tower_reduce', step, init_state(tx, params, mesh), mesh)


def in_one_call(tx: Any, params: Any, mesh: jax.sharding.Mesh) -> Way:
  """Accumulates gradients in one call, under plain `jax.jit`."""
  value_and_grad = shard_transforms.accumulated_value_and_grad(
      transformer.loss_fn, AXIS, param_specs=transformer.SPECS, mesh=mesh
  )

  def step(params, state, batches):
    loss, grads = value_and_grad(params, batches)
    updates, state = tx.update(grads, state, params)
    after = optax.apply_updates(params, updates), state
    return *after, loss

  return Way('accumulated', step, init_state(tx, params, mesh), mesh)


def of_shards(name: str, tx: Any, params: Any, mesh: jax.sharding.Mesh) -> Way:
  """Trains with a transformation that reduces over all devices."""
  value_and_grad = shard_transforms.value_and_grad(transformer.loss_fn, AXIS)

  def step(params, state, batches):
    loss, grads = value_and_grad(params, batches.reshape(-1, 64))
    loss = shard_transforms.shard_mean(loss, AXIS)
    updates, state = tx.update(grads, state, params)
    after = optax.apply_updates(params, updates), state
    return *after, loss

  specs = shard_transforms.state_specs(tx, params, mesh)
  step = jax.shard_map(
      step,
      mesh=mesh,
      in_specs=(P(), specs, P(None, AXIS)),
      out_specs=(P(), specs, P()),
  )
  state = shard_transforms.init_state(tx, params, mesh)
  return Way(name, step, state, mesh)


def by_muon() -> tuple[list[Way], Any, list[jax.Array]]:
  """Returns two ways to train by Muon, parameters and batches."""
  mesh = jax.make_mesh((8,), (AXIS,), (jax.sharding.AxisType.Auto,))
  params = transformer.init_params(_SEED.value, _LAYERS.value)
  params = transformer.unstacked(params)
  params = jax.device_put(params, NamedSharding(mesh, P()))
  muon = transformer.muon(2e-2)
  mean = shard_transforms.cross_shard_mean(AXIS)
  owned = contrib.owned_update(muon, AXIS)
  ways = [
      of_shards('replicated', optax.chain(mean, muon), params, mesh),
      of_shards('owners', owned, params, mesh),
  ]
  return ways, params, draw_batches(mesh)


def accumulating() -> tuple[list[Way], Any, list[jax.Array]]:
  """Returns ways to accumulate gradients, parameters and batches."""
  auto = (jax.sharding.AxisType.Auto,) * 2
  mesh = jax.make_mesh((4, 2), (AXIS, 'model'), auto)
  shardings = {k: NamedSharding(mesh, v) for k, v in transformer.SPECS.items()}
  params = transformer.init_params(_SEED.value, _LAYERS.value)
  params = jax.device_put(params, shardings)
  # With a tiny `eps`, rounding errors would grow where a gradient is near zero.
  make = functools.partial(optax.adam, 1e-2, eps=1e-4)
  builders = {
      'shard_map': collecting,
      'auto': in_one_call,
  }
  builders = [plain, *(builders[name] for name in _ACCUMULATE.value)]
  ways = [build(make(), params, mesh) for build in builders]
  return ways, params, draw_batches(mesh)


def train(
    way: Way, params: Any, batches: Sequence[jax.Array], bar: tqdm.tqdm
) -> tuple[list[float], Any]:
  """Returns the loss of each step, and the compiled step."""

  def placed(x):
    return jax.device_put(x, NamedSharding(way.mesh, x.sharding.spec))

  given = (jax.tree.map(placed, params), way.state)
  shardings = jax.tree.map(lambda x: x.sharding, given)
  step = jax.jit(way.step, out_shardings=(*shardings, None))
  with jax.set_mesh(way.mesh):
    compiled = step.lower(*given, placed(batches[0])).compile()
  losses = []
  for batch in batches:
    *given, loss = compiled(*given, placed(batch))
    losses.append(float(loss))
    bar.update()
  return losses, compiled


def sent_over_data(compiled: Any) -> float:
  """Returns the bytes that a device sends along the batch in a step."""
  report = shard_transforms.monitoring.communication_report(compiled)
  return sum(
      # The branch of a full window is taken in one iteration of the loop.
      c.sent_bytes / (NUM_TOWERS if c.conditional else 1)
      for c in report.collectives
      if AXIS in c.axes
  )


def draw_batches(mesh: jax.sharding.Mesh) -> list[jax.Array]:
  """Returns sequences [towers, batch size / towers, 64] for each step."""
  data = transformer.load_data(_SEED.value)
  rng = np.random.default_rng(_SEED.value)
  sharding = NamedSharding(mesh, P(None, AXIS))
  return [
      jax.device_put(
          rng.choice(data, _BATCH_SIZE.value).reshape(NUM_TOWERS, -1, 64),
          sharding,
      )
      for _ in range(_STEPS.value)
  ]


def verdict(losses: Sequence[list[float]]) -> str | None:
  """Returns what went wrong, if anything."""
  difference = np.ptp(np.asarray(losses), axis=0).max()
  print(f'Largest difference between the losses: {difference:.1e}')
  if difference > 1e-3:
    return 'FAILED: all ways must train alike.'
  if _STEPS.value >= STEPS and losses[0][-1] > MAX_LOSS:
    return f'FAILED: the loss must fall below {MAX_LOSS}.'
  return None


def main(argv: Sequence[str]) -> str | None:
  """Trains in each way, and prints a table."""
  del argv
  ways, params, batches = by_muon() if _MUON.value else accumulating()
  with tqdm.tqdm(total=len(ways) * len(batches), unit='step') as bar:
    runs = [train(way, params, batches, bar) for way in ways]
  losses, programs = zip(*runs, strict=True)

  print(f'{"":16}  {"loss":>14}  sent over data  temporary memory')
  for way, loss, compiled in zip(ways, losses, programs, strict=True):
    memory = compiled.memory_analysis().temp_size_in_bytes
    print(
        f'{way.name:16}  {loss[0]:.3f} -> {loss[-1]:.3f}'
        f'  {sent_over_data(compiled):>14,.0f}  {memory:>16,}'
    )
  return verdict(losses)


if __name__ == '__main__':
  jax.config.update('jax_num_cpu_devices', 8)
  app.run(main)
