"""Squared norms of the towers in a window, for gradient noise.

Where a state has the attribute `asks_for_tower_squares`, `tower_reduce`
collects them and passes them to its inner transformation with the mean of the
window, as the extra argument `tower_squares`.
"""

from collections.abc import Hashable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import per_shard_state
from shard_transforms._src.base import state_rules
from shard_transforms._src.base import weights
from shard_transforms._src.reduction import norms

_CALLER = 'tower_reduce'


class TowerSquares(NamedTuple):
  """The towers of a window on one shard; those of weight zero are left out.

  Attributes:
    num_towers: Their number, float32 [].
    mean: The mean of the squares of the norms of their updates, float32 [].
    of_mean: The square of the norm of the mean of their updates, float32 [].
  """

  num_towers: jax.Array
  mean: jax.Array
  of_mean: jax.Array


def start(
    inner_state: optax.OptState, axes: tuple[Hashable, ...]
) -> jax.Array | tuple[()]:
  """Returns the sums of an empty window; `()` if no state asks for them."""
  if not any(True for _ in state_rules.nodes(inner_state, _asks)):
    return ()
  return per_shard_state.store(jnp.zeros([2], jnp.float32), axes)


def add(
    squares: jax.Array | tuple[()],
    updates: optax.Updates,
    weight: jax.Array | None,
    axes: tuple[Hashable, ...],
) -> jax.Array | tuple[()]:
  """Returns the weighted sum of squares, and the count, with one more tower."""
  if isinstance(squares, tuple):
    return ()
  square = norms.sum_of_squares(updates, (), None, _CALLER)
  tower = jnp.stack([weights.weighing(weight)(square), jnp.ones_like(square)])
  if weight is not None:
    tower = jnp.where(weight > 0, tower, 0)
  own = per_shard_state.own(squares, axes, _CALLER)
  return per_shard_state.store(own + tower.astype(own.dtype), axes)


def of_window(
    squares: jax.Array,
    total_weight: jax.Array,
    mean: optax.Updates,
    axes: tuple[Hashable, ...],
) -> TowerSquares:
  """Returns the squares of a full window, whose mean is known."""
  total, num_towers = per_shard_state.own(squares, axes, _CALLER)
  of_mean = norms.sum_of_squares(mean, (), None, _CALLER)
  return TowerSquares(
      num_towers, total / weights.safe_divisor(total_weight), of_mean
  )


def emptied(squares: jax.Array | tuple[()]) -> jax.Array | tuple[()]:
  """Returns the sums at the start of the next window."""
  return jax.tree.map(lambda x: axes_lib.zeros(jax.typeof(x)), squares)


def resize_rule(tower: jax.Array) -> state_rules.ResizeRule:
  """Returns how the sums of an unfinished window are resized.

  They start again, from NaN if the window has towers: nobody knows any more
  which towers a shard has had, and NaN keeps this window from being measured.
  """
  return state_rules.ResizeRule('begin_anew', jnp.nan if tower else 0.0)


def _asks(node):
  return getattr(node, 'asks_for_tower_squares', False)
