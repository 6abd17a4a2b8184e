"""`reduce_stacked_towers`: gradient accumulation over stacked updates."""

import dataclasses
import functools
from typing import Literal

import jax
import jax.numpy as jnp
import optax

from shard_transforms._src.base import arguments
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves
from shard_transforms._src.base import weights
from shard_transforms._src.gates import gating

_CALLER = 'reduce_stacked_towers'
_NO_STEP = jnp.iinfo(jnp.int32).max


def reduce_stacked_towers(
    num_towers: int,
    inner: optax.GradientTransformation | None = None,
    *,
    reduction: Literal['mean', 'sum'] = 'mean',
    assume_weighted: bool = False,
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
  tower, `inner` receives the minimum over the towers with positive weight, or
  the largest int32 if there is no such tower.

  `tower_reduce` does the same for towers that arrive in separate calls.

  Args:
    num_towers: The length of the leading axis, at least 1.
    inner: The transformation that receives the result. `None` passes the result
      to the next transformation of an `optax.chain`, in which case `weight`
      raises an error.
    reduction: `'mean'` or `'sum'` over the towers.
    assume_weighted: Turns off the check that `inner` uses `weight` in all its
      sums over shards with different weights. Set it only if `inner` is refused
      although it uses the weight, or if the weights are the same on these
      shards but JAX does not track types: a sum without the weight counts all
      shards equally, without an error.

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
      over an axis over which their weights differ, if an extra argument has an
      invalid value, or if `inner` reduces over shards without the weight.

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
  gate = gating.make_gate(_CALLER, inner, (), assume_weighted)

  def update_fn(
      updates, state, params=None, *, weight=None, local_step=None, **extra_args
  ):
    leaves.check_inexact(updates, _CALLER)
    _check_stacked(updates, num_towers)
    if inner is None:
      weights.check_not_in_chain(weight, _CALLER)
    total_weight, divisor, axes = None, num_towers, ()
    if weight is not None:
      weight = weights.as_weight(weight, (num_towers,), _CALLER)
      differs = tuple(axes_lib.varying_axes(weight))
      leaves.check_per_shard(updates, differs, _CALLER)
      axes = axes_lib.possibly_varying_axes(weight)
      total_weight = _sum(weight, None)
      divisor = weights.safe_divisor(total_weight)
      total_weight = weights.outgoing_weight(total_weight, reduction)
    if local_step is not None:
      extra_args['local_step'] = _oldest(local_step, weight, num_towers)
    divisor = 1 if reduction == 'sum' else divisor
    reduce = functools.partial(_reduce, weight=weight, divisor=divisor)
    _, updates, state = dataclasses.replace(gate, axes=axes).update_or_skip(
        gating.WeightCheck(),
        None,
        jax.tree.map(reduce, updates),
        state,
        params,
        total_weight,
        extra_args,
    )
    return updates, state

  return optax.GradientTransformationExtraArgs(gate.inner.init, update_fn)


def _oldest(local_step, weight, num_towers):
  """Returns the smallest local step of the towers with positive weight."""
  step = arguments.as_local_step(local_step, _CALLER, (num_towers,))
  # One step for all towers does not depend on their weights.
  if weight is not None and step.ndim:
    step = jnp.where(weight > 0, step, _NO_STEP)
  return jnp.min(step)


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
          f' {leaves.name_of(path)}. Stack the gradients of all towers, for'
          ' example with `jax.vmap(jax.grad(...))` over the towers.'
      )
