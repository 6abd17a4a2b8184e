"""Branching: runs a function only in the calls in which it is due.

In a window of gradient accumulation, most calls do not run the inner
transformation. Its collectives then communicate once per window.
"""

from collections.abc import Callable
from collections.abc import Mapping
import functools
from typing import Any

import jax
from jax import lax
import jax.extend
import jax.numpy as jnp
import optax

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.gates import selection


def run_when_due(
    is_due: jax.Array,
    run: Callable[..., tuple[optax.Updates, Any]],
    state: Any,
    *args: Any,
    caller: str,
    extra_args: Mapping[str, Any] | None = None,
    check: Callable[[jax.extend.core.Jaxpr], None] | None = None,
) -> tuple[optax.Updates, Any]:
  """Returns the result of `run` if it is due, else zeros and the old state.

  This is a branch, for functions that are due in few calls. In all other calls
  `run` is not executed, and none of its collectives communicate.
  `local_updates` also uses it with a constant `True`, because a branch keeps
  XLA for TPUs from fusing its step with surrounding changes of shape.

  Args:
    is_due: Whether to call `run`, bool []; the same on all shards.
    run: A function `run(state, *args, **extra_args)` that returns updates and
      the next state. It is traced once.
    state: Tree of arrays.
    args: Further arguments of `run`, trees whose leaves need not be arrays.
    caller: The public name, for errors.
    extra_args: The keyword arguments of `run`, whose leaves need not be arrays
      either.
    check: A function of the jaxpr of `run` that raises an error if the jaxpr
      must not run.

  Returns:
    The updates, which are zero if `run` is not due, and the next state, as in
    `Gate.update_or_skip`.

  Raises:
    ValueError: If `is_due` can differ between shards, or if `run` changes the
      state in a way that `Gate.update_or_skip` refuses.
  """
  selection.check_agreed(is_due, caller)
  state = jax.tree.map(selection.as_array, state)
  # Parameters and extra arguments may have leaves that are not arrays.
  arrays, join = leaves_lib.split_arrays((args, dict(extra_args or {})))

  @jax.jit
  def run_arrays(state, arrays):
    args, extra_args = join(arrays)
    return run(state, *args, **extra_args)

  traced = run_arrays.trace(state, arrays)
  if check is not None:
    check(traced.jaxpr.jaxpr)
  updates, next_state = traced.out_tree.unflatten(traced.jaxpr.out_avals)
  selection.check_state(state, next_state)

  def when_due(state, arrays):
    return _varying_with(run_arrays(state, arrays), (updates, state))

  def otherwise(state, _):
    zeros = jax.tree.map(axes_lib.zeros, updates)
    state = jax.tree.map(selection.as_wide, state, next_state)
    return _varying_with((zeros, state), (updates, next_state))

  # JAX adds an input for each array that `run` closes over.
  num_inputs = len(jax.tree.leaves((state, arrays)))
  closes_over = len(traced.jaxpr.in_avals) > num_inputs
  choose = lax.cond if closes_over else _cond_in_place
  return choose(is_due, when_due, otherwise, state, arrays)


def _cond_in_place(is_due, when_due, otherwise, state, arrays):
  """Like `lax.cond`, but as a loop of at most one iteration, updated in place.

  XLA updates the carry of a loop in place and copies the operands of a branch,
  which takes more memory on CPUs and GPUs (docs/measurements.md). JAX cannot
  reverse-differentiate a `while_loop`, or differentiate it with respect to
  closed-over values, so derivatives, and functions that close over arrays, use
  `lax.cond`.
  """

  @jax.custom_jvp
  def loop(is_due, state, arrays):
    def body(carry):
      is_due, (_, wide_state) = carry
      # Only the first step can widen a dtype; cast such leaves back.
      old_state = jax.tree.map(selection.as_wide, wide_state, state)
      return jnp.zeros_like(is_due), when_due(old_state, arrays)

    carry = is_due, otherwise(state, arrays)
    with jax.named_scope('gate'):
      return lax.while_loop(lambda carry: carry[0], body, carry)[1]

  def cond(is_due, state, arrays):
    return lax.cond(is_due, when_due, otherwise, state, arrays)

  loop.defjvp(functools.partial(jax.jvp, cond))
  return loop(is_due, state, arrays)


def _varying_with(tree, other):
  """Marks leaves as varying over the axes of the leaves of another tree."""

  def mark(x, like):
    return axes_lib.mark_varying(x, tuple(axes_lib.varying_axes(like)))

  return jax.tree.map(mark, tree, other)
