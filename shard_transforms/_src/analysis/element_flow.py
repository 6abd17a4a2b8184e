"""Which results of a program depend on which elements of its arrays.

`Mixed` is the top of the kinds here: nothing is known but the reason, and
everything computed from it is mixed as well. So are the results of a primitive
that is not understood, if its inputs contain elements. The reader
follows elements, not values: `equivalence` compares sizes, which are values.
"""

from collections.abc import Hashable
from collections.abc import Sequence
import dataclasses
import math
from typing import Any

from jax import core
import jax.numpy as jnp
import numpy as np

from shard_transforms._src.analysis import element_layout
from shard_transforms._src.analysis import inlining
from shard_transforms._src.analysis import interpreter
from shard_transforms._src.analysis import primitives
from shard_transforms._src.base import axes as axes_lib

Cut = element_layout.Cut


@dataclasses.dataclass(frozen=True)
class Partial:
  """A partial sum over a slice; other shards hold the rest.

  It may only be added to another one, cast, and summed over the shards.
  """


@dataclasses.dataclass(frozen=True)
class Whole:
  """An array that is not sliced, such as noise or a table.

  A shard would combine its slice with the first numbers of the array.
  """

  origin: str

  @property
  def differs(self) -> str:
    """Says why elements cannot be combined with it."""
    return f'{self.origin} has other numbers at other places'


@dataclasses.dataclass(frozen=True)
class Mixed:
  """An array that mixes several elements of a parameter, and why."""

  reason: str


@dataclasses.dataclass(frozen=True)
class Uniform:
  """One number, perhaps at many places; the same on all shards.

  Attributes:
    num_summed: The number of shards over which `psum` has just summed slices.
    is_zero: Whether it is known to be zero.
  """

  num_summed: int = 0
  is_zero: bool = False


Kind = Cut | Partial | Whole | Mixed | Uniform
_OWN_NUMBERS = Mixed('shards bring numbers of their own')
_USED_EARLY = Mixed('a sum over the slice of one shard is used as if over all')


def fixed(aval: Any, origin: str) -> Kind:
  """Returns the kind of an array that depends on no element of a parameter."""
  return Uniform() if math.prod(aval.shape) == 1 else Whole(origin)


def follow(
    program: interpreter.Program,
    kinds: Sequence[Kind],
    num_slices: int,
    axes: Sequence[Hashable],
) -> tuple[list[Kind], set[interpreter.Step]]:
  """Returns the kinds of a program's results, and the steps on elements.

  Args:
    program: The program.
    kinds: The kinds of its inputs.
    num_slices: The number of slices of a leaf.
    axes: The mapped axes over which a sum is one over all slices.
  """
  reader = _Elements(num_slices, frozenset(axes))
  return interpreter.interpret(program, kinds, reader), reader.understood


