"""The window of towers that `tower_reduce` collects, kept in its state."""

from collections.abc import Hashable
from collections.abc import Mapping
import functools
from typing import NamedTuple

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
from shard_transforms._src.base import varying
from shard_transforms._src.base import weights
from shard_transforms._src.reduction import tower_squares

_CALLER = 'tower_reduce'
NO_STEP = jnp.iinfo(jnp.int32).max


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
    tower_squares: The weighted sum of the squared norms of their updates, and
      the number of towers with a weight, float32 [2]; per shard as `total`;
      `()` unless a state in `inner_state` asks for it.

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
  tower_squares: jax.Array | tuple[()] = ()

  def resize_rules(
      self, reduction: state_rules.Reduction | None
  ) -> Mapping[str, state_rules.ResizeRule]:
    """Returns how `resize_state` converts its fields.

    The window ends with the same result: the totals and the total weights over
    all shards stay the same, or, without weights, their `reduction`.
    """
    total = total_weight = state_rules.ResizeRule('sum')
    may_be_unweighted = np.all(self.total_weight == self.tower)
    if self.tower and may_be_unweighted and reduction != 'weighted':
      # Without weights, the total weight of a shard is the number of its
      # towers.
      total_weight = state_rules.ResizeRule('maximum', self.tower)
      total = _rule_of_unweighted(reduction)
    return {
        'total': total,
        'total_weight': total_weight,
        'oldest_local_step': state_rules.ResizeRule('minimum', NO_STEP),
        'tower_squares': tower_squares.resize_rule(self.tower),
    }

  def metric_rules(self) -> Mapping[str, state_rules.MetricRule]:
    """Returns how `metrics` reads its attributes."""
    return {
        'tower': state_rules.MetricRule(),
        'total_weight': state_rules.MetricRule('sum'),
    }


def start(
    params: optax.Params,
    inner_state: optax.OptState,
    squares: jax.Array | tuple[()],
    axes: tuple[Hashable, ...],
) -> TowerReduceState:
  """Returns an empty window for leaves like `params`."""
  return TowerReduceState(
      tower=counters.zero(),
      total=jax.tree.map(lambda param: _zeros(param, axes), params),
      total_weight=per_shard_state.store(jnp.zeros([], jnp.float32), axes),
      oldest_local_step=per_shard_state.store(
          jnp.full([], NO_STEP, jnp.int32), axes
      ),
      inner_state=inner_state,
      tower_squares=squares,
  )


def collect(
    state: TowerReduceState,
    updates: optax.Updates,
    weight: chex.Numeric | None,
    local_step: chex.Numeric | None,
    axes: tuple[Hashable, ...],
) -> TowerReduceState:
  """Returns the window with one more tower in it.

  Raises:
    TypeError: If the weight or the local step are of the wrong kind.
    ValueError: If the updates do not fit the window, or what is collected is
      not kept per shard where it differs between shards.
  """
  if weight is not None:
    weight = weights.as_weight(weight, (), _CALLER)
  total = per_shard_state.own(state.total, axes, _CALLER)
  leaves_lib.check_like(updates, total, _CALLER)
  varying.check_varies_with(updates, total, _CALLER)
  add = functools.partial(_add, weights.weighing(weight))
  total = jax.tree.map(add, total, updates, is_leaf=leaves_lib.is_none)
  total_weight = per_shard_state.own(state.total_weight, axes, _CALLER)
  total_weight += 1 if weight is None else weight
  oldest = per_shard_state.own(state.oldest_local_step, axes, _CALLER)
  if local_step is not None:
    step = arguments.as_local_step(local_step, _CALLER)
    oldest = jnp.minimum(oldest, step)
  window = TowerReduceState(
      tower=counters.add(state.tower, 1),
      total=per_shard_state.store(total, axes),
      total_weight=per_shard_state.store(total_weight, axes),
      oldest_local_step=per_shard_state.store(oldest, axes),
      inner_state=state.inner_state,
      tower_squares=tower_squares.add(
          state.tower_squares, updates, weight, axes
      ),
  )
  per_shard_state.check_kept(state, window, _CALLER)
  return window


def reduce(
    window: TowerReduceState,
    reduction: weights.Kind,
    num_towers: int | None,
    axes: tuple[Hashable, ...],
    updates: optax.Updates,
    params: optax.Params | None,
) -> tuple[optax.Updates, jax.Array, jax.Array]:
  """Returns the mean or sum of the towers of a full window.

  Args:
    window: The window.
    reduction: `'mean'` or `'sum'`.
    num_towers: What a mean divides by, or `None` for the total weight.
    axes: The axes between whose shards the window differs.
    updates: Those of the last tower, whose dtypes the result gets.
    params: They give the dtype where the last tower has no gradient.

  Returns:
    The mean or sum; the total weight of this shard, and its oldest local step.
  """
  total_weight = per_shard_state.own(window.total_weight, axes, _CALLER)
  if reduction == 'sum':
    divisor = 1
  elif num_towers is None:
    divisor = weights.safe_divisor(total_weight)
  else:
    divisor = num_towers
  in_dtype = functools.cache(jnp.asarray(divisor).astype)
  params = updates if params is None else params

  def divide(total, update, param):
    if total is None:
      return update
    like = param if update is None else update
    if like is None or jnp.iscomplexobj(total) > jnp.iscomplexobj(like):
      like = total
    reduced = lax.div(total, in_dtype(total.dtype))
    return leaves_lib.as_dtype(reduced, leaves_lib.dtype_of(like))

  total = per_shard_state.own(window.total, axes, _CALLER)
  reduced = jax.tree.map(
      divide, total, updates, params, is_leaf=leaves_lib.is_none
  )
  oldest = per_shard_state.own(window.oldest_local_step, axes, _CALLER)
  return reduced, total_weight, oldest


def emptied(
    window: TowerReduceState, inner_state: optax.OptState
) -> TowerReduceState:
  """Returns the state at the start of the next window."""
  zeros = functools.cache(axes_lib.zeros)
  return TowerReduceState(
      tower=jnp.zeros_like(window.tower),
      total=jax.tree.map(lambda x: zeros(jax.typeof(x)), window.total),
      total_weight=jnp.zeros_like(window.total_weight),
      oldest_local_step=jnp.full_like(window.oldest_local_step, NO_STEP),
      inner_state=inner_state,
      tower_squares=tower_squares.emptied(window.tower_squares),
  )


def _rule_of_unweighted(reduction):
  """Returns the resize rule of the totals of a window without weights."""
  if reduction is None:
    return state_rules.ResizeRule(
        'refuse',
        reason=(
            "`reduction` of `resize_state` must be 'mean', 'sum' or 'weighted',"
            ' got None: the window that was begun without weights, at {name},'
            ' ends with the same result only if it is known how its shards are'
            ' reduced.'
        ),
    )
  return state_rules.ResizeRule(reduction)


def _zeros(param, axes):
  """Returns the empty sum for a parameter; `None` where it has no gradient."""
  dtype = leaves_lib.dtype_of(param)
  if not jnp.issubdtype(dtype, jnp.inexact):
    return None
  zeros = jnp.zeros_like(param, dtype=leaves_lib.accumulator_dtype(dtype))
  return per_shard_state.store(zeros, axes)


def _add(weigh, total, update):
  if total is None or update is None or leaves_lib.is_float0(update):
    return total
  update = leaves_lib.as_dtype(jnp.asarray(update), total.dtype)
  return lax.add(total, weigh(update))
