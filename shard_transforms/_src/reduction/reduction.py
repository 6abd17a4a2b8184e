"""Sums and means of trees over shards."""

import chex
import jax

from shard_transforms._src.reduction import leaf_sums
from shard_transforms._src.reduction import reduction_options


class Reduction(reduction_options.ReductionOptions):
  """The sum or mean of a tree over shards, the same on all of them."""

  def __call__(
      self, tree: chex.ArrayTree, weight: chex.Numeric | None = None
  ) -> chex.ArrayTree:
    """Returns the (weighted) sum or mean of `tree` over the shards.

    Args:
      tree: Real or complex leaves of any shapes; `float0` passes through.
      weight: A scalar a shard, or `None` for equal ones.

    Returns:
      A tree of the same shapes and dtypes, the same on all shards of `axes`, or
      of a group.

    Raises:
      NameError: If an axis is not bound.
      TypeError: If a leaf carries no gradient or the weight is no number.
      ValueError: If a leaf is reduced already and `on_invariant`, `weight` or
        `groups` do not allow it, or `weight` or `groups` are wrong.
    """
    weight = leaf_sums.check(tree, weight, self)
    leaves, treedef = jax.tree.flatten(tree)
    with jax.named_scope(self.caller):
      own = leaf_sums.share(weight, self)
      reduced = leaf_sums.reduce(leaves, own, self)
    return treedef.unflatten(reduced)
