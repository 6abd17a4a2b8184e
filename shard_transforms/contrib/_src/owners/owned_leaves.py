"""The state of an optimizer whose matrices each have an owner."""

import dataclasses
import itertools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shard_transforms._src.base import states
from shard_transforms._src.state import fields


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Place:
  """The place where owners keep a leaf of the state.

  It is a pytree without leaves, so that the structure of the state shows where
  each leaf is.

  Args:
    of: The index of the parameter that the leaf belongs to, in the order of
      `jax.tree.leaves`.
    shape: The shape of the leaf in the state of the replicated optimizer.
    at: For each layer, or for the whole leaf if it has no layers, the name of
      its stack, the index of the shard, and the index of the row.

  Examples:
    >>> import jax
    >>> from shard_transforms.contrib import Place
    >>> place = Place(7, (4, 8), (('float32_5f9c1a0e', 3, 0),))
    >>> print(jax.tree.leaves(place))
    []
  """

  of: int
  shape: tuple[int, ...]
  at: tuple[tuple[str, int, int], ...]


def is_place(leaf: Any) -> bool:
  """Whether `leaf` is a `Place`, for the `is_leaf` of a tree map."""
  return isinstance(leaf, Place)


class OwnedLeaves(NamedTuple):
  """The state of an optimizer whose matrices each have an owner.

  Attributes:
    leaves: The state of `inner`, with a `Place` for each leaf that belongs to a
      parameter with an owner. All other leaves, such as counters and the state
      of parameters that all shards update, are stored here.
    stacks: The rows of the state of matrices that a shard owns, by the name of
      the stack, [1, rows, ...]. Outside of the mapped function, the first
      dimension is the number of shards. Names depend on the places of all
      leaves, so that the state of other owners cannot be mistaken for it.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import shard_transforms
    >>> from shard_transforms import contrib
    >>> mesh = jax.make_mesh((8,), ('data',))
    >>> tx = contrib.owned_update(optax.lamb(0.1), 'data')
    >>> params = {'v': jnp.ones((3, 5)), 'w': jnp.ones((3, 5))}
    >>> state = shard_transforms.init_state(tx, params, mesh).inner_state
    >>> print([x.shape for x in state.stacks.values()])
    [(8, 1, 3, 5), (8, 1, 3, 5)]
    >>> place = optax.tree_utils.tree_get(state, 'mu')['w']
    >>> print(place.shape, [(shard, row) for _, shard, row in place.at])
    (3, 5) [(1, 0)]
  """

  leaves: Any
  # Without parameters, an array instead of the mapping.
  stacks: Any


def _unshard(state, one_shard, name):
  """Returns the state of the replicated optimizer.

  Raises:
    ValueError: If its stacks belong to other leaves.
  """
  del one_shard
  if not isinstance(state, OwnedLeaves):
    return state
  leaves, treedef = jax.tree.flatten(state.leaves, is_leaf=is_place)
  for place in filter(is_place, leaves):
    size = math.prod(place.shape) // len(place.at)
    for stack, shard, row in place.at:
      shape = jnp.shape(state.stacks.get(stack))
      has_row = shape[:1] > (shard,) and shape[1:2] > (row,)
      if not has_row or math.prod(shape[2:]) != size:
        got = f'the shape {shape} of the stack {stack!r}'
        expected = (
            f'one with row {row} of shard {shard}, {size} elements of'
            f' {place.shape},'
        )
        raise ValueError(fields.mismatch(name, got, expected))

  def unsharded(leaf):
    if not is_place(leaf):
      return leaf
    layers = [state.stacks[stack][shard, row] for stack, shard, row in leaf.at]
    x = layers[0] if len(layers) == 1 else jnp.stack(layers)
    return x.reshape(leaf.shape)

  return treedef.unflatten(map(unsharded, leaves))


def _shard(state, target):
  """Returns the state as owners keep it, at the places of `target`."""
  places, treedef = jax.tree.flatten(target.leaves, is_leaf=is_place)
  leaves = treedef.flatten_up_to(state)
  # Without parameters, there is no mapping of stacks.
  if not any(map(is_place, places)):
    return OwnedLeaves(state, jax.tree.map(jnp.zeros_like, target.stacks))
  rows = {}
  for i, place in enumerate(places):
    if is_place(place):
      layers = jnp.asarray(leaves[i]).reshape(len(place.at), -1)
      rows |= zip(place.at, layers, strict=True)
      leaves[i] = place

  def stacked(name, like):
    num_shards, length, *shape = like.shape
    padding = jnp.zeros(math.prod(shape), like.dtype)
    places = itertools.product([name], range(num_shards), range(length))
    return jnp.stack([rows.get(x, padding) for x in places]).reshape(like.shape)

  stacks = {name: stacked(name, x) for name, x in target.stacks.items()}
  return OwnedLeaves(treedef.unflatten(leaves), stacks)


# Unsharded, the leaves of all owners are the state of `inner`.
OWNERS_RULE = states.Rule(unshard=_unshard, shard=_shard)
