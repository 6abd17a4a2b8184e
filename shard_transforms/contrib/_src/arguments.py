"""Checks of arguments that several features of `contrib` share."""

from typing import Any

import jax

from shard_transforms._src.base import arguments
from shard_transforms._src.base import leaves as leaves_lib


def as_decay(name: str, value: Any) -> Any:
  """Returns a decay rate, checked to be in [0, 1) unless it is traced."""
  return arguments.as_real(
      name, value, 'be at least 0 and less than 1', lambda x: 0 <= x < 1
  )


def check_not_explicit(updates: Any, caller: str) -> None:
  """Checks that no leaf is sharded over `Explicit` axes; JAX cannot slice it.

  Raises:
    ValueError: If a leaf is sharded over an axis of type `Explicit`.
  """
  for path, leaf in jax.tree.leaves_with_path(updates):
    if not leaves_lib.is_float0(leaf) and any(jax.typeof(leaf).sharding.spec):
      raise ValueError(
          f'`updates` of `{caller}` are sharded over an axis of type'
          f' `Explicit` at {leaves_lib.name_of(path)}, {jax.typeof(leaf)}. Give'
          ' that axis of the mesh the type `Auto`, or list it in `axis_names`'
          ' of `jax.shard_map`.'
      )
