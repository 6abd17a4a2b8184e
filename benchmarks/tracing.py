"""Times how long programs take to trace, against one that is written by hand.

A program is `update` of a chain of a mean over shards and Adam, under a mapped
axis, with so many leaves of 64 elements; by hand, the mean is `jax.lax.pmean`.
Nothing is compiled, and no devices are needed. One process traces all programs
in turn, each time with a new transformation; "again" traces the same one twice,
as after `init`. The time is processor time, because tracing keeps one core busy
and waits for nothing.

CPython maps new memory for each call that crosses the end of a chunk of its
stack, which may double the time of a trace. So each round starts from another
depth of the stack, and the least time of all rounds counts. Garbage is
collected in between.
"""

from collections.abc import Callable
from collections.abc import Sequence
import functools
import gc
import itertools
import time
from typing import Any

from absl import app
from absl import flags
import jax
from jax import lax
import jax.numpy as jnp
import optax
import timing

import shard_transforms

AXIS = 'data'

_LEAVES = flags.DEFINE_list(
    'leaves', ['100', '1000'], 'Numbers of leaves of the parameters.'
)
_NUM_SHARDS = flags.DEFINE_integer(
    'num_shards', 8, 'Size of the mapped axis.', lower_bound=1
)
_ROUNDS = flags.DEFINE_integer(
    'rounds', 16, 'Timed traces of each program.', lower_bound=2
)

HEADER = f'{"leaves":>6}  {"program":22}{"milliseconds":>12}{"by hand = 1":>14}'


def by_hand() -> optax.GradientTransformation:
  """Returns a mean over shards and Adam."""
  mean = optax.stateless(lambda updates, _: lax.pmean(updates, AXIS))
  return optax.chain(mean, optax.adam(1e-3))


def reduced() -> optax.GradientTransformation:
  """Returns the same with the mean of this library."""
  return optax.chain(shard_transforms.cross_shard_mean(AXIS), optax.adam(1e-3))


def of_spikes(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
  """Returns a guard by the loss and by the norm, which clips."""
  rule = shard_transforms.SpikeRule(
      max_stds=6.0, signals=('norm', 'loss'), on_spike='clip'
  )
  tx = shard_transforms.guard(inner, AXIS, spikes=rule)

  def update(updates, state, params=None, **extra_args):
    return tx.update(updates, state, params, **extra_args, value=1.0)

  return optax.GradientTransformationExtraArgs(tx.init, update)


def late(inner: optax.GradientTransformation) -> optax.GradientTransformation:
  """Returns `drop_stale` around `inner`, with updates that are fresh."""
  tx = shard_transforms.drop_stale(2, inner, axis_name=AXIS)

  def update(updates, state, params=None, **extra_args):
    return tx.update(updates, state, params, **extra_args, local_step=0)

  return optax.GradientTransformationExtraArgs(tx.init, update)


def collected(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformation:
  """Returns `tower_reduce` of two towers around `inner`."""
  return shard_transforms.tower_reduce(2, inner, axis_name=AXIS)


def in_slices() -> optax.GradientTransformation:
  """Returns Adam on slices."""
  return shard_transforms.shard_update(optax.adam(1e-3), AXIS)


PROGRAMS = {
    'by hand': by_hand,
    'by hand, A/A': by_hand,
    'cross_shard_mean': reduced,
    'guard': lambda: shard_transforms.guard(reduced(), AXIS),
    "guard, 'exclude'": lambda: shard_transforms.guard(
        reduced(), AXIS, on_bad='exclude'
    ),
    'guard of spikes': lambda: of_spikes(reduced()),
    'drop_stale': lambda: late(reduced()),
    'tower_reduce': lambda: collected(reduced()),
    'all three, nested': lambda: collected(
        late(shard_transforms.guard(reduced(), AXIS))
    ),
    'shard_update': in_slices,
}


def tracing(
    make: Callable[[], Any], num_leaves: int, again: bool = False
) -> Callable[[], None]:
  """Returns a call that traces `update` of a transformation.

  Args:
    make: Returns a transformation.
    num_leaves: Of the parameters.
    again: Whether all calls trace the same transformation.
  """
  leaf = jax.ShapeDtypeStruct((64,), jnp.float32)
  params = {f'leaf_{i}': leaf for i in range(num_leaves)}
  axis_env = [(AXIS, _NUM_SHARDS.value)]
  first = make()
  init = jax.make_jaxpr(first.init, axis_env=axis_env, return_shape=True)
  _, state = init(params)

  def trace():
    tx = first if again else make()
    # JAX caches the traces of functions that it has seen.
    update = functools.partial(tx.update)
    jax.make_jaxpr(update, axis_env=axis_env)(params, state, params)

  # With some of these, no hot call crosses the end of a chunk.
  depths = itertools.cycle(range(0, 160, 10))
  return lambda: at_depth(next(depths), trace)


def at_depth(depth: int, fn: Callable[[], None]) -> None:
  """Calls a function at a depth of the stack."""
  if depth:
    at_depth(depth - 1, fn)
  else:
    fn()


def rows(num_leaves: int) -> list[str]:
  """Measures all programs and returns their lines of the table."""
  calls = {name: tracing(fn, num_leaves) for name, fn in PROGRAMS.items()}
  calls['shard_update, again'] = tracing(in_slices, num_leaves, again=True)
  timing.seconds_in_turn(list(calls.values()), 1)
  # Else garbage, which is collected now and then, is part of some traces.
  gc.disable()
  seconds = timing.seconds_in_turn(
      list(calls.values()),
      _ROUNDS.value,
      before=gc.collect,
      clock=time.process_time,
  )
  least = seconds.min(1)
  return [
      f'{num_leaves:6}  {name:22}{1e3 * own:12.0f}{own / least[0]:14.2f}'
      for name, own in zip(calls, least, strict=True)
  ]


def main(argv: Sequence[str]) -> None:
  """Prints the table."""
  timing.begin(argv)
  print(f'{timing.setting()}\nThe least of {_ROUNDS.value} times.\n\n{HEADER}')
  for num_leaves in map(int, _LEAVES.value):
    print('\n'.join(rows(num_leaves)), flush=True)


if __name__ == '__main__':
  app.run(main)
