"""State that differs between shards: it has a leading axis.

Its length is 1 inside the mapped function, and the number of shards outside.
"""

from collections.abc import Hashable
from typing import Any

import jax
from jax import lax

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib


def store(tree: Any, axes: tuple[Hashable, ...]) -> Any:
  """Returns a shard's own values as its state keeps them."""
  if not axes:
    return tree
  return axes_lib.to_varying(jax.tree.map(_store, _apart(tree)), axes)


def own(tree: Any, axes: tuple[Hashable, ...], caller: str) -> Any:
  """Returns a shard's own values, which its state keeps per shard.

  Raises:
    ValueError: If a leaf has no leading axis of length 1.
  """
  if not axes:
    return tree
  for leaf in jax.tree.leaves(tree):
    if leaf.shape[:1] != (1,):
      raise ValueError(
          f'State of `{caller}` with `axis_name` must have a leading axis of'
          f' length 1 on each shard, got the shape {leaf.shape}. Map it with'
          ' the specs of `shard_transforms.state_specs`; for `jax.pmap`, make'
          ' it by `jax.pmap(tx.init, axis_name=...)(replicated_params)`.'
      )
  return _apart(jax.tree.map(_own, tree))


# Indexing takes several times as long to trace.
def _store(leaf):
  return lax.expand_dims(leaf, (0,))


def _own(leaf):
  return lax.squeeze(leaf, (0,))


def _apart(tree):
  """Keeps changes of shape apart from arithmetic, where XLA respects barriers.

  XLA for CPUs copies what a fusion of both writes; apart, it writes into the
  donated array.
  """
  if axes_lib.fuses_up_to_barriers():
    return lax.optimization_barrier(tree)
  return tree


def check_kept(before: Any, after: Any, caller: str) -> None:
  """Checks that a step leaves shared state the same on all shards.

  Raises:
    ValueError: If it differs between shards.
  """
  old = jax.tree.leaves(before)
  new = jax.tree.leaves_with_path(after)
  for held, (path, leaf) in zip(old, new, strict=True):
    differs = axes_lib.varying_axes(leaf) - axes_lib.varying_axes(held)
    if differs:
      name = leaves_lib.name_of(path)
      raise ValueError(
          f'`axis_name` of `{caller}` must name {sorted(differs, key=str)},'
          ' because state differs between those shards at'
          f' {name.removeprefix(".")}, but is kept as if it were the same on'
          ' all. Make the state with `shard_transforms.init_state`.'
      )
