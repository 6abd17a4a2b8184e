"""A reduction that is watched: what goes in and comes out stays to the bit."""

from collections.abc import Callable
from collections.abc import Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import weights
from shard_transforms._src.base import wrapper
from shard_transforms._src.reduction import reduction
from shard_transforms._src.reduction import tower_squares as tower_squares_lib

Axes = tuple[Hashable, ...]


class Seen(NamedTuple):
  """What a shard sees of one reduction.

  Attributes:
    updates: Its own, as they go in.
    reduced: What comes out.
    weight: How much it counts, float32 []; 1 without a weight.
    tower_squares: What `tower_reduce` tells of its towers, if it is around.
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
  """Returns the transformation that reduces and watches.

  Args:
    caller: The public name that errors and profiles show.
    axis_name: The mapped axis, or a sequence of them.
    inner: What reduces the updates of shards; by default, their mean.
    kind: The class of the state, which has a field `inner_state`.
    start: Returns the first state, of the axes and of the state of `inner`.
    watch: Returns the other fields of the next state, by name, of the last one.

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
    wrapper.check_update(updates, state, kind, axes, caller)
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
  """Returns a moving average with one more value, where it is to count."""
  return jnp.where(where, decay * old + (1 - decay) * new, old)


def _as_reduction(inner, axes, caller):
  """Returns what reduces the updates of shards.

  Raises:
    TypeError: If it is no transformation.
  """
  if inner is not None:
    return wrapper.as_inner(inner, caller)
  mean = reduction.Reduction(caller, 'mean', axes)

  def update_fn(updates, state, params=None, *, weight=None, **extra_args):
    del params, extra_args
    return mean(updates, weight), state

  return optax.GradientTransformationExtraArgs(
      lambda params: optax.EmptyState(), update_fn
  )
