"""Times steps behind gates that accept, against the step without a gate.

A step is `update` and `optax.apply_updates` under `jax.jit` with donated
parameters and state, on the one shard of an axis. "Collecting" is a call of
`tower_reduce` that does not end a window; a window of four counts a quarter of
its four calls. A local step is one of `local_updates` without a meeting. The
guards of spikes look at the loss and at the norm. All programs run in turn in
one process; beside each ratio of the medians stands an interval that holds 95 %
of bootstrap resamples of the rounds, and the second row is the plain step once
more.
"""

from collections.abc import Callable
from collections.abc import Sequence
import time
from typing import Any, Literal

from absl import app
from absl import flags
import jax
import jax.numpy as jnp
import numpy as np
import optax
import timing

import shard_transforms

_LEAVES = flags.DEFINE_integer(
    'leaves', 4, 'Number of leaves of the parameters.', lower_bound=1
)
_ELEMENTS = flags.DEFINE_integer(
    'elements', 2_000_000, 'Number of elements of a leaf.', lower_bound=1
)
_ROUNDS = flags.DEFINE_integer(
    'rounds', 15, 'Timed runs of four steps of each program.', lower_bound=2
)

_CPU_TIME = flags.DEFINE_bool(
    'cpu_time', False, 'Whether to take CPU time, in place of wall time.'
)

AXIS = 'data'
STEPS = 4
OPTIMIZERS = {
    'momentum': lambda: optax.sgd(0.1, momentum=0.9),
    'adam': lambda: optax.adam(1e-3),
}
HEADER = f'{"optimizer":10}{"step":18}{"milliseconds":>13}{"ratio":^21}'


def gates(
    inner: optax.GradientTransformation,
) -> dict[str, optax.GradientTransformation]:
  """Returns `inner` alone, twice, behind each gate, and on its own."""
  outer = optax.chain(
      shard_transforms.cross_shard_mean(AXIS),
      optax.sgd(0.7, momentum=0.9, nesterov=True),
  )
  local = shard_transforms.contrib.local_updates(
      inner, outer, AXIS, every=2**30
  )
  return {
      'plain': inner,
      'plain, A/A': inner,
      'drop_stale': shard_transforms.drop_stale(2**30, inner),
      'guard': shard_transforms.guard(inner),
      'guard of spikes': of_spikes(inner, 'skip'),
      'guard that clips': of_spikes(inner, 'clip'),
      'collecting': shard_transforms.tower_reduce(2**30, inner),
      'window of four': shard_transforms.tower_reduce(4, inner),
      'local step': local,
  }


def of_spikes(
    inner: optax.GradientTransformation, on_spike: Literal['skip', 'clip']
) -> optax.GradientTransformationExtraArgs:
  """Returns a guard by the loss and the norm."""
  rule = shard_transforms.SpikeRule(
      max_stds=1e6, signals=('norm', 'loss'), on_spike=on_spike
  )
  return shard_transforms.guard(inner, spikes=rule)


def steps(tx: optax.GradientTransformation) -> Callable[[], Any]:
  """Returns a call of four steps, each from where the last one ended."""
  tx = optax.with_extra_args_support(tx)

  def step(params: Any, state: Any, grads: Any) -> Any:
    given = {'local_step': 0, 'value': 1.0}
    updates, state = tx.update(grads, state, params, **given)
    return optax.apply_updates(params, updates), state

  step = jax.jit(on_one_shard(step), donate_argnums=(0, 1))
  params, grads = make_params(0), make_params(1)
  ends = [(params, jax.jit(on_one_shard(tx.init))(params))]

  def run():
    for _ in range(STEPS):
      ends.append(step(*ends.pop(), grads))
    return ends[0]

  return run


def on_one_shard(fn: Callable[..., Any]) -> Callable[..., Any]:
  """Maps a function over the axis, of one shard."""
  return jax.shard_map(
      fn,
      mesh=jax.make_mesh((1,), (AXIS,)),
      in_specs=jax.P(),
      out_specs=jax.P(),
      check_vma=False,
  )


def make_params(seed: int) -> list[jax.Array]:
  """Returns the leaves of parameters, or of their gradients."""
  rng = np.random.default_rng(seed)
  return [
      jnp.asarray(rng.normal(size=_ELEMENTS.value), jnp.float32)
      for _ in range(_LEAVES.value)
  ]


def rows(name: str) -> list[str]:
  """Measures the steps of an optimizer and returns their lines of the table."""
  txs = gates(OPTIMIZERS[name]())
  calls = [steps(tx) for tx in txs.values()]
  timing.seconds_in_turn(calls, 1)
  clock = time.process_time if _CPU_TIME.value else time.perf_counter
  seconds = timing.seconds_in_turn(calls, _ROUNDS.value, clock=clock)
  plain = seconds[0]
  return [
      f'{name:10}{row:18}{1e3 * np.median(of_row) / STEPS:13.1f}'
      f'{timing.ratio(of_row, plain):^21}'
      for row, of_row in zip(txs, seconds, strict=True)
  ]


def main(argv: Sequence[str]) -> None:
  """Prints the table."""
  timing.begin(argv)
  setting = timing.setting(f'{_LEAVES.value} x {_ELEMENTS.value:,} float32')
  print(f'{setting}\nTimes of a step; without a gate = 1.\n\n{HEADER}')
  for name in OPTIMIZERS:
    print('\n'.join(rows(name)), flush=True)


if __name__ == '__main__':
  app.run(main)
