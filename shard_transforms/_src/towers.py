"""`tower_reduce`: several updates of one shard, in turn, that are one step."""

from typing import Any, Literal, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import optax

from shard_transforms._src import arguments
from shard_transforms._src import axes as axes_lib
from shard_transforms._src import collectives
from shard_transforms._src import gating
from shard_transforms._src import leaves as leaves_lib

_NO_STEP = jnp.iinfo(jnp.int32).max


class TowerReduceState(NamedTuple):
  """State of `tower_reduce`.

  With `axis_name`, `total`, `total_weight` and `oldest_local_step` differ
  between shards: their leaves have a leading axis, of length 1 inside the
  mapped function and of the number of shards outside.

  Attributes:
    tower: Number of towers collected since the last update, int32 [].
    total: Their (weighted) sum, a tree like the parameters, in float32 for
      leaves of fewer bits; `None` where there is but one tower.
    total_weight: The sum of their weights, float32 [].
    oldest_local_step: The least of their local steps, int32 []; the largest
      int32 where no tower told one.
    inner_state: State of the inner transformation.
  """

  tower: jax.Array
  total: optax.Updates | None
  total_weight: jax.Array
  oldest_local_step: jax.Array
  inner_state: optax.OptState


def tower_reduce(
    num_towers: int,
    inner: optax.GradientTransformation | None = None,
    *,
    axis_name: axes_lib.AxisName | None = None,
    reduction: Literal['mean', 'sum'] = 'mean',
) -> optax.GradientTransformationExtraArgs:
  r"""Collects the updates of several calls and applies them as one.

  Each call of `update` hands in the update of one tower. All but the last of
  `num_towers` give zero updates and leave the inner transformation alone; the
  last gives to `inner` the mean (or sum) over all of them. With the extra
  argument `weight`, a scalar :math:`w_t` a tower, that mean is

  .. math:: u = \sum_{t: w_t > 0} w_t u_t / W,
     \quad W = \sum_{t: w_t > 0} w_t

  and `inner` is handed the weight :math:`W`, so that a `cross_shard_mean`
  inside gives the mean over all tokens of all towers of all shards. With
  `reduction='sum'` the weights are used up, and `inner` is handed 1 for a shard
  that has any, else 0. Where the total over all shards is zero, nothing
  changes but the window starts again. Give `weight` with every tower of a
  window or with none.

  A tower that has no gradient for a leaf (`None` in its place) counts as zero
  there; the divisor stays. The least of the `local_step`s of a window is
  handed on; any other extra argument is the last tower's. Collectives inside
  `inner` run once a window.

  Without `inner`, the result goes to the next link of an `optax.chain`, as
  zeros in all calls but the last: right for links that keep no moments, such as
  `optax.sgd` without momentum. Weights then raise.

  Args:
    num_towers: How many updates count as one step, at least 1. With 1, `inner`
      is called as it is.
    inner: The transformation that is applied once a window.
    axis_name: The mapped axis, or a sequence of them, between whose shards the
      updates differ; the sum is then kept per shard (see `init_state`). `None`
      where updates are already the same on all shards.
    reduction: `'mean'` or `'sum'` over the towers.

  Returns:
    An `optax.GradientTransformationExtraArgs` with a `TowerReduceState`, whose
    `update` takes the optional extra arguments `weight` and `local_step`.

  Raises:
    NameError: In `init` and `update`, if an axis is not bound.
    TypeError: If `num_towers` is not an integer; in `update`, if a leaf is an
      integer or boolean, or an extra argument is of the wrong kind.
    ValueError: If `num_towers` is less than 1 or `reduction` unknown; in
      `update`, if the tree is not the one that the state was made for, updates
      are already reduced although `axis_name` is given, or differ between
      shards although it is not, or an extra argument has a wrong value.

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
    `tf.contrib.estimator.TowerOptimizer` of TensorFlow 1.15.
  """
  caller = 'tower_reduce'
  num_towers = arguments.as_num_towers(num_towers)
  arguments.check_reduction(reduction)
  axes = () if axis_name is None else axes_lib.as_axes(axis_name)
  chained = inner is None
  inner = optax.with_extra_args_support(optax.identity() if chained else inner)

  def init_fn(params):
    if axes:
      axes_lib.size(axes, caller)
    total = jax.tree.map(lambda p: _zeros(p, axes), params)
    return TowerReduceState(
        tower=jnp.zeros([], jnp.int32),
        total=total if num_towers > 1 else None,
        total_weight=_store(jnp.zeros([], jnp.float32), axes),
        oldest_local_step=_store(jnp.full([], _NO_STEP, jnp.int32), axes),
        inner_state=inner.init(params),
    )

  def update_fn(
      updates, state, params=None, *, weight=None, local_step=None, **extra_args
  ):
    leaves_lib.check_inexact(updates, caller)
    if axes:
      axes_lib.size(axes, caller)
      collectives.check_per_shard(updates, axes, caller)
    if chained and weight is not None:
      raise ValueError(
          '`weight` of `tower_reduce` must come with `inner`, got none. A link'
          ' of a chain cannot hand the total weight on to the next: write'
          ' `tower_reduce(num_towers, optax.chain(...))`.'
      )
    if num_towers == 1:
      extra_args |= _given(weight=weight, local_step=local_step)
      updates, inner_state = inner.update(
          updates, state.inner_state, params, **extra_args
      )
      return updates, state._replace(inner_state=inner_state)

    def apply_window(window):
      total_weight = _own(window.total_weight, axes)
      divisor = num_towers if weight is None else total_weight
      divisor = 1 if reduction == 'sum' else divisor
      handed_on = _given(
          weight=weight if weight is None else _handed_on(total_weight),
          local_step=local_step
          if local_step is None
          else _own(window.oldest_local_step, axes),
      )
      mean = _divide(window.total, divisor, axes, updates, params)
      run = lambda s: inner.update(mean, s, params, **extra_args, **handed_on)
      if weight is None:
        applied, inner_state = run(window.inner_state)
      else:
        applied, inner_state = gating.run_or_skip(
            collectives.total(total_weight, axes) > 0, run, window.inner_state
        )
      return applied, _emptied(window, inner_state)

    def _handed_on(total_weight):
      return jnp.sign(total_weight) if reduction == 'sum' else total_weight

    window = _collect(state, updates, weight, local_step, axes)
    is_last = collectives.agreed(window.tower >= num_towers)
    return gating.run_or_skip(is_last, apply_window, window)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _collect(state, updates, weight, local_step, axes):
  """Adds one tower to the window."""
  caller = 'tower_reduce'
  total = jax.tree.map(lambda leaf: _own(leaf, axes), state.total)
  leaves_lib.check_like(updates, total, caller)
  if weight is not None:
    weight = arguments.as_weight(weight, (), caller)
  added = jax.tree.map(
      lambda t, u: _add(t, u, weight), total, updates, is_leaf=_is_none
  )
  total_weight = _own(state.total_weight, axes)
  total_weight += 1 if weight is None else weight
  oldest = _own(state.oldest_local_step, axes)
  if local_step is not None:
    local_step = arguments.as_local_step(local_step, caller)
    oldest = jnp.minimum(oldest, local_step)
  window = TowerReduceState(
      tower=optax.safe_increment(state.tower),
      total=jax.tree.map(lambda leaf: _store(leaf, axes), added),
      total_weight=_store(total_weight, axes),
      oldest_local_step=_store(oldest, axes),
      inner_state=state.inner_state,
  )
  _check_same_axes(state, window)
  return window


