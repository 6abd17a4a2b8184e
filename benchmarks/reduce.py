"""Times `cross_shard_mean` against a mean that is written by hand.

All programs run in one process, in turn, over virtual CPU devices. A call holds
several reductions, one after the other, because the gradients of a training
step do not leave its program; `--reductions=1` includes the time in which the
arrays of all devices enter and leave a call.

Beside the ratio of the medians stands that of the hand-written mean to itself,
from the same rounds (A/A): what lies inside its interval is noise. Intervals
hold 95 % of bootstrap resamples of the rounds. Compilation includes tracing.
"""

from collections.abc import Callable
from collections.abc import Sequence
import functools
import math
import re
from typing import Any
from unittest import mock

from absl import app
from absl import flags
import jax
from jax import lax
import numpy as np
import timing

import shard_transforms
from shard_transforms._src.reduction import thresholds
from shard_transforms.contrib import reproducible

AXIS = 'data'
# The bytes that a call reduces on each shard, to bound the time of a run.
MAX_ELEMENTS = 16_000_000


def _transformer_shapes(num_layers=4, width=256, vocabulary=1_000, length=128):
  """Returns the shapes of the parameters of a small transformer."""
  norm = [(width,), (width,)]
  attention = [(width, 3 * width), (3 * width,), (width, width), (width,)]
  mlp = [(width, 4 * width), (4 * width,), (4 * width, width), (width,)]
  layer = [*norm, *attention, *norm, *mlp]
  return [(vocabulary, width), (length, width), *num_layers * layer, *norm]


_COUNT_X_SIZE = re.compile(r'([1-9]\d*)x([1-9]\d*(?:_\d+)*)')


def shapes_of(name: str) -> list[tuple[int, ...]]:
  """Returns the shapes of the gradients that `--shapes` names.

  Args:
    name: 'transformer', or the number of leaves and the size of each.

  Returns:
    A shape for each leaf.

  Raises:
    ValueError: If `name` is neither.
  """
  if name == 'transformer':
    return _transformer_shapes()
  match = _COUNT_X_SIZE.fullmatch(name)
  if match is None:
    raise ValueError(
        "must hold 'transformer' or a number of leaves and the size of each,"
        f" such as '200x1_000', got {name!r}"
    )
  return int(match[1]) * [(int(match[2]),)]


_SHAPES = flags.DEFINE_list(
    'shapes',
    ['200x1_000', '200x30_000', '20x1_000_000', 'transformer'],
    "Gradients to reduce: 'transformer', or the number of leaves and the size"
    ' of each.',
)
_SHARDS = flags.DEFINE_integer(
    'shards', 8, 'Virtual devices, one a shard.', lower_bound=1
)
_REPEATS = flags.DEFINE_integer(
    'repeats', 21, 'Timed calls of each program.', lower_bound=2
)
_REDUCTIONS = flags.DEFINE_integer(
    'reductions',
    10,
    'The most reductions in a call; large gradients get fewer.',
    lower_bound=1,
)
_COMPILATIONS = flags.DEFINE_integer(
    'compilations', 5, 'Timed compilations of each program.', lower_bound=1
)
_TREE = flags.DEFINE_bool(
    'tree', False, 'Whether the library adds in the order of a tree.'
)


@flags.validator('shapes')
def _are_shapes(names):
  try:
    return all(shapes_of(name) for name in names or [''])
  except ValueError as error:
    raise flags.ValidationError(str(error)) from error


def mean_by_hand(grads: Any) -> Any:
  """Returns the mean over the shards, leaf by leaf."""
  return jax.tree.map(lambda g: lax.pmean(g, AXIS), grads)


def mean_by_library(grads: Any) -> Any:
  """Returns the mean over the shards, through the library."""
  make = (
      reproducible.cross_shard_mean
      if _TREE.value
      else shard_transforms.cross_shard_mean
  )
  tx = make(AXIS)
  return tx.update(grads, tx.init(grads))[0]


def compiled(
    mean: Callable, grads: Any, reductions: int, mesh: jax.sharding.Mesh
) -> Callable:
  """Compiles a call that takes the mean several times in a row.

  Args:
    mean: Takes and returns the gradients of a shard.
    grads: Arrays of shape [shards, ...].
    reductions: How often.
    mesh: Holds one axis, over the shards.

  Returns:
    The compiled call.
  """

  def step(_, grads):
    return shard_transforms.per_shard(mean(grads), AXIS)

  def repeated(grads):
    grads = jax.tree.map(lambda g: g[0], grads)
    return lax.fori_loop(0, reductions, step, grads)

  spec = jax.P(AXIS)
  mapped = jax.shard_map(repeated, mesh=mesh, in_specs=spec, out_specs=spec)
  return jax.jit(mapped).lower(grads).compile()


