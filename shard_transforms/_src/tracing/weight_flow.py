"""Whether the weights of shards get into what is summed over them.

An abstract interpretation with two bits for each value: whether it comes of
updates, and whether it comes of the weight. That a sum of updates comes of the
weight too is seen, and not by which arithmetic: a reduction that reads a weight
is trusted with it.
"""

from collections.abc import Hashable
from collections.abc import Sequence

from shard_transforms._src.tracing import jaxprs

_SUMMING = frozenset(('all_gather', 'all_to_all', 'psum', 'reduce_scatter'))

_Values = set[jaxprs.Value]


def sums_without(
    program: jaxprs.Program,
    updates: Sequence[jaxprs.Value],
    weight: jaxprs.Value,
    axes: Sequence[Hashable],
) -> tuple[bool, list[bool]]:
  """Returns where updates of shards are used without their weight.

  Args:
    program: Where to look.
    updates: Its inputs that differ between shards.
    weight: Its input that says how much the shard counts.
    axes: The mapped axes of these shards.

  Returns:
    Whether anything is summed over the shards that comes of updates and not of
    the weight; and for each output, whether it comes of updates alone.
  """
  of_updates, of_weight = set(updates), {weight}
  found = _follow(program, of_updates, of_weight, set(axes))
  alone = of_updates - of_weight
  return found, [output in alone for output in program.outputs]


def _follow(program, of_updates, of_weight, axes):
  """Adds to both sets what comes of them; returns whether a sum is wrong."""
  found = False
  for step in program.steps:
    for body in step.bodies:
      given = _pairs(step, body)
      for values in of_updates, of_weight:
        values.update(inner for outer, inner in given if outer in values)
      found |= _follow(body, of_updates, of_weight, axes)
    results = [body.outputs for body in step.bodies]
    for values in of_updates, of_weight:
      if step.name == 'cond':
        for output, *ends in zip(step.outputs, *results, strict=True):
          if not values.isdisjoint(ends):
            values.add(output)
      elif not values.isdisjoint(step.inputs):
        values.update(step.outputs)
    is_sum = step.name in _SUMMING and not axes.isdisjoint(step.axes)
    inputs = set(step.inputs)
    is_wrong = inputs & of_updates and not inputs & of_weight
    found |= bool(is_sum and is_wrong)
  return found


def _pairs(step, body):
  """Returns pairs of inputs of a step, and of its body that they may go to."""
  if step.name == 'cond':
    return list(zip(step.inputs[1:], body.inputs, strict=True))
  # Which input of a loop goes where, and in which turn, matters little: all
  # that it gives comes of all that it takes.
  return [(outer, inner) for outer in step.inputs for inner in body.inputs]
