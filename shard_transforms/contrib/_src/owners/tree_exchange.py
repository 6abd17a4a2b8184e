"""Communication of trees of gradients and updates between shards and owners."""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax

from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.reduction import leaf_sums
from shard_transforms.contrib._src.owners import stack as stack_lib
from shard_transforms.contrib._src.owners import stacks as stacks_lib
from shard_transforms.contrib._src.owners import update_checks


def reduced(
    stacks: stacks_lib.Stacks,
    updates: optax.Updates,
    weight: chex.Numeric | None,
) -> tuple[dict[int, jax.Array], list[dict[int, jax.Array]]]:
  """Reduces updates over the shards.

  Args:
    stacks: The stacks of the parameters.
    updates: The updates of this shard.
    weight: The weight of this shard, or `None`.

  Returns:
    By index, the updates of parameters without owners; and for each stack, by
    index, the owner's rows of all others.

  Raises:
    TypeError: If an update is an integer or boolean.
    ValueError: If an update is not per shard, or has the wrong shape.
  """
  update_checks.check_updates(stacks, updates, weight)
  weight = leaf_sums.check(updates, weight, stacks.reduction)
  leaves, params = jax.tree.leaves(updates), stacks.params_of(updates)
  arrays, rows = dict(zip(params, leaves, strict=True)), []
  with jax.named_scope(stacks.reduction.caller):
    share = leaf_sums.share(weight, stacks.reduction)
    unowned = {i: x for i, x in enumerate(params) if x not in stacks.rows}
    replicated = [
        i
        for i, param in unowned.items()
        if leaves_lib.is_float0(leaves[i])
        or not any(stacks.layouts[param].slicing)
    ]
    sums = leaf_sums.reduce(
        [leaves[i] for i in replicated], share, stacks.reduction
    )
    shared = dict(zip(replicated, sums, strict=True))
    for i, param in unowned.items():
      if i not in shared:
        shared[i] = _unsharded(stacks, leaves[i], param, share)
    for stack in stacks.stacks:
      x = stack.reduced(stacks.matrices(stack, arrays), share)
      rows.append(
          {
              i: leaves_lib.as_dtype(x, leaves_lib.dtype_of(leaves[i]))
              for i, param in enumerate(params)
              if param in stack.params
          }
      )
  return shared, rows


def _unsharded(stacks, x, param, share):
  """Returns the unsharded sum or mean of a leaf that is sliced."""
  reduction, slicing = stacks.reduction, stacks.layouts[param].slicing
  summed = stacks.summed_axes(param)
  if axes := tuple(a for a in reduction.axes if a not in summed):
    over = dataclasses.replace(reduction, axes=axes)
    (x,) = leaf_sums.reduce([x], share, over)
  if stacks.divides_slices:
    x = stack_lib.divided(x, summed)
  return stack_lib.gathered(x, slicing)


def returned(
    stacks: stacks_lib.Stacks,
    updates: optax.Updates,
    keys: Mapping[int, str],
    types: Sequence[Any],
    rows: Sequence[Mapping[str, jax.Array]],
    shared: Mapping[int, jax.Array],
) -> optax.Updates:
  """Returns the updates of the slices that this shard holds.

  Args:
    stacks: The stacks of the parameters.
    updates: The updates before they were reduced.
    keys: The keys of the updates of parameters with owners, by index.
    types: The type of each update.
    rows: For each stack, the owner's rows of updates, by key.
    shared: The updates of parameters without owners, by index.
  """
  with jax.named_scope(stacks.reduction.caller):
    matrices = {
        (s, key): stack.returned(rows[s][key])
        for s, stack in enumerate(stacks.stacks)
        for key in rows[s].keys() & set(keys.values())
    }

  def update(i, param):
    layout = stacks.layouts[param]
    if i not in keys:
      if leaves_lib.is_float0(shared[i]):
        return shared[i]
      return stack_lib.sliced(shared[i], layout.slicing)
    layers = [matrices[s, keys[i]][row] for s, row in stacks.rows[param]]
    x = layers[0] if len(layers) == 1 else jnp.stack(layers)
    shape = layers[0].shape[len(layout.local_layers) :]
    x = x.reshape(*layout.local_layers, *shape)
    return leaves_lib.as_dtype(x, types[i].dtype)

  params = stacks.params_of(updates)
  leaves = [update(i, param) for i, param in enumerate(params)]
  return jax.tree.unflatten(jax.tree.structure(updates), leaves)
