"""Spikes: norms or losses far from those of the steps before.

A signal is a number that each shard has in each step: the norm of its update,
or its loss. `SpikeRule` says which of them are spikes, by `Statistics` of the
steps before.
"""

from collections.abc import Collection
from collections.abc import Sequence
import dataclasses
from typing import Any, Literal, NamedTuple

import chex
import jax
from jax import lax
import jax.numpy as jnp

from shard_transforms._src.base import arguments
from shard_transforms._src.base import counters


@dataclasses.dataclass(frozen=True)
class SpikeRule:
  """Which norms and losses are spikes for `guard`, and what becomes of them.

  A norm is a spike above `max_norm`. A signal, which is a norm or the loss, is
  a spike if it exceeds its mean by more than `max_stds` standard deviations.
  Both are those of the values that single shards had in the last `window`
  steps. Whatever is not finite is a spike from the first step on, an infinite
  norm of finite elements included. Until `min_steps` steps are recorded,
  `max_stds` judges nothing.

  Published rules: that of OLMo-core is
  `SpikeRule(max_stds=6, signals=('norm', 'loss'), min_steps=63, two_sided=True,
  record_spikes=True)`; of MaxText, the same without `two_sided`.

  Args:
    max_norm: The largest norm.
    max_stds: The most standard deviations from the mean.
    signals: `'norm'`, `'loss'`, or both. The loss is the extra argument `value`
      of `update`, a real scalar; each shard may give its own, or all give their
      mean.
    window: The number of recorded steps in the rolling mean, at least 2.
    min_steps: The number of recorded steps before which `max_stds` does not
      count, at least 2; `None` for a full window.
    two_sided: Whether values far below the mean are spikes as well.
    record_spikes: Whether finite spikes enter the statistics: skipped ones as
      they are, and clipped ones after clipping. If they do not, norms that rise
      and stay high are spikes for ever.
    restart_after: After how many steps with spikes in a row the statistics
      start again, as in the first step; `None` for never.
    on_spike: `'skip'`: a spike is a bad update. `'clip'`: the update is scaled
      down to the limit of its norm, on each shard that has a spike. Spikes of
      the loss, or below the mean, and what is not finite stay bad.

  Raises:
    TypeError: If an argument is of the wrong kind.
    ValueError: If an argument has a wrong value, or there is no limit.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import shard_transforms
    >>> rule = shard_transforms.SpikeRule(max_norm=5.0, on_spike='clip')
    >>> tx = shard_transforms.guard(optax.identity(), spikes=rule)
    >>> params = jnp.zeros(2)
    >>> updates, state = tx.update(jnp.array([6.0, 8.0]), tx.init(params))
    >>> print(updates, state.spikes.spike_count, rule.names)
    [3. 4.] 1 ('norm',)

  References:
    OLMo-core, `SkipStepOptimizer`, https://github.com/allenai/OLMo-core;
    MaxText, `skip_step_on_spikes`, https://github.com/AI-Hypercomputer/maxtext.
  """

  max_norm: chex.Numeric | None = None
  max_stds: chex.Numeric | None = None
  signals: Sequence[Literal['norm', 'loss']] = ('norm',)
  window: int = 128
  min_steps: int | None = None
  two_sided: bool = False
  record_spikes: bool = False
  restart_after: int | None = None
  on_spike: Literal['skip', 'clip'] = 'skip'

  def __post_init__(self):
    for name in ('max_norm', 'max_stds'):
      if (limit := getattr(self, name)) is not None:
        arguments.as_positive(name, limit)
    for name in ('two_sided', 'record_spikes'):
      arguments.check_bool(name, getattr(self, name))
    for name, least in (('window', 2), ('min_steps', 2), ('restart_after', 1)):
      if (value := getattr(self, name)) is not None:
        arguments.as_at_least(name, value, least)
    _check_choices(self)

  @property
  def steps_needed(self) -> int:
    """How many recorded steps `max_stds` needs."""
    return self.window if self.min_steps is None else self.min_steps

  @property
  def names(self) -> tuple[str, ...]:
    """The names of the signals: `'norm'` and then `'loss'`, if both are."""
    return tuple(name for name in ('norm', 'loss') if name in self.signals)

  def fixed_limits(self) -> jax.Array:
    """Returns the fixed limit of each signal, float32 [signals]."""
    largest = jnp.finfo(jnp.float32).max
    # The loss has no fixed limit; only what is infinite is beyond the largest.
    most = largest if self.max_norm is None else self.max_norm
    limits = [most if name == 'norm' else largest for name in self.names]
    return jnp.minimum(jnp.stack([jnp.float32(x) for x in limits]), largest)


