"""Which values differ between shards, and which are sent.

The kind of a value is a set of differences: over which axis it differs, and by
what. The result of a collective that is the same on all shards differs over
none of its axes. A value that is found to differ may be the same by chance; a
value that is not found is the same, provided that the inputs are.
"""

from collections.abc import Hashable
from collections.abc import Sequence
from typing import NamedTuple

import jax.extend

from shard_transforms._src.analysis import interpreter
from shard_transforms._src.analysis import primitives

Axes = frozenset[Hashable]
Groups = tuple[tuple[int, ...], ...]


class Difference(NamedTuple):
  """How values differ between shards.

  Attributes:
    axis: The mapped axis over which they differ.
    by_index: Whether they are computed from `axis_index` alone.
    groups: The groups of shards within which they are the same, if any.
  """

  axis: Hashable
  by_index: bool = False
  groups: Groups = ()


Differences = frozenset[Difference]
NONE: Differences = frozenset()


class Shards(interpreter.Reader[Differences]):
  """Follows what differs between shards."""

  def constant(self, value):
    del value
    return NONE

  def join(self, kinds):
    return NONE.union(*kinds)

  def primitive(self, step, kinds):
    if step.name == 'optimization_barrier':
      return kinds
    if step.name in primitives.SENDING and len(kinds) == len(step.outputs):
      return [_received(step, kind) for kind in kinds]
    differences = self.join(kinds).union(*map(_by_place, step.bodies))
    if step.name == 'axis_index':
      differences = _over(step.axes, by_index=True)
    return [differences] * len(step.outputs)

  def chosen(self, step, predicate, kinds):
    # Even branches that return constants give results that differ with the
    # choice.
    return [predicate | kind for kind in kinds]


def _over(axes, **how):
  return frozenset(Difference(axis, **how) for axis in axes)


def _received(step, kind):
  """Returns how a result of a collective differs."""
  groups = step.params.get('axis_index_groups')
  if step.name in primitives.SCATTERING:
    # Each shard gets another part, even of what is the same everywhere.
    return kind | _over(step.axes)
  others = frozenset(d for d in kind if d.axis not in step.axes)
  if groups is None:
    return others
  if others == kind and len(set(map(len, groups))) == 1:
    return kind
  return others | _over(step.axes, groups=tuple(map(tuple, groups)))


def _by_place(program):
  """Returns how what a program makes of `axis_index` differs."""
  found = NONE
  for step in program.steps:
    if step.name == 'axis_index':
      found |= _over(step.axes, by_index=True)
    found = found.union(*map(_by_place, step.bodies))
  return found


def differing(
    program: interpreter.Program, given: Sequence[Axes]
) -> list[Axes]:
  """Returns over which axes each result may differ between shards.

  Args:
    program: The program of the shards.
    given: The axes over which each of its inputs differs.
  """
  kinds = [_over(axes) for axes in given]
  results = interpreter.interpret(program, kinds, Shards())
  return [frozenset(d.axis for d in kind) for kind in results]


def first_sent(
    jaxpr: jax.extend.core.Jaxpr | jax.extend.core.ClosedJaxpr,
    axes: Sequence[Hashable] | None = None,
) -> str | None:
  """Returns the name of the first collective over one of some axes, or any."""
  # Called in each trace: reading jaxprs directly is fast.
  for eqn in jaxpr.eqns:
    name = interpreter.common_name(eqn.primitive.name)
    over = set(interpreter.mapped_axes(eqn.params))
    if name in primitives.SENDING and over.intersection(
        over if axes is None else axes
    ):
      return name
    for body in interpreter.held(eqn.params):
      if found := first_sent(body, axes):
        return found
  return None
