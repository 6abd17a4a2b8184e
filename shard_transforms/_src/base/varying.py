"""Checks, by the types of updates, that each shard still has its own."""

from collections.abc import Hashable
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib

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


def check_per_shard(tree: Any, axes: Sequence[Hashable], caller: str) -> None:
  """Checks that each shard still has its own values.

  Raises:
    ValueError: If a leaf is reduced over an axis, or its sum is pending.
  """
  _check(tree, axes, caller, refused=('invariant', 'unreduced'))


def check_not_reduced(tree: Any, axes: Sequence[Hashable], caller: str) -> None:
  """Checks that values are not reduced yet; their sum may be pending.

  Raises:
    ValueError: If a leaf is reduced over an axis.
  """
  _check(tree, axes, caller, refused=('invariant',))


def check_varies_with(tree: Any, others: Any, caller: str) -> None:
  """Checks that leaves vary over each axis over which others do.

  What is computed from both varies, and would hide that a leaf is reduced.

  Args:
    tree: The leaves, any of which may be `None`.
    others: For each of them another array, or `None`.
    caller: What errors name.

  Raises:
    ValueError: If a leaf is reduced where the other is not, or is pending.
  """
  axes = set().union(*map(axes_lib.varying_axes, jax.tree.leaves(others)))
  for axis in sorted(axes, key=str):

    def to_check(other, leaf, axis=axis):
      varies = other is not None and axis in axes_lib.varying_axes(other)
      return leaf if varies else None

    found = jax.tree.map(to_check, others, tree, is_leaf=leaves_lib.is_none)
    check_per_shard(found, (axis,), caller)


def _check(tree, axes, caller, refused):
  found = jax.tree.leaves_with_path(tree)
  found = [(p, leaf) for p, leaf in found if not leaves_lib.is_float0(leaf)]
  for axis in axes:
    states = axes_lib.states([leaf for _, leaf in found], axis)
    for (path, leaf), state in zip(found, states, strict=True):
      if state in refused:
        name = leaves_lib.name_of(path)
        got = f'{name} {list(jnp.shape(leaf))}, typed {state}'
        raise ValueError(
            f'`updates` of `{caller}` must be per shard over {axis!r}, got'
            f' {got}: {_REMEDIES[state].format(axis=axis)}'
        )
