"""Checks of the program behind a gate: its state, and its sums of updates."""

from collections.abc import Hashable
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import optax

from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.tracing import weight_flow


def check_state(
    state: optax.OptState,
    treedef: Any,
    kinds: Sequence[Any],
) -> None:
  """Checks that a state keeps its tree, its shapes and its dtypes.

  Args:
    state: Tree of arrays.
    treedef: The tree that it is after.
    kinds: The types of what is given, those of the state last.

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
  for (path, leaf), after in zip(
      leaves, kinds[len(kinds) - len(leaves) :], strict=True
  ):
    before = jax.typeof(leaf)
    if (before.shape, before.dtype) != (after.shape, after.dtype):
      raise ValueError(
          'The inner transformation must keep the shapes and dtypes of its'
          f' state, got {after.dtype.name}{list(after.shape)} instead of'
          f' {before.dtype.name}{list(before.shape)} at'
          f' {leaves_lib.name_of(path)}. Cast the updates to'
          ' the dtypes of the parameters.'
      )


def check_heeded(
    jaxpr: jax.extend.core.Jaxpr,
    given: Sequence[int],
    num_after: int,
    axes: Sequence[Hashable],
    may_be_local: bool,
) -> None:
  """Checks that the program behind a gate weights shards.

  Args:
    jaxpr: What is run.
    given: What each of its last arguments is, as for `weight_flow`.
    num_after: The number of its last results that are a state.
    axes: The axes of the shards.
    may_be_local: As for `Gate.update_or_skip`.

  Raises:
    ValueError: If updates are reduced without the weight, or handed through
      where that is not allowed.
  """
  given = [0] * (len(jaxpr.invars) - len(given)) + [*given]
  sums, alone = weight_flow.sums_without(jaxpr, given, axes)
  results = jaxpr.outvars[: len(jaxpr.outvars) - num_after]
  goes_through = any(
      is_alone and jnp.issubdtype(leaves_lib.dtype_of(x.aval), jnp.inexact)
      for x, is_alone in zip(results, alone, strict=False)
  )
  if sums or (goes_through and not may_be_local):
    raise ValueError(
        'The inner transformation must heed the extra argument `weight`, which'
        ' leaves out some shards, got one that does not: a reduction by hand,'
        ' or none, counts them all. Reduce with `cross_shard_mean`,'
        ' `cross_shard_sum` or `shard_update`, and see that what is around it'
        ' forwards extra arguments.'
    )
