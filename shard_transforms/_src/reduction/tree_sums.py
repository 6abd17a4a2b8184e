"""Sums in the order of a balanced binary tree, whatever the number of shards.

Numbers are added in pairs, the sums of pairs in pairs, and so on. A shard that
has 2**m of them in a row adds its own subtree, and shards add the rest of the
tree: the same additions on any number of shards. Only the order within a pair
may differ, which changes no bit.
"""

import math
from typing import Any, Literal, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import state_rules

Order = Literal['tree'] | None


class TreeOrder(NamedTuple):
  """State of a reduction in the order of a tree, by which gates know it."""


class TowerWeights(NamedTuple):
  """The weights of the towers in a window, added in the order of a tree.

  Attributes:
    sums: The partial sums, float32 [levels], as `add` keeps them.
  """

  sums: jax.Array

  def laid_out_like(self, other: 'TowerWeights') -> 'TowerWeights':
    """Returns itself, if a step of `other` is of as many towers on all shards.

    Raises:
      ValueError: If it is not.
    """
    before, after = (
        math.prod(x.sums.shape[:-1]) << x.sums.shape[-1] for x in (self, other)
    )
    if before != after:
      raise ValueError(
          "`num_towers` of `tower_reduce` with `order='tree'` must be"
          f' {before} over the number of shards, because a step of `state` is'
          f' the sum of {before} towers, got a step of {after}.'
      )
    return self


def check_order(order: Any) -> None:
  """Checks the order of a sum, as the user gives it.

  Raises:
    ValueError: If it is neither `'tree'` nor `None`.
  """
  if order not in ('tree', None):
    raise ValueError(f"`order` must be 'tree' or None, got {order!r}.")


def check_power_of_two(name: str, value: int) -> None:
  """Checks a number of summands.

  Raises:
    ValueError: If it is not a power of two.
  """
  if value & (value - 1):
    raise ValueError(
        f"{name} must be a power of two with `order='tree'`, whose sums are of"
        f' pairs, got {value}. Take {1 << (value.bit_length() - 1)} or'
        f' {1 << value.bit_length()}.'
    )


def check_towers(order: Any, num_towers: int, inner: Any, caller: str) -> None:
  """Checks the arguments of gradient accumulation.

  Raises:
    ValueError: If the order is unknown, or lacks what it needs.
  """
  check_order(order)
  if order is None:
    return
  check_power_of_two(f'`num_towers` of `{caller}`', num_towers)
  if inner is None:
    raise ValueError(
        f"`order='tree'` of `{caller}` must come with `inner`, got None. The"
        ' sum over towers is divided after shards have added theirs: write'
        f' `{caller}(num_towers, optax.chain(cross_shard_mean(..., order='
        "'tree'), ...), order='tree')`."
    )


def check_inner(
    order: Order,
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
    ValueError: If they are not, or shards are added twice.
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
  # Links of a chain would each divide by the number of towers. Masks and
  # `optax.partition` give each its own leaves.
  if any(True for _ in state_rules.nodes(inner_state, _reduces_twice)):
    raise ValueError(
        f"`inner` of `{caller}` with `order='tree'` must reduce once, got two"
        ' reductions in one `optax.chain`. Reduce over all axes at once, as in'
        " `cross_shard_mean(('host', 'core'), order='tree')`."
    )


def _reduces_twice(node):
  if type(node) is not tuple:
    return False
  links = (x for x in node if not isinstance(x, optax.MaskedState))
  return sum(map(is_in_order, links)) > 1


def is_in_order(state: Any) -> bool:
  """Whether a state is of a transformation that sums over shards by a tree."""
  return _has(state, TreeOrder)


def has_window(state: Any) -> bool:
  """Whether a state is of a window of towers that are added by a tree."""
  return _has(state, TowerWeights)


def _has(state, kind):
  found = state_rules.nodes(state, lambda node: isinstance(node, kind))
  return any(True for _ in found)


def check_may_skip(inner_state: Any, caller: str | None) -> None:
  """Checks that no window of towers in the order of a tree misses a call.

  Raises:
    ValueError: If one may.
  """
  if has_window(inner_state):
    raise ValueError(
        f"`{caller}` must not skip towers that are added with `order='tree'`,"
        ' because a step then has other towers on another number of shards. Put'
        " `guard(..., on_bad='exclude')` around, which gives bad towers the"
        ' weight 0, or a gate without `axis_name` behind the reduction.'
    )


def dtypes_to_restore(updates: Any) -> tuple[np.dtype, ...]:
  """Returns the dtypes of updates whose sums are in another; else `()`."""
  dtypes = tuple(map(leaves_lib.dtype_of, jax.tree.leaves(updates)))
  is_same = all(leaves_lib.accumulator_dtype(x) == x for x in dtypes)
  return () if is_same else dtypes


def rounded(x: jax.Array) -> jax.Array:
  """Returns a number rounded to its dtype; every NaN becomes the same one.

  A compiler may join a product and a sum into one operation, which rounds once
  and gives other bits. Whether it does depends on the program around them, and
  so on the number of shards. It cannot across a comparison; XLA for CPUs does
  across `lax.optimization_barrier` (JAX 0.10) and `lax.reduce_precision`.
  """
  return jnp.where(x == x, x, jnp.nan)


def sum_rows(rows: jax.Array) -> jax.Array:
  """Returns the sum over the first axis, whose length is a power of two."""
  while len(rows) > 1:
    pairs = lax.reshape(rows, (len(rows) // 2, 2, *rows.shape[1:]))
    rows = pairs[:, 0] + pairs[:, 1]
  return rows[0]


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
    x: What is added, [...].
    tower: How many towers have been added, int32 [].
  """
  carry, full, level = rounded(x), jnp.bool_(True), jnp.int32(0)
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