def _check_choices(rule):
  """Checks that the choices of a rule are known and go together.

  Raises:
    ValueError: If they do not.
  """
  signals, on_spike = rule.signals, rule.on_spike
  named = set(map(str, signals)) if isinstance(signals, Collection) else set()
  has_norm = 'norm' in named
  need_stds = [
      f'`{name}`'
      for name in ('min_steps', 'restart_after', 'two_sided')
      if getattr(rule, name) not in (None, False)
  ]
  need_stds += ["'loss' in `signals`"] * ('loss' in named)
  for is_wrong, message in (
      (
          named not in ({'norm'}, {'loss'}, {'norm', 'loss'}),
          f"`signals` must be of 'norm' and 'loss', got {signals!r}.",
      ),
      (
          on_spike not in ('skip', 'clip'),
          f"`on_spike` must be 'skip' or 'clip', got {on_spike!r}.",
      ),
      (
          rule.max_norm is None and rule.max_stds is None,
          '`SpikeRule` must have a limit, got neither `max_norm` nor'
          ' `max_stds`.',
      ),
      (
          not has_norm and (on_spike != 'skip' or rule.max_norm is not None),
          '`signals` must have the norm for `max_norm`, and to scale spikes'
          f' down, got {signals!r} with `on_spike={on_spike!r}`.',
      ),
      (
          rule.max_stds is None and need_stds,
          f'{", ".join(need_stds)} must come with `max_stds`, got None.',
      ),
  ):
    if is_wrong:
      raise ValueError(message)


class Statistics(NamedTuple):
  """Mean and variance of signals in a window, the same on all shards.

  Attributes:
    mean: The means over the shards of each step, float32 [window, signals].
    variance: The variances over the shards of each step, float32 [window,
      signals].
    num_recorded: The number of steps so far, int32 [].
  """

  mean: jax.Array
  variance: jax.Array
  num_recorded: jax.Array

  @property
  def last_mean(self) -> jax.Array:
    """The mean of the last step, float32 [signals]."""
    row = (jnp.max(self.num_recorded) - 1) % self.mean.shape[-2]
    return lax.dynamic_index_in_dim(self.mean, row, axis=-2, keepdims=False)

  def moments(self) -> tuple[jax.Array, jax.Array]:
    """Returns mean and standard deviation of a shard's value, each [signals].

    The variance within steps plus the sample variance between their means is
    without bias for one value of a further step.
    """
    num = jnp.minimum(self.num_recorded, len(self.mean))
    has_value = (jnp.arange(len(self.mean)) < num)[:, None]

    def average(x, num):
      return jnp.where(has_value, x, 0).sum(0) / jnp.maximum(num, 1)

    mean = average(self.mean, num)
    between = average((self.mean - mean[None]) ** 2, num - 1)
    return mean, jnp.sqrt(between + average(self.variance, num))

  def record(self, deviation: jax.Array, square: jax.Array) -> 'Statistics':
    """Returns the statistics after a step.

    Args:
      deviation: The mean deviation over the shards from `last_mean`, [signals].
      square: The mean of the squared deviations, [signals].
    """
    row = self.num_recorded % len(self.mean)
    variance = jnp.maximum(square - deviation**2, 0)
    return Statistics(
        mean=self.mean.at[row].set(self.last_mean + deviation),
        variance=self.variance.at[row].set(variance),
        num_recorded=counters.add(self.num_recorded, 1),
    )


def bounds(
    rule: SpikeRule, statistics: Statistics | tuple[()]
) -> tuple[Any, jax.Array]:
  """Returns the least and the largest value of each signal, [signals]."""
  low, high = -jnp.finfo(jnp.float32).max, rule.fixed_limits()
  if not isinstance(statistics, Statistics):
    return low, high
  is_ready = statistics.num_recorded >= rule.steps_needed
  mean, std = statistics.moments()
  # Values that stay the same must not be spikes because a mean is rounded.
  reach = jnp.float32(rule.max_stds) * std + 1e-6 * jnp.abs(mean)
  if rule.two_sided:
    low = jnp.where(is_ready, mean - reach, low)
  return low, jnp.where(is_ready, jnp.minimum(high, mean + reach), high)
