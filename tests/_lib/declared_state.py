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
  """Of each shard, [1] each; all but `unit`, `frozen_sum` and `inner_state`.

  Attributes:
    seen: How many updates.
    rate: A number of which the mean over shards counts.
    least: The least first element.
    most: The largest.
    recent: Its last norms, [3], which cannot be resized.
    unit: The same on all shards.
    inner_state: State of what is inside.
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
    def own(dtype):
      zero = jnp.zeros(1, dtype)
      return shard_transforms.per_shard(zero, axis_name)

    return TallyState(
        seen=own(jnp.int32),
        rate=own(jnp.float32),
        least=own(jnp.int32),
        most=own(jnp.int32),
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
