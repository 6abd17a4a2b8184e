"""Redundant sums in a program, without false positives.

A value is followed through linear steps only: casts to floats, reshapes, sums,
and products with literals. Through other steps the same two sums may be right:
the gradient of `log(psum(x))` is `psum(1 / psum(x))` where types are not
tracked. What is not understood gives no warning.
"""

import collections
from collections.abc import Hashable
import functools
import operator

import jax.numpy as jnp

from shard_transforms._src.analysis import inlining
from shard_transforms._src.analysis import interpreter
from shard_transforms._src.analysis import primitives

# The axes over which a value is a sum; `None` of a literal, which is neither a
# sum nor none.
Summed = frozenset[Hashable] | None
_NONE: frozenset[Hashable] = frozenset()


def find(program: interpreter.Program) -> tuple[str, ...]:
  """Returns warnings of redundant sums, each once.

  That is a sum over an axis of a value that is, through linear steps, already a
  sum over that axis.
  """
  reader = _Sums()
  interpreter.interpret(program, [_NONE] * len(program.inputs), reader)
  counts = collections.Counter(reader.warnings.values())
  return tuple(
      f'{text} ({count} arrays.)' if count > 1 else text
      for text, count in counts.items()
  )


class _Sums(interpreter.Reader[Summed]):
  """Follows sums over shards.

  Attributes:
    warnings: One for each step that sums what is already a sum.
  """

  def __init__(self):
    self.warnings = {}

  def constant(self, value):
    return None if value.is_literal else _NONE

  def join(self, kinds):
    # `psum(x) + x`, with a sum in only one input, is no sum.
    known = [kind for kind in kinds if kind is not None]
    return functools.reduce(operator.and_, known) if known else None

  def primitive(self, step, kinds):
    if step.name == 'select_n':
      # A mask leaves a sum what it is; the alternative is a constant.
      kinds = kinds[1:]
    before = self.join(kinds)
    if before is None and not step.axes:
      return [None] * len(step.outputs)
    before = before or _NONE
    again = [axis for axis in step.axes if axis in before]
    if again and (_is_sum(step) or step.name == 'reduce_scatter'):
      self.warnings[step] = (
          f'{inlining.label(step)} sums over {_text(again)} what has been'
          ' summed over it before: reduce it once.'
      )
    if _is_sum(step) and step.params.get('axis_index_groups') is None:
      before |= frozenset(step.axes)
    # A concatenation of sums is a sum.
    elif not _is_linear(step) and step.name not in ('concatenate', 'select_n'):
      before = _NONE
    return [before] * len(step.outputs)

  def inside(self, step, kinds):
    del step, kinds
    return _NONE

  def carried(self, kind):
    # It equals its initial value in the first turn alone.
    del kind
    return _NONE

  def chosen(self, step, predicate, kinds):
    del step, predicate
    return [_NONE] * len(kinds)


def _is_sum(step):
  return step.name == 'psum' and bool(step.axes)


def _is_linear(step):
  """Whether outputs are linear in all inputs but literals, and not larger."""
  if step.name not in primitives.LINEAR:
    return False
  literal = [value.is_literal for value in step.inputs]
  # A sum that is repeated may be the gradient of a sum in an unchecked map.
  sizes = [value.aval.size for value in step.inputs if not value.is_literal]
  if any(output.aval.size > size for output in step.outputs for size in sizes):
    return False
  if step.name == 'mul':
    return any(literal)
  if step.name == 'div':
    return literal == [False, True] and _is_inexact(step.outputs[0])
  if step.name == 'convert_element_type':
    return _is_inexact(step.outputs[0])
  return not any(literal)


def _is_inexact(value):
  # Rounding to integers is not linear.
  return jnp.issubdtype(value.aval.dtype, jnp.inexact)


def _text(axes):
  return ', '.join(map(repr, axes))
