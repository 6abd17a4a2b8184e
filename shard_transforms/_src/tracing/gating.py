"""Running an inner transformation, or leaving everything as it is."""

from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Mapping
from collections.abc import Sequence
import functools
from typing import Any

import jax
from jax import lax
import jax.extend
import jax.numpy as jnp
import optax

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import weights
from shard_transforms._src.tracing import weight_flow


def update_or_skip(
    accept: jax.Array,
    inner: optax.GradientTransformationExtraArgs,
    updates: optax.Updates,
    inner_state: optax.OptState,
    params: optax.Params | None,
    *,
    weight: jax.Array | None = None,
    axes: Sequence[Hashable] = (),
    extra_args: Mapping[str, Any],
    may_be_local: bool = True,
) -> tuple[optax.Updates, optax.OptState]:
  """Returns `inner.update(...)` where `accept`, else zeros and the same state.

  Args:
    accept: Whether to run, bool [].
    inner: The transformation.
    updates: Those of this shard.
    inner_state: Its state.
    params: As for `inner.update`.
    weight: How much this shard counts, handed to `inner`; or `None`.
    axes: The axes over which what is summed must heed the weight.
    extra_args: As for `inner.update`.
    may_be_local: Whether updates of a shard may go through without the weight
      where they are not summed.

  Raises:
    ValueError: As `run_or_skip`, or if `inner` does not heed the weight.
  """

  def run(inner_state, updates, weight):
    given = weights.given(weight=weight)
    return inner.update(updates, inner_state, params, **extra_args, **given)

  def check(jaxpr):
    if weight is not None and axes:
      num_before = len(jax.tree.leaves(inner_state))
      num_given = num_before + len(jax.tree.leaves(updates)) + 1
      _check_heeded(jaxpr, num_given, num_before, axes, may_be_local)

  return run_or_skip(accept, run, inner_state, updates, weight, check=check)


def run_or_skip(
    accept: jax.Array,
    run: Callable[..., tuple[Any, Any]],
    state: optax.OptState,
    *args: Any,
    check: Callable[[jax.extend.core.Jaxpr], None] | None = None,
) -> tuple[Any, Any]:
  """Returns `run(state, *args)` where `accept`, else zero updates and `state`.

  `run` may hold collectives, so `accept` must be the same on all shards. It is
  traced once; on a skip nothing of it is executed, and `state` keeps its bits.

  Args:
    accept: Whether to run, bool [].
    run: Gives updates and the next state.
    state: Tree of arrays.
    args: Trees of arrays that it takes as well.
    check: Looks at what `run` does, and raises if it must not.

  Returns:
    The updates and the next state. A leaf is typed as varying over the axes
    over which it varies after either.

  Raises:
    ValueError: If `accept` can differ between shards, or `run` changes the tree
      or the dtypes of the state.
  """
  if axes_lib.varying_axes(accept):
    raise ValueError(
        'Whether a transformation runs must be decided alike on all shards, but'
        f' the decision is typed {jax.typeof(accept)}. Give `axis_name`.'
    )
  # JAX keeps the program of what it has compiled: the branch traces it no more.
  run = jax.jit(run)
  traced = run.trace(state, *args)
  jaxpr, out = traced.jaxpr, traced.out_info
  _check_state(state, out[1], jaxpr.out_avals)
  if check is not None:
    check(jaxpr.jaxpr)
  leaves = jax.tree.leaves(state)
  # The branches of a `cond` must agree on types, and a skip has the types of
  # what went in: what one of them has typed as varying, the other casts to.
  zeros = jaxpr.out_avals[: len(jaxpr.out_avals) - len(leaves)]
  if_run = [tuple(axes_lib.varying_axes(kind)) for kind in jaxpr.out_avals]
  if_skipped = [()] * len(zeros)
  if_skipped += [tuple(axes_lib.varying_axes(leaf)) for leaf in leaves]

  def accepted(state):
    outputs = jax.tree.leaves(run(state, *args))
    return list(map(axes_lib.mark_varying, outputs, if_skipped))

  def skipped(state):
    zero = functools.cache(axes_lib.zeros)
    outputs = [*map(zero, zeros), *jax.tree.leaves(state)]
    return list(map(axes_lib.mark_varying, outputs, if_run))

  outputs = lax.cond(accept, accepted, skipped, state)
  return jax.tree.unflatten(jax.tree.structure(out), outputs)


def _check_state(state, new_state, out_avals):
  """Checks that a state keeps its tree, its shapes and its dtypes.

  Raises:
    ValueError: If it does not.
  """
  before, after = jax.tree.structure(state), jax.tree.structure(new_state)
  if after != before:
    raise ValueError(
        'The inner transformation must keep the tree of its state, got'
        f' {after} instead of {before}. Where a leaf has'
        ' no gradient, leave it out of the transformation with `optax.masked`.'
    )
  paths = jax.tree.leaves_with_path(state)
  num_updates = len(out_avals) - len(paths)
  for (path, leaf), after in zip(paths, out_avals[num_updates:], strict=True):
    before = jax.typeof(leaf)
    if (before.shape, before.dtype) != (after.shape, after.dtype):
      raise ValueError(
          'The inner transformation must keep the shapes and dtypes of its'
          f' state, got {after.dtype.name}{list(after.shape)} instead of'
          f' {before.dtype.name}{list(before.shape)} at'
          f' {jax.tree_util.keystr(path) or "the root"}. Cast the updates to'
          ' the dtypes of the parameters.'
      )


def _check_heeded(jaxpr, num_given, num_before, axes, may_be_local):
  """Checks that shards count by their weights in what is run.

  Args:
    jaxpr: Takes a state, updates and a weight, after what it closes over, and
      gives updates and a state.
    num_given: The leaves of all three.
    num_before: The leaves of the state.
    axes: The axes of the shards.
    may_be_local: As for `update_or_skip`.

  Raises:
    ValueError: If updates are reduced without the weight, or handed through
      where that is not allowed.
  """
  num_updates = len(jaxpr.outvars) - num_before
  # What `run` closes over comes first.
  given = [0] * (len(jaxpr.invars) - num_given + num_before)
  given += [weight_flow.UPDATES] * (num_given - num_before - 1)
  given.append(weight_flow.WEIGHT)
  sums, alone = weight_flow.sums_without(jaxpr, given, axes)
  goes_through = any(
      is_alone and jnp.issubdtype(x.aval.dtype, jnp.inexact)
      for x, is_alone in zip(jaxpr.outvars, alone[:num_updates], strict=False)
  )
  if sums or (goes_through and not may_be_local):
    raise ValueError(
        'The inner transformation must heed the extra argument `weight`, which'
        ' leaves out some shards, got one that does not: a reduction by hand,'
        ' or none, counts them all. Reduce with `cross_shard_mean`,'
        ' `cross_shard_sum` or `shard_update`, and see that what is around it'
        ' forwards extra arguments.'
    )
