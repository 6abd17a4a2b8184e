"""`clip_by_global_norm`: clips updates by the norm over all slices."""

import chex
import jax
import jax.numpy as jnp
import optax

from shard_transforms._src.base import arguments
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import partition_specs
from shard_transforms._src.reduction import norms


def clip_by_global_norm(
    max_norm: chex.Numeric,
    axis_name: axes_lib.AxisName | None = None,
    *,
    specs: partition_specs.SpecTree = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Scales updates down so that their norm is at most `max_norm`.

  .. math:: u \cdot \min(1, m / \lVert u \rVert)

  where :math:`m` is `max_norm`. Before a reduction, the update of each shard is
  clipped by its own norm, so that an exploding gradient on one shard does not
  dominate the mean. After a reduction, the mean is clipped by its norm::

    optax.chain(clip_by_global_norm(1.0), cross_shard_mean('data'), adam)
    optax.chain(cross_shard_mean('data'), clip_by_global_norm(1.0), adam)

  `axis_name` must name the axes over which leaves are sliced, such as the axes
  of a model that is larger than one device, or the axis of `shard_update` if
  the clipping is inside of it:
  `shard_update(optax.chain(clip_by_global_norm(1.0, 'data'), adam), 'data')`.

  If the norm is zero, the updates stay zero. If the norm is infinite, finite
  elements become zero and all other elements NaN.

  Args:
    max_norm: The norm above which updates are scaled down, a positive number.
    axis_name: As in `global_norm`.
    specs: As in `global_norm`; inside `shard_update` it is
      `PartitionSpec(axis_name)`.

  Returns:
    An `optax.GradientTransformationExtraArgs` without state.

  Raises:
    NameError: In `update`, if an axis is not bound.
    TypeError: If `max_norm` is not a real number, or if `specs` is not a tree
      of `PartitionSpec`s; in `update`, if a leaf is an integer or boolean.
    ValueError: If `max_norm` is not positive; in `update`, in the cases of
      `global_norm`, or if only some leaves vary over an axis that is not in
      `axis_name`.

  Examples:
    >>> import jax.numpy as jnp
    >>> import shard_transforms
    >>> tx = shard_transforms.clip_by_global_norm(1.0)
    >>> updates = {'w': jnp.array([3.0]), 'b': jnp.array([4.0])}
    >>> updates, _ = tx.update(updates, tx.init(updates))
    >>> print(updates['w'], updates['b'])
    [0.6] [0.8]

  References:
    `tf.clip_by_global_norm` of TensorFlow 1.15; Pascanu et al., On the
    difficulty of training Recurrent Neural Networks, 2012,
    https://arxiv.org/abs/1211.5063.
  """
  caller = 'clip_by_global_norm'
  max_norm = arguments.as_positive('max_norm', max_norm)
  partition_specs.check(specs, caller)
  axes = axes_lib.optional_axes(axis_name)

  def init_fn(params):
    del params
    return optax.EmptyState()

  def update_fn(updates, state, params=None, **extra_args):
    del params, extra_args
    leaves_lib.check_inexact(updates, caller)
    _check_same_axes(updates, axes)
    partition_specs.check_names_all(specs, axes, caller)
    norm = jnp.sqrt(norms.sum_of_squares(updates, axes, specs, caller))
    is_small = norm <= jnp.asarray(max_norm, norm.dtype)

    def clip(leaf):
      if leaves_lib.is_float0(leaf):
        return leaf
      leaf = jnp.asarray(leaf)
      wide = leaves_lib.accumulator_dtype(leaf.dtype)
      scaled = leaf.astype(wide) / norm.astype(wide)
      scaled = (scaled * jnp.asarray(max_norm, wide)).astype(leaf.dtype)
      return jnp.where(is_small, leaf, scaled)

    return jax.tree.map(clip, updates), state

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _check_same_axes(tree, axes):
  """Checks that all leaves vary over the same axes, apart from `axes`.

  Raises:
    ValueError: If only some leaves vary over an axis, and so may be slices.
  """
  axes_of_leaves = {
      axes_lib.varying_axes(leaf).difference(axes)
      for leaf in jax.tree.leaves(tree)
      if not leaves_lib.is_float0(leaf)
  }
  if len(axes_of_leaves) > 1:
    all_axes = frozenset.union(*axes_of_leaves)
    differing = all_axes - frozenset.intersection(*axes_of_leaves)
    raise ValueError(
        'Only some of the leaves vary over the axes'
        f' {sorted(differing, key=str)}, so shards would clip the same leaf by'
        ' different norms. Name these axes in `axis_name` of'
        ' `clip_by_global_norm`.'
    )
