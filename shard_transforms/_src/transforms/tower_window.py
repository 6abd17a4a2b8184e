"""The window of `tower_reduce`: towers that are collected, and their result."""

from collections.abc import Hashable
import functools
from typing import Any, NamedTuple

import chex
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

from shard_transforms._src.base import arguments
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import counters
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import per_shard_state
from shard_transforms._src.base import state_rules
from shard_transforms._src.base import weights

_CALLER = 'tower_reduce'
_NO_STEP = jnp.iinfo(jnp.int32).max


class SummedTowers(NamedTuple):
  """Says that the result of a window is the sum of its towers. No arrays."""


def _total_rule(state, reduction):
  """Returns how totals are resized: the window ends with the same result."""
  if _is_unweighted(state, reduction):
    return _rule_of_unweighted(reduction)
  if state.tower and isinstance(state.summed, SummedTowers):
    # A sum contains the weights: `inner` counts each shard once.
    return _rule_of_unweighted('mean' if reduction == 'weighted' else reduction)
  return state_rules.Rule(resize='sum')


def _total_weight_rule(state, reduction):
  """Returns how the total weights are resized."""
  if _is_unweighted(state, reduction):
    # Without weights, a shard's total weight is the number of its towers.
    return state_rules.Rule(resize='maximum', empty=state.tower)
  return state_rules.Rule(resize='sum')


def _is_unweighted(state, reduction):
  may_be = state.tower and np.all(state.total_weight == state.tower)
  return may_be and reduction != 'weighted'


def _rule_of_unweighted(reduction):
  """Returns the rule of the totals of a window without weights."""
  if reduction is None:
    return state_rules.Rule(
        resize='refuse',
        reason=(
            "`reduction` of `resize_state` must be 'mean', 'sum' or 'weighted',"
            ' got None: the window that was begun without weights, or is'
            ' summed, at {name}, ends with the same result only if it is known'
            ' how its shards are reduced.'
        ),
    )
  return state_rules.Rule(resize=reduction)


class TowerReduceState(NamedTuple):
  """State of `tower_reduce`.

  With `axis_name`, `total`, `total_weight` and `oldest_local_step` differ
  between shards: their leaves have a leading axis, of length 1 inside the
  mapped function and of the number of shards outside.

  Attributes:
    tower: Number of towers collected since the last update, int32 [].
    total: Their (weighted) sum, a tree like the parameters, in float32 for
      leaves of fewer bits; `()` where there is but one tower.
    total_weight: The sum of their weights, float32 [].
    oldest_local_step: The minimum of their local steps, int32 []; the largest
      int32 where no tower gave one.
    inner_state: State of the inner transformation.
    summed: Tells `resize_state` that the result is the sum of the towers; `()`
      for their mean. No arrays.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import shard_transforms
    >>> state = shard_transforms.tower_reduce(4).init(jnp.zeros(2))
    >>> print(optax.tree_utils.tree_get(state, 'tower'), state.total)
    0 [0. 0.]
  """

  tower: jax.Array
  total: optax.Updates
  total_weight: jax.Array
  oldest_local_step: jax.Array
  inner_state: optax.OptState
  summed: SummedTowers | tuple[()] = ()

  rules = {
      'tower': state_rules.Rule(metric='same'),
      'total': state_rules.Rule(resize=_total_rule),
      'total_weight': state_rules.Rule(resize=_total_weight_rule, metric='sum'),
      'oldest_local_step': state_rules.Rule(resize='minimum', empty=_NO_STEP),
  }


class Reduced(NamedTuple):
  """What a full window of towers gives.

  Attributes:
    updates: Their mean or sum.
    total_weight: Their total weight on this shard, float32 [].
    oldest_local_step: The minimum of their local steps, int32 [].
  """

  updates: optax.Updates
  total_weight: jax.Array
  oldest_local_step: jax.Array


