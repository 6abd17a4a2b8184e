"""Meetings: what shards send of a fragment, and how they take it over."""

from collections.abc import Hashable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
from typing import Any, NamedTuple

import chex
import jax
from jax import core
import jax.numpy as jnp
import optax

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.reduction import collectives
from shard_transforms._src.tracing import gating
from shard_transforms._src.tracing import jaxprs
from shard_transforms._src.tracing import shard_flow

# A `while_loop` of one or no iterations: unlike `cond`, it copies nothing where
# nothing is due.
_SELDOM = gating.Gate(applies=True)


@dataclasses.dataclass(frozen=True)
class Mixing:
  """How a shard takes the anchor over into its own parameters.

  Attributes:
    own: How much of its own parameters a shard keeps.
    elastic: Whether the rest comes from the anchor before it moved.
  """

  own: chex.Numeric
  elastic: bool

  def __call__(self, own: jax.Array, anchor: jax.Array) -> jax.Array:
    """Returns the next of a shard's own parameters, one leaf."""
    is_known = not isinstance(self.own, core.Tracer)
    # With a factor of 1 on either side, its bits are kept.
    if is_known and self.own == 0:
      return axes_lib.mark_varying(anchor, tuple(axes_lib.varying_axes(own)))
    if is_known and self.own == 1:
      return own
    mixed = jnp.asarray(self.own * own + (1 - self.own) * anchor)
    return mixed.astype(own.dtype)


class Anchor(NamedTuple):
  """The parameters that all shards share, before and after a step.

  Attributes:
    before: As they were before the step.
    params: These, or, for a gate that applies updates, as they are after it.
    updates: What is to be added to them, or `None` for such a gate.
  """

  before: optax.Params
  params: optax.Params
  updates: optax.Updates | None


def send(
    gate: gating.Gate,
    is_due: jax.Array,
    outer: optax.GradientTransformationExtraArgs,
    state: optax.OptState,
    anchor: optax.Params,
    own: optax.Params,
    *,
    weight: jax.Array | None,
    axes: tuple[Hashable, ...],
    extra_args: Mapping[str, Any],
    scope: str,
) -> tuple[Any, optax.OptState]:
  """Moves the anchor by the distances of all shards from it.

  Args:
    gate: Whether to return updates, or to apply them.
    is_due: Whether to do so, bool [].
    outer: The transformation that reduces the distances, as gradients.
    state: Its state.
    anchor: The parameters that all shards share; of one fragment.
    own: Those of this shard.
    weight: How much this shard counts, or `None`.
    axes: The axes of the shards.
    extra_args: The extra arguments of `outer.update`.
    scope: The name of the meeting in the program.

  Returns:
    The updates of the anchor, zero unless due, or the next anchor; and the next
    state.

  Raises:
    ValueError: If `outer` does not reduce over the axes, or changes a tree.
  """
  given = anchor if gate.applies else jax.tree.map(jnp.zeros_like, anchor)

  def run(state, given, anchor, own, weight, /, **extra_args):
    anchor = given if gate.applies else anchor
    way = jax.tree.map(jnp.subtract, anchor, own)
    if weight is None:
      moved, state = gate.update(outer, way, state, anchor, **extra_args)
    else:
      moved, state = gate.update_or_skip(
          collectives.total(weight, axes) > 0,
          outer,
          way,
          state,
          anchor,
          weight=weight,
          axes=axes,
          extra_args=extra_args,
      )
    return _like(moved, anchor), state

  def check(jaxpr):
    num_own, num_after = (len(jax.tree.leaves(tree)) for tree in (own, weight))
    differs = [frozenset()] * len(jaxpr.invars)
    first = len(differs) - num_after - num_own
    differs[first : first + num_own] = [frozenset(axes)] * num_own
    found = shard_flow.differing(jaxprs.flatten(jaxpr), differs)
    _check_reduced(found[: len(jax.tree.leaves(given))], axes)

  with jax.named_scope(scope):
    moved, state = _SELDOM.run_or_skip(
        is_due,
        run,
        state,
        given,
        () if gate.applies else anchor,
        own,
        weight,
        extra_args=extra_args,
        check=check,
        seldom=True,
    )
  _check_reduced(map(axes_lib.varying_axes, jax.tree.leaves(moved)), axes)
  return moved, state


def take_over(
    are_due: Sequence[jax.Array],
    numbers: Sequence[int],
    mixing: Mixing,
    inner: optax.GradientTransformationExtraArgs,
    own: optax.Params,
    inner_state: optax.OptState,
    anchor: Anchor,
    axes: tuple[Hashable, ...],
) -> tuple[optax.Params, optax.OptState]:
  """Returns a shard's own parameters after a step, and its inner state.

  A shard with own parameters that are due and not finite restarts from the
  anchor, with all of its parameters and a new inner state.

  Args:
    are_due: For each fragment, whether it is taken over, bool [].
    numbers: The number of the fragment of each leaf.
    mixing: How it is taken over.
    inner: The inner transformation.
    own: A shard's own parameters.
    inner_state: The state of the inner transformation.
    anchor: What all shards share.
    axes: The axes of the shards.
  """

  def run(state, _, are_due, params, updates, before):
    own, inner_state = state
    # In a loop of its own, so that this rounds as `apply_updates` of the user.
    moved = params if updates is None else optax.apply_updates(params, updates)
    leaves, treedef = jax.tree.flatten(own)
    is_due = [are_due[number] for number in numbers]
    is_well = _is_well(leaves, is_due, axes)
    renewed = jax.tree.leaves(moved)
    towards = jax.tree.leaves(before) if mixing.elastic else renewed
    mixed = map(mixing, leaves, towards)
    if len(are_due) > 1:
      mixed = map(jnp.where, is_due, mixed, leaves)
    choose = functools.partial(jnp.where, is_well)
    leaves = map(choose, mixed, renewed)
    fresh = inner.init(moved)
    inner_state = jax.tree.map(choose, inner_state, fresh)
    return (), (treedef.unflatten(leaves), inner_state)

  any_due = functools.reduce(jnp.logical_or, are_due)
  _, (own, inner_state) = _SELDOM.run_or_skip(
      any_due,
      run,
      (own, inner_state),
      (),
      are_due,
      anchor.params,
      anchor.updates,
      anchor.before if mixing.elastic else (),
      seldom=True,
  )
  return own, inner_state


def _is_well(leaves, are_due, axes):
  """Returns whether all leaves that are due are finite on this shard."""
  is_well = jnp.array(True)
  for leaf, is_due in zip(leaves, are_due, strict=True):
    is_well &= jnp.all(jnp.isfinite(leaf)) | ~is_due
  # Where parameters are sharded over other axes, all parts must be finite.
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
