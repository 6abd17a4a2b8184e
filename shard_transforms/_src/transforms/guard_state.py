"""`GuardState`: the state of `guard`, and its health check."""

import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from shard_transforms._src.base import states
from shard_transforms._src.transforms import spikes as spikes_lib

_CALLER = 'guard'


def _stalled(state: Any) -> str | None:
  """Returns the error message of `check_health`; `None` if training is fine."""
  num_skipped = states.local_max(state.consecutive_skipped)
  if num_skipped < states.local_max(state.max_consecutive):
    return None
  num_updates = states.local_max(state.num_updates)
  first = num_updates - num_skipped
  span = f'update ({first})'
  if num_skipped > 1:
    span = f'{num_skipped} updates ({first}-{num_updates - 1})'
  restart = 'start again'
  if first > 0:
    restart = f'restart from a checkpoint from before update {first}'
  return (
      f'`guard` skipped the last {span}, so training has stalled.'
      f' {_bad_shards(state, first)}. Check the data and the learning rate, and'
      f' {restart}.'
  )


def _bad_shards(state, first):
  """Returns a clause that lists the shards that were bad since an update."""
  bad_shards = []
  for start, last_bad_step in states.addressable_parts(state.last_bad_step):
    is_bad = np.atleast_1d(last_bad_step >= first)
    bad_shards += [start + int(i) for i in np.flatnonzero(is_bad)]
  if not bad_shards:
    return (
        'No shard of this process was bad: either a shard of another process'
        ' was bad, or all weights were zero'
    )
  reason = 'non-finite' if state.spikes == () else 'non-finite or spiking'
  clause = f'The updates were {reason}'
  if jnp.ndim(state.last_bad_step):
    clause = f'Shards with {reason} updates: {sorted(set(bad_shards))}'
  if signals := spikes_lib.signals_since(state.spikes, first):
    noun = 'signal' if len(signals) == 1 else 'signals'
    clause += f' ({noun}: {", ".join(signals)})'
  return clause


class GuardState(NamedTuple):
  """State of `guard`; only its per-shard fields differ between shards.

  `last_bad_step`, and `last_spike` in `spikes`, are kept per shard. With
  `axis_name`, they have a leading axis, of length 1 inside the mapped function
  and of the number of shards outside.

  Attributes:
    num_updates: Number of updates so far, int32 [].
    skipped_count: Number of skipped updates, int32 [].
    consecutive_skipped: Number of updates skipped since the last accepted
      update, int32 [].
    bad_shard_count: Number of bad updates, counted over all shards, int32 [].
    last_bad_step: Index of the last bad update of a shard, counted from 0,
      int32 []; -1 if the shard had no bad update.
    max_consecutive: Number of consecutive skipped updates at which
      `check_health` raises, int32 [].
    spikes: Statistics and counts of spikes, a `SpikeState`; `()` without
      `spikes`.
    inner_state: State of the inner transformation.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import shard_transforms
    >>> tx = shard_transforms.guard(optax.sgd(0.1))
    >>> _, state = tx.update(jnp.array([1.0, jnp.nan]), tx.init(jnp.zeros(2)))
    >>> print(state.skipped_count, state.last_bad_step)
    1 0
  """

  num_updates: jax.Array
  skipped_count: jax.Array
  consecutive_skipped: jax.Array
  bad_shard_count: jax.Array
  last_bad_step: jax.Array
  max_consecutive: jax.Array
  spikes: spikes_lib.SpikeState | tuple[()]
  inner_state: optax.OptState

  rules = {
      'num_updates': states.Rule(metric='same'),
      'skipped_count': states.Rule(metric='same'),
      'consecutive_skipped': states.Rule(metric='same', health_check=_stalled),
      'bad_shard_count': states.Rule(metric='same'),
      'last_bad_step': states.Rule(
          resize='maximum', empty=states.NEVER, metric='maximum'
      ),
  }


def initial_state(inner_state, spikes, max_consecutive, axes):
  """Returns the state before the first update."""
  if max_consecutive is None:
    max_consecutive = states.MAX_COUNT
  max_consecutive = min(operator.index(max_consecutive), states.MAX_COUNT)
  never = jnp.full([], states.NEVER, jnp.int32)
  return GuardState(
      num_updates=states.counter(),
      skipped_count=states.counter(),
      consecutive_skipped=states.counter(),
      bad_shard_count=states.counter(),
      last_bad_step=states.with_shard_axis(never, axes),
      max_consecutive=jnp.asarray(max_consecutive, jnp.int32),
      spikes=() if spikes is None else spikes_lib.initial_state(spikes, axes),
      inner_state=inner_state,
  )


class Decision(NamedTuple):
  """The joint decision of all shards.

  Attributes:
    accept: Whether the step is accepted, bool []; the same on all shards.
    is_bad: Whether this shard is bad, bool [].
    weight: The weight of this shard, float32 []; 0 if the shard is bad.
    num_bad: The number of bad shards, float32 [].
    health: The check of this shard, without spikes if the shard does not count,
      and with the sums over all shards.
  """

  accept: jax.Array
  is_bad: jax.Array
  weight: jax.Array
  num_bad: jax.Array
  health: spikes_lib.SpikeCheck


def next_state(state, decision, spikes, axes):
  """Returns the state after an update, except for the state of `inner`."""
  step, accept = state.num_updates, decision.accept
  last_bad_step = states.without_shard_axis(state.last_bad_step, axes, _CALLER)
  last_bad_step = jnp.where(decision.is_bad, step, last_bad_step)
  consecutive_skipped = states.safe_add(state.consecutive_skipped, 1)
  spike_state = ()
  if spikes is not None:
    spike_state = spikes_lib.next_state(
        spikes, state.spikes, decision.health, accept, step, axes
    )
  return state._replace(
      num_updates=states.safe_add(step, 1),
      skipped_count=states.safe_add(state.skipped_count, ~accept),
      consecutive_skipped=jnp.where(accept, 0, consecutive_skipped),
      bad_shard_count=states.safe_add(state.bad_shard_count, decision.num_bad),
      last_bad_step=states.with_shard_axis(last_bad_step, axes),
      spikes=spike_state,
  )
