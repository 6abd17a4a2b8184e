"""Sums and means of trees over shards: the only file that sends gradients."""

from collections.abc import Hashable
import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from shard_transforms._src import arguments
from shard_transforms._src import axes as axes_lib
from shard_transforms._src import groups as groups_lib
from shard_transforms._src import leaves as leaves_lib
from shard_transforms._src import packing

Kind = Literal['mean', 'sum']
OnInvariant = Literal['error', 'summed', 'averaged']


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
  """

  caller: str
  kind: Kind
  axes: tuple[Hashable, ...]
  groups: groups_lib.Groups | None = None
  on_invariant: OnInvariant = 'error'
  bucket_bytes: int | str = 'auto'

  def __post_init__(self):
    if self.on_invariant not in ('error', 'summed', 'averaged'):
      raise ValueError(
          "`on_invariant` must be 'error', 'summed' or 'averaged', got"
          f' {self.on_invariant!r}.'
      )
    if self.groups is not None and len(self.axes) > 1:
      raise ValueError(
          f'`groups` must come with one axis, got {self.axes!r}. Number the'
          ' shards along a mesh of one axis.'
      )
    packing.check_bucket_bytes(self.bucket_bytes)

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
    num_shards = axes_lib.size(self.axes, self.caller)
    if self.groups is not None:
      groups_lib.check_size(self.groups, num_shards)
    leaves_lib.check_inexact(tree, self.caller)
    if weight is not None or self.groups is not None:
      check_per_shard(tree, self.axes, self.caller)
    elif self.on_invariant == 'error':
      _check_varying(tree, self.axes, self.caller)
    if weight is not None:
      weight = arguments.as_weight(weight, (), self.caller)
    leaves, treedef = jax.tree.flatten(tree)
    with jax.named_scope(self.caller):
      return treedef.unflatten(self._reduce(leaves, weight))

  def _reduce(self, leaves, weight):
    """Reduces a list of checked leaves."""
    total_weight = None
    if weight is not None:
      weight = axes_lib.to_varying(weight, self.axes)
      total_weight = self._sum(weight, self.axes)
    elif self.groups is not None:
      total_weight = _group_size(self.axes[0], self.groups)

    def send(buffer, key):
      summed = self._sum(buffer, key.route.send)
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
    routes = self._routes(values)
    values = [
        weighted(lax.psum(x, route.pending) if route.pending else x, weight)
        for x, route in zip(values, routes, strict=True)
    ]
    keys = [
        _Key(route, x.dtype, axes_lib.varying_axes(x))
        for x, route in zip(values, routes, strict=True)
    ]
    # A buffer would gather what a mesh axis that is not mapped shards, and
    # under `vmap` nothing travels.
    packs = axes_lib.on_mapped_mesh(self.axes)
    packs = packs and any(route.send for route in routes)
    bucket_bytes = self.bucket_bytes if packs else 0
    reduced = packing.map_packed(send, values, keys, bucket_bytes)
    for i, x in zip(todo, reduced, strict=True):
      results[i] = x.astype(jnp.result_type(leaves[i]))
    return results

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
    """Returns what has to be done with each leaf."""
    sizes = [axes_lib.size([axis], self.caller) for axis in self.axes]
    per_axis = [axes_lib.states(leaves, axis) for axis in self.axes]
    return [
        self._route(list(zip(self.axes, sizes, states, strict=True)))
        for states in zip(*per_axis, strict=True)
    ]

  def _route(self, axes):
    """Returns the route of a leaf, given (axis, size, state) for each axis."""
    averaged = self.on_invariant == 'averaged'
    done = [n for _, n, s in axes if s == 'invariant' and averaged]
    return _Route(
        send=tuple(a for a, _, s in axes if s in ('varying', 'untracked')),
        pending=tuple(a for a, _, s in axes if s == 'unreduced'),
        divisor=math.prod(n for _, n, _ in axes) // math.prod(done),
        factor=math.prod(done),
    )

  def _sum(self, x, axes):
    if self.groups is None:
      return _psum(x, axes)
    return _sum_in_groups(x, axes[0], self.groups)


class _Route(NamedTuple):
  """What turns one leaf into its sum or mean.

  Attributes:
    send: The axes over which the shards' values are summed.
    pending: The axes over which a delayed sum is still to be done.
    divisor: The number of summands behind the sum.
    factor: What an average has to be multiplied by to give the sum.
  """

  send: tuple[Hashable, ...]
  pending: tuple[Hashable, ...]
  divisor: int
  factor: int


class _Key(NamedTuple):
  """What leaves must share to be sent together.

  Attributes:
    route: The axes and the scale.
    dtype: The dtype that is sent.
    varying: All axes over which the leaf varies; a shared buffer would vary
      over the axes of all of its leaves.
  """

  route: _Route
  dtype: Any
  varying: frozenset[Hashable]


def total(x: jax.Array, axes: tuple[Hashable, ...]) -> jax.Array:
  """Returns the sum of one array over the shards; itself without axes."""
  return _psum(axes_lib.to_varying(x, axes), axes)


def agreed(decision: jax.Array) -> jax.Array:
  """Returns a decision that is yes where all shards that may differ say so."""
  axes = tuple(axes_lib.varying_axes(decision))
  return lax.pmin(decision.astype(jnp.int32), axes) > 0 if axes else decision


def check_per_shard(tree: Any, axes: tuple[Hashable, ...], caller: str) -> None:
  """Checks that each shard still has its own values, of an equal standing.

  Raises:
    ValueError: If a leaf is reduced over an axis, or its sum is pending.
  """
  _check_varying(tree, axes, caller, refused=('invariant', 'unreduced'))


def _check_varying(tree, axes, caller, refused=('invariant',)):
  found = jax.tree.leaves_with_path(tree)
  found = [(p, leaf) for p, leaf in found if not leaves_lib.is_float0(leaf)]
  for axis in axes:
    states = axes_lib.states([leaf for _, leaf in found], axis)
    for (path, leaf), state in zip(found, states, strict=True):
      if state in refused:
        name = jax.tree_util.keystr(path) or 'the root'
        got = f'{name} {list(jnp.shape(leaf))}, typed {state}'
        raise ValueError(
            f'`updates` of `{caller}` must be per shard over {axis!r}, got'
            f' {got}: {_REMEDIES[state].format(axis=axis)}'
        )


_REMEDIES = {
    'invariant': (
        'it is already reduced. `jax.grad` sums the gradient of replicated'
        ' parameters under `jax.shard_map`, and an earlier reduction leaves the'
        ' same type. Take the gradient of `shard_transforms.per_shard(params,'
        ' {axis!r})`, as `shard_transforms.value_and_grad` does, and reduce it'
        ' once. Or, where neither weights, groups nor a wrapper need the'
        ' gradient of each shard, tell `cross_shard_mean` or `cross_shard_sum`'
        " that it is `on_invariant='summed'` or `'averaged'`."
    ),
    'unreduced': (
        'its sum over the shards is pending. Weights, groups and wrappers need'
        ' the gradient of each shard: take that of'
        ' `shard_transforms.per_shard(params, {axis!r})`.'
    ),
}


def _accumulator(leaf):
  leaf = jnp.asarray(leaf)
  return leaf.astype(leaves_lib.accumulator_dtype(leaf.dtype))


def weighted(x: jax.Array, weight: jax.Array | None) -> jax.Array:
  """Returns `weight * x`, which is zero for a weight of zero even of a NaN."""
  return x if weight is None else jnp.where(weight > 0, weight * x, 0)


def _psum(x, axes):
  try:
    return lax.psum(x, axes) if axes else x
  except (AssertionError, ValueError) as error:
    raise NotImplementedError(
        f'JAX cannot sum {jax.typeof(x)} over the axes {axes!r} here. An axis'
        ' of `jax.vmap` inside `jax.shard_map` needs `check_vma=False`.'
    ) from error


def _reciprocal(x, dtype):
  """Returns `1 / x`, or 1 for 0, in the real dtype that goes with `dtype`."""
  return 1 / jnp.where(x > 0, x, 1).astype(jnp.finfo(dtype).dtype)


def _group_size(axis, groups):
  """Returns the number of shards in each shard's own group."""
  sizes = jnp.asarray(groups_lib.size_of_shard(groups), jnp.float32)
  return sizes[lax.axis_index(axis)]


