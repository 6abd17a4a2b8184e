"""`guard`: skips updates that are NaN, infinite or spikes."""

import functools
from typing import Literal

import jax
from jax import lax
import jax.numpy as jnp
import optax

from shard_transforms._src.base import arguments
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves
from shard_transforms._src.base import partition_specs
from shard_transforms._src.base import weights
from shard_transforms._src.gates import gating
from shard_transforms._src.reduction import collectives
from shard_transforms._src.reduction import norms
from shard_transforms._src.transforms import guard_state as state_lib
from shard_transforms._src.transforms import spike_rule
from shard_transforms._src.transforms import spikes as spikes_lib

_CALLER = 'guard'


def guard(
    inner: optax.GradientTransformation,
    axis_name: axes_lib.AxisName | None = None,
    *,
    on_bad: Literal['skip', 'exclude'] = 'skip',
    spikes: spike_rule.SpikeRule | None = None,
    min_shards: int | None = None,
    max_consecutive: int | None = None,
    specs: partition_specs.SpecTree = None,
    assume_weighted: bool = False,
) -> optax.GradientTransformationExtraArgs:
  r"""Skips updates that are NaN, infinite or spikes, or excludes bad shards.

  A shard is bad if an element of its update is not finite, or if the norm of
  its update or its loss is a spike according to the `SpikeRule` `spikes`, which
  can also scale spikes down instead. With `axis_name`, a shard whose extra
  argument `weight` is zero does not count and is never bad. Without
  `axis_name`, the decision depends only on the update, and `weight` is only
  passed to `inner`. After a reduction, `guard` cannot detect that all weights
  were zero, and takes a step with an update of zero. To skip such a step, put
  `guard` around the reduction.

  All shards make one decision, which costs one reduction of a few scalars.
  Therefore a bad shard cannot deadlock the other shards, as it does with
  `optax.apply_if_finite` around a reduction. With `on_bad='skip'`, a single bad
  shard causes the step to be skipped: updates are zero, and the state of
  `inner` keeps every bit. With `on_bad='exclude'`, bad shards get weight zero,
  and `inner` receives this weight, so that a `cross_shard_mean` inside computes

  .. math:: u = \sum_{i \text{ good}} w_i u_i / \sum_{i \text{ good}} w_i

  if at least `min_shards` shards are good; otherwise the step is skipped. With
  `axis_name`, a step is also skipped if the total weight of all shards is zero.

  In a skipped step, `inner` runs as well and its result is discarded; only side
  effects such as `jax.debug.print` remain. With `on_bad='skip'` and without
  `spikes`, the reduction does not wait for the decision: `inner` receives
  non-finite updates as they are, except those of shards of weight zero, which
  are replaced by zeros. In all other cases, `inner` receives zeros instead of
  bad updates. The derivative of a skipped step with respect to its updates is
  zero.

  On TPUs and GPUs, if `inner` first sums all updates over the shards, without a
  weight, the decision is computed from these sums. A step is then also skipped
  if a sum of finite updates overflows, although no shard is bad.

  The state counts skipped steps. Traced code cannot raise an error when
  training stalls, so call `check_health` on the state every few steps: it
  raises after `max_consecutive` consecutive skipped steps. All shards of the
  axis share one decision, even if `inner` reduces in groups.

  Args:
    inner: The transformation for healthy updates. It contains the reduction if
      `axis_name` is given.
    axis_name: The mapped axis, or a sequence of mapped axes, over whose shards
      the updates differ; state is then kept per shard (see `init_state`).
      `None` if updates are already reduced.
    on_bad: `'skip'` or `'exclude'`; `'exclude'` needs `axis_name`.
    spikes: The rule that defines spikes and their treatment; `None` to skip
      only updates that are not finite.
    min_shards: The number of good shards that a step needs with
      `on_bad='exclude'`, at least 1; 1 by default.
    max_consecutive: The number of consecutive skipped steps at which
      `check_health` raises; `None` for no limit. A step that excludes bad
      shards does not count as skipped.
    specs: The `PartitionSpec`s of leaves that are sliced over axes other than
      `axis_name`, as in `global_norm`; needed if JAX does not track types.
    assume_weighted: Turns off the check that `inner` uses `weight` in all its
      sums over shards. Set it only if `inner` is refused although it uses the
      weight: a sum without the weight then includes all shards, without an
      error.

  Returns:
    An `optax.GradientTransformationExtraArgs` with a `GuardState`, whose
    `update` takes the optional extra argument `weight`, and also `value`, the
    loss, if `spikes` has the signal `'loss'`.

  Raises:
    NameError: In `init` and `update`, if an axis is not bound.
    TypeError: If an argument has the wrong type; in `update`, if a leaf is an
      integer or boolean, `value` is missing, or the state belongs to another
      transformation.
    ValueError: If an argument has an invalid value, if `on_bad='exclude'` is
      given without `axis_name`, or `min_shards` without `on_bad='exclude'`; in
      `update`, and in `init` on several shards, if there are fewer than
      `min_shards` shards; in `update`, if updates are already reduced although
      `axis_name` is given, or differ between shards although it is not given,
      if `specs` is missing, if `inner` does not use the weight, or if the
      state was made with other options.

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
    Skipping steps at spikes: Chowdhery et al., PaLM:
    Scaling Language Modeling with Pathways, 2022, section 5.1,
    https://arxiv.org/abs/2204.02311.
  """
  axes = axes_lib.optional_axes(axis_name)
  num_required = _num_required(
      on_bad, min_shards, spikes, max_consecutive, specs, axes
  )
  inner = arguments.as_inner(inner, _CALLER)
  gate = gating.make_gate(_CALLER, inner, axes, assume_weighted)
  # If not, a NaN goes through the reduction, which then does not wait.
  waits_for_decision = on_bad == 'exclude' or spikes is not None

  def init_fn(params):
    if axes_lib.num_shards(axes, _CALLER) > 1 and num_required is not None:
      _check_num_shards(axes, num_required)
    inner_state = gate.inner.init(params)
    return state_lib.initial_state(inner_state, spikes, max_consecutive, axes)

  def step(check, updates, state, params=None, *, weight=None, **extra_args):
    arguments.check_update(updates, state, state_lib.GuardState, axes, _CALLER)
    if num_required is not None:
      _check_num_shards(axes, num_required)
    if spikes is not None or state.spikes:
      spikes_lib.check_state(spikes, state.spikes)
    sliced = _sliced_over(updates, axes, specs)
    local_weight, decide_by_sums = jnp.float32(1), None
    # After a reduction, the weights still differ between shards, so they must
    # not influence the decision.
    if axes and weight is not None:
      weight = local_weight = weights.as_weight(weight, (), _CALLER)
    if waits_for_decision:
      health = spikes_lib.check(
          spikes, state.spikes, updates, extra_args.get('value'), sliced, specs
      )
      decision = _decide(health, local_weight, axes, num_required)
      updates = _sanitize(updates, health)
    else:
      on_accelerator = bool(axes) and axes_lib.platform() != 'cpu'
      updates, is_finite = norms.finiteness(updates, sliced, on_accelerator)
      health = spikes_lib.SpikeCheck(is_finite)
      decision = _decide(health, local_weight, axes, num_required)
      updates = _pass_on(updates, weight if axes else None, decision.accept)
      if on_accelerator and weight is None:
        decide_by_sums = functools.partial(norms.are_finite, sliced_over=sliced)
    if on_bad == 'exclude':
      weight = decision.weight
    accept, updates, inner_state = gate.update_or_skip(
        check,
        decision.accept,
        updates,
        state.inner_state,
        params,
        weight,
        extra_args,
        decide_by_sums,
    )
    if accept is not decision.accept and axes_lib.platform() == 'gpu':
      decision = _decide_after(accept, health, local_weight, axes, num_required)
    decision = decision._replace(accept=accept)
    state = state._replace(inner_state=inner_state)
    return updates, state_lib.next_state(state, decision, spikes, axes)

  return gating.gated_transformation(init_fn, step)


