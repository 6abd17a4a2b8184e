"""Sums over the elements of slices that are used like sums over whole leaves.

After a reduction over one axis, leaves may still be slices over another axis,
such as that of tensor parallelism. A sum over all elements of a slice, as in
clipping by the global norm, then differs between shards: it must also be summed
over that axis before it scales an update. Slices are recognized only by types.
"""

from collections.abc import Hashable
from typing import NamedTuple

from shard_transforms._src.analysis import interpreter
from shard_transforms._src.analysis import primitives
from shard_transforms._src.base import axes as axes_lib

_TOTALS = ('reduce_sum', 'reduce_max', 'dot_general')


class SliceSums(NamedTuple):
  """The fact for a value.

  Attributes:
    is_reduced: Whether it depends on a sum over shards.
    partial: The axes over which it depends on a sum over only one slice.
  """

  is_reduced: bool = False
  partial: frozenset[Hashable] = frozenset()


def find(program: interpreter.Program) -> tuple[str, ...]:
  """Returns a warning per axis along which slices are scaled incorrectly."""
  analysis = _Totals()
  interpreter.interpret(program, [SliceSums()] * len(program.inputs), analysis)
  return tuple(
      f'a result that is a slice along {axis!r} is scaled by a sum over the'
      ' elements of only that slice, as in `optax.clip_by_global_norm`: use'
      f' `shard_transforms.clip_by_global_norm(max_norm, {axis!r})` and'
      f' `global_norm(tree, {axis!r})`, which also sum over {axis!r}.'
      for axis in sorted(analysis.axes, key=str)
  )


class _Totals(interpreter.Analysis[SliceSums]):
  """The analysis of sums over slices.

  Attributes:
    axes: The axes along which results are scaled by a sum over a slice.
  """

  def __init__(self):
    self.axes = set()

  def constant(self, value):
    del value
    return SliceSums()

  def join(self, facts):
    return SliceSums(
        any(fact.is_reduced for fact in facts),
        frozenset().union(*(fact.partial for fact in facts)),
    )

  def primitive(self, equation, facts):
    combined = self.join(facts)
    if equation.name == 'shard_map':
      self._record_slices(equation, combined)
      return [SliceSums()] * len(equation.outputs)
    if equation.name in primitives.SENDING and equation.axes:
      return [
          SliceSums(True, fact.partial.difference(equation.axes))
          if len(facts) == len(equation.outputs)
          else SliceSums(True, combined.partial.difference(equation.axes))
          for fact in facts[: len(equation.outputs)]
      ]
    is_total = equation.name in _TOTALS and not equation.outputs[0].aval.ndim
    if is_total and combined.is_reduced:
      varying = axes_lib.varying_axes(equation.outputs[0].aval)
      combined = combined._replace(partial=combined.partial | varying)
    return [combined] * len(equation.outputs)

  def _record_slices(self, equation, fact):
    """Records the axes of an array that leaves or enters a map."""
    (value,) = equation.inputs
    # Per-shard state has a leading axis of length 1.
    is_slice = value.aval.ndim and value.aval.shape[0] > 1
    if fact.is_reduced and is_slice:
      self.axes |= fact.partial & axes_lib.varying_axes(value.aval)