def _sum_in_groups(x, axis, groups):
  """Returns the sum of `x` over the shards of each shard's own group."""
  # JAX has no grouped collective under `vmap`, and flattening would gather what
  # a mesh axis that is not mapped shards.
  if groups_lib.is_even(groups) and axes_lib.on_mapped_mesh([axis]):
    return _scatter_and_gather(x, axis, groups)
  return _sum_one_hot(x, axis, groups)


def _scatter_and_gather(x, axis, groups):
  # Unlike `psum`, these know groups under `shard_map(check_vma=True)` too.
  flat = jnp.pad(x.ravel(), (0, -x.size % len(groups[0])))
  part = lax.psum_scatter(flat, axis, axis_index_groups=groups, tiled=True)
  whole = lax.all_gather(part, axis, axis_index_groups=groups, tiled=True)
  return whole[: x.size].reshape(x.shape)


def _sum_one_hot(x, axis, groups):
  """Sums [number of groups, *shape] with a row a group, and picks its own."""
  row = jnp.asarray(groups_lib.group_of_shard(groups))[lax.axis_index(axis)]
  rows = jnp.arange(len(groups)).reshape((-1,) + (1,) * x.ndim)
  total = lax.psum(jnp.where(rows == row, x[None], 0), axis)
  return total[row]
