"""How each leaf is summed, according to its type."""

from collections.abc import Hashable
from collections.abc import Sequence
import math
from typing import NamedTuple

import chex
import numpy as np

from shard_transforms._src.base import axes as axes_lib


class Route(NamedTuple):
  """How one leaf becomes its sum or mean.

  Attributes:
    send: The axes over which the shards' values are summed.
    pending: The axes over which a delayed sum is still to be done.
    divisor: The number of summands behind the sum.
    factor: The factor that turns an average into the sum.
  """

  send: tuple[Hashable, ...]
  pending: tuple[Hashable, ...]
  divisor: int
  factor: int


class Key(NamedTuple):
  """What must be equal for leaves to share a buffer.

  Attributes:
    route: The axes and the scale.
    dtype: The dtype that is sent.
    varying: All axes over which the leaf varies; a shared buffer would vary
      over the axes of all of its leaves.
  """

  route: Route
  dtype: np.dtype
  varying: frozenset[Hashable]


def find(
    leaves: Sequence[chex.Array],
    axes: Sequence[Hashable],
    averaged: bool,
    caller: str,
) -> list[Route]:
  """Returns the route of each leaf.

  Args:
    leaves: Arrays.
    axes: The axes to sum over, all of them bound.
    averaged: Whether a leaf that is the same on all shards is an average.
    caller: The public name that errors show.

  Raises:
    NameError: If an axis is not bound.
  """
  sizes = [axes_lib.size([axis], caller) for axis in axes]
  per_axis = [axes_lib.states(leaves, axis) for axis in axes]
  return [
      _route(list(zip(axes, sizes, states, strict=True)), averaged)
      for states in zip(*per_axis, strict=True)
  ]


def _route(axes, averaged):
  """Returns the route of a leaf, given (axis, size, state) for each axis."""
  done = [n for _, n, s in axes if s == 'invariant' and averaged]
  return Route(
      send=tuple(a for a, _, s in axes if s in ('varying', 'untracked')),
      pending=tuple(a for a, _, s in axes if s == 'unreduced'),
      divisor=math.prod(n for _, n, _ in axes) // math.prod(done),
      factor=math.prod(done),
  )
