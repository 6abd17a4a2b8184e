"""The dependence of the results of a jaxpr on elements of its inputs.

An array of elements has one value per element of a parameter, which depends
only on this element and has its position; the same then holds on slices. Few
equations preserve this: element-wise equations, and those that add or remove
dimensions of length 1. Elements may be combined with one repeated value, but
not with any other shared array, because a slice has elements from other
positions, which would be combined with other values. `Mixed` is the top of the
lattice: only the reason is known, and everything computed from it is mixed too.
The results of unknown primitives are mixed.

The analysis tracks elements, not values: a shared array, such as noise, may
have the size of the unsliced parameters. `equivalence` compares sizes.
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
      over all slices differs from the sum over the leaf: with five elements on
      four shards, `exp` adds three ones.
    of: The shape of the parameter. Leaves of another shape are sliced along
      another dimension, so that their slices have other elements at the same
      positions.
  """

  end_in_zeros: bool = False
  of: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Partial:
  """A partial sum over a slice; other shards hold the rest.

  It may only be added to another partial sum, cast, and summed over the shards.
  """


@dataclasses.dataclass(frozen=True)
class Mixed:
  """An array that mixes several elements of a parameter, with the reason."""

  reason: str


@dataclasses.dataclass(frozen=True)
class Shared:
  """An array without elements, the same on all shards.

  Attributes:
    num_summed: The number of shards over which `psum` has just summed slices.
    is_zero: Whether it is known to be zero.
    is_one: Whether it has several elements, all equal.
  """

  num_summed: int = 0
  is_zero: bool = False
  is_one: bool = False


Fact = Elements | Partial | Mixed | Shared
PER_SHARD = Mixed(
    'shards have different values, such as parameters of `per_shard`'
)
_NOT_PADDED = Mixed(
    '`reduce_sum` adds up several elements, and the padding of the last slice'
    ' may not be zero'
)
_PARTIAL_USED = Mixed(
    'a sum over the slice of one shard is used like a sum over all slices'
)


class ElementAnalysis(interpreter.Analysis[Fact]):
  """The analysis of elements.

  Attributes:
    axes: The mapped axes over which a sum is a sum over all slices.
    sums: The equations so far that sum over all elements.
  """

  def __init__(self, axes: Sequence[Hashable]):
    self.axes = frozenset(axes)
    self.sums = set()

  def constant(self, value):
    # A literal, or a constant that `inner` closes over, such as the loss of a
    # shard.
    varies = self.axes.intersection(axes_lib.varying_axes(value.aval))
    return PER_SHARD if varies else Shared(is_zero=_is_constant(value, 0))

  def join(self, facts):
    return facts[0] if len(set(facts)) == 1 else _combine(facts)

  def select(self, equation, predicate, facts):
    # The predicate is a scalar, so it is neither elements nor a comparison of
    # sums.
    return [predicate] * len(facts) if isinstance(predicate, Mixed) else facts

  def scan_slice(self, fact):
    if isinstance(fact, Elements):
      return Mixed('a loop processes elements one by one')
    # Each iteration may produce another value.
    return Shared() if isinstance(fact, Shared) else fact

  def primitive(self, equation, facts):
    if equation.name == 'optimization_barrier':
      return facts
    if equation.name in primitives.SENDING:
      return [self._received(equation, fact) for fact in facts]
    # An equation without results, such as `debug_print`, only has effects.
    if not equation.outputs:
      return []
    return [self._result(equation, facts)] * len(equation.outputs)

  def _received(self, equation, fact):
    """Returns the fact for a result of a collective."""
    match fact:
      case Mixed():
        return fact
      case Elements():
        return _unknown(equation)
      case Partial():
        in_groups = equation.params.get('axis_index_groups') is not None
        if (
            equation.name != 'psum'
            or in_groups
            or not self.axes <= {*equation.axes}
        ):
          return _PARTIAL_USED
        return Shared(axes_lib.num_shards(equation.axes, 'shard_update'))
    if equation.name in primitives.SCATTERING:
      # Each shard receives another part, even of a replicated array.
      return PER_SHARD
    if equation.name == 'psum' and not self.axes.isdisjoint(equation.axes):
      return Mixed('`psum` sums values that are the same on all shards')
    return Shared()

  def _result(self, equation, facts):
    """Returns the fact for the result of an equation without communication."""
    if equation.name == 'axis_index':
      return PER_SHARD
    if Partial() in facts:
      return Partial() if _is_linear(equation, facts) else _combine(facts)
    if equation.name in primitives.COPIES:
      return facts[0]
    if _is_mean(equation, facts):
      return Mixed('`pmean` divides a sum over slices by the number of shards')
    together = _combine(facts)
    if not isinstance(together, Elements):
      # Only the bodies of loops and branches are analyzed.
      if equation.bodies:
        return _unknown(equation)
      return _repeats(equation, facts) if together == Shared() else together
    if equation.name in primitives.ELEMENTWISE:
      if problem := _mixing_problem(equation, facts):
        return problem
      return Elements(_gives_zeros(equation, facts), together.of)
    is_of_all = not equation.outputs[0].aval.shape and self.axes
    if equation.name == 'reduce_sum' and is_of_all:
      self.sums.add(equation)
      return Partial() if facts[0].end_in_zeros else _NOT_PADDED
    return _move_elements(equation, facts[0])


