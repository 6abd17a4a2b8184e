"""A reduction with a monitor that does not change a bit of the result."""

from collections.abc import Callable
from collections.abc import Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from shard_transforms._src.base import arguments
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import weights
from shard_transforms._src.reduction import leaf_sums
from shard_transforms._src.reduction import tower_squares as tower_squares_lib

Axes = tuple[Hashable, ...]


class Seen(NamedTuple):
  """The inputs and the result of one reduction, on one shard.

  Attributes:
    updates: The shard's own updates.
    reduced: The result.
    weight: The weight of the shard, float32 []; 1 without a weight.
    tower_squares: The squares that an outer `tower_reduce` passes on, if any.
  """

  updates: optax.Updates
  reduced: optax.Updates
  weight: jax.Array
  tower_squares: tower_squares_lib.TowerSquares | None


def transformation(
    caller: str,
    axis_name: axes_lib.AxisName,
    inner: optax.GradientTransformation | None,
    kind: type,
    start: Callable[[Axes, optax.OptState], Any],
    watch: Callable[[Seen, Any, Axes], dict[str, Any]],
) -> optax.GradientTransformationExtraArgs:
  """Returns a transformation that reduces and records.

  Args:
    caller: The public name that errors and profiles show.
    axis_name: The mapped axis, or a sequence of them.
    inner: The reduction over shards; by default, the mean.
    kind: The class of the state, which has a field `inner_state`.
    start: Takes the axes and the state of `inner`; returns the first state.
    watch: Takes a `Seen`, the last state and the axes; returns the fields of
      the next state except `inner_state`, by name.

  Raises:
    TypeError: If `axis_name` is not a name or a sequence of names, or `inner`
      no transformation.
    ValueError: If `axis_name` is empty or names an axis twice.
  """
  axes = axes_lib.as_axes(axis_name)
  inner = _as_reduction(inner, axes, caller)

  def init_fn(params):
    return start(axes, inner.init(params))

  def update_fn(
      updates,
      state,
      params=None,
      *,
      weight=None,
      tower_squares=None,
      **extra_args,
  ):
    arguments.check_update(updates, state, kind, axes, caller)
    extra_args |= weights.given(weight=weight, tower_squares=tower_squares)
    reduced, inner_state = inner.update(
        updates, state.inner_state, params, **extra_args
    )
    weight = weights.as_weight(1.0 if weight is None else weight, (), caller)
    seen = Seen(updates, reduced, weight, tower_squares)
    return reduced, state._replace(
        inner_state=inner_state, **watch(seen, state, axes)
    )

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def averaged(old, new, decay, where):
  """Returns a moving average with one more value if `where` is true."""
  return jnp.where(where, decay * old + (1 - decay) * new, old)


def _as_reduction(inner, axes, caller):
  """Returns the reduction over shards.

  Raises:
    TypeError: If it is no transformation.
  """
  if inner is not None:
    return arguments.as_inner(inner, caller)
  mean = leaf_sums.Reduction(caller, 'mean', axes)

  def update_fn(updates, state, params=None, *, weight=None, **extra_args):
    del params, extra_args
    return mean(updates, weight), state

  return optax.GradientTransformationExtraArgs(
      lambda params: optax.EmptyState(), update_fn
  )
