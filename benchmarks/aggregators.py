"""Bytes and time of aggregators, beside the mean.

A program is one reduction of large leaves under `jax.shard_map`. All programs
run in turn in one process; beside each ratio of the medians stands an interval
that holds 95 % of bootstrap resamples of the rounds, and the second row is the
mean again.
"""

from collections.abc import Callable
from collections.abc import Sequence
import time
from typing import Any

from absl import app
from absl import flags
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax
import timing

import shard_transforms
from shard_transforms import contrib
from shard_transforms import monitoring

AXIS = 'data'
SHARDS = 8

_LEAVES = flags.DEFINE_integer('leaves', 20, 'Number of leaves.', lower_bound=1)
_ELEMENTS = flags.DEFINE_integer(
    'elements', 262_144, 'Number of elements of a leaf.', lower_bound=1
)
_ROUNDS = flags.DEFINE_integer(
    'rounds', 15, 'Timed runs of each program.', lower_bound=2
)


def reductions() -> dict[str, optax.GradientTransformation]:
  """Returns each reduction by its name."""
  mean = shard_transforms.cross_shard_mean(AXIS)
  return {
      'mean': mean,
      'guard': shard_transforms.guard(mean, AXIS, on_bad='exclude'),
      'coordinate_median': contrib.coordinate_median(AXIS),
      'trimmed_mean(2)': contrib.trimmed_mean(AXIS, 2),
      'majority_vote': contrib.majority_vote(AXIS),
      'adasum': contrib.adasum(AXIS),
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

  found = {name: compiled(tx) for name, tx in reductions().items()}
  mean = shard_transforms.cross_shard_mean(AXIS)
  return {'mean': found.pop('mean'), 'mean, A/A': compiled(mean), **found}


def shard_state(tx: optax.GradientTransformation, own: Any) -> optax.OptState:
  """Returns the first state of a shard."""
  return tx.init(jax.tree.map(jnp.zeros_like, own))


def sent_bytes(tx: optax.GradientTransformation) -> float:
  """Returns the bytes that a shard sends for the large leaves."""
  leaf = jax.ShapeDtypeStruct((_ELEMENTS.value,), jnp.float32)
  return monitoring.communication_report(
      lambda own: tx.update(own, shard_state(tx, own))[0],
      [leaf] * _LEAVES.value,
      axis_sizes={AXIS: SHARDS},
  ).total_bytes


def main(argv: Sequence[str]) -> None:
  """Prints bytes and times beside those of the mean."""
  timing.begin(argv, SHARDS)
  print(timing.setting(f'{_LEAVES.value} leaves of {_ELEMENTS.value}'))
  calls = programs()
  for call in calls.values():
    jax.block_until_ready(call())
  walls = timing.seconds_in_turn(list(calls.values()), _ROUNDS.value)
  cpus = timing.seconds_in_turn(
      list(calls.values()), _ROUNDS.value, clock=time.process_time
  )
  sent = {name: sent_bytes(tx) for name, tx in reductions().items()}
  print(f'{"":20}{"bytes":>14}{"milliseconds":>14}{"wall":^22}{"CPU":^22}')
  for name, wall, cpu in zip(calls, walls, cpus, strict=True):
    print(
        f'{name:20}{sent[name.partition(",")[0]]:14,.0f}'
        f'{1e3 * np.median(wall):14.1f}'
        f'{timing.ratio(wall, walls[0]):^22}{timing.ratio(cpu, cpus[0]):^22}'
    )


if __name__ == '__main__':
  app.run(main)
