"""Sums and means of trees over shards.

Each leaf is communicated and scaled once.
"""

from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Sequence
import dataclasses
import functools
from typing import ClassVar, Literal, NamedTuple, get_args

import chex
import jax
from jax import lax
import jax.numpy as jnp
import optax

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import groups as groups_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import weights
from shard_transforms._src.reduction import bucketing
from shard_transforms._src.reduction import collectives
from shard_transforms._src.reduction import thresholds

IfReduced = Literal['error', 'mean']


class Share(NamedTuple):
  """The weight of a shard in a reduction.

  Attributes:
    weight: The weight of this shard, float32 [] (float64 if it has 64 bits), or
      `None` if all shards have the same weight.
    total: The sum of the weights of all shards, by which a mean is divided, or
      `None` to divide by the number of shards.
  """

  weight: jax.Array | None
  total: jax.Array | None


UNWEIGHTED = Share(None, None)


@dataclasses.dataclass(frozen=True)
class Reduction:
  """The sum or mean of a tree over shards; the constructor checks arguments.

  Attributes:
    caller: The public name, for errors and profiles.
    kind: `'mean'` or `'sum'`.
    axes: The mapped axes.
    groups: A partition of the shards into groups that reduce separately, or
      `None`.
    if_reduced: The treatment of leaves that are the same on all shards:
      `'error'`, or `'mean'` for leaves that are already means.
    packing: The thresholds for packing leaves into shared buffers.
  """

  caller: str
  kind: weights.MeanOrSum
  axes: tuple[Hashable, ...]
  groups: groups_lib.Groups | None = None
  if_reduced: IfReduced = 'error'
  packing: ClassVar[thresholds.Table] = thresholds.WHOLE

  def __post_init__(self):
    if self.if_reduced not in get_args(IfReduced):
      raise ValueError(
          f"`if_reduced` must be 'error' or 'mean', got {self.if_reduced!r}."
      )
    if self.if_reduced == 'mean' and self.kind == 'sum':
      raise ValueError(
          f"`if_reduced='mean'` of `{self.caller}` assumes that reduced leaves"
          " are means, so it needs `reduction='mean'`, got 'sum'."
      )
    if self.groups is not None and len(self.axes) > 1:
      raise ValueError(
          '`groups` number the shards along one axis, but `axis_name` names'
          f' several, {self.axes!r}. Use a mesh with one axis for the shards.'
      )

  def __call__(
      self, tree: chex.ArrayTree, weight: chex.Numeric | None = None
  ) -> chex.ArrayTree:
    """Returns the (weighted) sum or mean of `tree` over the shards.

    The result has the same shapes and dtypes, and is the same on all shards of
    `axes`, or of a group.
    """
    leaves, treedef = jax.tree.flatten(tree)
    with jax.named_scope(self.caller):
      share = self.share(tree, weight, allow_unreduced=True)
      return treedef.unflatten(self.reduce(leaves, share))

  def check_params(self, params: optax.Params | None) -> None:
    """Checks that parameters are the same on all shards of the reduction."""
    # Different groups may have different parameters.
    axes = self.axes if self.groups is None else ()
    leaves_lib.check_not_slices(params, axes, self.caller)

  def sum_over(self, x: jax.Array, axes: tuple[Hashable, ...]) -> jax.Array:
    """Returns the sum of an array over the shards."""
    if self.groups is not None:
      return collectives.psum_in_groups(x, axes[0], self.groups)
    return collectives.psum(x, axes)

  def scatter_over(
      self, rows: jax.Array, axes: tuple[Hashable, ...]
  ) -> jax.Array:
    """Returns this shard's row of the sum of rows over the shards."""
    return collectives.scatter(rows, axes, self.groups)

  def num_shards(self) -> int:
    """Returns the number of shards that reduce together, all or one group."""
    num_shards = axes_lib.num_shards(self.axes, self.caller)
    if self.groups is not None:
      groups_lib.check_size(self.groups, num_shards)
      num_shards = len(self.groups[0])
    return num_shards

  def summed_axes(self, leaf: chex.Array) -> tuple[Hashable, ...]:
    """Returns the axes over which a checked leaf differs between shards."""
    if self.if_reduced == 'error':
      return self.axes
    return tuple(
        axis
        for axis in self.axes
        if axes_lib.variance_of(leaf, axis) != 'invariant'
    )

  def share(
      self,
      tree: optax.Updates,
      weight: chex.Numeric | None,
      allow_unreduced: bool = False,
  ) -> Share:
    """Checks the leaves and the weight of this shard, and sums the weights."""
    self.num_shards()
    leaves_lib.check_inexact(tree, self.caller)
    allowed = []
    if weight is None and self.groups is None:
      if self.if_reduced == 'mean':
        allowed.append('invariant')
      if allow_unreduced:
        allowed.append('unreduced')
    leaves_lib.check_per_shard(tree, self.axes, self.caller, allowed)
    if weight is None:
      return UNWEIGHTED
    checked = weights.as_weight(weight, (), self.caller)
    checked = axes_lib.to_varying(checked, self.axes)
    return Share(checked, self.sum_over(checked, self.axes))

  def reduce(
      self,
      leaves: Sequence[chex.Array],
      share: Share = UNWEIGHTED,
      sum_over: Callable[..., jax.Array] | None = None,
      num_rows: int | None = None,
  ) -> list[jax.Array]:
    """Returns the sum or mean of each leaf, in the dtype of the leaf.

    Args:
      leaves: Checked leaves.
      share: The share of this shard.
      sum_over: Takes an array and axes, and returns the sum over the shards, or
        one of the `num_rows` rows of the sum; `self.sum_over` by default.
      num_rows: The number of rows of each leaf, [num_rows, ...], or `None`.
    """
    axes = self.axes if self.groups is None else ()
    results = [leaves_lib.sum_of_empty(leaf, axes) for leaf in leaves]
    positions = [i for i, result in enumerate(results) if result is None]
    arrays = [jnp.asarray(leaves[i]) for i in positions]
    values = list(map(leaves_lib.as_accumulator, arrays))
    if share.weight is not None:
      values = list(map(weights.scale_by_weight(share.weight), values))
    # A buffer varies over the axes of all its leaves.
    keys = [
        (self.summed_axes(x), x.dtype, axes_lib.varying_axes(x)) for x in values
    ]
    # JAX cannot concatenate unreduced arrays.
    is_joined = not any(map(axes_lib.unreduced_axes, values))
    is_joined &= any(axes for axes, *_ in keys)
    levels = thresholds.levels(self.axes, self.packing) if is_joined else ()
    divide = self._divide_fn(share.total)

    def reduce_buffer(buffer, key):
      axes, *_ = key
      summed = (sum_over or self.sum_over)(buffer, axes)
      return summed if self.kind == 'sum' else divide(summed, axes)

    reduced = bucketing.map_packed(
        reduce_buffer, values, keys, levels, num_rows
    )
    for i, array, x in zip(positions, arrays, reduced, strict=True):
      results[i] = leaves_lib.as_dtype(x, array.dtype)
    return results

  def _divide_fn(self, total):
    """Returns a function that divides sums over axes to means."""
    reciprocal = functools.cache(functools.partial(_reciprocal, total))

    def divide(summed, axes):
      if total is not None:
        # XLA replaces a division by an array with a multiplication only for
        # some shapes, so packed leaves would not be bitwise equal to unpacked
        # leaves.
        return lax.mul(summed, reciprocal(summed.dtype))
      size = axes_lib.num_shards(axes, self.caller)
      if self.groups is not None:
        size = len(self.groups[0])
      # `/` takes several times as long to trace.
      return lax.div(summed, summed.dtype.type(size))

    return divide


def _reciprocal(x, dtype):
  """Returns `1 / x`, or 1 if `x` is 0, with the precision of `dtype`."""
  divisor = weights.safe_divisor(x).astype(jnp.finfo(dtype).dtype)
  return (1 / divisor).astype(dtype)
