"""Norms and finiteness of trees whose leaves may be sliced."""

import collections
from collections.abc import Hashable
import functools

import chex
import jax
from jax import lax
import jax.numpy as jnp
import optax

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import partition_specs
from shard_transforms._src.base import weights
from shard_transforms._src.reduction import collectives


def global_norm(
    tree: chex.ArrayTree,
    axis_name: axes_lib.AxisName | None = None,
    *,
    specs: partition_specs.SpecTree = None,
) -> jax.Array:
  r"""Returns the norm of all elements of a tree, each counted once.

  .. math:: \lVert u \rVert = \sqrt{\sum_l \sum_{i \in S_l} \lVert u_{l,i}
     \rVert^2}

  where :math:`S_l` are the shards over which the leaf l is sliced, or a single
  shard if the leaf is the same on all shards.

  Args:
    tree: Tree of real or complex arrays of any shapes; `float0` counts as zero.
    axis_name: The mapped axis, or a sequence of mapped axes, over which leaves
      may be sliced. `None` for the norm of the leaves of this shard only.
    specs: The `PartitionSpec`s of the leaves, as a tree or a prefix tree like
      `in_specs` of `jax.shard_map`; they specify which leaves are sliced over
      these axes. A scalar is never sliced. `None` to use the types of the
      leaves: a leaf that varies over an axis is a slice.

  Returns:
    The norm, float32 [] (float64 if a leaf is), the same on all shards of
    `axis_name`.

  Raises:
    NameError: If an axis is not bound.
    TypeError: If a leaf is an integer or boolean, or `specs` contains values
      that are not `PartitionSpec`s.
    ValueError: If `specs` is missing where JAX does not track varying axes,
      contradicts the types, is not a prefix of the tree, names a mapped axis
      that `axis_name` lacks, or is given without `axis_name`.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import shard_transforms
    >>> from jax.sharding import PartitionSpec as P
    >>> norm = lambda slice: shard_transforms.global_norm(
    ...     slice, 'model', specs=P('model'))
    >>> print(jax.vmap(norm, axis_name='model')(jnp.array([[3.0], [4.0]])))
    [5. 5.]
  """
  caller = 'global_norm'
  partition_specs.check(specs, caller)
  axes = axes_lib.optional_axes(axis_name)
  leaves_lib.check_inexact(tree, caller)
  partition_specs.check_names_all(specs, axes, caller)
  return jnp.sqrt(sum_of_squares(tree, axes, specs, caller))


def sum_of_squares(
    tree: optax.Updates,
    axes: tuple[Hashable, ...],
    specs: partition_specs.SpecTree,
    caller: str,
) -> jax.Array:
  """Returns the sum of squares of all elements, float32 (or float64) []."""
  dtype = weights.dtype_for(tree)
  by_axes = collections.defaultdict(lambda: jnp.zeros([], dtype))
  sliced_axes = partition_specs.sliced_axes(tree, axes, specs, caller)
  for leaf, sliced in zip(jax.tree.leaves(tree), sliced_axes, strict=True):
    if not leaves_lib.is_float0(leaf):
      by_axes[sliced] += _squares(leaf).astype(dtype)
  with jax.named_scope(caller):
    totals = [collectives.psum(x, sliced) for sliced, x in by_axes.items()]
  return sum(totals, jnp.zeros([], dtype))


def _squares(leaf):
  leaf = leaves_lib.as_accumulator(leaf)
  parts = [leaf.real, leaf.imag] if jnp.iscomplexobj(leaf) else [leaf]
  return functools.reduce(lax.add, [jnp.sum(jnp.square(x)) for x in parts])


def are_finite(
    tree: optax.Updates, sliced_over: tuple[Hashable, ...]
) -> jax.Array:
  """Returns whether all elements of all slices are finite, bool []."""
  return finiteness(tree, sliced_over)[1]


def finiteness(
    tree: optax.Updates,
    sliced_over: tuple[Hashable, ...],
    read_first: bool = False,
) -> tuple[optax.Updates, jax.Array]:
  """Returns the tree, and whether all elements of all slices are finite.

  With `read_first`, the leaves are behind barriers, which force the check of a
  leaf before any other use. Otherwise, XLA for TPUs fuses the check with the
  matrix product that computes a gradient, and then does not reduce the gradient
  in place. XLA for GPUs checks all gradients at the end, and keeps them in
  memory until then.
  """
  leaves, treedef = jax.tree.flatten(tree)
  total = jnp.float32(0)
  for i, leaf in enumerate(leaves):
    if leaves_lib.is_float0(leaf):
      continue
    if read_first:
      leaf = lax.optimization_barrier(jnp.asarray(leaf))
    zero = _zero_if_finite(leaf)
    if read_first:
      leaves[i], zero = lax.optimization_barrier((leaf, zero))
    total = lax.add(total, zero)
  return treedef.unflatten(leaves), collectives.psum(total, sliced_over) == 0


def _zero_if_finite(leaf):
  """Returns 0, float32 [], or NaN if an element of a leaf is not finite."""
  leaf = leaves_lib.as_accumulator(leaf)
  # 0 times an element is 0, or NaN if the element is not finite. The sum of
  # these products cannot overflow, and takes half the time of an elementwise
  # check.
  zeros = lax.mul(leaf, lax.full_like(leaf, 0))
  if jnp.iscomplexobj(zeros):
    zeros = lax.real(zeros)
  total = lax.reduce_sum(zeros, tuple(range(zeros.ndim)))
  return leaves_lib.as_dtype(total, jnp.float32)
