"""`guard`: skips updates that are not finite, or are spikes."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax

from shard_transforms._src.base import addressable
from shard_transforms._src.base import arguments
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import counters
from shard_transforms._src.base import partition_specs
from shard_transforms._src.base import per_shard_state
from shard_transforms._src.base import state_rules
from shard_transforms._src.base import wrapper
from shard_transforms._src.tracing import gating
from shard_transforms._src.transforms import bad_updates
from shard_transforms._src.transforms import guard_decision
from shard_transforms._src.transforms import norm_window

_CALLER = 'guard'


class GuardState(NamedTuple):
  """State of `guard`; all but `last_bad_step` is the same on all shards.

  With `axis_name`, `last_bad_step` has a leading axis, of length 1 inside the
  mapped function and of the number of shards outside.

  Attributes:
    num_updates: Number of updates so far, int32 [].
    skipped_count: Number of them that were skipped, int32 [].
    consecutive_skipped: Number of those since the last accepted one, int32 [].
    bad_shard_count: Number of updates of single shards that were bad, int32 [].
    last_bad_step: Which update of a shard was its last bad one, counted from 0,
      int32 []; -1 where none was.
    max_consecutive: How many skipped updates in a row `check_health` lets pass,
      int32 [].
    norms: The norms of the last accepted updates, where `max_stds` is given;
      else `()`.
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
  norms: bad_updates.Norms
  inner_state: optax.OptState

  def resize_rules(
      self, reduction: state_rules.Reduction | None
  ) -> Mapping[str, state_rules.ResizeRule]:
    """Returns how `resize_state` converts its fields."""
    del reduction
    # Larger batches have smaller norms: recorded norms say nothing about spikes
    # of batches of another size.
    return {
        'last_bad_step': state_rules.ResizeRule('maximum', counters.NEVER),
        'norms': state_rules.ResizeRule('begin_anew'),
    }

  def metric_rules(self) -> Mapping[str, state_rules.MetricRule]:
    """Returns how `metrics` reads its attributes."""
    return {
        'num_updates': state_rules.MetricRule(),
        'skipped_count': state_rules.MetricRule(),
        'consecutive_skipped': state_rules.MetricRule(),
        'bad_shard_count': state_rules.MetricRule(),
        'last_bad_step': state_rules.MetricRule('maximum'),
    }

  def health_problem(self) -> str | None:
    """Returns what `check_health` raises, if too many steps were skipped."""
    num_skipped = addressable.largest(self.consecutive_skipped)
    if num_skipped < addressable.largest(self.max_consecutive):
      return None
    num_updates = addressable.largest(self.num_updates)
    first = num_updates - num_skipped
    return (
        f'`guard` has skipped the last {num_skipped} updates, {first} to'
        f' {num_updates - 1}: training does not go on.'
        f'{_bad_shards(self.last_bad_step, first)} Look at the data and the'
        ' learning rate, and go back to a checkpoint from before them.'
    )


