"""The optimizer that each shard runs on its slices, and its state."""

from collections.abc import Mapping
from typing import Any

import jax
import optax

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.reduction import sharded_reduction
from shard_transforms._src.transforms import slice_check
from shard_transforms._src.transforms import sliced_state


class SlicedInner:
  """A transformation that each shard runs on its slices alone."""

  def __init__(
      self,
      inner: optax.GradientTransformationExtraArgs,
      reduction: sharded_reduction.ShardedReduction,
  ):
    self._inner = inner
    self._reduction = reduction
    self._check = slice_check.SliceCheck(inner, reduction)

  def check_mapped(self) -> None:
    """Refuses a mesh of which an axis is left to the compiler.

    Raises:
      ValueError: If there is one.
    """
    unmapped = axes_lib.unmapped_axes(self._reduction.axes)
    if unmapped:
      raise ValueError(
          f'The mesh of `{self._reduction.caller}` must have no axis that is'
          f' not mapped, got {unmapped!r}: cutting a leaf would gather what'
          ' such an axis shards. Name all axes in `axis_names` of'
          ' `jax.shard_map`.'
      )

  def init(self, params: optax.Params) -> optax.OptState:
    """Returns the initial state, as each shard keeps it.

    Raises:
      ValueError: If it looks across elements, or an axis of the mesh is not
        mapped.
    """
    self.check_mapped()
    self._check.check_init(params)
    own_state = self._inner.init(self._reduction.own(params))
    whole_kinds = jax.eval_shape(self._inner.init, params)
    return sliced_state.store(own_state, whole_kinds, self._reduction.axes)

  def update(
      self,
      own_updates: optax.Updates,
      inner_state: optax.OptState,
      updates: optax.Updates,
      params: optax.Params | None,
      extra_args: Mapping[str, Any],
  ) -> tuple[optax.Updates, optax.OptState]:
    """Returns the updates of a shard's slices, and the next state.

    Args:
      own_updates: A shard's slices of the reduced updates.
      inner_state: Its state, as each shard keeps it.
      updates: Whole updates.
      params: Whole parameters, if any.
      extra_args: The extra arguments of its `update`.

    Raises:
      ValueError: As `init`, or if the state was made for other parameters.
    """
    reduction = self._reduction
    update = self._check.check_update(updates, params, extra_args)
    own_params = None if params is None else reduction.own(params)
    like = updates if params is None else params
    whole_kinds = jax.eval_shape(self._inner.init, like)
    own_like = own_updates if params is None else own_params
    own_kinds = jax.eval_shape(self._inner.init, own_like)
    own_state = sliced_state.take(
        inner_state, own_kinds, whole_kinds, reduction.caller
    )
    own_updates, own_state = update(own_updates, own_state, own_params)
    kept = sliced_state.store(own_state, whole_kinds, reduction.axes)
    return own_updates, kept
