"""Measures each threshold of the library here, and prints what it would set.

`shard_transforms/_src/reduction/thresholds.py` is the table of buffers. Where a
platform has no figures in it, nothing is packed: run this there. Two others
stand where they are used, in `aggregators` and `exchanges`. It takes all
devices, or virtual ones of a CPU, and on two idle cores less than ten minutes.

Each line compares ways to compute the same: the median time of calls in turn,
divided by the median of the first way, with the interval that holds 95 % of
bootstrap resamples. A way is taken only if it saves 5 %. On CPUs, two processes
then measure what is between processes.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import functools
import os
import sys
from typing import Any
from unittest import mock

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
from shard_transforms._src.reduction import thresholds
from shard_transforms.contrib import compression
from shard_transforms.contrib._src import exchanges
from shard_transforms.contrib._src.aggregators import aggregator
from shard_transforms.contrib._src.aggregators import order_statistics

AXIS = 'data'
GAIN = 0.95
KIB = 1024

_SHARDS = flags.DEFINE_integer(
    'shards', 8, 'Virtual devices, where there are only CPUs.', lower_bound=2
)
_REPEATS = flags.DEFINE_integer(
    'repeats', 11, 'Timed calls of each program.', lower_bound=2
)
_REDUCTIONS = flags.DEFINE_integer(
    'reductions', 5, 'Updates in a call, one after the other.', lower_bound=1
)

# The functions that tell what was measured, with their modules.
BUFFERS = thresholds, 'levels'
FEW_ROWS = aggregator, 'are_few_rows'
PIECE_BYTES = exchanges, 'piece_bytes'


def fastest(
    name: str,
    make: Callable[[], Callable],
    measured: tuple[Any, str],
    ways: Mapping[Any, Any],
) -> Any:
  """Times the program that `make` traces with each of some thresholds.

  Args:
    name: What is measured, for the printed line.
    make: Returns a compiled function without arguments.
    measured: The function that tells it, by its module and name.
    ways: What that returns, by the label that is printed; the first is the way
      that needs no figures.

  Returns:
    The label of the fastest way, or of the first if none saves enough.
  """
  calls = []
  for way in ways.values():
    with mock.patch.object(*measured, return_value=way):
      calls.append(make())
  for call in calls:
    jax.block_until_ready(call())
  seconds = timing.seconds_in_turn(calls, _REPEATS.value)
  medians = np.median(seconds, axis=1)
  best = int(np.argmin(medians))
  chosen = best if medians[best] < GAIN * medians[0] else 0
  if jax.process_index() == 0:
    ratios = '  '.join(
        f'{label}: {timing.ratio(row, seconds[0])}'
        for label, row in zip(ways, seconds, strict=True)
    )
    print(f'{name:24}{1e3 * medians[0]:9.2f} ms  {ratios}', flush=True)
  # All processes must compile the same next.
  if jax.process_count() > 1:
    from jax.experimental import multihost_utils

    chosen = int(multihost_utils.broadcast_one_to_all(np.int32(chosen)))
  return list(ways)[chosen]


def updates_of(
    tx: optax.GradientTransformation, shapes: Sequence[tuple[int, ...]]
) -> Callable[[], Any]:
  """Compiles some updates in a row, over all devices."""
  mesh = jax.make_mesh(
      (jax.device_count(),), (AXIS,), (jax.sharding.AxisType.Auto,)
  )
  tx = optax.with_extra_args_support(tx)

  def step(_, carry):
    updates, state = carry
    return tx.update(updates, state, updates)

  def repeated(start):
    grads = [
        start + lax.axis_index(AXIS) + lax.broadcasted_iota(start.dtype, x, 0)
        for x in shapes
    ]
    grads, _ = lax.fori_loop(
        0, _REDUCTIONS.value, step, (grads, tx.init(grads))
    )
    return functools.reduce(jnp.add, map(jnp.sum, grads))[None]

  mapped = jax.shard_map(
      repeated,
      mesh=mesh,
      in_specs=jax.P(),
      out_specs=jax.P(AXIS),
      check_vma=False,
  )
  start = np.float32(1)
  return functools.partial(jax.jit(mapped).lower(start).compile(), start)


def buffers(
    name: str, tx: optax.GradientTransformation
) -> tuple[thresholds.Level, ...]:
  """Returns the buffers that gain: first how large, then for which leaves."""

  def ways(limits):
    levels = {
        limit // KIB: (thresholds.Level(limit, limit),) for limit in limits
    }
    return {'alone': (), **levels}

  limits = [KIB * n for n in (32, 128, 512, 4_096)]
  best = fastest(
      f'{name} [KiB]',
      lambda: updates_of(tx, [(1_000,)] * 200),
      BUFFERS,
      ways(limits),
  )
  if best == 'alone':
    return ()
  leaf_bytes = 4 * KIB
  for size in (2_000, 4_000, 8_000, 12_000, 30_000):
    limit = max(KIB * best, 8 * 4 * size)
    found = fastest(
        f'  60 leaves of {4 * size:,} B',
        lambda size=size: updates_of(tx, [(size,)] * 60),
        BUFFERS,
        ways([limit]),
    )
    if found == 'alone':
      break
    leaf_bytes = 4 * size
  return (thresholds.Level(leaf_bytes, max(KIB * best, leaf_bytes)),)


def few_rows(
    name: str, make: Callable[[int], Callable], sizes: Sequence[int]
) -> None:
  """Times rows that are handled one by one, for some numbers of them."""
  ways = {'together': False, 'one by one': True}
  for size in sizes:
    fastest(f'{name} {size}', lambda size=size: make(size), FEW_ROWS, ways)


def sorted_rows(num_rows: int) -> Callable[[], Any]:
  """Compiles a sort of rows, on one device."""
  rows = np.random.default_rng(0).standard_normal((num_rows, 100_000))
  rows = jnp.asarray(rows, jnp.float32)

  def middle(rows):
    return order_statistics.sort(list(rows))[num_rows // 2]

  return functools.partial(jax.jit(middle).lower(rows).compile(), rows)


def in_one_process() -> dict[str, tuple[thresholds.Level, ...]]:
  """Returns the buffers by which the devices of this process gain."""
  few_rows('sorted rows', sorted_rows, (4, 8, 16, 32))
  few_rows(
      'rows of adasum',
      lambda _: updates_of(contrib.adasum(AXIS), [(200_000,)]),
      (jax.device_count(),),
  )
  return in_buffers()


def in_buffers() -> dict[str, tuple[thresholds.Level, ...]]:
  """Returns by which buffers all-reduces, slices and exchanges gain."""
  txs = {
      'whole': shard_transforms.cross_shard_mean(AXIS),
      'in slices': shard_transforms.shard_update(optax.identity(), AXIS),
      'exchanged': contrib.coordinate_median(AXIS),
  }
  return {name: buffers(name, tx) for name, tx in txs.items()}


def between_processes() -> dict[str, tuple[thresholds.Level, ...]]:
  """Returns the buffers by which two processes gain."""
  tx = compression.compressed_mean(AXIS, compression.quantize(8))
  fastest(
      'piece_bytes [KiB]',
      lambda: updates_of(tx, [(4_000_000,)]),
      PIECE_BYTES,
      {n: n and KIB * n for n in (None, 64, 256, 1_024)},
  )
  return in_buffers()


def main(argv: Sequence[str]) -> None:
  """Prints the lines as they are measured, and then the table."""
  timing.refuse_arguments(argv)
  jax.config.update('jax_enable_compilation_cache', False)
  is_child = 'JAX_NUM_PROCESSES' in os.environ
  jax.config.update('jax_num_cpu_devices', 1 if is_child else _SHARDS.value)
  num_processes = shard_transforms.launch.join_processes()
  platform = jax.devices()[0].platform
  where = f'{jax.device_count()} devices of {platform}'
  if jax.process_index() == 0:
    print(timing.setting(where, f'{num_processes} processes'), '\n', sep='')
  found = between_processes() if is_child else in_one_process()
  if jax.process_index() == 0:
    print(
        f'\nFor {where} in {num_processes} processes it would set:\n  {found}'
    )
  if platform == 'cpu' and not is_child:
    print(flush=True)
    shard_transforms.launch.run_processes(
        2, [sys.executable, *sys.orig_argv[1:]]
    )


if __name__ == '__main__':
  app.run(main)
