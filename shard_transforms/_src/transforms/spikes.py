"""Spikes: norms or losses far from those of the steps before.

A signal is a number that each shard has in each step: the norm of its update,
the norm of some of its leaves, or its loss.
"""

from collections.abc import Hashable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

from shard_transforms._src.base import counters
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import per_shard_state
from shard_transforms._src.base import state_rules
from shard_transforms._src.gates import gating
from shard_transforms._src.transforms import spike_rule

_CALLER = 'guard'


class Statistics(NamedTuple):
  """Mean and variance of signals, the same on all shards.

  Attributes:
    mean: The means over the shards of each step in a window, or one exponential
      average, float32 [steps, signals].
    variance: The variances over the shards of each step, or one average of
      squared deviations, float32 [steps, signals].
    num_recorded: The number of steps so far, int32 [].
  """

  mean: jax.Array
  variance: jax.Array
  num_recorded: jax.Array

  @property
  def last_mean(self) -> jax.Array:
    """The mean of the last step, or the average, float32 [signals]."""
    row = (jnp.max(self.num_recorded) - 1) % self.mean.shape[-2]
    return lax.dynamic_index_in_dim(self.mean, row, axis=-2, keepdims=False)

  def moments(self) -> tuple[jax.Array, jax.Array]:
    """Returns mean and standard deviation of a shard's value, each [signals].

    The variance within steps plus the sample variance between their means is
    without bias for one value of a further step.
    """
    num_rows = len(self.mean)
    if num_rows == 1:
      return self.mean[0], jnp.sqrt(self.variance[0])
    num = jnp.minimum(self.num_recorded, num_rows)
    has_value = (jnp.arange(num_rows) < num)[:, None]

    def average(x, num):
      return jnp.where(has_value, x, 0).sum(0) / jnp.maximum(num, 1)

    mean = average(self.mean, num)
    between = average((self.mean - mean[None]) ** 2, num - 1)
    return mean, jnp.sqrt(between + average(self.variance, num))

  def record(
      self,
      rule: spike_rule.SpikeRule,
      deviation: jax.Array,
      square: jax.Array,
  ) -> 'Statistics':
    """Returns the statistics after a step.

    Args:
      rule: The rule that these statistics are of.
      deviation: The mean deviation over the shards from `last_mean`, [signals].
      square: The mean of the squared deviations, [signals].
    """
    mean = self.last_mean + deviation
    variance = jnp.maximum(square - deviation**2, 0)
    if rule.decay is None:
      row = self.num_recorded % rule.num_rows
    else:
      row = 0
      # Each step counts the same until the average is full.
      is_full = self.num_recorded >= rule.steps_needed
      share = jnp.where(is_full, 1 - rule.decay, 1 / (self.num_recorded + 1))
      mean = self.mean[0] + share * deviation
      left = (1 - share) * deviation
      variance += left * jnp.where(is_full, left, deviation)
      variance = self.variance[0] + share * (variance - self.variance[0])
    return Statistics(
        mean=self.mean.at[row].set(mean),
        variance=self.variance.at[row].set(variance),
        num_recorded=counters.add(self.num_recorded, 1),
    )


class SpikeState(NamedTuple):
  """What `guard` remembers of spikes; all but `last_spike` is the same on all.

  Attributes:
    statistics: Mean and variance of the signals; `()` without `max_stds`.
    spike_count: Number of updates of single shards that were spikes, int32 [].
    consecutive_spikes: Number of steps in a row in which a shard had a spike,
      up to the last one, int32 [].
    last_spike: In which update each signal of a shard was last a spike, counted
      from 0, in the order of `SpikeRule.names`, int32 [signals]; -1 where none
      was. Kept per shard, as `last_bad_step`.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import shard_transforms
    >>> labels = ['bias', 'kernel']
    >>> rule = shard_transforms.SpikeRule(max_norm=5.0, labels=labels)
    >>> tx = shard_transforms.guard(optax.sgd(0.1), spikes=rule)
    >>> params = [jnp.zeros(1), jnp.zeros(2)]
    >>> updates = [jnp.ones(1), jnp.full(2, 9.0)]
    >>> _, state = tx.update(updates, tx.init(params))
    >>> print(state.spikes.last_spike, state.spikes.spike_count)
    [-1  0] 1
  """

  statistics: Statistics | tuple[()]
  spike_count: jax.Array
  consecutive_spikes: jax.Array
  last_spike: jax.Array

  @property
  def last_mean(self) -> Mapping[str, jax.Array]:
    """The mean of each signal in the last recorded step, by its number."""
    if not isinstance(self.statistics, Statistics):
      return {}
    means = jnp.reshape(
        self.statistics.last_mean, (-1, self.last_spike.shape[-1])
    )
    return {str(i): x for i, x in enumerate(means[0])}

  def resize_rules(
      self, reduction: state_rules.Reduction | None
  ) -> Mapping[str, state_rules.ResizeRule]:
    """Returns how `resize_state` converts its fields."""
    del reduction
    # Larger batches have smaller norms, so that the norms of other batch sizes
    # say nothing about spikes.
    return {
        'statistics': state_rules.ResizeRule('begin_anew'),
        'last_spike': state_rules.ResizeRule('maximum', counters.NEVER),
    }

  def metric_rules(self) -> Mapping[str, state_rules.MetricRule]:
    """Returns how `metrics` reads its attributes."""
    return {
        'spike_count': state_rules.MetricRule(),
        'last_mean': state_rules.MetricRule(),
    }


