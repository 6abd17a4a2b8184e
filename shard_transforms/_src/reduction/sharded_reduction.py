"""Reduce-scatter and all-gather of trees over shards."""

from collections.abc import Hashable
from collections.abc import Sequence
from typing import ClassVar

import chex
import jax
from jax import lax
import optax

from shard_transforms._src.base import axes as axes_lib
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
    num_slices = self.num_shards()
    is_sent = self.sends_in_slices(leaves)
    sent = [i for i, is_sent_so in enumerate(is_sent) if is_sent_so]
    whole = [i for i, is_sent_so in enumerate(is_sent) if not is_sent_so]
    rows = [leaves_lib.cut(leaves[i], num_slices) for i in sent]
    scattered = leaf_sums.scatter(rows, share, self, num_slices)
    reduced = leaf_sums.reduce([leaves[i] for i in whole], share, self)
    slices = [*scattered, *jax.tree.leaves(self.own(reduced))]
    by_position = dict(zip(sent + whole, slices, strict=True))
    return [by_position[i] for i in range(len(leaves))]

  def own(self, tree: optax.Updates) -> optax.Updates:
    """Returns each shard's slice of a tree that is the same on all of them."""
    num_slices = self.num_shards()
    index = collectives.row_index(self.axes, self.groups)

    def own(leaf):
      if not leaves_lib.is_cut(leaf, num_slices):
        return leaf
      rows = leaves_lib.cut(leaf, num_slices)
      return lax.dynamic_index_in_dim(rows, index, keepdims=False)

    return jax.tree.map(own, tree)

  def gather(self, tree: optax.Updates, like: optax.Updates) -> optax.Updates:
    """Gathers a tree like another from the slices of all shards."""
    num_slices = self.num_shards()
    leaves, treedef = jax.tree.flatten(tree)
    kinds = treedef.flatten_up_to(like)
    cut = [i for i, x in enumerate(kinds) if leaves_lib.is_cut(x, num_slices)]
    own = axes_lib.to_varying([leaves[i] for i in cut], self.axes)

    def gather(buffer, _):
      return collectives.gather(buffer, self.axes, self.groups)

    keys = [(x.dtype, axes_lib.varying_axes(x)) for x in own]
    with jax.named_scope(self.caller):
      rows = bucketing.map_packed(
          gather, own, keys, self.levels(), growth=num_slices
      )
      for i, slices_of_leaf in zip(cut, rows, strict=True):
        leaves[i] = leaves_lib.join(slices_of_leaf, kinds[i])
    return treedef.unflatten(leaves)

  def sends_in_slices(self, leaves: Sequence[chex.Array]) -> list[bool]:
    """Returns for each leaf whether it is sliced before it is sent."""
    num_slices = self.num_shards()
    # A leaf that is not sent over all axes is the same on some shards.
    return [
        leaves_lib.is_cut(leaf, num_slices)
        and leaf_sums.sent_over(leaf, self) == self.axes
        for leaf in leaves
    ]
