"""The optimizer that each shard runs on the matrices that it owns."""

from collections.abc import Mapping
import dataclasses
import functools
from typing import Any, Literal
import warnings

import chex
import jax
import jax.numpy as jnp
import optax

from shard_transforms._src.base import partition_specs as specs_lib
from shard_transforms._src.base import states
from shard_transforms._src.reduction import sharded_reduction
from shard_transforms.contrib._src.owners import layout_warnings
from shard_transforms.contrib._src.owners import leaf_partition
from shard_transforms.contrib._src.owners import leaf_program
from shard_transforms.contrib._src.owners import matrix_layout
from shard_transforms.contrib._src.owners import owned_leaves
from shard_transforms.contrib._src.owners import sharded_program
from shard_transforms.contrib._src.owners import stacks as stacks_lib
from shard_transforms.contrib._src.owners import state_layout
from shard_transforms.contrib._src.owners import tree_exchange
from shard_transforms.contrib._src.owners import update_checks

IfSliced = Literal['error', 'sum', 'mean']


@dataclasses.dataclass(frozen=True)
class OwnedInner:
  """A transformation that each shard runs on the matrices that it owns.

  Attributes:
    inner: The transformation.
    reduction: The reduction of updates.
    param_specs: The `PartitionSpec`s of the parameters.
    if_sliced: The meaning of the gradients of slices.
    whole_dims: The number of the last dimensions that form a matrix, or `None`
      if all dimensions do.
    assume_leafwise: Whether `inner` is assumed to treat each leaf
      independently.
  """

  inner: optax.GradientTransformationExtraArgs
  reduction: sharded_reduction.ShardedReduction
  param_specs: specs_lib.SpecTree
  if_sliced: IfSliced
  whole_dims: int | None
  assume_leafwise: bool

  def init(self, params: optax.Params) -> owned_leaves.OwnedLeaves:
    """Returns the initial state, in the form in which each shard stores it.

    Raises:
      ValueError: If `inner` mixes leaves, specs do not agree with the types of
        the parameters, or an axis of the mesh is not mapped.
    """
    self.reduction.check_mapped()
    # `optax.tree_utils.tree_map_params` calls `init` with an empty stand-in for
    # the parameters.
    if not jax.tree.leaves(params):
      return owned_leaves.OwnedLeaves(self.inner.init(params), jnp.zeros(0))
    stacks = self._stacks(params)
    for message in layout_warnings.messages(stacks):
      warnings.warn(message, stacklevel=2)
    types, full_types = self._state_types(stacks, params)
    param_types = stacks.types(params)
    state_params = self._partition(stacks).of_new_state(
        param_types, types, full_types
    )
    layout = state_layout.layout_of(stacks, state_params, types, full_types)
    program = sharded_program.ShardedProgram(
        self._trace_init(stacks.owner_types(param_types)),
        lambda: self._trace_init(param_types),
        stacks.params_of(params),
        [{x} for x in state_params],
        layout.keys,
        stacks,
        jax.tree.leaves(params),
    )
    rows = [{} for _ in stacks.stacks]
    return layout.stored(*program.run({}, rows))

  def update(
      self,
      updates: optax.Updates,
      weight: chex.Numeric | None,
      state: owned_leaves.OwnedLeaves,
      params: optax.Params | None,
      extra_args: Mapping[str, Any],
  ) -> tuple[optax.Updates, owned_leaves.OwnedLeaves]:
    """Returns the updates of the slices that a shard holds, and the next state.

    Args:
      updates: The updates of this shard.
      weight: The weight of this shard, or `None`.
      state: The state, in the form in which each shard stores it.
      params: The parameters as the shard holds them, or `None`.
      extra_args: The extra arguments of `update`.

    Raises:
      NameError: If an axis is not bound.
      TypeError: If an update is an integer or boolean, or the weight is not a
        number.
      ValueError: As in `init`, or if the state was made for other parameters.
    """
    self.reduction.check_mapped()
    update = functools.partial(self.inner.update, **extra_args)
    if not jax.tree.leaves(updates):
      updates, leaves = update(updates, state.leaves, params)
      return updates, state._replace(leaves=leaves)
    like = updates if params is None else params
    stacks = self._stacks(like, params is not None)
    update_checks.check_extra_args(stacks, like, extra_args)
    advice = states.HOW_TO_CREATE
    if params is None:
      advice += ' Pass `params` if the updates have other dtypes than these.'
    types, full_types = self._state_types(stacks, like)
    layout, state_types = state_layout.read(
        state, stacks, types, full_types, advice
    )
    partition = self._partition(stacks)
    # Not cached, because `inner` may close over arrays that differ per call.
    types = stacks.types(updates), state_types, stacks.types(params)
    dependence = partition.check_update(update, types, layout.params)
    update_params = stacks.params_of(updates)
    update_types = jax.tree.leaves(dependence.program.results[0])
    keys = state_layout.keys_of(stacks, update_params, update_types, 'update ')
    first = len(update_params)
    program = sharded_program.ShardedProgram(
        dependence.program,
        lambda: partition.trace(update, types, layout.params, replicated=True),
        [*update_params, *layout.params, *stacks.params_of(params)],
        [{x} for x in (*update_params, *layout.params)]
        + dependence.params_of_terms(),
        {**keys, **{first + i: key for i, key in layout.keys.items()}},
        stacks,
        jax.tree.leaves(params),
    )
    shared, rows = tree_exchange.reduced(stacks, updates, weight)
    shared_state, rows_of_state = layout.loaded(state, first)
    shared |= shared_state
    rows = [x | y for x, y in zip(rows, rows_of_state, strict=True)]
    rows, shared = program.run(shared, rows)
    updates = tree_exchange.returned(
        stacks, updates, keys, update_types, rows, shared
    )
    shared_state = {i - first: x for i, x in shared.items()}
    return updates, layout.stored(rows, shared_state)

  def _stacks(self, params, are_params=True):
    self.reduction.num_shards()  # Says which axis is not bound.
    layouts = matrix_layout.param_layouts(
        params, self.param_specs, self.reduction, self.whole_dims, are_params
    )
    is_mean, are_sums = self.reduction.kind == 'mean', self.if_sliced == 'sum'
    stacks = stacks_lib.find(layouts, self.reduction, is_mean and are_sums)
    update_checks.check_if_sliced(stacks, self.if_sliced)
    return stacks

  def _partition(self, stacks):
    return leaf_partition.LeafPartition(
        self.inner, stacks, self.assume_leafwise
    )

  def _trace_init(self, types):
    return leaf_program.trace(self.inner.init, types)

  def _state_types(self, stacks, params):
    """Returns the types of the state for one layer, and for all layers."""
    return tuple(
        self._trace_init(stacks.types(params, all_layers)).results
        for all_layers in (False, True)
    )
