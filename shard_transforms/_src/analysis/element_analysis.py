"""Which results of a program depend on which elements of its arrays.

An array of elements has one number for each element of a parameter, from it
alone, at its place; so it is on slices. Few steps keep that: those that are
element-wise, or add and drop dimensions of length 1. Elements may meet one
number that is repeated, and no other array without elements: a slice has
elements of other places, which would meet other numbers. `Mixed` is the top of
the kinds here: nothing is known but the reason, and everything computed from it
is mixed as well. So is what a step that is not understood makes of elements.

The reader follows elements, not values: an array without elements, such as
noise, may be of the size of the whole. `equivalence` compares sizes.
"""

from collections.abc import Hashable
from collections.abc import Sequence
import dataclasses

from jax import core
import jax.numpy as jnp
import numpy as np

from shard_transforms._src.analysis import interpreter
from shard_transforms._src.analysis import primitives
from shard_transforms._src.base import axes as axes_lib


@dataclasses.dataclass(frozen=True)
class Elements:
  """An array of elements.

  Attributes:
    end_in_zeros: Whether the padding of the last slice is zero. Otherwise a sum
      over all slices is not the sum over the whole: with five elements on four
      shards, `exp` adds three ones too many.
    of: The shape of the parameters. Leaves of another shape are sliced along
      another dimension: their slices have other elements in the same places.
  """

  end_in_zeros: bool = False
  of: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Partial:
  """A partial sum over a slice; other shards hold the rest.

  It may only be added to another one, cast, and summed over the shards.
  """


@dataclasses.dataclass(frozen=True)
class Mixed:
  """An array that mixes several elements of a parameter, and why."""

  reason: str


@dataclasses.dataclass(frozen=True)
class Shared:
  """An array without elements, the same on all shards.

  Attributes:
    num_summed: The number of shards over which `psum` has just summed slices.
    is_zero: Whether it is known to be zero.
    is_one: Whether it has several elements and all are the same number.
  """

  num_summed: int = 0
  is_zero: bool = False
  is_one: bool = False


Kind = Elements | Partial | Mixed | Shared
OWN_NUMBERS = Mixed(
    'shards bring numbers of their own, such as parameters of `per_shard`'
)
_NOT_PADDED = Mixed(
    '`reduce_sum` takes several, and the padding after the last element may not'
    ' be zero'
)
_USED_EARLY = Mixed('a sum over the slice of one shard is used as if over all')


class Flow(interpreter.Reader[Kind]):
  """Follows elements.

  Attributes:
    axes: The mapped axes over which a sum is one over all slices.
    sums: The steps so far that add up all elements.
  """

  def __init__(self, axes: Sequence[Hashable]):
    self.axes = frozenset(axes)
    self.sums = set()

  def constant(self, value):
    # A literal or a constant that `inner` closes over, such as a shard's loss.
    varies = self.axes.intersection(axes_lib.varying_axes(value.aval))
    return OWN_NUMBERS if varies else Shared(is_zero=_is_number(value, 0))

  def join(self, kinds):
    return kinds[0] if len(set(kinds)) == 1 else _together(kinds)

  def chosen(self, step, predicate, kinds):
    # It is one number, and so neither elements nor a comparison of sums.
    return [predicate] * len(kinds) if isinstance(predicate, Mixed) else kinds

  def row(self, kind):
    if isinstance(kind, Elements):
      return Mixed('a loop takes them one by one')
    # Each turn may give another number.
    return Shared() if isinstance(kind, Shared) else kind

  def primitive(self, step, kinds):
    if step.name == 'optimization_barrier':
      return kinds
    if step.name in primitives.SENDING:
      return [self._received(step, kind) for kind in kinds]
    return [self._result(step, kinds)] * len(step.outputs)

  def _received(self, step, kind):
    """Returns the kind of a result of a collective."""
    match kind:
      case Mixed():
        return kind
      case Elements():
        return _unknown(step)
      case Partial():
        in_groups = step.params.get('axis_index_groups') is not None
        if step.name != 'psum' or in_groups or not self.axes <= {*step.axes}:
          return _USED_EARLY
        return Shared(axes_lib.size(step.axes, 'shard_update'))
    if step.name in primitives.SCATTERING:
      # Each shard gets another part, even of what is the same everywhere.
      return OWN_NUMBERS
    if step.name == 'psum' and not self.axes.isdisjoint(step.axes):
      return Mixed('`psum` adds up what is the same on all shards')
    return Shared()

  def _result(self, step, kinds):
    """Returns the kind of a result of a step that sends nothing."""
    if step.name == 'axis_index':
      return OWN_NUMBERS
    if Partial() in kinds:
      return Partial() if _is_linear(step, kinds) else _together(kinds)
    if step.name in primitives.COPIES:
      return kinds[0]
    if _is_mean(step, kinds):
      return Mixed('`pmean` divides a sum over slices by their number')
    together = _together(kinds)
    if not isinstance(together, Elements):
      # Bodies of other steps than loops and branches are not followed.
      if step.bodies:
        return _unknown(step)
      return _repeats(step, kinds) if together == Shared() else together
    if step.name in primitives.ELEMENTWISE:
      if problem := _misplaced(step, kinds):
        return problem
      return Elements(_gives_zeros(step, kinds), together.of)
    is_of_all = not step.outputs[0].aval.shape and self.axes
    if step.name == 'reduce_sum' and is_of_all:
      self.sums.add(step)
      return Partial() if kinds[0].end_in_zeros else _NOT_PADDED
    return _moved(step, kinds[0])