def _repeats(equation, facts):
  """Returns the fact for the result of an equation on shared arrays."""
  keeps = equation.name in primitives.ELEMENTWISE | primitives.REPEATING
  has_several = equation.outputs[0].aval.size > 1
  return Shared(
      is_one=has_several and keeps and all(map(is_one, equation.inputs, facts))
  )


def is_one(value: interpreter.Value, fact: Fact) -> bool:
  """Whether an array consists of one value, possibly repeated."""
  return value.aval.size == 1 or (isinstance(fact, Shared) and fact.is_one)


def _mixing_problem(equation, facts):
  """Returns the problem if elements are combined with other positions."""
  # JAX broadcasts inputs along their dimensions of length 1.
  size = equation.outputs[0].aval.size
  for value, fact in zip(equation.inputs, facts, strict=True):
    if isinstance(fact, Elements):
      if value.aval.size != size:
        return Mixed(f'`{equation.name}` repeats elements at other positions')
    elif not is_one(value, fact):
      shape = list(value.aval.shape)
      return Mixed(
          f'`{equation.name}` combines elements with an array'
          f' {shape} that has a different value for each position'
      )
  return None


def _move_elements(equation, elements):
  """Returns the fact for the result of an equation that is not element-wise."""
  before, after = equation.inputs[0].aval, equation.outputs[0].aval
  # A scalar cannot be sliced along an axis.
  if before.size == after.size and after.shape:
    if equation.name in primitives.REPEATING and _keeps_order(equation):
      return elements
    # The padding may be -0.0, whose sign bit is set.
    if equation.name == 'bitcast_convert_type':
      return Elements(of=elements.of)
  if equation.name in primitives.MOVING:
    return Mixed(f'`{equation.name}` moves elements to other positions')
  return _unknown(equation)


def _keeps_order(equation):
  """Whether only dimensions of length 1 change."""
  before, after = (
      [n for n in x.aval.shape if n != 1]
      for x in (equation.inputs[0], equation.outputs[0])
  )
  # A reshape with `dimensions` transposes.
  transposes = equation.name == 'reshape' and equation.params['dimensions']
  return before == after and not transposes


def _unknown(equation):
  name = equation.name
  return Mixed(f'`{name}` may combine several elements')


def _combine(facts):
  """Returns the fact for a combination of arrays."""
  for fact in facts:
    if isinstance(fact, Mixed):
      return fact
  if Partial() in facts:
    return _PARTIAL_USED
  shapes = {fact.of for fact in facts if isinstance(fact, Elements)}
  if len(shapes) > 1:
    return Mixed(
        f'elements of leaves of different shapes, {sorted(shapes)}, are'
        ' combined'
    )
  return Elements(of=shapes.pop()) if shapes else Shared()


def _gives_zeros(equation, facts):
  """Whether an element-wise equation keeps the padding of slices zero."""
  match equation.name:
    case 'select_n':
      facts = facts[1:]
    case 'mul':
      # Elements may be infinite in their padding, and 0 * inf is NaN.
      facts = [fact for fact in facts if not isinstance(fact, Shared)]
    case 'div' if isinstance(facts[1], Shared):
      facts = facts[:1]
    case 'integer_pow' if equation.params['y'] > 0:
      pass
    case name if name not in primitives.KEEPS_ZEROS:
      return False
  return all(isinstance(x, Elements) and x.end_in_zeros for x in facts)


def _is_linear(equation, facts):
  """Whether an equation on partial sums returns a partial sum."""
  # A value that is added to a partial sum would count once per shard. Zero is
  # an exception, because Python's `sum` starts with it. Casts to integers
  # round: 0.6 on two shards would become 0.
  addends = Partial(), Shared(is_zero=True)
  is_sum = equation.name in primitives.SUMS and all(x in addends for x in facts)
  is_inexact = jnp.issubdtype(equation.outputs[0].aval.dtype, jnp.inexact)
  return is_inexact and (is_sum or equation.name in primitives.COPIES)


def _is_mean(equation, facts):
  """Whether an equation divides a sum over shards by their number."""
  for place in {'div': (0,), 'mul': (0, 1)}.get(equation.name, ()):
    # With one shard, the mean is correct.
    constant = getattr(facts[place], 'num_summed', 0)
    factor = constant if equation.name == 'div' else 1 / max(constant, 1)
    if constant > 1 and _is_constant(equation.inputs[1 - place], factor):
      return True
  return False


def _is_constant(value, constant):
  """Whether a value is known to be equal to this constant."""
  value_of_constant = value.constant
  # The values of a tracer are unknown, and those of random keys cannot be read.
  if (
      value_of_constant is None
      or isinstance(value_of_constant, core.Tracer)
      or value.aval.shape
  ):
    return False
  dtype = value.aval.dtype
  is_number = jnp.issubdtype(dtype, np.number)
  return is_number and bool(
      value_of_constant == np.asarray(constant).astype(dtype)
  )
