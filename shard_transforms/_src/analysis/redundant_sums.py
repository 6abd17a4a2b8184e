"""Redundant sums in a jaxpr, without false positives.

A value is followed only through linear equations: casts to floats, reshapes,
sums, and products with literals. Through other equations, two sums may be
correct: the gradient of `log(psum(x))` is `psum(1 / psum(x))` where types are
not tracked. Unknown primitives do not produce warnings.
"""

import collections
from collections.abc import Hashable
import functools
import operator

import jax.numpy as jnp

from shard_transforms._src.analysis import inlining
from shard_transforms._src.analysis import interpreter
from shard_transforms._src.analysis import primitives

# The axes over which a value is a sum; `None` for a literal, which may count as
# a sum or not.
Summed = frozenset[Hashable] | None
_NONE: frozenset[Hashable] = frozenset()


def find(program: interpreter.Program) -> tuple[str, ...]:
  """Returns warnings about redundant sums.

  A sum over an axis is redundant if its operand is, through linear equations,
  already a sum over that axis.
  """
  analysis = _Sums()
  interpreter.interpret(program, [_NONE] * len(program.inputs), analysis)
  counts = collections.Counter(analysis.warnings.values())
  return tuple(
      f'{text} ({count} arrays.)' if count > 1 else text
      for text, count in counts.items()
  )


class _Sums(interpreter.Analysis[Summed]):
  """The analysis of sums over shards.

  Attributes:
    warnings: One warning per redundant sum.
  """

  def __init__(self):
    self.warnings = {}

  def constant(self, value):
    return None if value.is_literal else _NONE

  def join(self, facts):
    # `psum(x) + x`, with a sum in only one input, is not a sum.
    axes_of_sums = [fact for fact in facts if fact is not None]
    return (
        functools.reduce(operator.and_, axes_of_sums) if axes_of_sums else None
    )

  def primitive(self, equation, facts):
    if equation.name == 'select_n':
      # A masked sum is still a sum; the alternative is a constant.
      facts = facts[1:]
    summed_axes = self.join(facts)
    if summed_axes is None and not equation.axes:
      return [None] * len(equation.outputs)
    summed_axes = summed_axes or _NONE
    repeated = [axis for axis in equation.axes if axis in summed_axes]
    if repeated and (_is_sum(equation) or equation.name == 'reduce_scatter'):
      self.warnings[equation] = (
          f'{inlining.label(equation)} sums over'
          f' {_text(repeated)} values that were already summed over it: reduce'
          ' them only once.'
      )
    if _is_sum(equation) and equation.params.get('axis_index_groups') is None:
      summed_axes |= frozenset(equation.axes)
    # A concatenation of sums is a sum.
    elif not _is_linear(equation) and equation.name not in (
        'concatenate',
        'select_n',
    ):
      summed_axes = _NONE
    return [summed_axes] * len(equation.outputs)

  def sub_jaxpr_inputs(self, equation, facts):
    del equation, facts
    return _NONE

  def loop_carry(self, fact):
    # It has its initial value only in the first iteration.
    del fact
    return _NONE

  def select(self, equation, predicate, facts):
    del equation, predicate
    return [_NONE] * len(facts)


def _is_sum(equation):
  return equation.name == 'psum' and bool(equation.axes)


def _is_linear(equation):
  """Whether outputs are linear in all non-literal inputs, and not larger."""
  if equation.name not in primitives.LINEAR:
    return False
  literal = [value.is_literal for value in equation.inputs]
  # A repeated sum may be the gradient of a sum in an unchecked map.
  sizes = [value.aval.size for value in equation.inputs if not value.is_literal]
  if any(
      output.aval.size > size for output in equation.outputs for size in sizes
  ):
    return False
  if equation.name == 'mul':
    return any(literal)
  if equation.name == 'div':
    return literal == [False, True] and _is_inexact(equation.outputs[0])
  if equation.name == 'convert_element_type':
    return _is_inexact(equation.outputs[0])
  return not any(literal)


def _is_inexact(value):
  # Rounding to integers is not linear.
  return jnp.issubdtype(value.aval.dtype, jnp.inexact)


def _text(axes):
  return ', '.join(map(repr, axes))
