"""Accumulation of towers on a shard, and the step at the end of a window."""

from collections.abc import Callable
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shard_transforms._src.base import arguments
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import states
from shard_transforms._src.base import weights
from shard_transforms._src.gates import branching
from shard_transforms._src.gates import selection
from shard_transforms._src.reduction import collectives
from shard_transforms.contrib._src import arguments as contrib_arguments
from shard_transforms.contrib._src.reproducible import partial_sums
from shard_transforms.contrib._src.reproducible import tree_reduction


def _total_rule(state, _):
  """Returns the resize rule of partial sums, which are empty between steps."""
  return _unfinished_window_rule(state) or states.Rule(resize='reset')


def _total_weight_rule(state, _):
  """Returns the resize rule of the weights of partial sums.

  A different number of rows belongs to a step with a different number of
  towers, and is refused.
  """
  return _unfinished_window_rule(state) or states.Rule(resize='sum')


def _unfinished_window_rule(state):
  """Returns the rule for an unfinished window, or `None` between steps."""
  if not np.any(state.tower_count):
    return None
  return states.Rule(
      reason=(
          'The partial sums at {name} belong to an unfinished window'
          f' (`tower_count={state.tower_count}`), and fit only the old number'
          ' of shards. Finish the window before you convert the state. Or'
          ' discard the window: convert the result of'
          ' `optax.tree_utils.tree_set(state, tower_count=np.int32(0))`, and'
          ' repeat the window from its first tower.'
      ),
  )


class ReproducibleState(NamedTuple):
  """State of `tower_reduce` and of `sharded_tower_reduce`.

  Partial sums differ between shards: they have a leading axis, of length 1
  inside the mapped function and of the number of shards outside. Row l is the
  sum of 2**l towers, and is in use if bit l of `tower_count` is 1.

  Attributes:
    tower_count: Number of towers collected since the last update, int32 [].
    total: Partial sums of the (weighted) updates of the towers, a tree like the
      parameters with an additional axis of log2 `num_towers`, at least 1, in
      float32 for leaves of fewer bits.
    total_weight: Partial sums of the weights of the towers, with one row per
      level of the tree over all towers of all shards; float32, or float64 if a
      parameter is.
    inner_state: State of the inner transformation; for `sharded_tower_reduce`,
      a `ShardUpdateState`.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import shard_transforms
    >>> from shard_transforms.contrib import reproducible
    >>> mesh = jax.make_mesh((8,), ('data',))
    >>> tx = reproducible.tower_reduce(4, optax.sgd(0.1), 'data')
    >>> state = shard_transforms.init_state(tx, jnp.zeros(3), mesh)
    >>> print(state.total.shape, state.total_weight.shape)
    (8, 2, 3) (8, 6)
  """

  tower_count: jax.Array
  total: optax.Updates
  total_weight: jax.Array
  inner_state: optax.OptState

  rules = {
      'tower_count': states.Rule(metric='same'),
      'total': states.Rule(resize=_total_rule),
      'total_weight': states.Rule(resize=_total_weight_rule),
  }