def unpacked(make: Callable[[], Callable]) -> Callable:
  """Compiles a call that sends each leaf alone."""
  with mock.patch.object(thresholds, 'levels', return_value=()):
    return make()


def same_bits(some: Sequence[jax.Array], others: Sequence[jax.Array]) -> bool:
  """Returns whether two lists of arrays hold the same bits."""
  pairs = zip(some, others, strict=True)
  return all(
      np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs
  )


def random_grads(
    shapes: Sequence[tuple[int, ...]], mesh: jax.sharding.Mesh
) -> list[jax.Array]:
  """Returns other numbers for each shard, of shapes [shards, *shape]."""
  rng = np.random.default_rng(0)
  sharding = jax.NamedSharding(mesh, jax.P(AXIS))
  shapes = [(mesh.shape[AXIS], *shape) for shape in shapes]
  return [
      jax.device_put(rng.standard_normal(shape, np.float32), sharding)
      for shape in shapes
  ]


HEADER = (
    f'{"":14}{"milliseconds":^19}{"time ratio":^21}{"A/A ratio":^21}'
    f'{"compile seconds":^19}{"":20}\n'
    f'{"gradients":14}{"by hand":>9}{"library":>9} {"library / hand":^21}'
    f'{"hand / hand":^21}{"by hand":>8}{"library":>9}{"ratio":>7}{"bits":>8}'
)


def row(name: str, mesh: jax.sharding.Mesh) -> str:
  """Measures one kind of gradients and returns its line of the table."""
  shapes = shapes_of(name)
  grads = random_grads(shapes, mesh)
  num_elements = sum(math.prod(shape) for shape in shapes)
  reductions = min(_REDUCTIONS.value, 1 + MAX_ELEMENTS // num_elements)
  make_hand, make_library = (
      functools.partial(compiled, mean, grads, reductions, mesh)
      for mean in (mean_by_hand, mean_by_library)
  )
  hand = functools.partial(make_hand(), grads)
  library = functools.partial(make_library(), grads)
  same = same_bits(library(), unpacked(make_library)(grads))
  run_seconds = timing.seconds_in_turn([hand, library, hand], _REPEATS.value)
  compile_seconds = timing.seconds_in_turn(
      [make_hand, make_library], _COMPILATIONS.value
  )
  return line(name, run_seconds / reductions, compile_seconds, same)


def line(
    name: str, run_seconds: np.ndarray, compile_seconds: np.ndarray, same: bool
) -> str:
  """Formats a line of the table.

  Args:
    name: What was reduced.
    run_seconds: By hand, by the library and by hand again: [3, repeats].
    compile_seconds: By hand and by the library: [2, compilations].
    same: Whether packed and unpacked gradients give the same bits.

  Returns:
    The line.
  """
  hand, library, again = run_seconds
  hand_ms, library_ms, _ = 1e3 * np.median(run_seconds, 1)
  hand_compile, library_compile = np.median(compile_seconds, 1)
  return (
      f'{name:14}{hand_ms:9.2f}{library_ms:9.2f} '
      f'{timing.ratio(library, hand):^21}{timing.ratio(again, hand):^21}'
      f'{hand_compile:8.2f}{library_compile:9.2f}'
      f'{library_compile / hand_compile:7.2f}{"same" if same else "DIFFER":>8}'
  )


def main(argv: Sequence[str]) -> None:
  """Prints the table, line by line as it is measured."""
  timing.begin(argv, _SHARDS.value, is_cached=False)
  mesh = jax.make_mesh(
      (_SHARDS.value,), (AXIS,), axis_types=(jax.sharding.AxisType.Auto,)
  )
  print(
      f'{timing.setting(f"{_SHARDS.value} virtual devices")}\n'
      f'Medians of {_REPEATS.value} calls of up to {_REDUCTIONS.value}'
      ' reductions.\n'
      f'"bits": whether packed and unpacked gradients give the same.\n\n'
      f'{HEADER}'
  )
  for name in _SHAPES.value:
    print(row(name, mesh), flush=True)


if __name__ == '__main__':
  app.run(main)
