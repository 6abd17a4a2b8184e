"""The optimizer that each shard runs on the leaves that it owns."""

from collections.abc import Mapping
import dataclasses
import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax

from shard_transforms._src.owners import association
from shard_transforms._src.owners import costs
from shard_transforms._src.owners import inputs
from shard_transforms._src.owners import owned_leaves
from shard_transforms._src.owners import owned_run
from shard_transforms._src.owners import owner_reduction
from shard_transforms._src.owners import owners as owners_lib
from shard_transforms._src.owners import stacks


@dataclasses.dataclass(frozen=True)
class OwnedInner:
  """A transformation that each shard runs on the leaves that it owns.

  Attributes:
    inner: The transformation.
    reduction: How updates are reduced.
    cost: How long the update of each leaf takes, if that is told.
    assume_leafwise: Whether it is assumed to treat each leaf alone.
  """

  inner: optax.GradientTransformationExtraArgs
  reduction: owner_reduction.OwnerReduction
  cost: costs.Cost | None = None
  assume_leafwise: bool = False

  def init(self, params: optax.Params) -> owned_leaves.OwnedLeaves:
    """Returns the initial state, as each shard keeps it.

    Raises:
      ValueError: If it mixes leaves, parameters differ between shards, or an
        axis of the mesh is not mapped.
    """
    self.reduction.check_mapped()
    self.reduction.check_params(params)
    # `optax.tree_utils.tree_map_params` calls `init` with an empty stand-in for
    # the parameters.
    if not jax.tree.leaves(params):
      return owned_leaves.OwnedLeaves(self.inner.init(params), jnp.zeros(0))
    owners = owners_lib.assign(params, (), self.reduction, self.cost)
    program = association.trace_init(self.inner, params)
    of = self._association(owners).of_state(params, program.results)
    layout = owners.layout(of, jax.tree.leaves(program.results))
    run = owned_run.OwnedRun(program, of, owners)
    given = inputs.Inputs(dict(enumerate(jax.tree.leaves(params))))
    (rows,), made = run.results([layout], given, {})
    return run.state(program.results, made, layout, rows)

  def update(
      self,
      updates: optax.Updates,
      weight: chex.Numeric | None,
      state: owned_leaves.OwnedLeaves,
      params: optax.Params | None,
      extra_args: Mapping[str, Any],
  ) -> tuple[optax.Updates, owned_leaves.OwnedLeaves]:
    """Returns the updates, the same on all shards, and the next state.

    Args:
      updates: Each shard's own.
      weight: How much the shard counts, if not the same.
      state: As `init` returns it.
      params: Whole parameters, if any.
      extra_args: The extra arguments of its `update`.

    Raises:
      NameError: If an axis is not bound.
      TypeError: If a leaf is an integer or boolean, or the weight is no number.
      ValueError: As `init`, or if the state was made for other parameters.
    """
    self.reduction.check_mapped()
    # It is a function of this call alone, for `inner` may close over what
    # differs between calls.
    update = functools.partial(self.inner.update, **extra_args)
    leaves, treedef = jax.tree.flatten(updates)
    if not leaves:
      updates, kept = update(updates, state.leaves, params)
      return updates, state._replace(leaves=kept)
    like = updates if params is None else params
    owners = owners_lib.assign(like, updates, self.reduction, self.cost)
    kinds = association.trace_init(self.inner, like).results
    of, kinds, layout = association.read_state(
        state, owners, kinds, len(leaves)
    )
    read = self._association(owners)
    found = read.read(update, updates, kinds, params, of)
    run = owned_run.OwnedRun(found.program, found.of, owners)
    given = inputs.of_step(
        owners, found.of, updates, weight, state, params, layout
    )
    given = run.with_totals(given, found.belongs, read.same)
    types = jax.tree.leaves(found.program.results)[: len(leaves)]
    sent = owners.layout(found.of[: len(leaves)], types)
    kept = [sent, layout]
    # The parameters that an owner chooses differ from those of others.
    trace = functools.partial(
        read.trace, update, updates, kinds, params, of, owned_params=True
    )
    stacked = stacks.results(found, owners, kept, given, trace)
    (own, rows), made = run.results(kept, given, stacked)
    made |= run.gathered(sent, own)
    updates = treedef.unflatten(made[i] for i in range(len(leaves)))
    return updates, run.state(kinds, made, layout, rows, len(leaves))

  def _association(self, owners):
    return association.Association(self.inner, owners, self.assume_leafwise)
