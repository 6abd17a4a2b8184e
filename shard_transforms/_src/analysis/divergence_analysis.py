"""Which values differ between shards, which are sent, and what deadlocks.

The kind of a value is a set of differences: over which axis it differs, and
how. The result of a collective that is the same on all shards differs over none
of its axes. A value that is found to differ may be the same by chance; a value
that is not found is the same, provided that the inputs are.

A predicate that differs, and decides whether a shard gets to a collective,
deadlocks: where it is computed from slices of the arguments of a mapped
function, or from `axis_index`. A slice of one element does not count: it may be
a copy, such as a counter that `jax.pmap` gets once for each shard. There is no
warning of what is not known: arguments may differ although the program does not
show it, and branches that all send may still not match.
"""

from collections.abc import Hashable
from collections.abc import Sequence
from typing import NamedTuple

import jax.extend

from shard_transforms._src.analysis import inlining
from shard_transforms._src.analysis import interpreter
from shard_transforms._src.analysis import primitives

Axes = frozenset[Hashable]


class Difference(NamedTuple):
  """How values differ between shards.

  Attributes:
    axis: The mapped axis over which they differ.
    by_index: Whether they are computed from `axis_index` alone.
    groups: The groups of shards within which they are the same, if any.
  """

  axis: Hashable
  by_index: bool = False
  groups: tuple[tuple[int, ...], ...] = ()


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
  if groups is None or (others == kind and len(set(map(len, groups))) == 1):
    return others
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
  results = interpreter.interpret(program, [*map(_over, given)], Shards())
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


def find_deadlocks(program: interpreter.Program) -> tuple[str, ...]:
  """Returns warnings of what deadlocks if shards decide differently.

  That is a loop with a collective over an axis over which its condition
  differs; or a branch with such a collective, where another branch of the
  `cond` has none.
  """
  reader = _Deadlocks()
  interpreter.interpret(program, [NONE] * len(program.inputs), reader)
  return tuple(reader.warnings)


class _Deadlocks(Shards):
  """Follows what differs between shards, up to what they decide by it.

  Attributes:
    warnings: Those so far, as keys: a loop is read several times.
  """

  def __init__(self):
    self.warnings = {}

  def primitive(self, step, kinds):
    anyhow = _over(inlining.axis_sizes(step))
    if any(_first_waiting(body, anyhow) for body in step.bodies):
      # A collective in its bodies may make values equal again, as in the
      # iterative solver of a `lax.custom_linear_solve`.
      return [NONE] * len(step.outputs)
    results = super().primitive(step, kinds)
    if step.name == 'shard_map' and step.outputs[0].aval.size > 1:
      results = [results[0] | _over(step.axes)]
    return [_inside(step, result) for result in results]

  def inside(self, step, kinds):
    # The inputs of the bodies of a solver may be equal, too.
    del step, kinds
    return NONE

  def chosen(self, step, predicate, kinds):
    if warning := _warning(step, predicate):
      self.warnings[warning] = None
    results = super().chosen(step, predicate, kinds)
    return [_inside(step, result) for result in results]


def _inside(step, differences):
  """Returns the differences along which there are several shards around it."""
  sizes = inlining.axis_sizes(step)
  return frozenset(d for d in differences if sizes.get(d.axis, 1) > 1)


def _warning(step, predicate):
  """Returns a warning of a step in which shards choose what to run, if any."""
  found = [_first_waiting(body, predicate) for body in step.bodies]
  # Where each branch has a collective, these may match, if with wrong results.
  if not any(found) or (step.name == 'cond' and all(found)):
    return None
  late = next(filter(None, found))
  axes = ', '.join(map(repr, _awaited(late, predicate)))
  return (
      f'{inlining.label(step)} runs `{late.name}` over {axes} under a predicate'
      ' that differs between shards, which deadlocks: reduce the decision'
      ' first, as `guard` does, or decide after the reduction.'
  )


def _first_waiting(program, chosen):
  """Returns the first collective that waits for shards that chose otherwise."""
  for step in program.steps:
    if _awaited(step, chosen):
      return step
    for body in step.bodies:
      if found := _first_waiting(body, chosen):
        return found
  return None


def _awaited(step, chosen):
  """Returns the axes along which a step waits for shards of other choices."""
  if step.name not in primitives.SENDING:
    return []
  groups = step.params.get('axis_index_groups')
  axes = {d.axis for d in chosen if groups is None or _splits(d, groups)}
  return [axis for axis in step.axes if axis in axes]


def _splits(difference, groups):
  """Whether shards of one group may choose differently."""
  # `axis_index` may stand for the group of a shard, as in `index() < 4` where
  # each half gathers on its own.
  return not difference.by_index and not all(
      len(group) == 1
      or any(set(group) <= set(agreeing) for agreeing in difference.groups)
      for group in groups
  )
