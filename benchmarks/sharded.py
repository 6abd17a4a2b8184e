"""Times `shard_update` against the replicated optimizer that it replaces.

A step takes the gradients of all shards, reduces them and updates parameters
with Adam, in one process over virtual CPU devices. Beside the ratio of the
medians stands that of the replicated step to itself, from the same rounds
(A/A). Intervals hold 95 % of bootstrap resamples of the rounds. "state" is the
part of the replicated state that a shard holds, "difference" the largest of any
parameter after as many steps.
"""

from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

from absl import app
from absl import flags
import jax
import numpy as np
import optax
import reduce
import timing

import shard_transforms

AXIS = 'data'

_PARAMS = flags.DEFINE_list(
    'params',
    [
        '3x8_000_000',
        '20x262_144',
        '100x12_000',
        '200x1_000',
        'transformer',
    ],
    "Parameters: 'transformer', or the number of leaves and the size of each.",
)
_NUM_SHARDS = flags.DEFINE_integer(
    'num_shards', 8, 'Virtual devices, one a shard.', lower_bound=1
)
_ROUNDS = flags.DEFINE_integer(
    'rounds', 15, 'Timed steps of each program.', lower_bound=2
)

HEADER = (
    f'{"":14}{"milliseconds":^19}{"time ratio":^21}{"A/A ratio":^21}\n'
    f'{"parameters":14}{"replicated":>10}{"sharded":>9}'
    f'{"sharded / repl.":^21}{"repl. / repl.":^21}{"state":>8}'
    f'{"difference":>12}'
)


def start(
    tx: optax.GradientTransformation,
    shapes: Sequence[tuple[int, ...]],
    mesh: jax.sharding.Mesh,
) -> tuple[Callable[..., Any], Any, Any]:
  """Returns a compiled step, parameters and state to call it with."""
  rng = np.random.default_rng(0)
  params = [rng.standard_normal(shape, np.float32) for shape in shapes]
  specs = shard_transforms.state_specs(tx, params, mesh)

  def step(params, state, scale):
    # Gradients that differ between shards and cost nothing to compute.
    grads = [shard_transforms.per_shard(p, AXIS) * scale[0] for p in params]
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  mapped = jax.shard_map(
      step,
      mesh=mesh,
      in_specs=(jax.P(), specs, jax.P(AXIS)),
      out_specs=(jax.P(), specs),
  )
  state = shard_transforms.init_state(tx, params, mesh)
  params = jax.device_put(params, jax.NamedSharding(mesh, jax.P()))
  scale = jax.device_put(
      np.linspace(-1, 2, mesh.size, dtype=np.float32),
      jax.NamedSharding(mesh, jax.P(AXIS)),
  )
  jitted = jax.jit(mapped, donate_argnums=(0, 1))
  compiled = jitted.lower(params, state, scale).compile()
  return lambda *carry: compiled(*carry, scale), params, state


def bytes_of_a_shard(tree: Any) -> int:
  """Returns how many bytes of a tree the first device holds."""
  leaves = jax.tree.leaves(tree)
  return sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)


def training(
    step: Callable[..., Any], params: Any, state: Any
) -> tuple[Callable[[], Any], Callable[[], Any]]:
  """Returns a call that trains by one step, and one that returns parameters."""
  carry = params, state

  def train():
    nonlocal carry
    carry = step(*carry)
    return carry

  return train, lambda: jax.device_get(carry[0])


def row(name: str, mesh: jax.sharding.Mesh) -> str:
  """Measures one kind of parameters and returns its line of the table."""
  shapes = reduce.shapes_of(name)
  adam = optax.adam(1e-3)
  mean = shard_transforms.cross_shard_mean(AXIS)
  replicated = start(optax.chain(mean, adam), shapes, mesh)
  sharded = start(shard_transforms.shard_update(adam, AXIS), shapes, mesh)
  part = bytes_of_a_shard(sharded[2]) / bytes_of_a_shard(replicated[2])
  again = start(optax.chain(mean, adam), shapes, mesh)

  runs = [training(*run) for run in (replicated, sharded, again)]
  trains = [train for train, _ in runs]
  timing.seconds_in_turn(trains, 1)
  seconds = timing.seconds_in_turn(trains, _ROUNDS.value)
  difference = max(
      float(np.abs(x - y).max())
      for x, y in zip(runs[0][1](), runs[1][1](), strict=True)
  )
  replicated_ms, sharded_ms, _ = 1e3 * np.median(seconds, 1)
  return (
      f'{name:14}{replicated_ms:10.2f}{sharded_ms:9.2f}'
      f'{timing.ratio(seconds[1], seconds[0]):^21}'
      f'{timing.ratio(seconds[2], seconds[0]):^21}{part:8.4f}{difference:12.0e}'
  )


def main(argv: Sequence[str]) -> None:
  """Prints the table, line by line as it is measured."""
  timing.begin(argv, _NUM_SHARDS.value, is_cached=False)
  mesh = jax.make_mesh(
      (_NUM_SHARDS.value,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,)
  )
  print(
      f'{timing.setting(f"{_NUM_SHARDS.value} virtual devices")}\n'
      f'Medians of {_ROUNDS.value} steps.\n\n{HEADER}'
  )
  for name in _PARAMS.value:
    print(row(name, mesh), flush=True)


if __name__ == '__main__':
  app.run(main)
