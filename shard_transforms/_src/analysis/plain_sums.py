"""Which inputs of a program are summed over shards as they are.

A NaN or an infinity in such an input is in its sum too, on all shards: each of
them sees it there without a further collective.
"""

from collections.abc import Hashable
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from shard_transforms._src.analysis import interpreter
from shard_transforms._src.analysis import primitives


def find(
    jaxpr: Any, inputs: Sequence[Any], axes: Sequence[Hashable]
) -> list[Any]:
  """Returns the variables of the sums of these inputs over shards.

  Args:
    jaxpr: The program.
    inputs: Variables of its inputs.
    axes: The mapped axes of the shards.

  Returns:
    The sums, in the order of the program; none if an input that has numbers is
    not summed, or is computed with before.
  """
  copies = {var: var for var in inputs if _has_numbers(var)}
  left, sums = set(copies), []
  for eqn in jaxpr.eqns:
    name = interpreter.common_name(eqn.primitive.name)
    if name not in primitives.COPIES and name != 'psum':
      continue
    # A literal has no hash in JAX 0.10.
    read = [x for x in eqn.invars if not isinstance(x, interpreter.LITERAL)]
    pairs = zip(read, eqn.outvars, strict=False)
    copied = {y: copies[x] for x, y in pairs if x in copies}
    if name != 'psum':
      copies.update({y: x for y, x in copied.items() if _keeps_nan(x, y)})
    elif _is_over(eqn, axes):
      left.difference_update(copied.values())
      sums += copied
  return [] if left else sums


def _has_numbers(var):
  return jnp.issubdtype(var.aval.dtype, jnp.inexact) and var.aval.size > 0


def _keeps_nan(x, y):
  kinds = [jnp.issubdtype(v.aval.dtype, jnp.complexfloating) for v in (x, y)]
  return _has_numbers(y) and kinds[0] == kinds[1]


def _is_over(eqn, axes):
  is_whole = eqn.params.get('axis_index_groups') is None
  return is_whole and set(axes).issubset(interpreter.mapped_axes(eqn.params))
