"""Norms of trees of which shards may hold slices, and clipping by them."""

import collections
from collections.abc import Hashable
import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from shard_transforms._src import arguments
from shard_transforms._src import axes as axes_lib
from shard_transforms._src import collectives
from shard_transforms._src import leaves as leaves_lib
from shard_transforms._src import specs


def global_norm(
    tree: Any,
    axis_name: axes_lib.AxisName | None = None,
    *,
    sharded: Any = None,
) -> jax.Array:
  r"""Returns the norm of all elements of a tree, each counted once.

  .. math:: \lVert u \rVert = \sqrt{\sum_l \sum_{i \in S_l} \lVert u_{l,i}
     \rVert^2}

  where :math:`S_l` are the shards over which the leaf l is sliced, or one shard
  where it is the same on all of them.

  Args:
    tree: Tree of real or complex arrays of any shapes; `float0` counts as zero.
    axis_name: The mapped axis, or a sequence of them, over which leaves may be
      sliced. `None` for the norm of what this shard holds.
    sharded: Which leaves are sliced over these axes: the `PartitionSpec`s of
      the leaves, as for `in_specs` of `jax.shard_map`, a tree or the head of
      one. A scalar is never sliced. `None` where the types tell: what varies
      over an axis is a slice.

  Returns:
    The norm, float32 [] (float64 if a leaf is), the same on all shards of
    `axis_name`.

  Raises:
    NameError: If an axis is not bound.
    TypeError: If a leaf is an integer or boolean, or `sharded` is not made of
      `PartitionSpec`s.
    ValueError: If `sharded` is missing where JAX does not track types,
      contradicts the types, or has no place in the tree; or if it comes without
      `axis_name`.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import shard_transforms
    >>> from jax.sharding import PartitionSpec as P
    >>> norm = lambda slice: shard_transforms.global_norm(
    ...     slice, 'model', sharded=P('model'))
    >>> print(jax.vmap(norm, axis_name='model')(jnp.array([[3.0], [4.0]])))
    [5. 5.]
  """
  caller = 'global_norm'
  specs.check(sharded, caller)
  axes = () if axis_name is None else axes_lib.as_axes(axis_name)
  return jnp.sqrt(sum_of_squares(tree, axes, sharded, caller))


def clip_by_global_norm(
    max_norm: Any,
    axis_name: axes_lib.AxisName | None = None,
    *,
    sharded: Any = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Scales updates down so that their norm is at most `max_norm`.

  .. math:: u \cdot \min(1, \text{max\_norm} / \lVert u \rVert)

  Before the reduction, each shard is clipped by its own norm, so that the
  explosion of one does not drown the others; after it, all are clipped by the
  norm of the mean:

  ```python
  optax.chain(clip_by_global_norm(1.0), cross_shard_mean('data'), adam)
  optax.chain(cross_shard_mean('data'), clip_by_global_norm(1.0), adam)
  ```

  Name the axes over which leaves are sliced, such as those of a model that is
  larger than a device, or the axis of `shard_update` inside of it:
  `shard_update(optax.chain(clip_by_global_norm(1.0, 'data'), adam), 'data')`.

  A norm of zero leaves zeros; one that is infinite gives zeros for what is
  finite, and what is not finite becomes NaN.

  Args:
    max_norm: The norm above which updates are scaled down, a positive number.
    axis_name: As in `global_norm`.
    sharded: As in `global_norm`; inside `shard_update` it is
      `PartitionSpec(axis_name)`.

  Returns:
    An `optax.GradientTransformationExtraArgs` without state.

  Raises:
    NameError: In `update`, if an axis is not bound.
    TypeError: If `max_norm` is not a real number, or `sharded` not made of
      `PartitionSpec`s; in `update`, if a leaf is an integer or boolean.
    ValueError: If `max_norm` is not positive; in `update`, as in `global_norm`,
      or if without `axis_name` some leaves vary over an axis and some do not.

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
  specs.check(sharded, caller)
  axes = () if axis_name is None else axes_lib.as_axes(axis_name)

  def init_fn(params):
    del params
    return optax.EmptyState()

  def update_fn(updates, state, params=None, **extra_args):
    del params, extra_args
    if not axes:
      _check_alike(updates)
    norm = jnp.sqrt(sum_of_squares(updates, axes, sharded, caller))

    def clip(leaf):
      if leaves_lib.is_float0(leaf):
        return leaf
      leaf = jnp.asarray(leaf)
      scaled = leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
      scaled = (scaled / norm) * max_norm
      return jnp.where(norm <= max_norm, leaf, scaled.astype(leaf.dtype))

    return jax.tree.map(clip, updates), state

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def sum_of_squares(
    tree: Any, axes: tuple[Hashable, ...], sharded: Any, caller: str
) -> jax.Array:
  """Returns the sum of the squares of all elements, float32 or wider [].

  Raises:
    NameError: If an axis is not bound.
    TypeError: If a leaf is an integer or boolean.
    ValueError: As `global_norm`.
  """
  leaves_lib.check_inexact(tree, caller)
  by_axes = collections.defaultdict(list)
  sliced_axes = specs.sliced_axes(tree, axes, sharded, caller)
  for leaf, sliced in zip(jax.tree.leaves(tree), sliced_axes, strict=True):
    if not leaves_lib.is_float0(leaf):
      by_axes[sliced].append(_squares(leaf))
  with jax.named_scope(caller):
    totals = [
        # A sum that starts from zero could not be told from one of other things
        # where `shard_update` looks for sums over its slices.
        collectives.total(functools.reduce(operator.add, squares), sliced)
        for sliced, squares in by_axes.items()
    ]
  return sum(totals, jnp.float32(0))


def _squares(leaf):
  leaf = jnp.asarray(leaf)
  if jnp.iscomplexobj(leaf):
    return _squares(leaf.real) + _squares(leaf.imag)
  return jnp.sum(
      jnp.square(leaf.astype(leaves_lib.accumulator_dtype(leaf.dtype)))
  )


def _check_alike(tree):
  """Checks that no leaf is a slice where another is whole.

  Raises:
    ValueError: If one seems to be.
  """
  kinds = {axes_lib.varying_axes(leaf) for leaf in jax.tree.leaves(tree)}
  if len(kinds) > 1:
    some = frozenset.union(*kinds) - frozenset.intersection(*kinds)
    raise ValueError(
        '`axis_name` of `clip_by_global_norm` must name'
        f' {sorted(some, key=str)}, over which some leaves vary and some do'
        ' not: clipping by the norm of what a shard holds would make the same'
        ' leaf differ between shards.'
    )
