"""The two branches of a gate: run a program, or keep a state bit by bit."""

from collections.abc import Callable
import functools
from typing import Any

import jax
from jax import lax
import jax.extend
import jax.numpy as jnp

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib


def run_or_keep(
    accept: jax.Array,
    run: Callable[[Any, Any, Any], tuple[Any, Any]],
    kept: tuple[Any, Any],
    read: Any,
    args: tuple[Any, ...],
    *,
    check: Callable[[jax.extend.core.Jaxpr], None] | None,
    seldom: bool,
) -> tuple[Any, Any]:
  """Returns what `run(kept, read, args)` returns if `accept`, else what it was.

  Args:
    accept: Whether to run, bool [].
    run: Returns updates and the next state, or replaces both parts of `kept`.
      It is traced once.
    kept: The parameters, or `None` if `run` returns updates, which are zero on
      a skip; and the state.
    read: A tree whose leaves need not be arrays.
    args: Trees of arrays.
    check: Takes the program of `run`, and raises if it must not run.
    seldom: Whether most steps are skipped, so that a skip should cost least.

  Raises:
    ValueError: As `Gate.run_or_skip`.
  """
  if axes_lib.varying_axes(accept):
    raise ValueError(
        'Whether a transformation runs must be decided the same way on all'
        f' shards, but the decision is typed {jax.typeof(accept)}. Give'
        ' `axis_name`.'
    )
  # A loop must be given all arrays: it has no derivative by others.
  arrays, join = leaves_lib.split_arrays(read, seldom)
  # JAX names each leaf by its path, which takes longer in a tree.
  before, treedef = jax.tree.flatten(kept)
  given, treedef_given = jax.tree.flatten((arrays, args))

  @jax.jit
  def program(before, given):
    arrays, args = treedef_given.unflatten(given)
    return run(treedef.unflatten(before), join(arrays), args)

  traced = program.trace(before, given)
  jaxpr = traced.jaxpr
  keeps_dtypes = _check_state(
      kept[1], traced.out_tree.children()[1], jaxpr.out_avals
  )
  if check is not None:
    check(jaxpr.jaxpr)
  # JAX adds an input for each array that `run` closes over.
  closes_over = len(jaxpr.in_avals) > len(before) + len(given)
  in_place = seldom and keeps_dtypes and not closes_over
  choose = _cond_in_place if in_place else lax.cond
  branches = _branches(program, before, jaxpr.out_avals)
  return traced.out_tree.unflatten(choose(accept, *branches, before, given))


def _check_state(state, treedef, kinds):
  """Checks that a state keeps its tree and its shapes, and loses no bits.

  Returns:
    Whether all leaves keep their dtypes; others become wider.

  Raises:
    ValueError: If it does not.
  """
  before = jax.tree.structure(state)
  if treedef != before:
    raise ValueError(
        'The inner transformation must keep the tree of its state, got'
        f' {treedef} instead of {before}. Where a leaf has'
        ' no gradient, leave it out of the transformation with `optax.masked`.'
    )
  leaves = jax.tree.leaves_with_path(state)
  kinds = kinds[len(kinds) - len(leaves) :]
  keeps_dtypes = True
  for (path, leaf), after in zip(leaves, kinds, strict=True):
    before = jax.typeof(leaf)
    keeps_dtypes &= before.dtype == after.dtype
    fits = before.dtype == after.dtype or _is_wider(after.dtype, before.dtype)
    if before.shape != after.shape or not fits:
      raise ValueError(
          'The inner transformation must keep the shapes and dtypes of its'
          f' state, got {after.dtype.name}{list(after.shape)} instead of'
          f' {before.dtype.name}{list(before.shape)} at'
          f' {leaves_lib.name_of(path)}. Cast the updates to'
          ' the dtypes of the parameters.'
      )
  return keeps_dtypes


def _is_wider(dtype, than):
  are_floating = all(jnp.issubdtype(x, jnp.floating) for x in (dtype, than))
  return are_floating and jnp.promote_types(dtype, than) == dtype


def _as_wide(leaf, kind):
  return leaf if leaf.dtype == kind.dtype else leaf.astype(kind.dtype)


def _branches(program, before, kinds):
  """Returns the two branches of a gate, functions of the program's inputs.

  Args:
    program: Returns updates and the values that replace those before.
    before: The leaves that stay if it does not run.
    kinds: The types of all of its results.
  """
  num_updates = len(kinds) - len(before)
  kept = [*kinds[:num_updates], *before]
  # Branches must agree on types: either casts to what the other varies over.
  varying = [
      tuple(axes_lib.varying_axes(x) | axes_lib.varying_axes(y))
      for x, y in zip(kinds, kept, strict=True)
  ]

  def run(before, given):
    after = jax.tree.leaves(program(before, given))
    return list(map(axes_lib.mark_varying, after, varying))

  def skip(before, _):
    zeros = map(functools.cache(axes_lib.zeros), kinds[:num_updates])
    before = map(_as_wide, before, kinds[num_updates:])
    return list(map(axes_lib.mark_varying, [*zeros, *before], varying))

  return run, skip


def _cond_in_place(accept, run, skip, before, given):
  """As `lax.cond` of the branches of a gate, which here write in place.

  A `lax.cond` copies what it passes through, so that a step that only collects
  takes 2 to 14 times the CPU time of a loop of one turn or none, and a window
  of four 1.5 to 3.5 times. A loop that turns may take longer: JAX 0.12 runs it
  on one thread of a CPU.
  """

  @jax.custom_jvp
  def loop(accept, before, given):
    start = skip(before, given)

    def turn(carry):
      is_due, leaves = carry
      before = leaves[len(leaves) - num_before :]
      return jnp.zeros_like(is_due), run(before, given)

    with jax.named_scope('gate'):
      return lax.while_loop(lambda carry: carry[0], turn, (accept, start))[1]

  def cond(accept, before, given):
    return lax.cond(accept, run, skip, before, given)

  num_before = len(before)
  # A loop has no derivative backward.
  loop.defjvp(functools.partial(jax.jvp, cond))
  return loop(accept, before, given)
