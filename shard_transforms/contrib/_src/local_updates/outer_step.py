"""The outer step of local updates: exchanging and mixing fragments."""

from collections.abc import Hashable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from shard_transforms._src.analysis import divergence_analysis
from shard_transforms._src.analysis import inlining
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.gates import branching
from shard_transforms._src.gates import gating
from shard_transforms._src.reduction import collectives
from shard_transforms.contrib._src.local_updates import schedule


@dataclasses.dataclass(frozen=True)
class OuterStep:
  """The outer step of `local_updates`.

  Attributes:
    inner: The transformation of the local parameters.
    outer: The transformation that reduces the pseudo-gradients.
    mixing: The fraction of its local parameters that a shard keeps.
    fragments: The division of the leaves into fragments.
    axes: The axes of the shards.
    assume_weighted: Whether to assume that `outer` uses the weight.
  """

  inner: optax.GradientTransformationExtraArgs
  outer: optax.GradientTransformationExtraArgs
  mixing: float
  fragments: schedule.Fragments
  axes: tuple[Hashable, ...]
  assume_weighted: bool = False

  def send_fragments(
      self,
      are_due: Sequence[jax.Array],
      states: Sequence[optax.OptState],
      anchor: optax.Params,
      local_params: optax.Params,
      weights: jax.Array | None,
      extra_args: Mapping[str, Any],
  ) -> tuple[Any, tuple[optax.OptState, ...]]:
    """Moves the fragments of the anchor that are due.

    Args:
      are_due: Whether each fragment is sent, bool [].
      states: The state of `outer` for each fragment.
      anchor: The parameters that all shards share.
      local_params: The local parameters of this shard.
      weights: The weights of this shard, float32 [fragments], or `None`.
      extra_args: The extra arguments of `outer.update`.

    Returns:
      The updates of the anchor, zero unless due, and the next states.

    Raises:
      ValueError: If `outer` does not reduce over the axes, or changes the tree.
    """
    sent = []
    parts = zip(
        self.fragments.split(anchor),
        self.fragments.split(local_params),
        strict=True,
    )
    for i, (shared, part) in enumerate(parts):
      weight = None if weights is None else weights[i]
      with jax.named_scope(f'outer_step_{i}'):
        sent.append(
            self._send(are_due[i], states[i], shared, part, weight, extra_args)
        )
    moved, states = zip(*sent, strict=True)
    return self.fragments.join(moved, anchor), states

  def _send(self, is_due, state, anchor, local_params, weight, extra_args):
    """Moves one fragment by the pseudo-gradients of all shards."""

    def run(state, anchor, local_params, weight, /, **extra_args):
      pseudo_gradient = jax.tree.map(jnp.subtract, anchor, local_params)
      accept = None
      if weight is not None:
        accept = collectives.psum(weight, self.axes) > 0
      gate = gating.Gate(
          'local_updates', self.outer, self.axes, self.assume_weighted
      )
      _, moved, state = gate.update_or_skip(
          gating.WeightCheck(),
          accept,
          pseudo_gradient,
          state,
          anchor,
          weight,
          extra_args,
      )
      return _like(moved, anchor), state

    def check(jaxpr):
      arrays, _ = leaves_lib.split_arrays(extra_args)
      num_own, num_after = map(_num_leaves, (local_params, (weight, arrays)))
      differs = [frozenset()] * len(jaxpr.invars)
      first = len(differs) - num_after - num_own
      differs[first : first + num_own] = [frozenset(self.axes)] * num_own
      result_axes = divergence_analysis.differing(
          inlining.flatten(jaxpr), differs
      )
      _check_reduced(result_axes[: _num_leaves(anchor)], self.axes)

    moved, state = branching.run_when_due(
        is_due,
        run,
        state,
        anchor,
        local_params,
        weight,
        caller='local_updates',
        extra_args=extra_args,
        check=check,
    )
    types = map(axes_lib.varying_axes, jax.tree.leaves(moved))
    _check_reduced(types, self.axes)
    return moved, state

  def mix_fragments(
      self,
      are_due: Sequence[jax.Array],
      local_params: optax.Params,
      inner_state: optax.OptState,
      anchor: optax.Params,
      moved: Any,
  ) -> tuple[optax.Params, optax.OptState]:
    """Mixes fragments of the anchor into the local parameters of a shard.

    If a fragment that is due is not finite on a shard, all of its parameters
    restart from the anchor, with a new inner state.

    Args:
      are_due: Whether each fragment is mixed, bool [].
      local_params: The local parameters of this shard.
      inner_state: The state of the inner transformation.
      anchor: The parameters that all shards share, before the step.
      moved: The updates of the anchor.

    Returns:
      The next local parameters and inner state.
    """
    fragment_of = self.fragments.indices(anchor)

    # The same computation as in the caller, so that XLA can free the old
    # anchor.
    after = optax.apply_updates(anchor, moved)

    def run(state, are_due, moved):
      local_params, inner_state = state
      leaves, treedef = jax.tree.flatten(local_params)
      is_due = [are_due[number] for number in fragment_of]
      is_finite = _is_finite(leaves, is_due, self.axes)
      restarted = jax.tree.leaves(moved)
      mixed = map(self._mix_leaf, leaves, restarted)
      if len(are_due) > 1:
        mixed = map(jnp.where, is_due, mixed, leaves)
      choose = functools.partial(jnp.where, is_finite)
      leaves = map(choose, mixed, restarted)
      fresh = self.inner.init(moved)
      inner_state = jax.tree.map(choose, inner_state, fresh)
      return (), (treedef.unflatten(leaves), inner_state)

    is_any_due = functools.reduce(jnp.logical_or, are_due)
    state = local_params, inner_state
    return branching.run_when_due(
        is_any_due, run, state, are_due, after, caller='local_updates'
    )[1]

  def _mix_leaf(self, local_params, anchor):
    """Mixes a leaf of the anchor into the local parameters."""
    # Without mixing, the result must have the exact bits of the anchor.
    if not self.mixing:
      return axes_lib.mark_varying(
          anchor, tuple(axes_lib.varying_axes(local_params))
      )
    mixed = jnp.asarray(self.mixing * local_params + (1 - self.mixing) * anchor)
    return mixed.astype(local_params.dtype)


