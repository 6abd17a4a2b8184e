"""Running an inner transformation, or leaving everything as it is."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
import jax.extend

from shard_transforms._src import axes


def run_or_skip(
    accept: jax.Array,
    run: Callable[[Any], tuple[Any, Any]],
    state: Any,
) -> tuple[Any, Any]:
  """Returns `run(state)` where `accept`, else zero updates and `state`.

  `run` may hold collectives, so `accept` must be the same on all shards. It is
  traced once; on a skip nothing of it is executed, and `state` keeps its bits.

  Args:
    accept: Whether to run, bool [].
    run: Takes the state; gives updates and the next state.
    state: Tree of arrays.

  Returns:
    The updates and the next state. A leaf is typed as varying over the axes
    over which it varies after either.

  Raises:
    ValueError: If `accept` can differ between shards, or `run` changes the tree
      of the state.
  """
  if axes.varying_axes(accept):
    raise ValueError(
        'Whether a transformation runs must be decided alike on all shards, but'
        f' the decision is typed {jax.typeof(accept)}. Give `axis_name`.'
    )
  leaves, treedef = jax.tree.flatten(state)
  jaxpr, out = jax.make_jaxpr(run, return_shape=True)(state)
  if jax.tree.structure(out[1]) != treedef:
    raise ValueError(
        'The inner transformation must keep the tree of its state, got'
        f' {jax.tree.structure(out[1])} instead of {treedef}. Where a leaf has'
        ' no gradient, leave it out of the transformation with `optax.masked`.'
    )
  types = jaxpr.out_avals
  num_updates = len(types) - len(leaves)
  if_run = [tuple(axes.varying_axes(kind)) for kind in types]
  if_skipped = [()] * num_updates
  if_skipped += [tuple(axes.varying_axes(leaf)) for leaf in leaves]

  def accepted(leaves):
    outputs = jax.extend.core.jaxpr_as_fun(jaxpr)(*leaves)
    return list(map(axes.to_varying, outputs, if_skipped))

  def skipped(leaves):
    updates = [axes.zeros(kind) for kind in types[:num_updates]]
    return list(map(axes.to_varying, updates + leaves, if_run))

  outputs = lax.cond(accept, accepted, skipped, leaves)
  return jax.tree.unflatten(jax.tree.structure(out), outputs)