def _repeats(step, kinds):
  """Returns the kind of what a step makes of arrays without elements."""
  keeps = step.name in primitives.ELEMENTWISE | primitives.REPEATING
  has_several = step.outputs[0].aval.size > 1
  return Shared(
      is_one=has_several and keeps and all(map(is_one, step.inputs, kinds))
  )


def is_one(value: interpreter.Value, kind: Kind) -> bool:
  """Whether an array is one number, or one that is repeated."""
  return value.aval.size == 1 or (isinstance(kind, Shared) and kind.is_one)


def _misplaced(step, kinds):
  """Returns what is wrong if an element meets others, or numbers of places."""
  # JAX repeats inputs along their dimensions of length 1.
  size = step.outputs[0].aval.size
  for value, kind in zip(step.inputs, kinds, strict=True):
    if isinstance(kind, Elements):
      if value.aval.size != size:
        return Mixed(f'`{step.name}` repeats them at other places')
    elif not is_one(value, kind):
      shape = list(value.aval.shape)
      return Mixed(
          f'`{step.name}` brings them together with an array {shape} that has a'
          ' number of its own for each place'
      )
  return None


def _moved(step, elements):
  """Returns the kind of what a step that is not element-wise makes of them."""
  before, after = step.inputs[0].aval, step.outputs[0].aval
  # A scalar has no axis to lie along.
  if before.size == after.size and after.shape:
    if step.name in primitives.REPEATING and _keeps_lines(step):
      return elements
    # The padding may be -0.0, which has a bit.
    if step.name == 'bitcast_convert_type':
      return Elements(of=elements.of)
  if step.name in primitives.MOVING:
    return Mixed(f'`{step.name}` moves them to other places')
  return _unknown(step)


def _keeps_lines(step):
  """Whether a step changes no dimension of more than one element."""
  before, after = (
      [n for n in x.aval.shape if n != 1]
      for x in (step.inputs[0], step.outputs[0])
  )
  # Dimensions of a reshape transpose.
  transposes = step.name == 'reshape' and step.params['dimensions']
  return before == after and not transposes


def _unknown(step):
  name = step.name
  return Mixed(f'`{name}` takes several of them together, as far as is known')


def _together(kinds):
  """Returns the kind of what is made of several arrays."""
  for kind in kinds:
    if isinstance(kind, Mixed):
      return kind
  if Partial() in kinds:
    return _USED_EARLY
  shapes = {kind.of for kind in kinds if isinstance(kind, Elements)}
  if len(shapes) > 1:
    return Mixed(f'elements of leaves of other shapes, {sorted(shapes)}, meet')
  return Elements(of=shapes.pop()) if shapes else Shared()


def _gives_zeros(step, kinds):
  """Whether an element-wise step keeps the padding of slices zero."""
  match step.name:
    case 'select_n':
      kinds = kinds[1:]
    case 'mul':
      # Elements may be infinite in their padding, and 0 * inf is NaN.
      kinds = [kind for kind in kinds if not isinstance(kind, Shared)]
    case 'div' if isinstance(kinds[1], Shared):
      kinds = kinds[:1]
    case 'integer_pow' if step.params['y'] > 0:
      pass
    case name if name not in primitives.KEEPS_ZEROS:
      return False
  return all(isinstance(x, Elements) and x.end_in_zeros for x in kinds)


def _is_linear(step, kinds):
  """Whether a step of partial sums gives a partial sum."""
  # A number that is added to a partial sum would count once for each shard.
  # Zero is an exception: Python's `sum` starts there. Casts to integers round:
  # 0.6 on two shards would become 0.
  addends = Partial(), Shared(is_zero=True)
  is_sum = step.name in primitives.SUMS and all(x in addends for x in kinds)
  is_inexact = jnp.issubdtype(step.outputs[0].aval.dtype, jnp.inexact)
  return is_inexact and (is_sum or step.name in primitives.COPIES)


def _is_mean(step, kinds):
  """Whether a step divides a sum over shards by their number."""
  for place in {'div': (0,), 'mul': (0, 1)}.get(step.name, ()):
    # With one shard, nothing is wrong.
    number = getattr(kinds[place], 'num_summed', 0)
    factor = number if step.name == 'div' else 1 / max(number, 1)
    if number > 1 and _is_number(step.inputs[1 - place], factor):
      return True
  return False


def _is_number(value, number):
  """Whether a value is known to be this number."""
  known = value.number
  # The numbers in a tracer are not known before the program runs; those of
  # random keys cannot be read.
  if known is None or isinstance(known, core.Tracer) or value.aval.shape:
    return False
  dtype = value.aval.dtype
  is_number = jnp.issubdtype(dtype, np.number)
  return is_number and bool(known == np.asarray(number).astype(dtype))