class _Elements(interpreter.Reader[Kind]):
  """Follows elements.

  Attributes:
    num_slices: The number of slices of a leaf.
    axes: The mapped axes over which slices vary.
    understood: The steps that do the same on slices as on the whole.
  """

  def __init__(self, num_slices: int, axes: frozenset[Hashable]):
    self.num_slices = num_slices
    self.axes = axes
    self.understood = set()

  def constant(self, value):
    # A literal or a constant that `inner` closes over, such as a shard's loss.
    if self.axes.intersection(axes_lib.varying_axes(value.aval)):
      return _OWN_NUMBERS
    if _is_number(value, 0):
      return Uniform(is_zero=True)
    return fixed(value.aval, 'a constant')

  def join(self, kinds):
    first, *others = kinds
    if all(kind == first for kind in others):
      return first
    return _at_each_place(kinds, _all_end_in_zeros(kinds))

  def chosen(self, step, predicate, kinds):
    # The predicate counts as an input of a select: from the sum over its own
    # slice, each shard would choose differently.
    if isinstance(predicate, Uniform):
      return kinds
    return [_at_each_place([predicate, kind]) for kind in kinds]

  def row(self, kind, value):
    if isinstance(kind, Whole):
      return fixed(value.aval, kind.origin)
    if isinstance(kind, Cut):
      return kind.without_lead() or Mixed('a loop takes them one by one')
    return kind

  def stacked(self, kind, value):
    if isinstance(kind, Cut):
      return dataclasses.replace(kind, lead=kind.lead + 1)
    return fixed(value.aval, 'a loop') if isinstance(kind, Uniform) else kind

  def primitive(self, step, kinds):
    if step.name == 'optimization_barrier':
      self.understood.add(step)
      return kinds
    # The bodies of other steps than loops and branches are not followed.
    if step.name == 'axis_index' or any(map(_asks_for_place, step.bodies)):
      return [_OWN_NUMBERS] * len(step.outputs)
    if step.name in primitives.SENDING:
      return [
          self._received(step, kind, value)
          for kind, value in zip(kinds, step.outputs, strict=False)
      ]
    results = [self._result(step, kinds, value) for value in step.outputs]
    if any(isinstance(kind, Cut | Partial) for kind in results):
      self.understood.add(step)
    return results

  def _received(self, step, kind, value):
    """Returns the kind of a result of a collective."""
    is_over_slices = self.axes.issubset(step.axes) and bool(self.axes)
    if isinstance(kind, Partial):
      if (
          step.name == 'psum'
          and is_over_slices
          and step.params.get('axis_index_groups') is None
      ):
        further = [axis for axis in step.axes if axis not in self.axes]
        sizes = [
            inlining.axis_sizes(step).get(axis)
            or axes_lib.size([axis], 'shard_update')
            for axis in further
        ]
        return Uniform(num_summed=self.num_slices * math.prod(sizes))
      return _USED_EARLY
    if isinstance(kind, Mixed):
      return kind
    if isinstance(kind, Cut):
      return Mixed(f'`{step.name}` takes several of them together')
    if self.axes and self.axes.isdisjoint(step.axes):
      return _same_numbers(kind, value, step)
    if step.name in primitives.SCATTERING:
      # Each shard gets another part, even of what is the same everywhere.
      return _OWN_NUMBERS
    if step.name == 'psum' and self.axes:
      return Mixed('`psum` adds up what is the same on all shards')
    return _same_numbers(kind, value, step)

  def _result(self, step, kinds, value):
    """Returns the kind of a result of a step that sends nothing."""
    if any(isinstance(kind, Partial) for kind in kinds):
      return Partial() if _is_linear(step, kinds) else _at_each_place(kinds)
    if step.name in primitives.ELEMENTWISE:
      return self._at_each_place(step, kinds)
    if any(isinstance(kind, Cut) for kind in kinds):
      return self._moved(step, kinds)
    merged = _at_each_place(kinds)
    if isinstance(merged, Mixed):
      return merged
    if step.name in primitives.REPEATING and isinstance(merged, Uniform):
      return kinds[0]
    return _same_numbers(merged, value, step)

  def _at_each_place(self, step, kinds):
    """Returns the kind of an element-wise result."""
    if step.name in primitives.COPIES:
      return kinds[0]
    # With one slice, nothing is wrong.
    if self.num_slices > 1 and _is_mean(step, kinds):
      return Mixed('`pmean` divides a sum over slices by their number')
    return _at_each_place(kinds, _gives_zeros(step, kinds))

  def _moved(self, step, kinds):
    """Returns the kind of what a step makes of arrays, elements among them."""
    # Indices may be computed from elements, and look up a number in a table.
    if step.name == 'gather' and isinstance(kinds[0], Whole | Uniform):
      return element_layout.looked_up(step, kinds[1]) or _not_understood(step)
    if any(isinstance(kind, Whole) for kind in kinds):
      return _not_understood(step)
    merged = _at_each_place(kinds)
    if not isinstance(merged, Cut):
      return merged
    if step.name == 'reduce_sum' and self.axes and _is_over_all(step):
      if merged.ends_in_zeros:
        return Partial()
      return Mixed(
          '`reduce_sum` takes several of them together, and the padding behind'
          ' the last element may not be zero'
      )
    return element_layout.moved(step, merged) or _not_understood(step)


