"""Where the elements of arrays get to in a program.

An abstract interpretation: each array has a kind, and each step computes the
kinds of its results from those of its inputs. `Mixed` is the top: nothing is
known but the reason, and everything computed from it is mixed as well. So are
the results of a primitive that is not listed here, if its inputs contain
elements. This sees where elements get to, and not their values: sizes, which
are values, are left to `equivalence`.
"""

from collections.abc import Hashable
from collections.abc import Sequence
import dataclasses
import math
from typing import Any

import jax.numpy as jnp

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.tracing import equivalence
from shard_transforms._src.tracing import jaxprs

# Primitives that compute each element from the elements at the same place.
ELEMENTWISE = frozenset().union(
    ('add', 'add_any', 'sub', 'mul', 'div', 'rem', 'neg', 'abs', 'sign'),
    ('max', 'min', 'clamp', 'ceil', 'floor', 'round', 'nextafter'),
    ('eq', 'ne', 'lt', 'le', 'gt', 'ge', 'is_finite', 'select_n'),
    ('square', 'sqrt', 'rsqrt', 'cbrt', 'integer_pow', 'pow'),
    ('exp', 'exp2', 'expm1', 'log', 'log1p', 'log2', 'logistic'),
    ('sin', 'cos', 'tan', 'asin', 'acos', 'atan', 'atan2'),
    ('sinh', 'cosh', 'tanh', 'asinh', 'acosh', 'atanh', 'one_minus_square'),
    ('erf', 'erfc', 'erf_inv', 'lgamma', 'digamma', 'polygamma'),
    ('igamma', 'igammac', 'regularized_incomplete_beta'),
    ('bessel_i0e', 'bessel_i1e', 'real', 'imag', 'complex', 'conj'),
    ('and', 'or', 'xor', 'not', 'population_count', 'clz', 'shift_left'),
    ('shift_right_arithmetic', 'shift_right_logical'),
    ('convert_element_type', 'reduce_precision', 'stop_gradient', 'name'),
    ('copy', 'copy_p'),
    # Casts of the varying type, in JAX 0.10 with `_p`.
    ('pvary', 'preduced', 'reduced_vary_cast', 'reduced_vary_cast_p'),
    ('vary_unreduced_cast', 'vary_unreduced_cast_p'),
)
_COPIES = frozenset(('convert_element_type', 'copy', 'copy_p', 'pvary'))
_SUMS = frozenset(('add', 'add_any'))
# The scopes in which `norms` sums over slices.
_NORMS = frozenset(('global_norm', 'clip_by_global_norm'))
# Primitives that map zeros to zeros.
_KEEPS_ZEROS = _COPIES | _SUMS.union(
    ('sub', 'neg', 'abs', 'sign', 'square', 'sqrt', 'real', 'imag', 'conj'),
    ('complex', 'mul', 'max', 'min'),
)


@dataclasses.dataclass(frozen=True)
class Cut:
  """An array of one number for each element of a parameter, from it alone.

  Attributes:
    shape: The shape of the parameter.
    ends_in_zeros: Whether the padding of its last slice is zero. Otherwise a
      sum over all slices is not the sum over the whole: with five elements on
      four shards, `exp` adds three ones too many.
  """

  shape: tuple[int, ...]
  ends_in_zeros: bool = False


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
  """One number, perhaps at many places; the same on all shards."""


Kind = Cut | Partial | Whole | Mixed | Uniform


def fixed(aval: Any, origin: str) -> Kind:
  """Returns the kind of an array that depends on no element of a parameter."""
  return Uniform() if math.prod(aval.shape) == 1 else Whole(origin)


