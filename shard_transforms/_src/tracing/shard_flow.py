"""Which values differ between shards, and what is sent.

An abstract interpretation: each value has the set of axes over which it depends
on values that differ between shards. The result of a collective that is the
same on all shards differs over none of its axes. A value that is found to
differ may be the same by chance; a value that is not found is the same,
provided that the inputs are.
"""

from collections.abc import Hashable
from collections.abc import Sequence

import jax.extend

from shard_transforms._src.tracing import jaxprs

Axes = frozenset[Hashable]

# Collectives whose result is the same on all shards, except with groups.
_ALIKE = frozenset(('all_gather', 'pbroadcast', 'pmax', 'pmin', 'psum'))
_SENDING = _ALIKE.union(
    ('all_to_all', 'ppermute', 'ragged_all_to_all', 'reduce_scatter')
)
_NONE = frozenset()


def first_sent(
    jaxpr: jax.extend.core.Jaxpr | jax.extend.core.ClosedJaxpr,
    axes: Sequence[Hashable] | None = None,
) -> str | None:
  """Returns the name of the first collective over one of some axes, or any."""
  # Called in each trace: reading jaxprs directly is fast.
  for eqn in jaxpr.eqns:
    name = jaxprs.common_name(eqn.primitive.name)
    over = set(jaxprs.mapped_axes(eqn.params))
    if name in _SENDING and over.intersection(over if axes is None else axes):
      return name
    for body in jaxprs.held(eqn.params):
      if found := first_sent(body, axes):
        return found
  return None


def differing(program: jaxprs.Program, given: Sequence[Axes]) -> list[Axes]:
  """Returns over which axes each result may differ between shards.

  Args:
    program: The program of the shards.
    given: The axes over which each of its inputs differs.
  """
  found = dict(zip(program.inputs, given, strict=True))
  _follow(program, found)
  return _of(program.outputs, found)


def _follow(program, found):
  """Adds the axes of each value of a program to `found`."""
  followers = {'cond': _cond, 'scan': _scan, 'while': _while}
  for step in program.steps:
    results = followers.get(step.name, _plain)(step, found)
    found.update(zip(step.outputs, results, strict=True))


def _of(values, found):
  return [found.get(value, _NONE) for value in values]


def _plain(step, found):
  axes = _NONE.union(*_of(step.inputs, found))
  if step.name == 'axis_index':
    axes = axes.union(step.axes)
  is_grouped = step.params.get('axis_index_groups') is not None
  if step.name in _ALIKE and not is_grouped:
    axes = axes.difference(step.axes)
  return [axes for _ in step.outputs]


def _cond(step, found):
  chosen, *given = _of(step.inputs, found)
  ends = []
  for body in step.bodies:
    found.update(zip(body.inputs, given, strict=True))
    _follow(body, found)
    ends.append(_of(body.outputs, found))
  return [chosen.union(*axes) for axes in zip(*ends, strict=True)]


def _scan(step, found):
  (body,) = step.bodies
  found.update(zip(body.inputs, _of(step.inputs, found), strict=True))
  _until_settled(body, jaxprs.carry(step), found)
  return _of(body.outputs, found)


def _while(step, found):
  names = [name for name in step.params if name.endswith('_jaxpr')]
  bodies = dict(zip(names, step.bodies, strict=True))
  condition, body = bodies['cond_jaxpr'], bodies['body_jaxpr']
  given = _of(step.inputs, found)
  num_read = step.params['cond_nconsts']
  found.update(zip(body.inputs, given[num_read:], strict=True))
  carry = body.inputs[step.params['body_nconsts'] :]
  _until_settled(body, carry, found)
  carried = _of(carry, found)
  found.update(zip(condition.inputs, given[:num_read] + carried, strict=True))
  _follow(condition, found)
  (chosen,) = _of(condition.outputs, found)
  return [chosen | axes for axes in carried]


def _until_settled(body, carry, found):
  """Follows iterations of a loop until its carry reaches a fixed point."""
  before, now = None, _of(carry, found)
  while now != before:
    _follow(body, found)
    ends = _of(body.outputs[: len(carry)], found)
    before, now = now, [a | b for a, b in zip(now, ends, strict=True)]
    found.update(zip(carry, now, strict=True))
