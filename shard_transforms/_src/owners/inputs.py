"""The inputs of a program: those that all shards have, and those of owners."""

from collections.abc import Mapping
from collections.abc import Sequence
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from shard_transforms._src.base import states
from shard_transforms._src.owners import dependence
from shard_transforms._src.owners import layout as layout_lib
from shard_transforms._src.owners import owned_leaves
from shard_transforms._src.owners import owners as owners_lib
from shard_transforms._src.reduction import leaf_sums


class Inputs(NamedTuple):
  """The inputs of a program, by their numbers.

  Attributes:
    shared: Those that all shards have.
    kept: How owners keep the others.
    rows: The rows of this shard, for each of `kept`.
  """

  shared: Mapping[int, jax.Array]
  kept: Sequence[layout_lib.Layout] = ()
  rows: Sequence[Mapping[str, jax.Array]] = ()

  def of_owner(self, owner: int) -> dict[int, jax.Array]:
    """Returns the inputs of an owner, if this shard is a copy of it."""
    found = dict(self.shared)
    for layout, rows in zip(self.kept, self.rows, strict=True):
      found |= layout.unpack([owner], rows)
    return found

  def stack(self, number: int) -> jax.Array | None:
    """Returns the stack in which this shard has an input, if it has one."""
    pairs = zip(self.kept, self.rows, strict=True)
    found = ((rows, layout.stack_of(number)) for layout, rows in pairs)
    return next((rows[name] for rows, name in found if name), None)


def of_step(
    owners: owners_lib.Owners,
    of: Sequence[int],
    updates: optax.Updates,
    weight: chex.Numeric | None,
    state: owned_leaves.OwnedLeaves,
    params: optax.Params | None,
    layout: layout_lib.Layout,
) -> Inputs:
  """Returns the inputs of a program of `update`; sends updates to owners.

  Args:
    owners: The owners.
    of: What each update and each leaf of the state belongs to.
    updates: Each shard's own.
    weight: How much the shard counts, if not the same.
    state: The state.
    params: Whole parameters, if any.
    layout: How the state is kept.
  """
  first, axes = len(jax.tree.leaves(updates)), owners.reduction.axes
  caller = owners.reduction.caller
  shared, layout_of_sent, sent = _reduced(owners, of, updates, weight)
  stored = jax.tree.leaves(state.leaves, is_leaf=layout_lib.is_place)
  for i, leaf in enumerate(stored, first):
    if of[i] == dependence.MIXED:
      leaf = states.own(leaf, axes, caller)
    if not layout_lib.is_place(leaf):
      shared[i] = leaf
  shared |= enumerate(jax.tree.leaves(params), first + len(stored))
  rows = states.own(state.rows, axes, caller)
  return Inputs(shared, (layout_of_sent, layout), (sent, rows))


def _reduced(owners, of, updates, weight):
  """Reduces updates, and sends rows of them to owners.

  Returns:
    The updates that all shards have, by number; the layout of the others; and
    the rows of this shard.
  """
  reduction, num_owners = owners.reduction, len(owners.all)
  weight = leaf_sums.check(updates, weight, reduction)
  leaves = jax.tree.leaves(updates)
  pairs = zip(of, reduction.sends_in_slices(leaves), strict=False)
  of = [number if cut else dependence.SHARED for number, cut in pairs]
  arrays = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in leaves]
  layout = owners.layout(of, arrays)
  others = [i for i in range(len(leaves)) if i not in layout.places]
  with jax.named_scope(reduction.caller):
    share = leaf_sums.share(weight, reduction)
    rows = layout.pack(owners.all, dict(enumerate(arrays)))
    parts = [
        row.reshape(num_owners, *layout.rows[name].shape)
        for name, row in rows.items()
    ]
    own = leaf_sums.scatter(parts, share, reduction, num_owners)
    whole = leaf_sums.reduce([leaves[i] for i in others], share, reduction)
  whole = dict(zip(others, whole, strict=True))
  return whole, layout, dict(zip(rows, own, strict=True))
