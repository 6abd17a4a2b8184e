"""Measures how training programs grow with leaves, with bytes and with shards.

A program is the part of a training step after the gradients: their mean over
the shards, the update of Adam, and the new parameters, in the buffers of the
old. Gradients are its input and differ between shards. Programs differ in the
mean:

* by hand: `lax.pmean` of each leaf;
* cross_shard_mean: `optax.chain(cross_shard_mean(...), optax.adam(...))`;
* shard_update: `shard_update(optax.adam(...), ...)`.

Tracing is `jax.jit(step).trace`, with a transformation that was just made, so
that what `shard_update` checks about Adam is in it; in use, `init_state` has
checked it before. Compilation is what follows, down to machine code. Memory is
what the compiler plans for one shard: arguments, results that do not take the
place of arguments, and temporary buffers. All programs run in one process, in
turn, over the first of its virtual devices; a step includes the time in which
the arrays of all devices enter and leave.

Figures are medians, and ratios those to the program by hand. A slope is the
exponent of the power of leaves, bytes or shards that fits the larger half of a
sweep best: 1 where twice as many take twice as long.
"""

from collections.abc import Callable
from collections.abc import Sequence
import functools
import pathlib
import time
from typing import Any, NamedTuple

from absl import app
from absl import flags
import jax
from jax import lax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
import optax
import timing

import shard_transforms

AXIS = 'data'
LEARNING_RATE = 1e-3
PROGRAMS = ('by hand', 'cross_shard_mean', 'shard_update')
QUANTITIES = ('trace [s]', 'compile [s]', 'step [ms]', 'memory [MB]')

_LEAVES = flags.DEFINE_list(
    'leaves',
    ['10', '30', '100', '300', '1000', '3000'],
    'Numbers of leaves, of 1,000 floats each, over 8 shards.',
)
_BYTES = flags.DEFINE_list(
    'bytes',
    ['10_000', '100_000', '1_000_000', '10_000_000', '100_000_000'],
    'Bytes of the parameters, of 20 leaves, over 8 shards.',
)
_SHARDS = flags.DEFINE_list(
    'shards',
    ['1', '2', '4', '8', '16', '32', '64'],
    'Numbers of shards, for 100 leaves of 1,000 floats.',
)
_SWEEPS = flags.DEFINE_multi_enum(
    'sweep',
    ['leaves', 'bytes', 'shards'],
    ['leaves', 'bytes', 'shards'],
    'What to vary; may be given several times.',
)
_REPEATS = flags.DEFINE_integer(
    'repeats', 15, 'Timed steps of each program.', lower_bound=1
)
_COMPILATIONS = flags.DEFINE_integer(
    'compilations',
    3,
    'Timed compilations of each program, while those of a row are fast.',
    lower_bound=1,
)
_OUTPUT = flags.DEFINE_string(
    'output', 'scaling_out/scaling.png', 'The plot to write.'
)

# The compilations of a row start no further round after this many seconds.
PATIENCE = 15


@flags.multi_flags_validator(
    ['leaves', 'bytes', 'shards'], message='must hold positive numbers'
)
def _are_sizes(values):
  sizes = [size for sizes in values.values() for size in sizes or ['']]
  return all(size.isascii() and _is_positive(size) for size in sizes)


def _is_positive(size):
  digits = size.replace('_', '')
  return digits.isdecimal() and int(digits) > 0


class Size(NamedTuple):
  """What a program works on.

  Attributes:
    varied: The number that its sweep varies.
    num_leaves: Leaves of the parameters.
    num_elements: Floats of each leaf.
    num_shards: Shards.
  """

  varied: int
  num_leaves: int
  num_elements: int
  num_shards: int


