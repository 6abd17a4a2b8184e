"""Where the elements of a parameter lie in an array.

A slice of a parameter is a run of its elements, in the order of rows. An array
may hold them in any shape in that order, as after `ravel`, and may have further
dimensions in front of them or behind, as after `jnp.stack`: both are the same
on slices as on the whole.
"""

import dataclasses

from shard_transforms._src.analysis import interpreter
from shard_transforms._src.analysis import primitives


@dataclasses.dataclass(frozen=True)
class Cut:
  """An array of one number for each element of a parameter, from it alone.

  Attributes:
    shape: The dimensions along which the elements lie.
    ends_in_zeros: Whether the padding of its last slice is zero. Otherwise a
      sum over all slices is not the sum over the whole: with five elements on
      four shards, `exp` adds three ones too many.
    lead: The number of further dimensions in front.
    trail: The number of further dimensions behind.
  """

  shape: tuple[int, ...]
  ends_in_zeros: bool = False
  lead: int = 0
  trail: int = 0

  @property
  def layout(self) -> tuple[int, tuple[int, ...], int]:
    """What must be the same where two such arrays are combined."""
    return self.lead, self.shape, self.trail

  @property
  def is_plain(self) -> bool:
    """Whether it has no further dimensions."""
    return not self.lead and not self.trail

  def is_further(self, dimension: int) -> bool:
    """Whether a dimension of the array is none of the elements."""
    return not self.lead <= dimension < self.lead + len(self.shape)

  def without(self, dimensions: tuple[int, ...]) -> 'Cut | None':
    """Returns it without some of its further dimensions."""
    if not all(map(self.is_further, dimensions)):
      return None
    lead = sum(dimension < self.lead for dimension in dimensions)
    trail = len(dimensions) - lead
    return dataclasses.replace(
        self, lead=self.lead - lead, trail=self.trail - trail
    )

  def without_lead(self) -> 'Cut | None':
    """Returns it without its first dimension."""
    return self.without((0,))


def moved(step: interpreter.Step, cut: Cut) -> Cut | None:
  """Returns the layout that a step gives to elements, if it is known.

  Args:
    step: A step that is not element-wise.
    cut: The layout of its inputs; those without elements are one number.
  """
  if step.name in primitives.REDUCTIONS:
    return cut.without(step.params['axes'])
  rule = _RULES.get(step.name)
  return None if rule is None else rule(step, cut)


def looked_up(step: interpreter.Step, indices: Cut) -> Cut | None:
  """Returns the layout of what is looked up in a table, if it is known.

  Args:
    step: A `gather` in an array without elements, the same on all shards.
    indices: The layout of the places to look at.
  """
  numbers = step.params['dimension_numbers']
  # The last dimension of the indices holds an index. The numbers that are found
  # stand behind the other dimensions.
  num_places = len(step.inputs[1].aval.shape) - 1
  if (
      not indices.trail
      or numbers.operand_batching_dims
      or any(place < num_places for place in numbers.offset_dims)
  ):
    return None
  trail = indices.trail - 1 + len(numbers.offset_dims)
  return dataclasses.replace(indices, ends_in_zeros=False, trail=trail)


def _bitcast(step, cut):
  # To another width, it gives another shape.
  if step.inputs[0].aval.shape != step.outputs[0].aval.shape:
    return None
  # The padding may be -0.0, which has a bit.
  return dataclasses.replace(cut, ends_in_zeros=False)


def _broadcast(step, cut):
  dimensions = step.params['broadcast_dimensions']
  places = dimensions[cut.lead : cut.lead + len(cut.shape)]
  shape = step.outputs[0].aval.shape
  if tuple(shape[i] for i in places) != cut.shape or list(places) != list(
      range(places[0], places[0] + len(places))
  ):
    return None
  trail = len(shape) - places[-1] - 1
  return dataclasses.replace(cut, lead=int(places[0]), trail=int(trail))


def _reshape(step, cut):
  shape = step.outputs[0].aval.shape
  # A scalar has no axis to lie along. Dimensions in the parameters transpose.
  if not cut.is_plain or not shape or step.params.get('dimensions'):
    return None
  return dataclasses.replace(cut, shape=shape)


def _squeeze(step, cut):
  shape = step.outputs[0].aval.shape
  if cut.is_plain and shape:
    return dataclasses.replace(cut, shape=shape)
  return cut.without(step.params['dimensions'])


def _slice(step, cut):
  before, after = step.inputs[0].aval.shape, step.outputs[0].aval.shape
  strides = step.params['strides'] or (1,) * len(before)
  elements = range(cut.lead, cut.lead + len(cut.shape))
  is_full = all(before[i] == after[i] and strides[i] == 1 for i in elements)
  return cut if is_full else None


def _concatenate(step, cut):
  return cut if cut.is_further(step.params['dimension']) else None


def _stack(step, cut):
  axis, num_dimensions = step.params['axis'], cut.lead + len(cut.shape)
  if axis <= cut.lead:
    return dataclasses.replace(cut, lead=cut.lead + 1)
  if axis >= num_dimensions:
    return dataclasses.replace(cut, trail=cut.trail + 1)
  return None


def _unstack(step, cut):
  return cut.without((step.params['axis'],))


_RULES = {
    'bitcast_convert_type': _bitcast,
    'broadcast_in_dim': _broadcast,
    'concatenate': _concatenate,
    'reshape': _reshape,
    'slice': _slice,
    'squeeze': _squeeze,
    'stack': _stack,
    'unstack': _unstack,
}
