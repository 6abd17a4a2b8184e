"""The state of an optimizer whose leaves each have an owner."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shard_transforms._src.base import full_rules
from shard_transforms._src.base import states
from shard_transforms._src.owners import layout as layout_lib


class OwnedLeaves(NamedTuple):
  """The state of an optimizer whose leaves each have an owner.

  Attributes:
    leaves: The state as `inner` has it. What belongs to one parameter is kept
      by the owner of the parameter: a `Place` says where. All else, such as
      counters, is the same on all shards, and is here.
    rows: The leaves of a shard: matrices of one shape, of which all owners have
      as many, in a stack [1, leaves, ...]; all others of a dtype one after the
      other, [1, elements]. The leading axis has length 1 inside the mapped
      function and that of the number of shards outside. Names depend on where
      all leaves are, so that rows of other owners are not taken for them.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import shard_transforms
    >>> from shard_transforms import owners
    >>> mesh = jax.make_mesh((8,), ('data',))
    >>> tx = owners.owned_update(optax.lamb(0.1), 'data')
    >>> params = {'v': jnp.ones((3, 5)), 'w': jnp.ones((3, 5))}
    >>> state = shard_transforms.init_state(tx, params, mesh).inner_state
    >>> print([row.shape for row in state.rows.values()])
    [(8, 1, 3, 5), (8, 1, 3, 5)]
    >>> place = optax.tree_utils.tree_get(state, 'mu')['w']
    >>> print(place.shard, place.start, place.shape)
    1 0 (3, 5)
  """

  leaves: Any
  # A leaf in place of the mapping where there are no parameters.
  rows: Any


def _full(kept, one_shard, name):
  """Returns the state as `inner` has it.

  Raises:
    ValueError: If its rows are of other leaves.
  """
  del one_shard
  if not isinstance(kept, OwnedLeaves):
    return kept
  leaves, treedef = jax.tree.flatten(kept.leaves, is_leaf=layout_lib.is_place)
  places = list(filter(layout_lib.is_place, leaves))
  for row in {place.row for place in places}:
    own = [place for place in places if place.row == row]
    shape = jnp.shape(kept.rows.get(row))
    if not _fits(shape, own):
      got = f'the shape {shape} of the row {row!r}'
      raise ValueError(
          f'{full_rules.made_for_others(got, name)}, whose owners keep'
          f' {max(place.end for place in own)} elements in leaves such as'
          f' {own[0].shape}.'
      )

  def read(leaf):
    if not layout_lib.is_place(leaf):
      return leaf
    row = kept.rows[leaf.row]
    # Flat, all of a stack would be on each device.
    if row.ndim > 2:
      return row[leaf.shard, leaf.start // (leaf.size or 1)]
    return row[leaf.shard][leaf.start : leaf.end].reshape(leaf.shape)

  return treedef.unflatten(map(read, leaves))


def _fits(shape, places):
  """Whether leaves have these places in rows of this shape, [shards, ...]."""
  size = max(place.end for place in places)
  if len(shape) == 2:
    return shape[1] - size in range(layout_lib.TILE)
  is_stack = {shape[2:]} == {place.shape for place in places}
  return is_stack and math.prod(shape[1:]) == size


def _place(full, target):
  """Returns the state as owners keep it, at the places of `target`."""
  leaves, treedef = jax.tree.flatten(target.leaves, is_leaf=layout_lib.is_place)
  values = dict(enumerate(treedef.flatten_up_to(full)))
  places = {i: x for i, x in enumerate(leaves) if layout_lib.is_place(x)}
  # Without parameters, there is no mapping of rows.
  if not places:
    return OwnedLeaves(full, jax.tree.map(jnp.zeros_like, target.rows))
  (num_owners,) = {place.num_owners for place in places.values()}
  kinds = {
      name: jax.ShapeDtypeStruct(row.shape[1:], row.dtype)
      for name, row in target.rows.items()
  }
  rows = layout_lib.Layout(places, kinds).pack(range(num_owners), values)

  def copied(row, like):
    of_owners = row.reshape(num_owners, *like.shape[1:])
    return jnp.concatenate([of_owners] * (len(like) // num_owners))

  rows = {name: copied(rows[name], x) for name, x in target.rows.items()}
  kept = treedef.unflatten((values | places).values())
  return OwnedLeaves(kept, rows)


# Full, the leaves of all owners are the state of `inner`.
FULL_RULE = states.Rule(full=_full, place=_place)
