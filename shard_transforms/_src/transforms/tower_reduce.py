"""`tower_reduce`: gradient accumulation over several calls of `update`."""

import functools
from typing import Literal, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

from shard_transforms._src.base import arguments
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import states
from shard_transforms._src.base import weights
from shard_transforms._src.gates import branching
from shard_transforms._src.gates import gating
from shard_transforms._src.reduction import collectives

_CALLER = 'tower_reduce'
_NO_STEP = jnp.iinfo(jnp.int32).max


class SummedTowers(NamedTuple):
  """Marks a window whose result is the sum of its towers. Has no arrays."""


def _total_rule(state, reduction):
  """Returns the resize rule of totals, which keeps the result of the window."""
  if _is_unweighted(state, reduction):
    return _unweighted_rule(reduction)
  if state.tower_count and isinstance(state.summed, SummedTowers):
    # The sum already contains the weights, and `inner` counts each shard once.
    return _unweighted_rule('mean' if reduction == 'weighted' else reduction)
  return states.Rule(resize='sum')


def _total_weight_rule(state, reduction):
  """Returns the resize rule of the total weights."""
  if _is_unweighted(state, reduction):
    # Without weights, the total weight of a shard is its number of towers.
    return states.Rule(resize='maximum', empty=state.tower_count)
  # With `reduction='sum'`, `inner` gets weight 1 from each shard whose total is
  # positive. A new shard with total 0 would drop out.
  is_sum = isinstance(state.summed, SummedTowers)
  return _equal_parts if is_sum else states.Rule(resize='sum')


def _equal_parts(rows, num_shards):
  """Returns the row of each of the new shards, an equal part of the sum."""
  return np.sum(rows, axis=0, dtype=np.float64) / num_shards


def _is_unweighted(state, reduction):
  has_towers = (
      np.all(state.total_weight == state.tower_count) and state.tower_count
  )
  return has_towers and reduction != 'weighted'


def _unweighted_rule(reduction):
  """Returns the resize rule of the totals of a window without weights."""
  if reduction is not None:
    return states.Rule(resize=reduction)
  return states.Rule(
      reason=(
          'The unfinished window at {name} was begun without weights, or has'
          " `reduction='sum'`, so its conversion depends on how `inner` reduces"
          " over the shards. Pass `reduction`, one of 'mean', 'sum' and"
          " 'weighted', to `shard_state` or `resize_state`."
      ),
  )


class TowerReduceState(NamedTuple):
  """State of `tower_reduce`.

  With `axis_name`, `total`, `total_weight` and `oldest_local_step` differ
  between shards: their leaves have a leading axis, of length 1 inside the
  mapped function and of the number of shards outside.

  Attributes:
    tower_count: Number of towers collected since the last update, int32 [].
    total: The (weighted) sum of the updates of these towers, a tree like the
      parameters, in float32 for leaves of fewer than 32 bits; `()` if
      `num_towers` is 1.
    total_weight: The sum of the weights of these towers, float32 [], or float64
      if a parameter is float64.
    oldest_local_step: The minimum `local_step` of the towers with positive
      weight, int32 []; the largest int32 if no tower has given a `local_step`.
    inner_state: State of the inner transformation.
    summed: A marker without arrays, by which `resize_state` recognizes
      `reduction='sum'`; `()` for `'mean'`.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import shard_transforms
    >>> state = shard_transforms.tower_reduce(4).init(jnp.zeros(2))
    >>> print(optax.tree_utils.tree_get(state, 'tower_count'), state.total)
    0 [0. 0.]
  """

  tower_count: jax.Array
  total: optax.Updates
  total_weight: jax.Array
  oldest_local_step: jax.Array
  inner_state: optax.OptState
  summed: SummedTowers | tuple[()] = ()

  rules = {
      'tower_count': states.Rule(metric='same'),
      'total': states.Rule(resize=_total_rule),
      'total_weight': states.Rule(resize=_total_weight_rule, metric='sum'),
      'oldest_local_step': states.Rule(resize='minimum', empty=_NO_STEP),
  }


