"""Which inputs of a program each of its results depends on.

The kind of a value is a set of inputs, as the bits of an integer: joining the
sets of a large tree takes one operation. A result may be found to depend on an
input that does not change it, as where leaves are concatenated and split again;
it never depends on an input that is not found.
"""

from collections.abc import Hashable
from collections.abc import Sequence
import functools
import operator

from shard_transforms._src.analysis import interpreter
from shard_transforms._src.analysis import primitives
from shard_transforms._src.base import axes as axes_lib

# The bit of numbers that differ between shards; those of inputs are above it.
OWN_NUMBERS = 1


def follow(
    program: interpreter.Program, kinds: Sequence[int], axes: Sequence[Hashable]
) -> tuple[list[int], str | None]:
  """Returns on what each result depends, and the first collective.

  Args:
    program: The program.
    kinds: The bits of its inputs.
    axes: The mapped axes over which a constant must not vary.
  """
  reader = _Leaves(frozenset(axes))
  results = interpreter.interpret(program, kinds, reader)
  return results, reader.first_sent


class _Leaves(interpreter.Reader[int]):
  """Follows inputs.

  Attributes:
    axes: The mapped axes over which a constant must not vary.
    first_sent: The name of the first collective, if there is one.
  """

  def __init__(self, axes: frozenset[Hashable]):
    self.axes = axes
    self.first_sent = None

  def constant(self, value):
    varies = self.axes.intersection(axes_lib.varying_axes(value.aval))
    return OWN_NUMBERS if varies else 0

  def join(self, kinds):
    return functools.reduce(operator.or_, kinds, 0)

  def chosen(self, step, predicate, kinds):
    return [predicate | kind for kind in kinds]

  def primitive(self, step, kinds):
    if step.name == 'optimization_barrier':
      return kinds
    if step.name in primitives.SENDING and self.first_sent is None:
      self.first_sent = step.name
    kind = self.join(kinds)
    if step.name == 'axis_index':
      kind |= OWN_NUMBERS
    return [kind] * len(step.outputs)
