"""Deadlocks: collectives that some shards reach and others do not.

An abstract interpretation: each value has a set of axes over which it differs
between shards; sets only grow, so loops reach a fixed point. It gives warnings,
and none where it does not know: arguments may differ although the program does
not show it, and branches that all send may still not match.

A predicate differs between shards if it is computed from slices of the
arguments of a mapped function, or from `axis_index`. A slice of one element
does not count: it may be a copy, such as a counter that `jax.pmap` gets once
for each shard.
"""

from collections.abc import Generator
from collections.abc import Hashable
from typing import NamedTuple

from shard_transforms._src.tracing import jaxprs

# Collectives whose result is the same on all shards. With groups it may differ,
# but shards of one group may then run collectives within the group.
_ALIKE = frozenset(('all_gather', 'pbroadcast', 'pmax', 'pmin', 'psum'))
_WAITING = _ALIKE.union(
    ('all_to_all', 'ppermute', 'ragged_all_to_all', 'reduce_scatter')
)


class _Difference(NamedTuple):
  """An axis over which values differ, and whether by `axis_index` alone."""

  axis: Hashable
  by_index: bool


_Differing = dict[jaxprs.Value, frozenset[_Difference]]


def find(program: jaxprs.Program) -> tuple[str, ...]:
  """Returns warnings of what deadlocks if shards decide differently.

  That is a loop with a collective over an axis over which its condition
  differs; or a branch with such a collective, where another branch of the
  `cond` has none.
  """
  return tuple(dict.fromkeys(_follow(program, {})))


def _follow(
    program: jaxprs.Program, differing: _Differing
) -> Generator[str, None, None]:
  """Yields warnings; adds the values that differ to `differing`."""
  for step in program.steps:
    if step.name == 'cond':
      results = yield from _cond(step, differing)
    elif step.name == 'while':
      results = yield from _while(step, differing)
    elif step.name == 'scan':
      results = yield from _scan(step, differing)
    else:
      for body in step.bodies:
        yield from _follow(body, differing)
      results = _plain(step, differing)
    # Steps outside of a map are not run by its shards.
    for output, result in zip(step.outputs, results, strict=True):
      inside = (d for d in result if step.axis_sizes.get(d.axis, 1) > 1)
      differing[output] = frozenset(inside)


def _plain(step, differing):
  """Returns how the results of a step that is no loop or branch differ."""
  axes = frozenset(_Difference(axis, False) for axis in step.axis_sizes)
  if any(_first_waiting(body, axes) for body in step.bodies):
    # A collective in its bodies may make values equal again, as in the
    # iterative solver of a `lax.custom_linear_solve`.
    return [frozenset() for _ in step.outputs]
  inputs = _of(step.inputs, differing)
  if step.name == 'optimization_barrier':
    # For all other steps, each result may depend on each input.
    return inputs
  result = frozenset().union(*inputs)
  if step.name in _ALIKE:
    result = frozenset(d for d in result if d.axis not in step.axes)
  if step.name == 'axis_index':
    result = frozenset(_Difference(axis, True) for axis in step.axes)
  if step.name == 'shard_map' and step.outputs[0].aval.size > 1:
    result = result.union(_Difference(axis, False) for axis in step.axes)
  return [result for _ in step.outputs]


def _cond(step, differing):
  chosen, *given = _of(step.inputs, differing)
  ends = []
  for body in step.bodies:
    differing.update(zip(body.inputs, given, strict=True))
    yield from _follow(body, differing)
    ends.append(_of(body.outputs, differing))
  yield from _sentences(step, chosen)
  # Even branches that return constants give results that differ with the
  # choice.
  return [chosen.union(*axes) for axes in zip(*ends, strict=True)]


def _while(step, differing):
  names = [name for name in step.params if name.endswith('_jaxpr')]
  bodies = dict(zip(names, step.bodies, strict=True))
  condition, body = bodies['cond_jaxpr'], bodies['body_jaxpr']
  given = _of(step.inputs, differing)
  num_read = step.params['cond_nconsts']
  read, given = given[:num_read], given[num_read:]
  carry = body.inputs[step.params['body_nconsts'] :]
  differing.update(zip(body.inputs, given, strict=True))
  yield from _until_settled(body, carry, differing)
  carried = _of(carry, differing)
  differing.update(zip(condition.inputs, read + carried, strict=True))
  yield from _follow(condition, differing)
  (chosen,) = _of(condition.outputs, differing)
  yield from _sentences(step, chosen)
  return [chosen | axes for axes in carried]


def _scan(step, differing):
  (body,) = step.bodies
  given = _of(step.inputs, differing)
  differing.update(zip(body.inputs, given, strict=True))
  yield from _until_settled(body, jaxprs.carry(step), differing)
  return _of(body.outputs, differing)


def _until_settled(body, carry, differing):
  """Follows iterations of a loop until its carry reaches a fixed point."""
  # An iteration may decide by what the last one has put into the carry.
  before, now = None, _of(carry, differing)
  while now != before:
    yield from _follow(body, differing)
    ends = _of(body.outputs[: len(carry)], differing)
    before, now = now, [a | b for a, b in zip(now, ends, strict=True)]
    differing.update(zip(carry, now, strict=True))


def _of(values, differing):
  return [differing.get(value, frozenset()) for value in values]


def _sentences(step, chosen):
  """Yields warnings of a step in which shards choose what to run."""
  found = [_first_waiting(body, chosen) for body in step.bodies]
  # Where each branch has a collective, these may match, if with wrong results.
  if any(found) and not (step.name == 'cond' and all(found)):
    late = next(filter(None, found))
    axes = ', '.join(map(repr, _awaited(late, chosen)))
    yield (
        f'{step.label} runs `{late.name}` over {axes} under a predicate'
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
  groups = step.params.get('axis_index_groups')
  if step.name not in _WAITING or (groups and max(map(len, groups)) == 1):
    return []
  # `axis_index` may stand for the group of a shard, as in `index() < 4` where
  # each half gathers on its own.
  axes = {d.axis for d in chosen if groups is None or not d.by_index}
  return [axis for axis in step.axes if axis in axes]
