"""Sums and means of trees over shards: how each leaf is sent and scaled."""

from collections.abc import Hashable
import dataclasses
from typing import Any, Literal

import jax
from jax import lax
import jax.numpy as jnp

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import groups as groups_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import varying
from shard_transforms._src.base import weights
from shard_transforms._src.reduction import bucketing
from shard_transforms._src.reduction import collectives
from shard_transforms._src.reduction import flat_slices
from shard_transforms._src.reduction import leaf_plan

Kind = Literal['mean', 'sum']
OnInvariant = Literal['error', 'summed', 'averaged']
Algorithm = Literal['flat', 'hierarchical']


@dataclasses.dataclass(frozen=True)
class Reduction:
  """How a tree is reduced over shards; checked when it is made.

  Attributes:
    caller: The public name that errors and profiles show.
    kind: `'mean'` or `'sum'`.
    axes: The mapped axes.
    groups: The partition of the shards that reduce among themselves, or `None`.
    on_invariant: What a leaf is that is the same on all shards.
    bucket_bytes: The size of the buffers that small leaves share, or `'auto'`.
    algorithm: Whether several axes are summed over at once or level by level.
  """

  caller: str
  kind: Kind
  axes: tuple[Hashable, ...]
  groups: groups_lib.Groups | None = None
  on_invariant: OnInvariant = 'error'
  bucket_bytes: int | str = 'auto'
  algorithm: Algorithm = 'flat'

  def __post_init__(self):
    if self.on_invariant not in ('error', 'summed', 'averaged'):
      raise ValueError(
          "`on_invariant` must be 'error', 'summed' or 'averaged', got"
          f' {self.on_invariant!r}.'
      )
    if self.algorithm not in ('flat', 'hierarchical'):
      raise ValueError(
          "`algorithm` must be 'flat' or 'hierarchical', got"
          f' {self.algorithm!r}.'
      )
    if self.algorithm == 'hierarchical' and len(self.axes) < 2:
      raise ValueError(
          "`algorithm='hierarchical'` must come with two axes or more, the fast"
          f' one last, got {self.axes!r}.'
      )
    if self.groups is not None and len(self.axes) > 1:
      raise ValueError(
          f'`groups` must come with one axis, got {self.axes!r}. Number the'
          ' shards along a mesh of one axis.'
      )
    bucketing.check_bucket_bytes(self.bucket_bytes)

  def __call__(self, tree: Any, weight: Any = None) -> Any:
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
    weight = self._check(tree, weight)
    leaves, treedef = jax.tree.flatten(tree)
    with jax.named_scope(self.caller):
      total_weight = self._total_weight(weight)
      reduced = self._reduce(self._psum, leaves, weight, total_weight)
    return treedef.unflatten(reduced)

  def scatter(self, tree: Any, weight: Any = None) -> Any:
    """Returns each shard's slice of what `__call__` returns.

    Raises:
      NameError: As `__call__`.
      TypeError: As `__call__`.
      ValueError: As `__call__`.
    """
    weight = self._check(tree, weight)
    leaves, treedef = jax.tree.flatten(tree)
    num_slices = self.num_slices()
    found = self._routes(leaves)
    # What is not sent over all axes is the same on some shards, and stays so.
    scattered = [
        i
        for i, leaf in enumerate(leaves)
        if flat_slices.is_cut(leaf, num_slices) and found[i].send == self.axes
    ]
    others = [i for i in range(len(leaves)) if i not in set(scattered)]
    with jax.named_scope(self.caller):
      total_weight = self._total_weight(weight)
      rows = [flat_slices.cut(leaves[i], num_slices) for i in scattered]
      own = self._reduce(
          self._scatter, rows, weight, total_weight, num_rows=num_slices
      )
      whole = [leaves[i] for i in others]
      whole = self._reduce(self._psum, whole, weight, total_weight)
      own += self.own(whole)
    by_position = dict(zip(scattered + others, own, strict=True))
    return treedef.unflatten([by_position[i] for i in range(len(leaves))])

  def own(self, tree: Any) -> Any:
    """Returns each shard's slice of a tree that is the same on all of them."""
    num_slices = self.num_slices()
    index = collectives.row_index(self.axes, self.groups)

    def own(leaf):
      if not flat_slices.is_cut(leaf, num_slices):
        return leaf
      rows = flat_slices.cut(leaf, num_slices)
      return lax.dynamic_index_in_dim(rows, index, keepdims=False)

    return jax.tree.map(own, tree)

  def gather(self, tree: Any, like: Any) -> Any:
    """Returns the tree of which each shard has its slice; the reverse of `own`.

    Args:
      tree: Each shard's slices of arrays of any dtypes.
      like: A tree of leaves of the shapes and the kinds of the result.
    """
    num_slices = self.num_slices()
    leaves, treedef = jax.tree.flatten(tree)
    like = treedef.flatten_up_to(like)
    cut = [i for i, x in enumerate(like) if flat_slices.is_cut(x, num_slices)]
    own = [axes_lib.to_varying(leaves[i], self.axes) for i in cut]

    def gather(buffer, _):
      return collectives.gather(buffer, self.axes, self.groups)

    keys = [(x.dtype, axes_lib.varying_axes(x)) for x in own]
    with jax.named_scope(self.caller):
      rows = bucketing.map_packed(
          gather, own, keys, self._levels(), growth=num_slices
      )
      for i, slices_of_leaf in zip(cut, rows, strict=True):
        leaves[i] = flat_slices.join(slices_of_leaf, like[i])
    return treedef.unflatten(leaves)

  def num_slices(self) -> int:
    """Returns among how many shards a slice is one.

    Raises:
      NameError: If an axis is not bound.
      ValueError: If `groups` do not fit the axis.
    """
    num_shards = axes_lib.size(self.axes, self.caller)
    if self.groups is None:
      return num_shards
    groups_lib.check_size(self.groups, num_shards)
    return len(self.groups[0])

  def _check(self, tree, weight):
    """Checks what is to be reduced; returns the weight as an array."""
    num_shards = axes_lib.size(self.axes, self.caller)
    if self.groups is not None:
      groups_lib.check_size(self.groups, num_shards)
    leaves_lib.check_inexact(tree, self.caller)
    if weight is not None or self.groups is not None:
      varying.check_per_shard(tree, self.axes, self.caller)
    elif self.on_invariant == 'error':
      varying.check_not_reduced(tree, self.axes, self.caller)
    if weight is None:
      return None
    weight = weights.as_weight(weight, (), self.caller)
    return axes_lib.to_varying(weight, self.axes)

  def _total_weight(self, weight):
    """Returns the divisor of a mean that is not known from the axes alone."""
    if self.groups is None:
      return None if weight is None else collectives.psum(weight, self.axes)
    if weight is not None:
      return self._psum(weight, self.axes)
    return collectives.group_size(self.axes[0], self.groups)

  def _reduce(self, sum_over, leaves, weight, total_weight, num_rows=None):
    """Reduces a list of checked leaves.

    Args:
      sum_over: Takes an array and axes; gives the sum, or a row of it.
      leaves: Arrays; with `num_rows`, of rows.
      weight: Of each shard, or `None`.
      total_weight: As `_total_weight` returns it.
      num_rows: As in `bucketing.map_packed`.

    Returns:
      What `sum_over` gives, scaled, in the dtype of each leaf.
    """

    def send(buffer, key):
      summed = sum_over(buffer, key.route.send)
      if self.kind == 'sum':
        return summed * key.route.factor
      if total_weight is None:
        return summed / key.route.divisor
      # A division by an array becomes a product where the compiler likes the
      # shape: packed leaves would get other bits.
      return summed * _reciprocal(total_weight, summed.dtype)

    results = [self._pass_through(leaf) for leaf in leaves]
    todo = [i for i, result in enumerate(results) if result is None]
    values = [_accumulator(leaves[i]) for i in todo]
    found = self._routes(values)
    values = [
        weights.weighted(collectives.psum(x, route.pending), weight)
        for x, route in zip(values, found, strict=True)
    ]
    keys = [
        leaf_plan.Key(route, x.dtype, axes_lib.varying_axes(x))
        for x, route in zip(values, found, strict=True)
    ]
    levels = self._levels() if any(route.send for route in found) else ()
    reduced = bucketing.map_packed(send, values, keys, levels, num_rows)
    for i, x in zip(todo, reduced, strict=True):
      results[i] = x.astype(jnp.result_type(leaves[i]))
    return results

  def _levels(self):
    # A buffer would gather what a mesh axis that is not mapped shards, and
    # under `vmap` nothing travels.
    if not axes_lib.on_mapped_mesh(self.axes):
      return ()
    return bucketing.levels(self.bucket_bytes, axes_lib.between_processes())

  def _pass_through(self, leaf):
    """Returns the result for a leaf that holds no number, or `None`."""
    if leaves_lib.is_float0(leaf):
      return leaf
    if jnp.size(leaf) > 0:
      return None
    stays = axes_lib.varying_axes(leaf)
    if self.groups is None:
      stays = stays.difference(self.axes)
    return axes_lib.to_varying(axes_lib.zeros(jax.typeof(leaf)), tuple(stays))

  def _routes(self, leaves):
    averaged = self.on_invariant == 'averaged'
    return leaf_plan.find(leaves, self.axes, averaged, self.caller)

  def _psum(self, x, axes):
    if self.groups is not None:
      return collectives.psum_in_groups(x, axes[0], self.groups)
    if self.algorithm == 'hierarchical' and len(axes) > 1:
      return collectives.psum_by_levels(x, axes)
    return collectives.psum(x, axes)

  def _scatter(self, rows, axes):
    return collectives.scatter(rows, axes, self.groups)


def _accumulator(leaf):
  leaf = jnp.asarray(leaf)
  return leaf.astype(leaves_lib.accumulator_dtype(leaf.dtype))


def _reciprocal(x, dtype):
  """Returns `1 / x`, or 1 for 0, in the real dtype that goes with `dtype`."""
  return 1 / jnp.where(x > 0, x, 1).astype(jnp.finfo(dtype).dtype)