class Judgement(NamedTuple):
  """The judgement of a shard's own signals.

  Attributes:
    is_spike: Which signals are outside of their limits, bool [signals].
    is_bad: Whether one of them cannot be scaled down, bool [].
    factors: By how much the leaves of each norm are scaled, float32 [signals].
    tally: What is summed over the shards: whether there is a spike, whether
      values are recorded, and then their deviations and the squares of these,
      float32 [2 + 2 * signals], or float32 [2] without statistics.
  """

  is_spike: jax.Array
  is_bad: jax.Array
  factors: jax.Array
  tally: jax.Array


def no_signals() -> Judgement:
  """Returns the judgement where nothing is looked at."""
  nothing = jnp.zeros(0, jnp.float32)
  return Judgement(nothing > 0, jnp.asarray(False), nothing, nothing)


class Findings(NamedTuple):
  """What a step has shown of spikes.

  Attributes:
    is_spike: Which signals of this shard are spikes, bool [signals].
    totals: The sum of `Judgement.tally` over the shards.
    accept: Whether the step is taken, bool [].
  """

  is_spike: jax.Array
  totals: jax.Array
  accept: jax.Array


def start(
    rule: spike_rule.SpikeRule,
    params: optax.Params,
    axes: tuple[Hashable, ...],
) -> SpikeState:
  """Returns the first state."""
  names = rule.names(params)
  rule.limits(names)
  statistics = ()
  if rule.max_stds is not None:
    shape = rule.num_rows, len(names)
    statistics = Statistics(
        mean=jnp.zeros(shape, jnp.float32),
        variance=jnp.zeros(shape, jnp.float32),
        num_recorded=counters.zero(),
    )
  never = jnp.full(len(names), counters.NEVER, jnp.int32)
  return SpikeState(
      statistics=statistics,
      spike_count=counters.zero(),
      consecutive_spikes=counters.zero(),
      last_spike=per_shard_state.store(never, axes),
  )


def check_fits(
    rule: spike_rule.SpikeRule | None, state: Any, updates: optax.Updates
) -> None:
  """Checks that a state was made for a rule and these updates.

  Raises:
    ValueError: If it was not.
  """
  expected, hint = (), ''
  if rule is not None:
    expected = jax.eval_shape(lambda: start(rule, updates, ()))
    if rule.labels is not None:
      hint = (
          f' These updates have leaves of {rule.names(updates)}: give zeros for'
          ' a label where they are None.'
      )
  found = [x.shape[-2:] for x in jax.tree.leaves(state)]
  wanted = [x.shape for x in jax.tree.leaves(expected)]
  # The last leaf is kept per shard.
  if found[:-1] != wanted[:-1] or [x[-1:] for x in found[-1:]] != wanted[-1:]:
    raise ValueError(
        'State of `guard` must have the statistics of its `spikes`, of the'
        f' shapes {wanted}, got {found}. Make it with the same options.{hint}'
    )


def judge(
    rule: spike_rule.SpikeRule,
    state: SpikeState,
    values: jax.Array,
    names: Sequence[str],
    is_finite: jax.Array,
) -> Judgement:
  """Returns the judgement of a shard's signals.

  Args:
    rule: The rule.
    state: The state before this step.
    values: The signals, float32 [signals].
    names: Their names.
    is_finite: Whether all elements of the update are finite, bool [].
  """
  low, high, target = _limits(rule, state.statistics, values, names)
  is_spike = jnp.logical_not((low <= values) & (values <= high))
  is_clipped = jnp.asarray(False)
  if rule.on_spike != 'skip':
    is_norm = jnp.array([name != 'loss' for name in names])
    is_clipped = is_norm & (values > high) & jnp.isfinite(values)
  is_recorded = is_finite & jnp.all(jnp.isfinite(values))
  if not rule.record_spikes:
    is_recorded &= ~jnp.any(is_spike)
  tally = [jnp.stack([jnp.any(is_spike), is_recorded]).astype(jnp.float32)]
  if isinstance(state.statistics, Statistics):
    # Plain squares would cancel each other.
    deviation = jnp.where(is_clipped, target, values)
    deviation -= state.statistics.last_mean
    # The squares of recorded spikes must not overflow.
    deviation = jnp.clip(deviation, -1e15, 1e15)
    deviation = jnp.where(is_recorded, deviation, 0)
    tally += [deviation, deviation**2]
  return Judgement(
      is_spike=is_spike,
      is_bad=jnp.any(is_spike & ~is_clipped),
      factors=jnp.where(is_clipped, target / values, 1),
      tally=jnp.concatenate(tally),
  )