def tower_reduce(
    num_towers: int,
    inner: optax.GradientTransformation | None = None,
    *,
    axis_name: axes_lib.AxisName | None = None,
    reduction: Literal['mean', 'sum'] = 'mean',
    assume_weighted: bool = False,
) -> optax.GradientTransformationExtraArgs:
  r"""Gradient accumulation: sums several updates and applies them once.

  Each call of `update` takes the update of one tower, that is, of one
  micro-batch. The first `num_towers - 1` calls of a window return zero updates
  and do not run `inner`; the last call runs `inner` with the mean (or sum) over
  all towers. With the extra argument `weight`, one scalar :math:`w_t` per
  tower, the mean is

  .. math:: u = \sum_{t: w_t > 0} w_t u_t / W,
     \quad W = \sum_{t: w_t > 0} w_t

  and `inner` receives the weight :math:`W`, so that a `cross_shard_mean` inside
  computes the mean over all tokens of all towers and shards. With
  `reduction='sum'`, the sum contains the weights, and `inner` receives the
  weight 1 if :math:`W > 0` on the shard, else 0. If the total weight over all
  shards is zero, the update is zero, the state of `inner` keeps every bit, and
  a new window starts. Pass `weight` with every tower of a window or with none.

  A tower whose gradient is `None` for some leaf adds zero to that leaf, and
  counts in its mean. `inner` receives the minimum `local_step` of the towers
  with positive weight; the values of all other extra arguments are those of the
  last tower. Collectives inside `inner` run once per window.

  Without `inner`, the result is passed to the next transformation of an
  `optax.chain`, as zeros in all calls except the last of a window. This is
  correct only for transformations that keep no state and do not read the
  parameters, such as `optax.clip_by_global_norm`, or `optax.sgd` with a fixed
  learning rate and without momentum. All other transformations belong in
  `inner`. In a chain, weight decay would shrink the parameters in each call, a
  schedule would count calls, and moments would decay in each call, and there is
  no error in these cases. Passing `weight` raises an error, and the next
  transformation receives the `local_step` of the last tower.

  Args:
    num_towers: The number of updates per window, at least 1. With 1, each call
      is a window, and the state has no sums.
    inner: The transformation that is applied once per window.
    axis_name: The mapped axis, or a sequence of mapped axes, over whose shards
      the updates differ; the sum is then kept per shard (see `init_state`).
      `None` if updates are already the same on all shards. Weights must then
      be the same as well: if JAX tracks types, other weights raise an error; if
      it does not, shards without any weight skip the window and diverge.
    reduction: `'mean'` or `'sum'` over the towers.
    assume_weighted: Turns off the check that `inner` uses `weight` in all its
      sums over shards. Set it only if `inner` is refused although it uses the
      weight: a sum without the weight then includes all shards, without an
      error.

  Returns:
    An `optax.GradientTransformationExtraArgs` with a `TowerReduceState`, whose
    `update` takes the optional extra arguments `weight` and `local_step`.

  Raises:
    NameError: In `init` and `update`, if an axis is not bound.
    TypeError: If an argument has the wrong type; in `update`, if a leaf is an
      integer or boolean, an extra argument has the wrong type, or the state
      belongs to another transformation.
    ValueError: If `num_towers` is less than 1, or `reduction` is unknown; in
      `update`, if the tree of the updates differs from that of the parameters
      in `init`, if updates are already reduced although `axis_name` is given,
      or differ between shards although it is not given, if an extra argument
      has an invalid value, or if `inner` reduces over shards without the
      weight.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import shard_transforms
    >>> tx = shard_transforms.tower_reduce(2, optax.sgd(1.0))
    >>> state = tx.init(jnp.zeros(2))
    >>> for tower, weight in ([1.0, 1.0], 30), ([5.0, 9.0], 10):
    ...   updates, state = tx.update(jnp.array(tower), state, weight=weight)
    ...   print(updates)
    [0. 0.]
    [-2. -3.]

  References:
    `tf.contrib.estimator.TowerOptimizer` of TensorFlow 1.15; Goyal et al.,
    Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour, 2017,
    https://arxiv.org/abs/1706.02677 (the mean over all examples of a step).
  """
  num_towers = arguments.as_at_least('num_towers', num_towers, 1)
  arguments.check_reduction(reduction)
  axes = axes_lib.optional_axes(axis_name)
  gate = gating.make_gate(_CALLER, inner, axes, assume_weighted)
  is_mean = reduction == 'mean'

  def init_fn(params):
    axes_lib.check_bound(axes, _CALLER)
    window = _empty_window(params, num_towers, is_mean, axes)
    return window._replace(inner_state=gate.inner.init(params))

  def update_inner(check, updates, state, params, weight, extra_args):
    accept = None
    if weight is not None:
      accept = collectives.psum(weight, axes) > 0
      weight = weights.sanitized(weights.outgoing_weight(weight, reduction))
    _, updates, inner_state = gate.update_or_skip(
        check, accept, updates, state.inner_state, params, weight, extra_args
    )
    return updates, state._replace(inner_state=inner_state)

  # This must not close over arrays: `jax.checking_leaks` would find them.
  def end_window(flags, window, updates, params, /, **extra_args):
    is_weighted, has_steps = flags
    sums = _without_shard_axis(window, axes)
    if has_steps:
      extra_args['local_step'] = sums.oldest_local_step
    reduced = _reduced(sums, updates, params, is_mean)
    weight = sums.total_weight if is_weighted else None
    # The sums of the window already use the weights of outer gates.
    updates, window = update_inner(
        gating.WeightCheck(), reduced, window, params, weight, extra_args
    )
    return updates, _emptied(window)

  def step(check, updates, state, params=None, *, weight=None, **extra_args):
    arguments.check_update(updates, state, TowerReduceState, axes, _CALLER)
    local_step = extra_args.pop('local_step', None)
    weight = _checked_weight(weight, inner)
    _check_num_towers(state, updates, num_towers)
    if num_towers == 1:
      if weight is not None:
        updates = _weighted(weight, updates, is_mean)
      extra_args |= weights.drop_none(local_step=local_step)
      return update_inner(check, updates, state, params, weight, extra_args)
    window = _collect(state, updates, weight, local_step, axes)
    is_last = collectives.agreed(window.tower_count >= num_towers)
    flags = weight is not None, local_step is not None
    return branching.run_when_due(
        is_last,
        functools.partial(end_window, flags),
        window,
        updates,
        params,
        caller=_CALLER,
        extra_args=extra_args,
    )

  return gating.gated_transformation(init_fn, step)