def start(
    zeros: tuple[optax.Updates, Any],
    inner_state: optax.OptState,
    axes: tuple[Hashable, ...],
    is_summed: bool = False,
) -> TowerReduceState:
  """Returns an empty window, given a total and a total weight of zero."""
  total, total_weight = zeros
  return TowerReduceState(
      tower=counters.zero(),
      total=per_shard_state.store(total, axes),
      total_weight=per_shard_state.store(total_weight, axes),
      oldest_local_step=per_shard_state.store(
          jnp.full([], _NO_STEP, jnp.int32), axes
      ),
      inner_state=inner_state,
      summed=SummedTowers() if is_summed else (),
  )


def collect(
    state: TowerReduceState,
    updates: optax.Updates,
    weight: chex.Numeric | None,
    local_step: chex.Numeric | None,
    axes: tuple[Hashable, ...],
) -> TowerReduceState:
  """Returns the window with one more tower.

  Raises:
    TypeError: If the weight or the local step are of the wrong kind.
    ValueError: If updates do not fit the window, or differ between shards where
      the window does not.
  """
  if weight is not None:
    weight = weights.as_weight(weight, (), _CALLER)
  total = per_shard_state.own(state.total, axes, _CALLER)
  arguments.check_like(updates, total, _CALLER)
  arguments.check_varies_with(updates, total, _CALLER)
  add = functools.partial(_add, weights.weighing(weight))
  total = leaves_lib.tree_map(add, total, updates)
  total_weight = per_shard_state.own(state.total_weight, axes, _CALLER)
  # In place, `+=` would change a state that is in NumPy.
  total_weight = total_weight + (1 if weight is None else weight)
  oldest = per_shard_state.own(state.oldest_local_step, axes, _CALLER)
  if local_step is not None:
    step = arguments.as_local_step(local_step, _CALLER)
    oldest = jnp.minimum(oldest, step)
  window = state._replace(
      tower=counters.add(state.tower, 1),
      total=per_shard_state.store(total, axes),
      total_weight=per_shard_state.store(total_weight, axes),
      oldest_local_step=per_shard_state.store(oldest, axes),
  )
  per_shard_state.check_kept(state, window, _CALLER)
  return window


def reduced(
    window: TowerReduceState,
    updates: optax.Updates,
    params: optax.Params | None,
    axes: tuple[Hashable, ...],
    is_sum: bool,
) -> Reduced:
  """Returns the mean or sum of the towers of a full window.

  A window without weights has that of its towers, also if `num_towers` has
  changed since it began.

  Args:
    window: The window.
    updates: Those of the last tower, whose dtypes the result gets.
    params: They give the dtype where the last tower has no gradient.
    axes: The axes between whose shards the window differs.
    is_sum: Whether the sum is wanted.
  """
  total, total_weight, oldest = per_shard_state.own(
      (window.total, window.total_weight, window.oldest_local_step),
      axes,
      _CALLER,
  )
  divisor = 1 if is_sum else weights.safe_divisor(total_weight)
  in_dtype = functools.cache(jnp.asarray(divisor).astype)

  def divide(total, update, param):
    if total is None:
      return update
    like = param if update is None else update
    if like is None or jnp.iscomplexobj(total) > jnp.iscomplexobj(like):
      like = total
    reduced = lax.div(total, in_dtype(total.dtype))
    return leaves_lib.as_dtype(reduced, leaves_lib.dtype_of(like))

  likes = updates if params is None else params
  updates = leaves_lib.tree_map(divide, total, updates, likes)
  return Reduced(updates, total_weight, oldest)


def emptied(
    window: TowerReduceState, inner_state: optax.OptState
) -> TowerReduceState:
  """Returns the state at the start of the next window."""
  zeros = functools.cache(axes_lib.zeros)
  return window._replace(
      tower=jnp.zeros_like(window.tower),
      total=jax.tree.map(lambda x: zeros(jax.typeof(x)), window.total),
      total_weight=jnp.zeros_like(window.total_weight),
      oldest_local_step=jnp.full_like(window.oldest_local_step, _NO_STEP),
      inner_state=inner_state,
  )


def _add(weigh, total, update):
  if total is None or update is None or leaves_lib.is_float0(update):
    return total
  update = leaves_lib.as_dtype(jnp.asarray(update), total.dtype)
  return lax.add(total, weigh(update))
