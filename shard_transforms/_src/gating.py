"""Running an inner transformation, or leaving everything as it is."""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
import jax.extend

from shard_transforms._src import axes
from shard_transforms._src import jaxprs
from shard_transforms._src import reports


def run_or_skip(
    accept: jax.Array,
    run: Callable[..., tuple[Any, Any]],
    state: Any,
    weight: jax.Array | None = None,
    may_be_local: bool = False,
) -> tuple[Any, Any]:
  """Returns `run(state)` where `accept`, else zero updates and `state`.

  `run` may hold collectives, so `accept` must be the same on all shards. It is
  traced once; on a skip nothing of it is executed, and `state` keeps its bits.

  Args:
    accept: Whether to run, bool [].
    run: Takes the state, and `weight` if there is one; gives updates and the
      next state.
    state: Tree of arrays.
    weight: How much this shard counts, which `run` must heed.
    may_be_local: Whether it need not where it sends nothing between shards.

  Returns:
    The updates and the next state. A leaf is typed as varying over the axes
    over which it varies after either.

  Raises:
    ValueError: If `accept` can differ between shards, `run` changes the tree of
      the state, or it gives updates whatever the weight.
  """
  if axes.varying_axes(accept):
    raise ValueError(
        'Whether a transformation runs must be decided alike on all shards, but'
        f' the decision is typed {jax.typeof(accept)}. Give `axis_name`.'
    )
  leaves, treedef = jax.tree.flatten(state)
  given = [] if weight is None else [weight]
  jaxpr, out = jax.make_jaxpr(run, return_shape=True)(state, *given)
  if jax.tree.structure(out[1]) != treedef:
    raise ValueError(
        'The inner transformation must keep the tree of its state, got'
        f' {jax.tree.structure(out[1])} instead of {treedef}. Where a leaf has'
        ' no gradient, leave it out of the transformation with `optax.masked`.'
    )
  if weight is not None:
    _check_heeded(jaxpr.jaxpr, may_be_local)
  types = jaxpr.out_avals
  num_updates = len(types) - len(leaves)
  if_run = [tuple(axes.varying_axes(kind)) for kind in types]
  if_skipped = [()] * num_updates
  if_skipped += [tuple(axes.varying_axes(leaf)) for leaf in leaves]

  def accepted(leaves):
    outputs = jax.extend.core.jaxpr_as_fun(jaxpr)(*leaves, *given)
    return list(map(axes.to_varying, outputs, if_skipped))

  def skipped(leaves):
    updates = [axes.zeros(kind) for kind in types[:num_updates]]
    return list(map(axes.to_varying, updates + leaves, if_run))

  outputs = lax.cond(accept, accepted, skipped, leaves)
  return jax.tree.unflatten(jax.tree.structure(out), outputs)


def _check_heeded(jaxpr, may_be_local):
  """Checks that what runs depends on its last input, a weight.

  Raises:
    ValueError: If it does not, although it depends on something.
  """
  read = {id(x) for eqn in jaxpr.eqns for x in eqn.invars}
  if not jaxpr.eqns or id(jaxpr.invars[-1]) in read:
    return
  if not may_be_local or _sends(jaxprs.flatten(jaxpr)):
    raise ValueError(
        'The inner transformation must heed the extra argument `weight`, which'
        ' leaves out some shards, got one that does not read it: a reduction by'
        ' hand counts them all. Reduce with `cross_shard_mean`,'
        ' `cross_shard_sum` or `shard_update`, and see that what is around it'
        ' forwards extra arguments.'
    )


def _sends(program):
  return any(
      (step.name in reports.SENT and step.axes) or any(map(_sends, step.bodies))
      for step in program.steps
  )
