"""Equality of the programs of several leaves, so that one runs for all of them.

Each value of a program has a digest. Equal digests mean the same equations on
inputs that belong to the leaf, at the same position, or on the same input for
all leaves. What is not known to be equal counts as different, and so does what
`jax.vmap` changes.
"""

from collections.abc import Hashable
from collections.abc import Mapping
from typing import Any

import numpy as np

from shard_transforms._src.analysis import interpreter


def digests(
    program: interpreter.Program, positions: Mapping[int, int]
) -> list[int]:
  """Returns the digest of each output.

  Args:
    program: A program with calls inlined.
    positions: For each input that belongs to a leaf, its position among the
      inputs of this leaf.
  """
  return _digests(program, positions, {})


def _digests(program, positions, table):
  def digest(*key: Hashable) -> int:
    return table.setdefault(key, len(table))

  digest_of = {
      x: digest(i in positions, positions.get(i, i), x.aval)
      for i, x in enumerate(program.inputs)
  }

  def of(value):
    if value.is_literal:
      return digest(value.aval, np.asarray(value.constant).tobytes())
    if value in digest_of:
      return digest_of[value]
    # A constant is equal only to itself.
    constant = value if value.constant is None else value.constant
    return digest('constant', id(constant))

  for equation in program.equations:
    inputs = tuple(map(of, equation.inputs))
    types = tuple(x.aval for x in equation.outputs)
    outputs = digest(equation.name, _params(equation), inputs, types)
    for i, x in enumerate(equation.outputs):
      digest_of[x] = digest(outputs, i)
  return [*map(of, program.outputs)]


def _params(equation):
  """Returns the parameters of an equation, with its bodies as keys."""
  if not _is_batchable(equation):
    return object()
  params: list[Any] = [_key(body) for body in equation.bodies]
  for name, param in sorted(equation.params.items()):
    if not interpreter.sub_jaxprs({name: param}):
      params.append((name, param if _is_hashable(param) else id(param)))
  return tuple(params)


def _key(body):
  """Returns a key that only equal programs share."""
  table = {}
  outputs = _digests(body, {}, table)
  return *table, *outputs


def _is_hashable(param):
  try:
    hash(param)
  except TypeError:
    return False
  return True


def _is_batchable(equation):
  """Whether `jax.vmap` of an equation gives the results of each leaf."""
  # With keys of XLA's own generator, all rows draw what the first row draws.
  types = (str(x.aval) for x in (*equation.inputs, *equation.outputs))
  draws = equation.name == 'rng_bit_generator' or any(
      kind.startswith('key<') and not kind.startswith('key<fry>')
      for kind in types
  )
  # Foreign calls may have no batching rule.
  return not draws and equation.params.get('vmap_method', '') is not None
