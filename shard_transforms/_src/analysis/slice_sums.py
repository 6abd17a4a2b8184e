"""Sums over the elements of slices that are taken for sums of whole leaves.

After a reduction over one axis, leaves may still be slices over another, such
as that of tensor parallelism. A sum over all elements of a slice, as in
clipping by the global norm, then differs between shards: it must be summed over
that axis, too, before it scales an update. Only types tell what is a slice.
"""

from collections.abc import Hashable
from typing import NamedTuple

from shard_transforms._src.analysis import interpreter
from shard_transforms._src.analysis import primitives
from shard_transforms._src.base import axes as axes_lib

_TOTALS = ('reduce_sum', 'reduce_max', 'dot_general')


class Found(NamedTuple):
  """What is known of a value.

  Attributes:
    is_reduced: Whether it comes from a sum over shards.
    partial: The axes over whose slices it has a sum that ends at the slice.
  """

  is_reduced: bool = False
  partial: frozenset[Hashable] = frozenset()


def find(program: interpreter.Program) -> tuple[str, ...]:
  """Returns a warning for each axis along which slices are scaled so."""
  reader = _Totals()
  interpreter.interpret(program, [Found()] * len(program.inputs), reader)
  return tuple(
      f'a result that is a slice along {axis!r} is scaled by a sum of the'
      ' elements of that slice only, as by `optax.clip_by_global_norm`: take'
      f' `shard_transforms.clip_by_global_norm(max_norm, {axis!r})` and'
      f' `global_norm(tree, {axis!r})`, which sum over {axis!r}, too.'
      for axis in sorted(reader.axes, key=str)
  )


class _Totals(interpreter.Reader[Found]):
  """Follows totals of slices.

  Attributes:
    axes: The axes along which results are scaled by a total of a slice.
  """

  def __init__(self):
    self.axes = set()

  def constant(self, value):
    del value
    return Found()

  def join(self, kinds):
    return Found(
        any(kind.is_reduced for kind in kinds),
        frozenset().union(*(kind.partial for kind in kinds)),
    )

  def primitive(self, step, kinds):
    together = self.join(kinds)
    if step.name == 'shard_map':
      self._leave(step, together)
      return [Found()] * len(step.outputs)
    if step.name in primitives.SENDING and step.axes:
      return [
          Found(True, kind.partial.difference(step.axes))
          if len(kinds) == len(step.outputs)
          else Found(True, together.partial.difference(step.axes))
          for kind in kinds[: len(step.outputs)]
      ]
    is_total = step.name in _TOTALS and not step.outputs[0].aval.ndim
    if is_total and together.is_reduced:
      varying = axes_lib.varying_axes(step.outputs[0].aval)
      together = together._replace(partial=together.partial | varying)
    return [together] * len(step.outputs)

  def _leave(self, step, kind):
    """Notes an array that leaves a map, or enters one."""
    (value,) = step.inputs
    # What each shard keeps for itself has a leading axis of length 1.
    is_slice = value.aval.ndim and value.aval.shape[0] > 1
    if kind.is_reduced and is_slice:
      self.axes |= kind.partial & axes_lib.varying_axes(value.aval)
