"""Bad updates: those that are not finite, or spikes."""

from collections.abc import Hashable
from collections.abc import Mapping
from collections.abc import Sequence
import functools
from typing import Any, NamedTuple

import chex
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import counters
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import partition_specs
from shard_transforms._src.base import per_shard_state
from shard_transforms._src.base import state_rules
from shard_transforms._src.reduction import collectives
from shard_transforms._src.reduction import norms
from shard_transforms._src.transforms import spikes

_CALLER = 'guard'


class SpikeState(NamedTuple):
  """What `guard` remembers of spikes; all but `last_spike` is the same on all.

  Attributes:
    statistics: Mean and variance of the signals; `()` without `max_stds`.
    spike_count: Number of updates of single shards that were spikes, int32 [].
    consecutive_spikes: Number of steps in a row in which a shard had a spike,
      up to the last one, int32 [].
    last_spike: In which update the norm, the loss, or each of both of a shard
      was last a spike, counted from 0, int32 [signals]; -1 where none was. Kept
      per shard, as `last_bad_step`.

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

  statistics: spikes.Statistics | tuple[()]
  spike_count: jax.Array
  consecutive_spikes: jax.Array
  last_spike: jax.Array

  rules = {
      # Larger batches have smaller norms, so that the norms of other batch
      # sizes say nothing about spikes.
      'statistics': state_rules.Rule(resize='begin_anew'),
      'spike_count': state_rules.Rule(metric='same'),
      'last_spike': state_rules.Rule(resize='maximum', empty=counters.NEVER),
      'last_mean': state_rules.Rule(metric='same'),
  }

  @property
  def last_mean(self) -> Mapping[str, jax.Array]:
    """The mean of each signal in the last recorded step, by its number."""
    if not isinstance(self.statistics, spikes.Statistics):
      return {}
    num_signals = self.last_spike.shape[-1]
    means = jnp.reshape(self.statistics.last_mean, (-1, num_signals))
    return {str(i): x for i, x in enumerate(means[0])}


def start(rule: spikes.SpikeRule, axes: tuple[Hashable, ...]) -> SpikeState:
  """Returns the first state."""
  statistics = ()
  if rule.max_stds is not None:
    shape = rule.window, len(rule.names)
    statistics = spikes.Statistics(
        mean=jnp.zeros(shape, jnp.float32),
        variance=jnp.zeros(shape, jnp.float32),
        num_recorded=counters.zero(),
    )
  never = jnp.full(len(rule.names), counters.NEVER, jnp.int32)
  return SpikeState(
      statistics=statistics,
      spike_count=counters.zero(),
      consecutive_spikes=counters.zero(),
      last_spike=per_shard_state.store(never, axes),
  )


def check_fits(rule: spikes.SpikeRule | None, state: Any) -> None:
  """Checks that a state was made for a rule.

  Raises:
    ValueError: If it was not.
  """
  expected = ()
  if rule is not None:
    expected = jax.eval_shape(lambda: start(rule, ()))
  found = [x.shape[-2:] for x in jax.tree.leaves(state)]
  wanted = [x.shape for x in jax.tree.leaves(expected)]
  # The last leaf is kept per shard.
  if found[:-1] != wanted[:-1] or [x[-1:] for x in found[-1:]] != wanted[-1:]:
    raise ValueError(
        'State of `guard` must have the statistics of its `spikes`, of the'
        f' shapes {wanted}, got {found}. Make it with the same options.'
    )


class Judgement(NamedTuple):
  """The judgement of a shard's own update.

  Attributes:
    is_healthy: Whether it is finite and no spike, or one that is scaled down,
      bool [].
    is_spike: Which signals are outside of their limits, bool [signals].
    factor: By how much the update is scaled, float32 []; `None` if it is not.
    tally: The numbers to sum over the shards: whether there is a spike, whether
      values are recorded, and then their deviations and the squares of these,
      float32 [2 + 2 * signals], or float32 [2] without statistics. Empty
      without a rule, as is `is_spike`.
  """

  is_healthy: jax.Array
  is_spike: jax.Array
  factor: jax.Array | None
  tally: jax.Array


def judge(
    rule: spikes.SpikeRule | None,
    state: SpikeState | tuple[()],
    updates: optax.Updates,
    value: chex.Numeric | None,
    axes: tuple[Hashable, ...],
    sharded: partition_specs.SpecTree,
) -> Judgement:
  """Returns the judgement of a shard's update and loss, over all its slices.

  Raises:
    NameError: If an axis is not bound.
    TypeError: If the rule looks at the loss, and `value` is no real number.
    ValueError: If `sharded` is missing, or contradicts the types; or `value` is
      not a scalar.
  """
  sliced = _sliced_over(updates, axes, sharded)
  if rule is None or not isinstance(state, SpikeState):
    nothing = jnp.zeros(0, jnp.float32)
    is_finite = _are_finite(updates, axes, sliced)
    return Judgement(is_finite, nothing > 0, None, nothing)
  values, is_finite = _signals(rule, updates, value, axes, sliced, sharded)
  low, high = spikes.bounds(rule, state.statistics)
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
  if isinstance(state.statistics, spikes.Statistics):
    # Plain squares would cancel each other.
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


def _signals(rule, updates, value, axes, sliced, sharded):
  """Returns the signals, float32 [signals], and whether updates are finite.

  Elements that are not finite have a norm that is not, which is a spike, so
  that they are not looked for where there are norms.
  """
  signals, is_finite = [], jnp.asarray(True)
  if 'norm' in rule.signals:
    specs = sharded if sliced else None
    squares = norms.sum_of_squares(updates, sliced, specs, _CALLER)
    norm = leaves_lib.as_dtype(jnp.sqrt(squares), jnp.float32)
    signals.append(jnp.reshape(norm, 1))
  else:
    is_finite = _are_finite(updates, axes, sliced)
  if 'loss' in rule.signals:
    signals.append(jnp.reshape(_as_loss(value), 1))
  return jnp.concatenate(signals), is_finite


def _as_loss(value):
  """Returns the loss of this shard, float32 [].

  Raises:
    TypeError: If it is missing, or not a real number.
    ValueError: If it is not a scalar.
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


