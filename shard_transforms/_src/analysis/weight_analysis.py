"""The check that sums over shards use the weights of the shards.

The fact for a value is a set of bits: whether it depends on updates, whether it
depends on the weight, and whether the updates are those of other shards, sent
without their weight. The analysis detects that a sum of updates depends on the
weight, but not by which arithmetic: a reduction that reads a weight is assumed
to use it correctly.
"""

from collections.abc import Hashable
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp

from shard_transforms._src.analysis import inlining
from shard_transforms._src.analysis import interpreter
from shard_transforms._src.analysis import primitives

UPDATES, WEIGHT = 1, 2
_SENT = 4
_MOVING = primitives.SENDING.difference(primitives.ADDING, ('pmax', 'pmin'))


def check(
    jaxpr: jax.extend.core.Jaxpr,
    updates: Any,
    state: Any,
    axes: Sequence[Hashable],
    may_be_unsummed: bool,
    caller: str,
) -> None:
  """Checks that a jaxpr uses the weight in its sums over shards.

  Args:
    jaxpr: A jaxpr whose last inputs are the updates and the weight, and whose
      last results are the next state.
    updates: The updates, and other inputs that differ between shards with them.
    state: The state.
    axes: The axes of the shards.
    may_be_unsummed: Whether updates that are not summed may be returned without
      the weight.
    caller: The transformation that has the option `assume_weighted`.

  Raises:
    ValueError: If it does not.
  """
  input_bits = [*[UPDATES] * len(jax.tree.leaves(updates)), WEIGHT]
  input_bits = [0] * (len(jaxpr.invars) - len(input_bits)) + input_bits
  has_unweighted_sum, is_unweighted = unweighted_sums(jaxpr, input_bits, axes)
  results: list[Any] = jaxpr.outvars
  results = results[: len(results) - len(jax.tree.leaves(state))]
  passes_through = any(
      unweighted and jnp.issubdtype(x.aval.dtype, jnp.inexact)
      for x, unweighted in zip(results, is_unweighted, strict=False)
  )
  if has_unweighted_sum or (passes_through and not may_be_unsummed):
    raise ValueError(
        f'The transformation in `{caller}` must use the extra argument `weight`'
        ' in all of its sums over shards; otherwise excluded shards still'
        ' count. Reduce with `cross_shard_mean`, and put it only in wrappers'
        ' that forward extra arguments. If the transformation does use the'
        f' weight, pass `assume_weighted=True` to `{caller}`.'
    )


def unweighted_sums(
    jaxpr: jax.extend.core.Jaxpr | jax.extend.core.ClosedJaxpr,
    input_bits: Sequence[int],
    axes: Sequence[Hashable],
) -> tuple[bool, list[bool]]:
  """Finds sums and results that depend on updates without their weight.

  Args:
    jaxpr: The jaxpr.
    input_bits: The bits of each input: `UPDATES` that differ between shards,
      the `WEIGHT` of the shard, or 0.
    axes: The mapped axes of the shards.

  Returns:
    Whether a sum over the shards, by any collective, depends on updates and not
    on the weight; and whether each output depends only on updates.
  """
  analysis = _Weights(frozenset(axes))
  program = inlining.flatten(jaxpr)
  results = interpreter.interpret(program, input_bits, analysis)
  has_unweighted_sum = analysis.has_unweighted_sum or any(
      map(_is_sent_unweighted, results)
  )
  return has_unweighted_sum, [_is_unweighted(bits) for bits in results]


class _Weights(interpreter.Analysis[int]):
  """The analysis of updates and weights.

  Attributes:
    axes: The mapped axes of the shards.
    has_unweighted_sum: Whether updates of several shards were added without a
      weight.
  """

  def __init__(self, axes: frozenset[Hashable]):
    self.axes = axes
    self.has_unweighted_sum = False

  def constant(self, value):
    del value
    return 0

  def join(self, facts):
    bits = 0
    for fact in facts:
      bits |= fact
    return bits

  def primitive(self, equation, facts):
    if equation.name in primitives.SENDING and self.axes.intersection(
        equation.axes
    ):
      # A collective of several arrays is independent for each array.
      return [self._communicated(equation.name, bits) for bits in facts]
    combined = self.join(facts)
    if _is_sent_unweighted(combined) and not _keeps_separate(equation, facts):
      self.has_unweighted_sum = True
    return [combined] * len(equation.outputs)

  def _communicated(self, name: str, bits: int) -> int:
    if not _is_unweighted(bits):
      return bits
    self.has_unweighted_sum |= name in primitives.ADDING
    return bits | _SENT if name in _MOVING else bits


def _is_unweighted(bits: int) -> bool:
  return bits & (UPDATES | WEIGHT) == UPDATES


def _is_sent_unweighted(bits: int) -> bool:
  return bool(bits & _SENT) and _is_unweighted(bits)


def _keeps_separate(
    equation: interpreter.Equation, facts: Sequence[int]
) -> bool:
  """Whether an equation does not combine updates of several shards."""
  # The weights may still be applied: `all_gather(w) @ all_gather(u)`.
  if equation.name in primitives.MOVING:
    return True
  is_elementwise = equation.name in primitives.ELEMENTWISE
  return is_elementwise and sum(bits & UPDATES for bits in facts) == 1