def sizes_of(sweep: str) -> list[Size]:
  """Returns the sizes of a sweep, in rising order."""
  if sweep == 'leaves':
    return [Size(n, n, 1_000, 8) for n in sorted(map(int, _LEAVES.value))]
  if sweep == 'bytes':
    numbers = sorted(map(int, _BYTES.value))
    return [Size(n, 20, max(1, n // 80), 8) for n in numbers]
  return [Size(n, 100, 1_000, n) for n in sorted(map(int, _SHARDS.value))]


def hand_transform() -> optax.GradientTransformation:
  """Returns Adam behind a mean that is written by hand."""
  mean = optax.stateless(
      lambda updates, _: jax.tree.map(lambda g: lax.pmean(g, AXIS), updates)
  )
  return optax.chain(mean, optax.adam(LEARNING_RATE))


def transform(program: str) -> optax.GradientTransformation:
  """Returns the transformation of a program."""
  if program == 'by hand':
    return hand_transform()
  if program == 'cross_shard_mean':
    mean = shard_transforms.cross_shard_mean(AXIS)
    return optax.chain(mean, optax.adam(LEARNING_RATE))
  return shard_transforms.shard_update(optax.adam(LEARNING_RATE), AXIS)


def make_step(program: str, specs: Any, mesh: jax.sharding.Mesh) -> Any:
  """Returns a compiled function that JAX has not seen before."""
  tx = transform(program)

  def step(params, state, grads):
    grads = jax.tree.map(lambda g: g[0], grads)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

  mapped = jax.shard_map(
      step,
      mesh=mesh,
      in_specs=(jax.P(), specs, jax.P(AXIS)),
      out_specs=(jax.P(), specs),
  )
  return jax.jit(mapped, donate_argnums=(0, 1))


def abstract_arguments(
    program: str, size: Size, mesh: jax.sharding.Mesh
) -> tuple[Any, Any]:
  """Returns shapes of parameters, state, gradients; and specs of the state."""
  tx = transform(program)

  def leaves(shape, spec):
    sharding = jax.NamedSharding(mesh, spec)
    leaf = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
    return size.num_leaves * [leaf]

  params = leaves((size.num_elements,), jax.P())
  grads = leaves((size.num_shards, size.num_elements), jax.P(AXIS))
  specs = shard_transforms.state_specs(tx, params, mesh)
  state = shard_transforms.init_state(tx, params, mesh)
  return (params, state, grads), specs


def arrays(abstract: Any) -> Any:
  """Returns arrays of ones, which no other call donates."""
  return jax.tree.map(
      lambda x: jax.device_put(np.ones(x.shape, x.dtype), x.sharding), abstract
  )


def seconds_to_build(
    make: Callable, arguments: Any
) -> tuple[Any, float, float]:
  """Returns a compiled program, and the times to trace and to compile it."""
  jitted = make()
  start = time.perf_counter()
  traced = jitted.trace(*arguments)
  then = time.perf_counter()
  compiled = traced.lower().compile()
  return compiled, then - start, time.perf_counter() - then


def megabytes(compiled: Any) -> float:
  """Returns what the compiler plans for one shard."""
  plan = compiled.memory_analysis()
  added = plan.output_size_in_bytes - plan.alias_size_in_bytes
  return 1e-6 * (plan.argument_size_in_bytes + added + plan.temp_size_in_bytes)


def stepping(compiled: Any, params: Any, state: Any, grads: Any) -> Callable:
  """Returns a call that takes one step, in the buffers of the last."""
  carry = params, state

  def call():
    nonlocal carry
    carry = compiled(*carry, grads)
    return carry

  return call


def measure(size: Size) -> np.ndarray:
  """Measures all programs at one size.

  Args:
    size: What they work on.

  Returns:
    The quantities, of shape [programs, quantities].
  """
  mesh = jax.make_mesh(
      (size.num_shards,),
      (AXIS,),
      axis_types=(jax.sharding.AxisType.Auto,),
      devices=jax.devices()[: size.num_shards],
  )
  arguments, makers = [], []
  for program in PROGRAMS:
    abstract, specs = abstract_arguments(program, size, mesh)
    arguments.append(abstract)
    makers.append(functools.partial(make_step, program, specs, mesh))

  compiled, rounds = [], []
  start = time.perf_counter()
  while len(rounds) < _COMPILATIONS.value and (
      not rounds or time.perf_counter() - start < PATIENCE
  ):
    built = list(map(seconds_to_build, makers, arguments))
    compiled = [program for program, *_ in built]
    rounds.append([seconds for _, *seconds in built])
  build_seconds = np.median(rounds, axis=0)

  grads = arrays(arguments[0][2])
  calls = [
      stepping(program, arrays(params), arrays(state), grads)
      for program, (params, state, _) in zip(compiled, arguments, strict=True)
  ]
  for call in calls:
    jax.block_until_ready(call())
  step_seconds = timing.seconds_in_turn(calls, _REPEATS.value)
  step_ms = 1e3 * np.median(step_seconds, axis=1)
  memory = [megabytes(program) for program in compiled]
  return np.column_stack([build_seconds, step_ms, memory])


def slopes(sizes: Sequence[Size], measured: np.ndarray) -> np.ndarray:
  """Returns the exponents that fit the larger half of a sweep.

  Args:
    sizes: In rising order.
    measured: Of shape [sizes, programs, quantities].

  Returns:
    Exponents, of shape [programs, quantities].
  """
  half = len(sizes) // 2
  x = np.log([size.varied for size in sizes[half:]])
  y = np.log(measured[half:]).reshape(len(x), -1)
  return np.polyfit(x, y, 1)[0].reshape(measured.shape[1:])


def heading(sweep: str) -> str:
  """Returns the heading of the table of a sweep."""
  ratio = f'{"ratio":>7}'
  quantities = ''.join(f'{quantity:>13}{ratio}' for quantity in QUANTITIES)
  return f'\n{sweep:>12}  {"program":17}{quantities}'


def rows(varied: int, measured: np.ndarray) -> str:
  """Formats what was measured at one size, [programs, quantities]."""
  lines = []
  for program, values in zip(PROGRAMS, measured, strict=True):
    cells = ''.join(
        f'{value:13.3f}{value / by_hand:7.2f}'
        for value, by_hand in zip(values, measured[0], strict=True)
    )
    lines.append(f'{varied:12,}  {program:17}{cells}')
  return '\n'.join(lines)


def slope_rows(exponents: np.ndarray) -> str:
  """Formats the slopes of a sweep, [programs, quantities]."""
  lines = []
  for program, values in zip(PROGRAMS, exponents, strict=True):
    cells = ''.join(f'{value:13.2f}{"":7}' for value in values).rstrip()
    lines.append(f'{"slope":>12}  {program:17}{cells}')
  return '\n'.join(lines)


def plot(
    sweeps: dict[str, tuple[list[Size], np.ndarray]], path: pathlib.Path
) -> None:
  """Draws a row of axes for each sweep, with a column for each quantity."""
  figure = matplotlib.figure.Figure(
      figsize=(13, 1 + 2.8 * len(sweeps)), layout='constrained'
  )
  grid = figure.subplots(
      len(sweeps), len(QUANTITIES), sharey='col', squeeze=False
  )
  styles = (('black', 'o-'), ('tab:blue', 's--'), ('tab:orange', '^:'))
  for axes_row, (sweep, (sizes, measured)) in zip(
      grid, sweeps.items(), strict=True
  ):
    x = [size.varied for size in sizes]
    names = [f'{n:,}' if n < 10_000 else f'{n:.0e}' for n in x]
    for j, axes in enumerate(axes_row):
      for i, (color, line) in enumerate(styles):
        axes.loglog(x, measured[:, i, j], line, color=color, label=PROGRAMS[i])
      axes.set(title=QUANTITIES[j], xlabel=sweep)
      axes.set_xticks(x, names)
      axes.set_xticks([], minor=True)
      axes.grid(alpha=0.3)
  handles, labels = grid[0, 0].get_legend_handles_labels()
  figure.legend(handles, labels, loc='outside upper center', ncols=3)
  path.parent.mkdir(parents=True, exist_ok=True)
  figure.savefig(path, dpi=110)


def main(argv: Sequence[str]) -> None:
  """Prints the tables, size by size as they are measured, and plots them."""
  sweeps = {sweep: sizes_of(sweep) for sweep in _SWEEPS.value}
  num_devices = max(
      size.num_shards for sizes in sweeps.values() for size in sizes
  )
  timing.begin(argv, num_devices, is_cached=False)
  print(timing.setting(f'{num_devices} virtual devices'))
  # A warm-up, so that one-time work of JAX counts for no program.
  measure(Size(1, 1, 1_000, 1))
  results = {}
  for sweep, sizes in sweeps.items():
    print(heading(sweep))
    measured = []
    for size in sizes:
      measured.append(measure(size))
      print(rows(size.varied, measured[-1]), flush=True)
    results[sweep] = sizes, np.stack(measured)
    if len(sizes) > 2:
      print(slope_rows(slopes(*results[sweep])), flush=True)
  plot(results, pathlib.Path(_OUTPUT.value))
  print(f'\nPlot: {_OUTPUT.value}')


if __name__ == '__main__':
  app.run(main)
