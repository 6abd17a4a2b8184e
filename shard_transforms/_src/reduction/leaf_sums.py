"""Sums and means of trees over shards, each leaf sent and scaled once."""

from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Sequence
import functools
import math
from typing import Any, NamedTuple

import chex
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import weights
from shard_transforms._src.reduction import bucketing
from shard_transforms._src.reduction import collectives
from shard_transforms._src.reduction import reduction_options
from shard_transforms._src.reduction import tree_sums


class Route(NamedTuple):
  """How one leaf becomes its sum or mean.

  Attributes:
    send: The axes over which the shards' values are summed.
    pending: The axes over which a delayed sum is still to be done.
    divisor: The number of summands behind the sum.
    factor: The factor that turns an average into the sum.
  """

  send: tuple[Hashable, ...]
  pending: tuple[Hashable, ...]
  divisor: int
  factor: int


class Key(NamedTuple):
  """What must be equal for leaves to share a buffer.

  Attributes:
    route: The axes and the scale.
    dtype: The dtype that is sent.
    varying: All axes over which the leaf varies; a shared buffer would vary
      over the axes of all of its leaves.
  """

  route: Route
  dtype: np.dtype
  varying: frozenset[Hashable]


class Share(NamedTuple):
  """How much a shard counts.

  Attributes:
    weight: Its own, float32 [], or `None` where all count the same.
    total: The divisor of a mean, or `None` where it is the size of the axes.
  """

  weight: jax.Array | None
  total: jax.Array | None


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
    checked = check(tree, weight, self)
    leaves, treedef = jax.tree.flatten(tree)
    with jax.named_scope(self.caller):
      own = share(checked, self)
      reduced = reduce(leaves, own, self)
    return treedef.unflatten(as_given(reduced, checked, self))


def check(
    tree: optax.Updates,
    weight: chex.Numeric | weights.Summed | None,
    options: reduction_options.ReductionOptions,
) -> jax.Array | weights.Summed | None:
  """Checks what is to be reduced; returns the weight as an array.

  Raises:
    NameError: If an axis is not bound.
    TypeError: If a leaf carries no gradient or the weight is no number.
    ValueError: If a leaf is reduced already and `on_invariant`, `weight` or
      `groups` do not allow it, or `weight` or `groups` are wrong.
  """
  options.num_shards()
  leaves_lib.check_inexact(tree, options.caller)
  if isinstance(weight, weights.Summed) and options.on_invariant == 'averaged':
    # The reduction before this one has divided.
    weight = None
  needs_own = weight, options.groups, options.order
  if any(x is not None for x in needs_own):
    leaves_lib.check_per_shard(tree, options.axes, options.caller)
  elif options.on_invariant == 'error':
    leaves_lib.check_not_reduced(tree, options.axes, options.caller)
  if weight is None:
    return None
  if isinstance(weight, weights.Summed) and options.order is not None:
    return _checked_sum(weight, options)
  weight = weights.as_weight(weight, (), options.caller)
  return axes_lib.to_varying(weight, options.axes)


def as_given(
    reduced: list[jax.Array],
    weight: jax.Array | weights.Summed | None,
    options: reduction_options.ReductionOptions,
) -> list[jax.Array]:
  """Returns reduced leaves in the dtypes of the towers, if they are of some.

  Raises:
    ValueError: If there are not as many leaves as updates of a tower.
  """
  is_sum = isinstance(weight, weights.Summed)
  return weight.as_given(reduced, options.caller) if is_sum else reduced


def _checked_sum(weight, options):
  """Returns the weight of sums over towers, if they can be reduced.

  Raises:
    ValueError: If they are to be means that are summed without weights.
  """
  if isinstance(weight.total, jax.Array):
    return axes_lib.to_varying(weight, options.axes)
  if options.kind == 'sum' and weight.total != 1:
    raise ValueError(
        "`reduction` of the towers must be 'sum' where shards are summed with"
        " `order='tree'`, got 'mean': a sum of the shards' means depends on the"
        ' number of shards.'
    )
  return weight


def share(
    weight: jax.Array | weights.Summed | None,
    options: reduction_options.ReductionOptions,
) -> Share:
  """Returns the share of a shard from the weight that `check` has returned."""
  axes, groups = options.axes, options.groups
  if options.order is not None or isinstance(weight, weights.Summed):
    return _share_in_order(weight, options)
  if groups is None:
    total = None if weight is None else collectives.psum(weight, axes)
  elif weight is None:
    total = collectives.group_size(axes[0], groups)
  else:
    total = collectives.psum_in_groups(weight, axes[0], groups)
  return Share(weight, total)


def _share_in_order(weight, options):
  """Returns the share of a shard whose total is added like the updates.

  One that is known is multiplied by the reciprocal like any other: the
  arithmetic is the same on any number of shards.
  """
  is_sum = isinstance(weight, weights.Summed)
  own = weight.total if is_sum else weight
  if not isinstance(own, jax.Array):
    groups = options.groups
    size = options.num_shards() if groups is None else len(groups[0])
    return Share(None, jnp.float32((1 if own is None else own) * size))
  total = tree_sums.sum_in_pairs(
      tree_sums.rounded(own), options.axes, options.groups
  )
  return Share(jnp.sign(own) if is_sum else own, total)


def reduce(
    leaves: Sequence[chex.Array],
    own: Share,
    options: reduction_options.ReductionOptions,
) -> list[jax.Array]:
  """Returns the sum or mean of each leaf, in its shape and dtype."""
  sum_over = functools.partial(_psum, options=options)
  return _reduce(sum_over, leaves, own, options)


