"""Whether an inner transformation may run on each shard's slices."""

from collections.abc import Callable
from collections.abc import Mapping
import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.reduction import sharded_reduction
from shard_transforms._src.tracing import elementwise


class SliceCheck:
  """Refuses an inner transformation that looks across elements.

  Tracing is slow, and `update` usually gets the types that `init` got. The last
  types that passed are therefore not traced again. This cache holds one
  description of types and no array, and only decides whether to trace: if it is
  lost, or overwritten by another thread, that only costs time.
  """

  def __init__(
      self,
      inner: optax.GradientTransformationExtraArgs,
      reduction: sharded_reduction.ShardedReduction,
  ):
    self._inner = inner
    self._reduction = reduction
    self._passed_last = None

  def check_init(self, params: optax.Params) -> None:
    """Checks what the parameters alone show.

    Raises:
      ValueError: If the inner transformation looks across elements.
    """
    problem = None
    # It may need extra arguments, which only `update` has.
    with contextlib.suppress(Exception):
      _, problem = self._look(params, params, {})
    self._raise(problem)

  def check_update(
      self,
      updates: optax.Updates,
      params: optax.Params | None,
      extra_args: Mapping[str, Any],
  ) -> Callable[..., tuple[optax.Updates, optax.OptState]]:
    """Checks what the updates show as well.

    Returns:
      The `update` of the inner transformation, for slices of the updates, its
      state and slices of the parameters.

    Raises:
      ValueError: If the inner transformation looks across elements.
    """
    update, problem = self._look(updates, params, extra_args)
    self._raise(problem)
    return update

  def _look(self, updates, params, extra_args):
    """Returns `update` with extra arguments, and what is wrong with it."""
    update = functools.partial(self._inner.update, **extra_args)
    axes, groups = self._reduction.axes, self._reduction.groups
    num_slices = self._reduction.num_slices()
    # Whether updates vary over these axes does not matter: slices of them do.
    ignored = () if groups else axes
    seen = (
        num_slices,
        _describe(updates, axes, ignored),
        _describe(params, axes),
    )
    if seen == self._passed_last and not extra_args:
      return update, None
    # Reduced over all shards, updates are the same on all of them.
    invariant = () if groups else axes
    problem = elementwise.find_problem(
        self._inner._replace(update=update),
        updates,
        params,
        {},
        num_slices,
        invariant,
    )
    if problem is None and not extra_args:
      self._passed_last = seen
    # JAX caches the jaxpr of a jitted function: what was traced on slices for
    # the check is not traced again to run.
    return jax.jit(update), problem

  def _raise(self, problem):
    """Raises if there is a problem, and says what to do.

    Raises:
      ValueError: If there is one.
    """
    if problem:
      raise ValueError(
          f'`inner` of `{self._reduction.caller}` must treat each element of'
          ' the parameters alone, whatever their shapes, and alike on all'
          ' shards, because each shard holds a slice of them, but'
          f' {problem}. Keep such a transformation whole, as in'
          ' `optax.chain(cross_shard_mean(axis_name), inner)`: for all'
          ' parameters, or for some of them with `optax.partition`. To clip by'
          ' the global norm, put'
          ' `shard_transforms.clip_by_global_norm(max_norm, axis_name)` first'
          ' in `inner`. Or let what comes first see what is reduced:'
          ' `optax.chain(cross_shard_mean(axis_name), first,'
          " shard_update(inner, axis_name, on_invariant='averaged'))`. So do"
          ' `shard_transforms.aggregators`, in the place of `cross_shard_mean`.'
      )


def _describe(tree, axes, ignored=()):
  """Returns what the check depends on; not that leaves vary over `ignored`."""
  tracked = tuple(map(axes_lib.is_tracked, axes))
  leaves, treedef = jax.tree.flatten(tree)
  kinds = [
      (
          jnp.shape(leaf),
          jnp.result_type(leaf),
          axes_lib.varying_axes(leaf).difference(ignored),
      )
      for leaf in leaves
  ]
  return tracked, treedef, tuple(kinds)
