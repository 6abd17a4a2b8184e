"""Means and sums with the same bits on any number of shards."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from shard_transforms._src.base import arguments
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import weights
from shard_transforms.contrib._src import arguments as contrib_arguments
from shard_transforms.contrib._src.reproducible import tree_reduction
from shard_transforms.contrib._src.reproducible import tree_sums


def cross_shard_mean(
    axis_name: axes_lib.AxisName, *, num_towers: int | None = None
) -> optax.GradientTransformationExtraArgs:
  """Averages updates, with the same bits on any number of shards.

  Like `shard_transforms.cross_shard_mean`, but updates are added in the order
  of a balanced binary tree: first the updates of neighbouring shards, then
  neighbouring pairs, and so on. With `num_towers`, each leaf is a stack
  [num_towers, ...] of the updates of that many micro-batches, which are added
  in the same tree, and the mean is over all micro-batches of all shards. A step
  has the same bits on 2, 4 and 8 shards if the gradient of each micro-batch
  has.

  Shards exchange halves, then gather, which sends as many bytes as a ring
  all-reduce.

  Args:
    axis_name: The mapped axis, or a sequence of axes, whose shards are added.
      Their number must be a power of two.
    num_towers: The number of updates that a leaf stacks, a power of two; `None`
      if a leaf is a single update.

  Returns:
    An `optax.GradientTransformationExtraArgs` without state, whose `update`
    takes the optional extra argument `weight`, one scalar per shard, or
    [num_towers]. Weights are not normalized before they multiply the updates:
    the products must be in the range of float32.

  Raises:
    NameError: In `update`, if an axis is not bound.
    TypeError: If an argument has the wrong type; in `update`, if a leaf is an
      integer or boolean, or `weight` is not a real number.
    ValueError: If `num_towers` is not a power of two; in `update`, if the
      number of shards is not a power of two, a leaf is already reduced or lacks
      the leading axis, or `weight` is negative or of another shape.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from shard_transforms.contrib import reproducible
    >>> mean = reproducible.cross_shard_mean('data')
    >>> def step(x):
    ...   return mean.update(x, mean.init(x))[0]
    >>> print(jax.vmap(step, axis_name='data')(jnp.array([1.0, 2.0, 3.0, 6.0])))
    [3. 3. 3. 3.]
  """
  return _cross_shard('mean', axis_name, num_towers)


def cross_shard_sum(
    axis_name: axes_lib.AxisName, *, num_towers: int | None = None
) -> optax.GradientTransformationExtraArgs:
  """Sums updates, with the same bits on any number of shards.

  Like `cross_shard_mean` of this module, without the division. The sum includes
  the weights.

  Args:
    axis_name: As in `cross_shard_mean`.
    num_towers: As in `cross_shard_mean`.

  Returns:
    An `optax.GradientTransformationExtraArgs` without state, like
    `cross_shard_mean`.

  Raises:
    NameError: As in `cross_shard_mean`.
    TypeError: As in `cross_shard_mean`.
    ValueError: As in `cross_shard_mean`.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from shard_transforms.contrib import reproducible
    >>> total = reproducible.cross_shard_sum('data', num_towers=2)
    >>> def step(towers):
    ...   return total.update(towers, total.init(towers[0]))[0]
    >>> towers = jnp.array([[1.0, 2.0], [3.0, 6.0]])
    >>> print(jax.vmap(step, axis_name='data')(towers))
    [12. 12.]
  """
  return _cross_shard('sum', axis_name, num_towers)


def _cross_shard(kind, axis_name, num_towers):
  caller = f'reproducible.cross_shard_{kind}'
  if num_towers is not None:
    num_towers = arguments.as_at_least('num_towers', num_towers, 1)
    tree_reduction.check_power_of_two('`num_towers`', num_towers)
  leading_shape = () if num_towers is None else (num_towers,)
  axes = axes_lib.as_axes(axis_name)
  reduction = tree_reduction.TreeReduction(caller, kind, axes)

  def init_fn(params):
    del params
    return optax.EmptyState()

  def update_fn(updates, state, params=None, *, weight=None, **extra_args):
    del extra_args
    reduction.num_shards()
    reduction.check_params(params)
    leaves_lib.check_inexact(updates, caller)
    leaves_lib.check_per_shard(updates, axes, caller)
    contrib_arguments.check_not_explicit(updates, caller)
    _check_stacked(updates, leading_shape, caller)
    if weight is None:
      total = reduction.total(num_towers or 1)
    else:
      weight = weights.as_weight(weight, leading_shape, caller)
      total = reduction.total(_sum_of_towers(weight, None, leading_shape))

    def sum_of_towers(leaf):
      return _sum_of_towers(leaf, weight, leading_shape)

    def tower(leaf):
      return leaf[0] if leading_shape else leaf

    sums = jax.tree.map(sum_of_towers, updates)
    towers = jax.tree.map(tower, updates)
    return reduction.of_sums(sums, total, towers), state

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _sum_of_towers(
    leaf: Any, weight: jax.Array | None, leading_shape: tuple[int, ...]
):
  """Returns the weighted sum of the towers of a shard, in at least float32."""
  if leaves_lib.is_float0(leaf):
    return leaf
  x = leaves_lib.as_accumulator(leaf)
  if weight is not None and leading_shape:
    weight = weight.reshape(leading_shape + (1,) * (x.ndim - 1))
  x = tree_sums.rounded(weights.scale_by_weight(weight)(x))
  return tree_sums.sum_rows(x) if leading_shape else x


def _check_stacked(updates, leading_shape, caller):
  """Checks that leaves have a leading axis of towers.

  Raises:
    ValueError: If a leaf does not.
  """
  for path, leaf in jax.tree.leaves_with_path(updates):
    if jnp.shape(leaf)[: len(leading_shape)] != leading_shape:
      raise ValueError(
          f'`updates` of `{caller}` must have a leading axis of'
          f' {leading_shape[0]} towers, got the shape {jnp.shape(leaf)} at'
          f' {leaves_lib.name_of(path)}. Stack the updates of the towers, or'
          ' leave out `num_towers`.'
      )
