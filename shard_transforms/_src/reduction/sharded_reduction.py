"""Reduce-scatter and all-gather of trees over shards."""

from collections.abc import Hashable
from collections.abc import Sequence
import functools
import math
from typing import ClassVar

import chex
import jax
from jax import lax
from jax.experimental import layout
import jax.numpy as jnp
import optax

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import divisions
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import thresholds
from shard_transforms._src.reduction import bucketing
from shard_transforms._src.reduction import collectives
from shard_transforms._src.reduction import leaf_sums


class ShardedReduction(leaf_sums.Reduction):
  """Reduce-scatter of a tree to slices, and all-gather of slices to a tree."""

  sent: ClassVar[thresholds.Sent] = 'in slices'

  def check_mapped(self) -> None:
    """Refuses a mesh that leaves an axis to the compiler.

    Raises:
      ValueError: If there is one.
    """
    if unmapped := axes_lib.unmapped_axes(self.axes):
      raise ValueError(
          f'The mesh of `{self.caller}` must have no axis that is'
          f' not mapped, got {unmapped!r}: cutting a leaf would gather what'
          ' such an axis shards. Name all axes in `axis_names` of'
          ' `jax.shard_map`; in `on_mesh`, leave out `axis_name`, and give'
          ' how parameters are sharded over the other axes as `in_specs`.'
      )

  def axes_of_sums(self) -> tuple[Hashable, ...]:
    """Returns the axes over which an optimizer may sum over all slices."""
    # Reduced over all shards, updates are the same on all of them.
    return () if self.groups else self.axes

  def scatter(
      self, tree: optax.Updates, weight: chex.Numeric | None = None
  ) -> optax.Updates:
    """Returns each shard's slice of the (weighted) sum or mean of a tree."""
    checked = leaf_sums.check(tree, weight, self)
    leaves, treedef = jax.tree.flatten(tree)
    with jax.named_scope(self.caller):
      slices = self.scatter_leaves(leaves, leaf_sums.share(checked, self))
    return treedef.unflatten(slices)

  def scatter_leaves(
      self, leaves: Sequence[chex.Array], share: leaf_sums.Share
  ) -> list[jax.Array]:
    """Returns each shard's slice of the sum or mean of checked leaves."""
    is_sent = self.sends_in_slices(leaves)
    slices, in_rows, whole, rows = {}, [], [], []
    for i, leaf in enumerate(leaves):
      division = self._division(leaf)
      if division is None or not is_sent[i]:
        whole.append(i)
      elif self.sends_in_rows(leaf):
        in_rows.append(i)
        rows.append(division.rows(leaf))
      else:
        send = functools.partial(self._scatter_along, division)
        (slices[i],) = leaf_sums.reduce([leaf], share, self, send)
    scattered = leaf_sums.scatter(rows, share, self, self.num_shards())
    reduced = leaf_sums.reduce([leaves[i] for i in whole], share, self)
    own = [*scattered, *jax.tree.leaves(self.own(reduced))]
    slices |= zip(in_rows + whole, own, strict=True)
    return [slices[i] for i in range(len(leaves))]

  def own(self, tree: optax.Updates) -> optax.Updates:
    """Returns each shard's slice of a tree that is the same on all of them."""
    num_slices = self.num_slices()
    index = [collectives.row_index(self.axes, self.groups)]
    if self.groups is None:
      index = list(map(lax.axis_index, self._divided_over()))

    def own(leaf):
      if not leaves_lib.is_cut(leaf, math.prod(num_slices)):
        return leaf
      return divisions.divide(jnp.shape(leaf), num_slices).own(leaf, index)

    return jax.tree.map(own, tree)

  def gather(self, tree: optax.Updates, like: optax.Updates) -> optax.Updates:
    """Gathers a tree like another from the slices of all shards."""
    leaves, treedef = jax.tree.flatten(tree)
    kinds = treedef.flatten_up_to(like)
    cut = {i: x for i, x in enumerate(map(self._division, kinds)) if x}
    own = axes_lib.to_varying({i: leaves[i] for i in cut}, self.axes)
    # Gathered along another dimension than the first, XLA gives updates a
    # layout for which it copies the parameters: benchmarks/hardware.py
    #   h100:1x8 --shapes=gpt2 shard_update
    in_one_step = len(self.num_slices()) == 1
    in_rows = [i for i in cut if in_one_step or self.sends_in_rows(kinds[i])]

    def gather(buffer, _):
      return collectives.gather(buffer, self.axes, self.groups)

    packed = [own.pop(i) for i in in_rows]
    keys = [(x.dtype, axes_lib.varying_axes(x)) for x in packed]
    with jax.named_scope(self.caller):
      levels = thresholds.levels(self.axes, self.sent)
      rows = bucketing.map_packed(
          gather, packed, keys, levels, growth=self.num_shards()
      )
      for i, row in zip(in_rows, rows, strict=True):
        leaves[i] = cut[i].join(row)
      for i, part in own.items():
        leaves[i] = self._gather_along(cut[i], part)
    return treedef.unflatten(leaves)

  def sends_in_slices(self, leaves: Sequence[chex.Array]) -> list[bool]:
    """Returns for each leaf whether it is sliced before it is sent."""
    num_shards = self.num_shards()
    # A leaf that is not sent over all axes is the same on some shards.
    return [
        leaves_lib.is_cut(leaf, num_shards)
        and leaf_sums.sent_over(leaf, self) == self.axes
        for leaf in leaves
    ]

  def sends_in_rows(self, leaf: chex.Array | jax.ShapeDtypeStruct) -> bool:
    """Whether slices are scattered as rows, such as those that share a buffer.

    Over several axes, they are gathered likewise.
    """
    size = math.prod(jnp.shape(leaf)) * leaves_lib.dtype_of(leaf).itemsize
    levels = thresholds.levels(self.axes, self.sent)
    is_small = any(size < level.leaf_bytes for level in levels)
    return is_small or self.groups is not None

  def num_slices(self) -> tuple[int, ...]:
    """Returns the number of slices for each axis, the mesh's last one first."""
    num_shards = self.num_shards()
    if self.groups is not None:
      return (num_shards,)
    return tuple(map(lax.axis_size, self._divided_over()))

  def _divided_over(self):
    return axes_lib.in_mesh_order(self.axes)[::-1]

  def _division(self, leaf):
    """Returns how a leaf is divided, or `None` if all shards have all of it."""
    num_slices = self.num_slices()
    if not leaves_lib.is_cut(leaf, math.prod(num_slices)):
      return None
    return divisions.divide(jnp.shape(leaf), num_slices)

  def _scatter_along(self, division, leaf, axes):
    """Returns each shard's slice of the sum of a leaf, sent axis by axis."""
    del axes  # All of them.
    leaf = division.pad(leaf)
    for axis, dim in zip(self._divided_over(), division.dims, strict=True):
      leaf = collectives.scatter_along(leaf, axis, dim, tiled=True)
    if axes_lib.platform() == 'gpu':
      # Of a transposed gradient, as an embedding has it, XLA for GPUs would lay
      # out a slice unlike the state, and copy that: benchmarks/hardware.py
      #   h100:1x8 --shapes=gpt2 shard_update
      # With this, XLA for TPUs would sum such a gradient whole.
      rows_first = layout.Layout(tuple(range(leaf.ndim)))
      leaf = layout.with_layout_constraint(leaf, rows_first)
    return leaf

  def _gather_along(self, division, own):
    """Returns a leaf from the slices of all shards, sent axis by axis."""
    order = list(zip(self._divided_over(), division.dims, strict=True))
    for axis, dim in reversed(order):
      own = collectives.join_along(own, axis, dim)
    return division.crop(own)
