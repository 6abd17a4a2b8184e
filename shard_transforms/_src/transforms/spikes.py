"""Spikes: norms or losses far from those of the previous steps.

A signal is a scalar that each shard has in each step: the norm of its update,
or its loss. `SpikeRule` defines which signals are spikes, either by fixed
limits or by `Statistics` of the previous steps.
"""

from collections.abc import Hashable
from collections.abc import Mapping
import functools
from typing import Any, NamedTuple

import chex
import jax
from jax import lax
import jax.numpy as jnp
import optax

from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import partition_specs
from shard_transforms._src.base import states
from shard_transforms._src.reduction import norms
from shard_transforms._src.transforms import spike_rule

_CALLER = 'guard'


class Statistics(NamedTuple):
  """Mean and variance of one signal in a window, the same on all shards.

  Attributes:
    mean: The mean over the shards in each step, float32 [window].
    variance: The variance over the shards in each step, float32 [window].
    num_recorded: The number of steps so far, int32 [].
  """

  mean: jax.Array
  variance: jax.Array
  num_recorded: jax.Array

  @property
  def last_mean(self) -> jax.Array:
    """The mean of the last step, float32 []."""
    row = (jnp.max(self.num_recorded) - 1) % self.mean.shape[-1]
    return lax.dynamic_index_in_dim(self.mean, row, axis=-1, keepdims=False)

  def moments(self) -> tuple[jax.Array, jax.Array]:
    """Returns mean and standard deviation of a shard's value, float32 [].

    The mean variance within steps, plus the sample variance of the means of the
    steps, is an unbiased estimate of the variance of a single value in another
    step.
    """
    num_steps = jnp.minimum(self.num_recorded, len(self.mean))
    has_value = jnp.arange(len(self.mean), dtype=num_steps.dtype) < num_steps

    def average(x, divisor):
      divisor = jnp.maximum(divisor, 1).astype(x.dtype)
      return jnp.where(has_value, x, 0).sum() / divisor

    mean = average(self.mean, num_steps)
    between_steps = average((self.mean - mean) ** 2, num_steps - 1)
    return mean, jnp.sqrt(between_steps + average(self.variance, num_steps))

  def record(self, deviation: jax.Array, square: jax.Array) -> 'Statistics':
    """Returns the statistics after a step.

    Args:
      deviation: The mean deviation over the shards from `last_mean`, [].
      square: The mean of the squared deviations, [].
    """
    row = self.num_recorded % len(self.mean)
    variance = jnp.maximum(square - deviation**2, 0)
    return Statistics(
        mean=jnp.asarray(self.mean).at[row].set(self.last_mean + deviation),
        variance=jnp.asarray(self.variance).at[row].set(variance),
        num_recorded=states.safe_add(self.num_recorded, 1),
    )


class SpikeState(NamedTuple):
  """Spike statistics of `guard`. Only `last_spike` differs between shards.

  Attributes:
    statistics: The `Statistics` of each signal, by its name; `{}` without
      `max_stds`.
    spike_count: Number of updates with a spike, counted over all shards and
      including updates that were not finite, int32 [].
    consecutive_spikes: Number of consecutive steps, up to the last step, in
      which at least one shard had a spike, int32 [].
    last_spike: Index of the last update in which each signal was a spike,
      counted from 0, int32 [], by the name of the signal; -1 if the signal has
      never been a spike. Kept per shard, like `last_bad_step` of `GuardState`.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import shard_transforms
    >>> rule = shard_transforms.SpikeRule(max_norm=5.0)
    >>> tx = shard_transforms.guard(optax.sgd(0.1), spikes=rule)
    >>> _, state = tx.update(jnp.full(2, 9.0), tx.init(jnp.zeros(2)))
    >>> print(state.spikes.last_spike['norm'], state.spikes.spike_count)
    0 1
  """

  statistics: Mapping[str, Statistics]
  spike_count: jax.Array
  consecutive_spikes: jax.Array
  last_spike: Mapping[str, jax.Array]

  rules = {
      # Larger batches have smaller norms, so norms at one batch size do not
      # tell which norms are spikes at another.
      'statistics': states.Rule(resize='reset'),
      'spike_count': states.Rule(metric='same'),
      'last_spike': states.Rule(resize='maximum', empty=states.NEVER),
      'last_mean': states.Rule(metric='same'),
  }

  @property
  def last_mean(self) -> Mapping[str, jax.Array]:
    """The mean of each signal in the last recorded step, by its name."""
    return {name: x.last_mean for name, x in self.statistics.items()}


