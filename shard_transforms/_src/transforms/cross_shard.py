"""`cross_shard_mean`, `cross_shard_sum`: reductions of updates over shards."""

import chex
import jax
import jax.numpy as jnp
import optax

from shard_transforms._src.base import axes
from shard_transforms._src.base import groups as groups_lib
from shard_transforms._src.reduction import leaf_sums


def cross_shard_mean(
    axis_name: axes.AxisName,
    *,
    groups: groups_lib.GroupsLike | None = None,
    if_reduced: leaf_sums.IfReduced = 'error',
) -> optax.GradientTransformationExtraArgs:
  r"""Replaces updates by their mean over all shards of a mapped axis.

  With the extra argument `weight`, one scalar :math:`w_i` per shard, the mean
  is

  .. math:: u \leftarrow \sum_{i: w_i > 0} w_i u_i / \sum_{i: w_i > 0} w_i

  With token counts as weights, uneven batches count by their tokens. A shard of
  weight zero does not count at all, even if its update is NaN. Weights that are
  negative or not finite count as zero, and if the total weight is zero, the
  update is zero. Without `weight`, all shards count equally. Updates are
  multiplied by their weights in float32, or in the dtype of a wider leaf,
  before the division by the sum of the weights. Weights near 1e-30 or 1e30 can
  therefore underflow or overflow; divide them by the largest weight first.

  Put this transformation where per-shard gradients become one gradient: before
  transformations that keep moments, before clipping by the global norm, and
  after clipping each shard by its own norm. The axis must be bound: call
  `update` inside `jax.shard_map`, `jax.pmap` or `jax.vmap`. Under
  `jax.shard_map`, compute the gradient with `shard_transforms.value_and_grad`,
  or with respect to `shard_transforms.per_shard` parameters; a gradient that
  JAX has already summed raises an error.

  Leaves of fewer than 32 bits are summed in float32 and cast back. Complex
  leaves are reduced like real leaves. `None`, `optax.MaskedNode` and `float0`
  leaves pass through unchanged.

  Args:
    axis_name: The mapped axis to reduce over, or a sequence of mapped axes.
    groups: A partition of the shards into groups of equal size, such as
      `[[0, 1], [2, 3]]`. Each group reduces only among its own shards. The
      result then differs between shards; see `init_state(..., stacked=True)`.
    if_reduced: The treatment of a leaf whose type shows that it is the same
      on all shards: `'error'` raises an error; `'mean'` assumes that the
      leaf is already the mean, and returns it without communication.

  Returns:
    An `optax.GradientTransformationExtraArgs` without state, whose `update`
    takes the optional extra argument `weight`.

  Raises:
    NameError: In `update`, if an axis is not bound.
    TypeError: If an argument has the wrong type; in `update`, if a leaf is an
      integer or boolean, or `weight` is not a real number.
    ValueError: If an argument has an invalid value, such as groups of different
      sizes; in `update`, if a leaf is already reduced, if `weight` is not a
      scalar, or is a negative concrete value, if the groups do not fit the
      axis, or if types show that `params` are slices over the axis (FSDP).

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import shard_transforms
    >>> tx = shard_transforms.cross_shard_mean('data')
    >>> def reduce(update, weight):
    ...   return tx.update(update, tx.init(update), weight=weight)[0]
    >>> reduce = jax.vmap(reduce, axis_name='data')
    >>> print(reduce(jnp.array([1.0, 3.0, jnp.nan]), jnp.array([3, 1, 0])))
    [1.5 1.5 1.5]

  References:
    `tf.contrib.tpu.CrossShardOptimizer` of TensorFlow 1.15 with
    `reduction=Reduction.MEAN`.
  """
  return _cross_shard('mean', axis_name, groups, if_reduced)


def cross_shard_sum(
    axis_name: axes.AxisName,
    *,
    groups: groups_lib.GroupsLike | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Replaces updates by their sum over all shards of a mapped axis.

  With the extra argument `weight`, one scalar :math:`w_i` per shard, the sum is
  :math:`\sum_{i: w_i > 0} w_i u_i`. In all other respects, this is like
  `cross_shard_mean`.

  Args:
    axis_name: The mapped axis to reduce over, or a sequence of mapped axes.
    groups: A partition of the shards into groups of equal size. Each group
      reduces only among its own shards.

  Returns:
    An `optax.GradientTransformationExtraArgs` without state, whose `update`
    takes the optional extra argument `weight`.

  Raises:
    NameError: In `update`, if an axis is not bound.
    TypeError: As in `cross_shard_mean`.
    ValueError: As in `cross_shard_mean`.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import shard_transforms
    >>> tx = shard_transforms.cross_shard_sum('data', groups=[[0, 2], [1, 3]])
    >>> reduce = lambda update: tx.update(update, tx.init(update))[0]
    >>> x = jnp.array([1.0, 2.0, 5.0, 9.0])
    >>> print(jax.vmap(reduce, axis_name='data')(x))
    [ 6. 11.  6. 11.]

  References:
    `tf.contrib.tpu.CrossShardOptimizer` of TensorFlow 1.15 with
    `reduction=Reduction.SUM`.
  """
  return _cross_shard('sum', axis_name, groups, 'error')


def shard_mean(
    tree: chex.ArrayTree,
    axis_name: axes.AxisName,
    *,
    weight: chex.Numeric | None = None,
    if_reduced: leaf_sums.IfReduced = 'error',
) -> chex.ArrayTree:
  """Returns the (weighted) mean of a tree over all shards of a mapped axis.

  This is `cross_shard_mean` as a function, for losses, metrics and batch
  statistics.

  Args:
    tree: Tree of arrays of any shapes; integers and booleans become float32.
    axis_name: The mapped axis, or a sequence of mapped axes.
    weight: One scalar per shard, such as its token count, or `None`.
    if_reduced: The treatment of a leaf that is the same on all shards; see
      `cross_shard_mean`. `'mean'` returns the leaf unchanged.

  Returns:
    A tree of the same shapes, the same on all shards.

  Raises:
    NameError: If an axis is not bound.
    TypeError: If an argument has the wrong type.
    ValueError: If a leaf is already reduced, or an argument has an invalid
      value.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import shard_transforms
    >>> mean = lambda x, w: shard_transforms.shard_mean(x, 'data', weight=w)
    >>> losses, tokens = jnp.array([1.0, 3.0]), jnp.array([30, 10])
    >>> print(jax.vmap(mean, axis_name='data')(losses, tokens))
    [1.5 1.5]
  """
  mean = leaf_sums.Reduction(
      'shard_mean',
      'mean',
      axes.as_axes(axis_name),
      if_reduced=if_reduced,
  )
  return mean(jax.tree.map(_as_float, tree), weight)


def _cross_shard(kind, axis_name, groups, if_reduced):
  reduction = leaf_sums.Reduction(
      f'cross_shard_{kind}',
      kind,
      axes.as_axes(axis_name),
      None if groups is None else groups_lib.as_groups(groups),
      if_reduced,
  )

  def init_fn(params):
    # Parameters may be marked as per shard, for moments before the reduction,
    # so they are not checked here.
    del params
    return optax.EmptyState()

  def update_fn(updates, state, params=None, *, weight=None, **extra_args):
    del extra_args
    # Updates that are already reduced get their own error first.
    reduced = reduction(updates, weight)
    if params is not None:
      reduction.check_params(params)
    return reduced, state

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _as_float(leaf):
  exact = not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
  return jnp.asarray(leaf, jnp.float32) if exact else leaf