def _checked_weight(weight, inner):
  """Returns the weight of a tower as an array, or `None` without a weight.

  Raises:
    TypeError: If the weight has the wrong type.
    ValueError: If the weight is not a scalar, or if there is no `inner` that
      could receive the total weight.
  """
  if inner is None:
    weights.check_not_in_chain(weight, _CALLER)
  return None if weight is None else weights.as_weight(weight, (), _CALLER)


def _empty_window(params, num_towers, is_mean, axes):
  """Returns the state before the first tower, without the inner state."""
  state = TowerReduceState(
      tower_count=states.counter(),
      total=leaves_lib.accumulators(params if num_towers > 1 else ()),
      total_weight=jnp.zeros([], weights.dtype_for(params)),
      oldest_local_step=jnp.full([], _NO_STEP, jnp.int32),
      inner_state=(),
      summed=() if is_mean else SummedTowers(),
  )
  return state._replace(**states.with_shard_axis(_sums(state), axes))


def _sums(state):
  """Returns the fields of a state that are kept per shard, by name."""
  names = 'total', 'total_weight', 'oldest_local_step'
  return {name: getattr(state, name) for name in names}


def _without_shard_axis(state, axes):
  """Returns a state whose per-shard fields are the values of this shard."""
  local_sums = states.without_shard_axis(_sums(state), axes, _CALLER)
  return state._replace(**local_sums)


