"""Running an inner transformation, or leaving everything as it is."""

from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
import jax.extend
import jax.numpy as jnp

from shard_transforms._src.base import axes
from shard_transforms._src.tracing import jaxprs
from shard_transforms._src.tracing import weight_flow


def run_or_skip(
    accept: jax.Array,
    run: Callable[..., tuple[Any, Any]],
    state: Any,
    shares: tuple[Any, jax.Array | None] | None = None,
    shard_axes: Sequence[Hashable] = (),
    may_be_local: bool = True,
) -> tuple[Any, Any]:
  """Returns `run(state)` where `accept`, else zero updates and `state`.

  `run` may hold collectives, so `accept` must be the same on all shards. It is
  traced once; on a skip nothing of it is executed, and `state` keeps its bits.

  Args:
    accept: Whether to run, bool [].
    run: Takes the state, and the two `shares` if given; gives updates and the
      next state.
    state: Tree of arrays.
    shares: The updates of this shard, and how much it counts, or `None`.
    shard_axes: The axes over which what is summed must heed the latter.
    may_be_local: Whether updates of a shard may go through without it where
      they are not summed.

  Returns:
    The updates and the next state. A leaf is typed as varying over the axes
    over which it varies after either.

  Raises:
    ValueError: If `accept` can differ between shards, `run` changes the tree or
      the dtypes of the state, or it does not heed the weight.
  """
  if axes.varying_axes(accept):
    raise ValueError(
        'Whether a transformation runs must be decided alike on all shards, but'
        f' the decision is typed {jax.typeof(accept)}. Give `axis_name`.'
    )
  leaves, treedef = jax.tree.flatten(state)
  given = () if shares is None else shares
  jaxpr, out = jax.make_jaxpr(run, return_shape=True)(state, *given)
  if jax.tree.structure(out[1]) != treedef:
    raise ValueError(
        'The inner transformation must keep the tree of its state, got'
        f' {jax.tree.structure(out[1])} instead of {treedef}. Where a leaf has'
        ' no gradient, leave it out of the transformation with `optax.masked`.'
    )
  types = jaxpr.out_avals
  num_updates = len(types) - len(leaves)
  paths = [path for path, _ in jax.tree.leaves_with_path(state)]
  for path, before, after in zip(
      paths, jaxpr.in_avals, types[num_updates:], strict=False
  ):
    _check_state(before, after, path)
  if shares is not None and shares[1] is not None and shard_axes:
    _check_heeded(
        jaxpr.jaxpr, len(leaves), num_updates, shard_axes, may_be_local
    )
  if_run = [tuple(axes.varying_axes(kind)) for kind in types]
  if_skipped = [()] * num_updates
  if_skipped += [tuple(axes.varying_axes(leaf)) for leaf in leaves]

  def accepted(leaves):
    outputs = jax.extend.core.jaxpr_as_fun(jaxpr)(
        *leaves, *jax.tree.leaves(given)
    )
    return list(map(axes.to_varying, outputs, if_skipped))

  def skipped(leaves):
    updates = [axes.zeros(kind) for kind in types[:num_updates]]
    return list(map(axes.to_varying, updates + leaves, if_run))

  outputs = lax.cond(accept, accepted, skipped, leaves)
  return jax.tree.unflatten(jax.tree.structure(out), outputs)


def _check_state(before, after, path):
  """Checks that a leaf of the state is of the same kind after a step.

  Raises:
    ValueError: If it is not.
  """
  if (before.shape, before.dtype) != (after.shape, after.dtype):
    raise ValueError(
        'The inner transformation must keep the shapes and dtypes of its state,'
        f' got {after.dtype.name}{list(after.shape)} instead of'
        f' {before.dtype.name}{list(before.shape)} at'
        f' {jax.tree_util.keystr(path) or "the root"}. Cast the updates to the'
        ' dtypes of the parameters.'
    )


def _check_heeded(jaxpr, num_before, num_updates, axes, may_be_local):
  """Checks that shards count by their weights in what is run.

  Raises:
    ValueError: If updates are reduced without the weight, or handed through
      where that is not allowed.
  """
  program = jaxprs.flatten(jaxpr)
  *updates, weight = program.inputs[num_before:]
  sums, alone = weight_flow.sums_without(program, updates, weight, axes)
  goes_through = any(
      is_alone and jnp.issubdtype(x.aval.dtype, jnp.inexact)
      for x, is_alone in zip(program.outputs, alone[:num_updates], strict=False)
  )
  if sums or (goes_through and not may_be_local):
    raise ValueError(
        'The inner transformation must heed the extra argument `weight`, which'
        ' leaves out some shards, got one that does not: a reduction by hand,'
        ' or none, counts them all. Reduce with `cross_shard_mean`,'
        ' `cross_shard_sum` or `shard_update`, and see that what is around it'
        ' forwards extra arguments.'
    )
