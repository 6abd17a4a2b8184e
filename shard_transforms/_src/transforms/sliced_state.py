"""The state of a transformation that runs on slices, as each shard keeps it.

A leaf whose shape on slices differs from its shape on the whole is itself a
slice, and has the leading axis of leaves that differ between shards.
"""

from collections.abc import Hashable

import jax
from jax import lax
import jax.numpy as jnp
import optax

from shard_transforms._src.base import per_shard_state


def store(
    own_state: optax.OptState,
    whole_kinds: optax.OptState,
    axes: tuple[Hashable, ...],
) -> optax.OptState:
  """Returns a shard's own state as it is kept.

  Args:
    own_state: State for the slices of a shard.
    whole_kinds: Shapes and dtypes of the state for whole parameters.
    axes: The mapped axes.
  """
  leaves, treedef = jax.tree.flatten(own_state)
  wholes = treedef.flatten_up_to(whole_kinds)
  pairs = enumerate(zip(leaves, wholes, strict=True))
  cut = [i for i, (x, y) in pairs if jnp.shape(x) != jnp.shape(y)]
  stored = per_shard_state.store([leaves[i] for i in cut], axes)
  for i, leaf in zip(cut, stored, strict=True):
    leaves[i] = leaf
  return treedef.unflatten(leaves)


def take(
    state: optax.OptState,
    own_kinds: optax.OptState,
    whole_kinds: optax.OptState,
    caller: str,
) -> optax.OptState:
  """Returns a shard's own state from the state that is kept.

  Args:
    state: As `store` returns it.
    own_kinds: Shapes and dtypes of the state for the slices of a shard.
    whole_kinds: Shapes and dtypes of the state for whole parameters.
    caller: What errors name.

  Raises:
    ValueError: If it has other leaves, or leaves of other shapes.
  """
  made_for_others = (
      f'State of `{caller}` must be made for these parameters and this number'
      ' of shards by `shard_transforms.init_state`, and mapped with the specs'
      ' of `shard_transforms.state_specs`, got '
  )
  found = jax.tree.structure(state), jax.tree.structure(own_kinds)
  if found[0] != found[1]:
    raise ValueError(made_for_others + f'the tree {found[0]}.')

  def take_leaf(path, leaf, own, whole):
    is_slice = own.shape != whole.shape
    if jnp.shape(leaf) != (1,) * is_slice + own.shape:
      raise ValueError(
          f'{made_for_others}the shape {jnp.shape(leaf)} at'
          f' {jax.tree_util.keystr(path)}, where a shard has'
          f' {(1,) * is_slice + own.shape}.'
      )
    return lax.squeeze(leaf, (0,)) if is_slice else leaf

  return jax.tree.map_with_path(take_leaf, state, own_kinds, whole_kinds)
