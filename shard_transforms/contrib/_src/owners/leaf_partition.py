"""The parameter of each leaf of a state, and the check of leafwise updates."""

from collections.abc import Callable
from collections.abc import Sequence
import contextlib
import dataclasses
from typing import Any

import jax
import optax

from shard_transforms._src.state import state_types as state_types_lib
from shard_transforms.contrib._src.owners import leaf_dependence
from shard_transforms.contrib._src.owners import leaf_program
from shard_transforms.contrib._src.owners import stacks as stacks_lib


@dataclasses.dataclass(frozen=True)
class LeafPartition:
  """Partitions a state by parameters, if `inner` treats leaves separately.

  Attributes:
    inner: The transformation.
    stacks: The stacks of the parameters.
    assume_leafwise: Whether to skip the check that `inner` treats each leaf
      alone.
  """

  inner: optax.GradientTransformationExtraArgs
  stacks: stacks_lib.Stacks
  assume_leafwise: bool

  def of_new_state(
      self, types: Any, state_types: Any, full_types: Any
  ) -> list[int]:
    """Returns the parameter that each leaf of a new state belongs to.

    Args:
      types: The types of the parameters that `inner` receives.
      state_types: The types of the state.
      full_types: The types of the state if `inner` receives all layers.

    Raises:
      ValueError: If the state or an update mixes leaves.
    """
    positions = self._positions(types, state_types)
    params = [stacks_lib.SHARED if x is None else x for x in positions]
    types = types, state_types, types
    try:
      program = self.trace(self.inner.update, types, params)
    except (AttributeError, KeyError, TypeError, ValueError):
      # `inner` may need an extra argument, or updates of another tree than the
      # parameters. Only `update` receives these, so it checks `inner`.
      params = positions
    else:
      dependence = self._dependence(program, types, params)
      params = dependence.params_of_state(positions)
      self._checked(program, types, params)

    def owner(param, kind, full_kind):
      if param not in self.stacks.rows:
        return stacks_lib.SHARED
      # State that has no layers, such as the placeholders of Adafactor,
      # is the same for all layers; if it is not, `update` refuses it.
      has_layers = self.stacks.layouts[param].has_layers
      is_same = has_layers and kind.shape and kind.shape == full_kind.shape
      return stacks_lib.SHARED if is_same else param

    kinds = map(jax.tree.leaves, (state_types, full_types))
    return list(map(owner, params, *kinds))

  def _positions(self, types, state_types):
    """Returns the parameter at the tree position of each leaf, or `None`."""
    params = jax.tree.unflatten(
        jax.tree.structure(types), self.stacks.params_of(types)
    )
    # A state may have no position for each parameter, such as a list.
    with contextlib.suppress(AttributeError, IndexError, TypeError, ValueError):
      state_types = state_types_lib.map_with_params(
          self.inner, lambda _, param: param, state_types, params
      )
    leaves = jax.tree.leaves(state_types)
    return [leaf if isinstance(leaf, int) else None for leaf in leaves]

  def check_update(
      self,
      update: Callable[..., Any],
      types: tuple[Any, Any, Any],
      state_params: Sequence[int],
  ) -> leaf_dependence.LeafDependence:
    """Traces `update`, and checks that it treats each leaf independently.

    Args:
      update: The function.
      types: The types of unsharded updates, of the state, and of unsharded
        parameters or `None`.
      state_params: The parameter that each leaf of the state belongs to.

    Raises:
      TypeError: If `inner` raises it.
      ValueError: If `inner` mixes leaves, or changes the types of updates or
        state.
    """
    try:
      program = self.trace(update, types, state_params)
    except TypeError:
      # JAX refuses a `cond` on all leaves because of the types of its branches.
      program = self.trace(update, types, state_params, replicated=True)
      self._checked(program, types, state_params)
      raise
    return self._checked(program, types, state_params)

  def trace(
      self,
      update: Callable[..., Any],
      types: tuple[Any, Any, Any],
      state_params: Sequence[int],
      replicated: bool = False,
  ) -> leaf_program.LeafProgram:
    """Traces `update` with the types that owners have.

    Args:
      update: As for `check_update`.
      types: As for `check_update`.
      state_params: As for `check_update`.
      replicated: Whether all shards have all updates, state and parameters.
    """
    stacks, (updates, state, params) = self.stacks, types
    if not replicated:
      # JAX refuses a `cond` between an update and the old state if only one of
      # them varies.
      updates, params = map(stacks.owner_types, (updates, params))
      state = stacks.owner_types(state, state_params)
    return leaf_program.trace(
        update,
        updates,
        state,
        params,
        axes=stacks.reduction.axes_of_sums(),
        allowed_axes=stacks.axes,
    )

  def _dependence(self, program, types, state_params):
    """Returns the dependence of the results on updates and state.

    Raises:
      ValueError: If results do not have the types of the updates and the state.
    """
    update_params = self.stacks.params_of(types[0])
    dependence = leaf_dependence.LeafDependence(
        program,
        [*update_params, *state_params],
        len(update_params),
        self.stacks,
    )
    if problem := dependence.problem_of_types(types[:2]):
      raise ValueError(
          f'`inner` of `{self.stacks.reduction.caller}` must keep the types of'
          f' updates and state, but it returned {problem}.'
      )
    return dependence

  def _checked(self, program, types, state_params):
    """Returns the dependence of the results, each of which reads one leaf.

    Raises:
      ValueError: If `inner` does not treat each leaf independently, or changes
        the types of updates or state.
    """
    dependence = self._dependence(program, types, state_params)
    if self.assume_leafwise:
      problem, advice = dependence.problem_of_shared_state(), ''
    else:
      problem, advice = dependence.problem(), (
          ' To clip, use `shard_transforms.clip_by_global_norm(max_norm,'
          ' axis_name)`. If `inner` does treat each leaf independently, set'
          ' `assume_leafwise=True`.'
      )
    if problem:
      raise ValueError(
          f'`inner` of `{self.stacks.reduction.caller}` must treat each leaf of'
          f' the parameters independently, but it {problem}. Use'
          ' `optax.chain(cross_shard_mean(axis_name), inner)` instead; with'
          f' `optax.partition`, only for the parameters that need it.{advice}'
      )
    return dependence