def _num_required(on_bad, min_shards, spikes, max_consecutive, specs, axes):
  """Returns the number of good shards that a step needs; `None` for all shards.

  Raises:
    TypeError: If an argument has the wrong type.
    ValueError: If an argument has an invalid value, or if it is given without
      another argument that it needs.
  """
  if on_bad not in ('skip', 'exclude'):
    raise ValueError(f"`on_bad` must be 'skip' or 'exclude', got {on_bad!r}.")
  if spikes is not None and not isinstance(spikes, spike_rule.SpikeRule):
    raise TypeError(
        f'`spikes` of `guard` must be a `SpikeRule`, got {spikes!r}.'
    )
  if max_consecutive is not None:
    arguments.as_at_least('max_consecutive', max_consecutive, 1)
  partition_specs.check(specs, _CALLER)
  if on_bad == 'exclude' and not axes:
    raise ValueError(
        "`on_bad='exclude'` excludes shards, so it needs `axis_name`. After a"
        ' reduction, the updates already contain the bad shards: put `guard`'
        ' around the reduction.'
    )
  if on_bad == 'exclude':
    min_shards = 1 if min_shards is None else min_shards
    return arguments.as_at_least('min_shards', min_shards, 1)
  if min_shards is not None:
    raise ValueError(
        f"`min_shards={min_shards!r}` has no effect with `on_bad='skip'`, which"
        " skips the step if any shard is bad. Set `on_bad='exclude'`, or leave"
        ' out `min_shards`.'
    )
  return None


