"""Detection of divergence between shards that should hold the same bits."""

from typing import Any, NamedTuple

import chex
import jax
from jax import lax
import jax.numpy as jnp
import optax

from shard_transforms._src.base import arguments
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import states
from shard_transforms._src.monitoring import digests
from shard_transforms._src.reduction import collectives


def _check_health(state: Any) -> str | None:
  """Returns the message of `check_health` if shards have diverged."""
  if not states.local_max(state.diverged_count):
    return None
  return (
      'Shards hold different bits: `track_divergence` found differences in'
      f' {states.local_max(state.diverged_count)} of its checks, first at'
      f' update {states.local_max(state.first_diverged_step)}. Restore an'
      ' earlier checkpoint. If it happens again, the parameters depend on the'
      ' shard; otherwise, check the hardware.'
  )


class DivergenceState(NamedTuple):
  """State of `track_divergence`, the same on all shards.

  Attributes:
    num_updates: Number of updates so far, int32 [].
    divergence: The `shard_divergence` of the last check, uint32 [].
    diverged_count: Number of checks that found a difference, int32 [].
    first_diverged_step: The number of the update in which the first difference
      was found, from 0, int32 []; -1 if there was none.

  Examples:
    >>> import jax.numpy as jnp
    >>> import shard_transforms
    >>> tx = shard_transforms.monitoring.track_divergence('data')
    >>> print(tx.init(jnp.zeros(2)).first_diverged_step)
    -1
  """

  num_updates: jax.Array
  divergence: jax.Array
  diverged_count: jax.Array
  first_diverged_step: jax.Array

  rules = {
      'num_updates': states.Rule(metric='same'),
      'divergence': states.Rule(metric='same'),
      'diverged_count': states.Rule(metric='same', health_check=_check_health),
      'first_diverged_step': states.Rule(metric='same'),
  }


def shard_divergence(
    tree: chex.ArrayTree, axis_name: axes_lib.AxisName
) -> jax.Array:
  """Returns the difference between the checksums of shards, 0 if they agree.

  Checksums are computed from the bits of all leaves, so that `-0.0` and `0.0`
  differ, and a NaN equals itself. If all shards hold the same bits, the result
  is 0. If shards differ in a single element of up to 32 bits, the result is not
  0; if they differ in more elements, it is 0 with a probability of about
  2**-64. Each shard sends 16 bytes.

  Args:
    tree: Tree of arrays of any dtypes and shapes.
    axis_name: The mapped axis, or a sequence of axes.

  Returns:
    The largest difference between two shards in either word of the checksum,
    uint32 [], the same on all shards.

  Raises:
    NameError: If an axis is not bound.
    TypeError: If `axis_name` is not a name or a sequence of names.
    ValueError: If `axis_name` is empty or names an axis twice.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from shard_transforms import monitoring
    >>> differ = lambda x: monitoring.shard_divergence(x, 'data') > 0
    >>> differ = jax.vmap(differ, axis_name='data')
    >>> x = jnp.ones((4, 3))
    >>> print(differ(x), differ(x.at[2, 1].add(1e-7)))
    [False False False False] [ True  True  True  True]
  """
  return _max_difference(axes_lib.as_axes(axis_name), 'shard_divergence', tree)


def track_divergence(
    axis_name: axes_lib.AxisName, *, every: int = 100
) -> optax.GradientTransformationExtraArgs:
  """Checks every few steps that all shards hold the same parameters.

  Updates pass through unchanged. Once every `every` updates, `shard_divergence`
  compares the parameters, or the updates if `update` is called without
  parameters. The state records the result, and `check_health` raises if it was
  not 0. Put it after the reduction, where updates and parameters are the same
  on all shards.

  Args:
    axis_name: The mapped axis, or a sequence of axes.
    every: The number of updates between checks, at least 1; the first update is
      checked.

  Returns:
    An `optax.GradientTransformationExtraArgs` with a `DivergenceState`.

  Raises:
    NameError: In `update`, if an axis is not bound.
    TypeError: If an argument has the wrong type.
    ValueError: If `axis_name` is empty or names an axis twice, or `every` is
      less than 1.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import shard_transforms
    >>> tx = shard_transforms.monitoring.track_divergence('data', every=2)
    >>> def diverged_count(params):
    ...   state = tx.init(params)
    ...   for _ in range(3):
    ...     _, state = tx.update(params, state, params)
    ...   return state.diverged_count
    >>> diverged_count = jax.vmap(diverged_count, axis_name='data')
    >>> print(diverged_count(jnp.array([1.0, 1.0, 2.0])))
    [2 2 2]
  """
  axes = axes_lib.as_axes(axis_name)
  every = arguments.as_at_least('every', every, 1)

  def init_fn(params):
    del params
    return DivergenceState(
        num_updates=states.counter(),
        divergence=jnp.zeros([], jnp.uint32),
        diverged_count=states.counter(),
        first_diverged_step=jnp.full([], states.NEVER, jnp.int32),
    )

  def update_fn(updates, state, params=None, **extra_args):
    del extra_args
    tree = updates if params is None else params
    is_due = collectives.agreed(state.num_updates % every == 0)
    divergence = lax.cond(
        is_due,
        lambda: _largest(_max_difference(axes, 'track_divergence', tree)),
        lambda: state.divergence,
    )
    differs = is_due & (divergence > 0)
    is_first = differs & (state.first_diverged_step == states.NEVER)
    return updates, DivergenceState(
        num_updates=states.safe_add(state.num_updates, 1),
        divergence=divergence,
        diverged_count=states.safe_add(state.diverged_count, differs),
        first_diverged_step=jnp.where(
            is_first, state.num_updates, state.first_diverged_step
        ),
    )

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _max_difference(axes, caller, tree):
  """Returns the largest difference between the checksums of shards."""
  axes_lib.check_bound(axes, caller)
  with jax.named_scope('shard_divergence'):
    words = digests.checksum(tree)
    # The minimum has the largest complement, so one collective suffices.
    both = axes_lib.to_varying(jnp.stack([words, ~words]), axes)
    most, complement = lax.pmax(both, axes)
    return (most - ~complement).max()


def _largest(x):
  """Returns the maximum over all shards that may have different values."""
  axes = (*axes_lib.varying_axes(x), *axes_lib.untracked_axes())
  return lax.pmax(x, axes) if axes else x