def _emptied(window, inner_state):
  """Returns the state at the start of a window."""
  return TowerReduceState(
      tower=jnp.zeros_like(window.tower),
      total=jax.tree.map(jnp.zeros_like, window.total),
      total_weight=jnp.zeros_like(window.total_weight),
      oldest_local_step=jnp.full_like(window.oldest_local_step, _NO_STEP),
      inner_state=inner_state,
  )


def _check_same_axes(before, after):
  """Checks that nothing that differs between shards gets into shared state."""
  fields = ('total', 'total_weight', 'oldest_local_step')
  for field in fields:
    old, new = getattr(before, field), getattr(after, field)
    for (path, leaf), kept in zip(
        jax.tree.leaves_with_path(new), jax.tree.leaves(old), strict=True
    ):
      extra = axes_lib.varying_axes(leaf) - axes_lib.varying_axes(kept)
      if extra:
        raise ValueError(
            f'`axis_name` of `tower_reduce` must name {sorted(extra, key=str)},'
            ' because what is collected differs between those shards, at'
            f' {field}{jax.tree_util.keystr(path)}, but is kept as if it were'
            ' the same on all. Make the state with'
            ' `shard_transforms.init_state`.'
        )


def _zeros(param, axes):
  """Returns the empty sum for a parameter; `None` where it has no gradient."""
  dtype = leaves_lib.dtype_of(param)
  if not jnp.issubdtype(dtype, jnp.inexact):
    return None
  zeros = jnp.zeros_like(param, dtype=leaves_lib.accumulator_dtype(dtype))
  return _store(zeros, axes)


def _add(total, update, weight):
  if total is None or update is None or leaves_lib.is_float0(update):
    return total
  update = jnp.asarray(update, total.dtype)
  return total + collectives.weighted(update, weight)


def _divide(total, divisor, axes, updates, params):
  """Returns the mean in the dtypes of the updates."""
  # Where this tower has no gradient, an earlier one may have had the dtype of
  # the parameter.
  params = updates if params is None else params
  divisor = jnp.where(divisor > 0, divisor, 1)

  def divide(total, update, param):
    if total is None:
      return update
    like = param if update is None else update
    dtype = total.dtype if like is None else leaves_lib.dtype_of(like)
    return (_own(total, axes) / divisor).astype(dtype)

  return jax.tree.map(divide, total, updates, params, is_leaf=_is_none)


def _own(leaf, axes):
  """Takes a shard's own value out of a leaf that is kept per shard."""
  if not axes:
    return leaf
  if leaf.shape[:1] != (1,):
    raise ValueError(
        'State of `tower_reduce` with `axis_name` must have a leading axis of'
        f' length 1 on each shard, got the shape {leaf.shape}. Map it with the'
        ' specs of `shard_transforms.state_specs`.'
    )
  return leaf[0]


def _store(leaf, axes):
  return axes_lib.to_varying(leaf[None], axes) if axes else leaf


def _is_none(leaf):
  return leaf is None


def _given(**extra_args):
  return {k: v for k, v in extra_args.items() if v is not None}
