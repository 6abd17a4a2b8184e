"""Spikes: norms or losses far from those of the previous steps.

A signal is a scalar that each shard has in each step: the norm of its update,
or its loss. `SpikeRule` defines which signals are spikes, either by fixed
limits or by `Statistics` of the previous steps.
"""

from collections.abc import Collection
from collections.abc import Hashable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
from typing import Any, Literal, NamedTuple

import chex
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

from shard_transforms._src.base import arguments
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import partition_specs
from shard_transforms._src.base import states
from shard_transforms._src.reduction import norms

_NAMES = 'norm', 'loss'
_CALLER = 'guard'


@dataclasses.dataclass(frozen=True)
class SpikeRule:
  """Defines which norms and losses are spikes for `guard`, and their treatment.

  A norm above `max_norm` is a spike. A signal, that is, a norm or the loss, is
  also a spike if it exceeds its mean by more than `max_stds` standard
  deviations. The mean and the standard deviation are taken over the values of
  all shards in the last `window` steps. Values that are not finite are spikes
  from the first step on, including an infinite norm of finite elements.
  `max_stds` has no effect until `min_steps` steps are recorded, which is by
  default the first 128 steps. Set `max_norm` as well, or a smaller `min_steps`,
  if spikes can occur in the first steps.

  The published rule of OLMo-core is
  `SpikeRule(max_stds=6, signals=('norm', 'loss'), min_steps=63, two_sided=True,
  record_spikes=True)`; that of MaxText is the same without `two_sided`.

  Args:
    max_norm: The norm above which an update is a spike.
    max_stds: The number of standard deviations from the mean beyond which a
      signal is a spike.
    signals: `'norm'`, `'loss'`, or both. The loss is the extra argument `value`
      of `update`, a real scalar: either the loss of each shard, or the mean
      loss on all shards.
    window: The number of recorded steps in the rolling mean, at least 2.
    min_steps: The number of steps that must be recorded before `max_stds` has
      an effect, at least 2; `None` for a full window.
    two_sided: Whether values far below the mean are spikes as well.
    record_spikes: Whether finite spikes enter the statistics: skipped spikes
      with their value, and clipped spikes with the value after clipping.
      Otherwise, norms that rise and stay high remain spikes forever.
    restart_after: The number of consecutive steps with spikes after which the
      statistics are reset to their initial state; `None` to never reset them.
    on_spike: With `'skip'`, a spike is a bad update. With `'clip'`, each shard
      with a spike scales its update down to the limit of the norm. Spikes of
      the loss, spikes below the mean, and values that are not finite still make
      the update bad.

  Raises:
    TypeError: If an argument has the wrong type.
    ValueError: If an argument has an invalid value, or if there is no limit.

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
    """The number of recorded steps that `max_stds` needs."""
    return self.window if self.min_steps is None else self.min_steps

  @property
  def names(self) -> tuple[str, ...]:
    """The names of the signals, with `'norm'` before `'loss'`."""
    return tuple(name for name in _NAMES if name in self.signals)

  def fixed_limits(self) -> jax.Array:
    """Returns the fixed limit of each signal, float32 [signals]."""
    largest = jnp.finfo(jnp.float32).max
    # The loss has no fixed limit: only infinity exceeds the largest float.
    most = largest if self.max_norm is None else self.max_norm
    limits = [most if name == 'norm' else largest for name in self.names]
    return jnp.minimum(jnp.stack([jnp.float32(x) for x in limits]), largest)


def _check_choices(rule):
  """Checks that the options of a rule are valid and compatible.

  Raises:
    ValueError: If an option is invalid, or needs another option.
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
    mean: The mean over the shards in each step, float32 [window, signals].
    variance: The variance over the shards in each step, float32 [window,
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

    The mean variance within steps, plus the sample variance of the means of the
    steps, is an unbiased estimate of the variance of a single value in another
    step.
    """
    num = jnp.minimum(self.num_recorded, len(self.mean))
    has_value = (jnp.arange(len(self.mean), dtype=num.dtype) < num)[:, None]

    def average(x, num):
      num = jnp.maximum(num, 1).astype(x.dtype)
      return jnp.where(has_value, x, 0).sum(0) / num

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
        num_recorded=states.safe_add(self.num_recorded, 1),
    )


class SpikeState(NamedTuple):
  """Spike statistics of `guard`. Only `last_spike` differs between shards.

  Attributes:
    statistics: Mean and variance of the signals; `()` without `max_stds`.
    spike_count: Number of updates with a spike, counted over all shards and
      including updates that were not finite, int32 [].
    consecutive_spikes: Number of consecutive steps, up to the last step, in
      which at least one shard had a spike, int32 [].
    last_spike: Index of the last update in which each signal was a spike,
      counted from 0, int32 [signals]; -1 if the signal has never been a spike.
      Kept per shard, like `last_bad_step` of `GuardState`.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import shard_transforms
    >>> rule = shard_transforms.SpikeRule(max_norm=5.0)
    >>> tx = shard_transforms.guard(optax.sgd(0.1), spikes=rule)
    >>> _, state = tx.update(jnp.full(2, 9.0), tx.init(jnp.zeros(2)))
    >>> print(state.spikes.last_spike, state.spikes.spike_count)
    [0] 1
  """

  statistics: Statistics | tuple[()]
  spike_count: jax.Array
  consecutive_spikes: jax.Array
  last_spike: jax.Array

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
    """The mean of each signal in the last recorded step, keyed by its index."""
    if not isinstance(self.statistics, Statistics):
      return {}
    num_signals = self.last_spike.shape[-1]
    means = jnp.reshape(self.statistics.last_mean, (-1, num_signals))
    return {str(i): x for i, x in enumerate(means[0])}


def start(rule: SpikeRule, axes: tuple[Hashable, ...]) -> SpikeState:
  """Returns the initial state of a rule."""
  statistics = ()
  if rule.max_stds is not None:
    shape = rule.window, len(rule.names)
    statistics = Statistics(
        mean=jnp.zeros(shape, jnp.float32),
        variance=jnp.zeros(shape, jnp.float32),
        num_recorded=states.counter(),
    )
  never = jnp.full(len(rule.names), states.NEVER, jnp.int32)
  return SpikeState(
      statistics=statistics,
      spike_count=states.counter(),
      consecutive_spikes=states.counter(),
      last_spike=states.with_shard_axis(never, axes),
  )


def check_fits(rule: SpikeRule | None, state: Any) -> None:
  """Checks that a state was made for a rule.

  Raises:
    ValueError: If the state was made for another rule.
  """
  if rule is None and state == ():
    return
  expected = ()
  if rule is not None:
    expected = jax.eval_shape(lambda: start(rule, ()))
  found = [x.shape[-2:] for x in jax.tree.leaves(state)]
  wanted = [x.shape for x in jax.tree.leaves(expected)]
  # The last leaf is kept per shard, so its leading axes may differ.
  if found[:-1] != wanted[:-1] or [x[-1:] for x in found[-1:]] != wanted[-1:]:
    raise ValueError(
        'State of `guard` must have the statistics of its `spikes`, of the'
        f' shapes {wanted}, got {found}. Make it with the same options.'
    )


class Judgement(NamedTuple):
  """The result of checking one shard's update.

  Attributes:
    is_healthy: Whether the update is finite, and is not a spike or is scaled
      down, bool [].
    is_spike: Whether each signal is outside its limits, bool [signals]; empty
      without a rule.
    factor: The factor that scales the update down, float32 []; `None` if
      updates are not scaled.
    tally: The values to sum over the shards: 1 for a spike, 1 for recorded
      signals, and then the deviations of the signals and their squares, float32
      [2 + 2 * signals], or float32 [2] without statistics; empty without a
      rule.
  """

  is_healthy: jax.Array
  is_spike: jax.Array
  factor: jax.Array | None
  tally: jax.Array


def judge(
    rule: SpikeRule | None,
    state: SpikeState | tuple[()],
    updates: optax.Updates,
    value: chex.Numeric | None,
    sliced: tuple[Hashable, ...],
    specs: partition_specs.SpecTree,
) -> Judgement:
  """Checks the update and the loss of a shard, over all slices of the update.

  Raises:
    TypeError: If the rule uses the loss, and `value` is not a real number.
    ValueError: If `specs` contradicts the types, or `value` is not a scalar.
  """
  if rule is None or not isinstance(state, SpikeState):
    return without_rule(norms.are_finite(updates, sliced))
  values, is_finite = _signals(rule, updates, value, sliced, specs)
  low, high = _bounds(rule, state.statistics)
  is_spike = jnp.logical_not((low <= values) & (values <= high))
  is_clipped, factor = jnp.asarray(False), None
  if rule.on_spike == 'clip':
    is_norm = jnp.array([name == 'norm' for name in rule.names])
    is_clipped = is_norm & (values > high) & jnp.isfinite(values)
    # The norm comes first.
    factor = jnp.where(is_clipped, high / values, 1)[0]
  is_recorded = is_finite & jnp.all(jnp.isfinite(values))
  if not rule.record_spikes:
    is_recorded &= ~jnp.any(is_spike)
  tally = [jnp.stack([jnp.any(is_spike), is_recorded]).astype(jnp.float32)]
  if isinstance(state.statistics, Statistics):
    # A variance from plain squares would suffer from cancellation.
    deviation = jnp.where(is_clipped, high, values)
    deviation -= state.statistics.last_mean
    # The squares of recorded spikes must not overflow.
    deviation = jnp.clip(deviation, -1e15, 1e15)
    deviation = jnp.where(is_recorded, deviation, 0)
    tally += [deviation, deviation**2]
  return Judgement(
      is_healthy=is_finite & ~jnp.any(is_spike & ~is_clipped),
      is_spike=is_spike,
      factor=factor,
      tally=jnp.concatenate(tally),
  )


def without_rule(is_finite: jax.Array) -> Judgement:
  """Returns the `Judgement` of an update without a rule for spikes."""
  nothing = jnp.zeros(0, jnp.float32)
  return Judgement(is_finite, nothing > 0, None, nothing)


def _bounds(
    rule: SpikeRule, statistics: Statistics | tuple[()]
) -> tuple[Any, jax.Array]:
  """Returns the lower and upper limit of each signal, [signals]."""
  low, high = -jnp.finfo(jnp.float32).max, rule.fixed_limits()
  if not isinstance(statistics, Statistics):
    return low, high
  is_ready = statistics.num_recorded >= rule.steps_needed
  mean, std = statistics.moments()
  # Rounding of the mean must not make spikes of values that stay constant.
  reach = jnp.float32(rule.max_stds) * std + 1e-6 * jnp.abs(mean)
  if rule.two_sided:
    low = jnp.where(is_ready, mean - reach, low)
  return low, jnp.where(is_ready, jnp.minimum(high, mean + reach), high)


def _signals(rule, updates, value, sliced, specs):
  """Returns the signals, float32 [signals], and a bool [] for finite updates.

  With the signal `'norm'`, the bool is always true: updates that are not finite
  have a norm that is not finite, which is a spike.
  """
  signals, is_finite = [], jnp.asarray(True)
  if 'norm' in rule.signals:
    specs = specs if sliced else None
    squares = norms.sum_of_squares(updates, sliced, specs, _CALLER)
    norm = leaves_lib.as_dtype(jnp.sqrt(squares), jnp.float32)
    signals.append(jnp.reshape(norm, 1))
  else:
    is_finite = norms.are_finite(updates, sliced)
  if 'loss' in rule.signals:
    signals.append(jnp.reshape(_as_loss(value), 1))
  return jnp.concatenate(signals), is_finite


def _as_loss(value):
  """Returns the loss of this shard, float32 [].

  Raises:
    TypeError: If the loss is missing, or is not a real number.
    ValueError: If the loss is not a scalar.
  """
  name = '`value` of `guard`'
  dtype = leaves_lib.dtype_of_number(value)
  if value is None or dtype is None or not jnp.issubdtype(dtype, jnp.floating):
    raise TypeError(
        f'{name} must be the loss, a real number, got {value!r}. Call'
        ' `tx.update(updates, state, params, value=loss)`, or leave the loss'
        ' out of `signals`.'
    )
  if jnp.shape(value):
    raise ValueError(
        f'{name} must be a scalar, got the shape {jnp.shape(value)}.'
    )
  return jnp.asarray(value, jnp.float32)


def after(
    rule: SpikeRule | None,
    state: SpikeState | tuple[()],
    is_spike: jax.Array,
    totals: jax.Array,
    accept: jax.Array,
    step: jax.Array,
    axes: tuple[Hashable, ...],
) -> SpikeState | tuple[()]:
  """Returns the state after the step with index `step`, accepted or skipped.

  `is_spike` has the signals of this shard that are spikes, bool [signals], and
  `totals` is the sum of `Judgement.tally` over all shards.
  """
  if rule is None or not isinstance(state, SpikeState):
    return ()
  num_spikes, num_recorded = totals[0], totals[1]
  consecutive = states.safe_add(state.consecutive_spikes, 1)
  consecutive = jnp.where(num_spikes > 0, consecutive, 0)
  statistics = state.statistics
  if isinstance(statistics, Statistics):
    moments = totals[2:].reshape(2, -1) / jnp.maximum(num_recorded, 1)
    recorded = statistics.record(*moments)
    is_new = (accept | rule.record_spikes) & (num_recorded > 0)
    statistics = optax.tree.where(is_new, recorded, statistics)
    if rule.restart_after is not None:
      is_over = consecutive >= rule.restart_after
      zeros = optax.tree.zeros_like(statistics)
      statistics = optax.tree.where(is_over, zeros, statistics)
      consecutive = jnp.where(is_over, 0, consecutive)
  last_spike = states.without_shard_axis(state.last_spike, axes, _CALLER)
  last_spike = jnp.where(is_spike, step, last_spike)
  return SpikeState(
      statistics=statistics,
      spike_count=states.safe_add(state.spike_count, num_spikes),
      consecutive_spikes=consecutive,
      last_spike=states.with_shard_axis(last_spike, axes),
  )


def spikes_since(state: SpikeState | tuple[()], step: int) -> list[str]:
  """Returns the names of the signals that were spikes since a step.

  The list covers the shards of this process, and is empty if there is only one
  signal.
  """
  # A rule with one signal needs no name for it.
  if not isinstance(state, SpikeState) or state.last_spike.shape[-1] == 1:
    return []
  width = state.last_spike.shape[-1]
  found = {
      int(i)
      for _, steps in states.addressable_parts(state.last_spike)
      for i in np.flatnonzero(steps.reshape(-1, width).max(axis=0) >= step)
  }
  return [_NAMES[i] for i in sorted(found)]