def _sliced_over(
    updates: optax.Updates,
    axes: Sequence[Hashable],
    sharded: partition_specs.SpecTree,
) -> tuple[Hashable, ...]:
  """Returns the axes, other than those given, over which leaves are sliced."""
  found = frozenset[Hashable]()
  if sharded is not None:
    specs = jax.tree.leaves(sharded, is_leaf=partition_specs.is_spec)
    found = found.union(*map(partition_specs.axes_of, specs))
  elif axes:
    found = found.union(*map(axes_lib.varying_axes, jax.tree.leaves(updates)))
    unknown = set(axes_lib.untracked_axes()).difference(axes)
    if unknown:
      raise ValueError(
          '`sharded` of `guard` must say which leaves are sliced over'
          f' {sorted(unknown, key=str)}, because JAX does not track it here,'
          ' got None. Give the `PartitionSpec`s of the leaves, or `P()` for'
          ' none.'
      )
  sliced = tuple(sorted(found.difference(axes), key=str))
  axes_lib.size(sliced, _CALLER)
  return sliced


def _are_finite(updates, axes, sliced):
  """Whether all elements of all slices are finite, bool []."""
  # 0 times an element is 0, or NaN if the element is not finite. A sum of these
  # cannot overflow, and takes half the time of a check of each element.
  zeros = [
      _sum_of_zeros(part)
      for leaf in jax.tree.leaves(updates)
      if not leaves_lib.is_float0(leaf)
      for part in _real_parts(jnp.asarray(leaf))
  ]
  total = functools.reduce(lax.add, zeros, jnp.float32(0))
  return collectives.total(total, sliced) == 0


def _real_parts(leaf):
  return [leaf.real, leaf.imag] if jnp.iscomplexobj(leaf) else [leaf]


def _sum_of_zeros(part):
  part = leaves_lib.as_accumulator(part)
  zeros = lax.mul(part, lax.full_like(part, 0))
  total = lax.reduce_sum(zeros, tuple(range(part.ndim)))
  return leaves_lib.as_dtype(total, jnp.float32)


def repaired(
    updates: optax.Updates,
    is_healthy: jax.Array,
    factor: jax.Array | None,
) -> optax.Updates:
  """Returns updates, scaled down if they are a spike; zeros if not healthy."""
  if factor is not None:
    updates = jax.tree.map(functools.partial(_scale, factor), updates)
  return leaves_lib.zero_unless(is_healthy, updates)


def _scale(factor, leaf):
  if leaves_lib.is_float0(leaf):
    return leaf
  leaf = jnp.asarray(leaf)
  wide = leaves_lib.as_accumulator(leaf)
  factor = leaves_lib.as_dtype(factor, wide.dtype)
  return leaves_lib.as_dtype(wide * factor, leaf.dtype)


def after(
    rule: spikes.SpikeRule | None,
    state: SpikeState | tuple[()],
    is_spike: jax.Array,
    totals: jax.Array,
    accept: jax.Array,
    step: jax.Array,
    axes: tuple[Hashable, ...],
) -> SpikeState | tuple[()]:
  """Returns the state after step number `step`, which is taken if `accept`.

  `is_spike` is of this shard, and `totals` is `tally` of the judgements of all.
  """
  if rule is None or not isinstance(state, SpikeState):
    return ()
  num_spikes, num_recorded = totals[0], totals[1]
  consecutive = counters.add(state.consecutive_spikes, 1)
  consecutive = jnp.where(num_spikes > 0, consecutive, 0)
  statistics = state.statistics
  if isinstance(statistics, spikes.Statistics):
    moments = totals[2:].reshape(2, -1) / jnp.maximum(num_recorded, 1)
    recorded = statistics.record(*moments)
    is_new = (accept | rule.record_spikes) & (num_recorded > 0)
    statistics = optax.tree.where(is_new, recorded, statistics)
    if rule.restart_after is not None:
      is_over = consecutive >= rule.restart_after
      zeros = optax.tree.zeros_like(statistics)
      statistics = optax.tree.where(is_over, zeros, statistics)
      consecutive = jnp.where(is_over, 0, consecutive)
  last_spike = per_shard_state.own(state.last_spike, axes, _CALLER)
  last_spike = jnp.where(is_spike, step, last_spike)
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
