"""Rounds: in which steps the shards meet."""

from collections.abc import Callable
import dataclasses
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from shard_transforms._src.base import arguments

_NAME = '`every` of `local_updates`'

# The number of steps of a round, or a function of the number of the round.
Every = int | Callable[[jax.Array], chex.Numeric]


class Meetings(NamedTuple):
  """What happens in a step, the same on all shards.

  Attributes:
    sends: For each fragment, whether shards send it, bool [].
    mixes: For each fragment, whether shards take it over, bool [].
    is_last: Whether the round ends, bool [].
  """

  sends: list[jax.Array]
  mixes: list[jax.Array]
  is_last: jax.Array


@dataclasses.dataclass(frozen=True)
class Rounds:
  """When fragments meet; checked when it is made.

  Attributes:
    every: The number of steps of a round, or a function of the round's number.
    delay: How many steps a fragment is sent before shards take it over.
    num_fragments: How many fragments there are.
  """

  every: Every
  delay: int
  num_fragments: int

  def __post_init__(self):
    delay = arguments.as_at_least('delay', self.delay, 0)
    if callable(self.every):
      _check_function(self.every)
      return
    every = arguments.as_at_least('every', self.every, 1)
    apart = self._ends(every)[0]
    # What is sent in the step in which it is taken over has no delay.
    if delay >= max(apart, 1):
      raise ValueError(
          '`delay` of `local_updates` must be less than the steps to the first'
          f' meeting of a round, {apart}, got {delay!r}: a fragment is taken'
          ' over before the next is.'
      )

  def at(self, step: jax.Array, num_rounds: jax.Array) -> Meetings:
    """Returns what happens in a step.

    Args:
      step: The number of steps of this round before it, int32 [].
      num_rounds: The number of rounds before this one, int32 [].
    """
    length = self.every
    if callable(length):
      length = jnp.maximum(jnp.asarray(length(num_rounds), jnp.int32), 1)
    number = step + 1
    ends = self._ends(length)
    return Meetings(
        sends=[number == jnp.maximum(end - self.delay, 1) for end in ends],
        mixes=[number == end for end in ends],
        is_last=number >= length,
    )

  def _ends(self, length: Any):
    """Returns in which step each fragment is taken over, counted from 1."""
    num = self.num_fragments
    return [-(-(i + 1) * length // num) for i in range(num)]


def _check_function(every):
  """Checks that a function gives a number of steps.

  Raises:
    TypeError: If it does not.
  """
  try:
    kind = jax.eval_shape(every, jax.ShapeDtypeStruct((), jnp.int32))
  except jax.errors.ConcretizationTypeError as error:
    raise TypeError(
        f'{_NAME} must be an integer or a function of the number of the round'
        f' that JAX can trace, got {every!r}. Write `jnp.where` in place of'
        ' `if`.'
    ) from error
  dtype = getattr(kind, 'dtype', None)
  is_number = dtype is not None and jnp.issubdtype(dtype, jnp.integer)
  if not is_number or kind.shape:
    raise TypeError(
        f'{_NAME} must be an integer or give one for the number of a round, got'
        f' {every!r}, which gives {kind}.'
    )
