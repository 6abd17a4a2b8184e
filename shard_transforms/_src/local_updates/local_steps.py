"""A step that each shard takes by itself."""

from collections.abc import Hashable
from collections.abc import Mapping
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import per_shard_state
from shard_transforms._src.local_updates import local_state
from shard_transforms._src.tracing import gating
from shard_transforms._src.tracing import shard_flow

_LOOP = gating.Gate(applies=True)


def take(
    inner: optax.GradientTransformationExtraArgs,
    updates: optax.Updates,
    inner_state: optax.OptState,
    own: optax.Params,
    weight: jax.Array | None,
    axes: tuple[Hashable, ...],
    extra_args: Mapping[str, Any],
) -> tuple[optax.Params, optax.OptState]:
  """Returns a shard's own parameters after a step, and the inner state.

  Args:
    inner: The transformation that computes the step.
    updates: The gradient of this shard.
    inner_state: The state of `inner`.
    own: A shard's own parameters.
    weight: How much the step counts; where it is 0, nothing changes.
    axes: The axes of the shards.
    extra_args: Those of `inner.update`.

  Raises:
    ValueError: If anything is sent over the axes.
  """
  updates = jax.tree.map(_without_float0, updates)
  # JAX caches the jaxpr of a jitted function: it is not traced again.
  run = jax.jit(functools.partial(_update, inner, extra_args))
  traced = run.trace(updates, inner_state, own)
  if sent := shard_flow.first_sent(traced.jaxpr.jaxpr, axes):
    raise ValueError(
        f'`inner` of `{local_state.CALLER}` must not send over `axis_name`,'
        f' {axes!r}, got one with `{sent}` in it: shards go on by themselves'
        ' between two meetings. What reduces, such as `cross_shard_mean` or'
        ' `guard` with `axis_name`, belongs into `outer`.'
    )

  def step(state, own, updates, weight):
    after = run(updates, state, own)
    if weight is None:
      return after
    count = functools.partial(jnp.where, weight > 0)
    return jax.tree.map(count, after, (own, state))

  given = inner_state, own, updates, weight
  if per_shard_state.FUSES_UP_TO_BARRIERS:
    return step(*given)
  # Reports take what a gate sends for what is not sent in each step.
  if shard_flow.first_sent(traced.jaxpr.jaxpr):
    return step(*given)
  # What reads and writes a state in a loop of one turn has its shape, and not
  # the one in which it is kept; see `per_shard_state`.
  return _LOOP.run_or_skip(jnp.array(True), step, *given, seldom=True)


def _update(inner, extra_args, updates, state, own):
  updates, state = inner.update(updates, state, own, **extra_args)
  return jax.tree.map(_add, own, updates, is_leaf=leaves_lib.is_none), state


def _add(param, update):
  if param is None or update is None:
    return param
  return (param + update).astype(param.dtype)


def _without_float0(update):
  return None if leaves_lib.is_float0(update) else update
