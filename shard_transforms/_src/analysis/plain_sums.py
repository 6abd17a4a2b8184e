"""Inputs of a jaxpr that are summed over shards unchanged.

A NaN or an infinity in such an input is also in the sum, so that every shard
can detect it without another collective.
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
    jaxpr: The jaxpr.
    inputs: Input variables of the jaxpr.
    axes: The mapped axes of the shards.

  Returns:
    The sums, in the order of the jaxpr; empty if an input with values is not
    summed, or is used in a computation before.
  """
  copies = {var: var for var in inputs if _has_numbers(var)}
  unsummed, sums = set(copies), []
  for eqn in jaxpr.eqns:
    name = interpreter.common_name(eqn.primitive.name)
    if name not in primitives.COPIES and name != 'psum':
      continue
    copied = {
        y: copies[x]
        for x, y in zip(eqn.invars, eqn.outvars, strict=True)
        # Literals are not hashable in JAX 0.10.
        if not isinstance(x, interpreter.LITERAL) and x in copies
    }
    if name != 'psum':
      copies.update({y: x for y, x in copied.items() if _keeps_nan(x, y)})
    elif _is_over(eqn, axes):
      unsummed.difference_update(copied.values())
      sums += copied
  return [] if unsummed else sums


def _has_numbers(var):
  return jnp.issubdtype(var.aval.dtype, jnp.inexact) and var.aval.size > 0


def _keeps_nan(x, y):
  are_complex = [
      jnp.issubdtype(v.aval.dtype, jnp.complexfloating) for v in (x, y)
  ]
  return _has_numbers(y) and are_complex[0] == are_complex[1]


def _is_over(eqn, axes):
  is_whole = eqn.params.get('axis_index_groups') is None
  return is_whole and set(axes).issubset(interpreter.mapped_axes(eqn.params))
