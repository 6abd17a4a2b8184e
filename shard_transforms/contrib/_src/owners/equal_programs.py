"""Whether the programs of several leaves are equal, so that one runs for all.

Each value of a program gets a number, and equal numbers mean the same steps in
the same way from inputs that are a leaf's own, at the same place, or the same
input for all leaves. What is not known to be equal counts as different, and so
does what `jax.vmap` changes.
"""

from collections.abc import Hashable
from collections.abc import Mapping
from typing import Any

import numpy as np

from shard_transforms._src.analysis import interpreter


def numbered(
    program: interpreter.Program, places: Mapping[int, int]
) -> list[tuple[int, int]]:
  """Returns for each output its number, and which own inputs it depends on.

  Args:
    program: A program with calls inlined.
    places: For each input that is a leaf's own, its place among those of its
      leaf.

  Returns:
    For each output its number, and the bits of the inputs among `places`.
  """
  return _numbered(program, places, {})


def _numbered(program, places, table):
  def number(*key: Hashable) -> int:
    return table.setdefault(key, len(table))

  found = {
      x: (number(i in places, places.get(i, i), x.aval), (i in places) << i)
      for i, x in enumerate(program.inputs)
  }

  def of(value):
    if value.is_literal:
      return number(value.aval, np.asarray(value.constant).tobytes()), 0
    # A constant is equal to itself alone.
    constant = value if value.constant is None else value.constant
    return found.get(value) or (number('constant', id(constant)), 0)

  for step in program.equations:
    given, reads = [], 0
    for value in step.inputs:
      name, bits = of(value)
      given.append(name)
      reads |= bits
    kinds = tuple([x.aval for x in step.outputs])
    made = number(step.name, _params(step), tuple(given), kinds)
    for k, x in enumerate(step.outputs):
      found[x] = number(made, k), reads
  return [*map(of, program.outputs)]


def _params(step):
  """Returns the parameters of a step, with its bodies as keys."""
  if not _runs_alike(step):
    return object()
  found: list[Any] = [_key(body) for body in step.bodies]
  for name, param in sorted(step.params.items()):
    if not interpreter.sub_jaxprs({name: param}):
      found.append((name, param if _is_hashable(param) else id(param)))
  return tuple(found)


def _key(body):
  """Returns a key that only equal programs share."""
  table = {}
  outputs = _numbered(body, {}, table)
  return *table, *outputs


def _is_hashable(param):
  try:
    hash(param)
  except TypeError:
    return False
  return True


def _runs_alike(step):
  """Whether a step under `jax.vmap` gives the results of each leaf alone."""
  # Of keys of XLA's own generator, all draw what the first one draws.
  kinds = (str(x.aval) for x in (*step.inputs, *step.outputs))
  draws = step.name == 'rng_bit_generator' or any(
      kind.startswith('key<') and not kind.startswith('key<fry>')
      for kind in kinds
  )
  # Calls of other languages may have no rule for it.
  return not draws and step.params.get('vmap_method', '') is not None
