"""Communication of trees of gradients and updates between shards and owners."""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import itertools
import math
from typing import Any, Literal

import chex
import jax
from jax import lax
import jax.numpy as jnp
import optax

from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.reduction import leaf_sums
from shard_transforms.contrib._src.owners import exchange as exchange_lib
from shard_transforms.contrib._src.owners import stacks as stacks_lib
from shard_transforms.contrib._src.owners import update_checks

IfSliced = Literal['error', 'sum', 'mean']


@dataclasses.dataclass(frozen=True)
class TreeExchange:
  """Communication of trees between shards and owners.

  Attributes:
    stacks: The stacks of the parameters.
    if_sliced: The meaning of the gradients of slices.
  """

  stacks: stacks_lib.Stacks
  if_sliced: IfSliced

  @functools.cached_property
  def of_stacks(self) -> list[exchange_lib.Exchange]:
    """The exchange of each stack."""
    are_summed = self.if_sliced == 'sum'
    return [
        exchange_lib.Exchange(stack, self.stacks.reduction, are_summed)
        for stack in self.stacks.stacks
    ]

  def reduced(
      self, updates: optax.Updates, weight: chex.Numeric | None
  ) -> tuple[dict[int, jax.Array], list[dict[int, jax.Array]]]:
    """Reduces updates over the shards.

    Args:
      updates: The updates of this shard.
      weight: The weight of this shard, or `None`.

    Returns:
      By index, the updates of parameters without owners; and for each stack, by
      index, the owner's rows of all others.

    Raises:
      TypeError: If an update is an integer or boolean.
      ValueError: If an update is not per shard, or has the wrong shape.
    """
    stacks, reduction = self.stacks, self.stacks.reduction
    update_checks.check_updates(stacks, updates, weight)
    weight = leaf_sums.check(updates, weight, reduction)
    leaves, params = jax.tree.leaves(updates), stacks.params_of(updates)
    layouts = [stacks.layouts[param] for param in params]
    unowned = [i for i, param in enumerate(params) if param not in stacks.rows]
    with jax.named_scope(reduction.caller):
      share = leaf_sums.share(weight, reduction)
      replicated = [
          i
          for i in unowned
          if leaves_lib.is_float0(leaves[i]) or not any(layouts[i].slicing)
      ]
      sums = leaf_sums.reduce([leaves[i] for i in replicated], share, reduction)
      shared = dict(zip(replicated, sums, strict=True))
      for i in unowned:
        if i not in shared:
          shared[i] = self._unsharded(leaves[i], layouts[i], share)
      arrays, rows = dict(zip(params, leaves, strict=True)), []
      for exchange in self.of_stacks:
        matrices = stacks.matrices(exchange.stack, arrays)
        reduced = exchange.reduced(matrices, share)
        members = [
            i for i, x in enumerate(params) if x in exchange.stack.params
        ]
        dtypes = {i: leaves_lib.dtype_of(leaves[i]) for i in members}
        rows.append(
            {i: leaves_lib.as_dtype(reduced, x) for i, x in dtypes.items()}
        )
    return shared, rows

  def _unsharded(self, x, layout, share):
    """Returns the unsharded sum or mean of a leaf that is sliced."""
    reduction = self.stacks.reduction
    slicing = set(itertools.chain(*layout.slicing))
    if axes := tuple(a for a in reduction.axes if a not in slicing):
      over = dataclasses.replace(reduction, axes=axes)
      (x,) = leaf_sums.reduce([x], share, over)
    if self.if_sliced == 'sum' and reduction.kind == 'mean':
      sliced = slicing.intersection(reduction.axes)
      x = x / x.dtype.type(math.prod(map(lax.axis_size, sliced)))
    return exchange_lib.gathered(x, layout.slicing)

  def returned(
      self,
      updates: optax.Updates,
      keys: Mapping[int, str],
      types: Sequence[Any],
      rows: Sequence[Mapping[str, jax.Array]],
      shared: Mapping[int, jax.Array],
  ) -> optax.Updates:
    """Returns the updates of the slices that this shard holds.

    Args:
      updates: The updates before they were reduced.
      keys: The keys of the updates of parameters with owners, by index.
      types: The type of each update.
      rows: For each stack, the owner's rows of updates, by key.
      shared: The updates of parameters without owners, by index.
    """
    stacks = self.stacks
    with jax.named_scope(stacks.reduction.caller):
      matrices = {
          (s, key): exchange.returned(rows[s][key])
          for s, exchange in enumerate(self.of_stacks)
          for key in rows[s].keys() & set(keys.values())
      }

    def returned(i, param):
      layout = stacks.layouts[param]
      if i not in keys:
        if leaves_lib.is_float0(shared[i]):
          return shared[i]
        return exchange_lib.sliced(shared[i], layout.slicing)
      layers = [matrices[s, keys[i]][row] for s, row in stacks.rows[param]]
      x = layers[0] if len(layers) == 1 else jnp.stack(layers)
      shape = layers[0].shape[len(layout.local_layers) :]
      x = x.reshape(*layout.local_layers, *shape)
      return leaves_lib.as_dtype(x, types[i].dtype)

    params = stacks.params_of(updates)
    leaves = [returned(i, param) for i, param in enumerate(params)]
    return jax.tree.unflatten(jax.tree.structure(updates), leaves)
