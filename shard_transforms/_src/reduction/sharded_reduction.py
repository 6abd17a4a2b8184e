"""Reduce-scatter and all-gather of trees over shards."""

from collections.abc import Hashable
from collections.abc import Sequence
import functools
import math
from typing import Any, ClassVar

import chex
import jax
from jax import lax
from jax.experimental import layout
import jax.numpy as jnp
import optax

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import divisions
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.reduction import bucketing
from shard_transforms._src.reduction import collectives
from shard_transforms._src.reduction import leaf_sums
from shard_transforms._src.reduction import thresholds

# The length of a tile of XLA for TPUs along the last dimension of an array.
_TILE_COLUMNS = 128


class ShardedReduction(leaf_sums.Reduction):
  """Reduce-scatters a tree to slices, and all-gathers slices to a tree."""

  packing: ClassVar[thresholds.Table] = thresholds.SLICES

  def check_mapped(self) -> None:
    """Checks that all axes of the mesh are mapped.

    Raises:
      ValueError: If the mesh has an axis that is not mapped.
    """
    if unmapped := axes_lib.unmapped_axes(self.axes):
      raise ValueError(
          f'`{self.caller}` slices leaves on a mesh with axes that are not'
          f' mapped, {unmapped!r}, and slicing a leaf would gather it over'
          ' these axes. Name all axes in `axis_names` of `jax.shard_map`; in'
          ' `on_mesh`, leave out `axis_name`, and pass the specs of the'
          ' parameters over the other axes as `in_specs`.'
      )

  def axes_of_sums(self) -> tuple[Hashable, ...]:
    """Returns the axes over which a sum of slices is the sum of a whole leaf.

    With groups there are none, because each group has different updates.
    """
    return () if self.groups else self.axes

  def scatter(
      self, tree: optax.Updates, weight: chex.Numeric | None = None
  ) -> optax.Updates:
    """Returns this shard's slice of the (weighted) sum or mean of a tree."""
    leaves, treedef = jax.tree.flatten(tree)
    with jax.named_scope(self.caller):
      share = self.share(tree, weight)
      return treedef.unflatten(self.scatter_leaves(leaves, share))

  def scatter_leaves(
      self, leaves: Sequence[chex.Array], share: leaf_sums.Share
  ) -> list[jax.Array]:
    """Returns this shard's slice of the sum or mean of checked leaves."""
    slices, rows, unsliced = {}, {}, []
    num_shards = self.num_shards()
    for i, leaf in enumerate(leaves):
      is_sliced = leaves_lib.is_sliced(leaf, num_shards)
      # With `if_reduced='mean'`, a leaf may already be a mean over some axes.
      # Such a leaf is reduced as a whole over the other axes.
      if not is_sliced or self.summed_axes(leaf) != self.axes:
        unsliced.append(i)
      elif self.sends_in_rows(leaf):
        rows[i] = self._division(leaf).rows(leaf)
      else:
        send = functools.partial(self._scatter_along, self._division(leaf))
        (slices[i],) = self.reduce([leaf], share, send)
    scattered = self.reduce(
        list(rows.values()), share, self.scatter_over, num_shards
    )
    slices |= zip(rows, scattered, strict=True)
    reduced = self.reduce([leaves[i] for i in unsliced], share)
    own_slices = jax.tree.leaves(self.own(reduced))
    slices |= zip(unsliced, own_slices, strict=True)
    return [slices[i] for i in range(len(leaves))]

  def own(self, tree: optax.Updates) -> optax.Updates:
    """Returns this shard's slice of a tree that is the same on all shards."""
    index = [collectives.row_index(self.axes, self.groups)]
    if self.groups is None:
      index = list(map(lax.axis_index, self._divided_over()))

    def slice_leaf(leaf):
      division = self._division(leaf)
      return leaf if division is None else division.local_slice(leaf, index)

    return jax.tree.map(slice_leaf, tree)

  def gather(self, tree: optax.Updates, like: optax.Updates) -> optax.Updates:
    """Gathers the slices of all shards into a tree shaped like `like`."""
    leaves, treedef = jax.tree.flatten(tree)
    full_leaves = treedef.flatten_up_to(like)
    divided = enumerate(map(self._division, full_leaves))
    divided = {i: division for i, division in divided if division is not None}
    slices = axes_lib.to_varying({i: leaves[i] for i in divided}, self.axes)
    # If updates are gathered along any dimension but the first, XLA chooses a
    # layout for which it must copy the parameters: benchmarks/hardware.py
    #   h100:1x8 --shapes=gpt2 shard_update
    in_one_step = len(self.num_slices()) == 1
    in_rows = [
        i for i in divided if in_one_step or self.sends_in_rows(full_leaves[i])
    ]

    def gather(buffer, _):
      return collectives.gather(buffer, self.axes, self.groups)

    packed = [slices.pop(i) for i in in_rows]
    keys = [(x.dtype, axes_lib.varying_axes(x)) for x in packed]
    with jax.named_scope(self.caller):
      levels = thresholds.levels(self.axes, self.packing)
      rows = bucketing.map_packed(
          gather, packed, keys, levels, growth=self.num_shards()
      )
      for i, row in zip(in_rows, rows, strict=True):
        leaves[i] = divided[i].join(row)
      for i, x in slices.items():
        leaves[i] = self._gather_along(divided[i], x)
    return treedef.unflatten(leaves)

  def sends_in_rows(self, leaf: chex.Array | jax.ShapeDtypeStruct) -> bool:
    """Whether a leaf is scattered as rows, as all leaves that share a buffer.

    Such a leaf is also gathered as rows.
    """
    size = math.prod(jnp.shape(leaf)) * leaves_lib.dtype_of(leaf).itemsize
    levels = thresholds.levels(self.axes, self.packing)
    is_small = any(size < level.leaf_bytes for level in levels)
    return is_small or self.groups is not None

  def num_slices(self) -> tuple[int, ...]:
    """Returns the number of slices along each axis, in reverse mesh order."""
    num_shards = self.num_shards()
    if self.groups is not None:
      return (num_shards,)
    return tuple(map(lax.axis_size, self._divided_over()))

  def _divided_over(self):
    return axes_lib.in_mesh_order(self.axes)[::-1]

  def _division(self, leaf: Any) -> Any:
    """Returns the division of a leaf, or `None` if the leaf is not divided."""
    num_slices = self.num_slices()
    if not leaves_lib.is_sliced(leaf, math.prod(num_slices)):
      return None
    return divisions.divide(jnp.shape(leaf), num_slices)

  def _scatter_along(self, division, leaf, axes):
    """Reduce-scatters a leaf to this shard's slice, one axis at a time."""
    del axes  # Always `self.axes`.
    leaf = division.pad(leaf)
    for axis, dim in zip(self._divided_over(), division.dims, strict=True):
      leaf = _scatter_slices(leaf, axis, dim)
    if axes_lib.platform() == 'gpu':
      # For a transposed gradient, such as that of an embedding, XLA for GPUs
      # chooses another layout for the slice than for the state, and copies the
      # state: benchmarks/hardware.py
      #   h100:1x8 --shapes=gpt2 shard_update
      # With this constraint, XLA for TPUs would all-reduce such a gradient.
      rows_first = layout.Layout(tuple(range(leaf.ndim)))
      leaf = layout.with_layout_constraint(leaf, rows_first)
    return leaf

  def _gather_along(self, division, leaf):
    """All-gathers the slices of a leaf, one axis at a time."""
    order = list(zip(self._divided_over(), division.dims, strict=True))
    for axis, dim in reversed(order):
      leaf = collectives.join_along(leaf, axis, dim)
    return division.crop(leaf)


def _scatter_slices(leaf, axis, dim):
  """Reduce-scatters a leaf to this shard's slice along one dimension."""
  columns = leaf.shape[dim] // lax.axis_size(axis)
  is_last = 0 < dim == leaf.ndim - 1
  if axes_lib.platform() != 'tpu' or not is_last or not columns % _TILE_COLUMNS:
    return collectives.scatter_along(leaf, axis, dim, tiled=True)
  # XLA for TPUs would all-reduce the gradient of an embedding that is looked up
  # by token, and then slice it, because such slices are not made of whole
  # tiles. With a dimension for the slices, it reduce-scatters the gradient:
  # benchmarks/hardware.py
  #   v5e:2x4 --shapes=gpt2 shard_update
  slices = leaf.reshape(*leaf.shape[:-1], -1, columns)
  return collectives.scatter_along(slices, axis, dim)
