"""Divergence: whether shards still hold the same bits where they should."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import chex
import jax
from jax import lax
import jax.numpy as jnp
import optax

from shard_transforms._src.base import addressable
from shard_transforms._src.base import arguments
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import counters
from shard_transforms._src.base import state_rules
from shard_transforms._src.monitoring import checksums
from shard_transforms._src.monitoring import copies
from shard_transforms._src.reduction import collectives


class DivergenceState(NamedTuple):
  """State of `track_divergence`, the same on all shards.

  Attributes:
    num_updates: Number of updates so far, int32 [].
    divergence: The `shard_divergence` of the last check, uint32 [].
    diverged_count: Number of checks that found a difference, int32 [].
    first_diverged_step: The update at which the first of them was, counted from
      0, int32 []; -1 where none was.

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

  def metric_rules(self) -> Mapping[str, state_rules.MetricRule]:
    """Returns how `metrics` reads its attributes."""
    return {
        'num_updates': state_rules.MetricRule(),
        'divergence': state_rules.MetricRule(),
        'diverged_count': state_rules.MetricRule(),
        'first_diverged_step': state_rules.MetricRule(),
    }

  def health_problem(self) -> str | None:
    """Returns what `check_health` raises, if shards have diverged."""
    if not addressable.largest(self.diverged_count):
      return None
    return (
        'Shards must hold the same bits, but `track_divergence` found that they'
        f' differ in {addressable.largest(self.diverged_count)} of its checks,'
        f' first at update {addressable.largest(self.first_diverged_step)}. Go'
        ' back to a checkpoint from before it. If it comes again, something'
        ' that differs between shards gets into the parameters; else suspect'
        ' the hardware.'
    )


def shard_divergence(
    tree: chex.ArrayTree, axis_name: axes_lib.AxisName
) -> jax.Array:
  """Returns how far the checksums of the shards are apart: 0 if they agree.

  The checksum is over the bits of all leaves, so that `-0.0` and `0.0` differ,
  and a NaN is the same as itself. Shards that hold the same bits give 0. Shards
  that differ in a single element of up to 32 bits never give 0; shards that
  differ in more give 0 with a probability of about 2**-64. It sends 16 bytes.

  Args:
    tree: Tree of arrays of any dtypes and shapes.
    axis_name: The mapped axis, or a sequence of them.

  Returns:
    The largest difference between two shards of either word of the checksum,
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
  axes = axes_lib.as_axes(axis_name)
  axes_lib.size(axes, 'shard_divergence')
  with jax.named_scope('shard_divergence'):
    return collectives.spread(checksums.checksum(tree), axes).max()


def track_divergence(
    axis_name: axes_lib.AxisName | None = None,
    *,
    every: int = 100,
    shardings: Any = None,
) -> optax.GradientTransformationExtraArgs:
  """Checks every few steps that all shards hold the same parameters.

  Updates pass through. Every `every` updates, `shard_divergence` compares the
  parameters, or the updates where `update` is not given parameters, and the
  state records what it finds; `check_health` raises if it was not 0. Belongs
  where updates and parameters are the same on all shards: behind the reduction.

  Under plain `jax.jit` an array has one value, of which devices hold copies.
  With `shardings` in place of `axis_name`, those are compared: of each array
  over the axes of the mesh that its sharding does not name.

  Args:
    axis_name: The mapped axis, or a sequence of them.
    every: The number of updates from check to check, at least 1; the first of
      them is checked.
    shardings: For plain `jax.jit`: a tree like the parameters, of the
      `jax.sharding.NamedSharding` that each of them has. With others, JAX
      makes new copies of the arrays, and those agree.

  Returns:
    An `optax.GradientTransformationExtraArgs` with a `DivergenceState`.

  Raises:
    NameError: In `update`, if an axis is not bound.
    TypeError: If an argument is of the wrong kind, or neither `axis_name` nor
      `shardings` is given.
    ValueError: If `axis_name` is empty or names an axis twice, or `every` is
      less than 1; if both `axis_name` and `shardings` are given, or these are
      on different meshes; in `update`, if they are no tree like the parameters.

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
  divergence_of = _divergence_of(axis_name, shardings)
  every = arguments.as_at_least('every', every, 1)

  def init_fn(params):
    del params
    return DivergenceState(
        num_updates=counters.zero(),
        divergence=jnp.zeros([], jnp.uint32),
        diverged_count=counters.zero(),
        first_diverged_step=jnp.full([], counters.NEVER, jnp.int32),
    )

  def update_fn(updates, state, params=None, **extra_args):
    del extra_args
    tree = updates if params is None else params
    is_due = collectives.agreed(state.num_updates % every == 0)
    divergence = lax.cond(
        is_due, lambda: divergence_of(tree), lambda: state.divergence
    )
    differs = is_due & (divergence > 0)
    is_first = differs & (state.first_diverged_step == counters.NEVER)
    return updates, DivergenceState(
        num_updates=counters.add(state.num_updates, 1),
        divergence=divergence,
        diverged_count=counters.add(state.diverged_count, differs),
        first_diverged_step=jnp.where(
            is_first, state.num_updates, state.first_diverged_step
        ),
    )

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _divergence_of(axis_name, shardings):
  """Returns a function of a tree, by the axes or by the shardings.

  Raises:
    TypeError: If there is neither.
    ValueError: If there are both.
  """
  if shardings is not None:
    if axis_name is not None:
      raise ValueError(
          '`axis_name` must be left out where `shardings` are given, got'
          f' {axis_name!r}: under plain `jax.jit` no axis is mapped.'
      )
    copies.check_shardings(shardings)
    return lambda tree: copies.copy_divergence(tree, shardings)
  if axis_name is None:
    raise TypeError(
        '`track_divergence` needs `axis_name`, or under plain `jax.jit` the'
        ' `shardings` of the parameters, got neither.'
    )
  axes = axes_lib.as_axes(axis_name)

  def of_shards(tree):
    axes_lib.size(axes, 'track_divergence')
    return collectives.largest(shard_divergence(tree, axes))

  return of_shards
