"""Deadlocks: collectives that some shards reach and others do not.

An abstract interpretation: for each value it is known over which axes it
differs between shards, as a set that only grows, so that loops come to an end.
It is a warning, and says nothing where it does not know: arguments may differ
of which the program does not show it, and branches that all send may still not
meet.

A predicate differs between shards that is computed from slices of what a mapped
function is handed, or from `axis_index`. A slice of
one element does not count: it may be a copy, as of a counter that `jax.pmap` is
handed once for each shard.
"""

from collections.abc import Generator
from collections.abc import Hashable
from typing import NamedTuple

from shard_transforms._src.tracing import jaxprs

# What makes shards alike. With groups it may not, but those that are alike may
# run what is in their group alone.
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
  """Returns what deadlocks once shards decide differently, in sentences.

  That is a loop that holds a collective over an axis over which its condition
  differs; and a branch that does, where another of its `cond` holds none.
  """
  return tuple(dict.fromkeys(_follow(program, {})))


def _follow(
    program: jaxprs.Program, differing: _Differing
) -> Generator[str, None, None]:
  """Yields sentences, and adds to `differing` what is found to differ."""
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
    # What is done outside of a map is not done by its shards.
    for output, result in zip(step.outputs, results, strict=True):
      inside = (d for d in result if step.axis_sizes.get(d.axis, 1) > 1)
      differing[output] = frozenset(inside)


def _plain(step, differing):
  """Returns how the results of a step without turns or branches differ."""
  axes = frozenset(_Difference(axis, False) for axis in step.axis_sizes)
  if any(_first_waiting(body, axes) for body in step.bodies):
    # What is in its bodies may make shards alike, as in the iterative solver of
    # a `lax.custom_linear_solve`.
    return [frozenset() for _ in step.outputs]
  inputs = _of(step.inputs, differing)
  if step.name == 'optimization_barrier':
    # Of all other steps, each result may come of each input.
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
  # Of branches that give 1 and 2, shards have what they have chosen.
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
  """Follows turns of a loop until no more of its carry is found to differ."""
  # A turn may decide by what the last one has put into the carry.
  before, now = None, _of(carry, differing)
  while now != before:
    yield from _follow(body, differing)
    ends = _of(body.outputs[: len(carry)], differing)
    before, now = now, [a | b for a, b in zip(now, ends, strict=True)]
    differing.update(zip(carry, now, strict=True))


def _of(values, differing):
  return [differing.get(value, frozenset()) for value in values]


def _sentences(step, chosen):
  """Yields what is wrong with a step of which shards choose what to run."""
  found = [_first_waiting(body, chosen) for body in step.bodies]
  # Where each branch has one, shards may meet in them, if for wrong numbers.
  if any(found) and not (step.name == 'cond' and all(found)):
    late = next(filter(None, found))
    axes = ', '.join(map(repr, _awaited(late, chosen)))
    yield (
        f'{step.label} runs `{late.name}` over {axes} under a predicate'
        ' that differs between shards, which deadlocks: reduce the decision'
        ' first, as `guard` does, or put what decides after the reduction.'
    )


def _first_waiting(program, chosen):
  """Returns the first collective that waits for who chooses otherwise."""
  for step in program.steps:
    if _awaited(step, chosen):
      return step
    for body in step.bodies:
      if found := _first_waiting(body, chosen):
        return found
  return None


def _awaited(step, chosen):
  """Returns the axes along which a step waits for who chooses otherwise."""
  groups = step.params.get('axis_index_groups')
  if step.name not in _WAITING or (groups and max(map(len, groups)) == 1):
    return []
  # The place of a shard may be that of its group, as in `index() < 4` where
  # each half gathers by itself.
  axes = {d.axis for d in chosen if groups is None or not d.by_index}
  return [axis for axis in step.axes if axis in axes]
