"""Meetings: what shards send of a fragment, and how they take it over."""

from collections.abc import Hashable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from shard_transforms._src.analysis import inlining
from shard_transforms._src.analysis import shard_flow
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.gates import gating
from shard_transforms._src.local_updates import rounds
from shard_transforms._src.reduction import collectives


@dataclasses.dataclass(frozen=True)
class Meeting:
  """What shards do when they meet.

  Attributes:
    inner: The transformation of a shard's own parameters.
    outer: The one that reduces the distances from the anchor, as gradients.
    mixing: How much of its own parameters a shard keeps.
    fragments: How the leaves are divided.
    axes: The axes of the shards.
    assume_weighted: Whether `outer` is known to use the weight.
  """

  inner: optax.GradientTransformationExtraArgs
  outer: optax.GradientTransformationExtraArgs
  mixing: float
  fragments: rounds.Fragments
  axes: tuple[Hashable, ...]
  assume_weighted: bool = False

  def send_fragments(
      self,
      are_due: Sequence[jax.Array],
      states: Sequence[optax.OptState],
      anchor: optax.Params,
      own: optax.Params,
      weights: jax.Array | None,
      extra_args: Mapping[str, Any],
  ) -> tuple[Any, tuple[optax.OptState, ...]]:
    """Moves those fragments of the anchor that are due.

    Args:
      are_due: For each fragment, whether it is sent, bool [].
      states: For each, the state of `outer`.
      anchor: The parameters that all shards share.
      own: Those of this shard.
      weights: How much this shard counts, float32 [fragments], or `None`.
      extra_args: The extra arguments of `outer.update`.

    Returns:
      The updates of the anchor, zero unless due; and the next states.

    Raises:
      ValueError: If `outer` does not reduce over the axes, or changes a tree.
    """
    sent = []
    parts = zip(
        self.fragments.split(anchor), self.fragments.split(own), strict=True
    )
    for i, (shared, part) in enumerate(parts):
      weight = None if weights is None else weights[i]
      with jax.named_scope(f'meeting_{i}'):
        given = are_due[i], states[i], shared, part, weight, extra_args
        sent.append(self._send(*given))
    moved, states = zip(*sent, strict=True)
    return self.fragments.join(moved, anchor), states

  def _send(self, is_due, state, anchor, own, weight, extra_args):
    """Moves one fragment, by the distances of all shards from the anchor."""

    def run(state, anchor, own, weight, /, **extra_args):
      way = jax.tree.map(jnp.subtract, anchor, own)
      accept = None
      if weight is not None:
        accept = collectives.total(weight, self.axes) > 0
      gate = gating.Gate(
          'local_updates', self.outer, self.axes, self.assume_weighted
      )
      moved, state = gate.update_or_skip(
          gating.Checked(), accept, way, state, anchor, weight, extra_args
      )
      return _like(moved, anchor), state

    def check(jaxpr):
      arrays, _ = leaves_lib.split_arrays(extra_args)
      num_own, num_after = map(_num_leaves, (own, (weight, arrays)))
      differs = [frozenset()] * len(jaxpr.invars)
      first = len(differs) - num_after - num_own
      differs[first : first + num_own] = [frozenset(self.axes)] * num_own
      found = shard_flow.differing(inlining.flatten(jaxpr), differs)
      _check_reduced(found[: _num_leaves(anchor)], self.axes)

    given = is_due, run, state, anchor, own, weight
    moved, state = gating.run_when_due(
        *given, extra_args=extra_args, check=check
    )
    types = map(axes_lib.varying_axes, jax.tree.leaves(moved))
    _check_reduced(types, self.axes)
    return moved, state

  def take_over(
      self,
      are_due: Sequence[jax.Array],
      own: optax.Params,
      inner_state: optax.OptState,
      anchor: optax.Params,
      moved: Any,
  ) -> tuple[optax.Params, optax.OptState]:
    """Returns a shard's own parameters after a step, and its inner state.

    A shard with own parameters that are due and not finite restarts from the
    anchor, with all of its parameters and a new inner state.

    Args:
      are_due: For each fragment, whether it is taken over, bool [].
      own: A shard's own parameters.
      inner_state: The state of the inner transformation.
      anchor: The parameters that all shards share, before the step.
      moved: The updates of these.
    """
    numbers = self.fragments.of_leaves(anchor)

    # As the caller computes it: XLA needs the anchor of before no more.
    after = optax.apply_updates(anchor, moved)

    def run(state, are_due, moved):
      own, inner_state = state
      leaves, treedef = jax.tree.flatten(own)
      is_due = [are_due[number] for number in numbers]
      is_well = _is_well(leaves, is_due, self.axes)
      renewed = jax.tree.leaves(moved)
      mixed = map(self._mixed, leaves, renewed)
      if len(are_due) > 1:
        mixed = map(jnp.where, is_due, mixed, leaves)
      choose = functools.partial(jnp.where, is_well)
      leaves = map(choose, mixed, renewed)
      fresh = self.inner.init(moved)
      inner_state = jax.tree.map(choose, inner_state, fresh)
      return (), (treedef.unflatten(leaves), inner_state)

    is_any_due = functools.reduce(jnp.logical_or, are_due)
    state = own, inner_state
    given = is_any_due, run, state, are_due, after
    return gating.run_when_due(*given)[1]

  def _mixed(self, own, anchor):
    """Returns the next of a shard's own parameters, one leaf."""
    # The anchor must keep its bits, which the formula would not.
    if not self.mixing:
      return axes_lib.mark_varying(anchor, tuple(axes_lib.varying_axes(own)))
    mixed = jnp.asarray(self.mixing * own + (1 - self.mixing) * anchor)
    return mixed.astype(own.dtype)


def _num_leaves(tree):
  return len(jax.tree.leaves(tree))


def _is_well(leaves, are_due, axes):
  """Returns whether all leaves that are due are finite on this shard."""
  is_well = jnp.array(True)
  for leaf, is_due in zip(leaves, are_due, strict=True):
    is_well &= jnp.all(jnp.isfinite(leaf)) | ~is_due
  # Parameters may be sharded over other axes: all their parts must be finite.
  others = tuple(axes_lib.varying_axes(is_well).difference(axes))
  num_sick = collectives.psum(jnp.where(is_well, 0, 1), others)
  return num_sick == 0


def _like(moved, anchor):
  """Returns the updates of the outer transformation, in the anchor's dtypes.

  Raises:
    ValueError: If it is of another tree.
  """
  after, before = jax.tree.structure(moved), jax.tree.structure(anchor)
  if after != before:
    raise ValueError(
        '`outer` of `local_updates` must keep the tree of the updates, got'
        f' {after} instead of {before}.'
    )
  return jax.tree.map(lambda x, like: x.astype(like.dtype), moved, anchor)


def _check_reduced(differing, axes):
  """Checks that the anchor moves by the same update on all shards.

  Raises:
    ValueError: If it may not.
  """
  found = sorted(set().union(*differing).intersection(axes), key=str)
  if found:
    raise ValueError(
        '`outer` of `local_updates` must reduce over all of `axis_name`, got'
        f' one whose updates differ between shards along {found}. Begin it with'
        " `cross_shard_mean`, as in `optax.chain(cross_shard_mean('data'),"
        ' optax.sgd(0.7, 0.9, nesterov=True))`.'
    )
