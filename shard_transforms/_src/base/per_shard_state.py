"""Values of each shard that a state keeps: a leading axis, of length 1 inside.

What differs between shards has a leading axis of length 1 inside the mapped
function, and of the number of shards outside.
"""

from collections.abc import Hashable
from typing import Any

import jax

from shard_transforms._src.base import axes as axes_lib


def store(leaf: Any, axes: tuple[Hashable, ...]) -> Any:
  """Returns a shard's own value as its state keeps it; itself without axes."""
  if leaf is None or not axes:
    return leaf
  return axes_lib.to_varying(leaf[None], axes)


def own(leaf: jax.Array, axes: tuple[Hashable, ...], caller: str) -> jax.Array:
  """Takes a shard's own value out of a leaf that is kept per shard.

  Raises:
    ValueError: If the leaf does not have a leading axis of length 1.
  """
  if not axes:
    return leaf
  if leaf.shape[:1] != (1,):
    raise ValueError(
        f'State of `{caller}` with `axis_name` must have a leading axis of'
        f' length 1 on each shard, got the shape {leaf.shape}. Map it with the'
        ' specs of `shard_transforms.state_specs`.'
    )
  return leaf[0]