def _collect(state, updates, weight, local_step, axes):
  """Adds a tower to the window.

  Raises:
    TypeError: If the local step has the wrong type.
    ValueError: If updates do not fit the window, or differ between shards where
      the window does not.
  """
  window = _without_shard_axis(state, axes)
  arguments.check_like(updates, window.total, _CALLER)
  arguments.check_varies_with(updates, window.total, _CALLER)
  oldest_local_step, tower_weight = window.oldest_local_step, 1
  if weight is not None:
    tower_weight = weight.astype(window.total_weight.dtype)
  if local_step is not None:
    step = arguments.as_local_step(local_step, _CALLER)
    if weight is not None:
      # A tower of weight zero adds no gradient to the window.
      step = jnp.where(weights.sanitized(weight) > 0, step, _NO_STEP)
    oldest_local_step = jnp.minimum(oldest_local_step, step)
  add = functools.partial(_add, weights.scale_by_weight(weight))
  window = window._replace(
      tower_count=states.safe_add(state.tower_count, 1),
      total=leaves_lib.tree_map(add, window.total, updates),
      total_weight=window.total_weight + tower_weight,
      oldest_local_step=oldest_local_step,
  )
  window = window._replace(**states.with_shard_axis(_sums(window), axes))
  states.check_stays_replicated(state, window, _CALLER)
  return window


def _add(scale_by_weight, total, update):
  if total is None or update is None or leaves_lib.is_float0(update):
    return total
  update = leaves_lib.as_dtype(jnp.asarray(update), total.dtype)
  return lax.add(total, scale_by_weight(update))


def _reduced(sums, updates, params, is_mean):
  """Returns the mean or sum of the towers of a full window.

  The mean of a window without weights is that of the towers it has collected,
  even if `num_towers` has changed since the window began.

  Args:
    sums: The state with the sums of this shard.
    updates: The updates of the last tower, which determine the dtypes of the
      result.
    params: The parameters, which determine the dtypes of leaves for which the
      last tower has no gradient.
    is_mean: Whether to return the mean instead of the sum.
  """
  divisor = weights.safe_divisor(sums.total_weight) if is_mean else 1
  divisor_in = functools.cache(jnp.asarray(divisor).astype)

  def divide(total, update, param):
    if total is None:
      return update
    like = param if update is None else update
    if like is None or jnp.iscomplexobj(total) > jnp.iscomplexobj(like):
      like = total
    quotient = lax.div(total, divisor_in(total.dtype))
    return leaves_lib.as_dtype(quotient, leaves_lib.dtype_of(like))

  params = updates if params is None else params
  return leaves_lib.tree_map(divide, sums.total, updates, params)


def _weighted(weight, updates, is_mean):
  """Returns the mean or sum of a single tower; zero if its weight is zero."""
  if is_mean:
    scale = leaves_lib.where_or_zeros_fn(weight > 0)
  else:
    scale = weights.scale_by_weight(weight)

  def apply(update):
    if update is None or leaves_lib.is_float0(update) or not jnp.size(update):
      return update
    x = jnp.asarray(update)
    return leaves_lib.as_dtype(scale(leaves_lib.as_accumulator(x)), x.dtype)

  return leaves_lib.tree_map(apply, updates)


def _emptied(window):
  """Returns the state at the start of the next window."""
  zeros = functools.cache(axes_lib.zeros)
  return window._replace(
      tower_count=jnp.zeros_like(window.tower_count),
      total=jax.tree.map(lambda x: zeros(jax.typeof(x)), window.total),
      total_weight=jnp.zeros_like(window.total_weight),
      oldest_local_step=jnp.full_like(window.oldest_local_step, _NO_STEP),
  )


def _check_num_towers(state, updates, num_towers):
  """Checks that a state has sums if and only if a window has several towers.

  Raises:
    ValueError: If the state was made for one tower, and windows have several,
      or the other way around.
  """
  no_sums = jax.tree.structure(())
  if num_towers == 1:
    is_wrong = bool(jax.tree.leaves(state.total))
  else:
    is_wrong = jax.tree.structure(state.total) == no_sums
    is_wrong &= jax.tree.structure(updates) != no_sums
  if is_wrong:
    other = 'more towers' if num_towers == 1 else '`num_towers=1`'
    raise ValueError(
        f'`tower_reduce(num_towers={num_towers})` got a state that was made'
        f' with {other}. Make the state with `init` of this transformation.'
    )