def _same_numbers(kind, value, step):
  """Returns the kind of what a step makes of no elements."""
  is_whole = isinstance(kind, Whole)
  return fixed(value.aval, kind.origin if is_whole else f'`{step.name}`')


def _not_understood(step):
  name = f'`{step.name}`'
  if step.name in primitives.MOVING:
    return Mixed(f'{name} moves them to other places')
  if step.name in primitives.TOGETHER:
    return Mixed(f'{name} takes several of them together')
  return Mixed(f'what {name} does with each of them is not known')


def _at_each_place(kinds, ends_in_zeros=None):
  """Returns the kind of an element-wise result."""
  by_class = {type(kind): kind for kind in reversed(kinds)}
  if Mixed in by_class:
    return by_class[Mixed]
  if Partial in by_class:
    return _USED_EARLY
  if Cut in by_class and Whole in by_class:
    return Mixed(by_class[Whole].differs)
  if Cut in by_class:
    if ends_in_zeros is None:
      ends_in_zeros = _all_end_in_zeros(kinds)
    first = by_class[Cut]
    for kind in kinds:
      if isinstance(kind, Cut) and kind.layout != first.layout:
        return Mixed('they meet in different layouts')
    if first.ends_in_zeros == ends_in_zeros:
      return first
    return dataclasses.replace(first, ends_in_zeros=ends_in_zeros)
  return by_class.get(Whole, Uniform())


def _all_end_in_zeros(kinds):
  return all(isinstance(kind, Cut) and kind.ends_in_zeros for kind in kinds)


def _gives_zeros(step, kinds):
  """Whether an element-wise step keeps the padding of slices zero."""
  if step.name == 'select_n':
    return _all_end_in_zeros(kinds[1:])
  if step.name == 'integer_pow':
    return step.params['y'] > 0 and _all_end_in_zeros(kinds)
  if step.name == 'div':
    return _all_end_in_zeros(kinds[:1]) and isinstance(kinds[1], Uniform)
  if step.name == 'mul':
    # An array that is not uniform may be infinite in its padding, and 0 * inf
    # is NaN.
    kinds = [kind for kind in kinds if not isinstance(kind, Uniform)]
  return step.name in primitives.KEEPS_ZEROS and _all_end_in_zeros(kinds)


def _is_linear(step, kinds):
  """Whether a step of partial sums gives a partial sum."""
  # A number that is added to a partial sum would count once for each shard.
  # Zero is an exception: Python's `sum` starts there. Casts to integers round:
  # 0.6 on two shards would become 0.
  addends = Partial(), Uniform(is_zero=True)
  is_sum = step.name in primitives.SUMS and all(k in addends for k in kinds)
  is_exact = any(
      jnp.issubdtype(x.aval.dtype, jnp.integer) for x in step.outputs
  )
  return (is_sum or step.name in primitives.COPIES) and not is_exact


def _is_mean(step, kinds):
  """Whether a step divides a sum over shards by their number."""
  places = {'div': (0,), 'mul': (0, 1)}.get(step.name, ())
  for place in places:
    kind = kinds[place]
    if isinstance(kind, Uniform) and kind.num_summed:
      factor = step.inputs[1 - place]
      dtype = factor.aval.dtype
      number = kind.num_summed if step.name == 'div' else 1 / kind.num_summed
      return _is_number(factor, np.asarray(number).astype(dtype))
  return False


def _is_number(value, number):
  """Whether a value is known to be this number."""
  known = value.number
  # The numbers in a tracer are not known before the program runs; those of
  # random keys cannot be read.
  if known is None or isinstance(known, core.Tracer) or value.aval.shape:
    return False
  is_number = jnp.issubdtype(value.aval.dtype, np.number)
  return is_number and bool(np.asarray(known) == number)


def _asks_for_place(program):
  return any(
      step.name == 'axis_index' or any(map(_asks_for_place, step.bodies))
      for step in program.steps
  )


def _is_over_all(step):
  return len(step.params['axes']) == len(step.inputs[0].aval.shape)