def initial_state(
    rule: spike_rule.SpikeRule, axes: tuple[Hashable, ...]
) -> SpikeState:
  """Returns the state before the first step."""
  statistics, last_spike = {}, {}
  for name in rule.names:
    # Leaves must not share an array, because a state may be donated.
    last_spike[name] = jnp.full([], states.NEVER, jnp.int32)
    if rule.max_stds is not None:
      statistics[name] = Statistics(
          mean=jnp.zeros(rule.window, jnp.float32),
          variance=jnp.zeros(rule.window, jnp.float32),
          num_recorded=states.counter(),
      )
  return SpikeState(
      statistics=statistics,
      spike_count=states.counter(),
      consecutive_spikes=states.counter(),
      last_spike=states.with_shard_axis(last_spike, axes),
  )


def check_state(rule: spike_rule.SpikeRule | None, state: Any) -> None:
  """Checks that a state was made for a rule.

  Raises:
    ValueError: If the state was made for another rule.
  """
  windows, expected = {}, {}
  if isinstance(state, SpikeState):
    windows = dict.fromkeys(state.last_spike, 0)
    windows |= {name: len(x.mean) for name, x in state.statistics.items()}
  if rule is not None:
    window = 0 if rule.max_stds is None else rule.window
    expected = dict.fromkeys(rule.names, window)
  if windows != expected:
    raise ValueError(
        '`guard` got a state that was made for another `SpikeRule`: its windows'
        f' have the lengths {windows}, but `spikes` needs {expected}. (The'
        ' lengths are `{}` without `spikes`, and 0 without `max_stds`.) Pass'
        ' the `spikes` with which the state was made, or make a new state with'
        ' `init`.'
    )


class SpikeSums(NamedTuple):
  """Values of a shard that are summed over all shards, float32 [].

  Attributes:
    num_spikes: 1 if the shard has a spike.
    num_recorded: 1 if the signals of the shard enter the statistics.
    deviations: The deviation of each recorded signal from its last mean, and
      the square of this deviation, by the name of the signal; `{}` without
      statistics.
  """

  num_spikes: jax.Array
  num_recorded: jax.Array
  deviations: Mapping[str, tuple[jax.Array, jax.Array]]


class SpikeCheck(NamedTuple):
  """The result of checking one shard's update.

  Attributes:
    is_healthy: Whether the update is finite, and is not a spike or is scaled
      down, bool [].
    factor: The factor that scales the update down, float32 []; `None` if
      updates are not scaled.
    is_spike: Whether each signal is outside its limits, bool [], by the name of
      the signal; `()` without a rule.
    sums: The values to sum over the shards; `()` without a rule.
  """

  is_healthy: jax.Array
  factor: jax.Array | None = None
  is_spike: Any = ()
  sums: SpikeSums | tuple[()] = ()


def check(
    rule: spike_rule.SpikeRule | None,
    state: SpikeState | tuple[()],
    updates: optax.Updates,
    value: chex.Numeric | None,
    sliced: tuple[Hashable, ...],
    specs: partition_specs.SpecTree,
) -> SpikeCheck:
  """Checks the update and the loss of a shard, over all slices of the update.

  Raises:
    TypeError: If the rule uses the loss, and `value` is not a floating-point
      number.
    ValueError: If `specs` contradicts the types, or `value` is not a scalar.
  """
  if rule is None or not isinstance(state, SpikeState):
    return SpikeCheck(norms.are_finite(updates, sliced))
  signals, is_finite = {}, jnp.asarray(True)
  if 'norm' in rule.signals:
    # The norm of an update that is not finite is not finite, and so a spike.
    specs = specs if sliced else None
    squares = norms.sum_of_squares(updates, sliced, specs, _CALLER)
    signals['norm'] = leaves_lib.as_dtype(jnp.sqrt(squares), jnp.float32)
  else:
    is_finite = norms.are_finite(updates, sliced)
  if 'loss' in rule.signals:
    signals['loss'] = _as_loss(value)
  limits = {x: _limits(rule, x, state.statistics.get(x)) for x in signals}
  is_spike = {
      name: ~((low <= signals[name]) & (signals[name] <= high))
      for name, (low, high) in limits.items()
  }
  has_spike = _any(is_spike.values())
  is_recorded = is_finite & ~_any(~jnp.isfinite(x) for x in signals.values())
  if not rule.record_spikes:
    is_recorded &= ~has_spike
  is_bad, factor = is_spike, None
  if rule.on_spike == 'clip':
    norm, limit = signals['norm'], limits['norm'][1]
    is_clipped = (norm > limit) & jnp.isfinite(norm)
    factor = jnp.where(is_clipped, limit / norm, 1)
    is_bad = is_spike | {'norm': is_spike['norm'] & ~is_clipped}
    signals['norm'] = jnp.where(is_clipped, limit, norm)
  deviations = {
      name: _deviation(signals[name], x, is_recorded)
      for name, x in state.statistics.items()
  }
  return SpikeCheck(
      is_healthy=is_finite & ~_any(is_bad.values()),
      factor=factor,
      is_spike=is_spike,
      sums=SpikeSums(has_spike, is_recorded, deviations),
  )


