"""Whether sums over shards use the weights of the shards.

Each value has bits: whether it depends on updates, whether it depends on the
weight, and whether these are updates of other shards, which were sent without
their weight. The reader sees that a sum of updates depends on the weight, and
not by which arithmetic: a reduction that reads a weight is trusted to use it
right.
"""

from collections.abc import Hashable
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp

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
    may_be_local: bool,
    caller: str,
) -> None:
  """Checks that a program uses the weight in its sums over shards.

  Args:
    jaxpr: A program whose last inputs are the updates and the weight, and whose
      last results are the next state.
    updates: The updates, and what else differs with them between shards.
    state: The state.
    axes: The axes of the shards.
    may_be_local: Whether updates that are not summed may be returned without
      the weight.
    caller: The transformation that can be told `assume_weighted=True`.

  Raises:
    ValueError: If it does not.
  """
  given = [*[UPDATES] * len(jax.tree.leaves(updates)), WEIGHT]
  given = [0] * (len(jaxpr.invars) - len(given)) + given
  sums, alone = sums_without(jaxpr, given, axes)
  results: list[Any] = jaxpr.outvars
  results = results[: len(results) - len(jax.tree.leaves(state))]
  goes_through = any(
      is_alone and jnp.issubdtype(x.aval.dtype, jnp.inexact)
      for x, is_alone in zip(results, alone, strict=False)
  )
  if sums or (goes_through and not may_be_local):
    raise ValueError(
        f'The transformation in `{caller}` must use the extra argument `weight`'
        ' in its sums over shards, but a reduction by hand, or none, would'
        ' count excluded shards. Reduce with `cross_shard_mean`, where each'
        ' wrapper forwards extra arguments. If it does use the weight, pass'
        f' `assume_weighted=True` to `{caller}`.'
    )


def sums_without(
    jaxpr: jax.extend.core.Jaxpr | jax.extend.core.ClosedJaxpr,
    given: Sequence[int],
    axes: Sequence[Hashable],
) -> tuple[bool, list[bool]]:
  """Returns where updates of shards are used without their weight.

  Args:
    jaxpr: The program.
    given: What each of its inputs is: `UPDATES` that differ between shards, the
      `WEIGHT` that says how much the shard counts, or 0.
    axes: The mapped axes of these shards.

  Returns:
    Whether a sum over the shards, by whatever collective, depends on updates
    and not on the weight; and for each output, whether it depends on updates
    alone.
  """
  reader = _Weights(frozenset(axes))
  results = interpreter.interpret(interpreter.view(jaxpr), given, reader)
  found = reader.found or any(map(_is_sent_alone, results))
  return found, [_is_alone(bits) for bits in results]


class _Weights(interpreter.Reader[int]):
  """Follows updates and the weight.

  Attributes:
    axes: The mapped axes of the shards.
    found: Whether updates of several shards were added up without a weight.
  """

  def __init__(self, axes: frozenset[Hashable]):
    self.axes = axes
    self.found = False

  def constant(self, value):
    del value
    return 0

  def join(self, kinds):
    bits = 0
    for kind in kinds:
      bits |= kind
    return bits

  def primitive(self, step, kinds):
    if step.name in primitives.SENDING and self.axes.intersection(step.axes):
      # A collective of several arrays treats each of them by itself.
      return [self._sent(step.name, bits) for bits in kinds]
    together = self.join(kinds)
    if _is_sent_alone(together) and not _keeps_apart(step, kinds):
      self.found = True
    return [together] * len(step.outputs)

  def _sent(self, name: str, bits: int) -> int:
    if not _is_alone(bits):
      return bits
    self.found |= name in primitives.ADDING
    return bits | _SENT if name in _MOVING else bits


def _is_alone(bits: int) -> bool:
  return bits & (UPDATES | WEIGHT) == UPDATES


def _is_sent_alone(bits: int) -> bool:
  return bool(bits & _SENT) and _is_alone(bits)


def _keeps_apart(step: interpreter.Step, kinds: Sequence[int]) -> bool:
  """Whether a step leaves updates of several shards next to each other."""
  # The weights of the shards may still come: `all_gather(w) @ all_gather(u)`.
  if step.name in primitives.MOVING:
    return True
  is_elementwise = step.name in primitives.ELEMENTWISE
  return is_elementwise and sum(bits & UPDATES for bits in kinds) == 1