def _limits(rule, statistics, values, names):
  """Returns the least and the largest values, and to what spikes are scaled."""
  largest = jnp.finfo(jnp.float32).max
  fixed, num_stds = rule.limits(names)
  # Only what is infinite is beyond the largest number.
  high = jnp.minimum(fixed, largest)
  if not isinstance(statistics, Statistics):
    return -largest, high, high
  is_ready = statistics.num_recorded >= rule.steps_needed
  mean, std = statistics.moments()
  # Values that stay the same must not be spikes because a mean is rounded.
  reach = num_stds * std + 1e-6 * jnp.abs(mean)
  low = -largest
  if rule.two_sided:
    low = jnp.where(is_ready, mean - reach, low)
  high = jnp.where(is_ready, jnp.minimum(high, mean + reach), high)
  target = high
  if rule.on_spike == 'reciprocal':
    scaled = jnp.minimum(high, mean + reach**2 / (values - mean))
    # A spike may be below the mean of steps with a larger `max_norm`.
    target = jnp.where(is_ready & (values > mean), scaled, high)
  return low, high, target


def after(
    rule: spike_rule.SpikeRule | None,
    state: SpikeState | tuple[()],
    found: Findings,
    step: jax.Array,
    axes: tuple[Hashable, ...],
) -> SpikeState | tuple[()]:
  """Returns the state after a step.

  Args:
    rule: The rule, or `None`.
    state: The state before it.
    found: What it has shown.
    step: Its number, int32 [].
    axes: Those of the shards.
  """
  if rule is None or not isinstance(state, SpikeState):
    return ()
  num_spikes, num_recorded = found.totals[0], found.totals[1]
  consecutive = counters.add(state.consecutive_spikes, 1)
  consecutive = jnp.where(num_spikes > 0, consecutive, 0)
  statistics = state.statistics
  if isinstance(statistics, Statistics):
    moments = found.totals[2:].reshape(2, -1) / jnp.maximum(num_recorded, 1)
    recorded = statistics.record(rule, *moments)
    is_new = (found.accept | rule.record_spikes) & (num_recorded > 0)
    statistics = optax.tree.where(is_new, recorded, statistics)
    if rule.restart_after is not None:
      is_over = consecutive >= rule.restart_after
      zeros = optax.tree.zeros_like(statistics)
      statistics = optax.tree.where(is_over, zeros, statistics)
      consecutive = jnp.where(is_over, 0, consecutive)
  last_spike = per_shard_state.own(state.last_spike, axes, _CALLER)
  last_spike = jnp.where(found.is_spike, step, last_spike)
  return SpikeState(
      statistics=statistics,
      spike_count=counters.add(state.spike_count, num_spikes),
      consecutive_spikes=consecutive,
      last_spike=per_shard_state.store(last_spike, axes),
  )


def spikes_since(state: SpikeState | tuple[()], step: int) -> str:
  """Returns a sentence on which signals were spikes here since a step."""
  if not isinstance(state, SpikeState):
    return ''
  width = state.last_spike.shape[-1]
  found = {
      int(i)
      for _, steps in state_rules.parts_here(state.last_spike)
      for i in np.flatnonzero(steps.reshape(-1, width).max(axis=0) >= step)
  }
  named = f' Spikes were those of the signals {sorted(found)} of'
  return f'{named} `SpikeRule.names`.' if found else ''


def scaled(
    rule: spike_rule.SpikeRule | None,
    judgement: Judgement,
    inner: optax.GradientTransformationExtraArgs,
    updates: optax.Updates,
) -> tuple[optax.GradientTransformationExtraArgs, Any]:
  """Returns what to run in place of `inner` so that it gets scaled updates.

  They are scaled inside of it, where the compiler fuses that with the readers.

  Args:
    rule: The rule, or `None`.
    judgement: What it says.
    inner: A transformation.
    updates: Its updates.

  Returns:
    A transformation with the state of `inner`, and the updates for it.
  """
  if rule is None or rule.on_spike == 'skip':
    return inner, updates
  numbers = rule.numbers(updates)

  def step(gate, given, state, params=None, **extra_args):
    updates, factors = given
    leaves, treedef = jax.tree.flatten(updates)
    # Indexing takes several times as long to trace.
    factors = jnp.unstack(factors)
    updates = treedef.unflatten(
        _scale(leaf, factors[number])
        for leaf, number in zip(leaves, numbers, strict=True)
    )
    return gate.update(inner, updates, state, params, **extra_args)

  run = gating.transformation(inner.init, step)
  return run, (updates, judgement.factors)


def _scale(leaf, factor):
  if leaves_lib.is_float0(leaf):
    return leaf
  leaf = jnp.asarray(leaf)
  wide = leaves_lib.as_accumulator(leaf)
  factor = leaves_lib.as_dtype(factor, wide.dtype)
  return leaves_lib.as_dtype(
      lax.mul(wide, lax.broadcast(factor, wide.shape)), leaf.dtype
  )