def _num_leaves(tree):
  return len(jax.tree.leaves(tree))


def _is_finite(leaves, are_due, axes):
  """Returns whether the leaves that are due are finite on this shard."""
  is_finite = jnp.array(True)
  for leaf, is_due in zip(leaves, are_due, strict=True):
    is_finite &= jnp.all(jnp.isfinite(leaf)) | ~is_due
  # Parameters may be sharded over other axes, along which all parts must be
  # finite.
  others = tuple(axes_lib.varying_axes(is_finite).difference(axes))
  num_non_finite = collectives.psum(jnp.where(is_finite, 0, 1), others)
  return num_non_finite == 0


def _like(moved, anchor):
  """Casts the updates of the outer transformation to the dtypes of the anchor.

  Raises:
    ValueError: If the trees differ.
  """
  after, before = jax.tree.structure(moved), jax.tree.structure(anchor)
  if after != before:
    raise ValueError(
        '`outer` of `local_updates` changed the tree of the updates from'
        f' {before} to {after}. Use a transformation that keeps the tree.'
    )
  return jax.tree.map(lambda x, like: x.astype(like.dtype), moved, anchor)


def _check_reduced(differing, axes):
  """Checks that the update of the anchor is the same on all shards.

  Raises:
    ValueError: If it may differ.
  """
  axes_of_updates = sorted(set().union(*differing).intersection(axes), key=str)
  if axes_of_updates:
    raise ValueError(
        '`outer` of `local_updates` returned updates that differ between'
        f' shards along {axes_of_updates}. Reduce over all of `axis_name`'
        " first, as in `optax.chain(cross_shard_mean('data'), optax.sgd(0.7,"
        ' 0.9, nesterov=True))`.'
    )
