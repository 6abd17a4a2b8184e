"""Norms of trees whose leaves may be sliced over shards."""

import collections
from collections.abc import Hashable
from collections.abc import Sequence

import chex
import jax
import jax.numpy as jnp
import optax

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import partition_specs
from shard_transforms._src.reduction import collectives


def global_norm(
    tree: chex.ArrayTree,
    axis_name: axes_lib.AxisName | None = None,
    *,
    sharded: partition_specs.SpecTree = None,
) -> jax.Array:
  r"""Returns the norm of all elements of a tree, each counted once.

  .. math:: \lVert u \rVert = \sqrt{\sum_l \sum_{i \in S_l} \lVert u_{l,i}
     \rVert^2}

  where :math:`S_l` are the shards over which the leaf l is sliced, or one shard
  where it is the same on all of them.

  Args:
    tree: Tree of real or complex arrays of any shapes; `float0` counts as zero.
    axis_name: The mapped axis, or a sequence of them, over which leaves may be
      sliced. `None` for the norm of this shard's own leaves.
    sharded: Which leaves are sliced over these axes: the `PartitionSpec`s of
      the leaves, as for `in_specs` of `jax.shard_map`, a tree or a prefix of
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
  partition_specs.check(sharded, caller)
  axes = axes_lib.optional_axes(axis_name)
  return jnp.sqrt(sum_of_squares(tree, axes, sharded, caller))


def sum_of_squares(
    tree: optax.Updates,
    axes: tuple[Hashable, ...],
    sharded: partition_specs.SpecTree,
    caller: str,
) -> jax.Array:
  """Returns the sum of the squares of all elements, float32 or wider []."""
  numbers = [0] * len(jax.tree.leaves(tree))
  with jax.named_scope(caller):
    totals = [
        collectives.total(squares[0], sliced)
        for sliced, squares in _squares_by_axes(
            tree, numbers, axes, sharded, caller
        )
    ]
  return sum(totals, jnp.float32(0))


def sums_of_squares(
    tree: optax.Updates,
    numbers: Sequence[int],
    axes: tuple[Hashable, ...],
    sharded: partition_specs.SpecTree,
    caller: str,
) -> jax.Array:
  """Returns sums of squares of leaves, by the number of the sum of each leaf.

  They are float32 or wider, [sums].
  """
  with jax.named_scope(caller):
    totals = [
        collectives.total(jnp.stack(squares), sliced)
        for sliced, squares in _squares_by_axes(
            tree, numbers, axes, sharded, caller
        )
    ]
  return sum(totals, jnp.zeros(1 + max(numbers, default=0), jnp.float32))


def _squares_by_axes(tree, numbers, axes, sharded, caller):
  """Returns this shard's sums by the axes over which leaves are sliced."""
  leaves_lib.check_inexact(tree, caller)
  zeros = [jnp.float32(0)] * (1 + max(numbers, default=0))
  by_axes = collections.defaultdict(lambda: list(zeros))
  sliced_axes = partition_specs.sliced_axes(tree, axes, sharded, caller)
  leaves = jax.tree.leaves(tree)
  for leaf, number, sliced in zip(leaves, numbers, sliced_axes, strict=True):
    if not leaves_lib.is_float0(leaf):
      by_axes[sliced][number] += _squares(leaf)
  return by_axes.items()


def _squares(leaf):
  leaf = jnp.asarray(leaf)
  if jnp.iscomplexobj(leaf):
    return _squares(leaf.real) + _squares(leaf.imag)
  return jnp.sum(
      jnp.square(leaf.astype(leaves_lib.accumulator_dtype(leaf.dtype)))
  )
