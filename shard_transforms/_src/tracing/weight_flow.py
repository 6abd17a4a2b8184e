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
  found, outputs = _follow(jaxpr, tuple(given), frozenset(axes), {})
  return found, [bits == UPDATES for bits in outputs]


def _follow(jaxpr, given, axes, known):
  """Returns whether a sum is wrong, and the bits of the outputs.

  Args:
    jaxpr: The program.
    given: The bits of its inputs.
    axes: As for `sums_without`.
    known: The results for programs so far: many calls are of the same program.
  """
  key = id(jaxpr), given
  if key not in known:
    # By identity, as a literal is not hashable; it has no bits.
    bits = {id(var): own for var, own in zip(jaxpr.invars, given, strict=True)}
    found = False
    for eqn in jaxpr.eqns:
      together = 0
      for atom in eqn.invars:
        together |= bits.get(id(atom), 0)
      bodies = eqn.params and jaxprs.held(eqn.params)
      if bodies:
        inputs = tuple(bits.get(id(atom), 0) for atom in eqn.invars)
        is_wrong, outputs = _call(eqn, bodies, inputs, axes, known)
        found |= is_wrong
        bits.update(zip(map(id, eqn.outvars), outputs, strict=True))
        continue
      found |= together == UPDATES and _is_sum(eqn, axes)
      for var in eqn.outvars:
        bits[id(var)] = together
    outputs = tuple(bits.get(id(atom), 0) for atom in jaxpr.outvars)
    known[key] = found, outputs
  return known[key]


def _is_sum(eqn, axes):
  """Whether an equation sums over one of these axes."""
  name = jaxprs.common_name(eqn.primitive.name)
  over = jaxprs.mapped_axes(eqn.params)
  return name in _SUMMING and not axes.isdisjoint(over)


def _call(eqn, bodies, given, axes, known):
  """Returns whether a sum is wrong in what an equation runs, and its bits."""
  if eqn.primitive.name == 'shard_map' or jaxprs.is_call(eqn, bodies):
    return _follow(bodies[0], given, axes, known)
  if eqn.primitive.name == 'cond':
    ends = [_follow(body, given[1:], axes, known) for body in bodies]
    outputs = map(_union, zip(*(end[1] for end in ends), strict=True))
    return any(end[0] for end in ends), list(outputs)
  gate = jaxprs.gate_body(eqn)
  if gate is not None:
    is_wrong, after = _follow(gate, given, axes, known)
    before = given[-len(after) :]
    return is_wrong, [x | y for x, y in zip(before, after, strict=True)]
  # A loop is not followed by iteration: all of its results are taken to depend
  # on all of its inputs.
  together = _union(given)
  ends = [
      _follow(body, (together,) * len(body.invars), axes, known)
      for body in bodies
  ]
  return any(end[0] for end in ends), [together] * len(eqn.outvars)


def _union(bits):
  result = 0
  for some in bits:
    result |= some
  return result
