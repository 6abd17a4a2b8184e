"""Values that differ between shards, communication, and deadlocks.

The fact for a value is a set of differences: the axes over which it differs,
and how. The result of a collective that is the same on all shards does not
differ over its axes. A value that is reported to differ may be equal by chance;
any other value is the same on all shards, provided that the inputs are.

A predicate that differs, and decides whether a shard reaches a collective,
leads to a deadlock. It differs if it is computed from slices of the arguments
of a mapped function, or from `axis_index`. A slice of one element does not
count: it may be a copy, such as a counter that `jax.pmap` receives once per
shard. Unknown differences do not produce warnings: arguments may differ
although the jaxpr does not show it, and branches that all communicate may still
not match.
"""

from collections.abc import Hashable
from collections.abc import Sequence
from typing import NamedTuple

from shard_transforms._src.analysis import inlining
from shard_transforms._src.analysis import interpreter
from shard_transforms._src.analysis import primitives

AxisSet = frozenset[Hashable]


class Difference(NamedTuple):
  """A difference of values between shards.

  Attributes:
    axis: The mapped axis over which they differ.
    by_index: Whether they are computed only from `axis_index`.
    groups: The groups of shards within which they are the same, if any.
  """

  axis: Hashable
  by_index: bool = False
  groups: tuple[tuple[int, ...], ...] = ()


Differences = frozenset[Difference]
NONE: Differences = frozenset()


class DivergenceAnalysis(interpreter.Analysis[Differences]):
  """The analysis of differences between shards."""

  def constant(self, value):
    del value
    return NONE

  def join(self, facts):
    return NONE.union(*facts)

  def primitive(self, equation, facts):
    if equation.name == 'optimization_barrier':
      return facts
    if equation.name in primitives.SENDING:
      if len(facts) != len(equation.outputs):
        # A broadcast also reads its source, and a ragged exchange its sizes.
        facts = [self.join(facts)] * len(equation.outputs)
      return [_received(equation, fact) for fact in facts]
    differences = self.join(facts).union(*map(_by_axis_index, equation.bodies))
    if equation.name == 'axis_index':
      differences = _over(equation.axes, by_index=True)
    return [differences] * len(equation.outputs)

  def select(self, equation, predicate, facts):
    # Even branches that return constants have results that differ with the
    # choice.
    return [predicate | fact for fact in facts]


def _over(axes, **how):
  return frozenset(Difference(axis, **how) for axis in axes)


def _received(equation, fact):
  """Returns the differences of a result of a collective."""
  groups = equation.params.get('axis_index_groups')
  if equation.name in primitives.SCATTERING:
    # Each shard receives another part, even of a replicated array.
    return fact | _over(equation.axes)
  others = frozenset(d for d in fact if d.axis not in equation.axes)
  if groups is None or (others == fact and len(set(map(len, groups))) == 1):
    return others
  return others | _over(equation.axes, groups=tuple(map(tuple, groups)))


def _by_axis_index(program):
  """Returns the differences that `axis_index` introduces in a jaxpr."""
  indices = [x for x in program.all_equations() if x.name == 'axis_index']
  return NONE.union(*(_over(x.axes, by_index=True) for x in indices))


def differing(
    program: interpreter.Program, input_axes: Sequence[AxisSet]
) -> list[AxisSet]:
  """Returns the axes over which each result may differ between shards.

  Args:
    program: The jaxpr of the shards.
    input_axes: The axes over which each of its inputs differs.
  """
  results = interpreter.interpret(
      program, [*map(_over, input_axes)], DivergenceAnalysis()
  )
  return [frozenset(d.axis for d in fact) for fact in results]


def find_deadlocks(program: interpreter.Program) -> tuple[str, ...]:
  """Returns warnings about deadlocks if shards decide differently.

  A loop deadlocks if it has a collective over an axis over which its condition
  differs; a `cond` deadlocks if one branch has such a collective and another
  has none.
  """
  analysis = _Deadlocks()
  interpreter.interpret(program, [NONE] * len(program.inputs), analysis)
  return tuple(analysis.warnings)


class _Deadlocks(DivergenceAnalysis):
  """The analysis of differences that decide about communication.

  Attributes:
    warnings: The warnings, as keys, because a loop is analyzed several times.
  """

  def __init__(self):
    self.warnings = {}

  def primitive(self, equation, facts):
    any_difference = _over(inlining.axis_sizes(equation))
    if any(_first_unmatched(body, any_difference) for body in equation.bodies):
      # A collective in the bodies may make values equal again, as in the
      # iterative solver of a `lax.custom_linear_solve`.
      return [NONE] * len(equation.outputs)
    results = super().primitive(equation, facts)
    if equation.name == 'shard_map' and equation.outputs[0].aval.size > 1:
      results = [results[0] | _over(equation.axes)]
    return [_between_shards(equation, result) for result in results]

  def sub_jaxpr_inputs(self, equation, facts):
    # The inputs of the bodies of a solver may be equal.
    del equation, facts
    return NONE

  def select(self, equation, predicate, facts):
    if warning := _warning(equation, predicate):
      self.warnings[warning] = None
    results = super().select(equation, predicate, facts)
    return [_between_shards(equation, result) for result in results]


def _between_shards(equation, differences):
  """Returns the differences over axes with more than one shard."""
  sizes = inlining.axis_sizes(equation)
  return frozenset(d for d in differences if sizes.get(d.axis, 1) > 1)


def _warning(equation, predicate):
  """Returns a warning if shards may choose different bodies."""
  unmatched = [_first_unmatched(body, predicate) for body in equation.bodies]
  # If each branch has a collective, these may match, even if results are wrong.
  if not any(unmatched) or (equation.name == 'cond' and all(unmatched)):
    return None
  collective = next(filter(None, unmatched))
  axes = ', '.join(map(repr, _unmatched_axes(collective, predicate)))
  return (
      f'{inlining.label(equation)} runs `{collective.name}` over {axes} under a'
      ' predicate that differs between shards, which deadlocks: reduce the'
      ' decision first, as `guard` does, or decide after the reduction.'
  )


def _first_unmatched(program, predicate):
  """Returns the first collective with shards that may run another body."""
  for equation in program.all_equations():
    if _unmatched_axes(equation, predicate):
      return equation
  return None


def _unmatched_axes(equation, predicate):
  """Returns its axes over which a shard may run another body."""
  if equation.name not in primitives.SENDING:
    return []
  groups = equation.params.get('axis_index_groups')
  axes = {d.axis for d in predicate if groups is None or _splits(d, groups)}
  return [axis for axis in equation.axes if axis in axes]


def _splits(difference, groups):
  """Whether shards of one group may choose differently."""
  # `axis_index` may identify the group of a shard, as in `index() < 4` if each
  # half gathers separately.
  return not difference.by_index and not all(
      len(group) == 1
      or any(set(group) <= set(agreeing) for agreeing in difference.groups)
      for group in groups
  )
