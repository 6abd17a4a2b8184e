"""`reduce_stacked_towers`: gradient accumulation over stacked updates."""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
import optax

from shard_transforms._src.base import arguments
from shard_transforms._src.base import axes
from shard_transforms._src.base import leaves
from shard_transforms._src.base import weights

_CALLER = 'reduce_stacked_towers'


def reduce_stacked_towers(
    num_towers: int,
    inner: optax.GradientTransformation | None = None,
    *,
    reduction: Literal['mean', 'sum'] = 'mean',
) -> optax.GradientTransformationExtraArgs:
  r"""Gradient accumulation: reduces a leading axis of updates to one update.

  Each leaf [num_towers, ...] is replaced by its mean (or sum) [...] over the
  towers, that is, micro-batches. Such leaves come from
  `jax.vmap(jax.grad(...))` over a batch that was split into towers. With the
  extra argument `weight`, one scalar :math:`w_t` per tower, the mean is

  .. math:: u = \sum_{t: w_t > 0} w_t u_t / W,
     \quad W = \sum_{t: w_t > 0} w_t

  and `inner` receives the weight :math:`W`, a scalar, so that a
  `cross_shard_mean` inside computes the mean over all tokens. With
  `reduction='sum'`, `inner` receives the weight 1 if :math:`W > 0`, else 0. If
  the total weight is zero, the update is zero. If there is one `local_step` per
  tower, `inner` receives the minimum.

  `tower_reduce` does the same for towers that arrive in separate calls.

  Args:
    num_towers: The length of the leading axis, at least 1.
    inner: The transformation that receives the result. `None` passes the result
      to the next transformation of an `optax.chain`, in which case `weight`
      raises an error.
    reduction: `'mean'` or `'sum'` over the towers.

  Returns:
    An `optax.GradientTransformationExtraArgs` whose state is that of `inner`
    for the parameters, which have no axis of towers. Its `update` takes the
    optional extra arguments `weight` [num_towers] and `local_step`, [] or
    [num_towers].

  Raises:
    TypeError: If `num_towers` is not an integer, or `inner` is not a
      transformation; in `update`, if a leaf is an integer or boolean, or an
      extra argument has the wrong type.
    ValueError: If `num_towers` is less than 1, or `reduction` is unknown; in
      `update`, if a leaf lacks the leading axis, if updates are already reduced
      over an axis over which their weights differ, or if an extra argument has
      an invalid value.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import shard_transforms
    >>> tx = shard_transforms.reduce_stacked_towers(2, optax.sgd(1.0))
    >>> towers = jnp.array([[1.0, 1.0], [5.0, 9.0]])
    >>> state = tx.init(jnp.zeros(2))
    >>> print(tx.update(towers, state, weight=jnp.array([30, 10]))[0])
    [-2. -3.]

  References:
    `tf.contrib.estimator.TowerOptimizer` of TensorFlow 1.15.
  """
  num_towers = arguments.as_at_least('num_towers', num_towers, 1)
  arguments.check_reduction(reduction)
  is_link = inner is None
  inner = arguments.as_inner(optax.identity() if is_link else inner, _CALLER)

  def update_fn(
      updates, state, params=None, *, weight=None, local_step=None, **extra_args
  ):
    leaves.check_inexact(updates, _CALLER)
    _check_stacked(updates, num_towers)
    if is_link:
      weights.check_not_in_chain(weight, _CALLER)
    divisor = num_towers
    if weight is not None:
      weight = weights.as_weight(weight, (num_towers,), _CALLER)
      differs = tuple(axes.varying_axes(weight))
      leaves.check_per_shard(updates, differs, _CALLER)
      total_weight = _sum(weight, None)
      divisor = weights.safe_divisor(total_weight)
      extra_args['weight'] = weights.outgoing_weight(total_weight, reduction)
    if local_step is not None:
      step = arguments.as_local_step(local_step, _CALLER, (num_towers,))
      extra_args['local_step'] = jnp.min(step)
    divisor = 1 if reduction == 'sum' else divisor
    reduce = functools.partial(_reduce, weight=weight, divisor=divisor)
    reduced = jax.tree.map(reduce, updates)
    return inner.update(reduced, state, params, **extra_args)

  return optax.GradientTransformationExtraArgs(inner.init, update_fn)


def _reduce(towers, weight, divisor):
  """Returns the sum of a leaf over its towers, divided by `divisor`."""
  if leaves.is_float0(towers):
    return towers[0]
  total = _sum(towers, weight)
  return (total / jnp.asarray(divisor, total.dtype)).astype(towers.dtype)


def _sum(towers, weight):
  towers = jnp.asarray(towers, leaves.accumulator_dtype(towers.dtype))
  if len(towers) == 1 and weight is None:
    return towers[0]
  if weight is not None:
    weight = weight.reshape((-1,) + (1,) * (towers.ndim - 1))
  towers = weights.scale_by_weight(weight)(towers)
  return jnp.sum(towers, axis=0)


def _check_stacked(updates, num_towers):
  for path, leaf in jax.tree.leaves_with_path(updates):
    if jnp.shape(leaf)[:1] != (num_towers,):
      raise ValueError(
          '`updates` of `reduce_stacked_towers` must have a leading axis of'
          f' {num_towers} towers, got the shape {jnp.shape(leaf)} at'
          f' {leaves.name_of(path)}.'
      )
