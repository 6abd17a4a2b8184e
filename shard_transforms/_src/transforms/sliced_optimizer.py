"""The optimizer that each shard runs on its slices (ZeRO-1), and its state.

A leaf of the state is a slice if its shape for sliced parameters differs from
its shape for unsharded parameters. If groups of shards train separately, or if
no parameter has the unsharded shape of the leaf, the slice is stored with the
leading axis of per-shard leaves.
"""

from collections.abc import Mapping
import dataclasses
import functools
import math
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import optax

from shard_transforms._src.analysis import elementwise
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import states
from shard_transforms._src.reduction import sharded_reduction


@dataclasses.dataclass(eq=False)
class SlicedOptimizer:
  """A transformation that each shard runs only on its own slices.

  Attributes:
    inner: The transformation.
    reduction: The reduction, which slices leaves.
    assume_elementwise: Whether to skip the check that `inner` is element-wise.
    last_check: The types and the result of the last check, because tracing is
      slow, and `update` is often traced again for the same types.
  """

  inner: optax.GradientTransformationExtraArgs
  reduction: sharded_reduction.ShardedReduction
  assume_elementwise: bool = False
  last_check: tuple[Any, str | None] = None, None

  def init(self, params: optax.Params) -> optax.OptState:
    """Returns the initial state in the form in which each shard stores it.

    The element-wise check happens in `update`, which has the updates and extra
    arguments that the check needs.

    Raises:
      ValueError: If parameters differ between shards, an axis of the mesh is
        not mapped, or the tree of the state depends on the shapes.
    """
    reduction = self.reduction
    reduction.check_mapped()
    reduction.check_params(params)
    # `state_specs` and `unshard_state` call `init` on one shard to get the
    # shapes of the unsliced state, so nothing may be sliced there.
    if axes_lib.num_shards(reduction.axes, reduction.caller) == 1:
      return self.inner.init(params)
    sliced_state = self.inner.init(reduction.own(params))
    unsliced = jax.eval_shape(self.inner.init, params)
    if jax.tree.structure(sliced_state) != jax.tree.structure(unsliced):
      raise self._error('its state depends on the shapes of the parameters')
    return self._store(sliced_state, unsliced, params)

  def update(
      self,
      sliced_updates: optax.Updates,
      inner_state: optax.OptState,
      updates: optax.Updates,
      params: optax.Params | None,
      extra_args: Mapping[str, Any],
  ) -> tuple[optax.Updates, optax.OptState]:
    """Returns the updates of a shard's slices, and the next state.

    Args:
      sliced_updates: The shard's slices of the reduced updates.
      inner_state: The state, in the form in which each shard stores it.
      updates: The updates before slicing.
      params: The unsliced parameters, or `None`.
      extra_args: The extra arguments of `update` of the transformation.

    Raises:
      ValueError: In the cases of `init`, if the transformation is not
        element-wise, or if the state was made for other parameters.
    """
    # JAX caches the jaxpr of a jitted function, so the trace of the check on
    # slices is reused by the call below. The function is made in each call,
    # because `inner` may close over values that differ between calls.
    update = functools.partial(self.inner.update, **extra_args)
    if problem := self._find_problem(updates, params, update):
      raise self._error(problem)
    sliced_params = None if params is None else self.reduction.own(params)
    like = updates if params is None else params
    sliced_like = sliced_updates if params is None else sliced_params
    unsliced = jax.eval_shape(self.inner.init, like)
    sliced = jax.eval_shape(self.inner.init, sliced_like)
    state = self._load(inner_state, sliced, unsliced, like)
    sliced_updates, state = jax.jit(update)(
        sliced_updates, state, sliced_params
    )
    return sliced_updates, self._store(state, unsliced, like)

  def _store(self, state, unsliced, params):
    """Converts the state of the slices to the form in which it is stored."""
    has_shard_axis = self._shard_axis_predicate(params)

    def store(leaf, unsliced):
      if has_shard_axis(leaf, unsliced):
        leaf = lax.expand_dims(leaf, (0,))
      if jnp.shape(leaf) != unsliced.shape:
        leaf = axes_lib.to_varying(leaf, self.reduction.axes)
      return leaf

    return jax.tree.map(store, state, unsliced)

  def _load(self, state, sliced, unsliced, params):
    """Converts the stored state to the state of the slices.

    Raises:
      ValueError: If the state has other leaves, or leaves of other shapes.
    """
    if jax.tree.structure(state) != jax.tree.structure(sliced):
      raise self._error_of_state(f'the tree is {jax.tree.structure(state)}')
    has_shard_axis = self._shard_axis_predicate(params)

    def load(path, leaf, sliced, unsliced):
      has_axis = has_shard_axis(sliced, unsliced)
      expected = (1, *sliced.shape) if has_axis else sliced.shape
      if jnp.shape(leaf) != expected:
        raise self._error_of_state(
            f'the shape at {leaves_lib.name_of(path)} is {jnp.shape(leaf)}'
            f' instead of {expected} on each shard'
        )
      return lax.squeeze(leaf, (0,)) if has_axis else leaf

    return jax.tree.map_with_path(load, state, sliced, unsliced)

  def _shard_axis_predicate(self, params):
    """Returns a predicate for leaves that are stored with a leading axis."""
    num_slices = math.prod(self.reduction.num_slices())
    in_groups = self.reduction.groups is not None and num_slices > 1
    shapes = set(map(jnp.shape, jax.tree.leaves(params)))

    # The slices of different groups do not form one array, and if no parameter
    # has the shape of a leaf, its division into slices is unknown.
    def has_shard_axis(leaf, unsliced):
      is_like_param = unsliced.shape in shapes
      if is_like_param and not in_groups:
        return False
      # A slice of one element has the shape of its leaf.
      has_one = bool(unsliced.shape) and math.prod(unsliced.shape) == 1
      return jnp.shape(leaf) != unsliced.shape or (is_like_param and has_one)

    return has_shard_axis

  def _find_problem(self, updates, params, update):
    """Returns the reason why `inner` is not element-wise, or `None`."""
    # `optax.tree_utils.tree_map_params` calls `init` with an empty placeholder
    # instead of parameters, and the check does not apply to it.
    if self.assume_elementwise or not jax.tree.leaves(updates):
      return None
    num_slices = self.reduction.num_slices()
    updates, params = jax.tree.map(jax.typeof, (updates, params))
    are_tracked = [axes_lib.is_tracked(axis) for axis in self.reduction.axes]
    key = num_slices, are_tracked, jax.tree.flatten((updates, params))
    if not update.keywords and key == self.last_check[0]:
      return self.last_check[1]
    problem = elementwise.find_problem(
        self.inner._replace(update=update),
        updates,
        params,
        num_slices,
        self.reduction.axes_of_sums(),
    )
    # Extra arguments may have other values in the next call.
    if not update.keywords:
      self.last_check = key, problem
    return problem

  def _error(self, problem):
    """Returns the error of a transformation that is not element-wise."""
    caller = self.reduction.caller
    remedy = '`optax.chain(cross_shard_mean(axis_name), inner)`'
    if self.reduction.axes_of_sums():
      remedy = (
          '`contrib.owned_update`, clip by'
          ' `shard_transforms.clip_by_global_norm`, or put aggregators before'
          f" `{caller}` and pass it `if_reduced='mean'`"
      )
    return ValueError(
        f'`{caller}` runs `inner` on slices, so `inner` must be element-wise,'
        f' but {problem}. Use {remedy}; if the check is wrong, set'
        ' `assume_elementwise=True`.'
    )

  def _error_of_state(self, problem):
    """Returns the error of a state that does not fit the parameters."""
    return ValueError(
        f'`{self.reduction.caller}` got a state that was made for other'
        f' parameters or another number of shards: {problem}.'
        f' {states.HOW_TO_CREATE}'
    )
