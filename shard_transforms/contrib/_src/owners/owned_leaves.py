"""The state of an optimizer whose matrices each have an owner."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shard_transforms._src.base import states
from shard_transforms._src.state import fields


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Place:
  """Where the owners keep a leaf of the state.

  It is a tree without leaves, so that the state of a program says where it is.

  Args:
    of: The number of the parameter that it belongs to, in the order of
      `jax.tree.leaves`.
    shape: Its shape in the state of the replicated optimizer.
    at: Where its layers are, in their order; a leaf that is not cut into layers
      is one. For each, the name of the stack, the number of the shard, and that
      of the row.

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
  """Whether a leaf is kept elsewhere, for the `is_leaf` of a tree map."""
  return isinstance(leaf, Place)


class OwnedLeaves(NamedTuple):
  """The state of an optimizer whose matrices each have an owner.

  Attributes:
    leaves: The state as `inner` has it. What belongs to a parameter with owners
      is in `stacks`, and a `Place` says where. All else, such as counters and
      the state of a leaf that all shards update, is here.
    stacks: What a shard keeps of matrices that stand in a stack,
      [1, rows, ...]. The first dimension has length 1 inside the mapped
      function and that of the number of shards outside. Names depend on where
      all leaves are, so that state of other owners is not taken for them.

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
  # A leaf in place of the mapping where there are no parameters.
  stacks: Any


def _full(kept, one_shard, name):
  """Returns the state as `inner` has it.

  Raises:
    ValueError: If its stacks are of other leaves.
  """
  del one_shard
  if not isinstance(kept, OwnedLeaves):
    return kept
  leaves, treedef = jax.tree.flatten(kept.leaves, is_leaf=is_place)
  for place in filter(is_place, leaves):
    for stack, shard, row in place.at:
      shape = jnp.shape(kept.stacks.get(stack))
      size = math.prod(place.shape) // len(place.at)
      is_there = shape[:1] > (shard,) and shape[1:2] > (row,)
      if not is_there or math.prod(shape[2:]) != size:
        got = f'the shape {shape} of the stack {stack!r}'
        expected = (
            f'one with row {row} of shard {shard}, {size} elements of'
            f' {place.shape},'
        )
        raise ValueError(fields.mismatch(name, got, expected))

  def read(leaf):
    if not is_place(leaf):
      return leaf
    parts = [kept.stacks[stack][shard, row] for stack, shard, row in leaf.at]
    whole = parts[0] if len(parts) == 1 else jnp.stack(parts)
    return whole.reshape(leaf.shape)

  return treedef.unflatten(map(read, leaves))


def _place(full, target):
  """Returns the state as owners keep it, at the places of `target`."""
  leaves, treedef = jax.tree.flatten(target.leaves, is_leaf=is_place)
  values = treedef.flatten_up_to(full)
  # Without parameters, there is no mapping of stacks.
  if not any(map(is_place, leaves)):
    return OwnedLeaves(full, jax.tree.map(jnp.zeros_like, target.stacks))
  rows = {}
  for place, value in zip(leaves, values, strict=True):
    if is_place(place):
      layers = jnp.asarray(value).reshape(len(place.at), -1)
      rows |= zip(place.at, layers, strict=True)

  def stacked(name, like):
    num_shards, length, *shape = like.shape
    padding = jnp.zeros(shape, like.dtype)
    of_shards = [
        jnp.stack(
            [
                rows[at].reshape(shape)
                if (at := (name, shard, row)) in rows
                else padding
                for row in range(length)
            ]
        )
        for shard in range(num_shards)
    ]
    return jnp.stack(of_shards)

  kept = [
      place if is_place(place) else value
      for place, value in zip(leaves, values, strict=True)
  ]
  stacks = {name: stacked(name, x) for name, x in target.stacks.items()}
  return OwnedLeaves(treedef.unflatten(kept), stacks)


# Full, the leaves of all owners are the state of `inner`.
FULL_RULE = states.Rule(full=_full, place=_place)