def follow(
    program: jaxprs.Program, kinds: Sequence[Kind], axes: Sequence[Hashable]
) -> tuple[list[Kind], set[jaxprs.Step]]:
  """Returns the kinds of a program's results, and its sums over slices.

  Args:
    program: The program.
    kinds: The kinds of its inputs.
    axes: The mapped axes over which a sum is one over all slices.
  """
  found = dict(zip(program.inputs, kinds, strict=True))
  sums = set()

  def kind_of(value):
    if value in found:
      return found[value]
    # A literal or a constant that `inner` closes over, such as a shard's loss.
    if axes_lib.varying_axes(value.aval).intersection(axes):
      return _OWN_NUMBERS
    return fixed(value.aval, 'a constant')

  for step in program.steps:
    inputs = [kind_of(value) for value in step.inputs]
    if step.name == 'cond':
      # The predicate counts as an input of a select: from the sum over its own
      # slice, each shard would choose differently.
      followed = [follow(body, inputs[1:], axes) for body in step.bodies]
      branches, inner_sums = zip(*followed, strict=True)
      sums.update(*inner_sums)
      outputs = [
          _at_each_place([inputs[0], *given], _all_end_in_zeros(given))
          for given in zip(*branches, strict=True)
      ]
    else:
      outputs = [_make(step, inputs, axes, value) for value in step.outputs]
    if step.name == 'reduce_sum' and outputs == [Partial()]:
      sums.add(step)
    found.update(zip(step.outputs, outputs, strict=True))
  return [kind_of(value) for value in program.outputs], sums


_OWN_NUMBERS = Mixed('shards bring numbers of their own')


def _make(step, kinds, axes, value):
  """Returns the kind of a result of a step."""
  partial = Partial() in kinds
  # The bodies of loops are not followed.
  if step.name == 'axis_index' or any(map(_asks_for_place, step.bodies)):
    return _OWN_NUMBERS
  if step.name == 'psum' and partial and _is_over_all_slices(step, axes):
    return Uniform()
  if partial and set(kinds) == {Partial()} and _is_linear(step):
    return Partial()
  if step.name in ELEMENTWISE:
    return _at_each_place(kinds, _gives_zeros(step, kinds))
  # Other primitives take arrays as a whole.
  merged = _at_each_place(kinds)
  if (
      isinstance(merged, Uniform)
      and kinds
      and step.name in equivalence.REPEATING
  ):
    return merged
  if isinstance(merged, Cut):
    if step.name == 'reduce_sum' and axes and _is_over_all_axes(step):
      if merged.ends_in_zeros:
        return Partial()
      return Mixed(
          '`reduce_sum` takes several of them together, of which those behind'
          ' the last element may not be zero'
      )
    return Mixed(f'`{step.name}` takes several of them together')
  if isinstance(merged, Mixed):
    return merged
  is_whole = isinstance(merged, Whole)
  return fixed(value.aval, merged.origin if is_whole else f'`{step.name}`')


def _at_each_place(kinds, ends_in_zeros=None):
  """Returns the kind of an element-wise result."""
  by_class = {type(kind): kind for kind in kinds}
  if Mixed in by_class:
    return by_class[Mixed]
  if Partial in by_class:
    return Mixed('a sum over the slice of one shard is used as if over all')
  if Cut in by_class and Whole in by_class:
    return Mixed(by_class[Whole].differs)
  if Cut in by_class:
    if ends_in_zeros is None:
      ends_in_zeros = _all_end_in_zeros(kinds)
    return Cut(by_class[Cut].shape, ends_in_zeros)
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
    return _all_end_in_zeros(kinds[:1]) and kinds[1] == Uniform()
  if step.name == 'mul':
    # An array that is not uniform may be infinite in its padding, and 0 * inf
    # is NaN.
    kinds = [kind for kind in kinds if kind != Uniform()]
  return step.name in _KEEPS_ZEROS and _all_end_in_zeros(kinds)


def _is_linear(step):
  """Whether a step of partial sums gives a partial sum."""
  # A number that is added to a partial sum would count once for each shard.
  # Zero is no exception, which is why `norms` sums without a start value. Casts
  # to integers round: 0.6 on two shards would become 0.
  is_exact = any(
      jnp.issubdtype(x.aval.dtype, jnp.integer) for x in step.outputs
  )
  return step.name in _COPIES | _SUMS and not is_exact


def _is_over_all_slices(step, axes):
  # Other sums over shards do not know that some leaves are slices and some are
  # not: a scalar, which is not sliced, would count once for each shard.
  is_norm = not _NORMS.isdisjoint(step.scope.split('/'))
  groups = step.params.get('axis_index_groups')
  return is_norm and groups is None and axes and set(step.axes) >= set(axes)


def _asks_for_place(program):
  return any(
      step.name == 'axis_index' or any(map(_asks_for_place, step.bodies))
      for step in program.steps
  )


def _is_over_all_axes(step):
  return len(step.params['axes']) == len(step.inputs[0].aval.shape)
