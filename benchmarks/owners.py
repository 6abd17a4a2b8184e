"""Compares `contrib.owned_update` with the replicated optimizer.

Eight shards update a transformer, in one process over virtual CPU devices. A
row has an optimizer's ratios to `chain(cross_shard_mean, inner)`, both run in
turn: the state of a shard, the bytes that a step sends, traced and compiled,
over those of one all-reduce, CPU time of a step and of compiling it, temporary
memory. "difference" is the largest of any parameter. The last row compares
AdamW with `shard_update`.
"""

from collections.abc import Sequence
import time
from typing import Any

from absl import app
from absl import flags
import jax
import jax.numpy as jnp
import numpy as np
import optax
import timing

import shard_transforms
from shard_transforms import contrib

AXIS = 'data'

_WIDTH = flags.DEFINE_integer('width', 128, 'Width of the model.')
_LAYERS = flags.DEFINE_integer('layers', 12, 'Number of layers.')
_STEPS = flags.DEFINE_integer('steps', 8, 'Timed steps of each.', lower_bound=2)
_INNERS = flags.DEFINE_list(
    'inners', ['muon', 'lamb', 'adafactor', 'adamw'], 'Which optimizers.'
)

_MAKE = {
    'muon': optax.contrib.muon,
    'lamb': optax.lamb,
    'adafactor': optax.adafactor,
    'adamw': optax.adamw,
}


def params_of(width: int, num_layers: int) -> dict[str, Any]:
  """Returns the parameters of a transformer."""
  rng = np.random.default_rng(0)

  def normal(*shape):
    return 0.02 * rng.standard_normal(shape, np.float32)

  params: dict[str, Any] = {
      f'layer_{i}': {
          'qkv': normal(width, 3 * width),
          'out': normal(width, width),
          'up': normal(width, 4 * width),
          'down': normal(4 * width, width),
          'gain': normal(width),
          'bias': normal(width),
      }
      for i in range(num_layers)
  }
  return params | {'embed': normal(512, width), 'gain': normal(width)}


class Run:
  """A compiled step, and where it is."""

  def __init__(self, tx: Any, params: Any, mesh: jax.sharding.Mesh):
    specs = shard_transforms.state_specs(tx, params, mesh)

    def step(params, state, x):
      # Gradients that differ between shards and cost little to compute.
      grads = jax.tree.map(
          lambda p: jnp.sin(p * (1 + x[0])) + x[0],
          shard_transforms.per_shard(params, AXIS),
      )
      updates, state = tx.update(grads, state, params)
      return optax.apply_updates(params, updates), state

    mapped = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(jax.P(), specs, jax.P(AXIS)),
        out_specs=(jax.P(), specs),
    )
    self.carry = (
        jax.device_put(params, jax.NamedSharding(mesh, jax.P())),
        shard_transforms.init_state(tx, params, mesh),
    )
    self.x = jax.device_put(
        np.arange(mesh.size, dtype=np.float32) / mesh.size,
        jax.NamedSharding(mesh, jax.P(AXIS)),
    )
    lowered = jax.jit(mapped).lower(*self.carry, self.x)
    start = time.process_time()
    self.compiled: Any = lowered.compile()
    self.compile_seconds = time.process_time() - start
    communication_report = shard_transforms.monitoring.communication_report
    self.sent = communication_report(mapped, *self.carry, self.x).total_bytes
    self.sent_compiled = communication_report(self.compiled).total_bytes
    self.memory = self.compiled.memory_analysis().temp_size_in_bytes

  def __call__(self) -> Any:
    """Runs a step, and returns what the next one is given."""
    self.carry = self.compiled(*self.carry, self.x)
    return self.carry

  def state_bytes(self) -> int:
    """Returns how many bytes of state the first device holds."""
    leaves = jax.tree.leaves(self.carry[1])
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)


def row(name: str, reference: Run, run: Run) -> str:
  """Measures two programs in turn, and returns a line of the table."""
  for each in reference, run:
    jax.block_until_ready(each())
  seconds = timing.seconds_in_turn(
      [reference, run], _STEPS.value, clock=time.process_time
  )
  difference = max(
      float(jnp.abs(x - y).max())
      for x, y in zip(
          *(jax.tree.leaves(each.carry[0]) for each in (reference, run)),
          strict=True,
      )
  )
  return (
      f'{name:20}{difference:10.1e}'
      f'{run.state_bytes() / reference.state_bytes():8.3f}'
      f'{run.sent / reference.sent:8.3f}'
      f'{run.sent_compiled / reference.sent_compiled:10.3f}'
      f'{timing.ratio(seconds[1], seconds[0]):>20}'
      f'{run.compile_seconds / reference.compile_seconds:9.2f}'
      f'{run.memory / reference.memory:8.2f}'
  )


def main(argv: Sequence[str]) -> None:
  """Prints the table, line by line as it is measured."""
  timing.begin(argv, 8, is_cached=False)
  mesh = jax.make_mesh((8,), (AXIS,), (jax.sharding.AxisType.Auto,))
  params = params_of(_WIDTH.value, _LAYERS.value)
  print(
      f'{timing.setting("8 virtual devices")}\n\n'
      f'{"inner":20}{"difference":>10}{"state":>8}{"bytes":>8}{"compiled":>10}'
      f'{"CPU time":>20}{"compile":>9}{"memory":>8}'
  )
  mean = shard_transforms.cross_shard_mean(AXIS)
  for name in _INNERS.value:
    inner = _MAKE[name](1e-3)
    owned = contrib.owned_update(inner, AXIS)
    run = Run(owned, params, mesh)
    replicated = Run(optax.chain(mean, inner), params, mesh)
    print(row(name, replicated, run), flush=True)
    if name == 'adamw':
      elements = Run(shard_transforms.shard_update(inner, AXIS), params, mesh)
      again = Run(owned, params, mesh)
      print(row('adamw / elements', elements, again), flush=True)


if __name__ == '__main__':
  app.run(main)
