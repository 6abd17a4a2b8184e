"""`SpikeRule`: which norms and losses are spikes, and what becomes of them."""

from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
from typing import Any, Literal

import chex
import jax
import jax.numpy as jnp
import optax

from shard_transforms._src.base import arguments

_WINDOW = 128
# Of `min_steps`, before exponential averages.
_WARM_UP = 25


@dataclasses.dataclass(frozen=True)
class SpikeRule:
  """Which norms and losses are spikes for `guard`, and what becomes of them.

  A norm is a spike above `max_norm`. A signal, which is a norm or the loss, is
  a spike if it exceeds its mean by more than `max_stds` standard deviations.
  Both are those of the values that single shards had in the last `window`
  steps, or exponential averages. Whatever is not finite is a spike from the
  first step on, an infinite norm of finite elements included.

  Published rules: that of OLMo-core is
  `SpikeRule(max_stds=6, signals=('norm', 'loss'), min_steps=63, two_sided=True,
  record_spikes=True)`; of MaxText, the same without `two_sided`; of ZClip,
  `SpikeRule(max_stds=2.5, decay=0.97, on_spike='reciprocal',
  record_spikes=True)`.

  Args:
    max_norm: The largest norm, or a mapping from each label to its own.
    max_stds: The most standard deviations from the mean, or a mapping from each
      of `names` to its own.
    signals: What is looked at: `'norm'`, `'loss'`, or both. The loss is the
      extra argument `value` of `update`, a real scalar; each shard may give its
      own, or all give their mean.
    labels: A label for each leaf, a tree of strings or a prefix of it, or a
      function that makes one of the updates, as for `optax.partition`. The
      leaves of each label have a norm of their own. `None` for one norm of all.
    window: The number of recorded steps in the rolling mean, at least 2; `None`
      for 128.
    decay: The decay of exponential averages, in place of the window.
    min_steps: The number of recorded steps before which `max_stds` does not
      count, at least 2; `None` for a full window, or 25 with `decay`.
    two_sided: Whether values far below the mean are spikes as well.
    record_spikes: Whether finite spikes enter the statistics: skipped ones as
      they are, and clipped ones after clipping. If they do not, norms that rise
      and stay high are spikes for ever.
    restart_after: After how many steps with spikes in a row the statistics
      start again, as in the first step; `None` for never.
    on_spike: `'skip'`: a spike is a bad update. `'clip'`: the leaves of a norm
      are scaled down to its limit, on each shard that has a spike;
      `'reciprocal'`: further down, by the rule of ZClip, to mean + (limit -
      mean)² / (norm - mean). Spikes of the loss, or below the mean, and what is
      not finite stay bad.

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
    >>> print(updates, state.spikes.spike_count, rule.names(params))
    [3. 4.] 1 ('norm',)

  References:
    OLMo-core, `SkipStepOptimizer`, https://github.com/allenai/OLMo-core;
    MaxText, `skip_step_on_spikes`, https://github.com/AI-Hypercomputer/maxtext;
    Kumar et al., ZClip: Adaptive Spike Mitigation for LLM Pre-Training, 2025,
    https://arxiv.org/abs/2504.02507.
  """

  max_norm: chex.Numeric | Mapping[str, chex.Numeric] | None = None
  max_stds: chex.Numeric | Mapping[str, chex.Numeric] | None = None
  signals: Sequence[Literal['norm', 'loss']] = ('norm',)
  labels: Any | Callable[[Any], Any] = None
  window: int | None = None
  decay: chex.Numeric | None = None
  min_steps: int | None = None
  two_sided: bool = False
  record_spikes: bool = False
  restart_after: int | None = None
  on_spike: Literal['skip', 'clip', 'reciprocal'] = 'skip'

  def __post_init__(self):
    for name in ('max_norm', 'max_stds'):
      limit = getattr(self, name)
      if isinstance(limit, Mapping):
        for value in limit.values():
          arguments.as_positive(name, value)
      elif limit is not None:
        arguments.as_positive(name, limit)
    for name in ('two_sided', 'record_spikes'):
      arguments.check_bool(name, getattr(self, name))
    for name, least in (('window', 2), ('min_steps', 2), ('restart_after', 1)):
      if (value := getattr(self, name)) is not None:
        arguments.as_at_least(name, value, least)
    if self.decay is not None:
      arguments.as_decay('decay', self.decay)
    _check_choices(self)

  @property
  def steps_needed(self) -> int:
    """How many recorded steps `max_stds` needs."""
    if self.min_steps is not None:
      return self.min_steps
    return self.num_rows if self.decay is None else _WARM_UP

  @property
  def num_rows(self) -> int:
    """How many steps the statistics keep: a window, or one average."""
    if self.decay is not None:
      return 1
    return _WINDOW if self.window is None else self.window

  def names(self, params: optax.Params) -> tuple[str, ...]:
    """Returns the names of the signals: labels in order, or 'norm'; 'loss'.

    Args:
      params: The parameters, or updates.
    """
    norms = ['norm'] if self.labels is None else self.labels_of(params)
    names = sorted(set(norms)) if 'norm' in self.signals else []
    return tuple([*names, 'loss'] if 'loss' in self.signals else names)

  def labels_of(self, updates: optax.Updates) -> list[str]:
    """Returns the label of each leaf; all are `'norm'` where none are given.

    Raises:
      TypeError: If a label is not a string.
      ValueError: If a leaf has no label, or one is called `'loss'`.
    """
    if self.labels is None:
      return ['norm'] * len(jax.tree.leaves(updates))
    labels = self.labels(updates) if callable(self.labels) else self.labels
    try:
      found = jax.tree.leaves(jax.tree.broadcast(labels, updates))
    except ValueError as error:
      raise ValueError(
          '`labels` of `SpikeRule` must have a label for each leaf, got'
          f' {labels!r} for {jax.tree.structure(updates)}.'
      ) from error
    if wrong := [x for x in found if not isinstance(x, str)]:
      raise TypeError(f'`labels` must be strings, got {wrong[0]!r}.')
    if not found or 'loss' in found:
      raise ValueError(
          "`labels` must name leaves, and none of them 'loss', got"
          f' {sorted(set(found))!r}.'
      )
    return found

  def numbers(self, updates: optax.Updates) -> list[int]:
    """Returns for each leaf which of the signals is its norm."""
    labels = self.labels_of(updates)
    order = {name: i for i, name in enumerate(sorted(set(labels)))}
    return [order[label] for label in labels]

  def limits(self, names: Sequence[str]) -> tuple[jax.Array, jax.Array]:
    """Returns the fixed limits and those in deviations, float32 [signals].

    Raises:
      ValueError: If a mapping does not have just these names.
    """
    norms = [name for name in names if name != 'loss']
    fixed = _each('max_norm', self.max_norm, norms)
    # The loss comes last, and has no fixed limit.
    fixed = jnp.pad(
        fixed, (0, len(names) - len(norms)), constant_values=jnp.inf
    )
    return fixed, _each('max_stds', self.max_stds, names)


