"""`cross_shard_mean` and `cross_shard_sum`: one update from all shards."""

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
    on_invariant: leaf_sums.OnInvariant = 'error',
) -> optax.GradientTransformationExtraArgs:
  r"""Replaces updates by their mean over all shards of a mapped axis.

  With the extra argument `weight`, a scalar :math:`w_i` a shard,

  .. math:: u \leftarrow \sum_{i: w_i > 0} w_i u_i / \sum_{i: w_i > 0} w_i

  so that uneven batches count by their tokens, and a shard of weight zero does
  not count at all, even where its update is NaN. Weights that are negative or
  not finite count as zero; a total of zero gives a zero update. Without
  `weight`, all shards count the same. Weights are multiplied in float32, or in
  the dtype of a wider leaf, before they are divided by their sum: in place of
  numbers near 1e-30 or 1e30, give them as multiples of their largest.

  Put it where per-shard gradients become one: before whatever keeps moments,
  before clipping by the global norm, after clipping each shard by its own. The
  axis must be bound: call `update` inside `jax.shard_map`, `jax.pmap` or
  `jax.vmap`. Under `jax.shard_map`, take the gradient with
  `shard_transforms.value_and_grad` or of `shard_transforms.per_shard`
  parameters; a gradient that JAX has summed already raises.

  Leaves of fewer than 32 bits are summed in float32 and cast back; complex
  leaves are reduced like real ones; `None`, `optax.MaskedNode` and `float0`
  leaves pass.

  Args:
    axis_name: The mapped axis to reduce over, or a sequence of them.
    groups: A partition of the shards into groups of one size, such as
      `[[0, 1], [2, 3]]`, each of which reduces among itself. The result then
      differs between shards; see `init_state(..., per_shard=True)`.
    on_invariant: How to read a leaf whose type says that it is the same on all
      shards: `'error'`, or `'averaged'`, which leaves it as it is and sends
      nothing.

  Returns:
    An `optax.GradientTransformationExtraArgs` without state, whose `update`
    takes the optional extra argument `weight`.

  Raises:
    NameError: In `update`, if an axis is not bound.
    TypeError: If an argument is of the wrong kind; in `update`, if a leaf is
      an integer or boolean, or `weight` is not a real number.
    ValueError: If an argument has a wrong value, such as groups of different
      sizes; in `update`, if a leaf is already reduced, `weight` is not a
      scalar or known to be negative, the groups do not fit the axis, or types
      show that `params` are slices over the axis (FSDP).

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
  return _cross_shard('mean', axis_name, groups, on_invariant)


def cross_shard_sum(
    axis_name: axes.AxisName,
    *,
    groups: groups_lib.GroupsLike | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Replaces updates by their sum over all shards of a mapped axis.

  With the extra argument `weight`, a scalar :math:`w_i` a shard, the sum is
  :math:`\sum_{i: w_i > 0} w_i u_i`. All else is as in `cross_shard_mean`.

  Args:
    axis_name: The mapped axis to reduce over, or a sequence of them.
    groups: A partition of the shards into groups of one size, each of which
      reduces among itself.

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
    on_invariant: leaf_sums.OnInvariant = 'error',
) -> chex.ArrayTree:
  """Returns the (weighted) mean of a tree over all shards of a mapped axis.

  The rule of `cross_shard_mean`, as a function, for losses, metrics and batch
  statistics.

  Args:
    tree: Tree of arrays of any shapes; integers and booleans give float32.
    axis_name: The mapped axis, or a sequence of them.
    weight: A scalar a shard, such as its number of tokens, or `None`.
    on_invariant: How to read a leaf that is the same on all shards; see
      `cross_shard_mean`. `'averaged'` leaves it as it is.

  Returns:
    A tree of the same shapes, the same on all shards.

  Raises:
    NameError: If an axis is not bound.
    TypeError: If an argument is of the wrong kind.
    ValueError: If a leaf is already reduced, or an argument has a wrong value.

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
      on_invariant=on_invariant,
  )
  return mean(jax.tree.map(_as_float, tree), weight)


def _cross_shard(kind, axis_name, groups, on_invariant):
  reduction = leaf_sums.Reduction(
      f'cross_shard_{kind}',
      kind,
      axes.as_axes(axis_name),
      None if groups is None else groups_lib.as_groups(groups),
      on_invariant,
  )

  def init_fn(params):
    # These may be marked as per shard, for moments before the reduction.
    del params
    return optax.EmptyState()

  def update_fn(updates, state, params=None, *, weight=None, **extra_args):
    del extra_args
    reduced = reduction(updates, weight)
    if params is not None:
      reduction.check_params(params)
    return reduced, state

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _as_float(leaf):
  exact = not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
  return jnp.asarray(leaf, jnp.float32) if exact else leaf
