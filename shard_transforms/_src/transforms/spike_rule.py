"""`SpikeRule`: defines spikes of the norm and of the loss for `guard`."""

from collections.abc import Collection
from collections.abc import Sequence
import dataclasses
from typing import Literal

import chex

from shard_transforms._src.base import arguments

_SIGNALS = 'norm', 'loss'


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
    arguments.as_at_least('window', self.window, 2)
    for name, least in (('min_steps', 2), ('restart_after', 1)):
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
    return tuple(name for name in _SIGNALS if name in self.signals)


def _check_choices(rule):
  """Checks that the options of a rule are valid and compatible.

  Raises:
    TypeError: If `signals` is a string.
    ValueError: If an option is invalid, or needs another option.
  """
  signals, on_spike = rule.signals, rule.on_spike
  if isinstance(signals, str):
    raise TypeError(
        '`signals` must be a sequence of names, got the string'
        f' {signals!r}. Write `signals=({signals!r},)`.'
    )
  names = set(map(str, signals)) if isinstance(signals, Collection) else set()
  if not names or not names.issubset(_SIGNALS):
    raise ValueError(
        f"`signals` must contain 'norm', 'loss' or both, got {signals!r}."
    )
  if on_spike not in ('skip', 'clip'):
    raise ValueError(f"`on_spike` must be 'skip' or 'clip', got {on_spike!r}.")
  if rule.max_norm is None and rule.max_stds is None:
    raise ValueError(
        '`SpikeRule` has no limit, so that nothing would be a spike. Set'
        ' `max_norm` or `max_stds`.'
    )
  if 'norm' not in names and (on_spike == 'clip' or rule.max_norm is not None):
    raise ValueError(
        "`max_norm` and `on_spike='clip'` limit the norm, but `signals` is"
        f" {signals!r}. Add 'norm' to `signals`."
    )
  need_stds = [
      f'`{name}`'
      for name in ('min_steps', 'restart_after', 'two_sided', 'record_spikes')
      if getattr(rule, name) not in (None, False)
  ]
  if 'loss' in names:
    need_stds.append("'loss' in `signals`")
  if rule.max_stds is None and need_stds:
    raise ValueError(
        f'{" and ".join(need_stds)} of `SpikeRule` would have no effect without'
        ' `max_stds`. Set `max_stds`.'
    )
