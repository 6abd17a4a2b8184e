"""Whether the weights of shards get into the sums over them.

An abstract interpretation with two bits for each variable: whether it depends
on updates, and whether it depends on the weight. It sees that a sum of updates
depends on the weight, and not by which arithmetic: a reduction that reads a
weight is trusted to use it right.

It is called in each trace of a gate, and therefore reads jaxprs directly:
`jaxprs` would copy each of their equations.
"""

from collections.abc import Hashable
from collections.abc import Sequence
import functools
import operator
from typing import Any
import weakref

import jax.extend

from shard_transforms._src.tracing import jaxprs

UPDATES, WEIGHT = 1, 2
_SUMMING = frozenset(('all_gather', 'all_to_all', 'psum', 'reduce_scatter'))


def sums_without(
    jaxpr: jax.extend.core.Jaxpr | jax.extend.core.ClosedJaxpr,
    given: Sequence[int],
    axes: Sequence[Hashable],
) -> tuple[bool, list[bool]]:
  """Returns where updates of shards are used without their weight.

  Args:
    jaxpr: The program.
    given: What each of its inputs is: `UPDATES` that differ between shards, the
      `WEIGHT` that says how much the shard counts, or 0.
    axes: The mapped axes of these shards.

  Returns:
    Whether a sum over the shards depends on updates and not on the weight; and
    for each output, whether it depends on updates alone.
  """
  found, outputs = _follow(jaxpr, tuple(given), frozenset(axes))
  return found, [bits == UPDATES for bits in outputs]


# What is known of programs: the same one may be called often, and is looked at
# by each of the gates around it.
_known: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def _follow(jaxpr, given, axes):
  """Returns whether a sum is wrong, and the bits of the outputs.

  Args:
    jaxpr: The program.
    given: The bits of its inputs.
    axes: As for `sums_without`.
  """
  jaxpr = getattr(jaxpr, 'jaxpr', jaxpr)
  results = _known.setdefault(jaxpr, {})
  if (given, axes) not in results:
    results[given, axes] = _follow_steps(jaxpr, given, axes)
  return results[given, axes]


def _follow_steps(jaxpr, given, axes):
  # By identity, as a literal is not hashable; it has no bits.
  bits = {id(var): own for var, own in zip(jaxpr.invars, given, strict=True)}
  found = False
  for eqn in jaxpr.eqns:
    if eqn.params and (bodies := jaxprs.held(eqn.params)):
      inputs = tuple(bits.get(id(atom), 0) for atom in eqn.invars)
      is_wrong, outputs = _call(eqn, bodies, inputs, axes)
      bits.update(zip(map(id, eqn.outvars), outputs, strict=True))
    else:
      together = 0
      for atom in eqn.invars:
        together |= bits.get(id(atom), 0)
      is_wrong = together == UPDATES and _is_sum(eqn, axes)
      for var in eqn.outvars:
        bits[id(var)] = together
    found |= is_wrong
  return found, tuple(bits.get(id(atom), 0) for atom in jaxpr.outvars)


def _is_sum(eqn, axes):
  """Whether an equation sums over one of these axes."""
  name = jaxprs.common_name(eqn.primitive.name)
  over = jaxprs.mapped_axes(eqn.params)
  return name in _SUMMING and not axes.isdisjoint(over)


def _call(eqn, bodies, given, axes):
  """Returns whether a sum is wrong in what an equation runs, and its bits."""
  if eqn.primitive.name == 'shard_map' or jaxprs.is_call(eqn, bodies):
    return _follow(bodies[0], given, axes)
  if eqn.primitive.name == 'cond':
    ends = [_follow(body, given[1:], axes) for body in bodies]
    outputs = map(_union, zip(*(end[1] for end in ends), strict=True))
    return any(end[0] for end in ends), list(outputs)
  gate = jaxprs.gate_body(eqn)
  if gate is not None:
    is_wrong, after = _follow(gate, given, axes)
    before = given[-len(after) :]
    return is_wrong, [x | y for x, y in zip(before, after, strict=True)]
  # A loop is not followed by iteration: all of its results are taken to depend
  # on all of its inputs.
  together = _union(given)
  ends = [
      _follow(body, (together,) * len(body.invars), axes) for body in bodies
  ]
  return any(end[0] for end in ends), [together] * len(eqn.outvars)


def _union(bits):
  return functools.reduce(operator.or_, bits, 0)