def _check_choices(rule):
  """Checks the choices of a rule, and that they go together.

  Raises:
    ValueError: If they do not.
  """
  signals, on_spike = rule.signals, rule.on_spike
  named = set(map(str, signals)) if isinstance(signals, Collection) else set()
  limits = rule.max_norm, rule.max_stds
  of_stds = [
      name
      for name in ('restart_after', 'window', 'decay', 'min_steps')
      if getattr(rule, name) is not None
  ]
  for is_wrong, message in (
      (
          named not in ({'norm'}, {'loss'}, {'norm', 'loss'}),
          f"`signals` must be of 'norm' and 'loss', got {signals!r}.",
      ),
      (
          on_spike not in ('skip', 'clip', 'reciprocal'),
          "`on_spike` must be 'skip', 'clip' or 'reciprocal', got"
          f' {on_spike!r}.',
      ),
      (
          all(limit is None for limit in limits),
          '`SpikeRule` must have a limit, got neither `max_norm` nor'
          ' `max_stds`.',
      ),
      (
          any(isinstance(limit, Mapping) and not limit for limit in limits),
          '`max_norm` and `max_stds` must be numbers, or have one for each'
          f' signal, got {limits[0]!r} and {limits[1]!r}.',
      ),
      (
          'norm' not in named
          and (on_spike != 'skip' or rule.max_norm is not None),
          '`signals` must have the norm for `max_norm`, and to scale spikes'
          f' down, got {signals!r} with `on_spike={on_spike!r}`.',
      ),
      (
          'norm' not in named and rule.labels is not None,
          "`labels` must come with 'norm' in `signals`, got"
          f' {signals!r}: only norms have labels.',
      ),
      (
          {'window', 'decay'} <= set(of_stds),
          f'`window` must not come with `decay`, got {rule.window!r} and'
          f' {rule.decay!r}: an average is over a window, or exponential.',
      ),
      (
          of_stds and rule.max_stds is None,
          f'`{"`, `".join(of_stds)}` must come with `max_stds`, got None.',
      ),
      (
          rule.max_stds is None and ('loss' in named or rule.two_sided),
          '`max_stds` must be given for the loss and for `two_sided`, got'
          ' None.',
      ),
      (
          rule.max_stds is None and on_spike == 'reciprocal',
          "`max_stds` must be given for `on_spike='reciprocal'`, got None.",
      ),
  ):
    if is_wrong:
      raise ValueError(message)


def _each(argument, limit, names):
  """Returns the limit of each signal, float32; infinity where there is none."""
  if not isinstance(limit, Mapping):
    limit = jnp.inf if limit is None else limit
    return jnp.full(len(names), limit, jnp.float32)
  if set(limit) != set(names):
    raise ValueError(
        f'`{argument}` of `SpikeRule` must be one number, or have one for each'
        f' of {list(names)!r}, got {dict(limit)!r}.'
    )
  return jnp.stack([jnp.asarray(limit[name], jnp.float32) for name in names])