def _limits(rule, signal, statistics):
  """Returns the lower and the upper limit of a signal, float32 []."""
  # Only infinity exceeds the largest float.
  largest = jnp.finfo(jnp.float32).max
  low, high = -largest, largest
  if signal == 'norm' and rule.max_norm is not None:
    high = jnp.minimum(jnp.float32(rule.max_norm), largest)
  if statistics is None:
    return low, high
  is_ready = statistics.num_recorded >= rule.steps_needed
  mean, std = statistics.moments()
  # Rounding of the mean must not make spikes of values that stay constant.
  reach = jnp.float32(rule.max_stds) * std + 1e-6 * jnp.abs(mean)
  if rule.two_sided:
    low = jnp.where(is_ready, mean - reach, low)
  return low, jnp.where(is_ready, jnp.minimum(high, mean + reach), high)


def _deviation(signal, statistics, is_recorded):
  """Returns the deviation of a signal from its last mean, and its square."""
  # A variance from squares of the signal would suffer from cancellation. The
  # squares of recorded spikes must not overflow.
  deviation = jnp.clip(signal - statistics.last_mean, -1e15, 1e15)
  deviation = jnp.where(is_recorded, deviation, 0)
  return deviation, deviation**2


def _any(flags):
  return functools.reduce(jnp.logical_or, flags)


def _as_loss(value):
  """Returns the loss of this shard, float32 [].

  Raises:
    TypeError: If the loss is missing, or is not a floating-point number.
    ValueError: If the loss is not a scalar.
  """
  name = '`value` of `guard`'
  dtype = leaves_lib.dtype_of_number(value)
  if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
    raise TypeError(
        f'{name} must be the loss, a floating-point number, got {value!r}.'
        ' Call `tx.update(updates, state, params, value=loss)`, or leave the'
        ' loss out of `signals`.'
    )
  if jnp.shape(value):
    raise ValueError(
        f'{name} must be a scalar, got the shape {jnp.shape(value)}.'
    )
  return jnp.asarray(value, jnp.float32)


def next_state(
    rule: spike_rule.SpikeRule,
    state: SpikeState,
    health: SpikeCheck,
    accept: jax.Array,
    step: jax.Array,
    axes: tuple[Hashable, ...],
) -> SpikeState:
  """Returns the state after a step.

  Args:
    rule: The rule.
    state: The state before the step.
    health: The check of this shard, with the sums over all shards.
    accept: Whether the step is accepted, bool [].
    step: The index of the step, int32 [].
    axes: The axes over whose shards `last_spike` differs.
  """
  total: Any = health.sums
  consecutive = states.safe_add(state.consecutive_spikes, 1)
  consecutive = jnp.where(total.num_spikes > 0, consecutive, 0)
  is_new = (accept | rule.record_spikes) & (total.num_recorded > 0)
  statistics = {}
  for name, before in state.statistics.items():
    divisor = jnp.maximum(total.num_recorded, 1)
    deviation, square = total.deviations[name]
    recorded = before.record(deviation / divisor, square / divisor)
    statistics[name] = optax.tree.where(is_new, recorded, before)
  if rule.restart_after is not None:
    is_over = consecutive >= rule.restart_after
    zeros = optax.tree.zeros_like(statistics)
    statistics = optax.tree.where(is_over, zeros, statistics)
    consecutive = jnp.where(is_over, 0, consecutive)
  last_spike = states.without_shard_axis(state.last_spike, axes, _CALLER)
  last_spike = {
      name: jnp.where(health.is_spike[name], step, last)
      for name, last in last_spike.items()
  }
  return SpikeState(
      statistics=statistics,
      spike_count=states.safe_add(state.spike_count, total.num_spikes),
      consecutive_spikes=consecutive,
      last_spike=states.with_shard_axis(last_spike, axes),
  )


def signals_since(state: SpikeState | tuple[()], step: int) -> list[str]:
  """Returns the signals that were spikes since a step, on this process."""
  if not isinstance(state, SpikeState):
    return []
  return [
      name
      for name, last_spike in state.last_spike.items()
      if states.local_max(last_spike) >= step
  ]