def scatter(
    rows: Sequence[chex.Array],
    own: Share,
    options: reduction_options.ReductionOptions,
    num_rows: int,
) -> list[jax.Array]:
  """Returns each shard's row of the sum or mean of each [num_rows, ...]."""
  send = collectives.scatter
  if options.order is not None:
    send = tree_sums.scatter_in_pairs
  sum_over = functools.partial(send, groups=options.groups)
  return _reduce(sum_over, rows, own, options, num_rows)


def _psum(x, axes, options):
  if options.order is not None:
    return tree_sums.sum_in_pairs(x, axes, options.groups)
  if options.groups is not None:
    return collectives.psum_in_groups(x, axes[0], options.groups)
  if options.algorithm == 'hierarchical' and len(axes) > 1:
    return collectives.psum_by_levels(x, axes)
  return collectives.psum(x, axes)


def _reduce(
    sum_over: Callable[..., jax.Array],
    leaves: Sequence[chex.Array],
    own: Share,
    options: reduction_options.ReductionOptions,
    num_rows: int | None = None,
) -> list[jax.Array]:
  """Reduces a list of checked leaves.

  Args:
    sum_over: Takes an array and axes; gives the sum, or a row of it.
    leaves: Arrays; with `num_rows`, of rows.
    own: The share of this shard.
    options: How to reduce them.
    num_rows: As in `bucketing.map_packed`.

  Returns:
    What `sum_over` gives, scaled, in the dtype of each leaf.
  """
  results: list[Any] = [_pass_through(leaf, options) for leaf in leaves]
  todo = [i for i, result in enumerate(results) if result is None]
  values, keys = _prepare([leaves[i] for i in todo], own.weight, options)
  factors = {}
  if options.kind == 'mean' and own.total is not None:
    factors = {
        d: _reciprocal(own.total, d) for d in {key.dtype for key in keys}
    }

  def send(buffer, key):
    summed = sum_over(buffer, key.route.send)
    factor = factors.get(key.dtype)
    scaled = _scaled(summed, key.route, factor, options.kind)
    return scaled if options.order is None else tree_sums.rounded(scaled)

  sends = any(key.route.send for key in keys)
  levels = options.levels() if sends else ()
  reduced = bucketing.map_packed(send, values, keys, levels, num_rows)
  for i, x in zip(todo, reduced, strict=True):
    results[i] = leaves_lib.as_dtype(x, leaves_lib.dtype_of(leaves[i]))
  return results


def _prepare(leaves, weight, options):
  """Returns the weighted values that are sent, and the key of each."""
  values = [leaves_lib.as_accumulator(leaf) for leaf in leaves]
  averaged = options.on_invariant == 'averaged'
  routes = find_routes(values, options.axes, averaged, options.caller)
  weigh = weights.weighing(weight)
  values = [
      weigh(collectives.psum(x, route.pending))
      for x, route in zip(values, routes, strict=True)
  ]
  if options.order is not None:
    values = list(map(tree_sums.rounded, values))
  keys = [
      Key(route, x.dtype, axes_lib.varying_axes(x))
      for x, route in zip(values, routes, strict=True)
  ]
  return values, keys


def find_routes(
    leaves: Sequence[chex.Array],
    axes: Sequence[Hashable],
    averaged: bool,
    caller: str,
) -> list[Route]:
  """Returns the route of each leaf.

  Args:
    leaves: Arrays.
    axes: The axes to sum over, all of them bound.
    averaged: Whether a leaf that is the same on all shards is an average.
    caller: The public name that errors show.

  Raises:
    NameError: If an axis is not bound.
  """
  sizes = [axes_lib.size([axis], caller) for axis in axes]
  per_axis = [axes_lib.states(leaves, axis) for axis in axes]
  return [
      _route(list(zip(axes, sizes, states, strict=True)), averaged)
      for states in zip(*per_axis, strict=True)
  ]


def _route(axes, averaged):
  """Returns the route of a leaf, given (axis, size, state) for each axis."""
  done = [n for _, n, s in axes if s == 'invariant' and averaged]
  return Route(
      send=tuple(a for a, _, s in axes if s in ('varying', 'untracked')),
      pending=tuple(a for a, _, s in axes if s == 'unreduced'),
      divisor=math.prod(n for _, n, _ in axes) // math.prod(done),
      factor=math.prod(done),
  )


def _scaled(summed, route, factor, kind):
  """Returns a sum, or the mean of a total whose reciprocal is `factor`."""
  if kind == 'sum':
    # `*` and `/` take several times as long to trace.
    return lax.mul(summed, summed.dtype.type(route.factor))
  if factor is None:
    return lax.div(summed, summed.dtype.type(route.divisor))
  # XLA turns a division by an array into a product for some shapes only: packed
  # leaves would get other bits.
  return lax.mul(summed, factor)


def _reciprocal(x, dtype):
  """Returns `1 / x`, or 1 for 0, as precise as `dtype`."""
  divisor = weights.safe_divisor(x).astype(jnp.finfo(dtype).dtype)
  return (1 / divisor).astype(dtype)


def _pass_through(leaf, options):
  """Returns the result for a leaf that holds no number, or `None`."""
  if leaves_lib.is_float0(leaf):
    return leaf
  if jnp.size(leaf) > 0:
    return None
  stays = axes_lib.varying_axes(leaf)
  if options.groups is None:
    stays = stays.difference(options.axes)
  return axes_lib.to_varying(axes_lib.zeros(jax.typeof(leaf)), tuple(stays))
