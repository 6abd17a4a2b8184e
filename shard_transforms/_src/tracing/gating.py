"""Gates: run an inner transformation, or keep all state as it is.

A gate gives updates, which are zero where it skips, or applies them to the
parameters itself, which then stay as they are. `Gate` is both: what is written
once for a transformation serves its `update` and `update_and_apply`.
"""

from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

import jax
from jax import lax
import jax.extend
import jax.numpy as jnp
import optax

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves
from shard_transforms._src.base import weights
from shard_transforms._src.tracing import application
from shard_transforms._src.tracing import gate_checks
from shard_transforms._src.tracing import jaxprs
from shard_transforms._src.tracing import weight_flow


def transformation(
    init: optax.TransformInitFn, step: Callable[..., Any]
) -> optax.GradientTransformationExtraArgs:
  """Returns a transformation whose `step` takes a `Gate` before all else."""

  def update(updates, state, params=None, **extra_args):
    return step(Gate(applies=False), updates, state, params, **extra_args)

  update.__qualname__ = step.__qualname__
  setattr(
      update, application.ATTRIBUTE, functools.partial(step, Gate(applies=True))
  )
  return optax.GradientTransformationExtraArgs(init, update)


@dataclasses.dataclass(frozen=True)
class Gate:
  """Runs or skips steps that give updates, or parameters with these applied.

  Attributes:
    applies: Whether a step gives the next parameters.
  """

  applies: bool

  def update(
      self,
      inner: optax.GradientTransformationExtraArgs,
      updates: optax.Updates,
      inner_state: optax.OptState,
      params: Any,
      **extra_args: Any,
  ) -> tuple[Any, optax.OptState]:
    """Returns the updates, or the next parameters, and the next state."""
    if not self.applies:
      return inner.update(updates, inner_state, params, **extra_args)
    return application.update_and_apply(
        inner, updates, inner_state, params, **extra_args
    )

  def update_or_skip(
      self,
      accept: jax.Array,
      inner: optax.GradientTransformationExtraArgs,
      updates: optax.Updates,
      inner_state: optax.OptState,
      params: optax.Params | None,
      *,
      weight: jax.Array | None = None,
      is_healthy: jax.Array | None = None,
      axes: Sequence[Hashable] = (),
      extra_args: Mapping[str, Any],
      may_be_local: bool = True,
  ) -> tuple[Any, optax.OptState]:
    """Returns what `update` does where `accept`, else what is as it was.

    Args:
      accept: Whether to run, bool [].
      inner: The transformation.
      updates: Those of this shard.
      inner_state: Its state.
      params: As for `inner.update`.
      weight: How much this shard counts, handed to `inner`; or `None`.
      is_healthy: Whether `inner` gets the updates of this shard, bool [], and
        zeros otherwise; `None` is true.
      axes: The axes over which what is summed must heed the weight.
      extra_args: As for `inner.update`.
      may_be_local: Whether updates of a shard may go through without the weight
        where they are not summed.

    Raises:
      ValueError: As `run_or_skip`, or if `inner` does not heed the weight.
    """

    def run(state, params, is_healthy, updates, weight):
      if is_healthy is not None:
        # Inside the branch, where the compiler fuses it with what reads them.
        updates = leaves.zero_unless(is_healthy, updates)
      given = weights.given(weight=weight)
      return self.update(inner, updates, state, params, **extra_args, **given)

    def check(jaxpr):
      if weight is not None and axes:
        from_updates = jax.tree.leaves((is_healthy, updates))
        given = [weight_flow.UPDATES] * len(from_updates)
        given.append(weight_flow.WEIGHT)
        num_after = len(jax.tree.leaves(inner_state))
        gate_checks.check_heeded(jaxpr, given, num_after, axes, may_be_local)

    return self.run_or_skip(
        accept,
        run,
        inner_state,
        params,
        is_healthy,
        updates,
        weight,
        check=check,
    )

  def run_or_skip(
      self,
      accept: jax.Array,
      run: Callable[..., tuple[Any, Any]],
      state: optax.OptState,
      params: optax.Params | None,
      *args: Any,
      extra_args: Mapping[str, Any] | None = None,
      check: Callable[[jax.extend.core.Jaxpr], None] | None = None,
      seldom: bool = False,
  ) -> tuple[Any, Any]:
    """Returns what `run` does where `accept`, else what was before.

    `run(state, params, *args, **extra_args)` may hold collectives, so `accept`
    must be the same on all shards. It is traced once; on a skip nothing of it
    is executed, and `state` keeps its bits, as do `params` where `run` gives
    parameters.

    Args:
      accept: Whether to run, bool [].
      run: Gives updates, or the next parameters, and the next state.
      state: Tree of arrays.
      params: The parameters.
      args: Trees of arrays that it takes as well.
      extra_args: What it takes by name, which need not be arrays.
      check: Looks at what `run` does, and raises if it must not.
      seldom: Whether most steps are skipped, so that these should cost least.

    Returns:
      The updates, zero on a skip, or the parameters; and the next state. A leaf
      is typed as varying over the axes over which it varies after either.

    Raises:
      ValueError: If `accept` can differ between shards, or `run` changes the
        tree or the dtypes of the state.
    """
    if axes_lib.varying_axes(accept):
      raise ValueError(
          'Whether a transformation runs must be decided alike on all shards,'
          f' but the decision is typed {jax.typeof(accept)}. Give `axis_name`.'
      )

    def run_given(given, state, own, *args):
      params, extra_args = given
      return run(state, own if self.applies else params, *args, **extra_args)

    own = params if self.applies else None
    given = None if self.applies else params, dict(extra_args or {})
    run_arrays, arrays = _of_arrays(run_given, given, seldom)
    # JAX names each leaf by its path, which takes longer in a tree.
    before, treedef_before = jax.tree.flatten((own, state))
    read, treedef_read = jax.tree.flatten((arrays, args))

    def run_leaves(before, read):
      own, state = treedef_before.unflatten(before)
      arrays, args = treedef_read.unflatten(read)
      return run_arrays(arrays, state, own, *args)

    # JAX keeps the program of what it compiles: it is not traced once more.
    run_leaves = jax.jit(run_leaves)
    traced = run_leaves.trace(before, read)
    program = traced.jaxpr
    _, state_after = traced.out_tree.children()
    gate_checks.check_state(state, state_after, program.out_avals)
    if check is not None:
      check(program.jaxpr)
    # Of what `run` closes over, JAX makes inputs of its program.
    num_given = len(before) + len(read)
    in_loop = seldom and len(program.in_avals) == num_given
    outputs = _chosen(
        accept, run_leaves, before, read, program.out_avals, in_loop
    )
    return traced.out_tree.unflatten(outputs)


