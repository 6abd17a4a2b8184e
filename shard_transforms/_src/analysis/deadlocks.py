"""Deadlocks: collectives that some shards reach and others do not.

`shard_flow` says which values differ between shards; a predicate that does, and
decides whether a shard gets to a collective, deadlocks. This gives warnings,
and none where it does not know: arguments may differ although the program does
not show it, and branches that all send may still not match.

A predicate differs between shards if it is computed from slices of the
arguments of a mapped function, or from `axis_index`. A slice of one element
does not count: it may be a copy, such as a counter that `jax.pmap` gets once
for each shard.
"""

from shard_transforms._src.analysis import inlining
from shard_transforms._src.analysis import interpreter
from shard_transforms._src.analysis import primitives
from shard_transforms._src.analysis import shard_flow


def find(program: interpreter.Program) -> tuple[str, ...]:
  """Returns warnings of what deadlocks if shards decide differently.

  That is a loop with a collective over an axis over which its condition
  differs; or a branch with such a collective, where another branch of the
  `cond` has none.
  """
  reader = _Deadlocks()
  given = [shard_flow.NONE] * len(program.inputs)
  interpreter.interpret(program, given, reader)
  return tuple(reader.warnings)


class _Deadlocks(shard_flow.Shards):
  """Follows what differs between shards, up to what they decide by it.

  Attributes:
    warnings: Those so far, as keys: a loop is read several times.
  """

  def __init__(self):
    self.warnings = {}

  def primitive(self, step, kinds):
    axes = [shard_flow.Difference(axis) for axis in inlining.axis_sizes(step)]
    if any(_first_waiting(body, axes) for body in step.bodies):
      # A collective in its bodies may make values equal again, as in the
      # iterative solver of a `lax.custom_linear_solve`.
      return [shard_flow.NONE] * len(step.outputs)
    results = super().primitive(step, kinds)
    if step.name == 'shard_map' and step.outputs[0].aval.size > 1:
      cut = map(shard_flow.Difference, step.axes)
      results = [results[0].union(cut)]
    return [_inside(step, result) for result in results]

  def inside(self, step, kinds):
    # The inputs of the bodies of a solver may be equal, too.
    del step, kinds
    return shard_flow.NONE

  def chosen(self, step, predicate, kinds):
    if warning := _warning(step, predicate):
      self.warnings[warning] = None
    results = super().chosen(step, predicate, kinds)
    return [_inside(step, result) for result in results]


def _inside(step, differences):
  """Returns the differences along which there are several shards around it."""
  return frozenset(
      d for d in differences if inlining.axis_sizes(step).get(d.axis, 1) > 1
  )


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
  if difference.by_index:
    # `axis_index` may stand for the group of a shard, as in `index() < 4` where
    # each half gathers on its own.
    return False
  agreeing = difference.groups or [(shard,) for row in groups for shard in row]
  return any(
      not any(set(group) <= set(others) for others in agreeing)
      for group in groups
  )
