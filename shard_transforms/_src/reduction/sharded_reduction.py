"""Reduce-scatter and all-gather of trees over shards."""

from collections.abc import Hashable
from collections.abc import Sequence
import functools
from typing import ClassVar

import chex
import jax
from jax import lax
import jax.numpy as jnp
import optax

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import divisions
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.reduction import bucketing
from shard_transforms._src.reduction import collectives
from shard_transforms._src.reduction import leaf_sums


class ShardedReduction(leaf_sums.Reduction):
  """Reduce-scatter of a tree to slices, and all-gather of slices to a tree."""

  in_slices: ClassVar[bool] = True

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
          ' `jax.shard_map`.'
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
    slices, packed, whole = {}, [], []
    for i, leaf in enumerate(leaves):
      if not is_sent[i]:
        whole.append(i)
      elif self._is_packed(leaf):
        packed.append(i)
      else:
        send = functools.partial(self._scatter_leaf, self._division(leaf))
        (slices[i],) = leaf_sums.reduce_by(send, [leaf], share, self)
    rows = [self._division(leaves[i]).rows(leaves[i]) for i in packed]
    scattered = leaf_sums.scatter(rows, share, self, self.num_shards())
    slices |= zip(packed, scattered, strict=True)
    reduced = leaf_sums.reduce([leaves[i] for i in whole], share, self)
    own = jax.tree.leaves(self.own(reduced))
    slices |= zip(whole, own, strict=True)
    return [slices[i] for i in range(len(leaves))]

  def own(self, tree: optax.Updates) -> optax.Updates:
    """Returns each shard's slice of a tree that is the same on all of them."""
    num_slices = self.num_slices()
    index = [collectives.row_index(self.axes, self.groups)]
    if self.groups is None:
      index = list(map(lax.axis_index, self._divided_over()))

    def own(leaf):
      if not self.cuts(leaf):
        return leaf
      return divisions.divide(jnp.shape(leaf), num_slices).own(leaf, index)

    return jax.tree.map(own, tree)

  def gather(self, tree: optax.Updates, like: optax.Updates) -> optax.Updates:
    """Gathers a tree like another from the slices of all shards."""
    leaves, treedef = jax.tree.flatten(tree)
    kinds = treedef.flatten_up_to(like)
    cut = [i for i, kind in enumerate(kinds) if self.cuts(kind)]
    parts = {i: self._division(kinds[i]) for i in cut}
    own = axes_lib.to_varying({i: leaves[i] for i in cut}, self.axes)
    packed = [i for i in cut if self._is_packed(kinds[i])]

    def gather(buffer, _):
      return collectives.gather(buffer, self.axes, self.groups)

    keys = [(own[i].dtype, axes_lib.varying_axes(own[i])) for i in packed]
    with jax.named_scope(self.caller):
      rows = bucketing.map_packed(
          gather,
          [own[i] for i in packed],
          keys,
          self.levels(),
          growth=self.num_shards(),
      )
      for i, row in zip(packed, rows, strict=True):
        leaves[i] = parts[i].join(row)
      for i in cut:
        if i not in packed:
          leaves[i] = self._gather_leaf(parts[i], own[i])
    return treedef.unflatten(leaves)

  def sends_in_slices(self, leaves: Sequence[chex.Array]) -> list[bool]:
    """Returns for each leaf whether it is sliced before it is sent."""
    # A leaf that is not sent over all axes is the same on some shards.
    return [
        self.cuts(leaf) and leaf_sums.sent_over(leaf, self) == self.axes
        for leaf in leaves
    ]

  def cuts(self, leaf: chex.Array | jax.ShapeDtypeStruct) -> bool:
    """Whether each shard has a slice of a leaf."""
    return leaves_lib.is_cut(leaf, self.num_shards())

  def num_slices(self) -> tuple[int, ...]:
    """Returns the number of slices for each axis, the mesh's last one first."""
    num_shards = self.num_shards()
    if self.groups is not None:
      return (num_shards,)
    return tuple(map(lax.axis_size, self._divided_over()))

  def _divided_over(self):
    return axes_lib.in_mesh_order(self.axes)[::-1]

  def _division(self, leaf):
    return divisions.divide(jnp.shape(leaf), self.num_slices())

  def sends_in_rows(self) -> bool:
    """Whether slices lie in rows to be sent, in place of along dimensions."""
    return self.groups is not None

  def _is_packed(self, leaf):
    size = jnp.size(leaf) * leaves_lib.dtype_of(leaf).itemsize
    return any(size < level.leaf_bytes for level in self.levels())

  def _scatter_leaf(self, division, leaf, axes):
    """Returns each shard's slice of the sum of a leaf over the shards."""
    if self.sends_in_rows():
      return self.scatter_over(division.rows(leaf), axes)
    leaf = division.pad(leaf)
    for axis, dim in zip(self._divided_over(), division.dims, strict=True):
      leaf = collectives.scatter_along(leaf, axis, dim, tiled=True)
    return leaf

  def _gather_leaf(self, division, own):
    """Returns a leaf from the slices of all shards."""
    if self.sends_in_rows():
      return division.join(collectives.gather(own, self.axes, self.groups))
    pairs = zip(self._divided_over(), division.dims, strict=True)
    for axis, dim in reversed(list(pairs)):
      own = collectives.join_along(own, axis, dim)
    return division.crop(own)
