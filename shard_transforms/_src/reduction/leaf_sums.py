"""Sums and means of trees over shards.

Each leaf is communicated and scaled once.
"""

from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Sequence
import dataclasses
import functools
import operator
from typing import ClassVar, Literal, NamedTuple, get_args

import chex
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import groups as groups_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import weights
from shard_transforms._src.reduction import bucketing
from shard_transforms._src.reduction import collectives
from shard_transforms._src.reduction import thresholds

IfReduced = Literal['error', 'mean']


class Key(NamedTuple):
  """Properties that must be equal for leaves to share a buffer.

  Attributes:
    axes: The axes over which the leaf is reduced.
    dtype: The dtype in which the leaf is summed.
    varying: All axes over which the leaf varies. A buffer varies over the axes
      of all its leaves.
  """

  axes: tuple[Hashable, ...]
  dtype: np.dtype
  varying: frozenset[Hashable]


class Share(NamedTuple):
  """The weight of a shard in a reduction.

  Attributes:
    weight: The weight of this shard, float32 [], or `None` if all shards have
      the same weight.
    total: The divisor of a mean, or `None` to divide by the number of shards.
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
    sent: How leaves are communicated: whole or in slices.
  """

  caller: str
  kind: weights.MeanOrSum
  axes: tuple[Hashable, ...]
  groups: groups_lib.Groups | None = None
  if_reduced: IfReduced = 'error'
  sent: ClassVar[thresholds.Sent] = 'whole'

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
    checked = check(tree, weight, self, allow_unreduced=self.sent == 'whole')
    leaves, treedef = jax.tree.flatten(tree)
    with jax.named_scope(self.caller):
      local_share = UNWEIGHTED if checked is None else share(checked, self)
      reduced = reduce(leaves, local_share, self)
    return treedef.unflatten(reduced)

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


def check(
    tree: optax.Updates,
    weight: chex.Numeric | None,
    options: Reduction,
    allow_unreduced: bool = False,
) -> jax.Array | None:
  """Checks the tree and the weight; returns the weight as an array."""
  options.num_shards()
  leaves_lib.check_inexact(tree, options.caller)
  allowed = []
  if weight is None and options.groups is None:
    allowed += ['invariant'] * (options.if_reduced == 'mean')
    allowed += ['unreduced'] * allow_unreduced
  leaves_lib.check_per_shard(tree, options.axes, options.caller, allowed)
  if weight is None:
    return None
  weight = weights.as_weight(weight, (), options.caller)
  return axes_lib.to_varying(weight, options.axes)


def share(weight: jax.Array | None, options: Reduction) -> Share:
  """Returns the share of this shard for a weight returned by `check`."""
  if weight is None:
    return UNWEIGHTED
  return Share(weight, options.sum_over(weight, options.axes))


def scatter(
    rows: Sequence[chex.Array],
    local_share: Share,
    options: Reduction,
    num_rows: int,
) -> list[jax.Array]:
  """Returns this shard's row of the sum or mean of arrays [num_rows, ...]."""
  return reduce(rows, local_share, options, options.scatter_over, num_rows)


def reduce(
    leaves: Sequence[chex.Array],
    local_share: Share,
    options: Reduction,
    sum_over: Callable[..., jax.Array] | None = None,
    num_rows: int | None = None,
) -> list[jax.Array]:
  """Returns the sum or mean of each leaf, in the dtype of the leaf.

  Args:
    leaves: Checked leaves.
    local_share: The share of this shard.
    options: The reduction.
    sum_over: Takes an array and axes, and returns the sum over the shards, or
      one of the `num_rows` rows of the sum; `options.sum_over` by default.
    num_rows: The number of rows of each leaf, [num_rows, ...], or `None`.
  """
  sum_over = options.sum_over if sum_over is None else sum_over
  axes = options.axes if options.groups is None else ()
  results, positions, values, keys = [], [], [], []
  for i, leaf in enumerate(leaves):
    results.append(leaves_lib.sum_of_empty(leaf, axes))
    if results[i] is None:
      x = jnp.asarray(leaf)
      positions.append((i, x.dtype))
      dtype = leaves_lib.accumulator_dtype(x.dtype)
      values.append(leaves_lib.as_dtype(x, dtype))
  if local_share.weight is not None:
    values = list(map(weights.scale_by_weight(local_share.weight), values))
  for x in values:
    varying = axes_lib.varying_axes(x)
    keys.append(Key(sent_over(x, options), x.dtype, varying))
  reciprocal = functools.cache(
      functools.partial(_reciprocal, local_share.total)
  )

  def reduce_buffer(buffer, key):
    summed = sum_over(buffer, key.axes)
    if options.kind == 'sum':
      return summed
    if local_share.total is not None:
      # XLA replaces a division by an array with a multiplication only for some
      # shapes, so packed leaves would not be bitwise equal to unpacked leaves.
      return lax.mul(summed, reciprocal(key.dtype))
    size = axes_lib.num_shards(key.axes, options.caller)
    if options.groups is not None:
      size = len(options.groups[0])
    # `/` takes several times as long to trace.
    return lax.div(summed, summed.dtype.type(size))

  levels = ()
  # JAX cannot concatenate unreduced arrays.
  is_joined = not any(map(axes_lib.unreduced_axes, values))
  if is_joined and any(map(operator.attrgetter('axes'), keys)):
    levels = thresholds.levels(options.axes, options.sent)
  reduced = bucketing.map_packed(reduce_buffer, values, keys, levels, num_rows)
  for (i, dtype), x in zip(positions, reduced, strict=True):
    results[i] = leaves_lib.as_dtype(x, dtype)
  return results


def sent_over(leaf: chex.Array, options: Reduction) -> tuple[Hashable, ...]:
  """Returns the axes over which a checked leaf differs between shards."""
  if options.if_reduced == 'error':
    return options.axes
  return tuple(
      axis
      for axis in options.axes
      if axes_lib.variance_of(leaf, axis) != 'invariant'
  )


def _reciprocal(x, dtype):
  """Returns `1 / x`, or 1 if `x` is 0, with the precision of `dtype`."""
  divisor = weights.safe_divisor(x).astype(jnp.finfo(dtype).dtype)
  return (1 / divisor).astype(dtype)
