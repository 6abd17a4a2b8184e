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

  statistics: spikes.Statistics | tuple[()]
  spike_count: jax.Array
  consecutive_spikes: jax.Array
  last_spike: jax.Array

  @property
  def last_mean(self) -> Mapping[str, jax.Array]:
    """The mean of each signal in the last recorded step, by its number."""
    if not isinstance(self.statistics, spikes.Statistics):
      return {}
    num_signals = self.last_spike.shape[-1]
    means = jnp.reshape(self.statistics.last_mean, (-1, num_signals))
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


def start(
    rule: spikes.SpikeRule, params: optax.Params, axes: tuple[Hashable, ...]
) -> SpikeState:
  """Returns the first state."""
  names = rule.names(params)
  rule.limits(names)
  statistics = ()
  if rule.max_stds is not None:
    shape = rule.num_rows, len(names)
    statistics = spikes.Statistics(
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
    rule: spikes.SpikeRule | None, state: Any, updates: optax.Updates
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


class Judgement(NamedTuple):
  """The judgement of a shard's own update.

  Attributes:
    is_healthy: Whether it is finite and no spike, or one that is scaled down,
      bool [].
    is_spike: Which signals are outside of their limits, bool [signals].
    factors: By how much the leaves of each norm are scaled, float32 [signals];
      `None` if none are.
    tally: The numbers to sum over the shards: whether there is a spike, whether
      values are recorded, and then their deviations and the squares of these,
      float32 [2 + 2 * signals], or float32 [2] without statistics. Empty
      without a rule, as is `is_spike`.
  """

  is_healthy: jax.Array
  is_spike: jax.Array
  factors: jax.Array | None
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
  names = rule.names(updates)
  values, is_finite = _signals(rule, updates, value, axes, sliced, sharded)
  low, high, target = spikes.bounds(rule, state.statistics, values, names)
  is_spike = jnp.logical_not((low <= values) & (values <= high))
  is_clipped, factors = jnp.asarray(False), None
  if rule.on_spike != 'skip':
    is_norm = jnp.array([name != 'loss' for name in names])
    is_clipped = is_norm & (values > high) & jnp.isfinite(values)
    factors = jnp.where(is_clipped, target / values, 1)
  is_recorded = is_finite & jnp.all(jnp.isfinite(values))
  if not rule.record_spikes:
    is_recorded &= ~jnp.any(is_spike)
  tally = [jnp.stack([jnp.any(is_spike), is_recorded]).astype(jnp.float32)]
  if isinstance(state.statistics, spikes.Statistics):
    # Plain squares would cancel each other.
    deviation = jnp.where(is_clipped, target, values)
    deviation -= state.statistics.last_mean
    # The squares of recorded spikes must not overflow.
    deviation = jnp.clip(deviation, -1e15, 1e15)
    deviation = jnp.where(is_recorded, deviation, 0)
    tally += [deviation, deviation**2]
  return Judgement(
      is_healthy=is_finite & ~jnp.any(is_spike & ~is_clipped),
      is_spike=is_spike,
      factors=factors,
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
    numbers = rule.numbers(updates)
    squares = norms.sums_of_squares(updates, numbers, sliced, specs, _CALLER)
    signals.append(leaves_lib.as_dtype(jnp.sqrt(squares), jnp.float32))
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
  parts = [
      part
      for leaf in jax.tree.leaves(updates)
      if not leaves_lib.is_float0(leaf)
      for part in _real_parts(jnp.asarray(leaf))
  ]
  if axes and axes_lib.unmapped_axes(axes):
    # In a branch, the compiler could insert a collective over these axes.
    finite = _each_is_finite(parts)
  else:
    finite = _sum_or_each_is_finite(parts)
  return collectives.total(jnp.float32(~finite), sliced) == 0


def _sum_or_each_is_finite(parts):
  # If an element is not finite, neither is the sum, in any order. The sum takes
  # half the time of a check of each element, which is needed only if the sum
  # overflows. (A maximum does not do: on CPU it ignores NaN.)
  total = functools.reduce(lax.add, map(_sum, parts), jnp.float32(0))
  return lax.cond(
      lax.is_finite(total),
      lambda total, _: lax.is_finite(total),
      lambda _, parts: _each_is_finite(parts),
      total,
      parts,
  )


def _real_parts(leaf):
  return [leaf.real, leaf.imag] if jnp.iscomplexobj(leaf) else [leaf]


def _sum(part):
  part = leaves_lib.as_accumulator(part)
  total = lax.reduce_sum(part, tuple(range(part.ndim)))
  return leaves_lib.as_dtype(total, jnp.float32)


def _each_is_finite(parts):
  # `jnp.isfinite` and `jnp.all` take several times longer to trace.
  flags = [
      lax.reduce_and(lax.is_finite(x), tuple(range(x.ndim))) for x in parts
  ]
  return functools.reduce(lax.bitwise_and, flags, jnp.asarray(True))


def repaired(
    rule: spikes.SpikeRule | None,
    updates: optax.Updates,
    is_healthy: jax.Array | None,
    factors: jax.Array | None,
) -> optax.Updates:
  """Returns updates whose spikes are scaled down; zeros if not healthy."""
  if rule is not None and factors is not None:
    leaves, treedef = jax.tree.flatten(updates)
    # Indexing takes several times as long to trace.
    each = jnp.unstack(factors)
    of_leaves = [each[number] for number in rule.numbers(updates)]
    updates = treedef.unflatten(map(_scale, leaves, of_leaves))
  if is_healthy is not None:
    updates = leaves_lib.zero_unless(is_healthy, updates)
  return updates


def _scale(leaf, factor):
  if leaves_lib.is_float0(leaf):
    return leaf
  leaf = jnp.asarray(leaf)
  wide = leaves_lib.as_accumulator(leaf)
  factor = leaves_lib.as_dtype(factor, wide.dtype)
  scaled = lax.mul(wide, lax.broadcast(factor, wide.shape))
  return leaves_lib.as_dtype(scaled, leaf.dtype)


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
    recorded = statistics.record(rule, *moments)
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
