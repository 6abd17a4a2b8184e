"""`tower_reduce`: gradient accumulation over several calls of `update`."""

import functools
from typing import Literal, NamedTuple

import chex
import jax
import optax

from shard_transforms._src.base import arguments
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import weights
from shard_transforms._src.base import wrapper
from shard_transforms._src.reduction import collectives
from shard_transforms._src.reduction import tower_squares
from shard_transforms._src.tracing import gating
from shard_transforms._src.transforms import tower_window

_CALLER = 'tower_reduce'


def tower_reduce(
    num_towers: int,
    inner: optax.GradientTransformation | None = None,
    *,
    axis_name: axes_lib.AxisName | None = None,
    reduction: Literal['mean', 'sum'] = 'mean',
) -> optax.GradientTransformationExtraArgs:
  r"""Gradient accumulation: sums several updates and applies them once.

  Each call of `update` hands in the update of one tower, that is, of one
  micro-batch. All but the last of `num_towers` calls return zero updates and do
  not run `inner`; the last runs `inner` with the mean (or sum) over all towers.
  With the extra argument `weight`, a scalar :math:`w_t` a tower, that mean is

  .. math:: u = \sum_{t: w_t > 0} w_t u_t / W,
     \quad W = \sum_{t: w_t > 0} w_t

  and `inner` is handed the weight :math:`W`, so that a `cross_shard_mean`
  inside gives the mean over all tokens of all towers of all shards. With
  `reduction='sum'` the sum contains the weights, and `inner` is handed 1 for a
  shard that has any, else 0. Where the total over all shards is zero, the
  update is zero, `inner` is not run, and the window starts again. Give `weight`
  with every tower of a window or with none.

  A tower that has no gradient for a leaf (`None` in its place) counts as zero
  there; the divisor stays. The minimum of the `local_step`s of a window is
  passed on; any other extra argument is the last tower's. Collectives inside
  `inner` run once a window.

  Without `inner`, the result goes to the next link of an `optax.chain`, as
  zeros in all calls but the last: right for links that keep no moments, such as
  `optax.sgd` without momentum. Weights then raise, and the next link sees the
  last tower's `local_step`.

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
    TypeError: If `num_towers` is not an integer, or `inner` no transformation;
      in `update`, if a leaf is an integer or boolean, an extra argument is of
      the wrong kind, or the state is of another transformation.
    ValueError: If `num_towers` is less than 1 or `reduction` unknown; in
      `update`, if the tree is not the one that the state was made for, updates
      are already reduced although `axis_name` is given, or differ between
      shards although it is not, an extra argument has a wrong value, or `inner`
      reduces over shards without the weight.

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
  num_towers = arguments.as_at_least('num_towers', num_towers, 1)
  arguments.check_reduction(reduction)
  axes = axes_lib.optional_axes(axis_name)
  is_link = inner is None
  inner = wrapper.as_inner(optax.identity() if is_link else inner, _CALLER)

  def init_fn(params):
    axes_lib.size(axes, _CALLER)
    inner_state = inner.init(params)
    if num_towers == 1:
      return tower_window.start((), inner_state, (), axes)
    squares = ()
    if reduction == 'mean':
      squares = tower_squares.start(inner_state, axes)
    return tower_window.start(params, inner_state, squares, axes)

  def step(
      gate,
      updates,
      state,
      params=None,
      *,
      weight=None,
      local_step=None,
      **extra_args,
  ):
    wrapper.check_update(
        updates, state, tower_window.TowerReduceState, axes, _CALLER
    )
    if is_link:
      weights.check_not_in_chain(weight, _CALLER)
    if num_towers == 1:
      extra_args |= weights.given(weight=weight, local_step=local_step)
      return _apply_alone(gate, inner, updates, state, params, extra_args)

    tower = _Tower(updates, weight, local_step)
    window = tower_window.collect(state, updates, weight, local_step, axes)
    is_last = collectives.agreed(window.tower >= num_towers)
    end = functools.partial(
        _end, gate, inner, tower, num_towers, reduction, axes
    )
    return gate.run_or_skip(
        is_last, end, window, params, extra_args=extra_args, seldom=True
    )

  return gating.transformation(init_fn, step)


def _apply_alone(gate, inner, updates, state, params, extra_args):
  """Applies a single tower; refuses a state of several towers.

  Raises:
    ValueError: If the state is that of several towers.
  """
  if jax.tree.leaves(state.total):
    raise ValueError(
        'State of `tower_reduce` must be made for as many towers, got that of a'
        ' window of several where `num_towers` is 1. Make it with `init`.'
    )
  applied, inner_state = gate.update(
      inner, updates, state.inner_state, params, **extra_args
  )
  return applied, state._replace(inner_state=inner_state)


class _Tower(NamedTuple):
  """The arguments of the last tower of a window."""

  updates: optax.Updates
  weight: chex.Numeric | None
  local_step: chex.Numeric | None


def _end(
    gate,
    inner,
    last,
    num_towers,
    reduction,
    axes,
    window,
    params,
    /,
    **extra_args,
):
  """Applies the mean or sum of a full window, and empties the window.

  With weights that are zero on all shards, the inner state stays as it is.
  """
  reduced, total_weight, oldest = tower_window.reduce(
      window,
      reduction,
      num_towers if last.weight is None else None,
      axes,
      last.updates,
      params,
  )
  if last.local_step is not None:
    extra_args['local_step'] = oldest
  if not isinstance(window.tower_squares, tuple):
    extra_args['tower_squares'] = tower_squares.of_window(
        window.tower_squares, total_weight, reduced, axes
    )
  if last.weight is None:
    applied, inner_state = gate.update(
        inner, reduced, window.inner_state, params, **extra_args
    )
  else:
    applied, inner_state = gate.update_or_skip(
        collectives.total(total_weight, axes) > 0,
        inner,
        reduced,
        window.inner_state,
        params,
        weight=weights.handed_on(total_weight, reduction),
        axes=axes,
        extra_args=extra_args,
    )
  return applied, tower_window.emptied(window, inner_state)