def transformation(
    num_towers: int,
    reduction: tree_reduction.TreeReduction,
    init: optax.TransformInitFn,
    finish: Callable[..., tuple[optax.Updates, optax.OptState]],
) -> optax.GradientTransformationExtraArgs:
  """Returns a transformation that collects towers.

  Args:
    num_towers: The number of towers of a shard.
    reduction: The reduction over shards.
    init: The function that returns the inner state.
    finish: The function that returns the updates of a full window, and the next
      inner state. Its arguments are the inner state, the parameters, the sums
      of a shard, the total weight of all shards, updates with the dtypes of the
      result, and the extra arguments.

  Raises:
    TypeError: If `num_towers` is not an integer.
    ValueError: If it is not a power of two.
  """
  num_towers = arguments.as_at_least('num_towers', num_towers, 1)
  tree_reduction.check_power_of_two('`num_towers`', num_towers)
  row = functools.partial(partial_sums.full_row, num_towers=num_towers)

  def num_levels():
    return (num_towers * reduction.num_shards()).bit_length()

  def init_fn(params):
    total = partial_sums.empty(params, num_towers)
    total_weight = jnp.zeros(num_levels(), weights.dtype_for(params))
    total, total_weight = states.with_shard_axis(
        (total, total_weight), reduction.axes
    )
    return ReproducibleState(
        states.counter(), total, total_weight, init(params)
    )

  def update_fn(updates, state, params=None, *, weight=None, **extra_args):
    _check(updates, state, num_levels(), reduction)
    reduction.check_params(params)
    window = _collect(updates, state, weight, reduction)
    is_weighted = weight is not None

    # `end` must not close over arrays: `jax.checking_leaks` would report them.
    def end(window, updates, params, /, **extra_args):
      total, total_weight = states.without_shard_axis(
          (window.total, window.total_weight), reduction.axes, reduction.caller
      )
      sums = jax.tree.map(row, total)
      like = leaves_lib.tree_map(
          _like, sums, updates, updates if params is None else params
      )
      total = reduction.total(row(total_weight) if is_weighted else num_towers)
      before = window.inner_state
      updates, inner_state = finish(
          before, params, sums, total, like, extra_args
      )
      accept = total > 0 if is_weighted else None
      updates, inner_state = selection.select(
          accept, updates, inner_state, before, reduction.caller
      )
      tower_count = jnp.zeros_like(window.tower_count)
      return updates, window._replace(
          tower_count=tower_count, inner_state=inner_state
      )

    is_last = collectives.agreed(window.tower_count >= num_towers)
    return branching.run_when_due(
        is_last,
        end,
        window,
        updates,
        params,
        caller=reduction.caller,
        extra_args=extra_args,
    )

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _check(updates, state, num_levels, reduction):
  """Checks the arguments of `update`, before any arithmetic.

  Raises:
    TypeError: If a leaf is an integer, or the state is from another
      transformation.
    ValueError: If updates are reduced, or the state is for a step with another
      number of towers.
  """
  caller = reduction.caller
  arguments.check_state(state, ReproducibleState, caller)
  leaves_lib.check_inexact(updates, caller)
  leaves_lib.check_per_shard(updates, reduction.axes, caller)
  contrib_arguments.check_not_explicit(updates, caller)
  state_levels = jnp.shape(state.total_weight)[-1]
  if state_levels != num_levels:
    raise ValueError(
        f'The state of `{caller}` was created for steps of'
        f' {1 << (state_levels - 1)} towers on all shards together, but this'
        f' step has {1 << (num_levels - 1)}. The number of shards times'
        ' `num_towers` must stay the same: change `num_towers`, and, if the'
        ' number of shards has changed, convert the state with'
        ' `shard_transforms.resize_state`. For another product, create a new'
        ' state with `init_state`.'
    )


def _collect(updates, state, weight, reduction):
  """Returns the window with one more tower.

  Raises:
    TypeError: If the weight is not a real number.
    ValueError: If the weight has a wrong value, updates do not fit the window,
      or updates differ between shards where the window does not.
  """
  axes, caller = reduction.axes, reduction.caller
  total, total_weight = states.without_shard_axis(
      (state.total, state.total_weight), axes, caller
  )
  zeros = jax.tree.map(partial_sums.zero, total)
  arguments.check_like(updates, zeros, caller)
  arguments.check_varies_with(updates, zeros, caller)
  tower_weight = jnp.ones([], total_weight.dtype)
  if weight is not None:
    weight = weights.as_weight(weight, (), caller)
    tower_weight = weight.astype(total_weight.dtype)
  weigh = weights.scale_by_weight(weight)

  def add(rows, zero, update):
    if rows is None:
      return None
    if update is None or leaves_lib.is_float0(update):
      update = zero
    update = leaves_lib.as_dtype(jnp.asarray(update), rows.dtype)
    return partial_sums.add(rows, weigh(update), state.tower_count)

  total = leaves_lib.tree_map(add, total, zeros, updates)
  total_weight = partial_sums.add(total_weight, tower_weight, state.tower_count)
  total, total_weight = states.with_shard_axis((total, total_weight), axes)
  tower_count = states.safe_add(state.tower_count, 1)
  window = ReproducibleState(
      tower_count, total, total_weight, state.inner_state
  )
  states.check_stays_replicated(state, window, caller)
  return window


def _like(total, update, param):
  """Returns a leaf with the dtype of the result of a window."""
  if total is None:
    return update
  like = param if update is None else update
  if like is None or jnp.iscomplexobj(total) > jnp.iscomplexobj(like):
    return total
  return leaves_lib.as_dtype(total, leaves_lib.dtype_of(like))