def _of_arrays(fn, given, is_needed):
  """Returns `fn` as a function of the arrays in `given`, and these arrays.

  What else is in its first argument `given`, such as functions, stays there;
  and so do arrays, as they are, where such a function is not needed.
  """
  leaves_given, treedef = jax.tree.flatten(given)
  arrays = [
      x if is_needed and isinstance(x, jax.Array) else None
      for x in leaves_given
  ]

  def of_arrays(arrays, *args):
    pairs = zip(leaves_given, arrays, strict=True)
    filled = [x if array is None else array for x, array in pairs]
    return fn(treedef.unflatten(filled), *args)

  return of_arrays, arrays


def _chosen(accept, run, before, read, kinds, in_loop):
  """Returns the leaves that `run` gives where `accept`, else those before.

  Args:
    accept: Whether to run, bool [].
    run: Takes leaves, and gives a tree of those that take their place, behind
      updates.
    before: The leaves; where they stay, the updates are zero.
    read: What `run` takes beside.
    kinds: The types of all that `run` gives.
    in_loop: Whether a loop decides, in place of a condition.
  """
  # There are updates to give, or none beside the parameters and the state.
  zeros = kinds[: len(kinds) - len(before)]
  if_run = list(map(_varying, kinds))
  if_skipped = [()] * len(zeros) + list(map(_varying, before))

  def accepted(before, read):
    after = jax.tree.leaves(run(before, read))
    return list(map(axes_lib.mark_varying, after, if_skipped))

  def skipped(before, _):
    zero = functools.cache(axes_lib.zeros)
    outputs = [*map(zero, zeros), *before]
    return list(map(axes_lib.mark_varying, outputs, if_run))

  def by_condition(accept, before, read):
    # Branches must agree on types: what one of them has typed as varying, the
    # other casts to.
    return lax.cond(accept, accepted, skipped, before, read)

  # A loop has no derivative backward.
  @jax.custom_jvp
  def by_loop(accept, before, read):
    def turn(leaves):
      return accepted(leaves[len(zeros) :], read)

    return _loop(accept, turn, skipped(before, read))

  by_loop.defjvp(functools.partial(jax.jvp, by_condition))
  choose = by_loop if in_loop else by_condition
  return choose(accept, before, read)


def _loop(accept, run, before):
  """Returns the leaves that `run` makes of those before, or these.

  A loop of one turn or none writes in place what a `lax.cond` copies. Where it
  turns, it may take longer: JAX 0.12 runs such loops on one thread of a CPU.
  """

  def is_due(carry):
    return carry[0]

  def turn(carry):
    is_due, leaves = carry
    return jnp.zeros_like(is_due), run(leaves)

  with jax.named_scope(jaxprs.GATE):
    return lax.while_loop(is_due, turn, (accept, before))[1]


def _varying(leaf):
  return tuple(axes_lib.varying_axes(leaf))
