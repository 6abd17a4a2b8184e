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
    bits = dict(zip(jaxpr.invars, given, strict=True))
    found = False
    for eqn in jaxpr.eqns:
      is_wrong, outputs = _equation(eqn, _read(eqn.invars, bits), axes, known)
      found |= is_wrong
      bits.update(zip(eqn.outvars, outputs, strict=True))
    known[key] = found, _read(jaxpr.outvars, bits)
  return known[key]


def _read(atoms, bits):
  """Returns the bits of variables; constants and literals have none."""
  # A literal is not hashable.
  literal = jax.extend.core.Literal
  return tuple(
      [0 if isinstance(atom, literal) else bits.get(atom, 0) for atom in atoms]
  )


def _equation(eqn, given, axes, known):
  """Returns whether an equation has a wrong sum, and the bits it gives."""
  bodies = jaxprs.held(eqn.params)
  together = _union(given)
  if not bodies:
    is_wrong = (
        together == UPDATES
        and jaxprs.common_name(eqn.primitive.name) in _SUMMING
        and not axes.isdisjoint(jaxprs.mapped_axes(eqn.params))
    )
    return is_wrong, [together] * len(eqn.outvars)
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
