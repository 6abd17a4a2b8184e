"""A custom wrapper whose state declares its own rules."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

import shard_transforms
from shard_transforms import state_rules


def _lost(state):
  lost = jnp.min(state.seen) < 0
  return f'Updates were lost: {state.seen}.' if lost else None


class TallyState(NamedTuple):
  """State per shard, except `unit` and `inner_state`.

  Attributes:
    seen: The number of updates, [1].
    rate: A rate, [1]; resizing takes the mean over shards.
    least: The smallest first element, [1].
    most: The largest first element, [1].
    recent: The last norms, [3], which cannot be resized.
    unit: The same on all shards, [2].
    inner_state: The state of the inner transformation.
  """

  seen: jax.Array
  rate: jax.Array
  least: jax.Array
  most: jax.Array
  recent: dict[str, jax.Array]
  unit: jax.Array
  inner_state: optax.OptState

  rules = {
      'seen': state_rules.Rule(resize='sum', metric='sum', health_check=_lost),
      'rate': state_rules.Rule(resize='mean', metric='mean'),
      'least': state_rules.Rule(resize='minimum', empty=100, metric='minimum'),
      'most': state_rules.Rule(resize='maximum', metric='maximum'),
      'recent': state_rules.Rule(resize='reset', empty=-1),
  }


def tally(inner, axis_name):
  """Runs `inner`, and keeps a tally whose values are set by hand in tests."""

  def init_fn(params):
    def per_shard_zero(dtype):
      zero = jnp.zeros(1, dtype)
      return shard_transforms.per_shard(zero, axis_name)

    return TallyState(
        seen=per_shard_zero(jnp.int32),
        rate=per_shard_zero(jnp.float32),
        least=per_shard_zero(jnp.int32),
        most=per_shard_zero(jnp.int32),
        recent={'last_norms': jnp.zeros(3, jnp.float32)},
        unit=jnp.ones(2, jnp.float32),
        inner_state=inner.init(params),
    )

  def update_fn(updates, state, params=None, **extra_args):
    updates, inner_state = inner.update(
        updates, state.inner_state, params, **extra_args
    )
    return updates, state._replace(inner_state=inner_state)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)