def guard(
    inner: optax.GradientTransformation,
    axis_name: axes_lib.AxisName | None = None,
    *,
    on_bad: Literal['skip', 'exclude'] = 'skip',
    max_norm: chex.Numeric | None = None,
    max_stds: chex.Numeric | None = None,
    window: int = 128,
    min_shards: int | None = None,
    max_consecutive: int | None = None,
    sharded: partition_specs.SpecTree = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Skips updates that are not finite or spikes, or leaves their shards out.

  A shard is bad if an element of its update is not finite, or its norm is more
  than `max_norm` or than the rolling mean and `max_stds` standard deviations. A
  shard whose extra argument `weight` is zero does not count, and is not bad.

  All shards decide together, by one reduction of a few numbers that comes first
  and in every step, so that a bad shard cannot deadlock the others, as it does
  with `optax.apply_if_finite` around a reduction. With `on_bad='skip'`, one bad
  shard is enough for a step without updates, in which not a bit of the state of
  `inner` changes. With `on_bad='exclude'`, bad shards get weight zero, and
  `inner` is handed that weight: a `cross_shard_mean` inside gives

  .. math:: u = \sum_{i \text{ good}} w_i u_i / \sum_{i \text{ good}} w_i

  as long as at least `min_shards` are good; else the step is skipped. So is,
  either way, a step in which the total weight is zero.

  Skipped steps are counted. Traced code cannot raise if training has stalled:
  call `check_health` on the state every few steps, which raises after
  `max_consecutive` skipped steps in a row. The decision is taken over all
  shards of the axis, also where `inner` reduces in groups.

  Args:
    inner: The transformation that healthy updates go through, with the
      reduction in it where `axis_name` is given.
    axis_name: The mapped axis, or a sequence of them, between whose shards the
      updates differ; state is then kept per shard (see `init_state`). `None`
      where updates are reduced already.
    on_bad: `'skip'` or `'exclude'`; the latter needs `axis_name`.
    max_norm: The norm of a shard's update above which it is a spike.
    max_stds: How many standard deviations above its rolling mean the norm of a
      shard's update may be, once `window` steps were accepted. The mean is over
      these steps and their good shards. An infinite norm of finite elements,
      whose squares overflow, is a spike from the first step on. If norms rise
      and stay high, all later steps are skipped.
    window: The number of accepted steps that the rolling mean is over.
    min_shards: The number of good shards, at least 1, that is enough for a step
      with `on_bad='exclude'`; 1 by default.
    max_consecutive: The number of skipped steps in a row at which
      `check_health` raises; `None` for any number.
    sharded: Which leaves are sliced over other axes than `axis_name`, as in
      `global_norm`; needed where JAX does not track types.

  Returns:
    An `optax.GradientTransformationExtraArgs` with a `GuardState`, whose
    `update` takes the optional extra argument `weight`.

  Raises:
    NameError: In `init` and `update`, if an axis is not bound.
    TypeError: If an argument is of the wrong kind; in `update`, if a leaf is an
      integer or boolean, or the state is of another transformation.
    ValueError: If an argument has a wrong value, or `on_bad='exclude'` comes
      without `axis_name`, or `min_shards` without it; in `init` and `update`,
      if there are fewer shards than `min_shards`; in `update`, if updates are
      already reduced although `axis_name` is given, differ between shards
      although it is not, `sharded` is missing, `inner` does not heed the
      weight, or the state is one of other options.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import shard_transforms
    >>> inner = optax.chain(
    ...     shard_transforms.cross_shard_mean('data'), optax.sgd(1.0))
    >>> tx = shard_transforms.guard(inner, 'data', on_bad='exclude')
    >>> def step(update):
    ...   updates, state = tx.update(update, tx.init(update))
    ...   return updates, state.last_bad_step[0]
    >>> step = jax.vmap(step, axis_name='data')
    >>> updates, last_bad_step = step(jnp.array([1.0, jnp.nan, 3.0]))
    >>> print(updates, last_bad_step)
    [-2. -2. -2.] [-1  0 -1]

  References:
    Spikes, and steps that are left out because of them: Chowdhery et al., PaLM:
    Scaling Language Modeling with Pathways, 2022, section 5.1,
    https://arxiv.org/abs/2204.02311.
  """
  rule = guard_decision.Rule(
      axes_lib.optional_axes(axis_name), on_bad, min_shards
  )
  limits = bad_updates.Limits(max_norm, max_stds, window)
  most = counters.MAX if max_consecutive is None else max_consecutive
  most = min(arguments.as_at_least('max_consecutive', most, 1), counters.MAX)
  partition_specs.check(sharded, _CALLER)
  inner = wrapper.as_inner(inner, _CALLER)

  def init_fn(params):
    rule.check_enough_shards()
    return _start(inner.init(params), most, limits.start(), rule.axes)

  def step(gate, updates, state, params=None, *, weight=None, **extra_args):
    wrapper.check_update(updates, state, GuardState, rule.axes, _CALLER)
    rule.check_enough_shards()
    limits.check_fits(state.norms)
    diagnosis = bad_updates.diagnose(
        updates, state.norms, limits, rule.axes, sharded
    )
    decision = guard_decision.decide(diagnosis, weight, rule)
    if on_bad == 'exclude':
      weight = decision.weight
    applied, inner_state = gate.update_or_skip(
        decision.accept,
        inner,
        updates,
        state.inner_state,
        params,
        weight=weight,
        # A part of `inner` before its reduction may keep moments.
        is_healthy=None if weight is None else diagnosis.is_healthy,
        axes=rule.axes,
        extra_args=extra_args,
    )
    return applied, _count(state, decision, rule.axes, inner_state)

  return gating.transformation(init_fn, step)


def _start(inner_state, max_consecutive, norms, axes):
  """Returns the state before the first update."""
  never = jnp.full([], counters.NEVER, jnp.int32)
  return GuardState(
      num_updates=counters.zero(),
      skipped_count=counters.zero(),
      consecutive_skipped=counters.zero(),
      bad_shard_count=counters.zero(),
      last_bad_step=per_shard_state.store(never, axes),
      max_consecutive=jnp.asarray(max_consecutive, jnp.int32),
      norms=norms,
      inner_state=inner_state,
  )


def _count(state, decision, axes, inner_state):
  """Returns the state after an update."""
  accept = decision.accept
  last_bad_step = per_shard_state.own(state.last_bad_step, axes, _CALLER)
  last_bad_step = jnp.where(decision.is_bad, state.num_updates, last_bad_step)
  norms = state.norms
  if isinstance(norms, norm_window.NormWindow):
    recorded = norm_window.record(
        norms, jnp.stack(decision.deviations), decision.num_good
    )
    norms = jax.tree.map(
        lambda new, old: jnp.where(accept, new, old), recorded, norms
    )
  return GuardState(
      num_updates=counters.add(state.num_updates, 1),
      skipped_count=counters.add(state.skipped_count, ~accept),
      consecutive_skipped=jnp.where(
          accept, 0, counters.add(state.consecutive_skipped, 1)
      ),
      bad_shard_count=counters.add(state.bad_shard_count, decision.num_bad),
      last_bad_step=per_shard_state.store(last_bad_step, axes),
      max_consecutive=state.max_consecutive,
      norms=norms,
      inner_state=inner_state,
  )


def _bad_shards(last_bad_step, first):
  """Says in words which shards were bad since an update."""
  found = sorted(
      {
          start + i
          for start, steps in addressable.pieces(last_bad_step)
          for i, step in enumerate(np.ravel(steps))
          if step >= first
      }
  )
  if not found:
    return (
        ' No shard here was bad: all weights were zero, if none elsewhere was.'
    )
  if not jnp.ndim(last_bad_step):
    return ' They were not finite, or spikes.'
  return f' Not finite, or spikes, were those of the shards {found}.'
