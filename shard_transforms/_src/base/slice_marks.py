"""Which results of `init` are slices, and of what.

Shapes do not tell a slice from a row that each shard keeps. The transformation
that slices knows, and marks what it makes by a name in the program, which costs
nothing when it runs and is there, too, where `init` is jitted or its state is
copied or cast.
"""

from collections.abc import Hashable
from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
from jax import ad_checkpoint
import jax.extend

from shard_transforms._src.base import divisions

_Literal = jax.extend.core.Literal
_JAXPRS = jax.extend.core.Jaxpr, jax.extend.core.ClosedJaxpr


@dataclasses.dataclass(frozen=True)
class Mark:
  """What an array is a slice of.

  Attributes:
    division: How the leaf is divided, as this shard would have all of it.
    axes: The mapped axes over which it is, in the order of the division.
  """

  division: divisions.Division
  axes: tuple[Hashable, ...]


class _Name(str):
  """The name of a mark in a program, which has the mark."""

  mark: Mark


def mark(
    leaf: jax.Array, division: divisions.Division, axes: tuple[Hashable, ...]
) -> jax.Array:
  """Returns an array that is a slice, with a mark of it in the program."""
  if leaf.shape != division.of_slice:
    return leaf
  found = Mark(division, axes)
  name = _Name(f'slice: {found}')
  name.mark = found
  return ad_checkpoint.checkpoint_name(leaf, name)


def of_results(jaxpr: Any, given: Sequence[Mark | None]) -> list[Mark | None]:
  """Returns the mark of each result of a program, or `None`.

  Args:
    jaxpr: The program.
    given: The marks of its inputs.
  """
  found = dict(zip(jaxpr.invars, given, strict=True))

  def of(values):
    return [None if type(x) is _Literal else found.get(x) for x in values]

  for eqn in jaxpr.eqns:
    marks = of(eqn.invars)
    bodies = [x for x in eqn.params.values() if isinstance(x, _JAXPRS)]
    name = eqn.params.get('name')
    if isinstance(name, _Name):
      marks = [name.mark]
    elif len(bodies) == 1 and len(bodies[0].invars) == len(marks):
      marks = of_results(bodies[0], marks)
    else:
      # What makes one array of one slice copies or casts it, or so.
      known = {x for x in marks if x is not None}
      marks = [known.pop() if len(known) == 1 else None] * len(eqn.outvars)
    found |= {
        value: kept
        for value, kept in zip(eqn.outvars, marks, strict=True)
        if kept is not None and value.aval.shape == kept.division.of_slice
    }
  return of(jaxpr.outvars)