def _check_num_shards(axes, num_required):
  """Checks that there are at least as many shards as a step needs.

  `init` does not check a single shard, because `unshard_state` calls it on one
  shard to get the shapes of the state.

  Raises:
    NameError: If an axis is not bound.
    ValueError: If there are fewer shards.
  """
  num_shards = axes_lib.num_shards(axes, _CALLER)
  if num_shards < num_required:
    raise ValueError(
        f'`min_shards={num_required}` of `guard` exceeds the number of shards,'
        f' {num_shards}, so that every step would be skipped. Set at most'
        f' `min_shards={num_shards}`.'
    )


def _sliced_over(updates, axes, specs):
  """Returns the axes, other than `axes`, over which leaves are sliced.

  Raises:
    NameError: If such an axis is not bound.
    ValueError: If `specs` is missing where JAX does not track types.
  """
  axes_of_leaves = []
  if specs is not None:
    specs = jax.tree.leaves(specs, is_leaf=partition_specs.is_spec)
    axes_of_leaves = map(partition_specs.axes_of, specs)
  elif axes:
    axes_of_leaves = map(axes_lib.varying_axes, jax.tree.leaves(updates))
    untracked = set(axes_lib.untracked_axes()).difference(axes)
    if untracked:
      raise ValueError(
          'JAX does not track here which leaves are sliced over'
          f' {sorted(untracked, key=str)}. Pass the `PartitionSpec`s of the'
          ' leaves as `specs` of `guard`, or `P()` if no leaf is sliced.'
      )
  all_axes = frozenset().union(*axes_of_leaves)
  sliced = tuple(sorted(all_axes.difference(axes), key=str))
  axes_lib.check_bound(sliced, _CALLER)
  return sliced


def _decide(health, weight, axes, num_required):
  """Returns the joint decision, which takes one reduction of a few scalars."""
  # A shard of weight zero is not bad.
  is_counted = weight > 0
  is_good = is_counted & health.is_healthy
  is_bad = is_counted & ~health.is_healthy
  is_spike, sums = leaves.where_or_zeros(
      is_counted, (health.is_spike, health.sums)
  )
  # `inner` receives the same array, so that XLA for GPUs merges its sum with
  # this one: benchmarks/hardware.py h100:1x8 "drop_stale(guard)"
  good_weight = jnp.where(is_good, weight, 0)
  with jax.named_scope(_CALLER):
    num_good, num_bad, total_weight, sums = collectives.sum_scalars(
        (is_good, is_bad, good_weight, sums), axes
    )
  is_enough = num_bad == 0 if num_required is None else num_good >= num_required
  return state_lib.Decision(
      accept=(total_weight > 0) & is_enough,
      is_bad=is_bad,
      weight=good_weight,
      num_bad=num_bad,
      health=health._replace(is_spike=is_spike, sums=sums),
  )


def _decide_after(accept, health, weight, axes, num_required):
  """Returns the counts of the shards, which are summed after the decision.

  XLA for GPUs starts reductions in the order in which their results are used.
  If the shards were counted first, the gradients would be reduced only after
  the last one is checked: benchmarks/hardware.py h100:1x8 "guard, skip"
  """
  is_healthy, _ = lax.optimization_barrier((health.is_healthy, accept))
  health = health._replace(is_healthy=is_healthy)
  return _decide(health, weight, axes, num_required)


def _sanitize(updates, health):
  """Scales down updates that are spikes, and zeros updates that are bad."""

  def scale(leaf):
    if leaves.is_float0(leaf):
      return leaf
    leaf = jnp.asarray(leaf)
    wide = leaves.as_accumulator(leaf)
    factor = leaves.as_dtype(health.factor, wide.dtype)
    return leaves.as_dtype(wide * factor, leaf.dtype)

  if health.factor is not None:
    updates = jax.tree.map(scale, updates)
  return leaves.where_or_zeros(health.is_healthy, updates)


def _pass_on(updates, weight, accept):
  """Zeros updates of weight zero, and the derivative of skipped updates.

  In a skipped step `inner` may compute with a NaN, and the derivative through
  that computation may be NaN.
  """
  if weight is not None:
    updates = leaves.where_or_zeros(weight > 0, updates)
  return _stop_derivative_unless(accept, updates)


@jax.custom_jvp
def _stop_derivative_unless(accept, updates):
  del accept
  return updates


@_stop_derivative_unless.defjvp
def _derivative_unless(primals, tangents):
  accept, updates = primals
  return updates, leaves.where_or_zeros(accept, tangents[1])
