"""Towers that are added in the order of a balanced binary tree.

A window keeps partial sums of its towers, a binary counter, and leaves the rest
of the tree to the reduction over shards.
"""

import math
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import state_rules
from shard_transforms._src.base import weights
from shard_transforms._src.reduction import collectives


class TowerWeights(NamedTuple):
  """The weights of the towers in a window, added in the order of a tree.

  Attributes:
    sums: The partial sums, float32 [levels], as `add` keeps them.
  """

  sums: jax.Array
  # A skipped call would leave out another tower on another number of shards.
  needs_every_call = True


def check_towers(order: Any, num_towers: int, inner: Any, caller: str) -> None:
  """Checks the arguments of gradient accumulation.

  Raises:
    ValueError: If the order is unknown, or lacks what it needs.
  """
  weights.check_order(order)
  if order is None:
    return
  weights.check_power_of_two(f'`num_towers` of `{caller}`', num_towers)
  if inner is None:
    raise ValueError(
        f"`order='tree'` of `{caller}` must come with `inner`, got None. The"
        ' sum over towers is divided after shards have added theirs: write'
        f' `{caller}(num_towers, optax.chain(cross_shard_mean(..., order='
        "'tree'), ...), order='tree')`."
    )


def check_inner(
    order: weights.Order,
    num_towers: int,
    inner_state: Any,
    sums_over_shards: bool,
    caller: str,
) -> None:
  """Checks that towers and shards are added in the same order.

  Args:
    order: That of the towers.
    num_towers: Their number.
    inner_state: State of the transformation that reduces over shards.
    sums_over_shards: Whether it must.
    caller: What errors name.

  Raises:
    ValueError: If they are not, or shards are added twice, or late.
  """
  if num_towers == 1 and order is None:
    return
  is_other = is_in_order(inner_state) != (order is not None)
  if is_other and (order is None or sums_over_shards):
    raise ValueError(
        f"`order` must be 'tree' in `{caller}` and in the reduction of `inner`,"
        f' or in neither, got {order!r} in `{caller}`. Reduce by'
        ' `cross_shard_mean`, `cross_shard_sum` or `shard_update`.'
    )
  if order is None:
    return
  if any(True for _ in state_rules.nodes(inner_state, _reduces_late)):
    raise ValueError(
        f"`inner` of `{caller}` with `order='tree'` must begin with its"
        ' reduction, got a link of `optax.chain` in front of it, which would'
        ' see the sum over the towers of a shard: it depends on the number of'
        ' shards. Put the link behind the reduction. One that is for other'
        ' leaves goes into `optax.partition`.'
    )
  # Links of a chain would each divide by the number of towers. Masks and
  # `optax.partition` give each its own leaves.
  if any(True for _ in state_rules.nodes(inner_state, _reduces_twice)):
    raise ValueError(
        f"`inner` of `{caller}` with `order='tree'` must reduce once, got two"
        ' reductions in one `optax.chain`. Reduce over all axes at once, as in'
        " `cross_shard_mean(('host', 'core'), order='tree')`."
    )


def _reduces_late(node):
  if type(node) is not tuple or not any(map(is_in_order, node)):
    return False
  return not is_in_order(node[0])


def _reduces_twice(node):
  if type(node) is not tuple:
    return False
  links = (x for x in node if not isinstance(x, optax.MaskedState))
  return sum(map(is_in_order, links)) > 1


def is_in_order(state: Any) -> bool:
  """Whether a state is of a transformation that sums over shards by a tree."""
  found = state_rules.nodes(
      state, lambda node: isinstance(node, weights.TreeOrder)
  )
  return any(True for _ in found)


def dtypes_to_restore(updates: Any) -> tuple[np.dtype, ...]:
  """Returns the dtypes of updates whose sums are in another; else `()`."""
  dtypes = tuple(map(leaves_lib.dtype_of, jax.tree.leaves(updates)))
  is_same = all(leaves_lib.accumulator_dtype(x) == x for x in dtypes)
  return () if is_same else dtypes


def num_levels(num_towers: int) -> int:
  """Returns the number of partial sums that a window of towers keeps."""
  return num_towers.bit_length() - 1


def empty(tree: Any, num_towers: int) -> Any:
  """Returns the partial sums of no towers, [levels, ...] for each leaf."""
  levels = num_levels(num_towers)

  def stack(zeros):
    return jnp.broadcast_to(zeros, (levels, *zeros.shape))

  return jax.tree.map(stack, leaves_lib.accumulators(tree))


def zero_row(levels: jax.Array) -> jax.Array:
  """Returns a zero of the type of one partial sum."""
  zero = jnp.zeros(levels.shape[1:], levels.dtype)
  return axes_lib.mark_varying(zero, tuple(axes_lib.varying_axes(levels)))


def add(levels: jax.Array, x: jax.Array, tower: jax.Array) -> jax.Array:
  """Returns the partial sums of a window with one more tower.

  They are a binary counter: row l holds the sum of 2**l towers, and counts if
  bit l of the number of towers is 1. The full sum of the window replaces the
  last row.

  Args:
    levels: The partial sums, [levels, ...].
    x: The update of a tower, or its weight, [...].
    tower: How many towers have been added, int32 [].
  """
  carry, full, level = collectives.rounded(x), jnp.bool_(True), jnp.int32(0)
  if not len(levels):
    return carry[None]
  for i, row in enumerate(levels):
    full &= (tower >> i) & 1 == 1
    carry = jnp.where(full, row + carry, carry)
    level += full
  return lax.dynamic_update_index_in_dim(levels, carry, level, 0)


def last_rows(levels: Any) -> Any:
  """Returns the sums of a full window."""
  return jax.tree.map(lambda x: x[-1], levels)


def check_as_many_towers(before: Any, after: Any) -> None:
  """Checks that a step is of as many towers on all shards, given partial sums.

  Raises:
    ValueError: If it is not.
  """
  before, after = (
      math.prod(x.shape[:-1]) << x.shape[-1] for x in (before, after)
  )
  if before != after:
    raise ValueError(
        f"`num_towers` of `tower_reduce` with `order='tree'` must be {before}"
        ' over the number of shards, because a step of `state` is the sum of'
        f' {before} towers, got a step of {after}.'
    )


def resize_rule(tower: jax.Array) -> state_rules.ResizeRule:
  """Returns how the sums of a window with so many towers are resized."""
  if not tower:
    return state_rules.ResizeRule('begin_anew')
  return state_rules.ResizeRule(
      'refuse',
      reason=(
          "`state` of `resize_state` with `order='tree'` must have no tower"
          f' in its window, got {tower} at {{name}}: the partial sums of an'
          ' unfinished window belong to other parts of the tree on another'
          ' number of shards. Finish the window first, or begin it again:'
          ' convert `optax.tree_utils.tree_set(state, tower=0)`, and repeat'
          ' its towers from the first. The parameters are still those at its'
          ' start, so that the result has the same bits.'
      ),
  )
