"""`guard`: no step is taken with what is not finite, or is a spike."""

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from shard_transforms._src.base import arguments
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import counters
from shard_transforms._src.base import leaves
from shard_transforms._src.base import partition_specs
from shard_transforms._src.base import per_shard_state
from shard_transforms._src.base import varying
from shard_transforms._src.base import wrapper
from shard_transforms._src.reduction import collectives
from shard_transforms._src.reduction import norms as norms_lib
from shard_transforms._src.tracing import gating
from shard_transforms._src.transforms import bad_updates
from shard_transforms._src.transforms import norm_window

NEVER = -1


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
  norms: norm_window.NormWindow | tuple[()]
  inner_state: optax.OptState


def guard(
    inner: optax.GradientTransformation,
    axis_name: axes_lib.AxisName | None = None,
    *,
    on_bad: Literal['skip', 'exclude'] = 'skip',
    max_norm: Any = None,
    max_stds: Any = None,
    window: int = 128,
    min_shards: int | None = None,
    max_consecutive: int | None = None,
    sharded: Any = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Lets no bad update of a shard reach an inner transformation.

  A shard is bad if an element of its update is not finite, or its norm is more
  than `max_norm` or than the rolling mean and `max_stds` standard deviations. A
  shard whose extra argument `weight` is zero does not count, and is not bad.

  All shards decide together, by one reduction of a few numbers that comes first
  and in every step, so that no bad shard can leave the others waiting: what
  `optax.apply_if_finite` around a reduction does. With `on_bad='skip'`, one bad
  shard is enough for a step without updates, in which not a bit of the state of
  `inner` changes. With `on_bad='exclude'`, bad shards get weight zero, and
  `inner` is handed that weight: a `cross_shard_mean` inside gives

  .. math:: u = \sum_{i \text{ good}} w_i u_i / \sum_{i \text{ good}} w_i

  as long as at least `min_shards` are good; else the step is skipped. So is,
  either way, a step in which the total weight is zero.

  Skipped steps are counted. That they never end is not noticed in traced code:
  call `check_health` on the state now and then, which raises after
  `max_consecutive` of them in a row. The decision is taken over all shards of
  the axis, also where `inner` reduces in groups.

  Args:
    inner: The transformation that healthy updates go through, with the
      reduction in it where `axis_name` is given.
    axis_name: The mapped axis, or a sequence of them, between whose shards the
      updates differ; state is then kept per shard (see `init_state`). `None`
      where updates are reduced already.
    on_bad: `'skip'` or `'exclude'`; the latter needs `axis_name`.
    max_norm: The largest norm of a shard's update that is no spike.
    max_stds: How many standard deviations above its rolling mean the norm of a
      shard's update may be, once `window` steps were accepted. The mean is over
      these steps and their good shards. An infinite norm, of what is finite but
      too large for its square, is a spike from the first step on. A level of
      norms that rises for good is skipped for ever.
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
  caller = 'guard'
  axes = () if axis_name is None else axes_lib.as_axes(axis_name)
  excludes = on_bad == 'exclude'
  if on_bad not in ('skip', 'exclude'):
    raise ValueError(f"`on_bad` must be 'skip' or 'exclude', got {on_bad!r}.")
  if excludes and not axes:
    raise ValueError(
        "`on_bad='exclude'` of `guard` must come with `axis_name`, got None."
        ' What is reduced already has the bad shards in it.'
    )
  if min_shards is not None and not excludes:
    raise ValueError(
        "`min_shards` of `guard` must come with `on_bad='exclude'`, got"
        f' {min_shards!r} with {on_bad!r}, where no shard may be bad.'
    )
  min_shards = 1 if min_shards is None else min_shards
  min_shards = arguments.as_at_least('min_shards', min_shards, 1)
  window = arguments.as_at_least('window', window, 2)
  if max_norm is not None:
    max_norm = arguments.as_positive('max_norm', max_norm)
  if max_stds is not None:
    max_stds = arguments.as_positive('max_stds', max_stds)
  most = counters.MAX if max_consecutive is None else max_consecutive
  most = arguments.as_at_least('max_consecutive', most, 1)
  partition_specs.check(sharded, caller)
  inner = wrapper.as_inner(inner, caller)

  def init_fn(params):
    _check_enough(axes, min_shards)
    return GuardState(
        num_updates=jnp.zeros([], jnp.int32),
        skipped_count=jnp.zeros([], jnp.int32),
        consecutive_skipped=jnp.zeros([], jnp.int32),
        bad_shard_count=jnp.zeros([], jnp.int32),
        last_bad_step=per_shard_state.store(
            jnp.full([], NEVER, jnp.int32), axes
        ),
        max_consecutive=jnp.asarray(min(most, counters.MAX), jnp.int32),
        norms=() if max_stds is None else norm_window.start(window),
        inner_state=inner.init(params),
    )

  def update_fn(updates, state, params=None, *, weight=None, **extra_args):
    wrapper.check_state(state, GuardState, caller)
    _check_window(state, max_stds, window)
    leaves.check_inexact(updates, caller)
    if axes:
      _check_enough(axes, min_shards)
      varying.check_per_shard(updates, axes, caller)
    given = arguments.as_weight(1.0 if weight is None else weight, (), caller)
    sliced = bad_updates.sliced_over(updates, axes, sharded)
    healthy = bad_updates.are_finite(updates, sliced)
    norm = jnp.float32(0)
    if max_norm is not None or max_stds is not None:
      told = sharded if sliced else None
      squares = norms_lib.sum_of_squares(updates, sliced, told, caller)
      norm = jnp.sqrt(squares)
    if max_norm is not None:
      healthy &= norm <= max_norm
    if max_stds is not None:
      healthy &= norm <= norm_window.limit(state.norms, max_stds)
    # A shard without a weight does no harm.
    counts = given > 0
    good, bad = counts & healthy, counts & ~healthy
    tally = [good, bad, jnp.where(good, given, 0)]
    if max_stds is not None:
      tally += list(
          jnp.where(good, norm_window.deviations(state.norms, norm), 0)
      )
    with jax.named_scope(caller):
      num_good, num_bad, total_weight, *deviations = collectives.total(
          jnp.stack([jnp.asarray(x, jnp.float32) for x in tally]), axes
      )
    accept = total_weight > 0
    accept &= (num_good >= min_shards) if excludes else (num_bad == 0)
    if excludes:
      weight = jnp.where(good, given, 0)
    if weight is not None:
      # Some of `inner` may come before its reduction, and keep moments.
      updates = bad_updates.zero_if(~healthy, updates)

    def run(inner_state, updates, weight):
      extra = {} if weight is None else {'weight': weight}
      return inner.update(updates, inner_state, params, **extra_args, **extra)

    applied, inner_state = gating.run_or_skip(
        accept, run, state.inner_state, (updates, weight), axes
    )
    norms = state.norms
    if max_stds is not None:
      recorded = norm_window.record(norms, jnp.stack(deviations), num_good)
      norms = jax.tree.map(
          lambda new, old: jnp.where(accept, new, old), recorded, norms
      )
    last_bad_step = per_shard_state.own(state.last_bad_step, axes, caller)
    last_bad_step = jnp.where(bad, state.num_updates, last_bad_step)
    return applied, GuardState(
        num_updates=counters.add(state.num_updates, 1),
        skipped_count=counters.add(state.skipped_count, ~accept),
        consecutive_skipped=jnp.where(
            accept, 0, counters.add(state.consecutive_skipped, 1)
        ),
        bad_shard_count=counters.add(state.bad_shard_count, num_bad),
        last_bad_step=per_shard_state.store(last_bad_step, axes),
        max_consecutive=state.max_consecutive,
        norms=norms,
        inner_state=inner_state,
    )

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _check_enough(axes, min_shards):
  """Checks that there are as many shards as must be good.

  Raises:
    NameError: If an axis is not bound.
    ValueError: If there are not.
  """
  num_shards = axes_lib.size(axes, 'guard')
  if num_shards < min_shards:
    raise ValueError(
        '`min_shards` of `guard` must be at most the number of shards,'
        f' {num_shards}, got {min_shards!r}.'
    )


def _check_window(state, max_stds, window):
  """Checks that the norms in a state are those of these options.

  Raises:
    ValueError: If they are not.
  """
  found = state.norms.mean.size if state.norms else 0
  expected = 0 if max_stds is None else window
  if found != expected:
    raise ValueError(
        f'State of `guard` must have the norms of {expected} steps for its'
        f' `max_stds` and `window`, got those of {found}. Make it with the same'
        ' options.'
    )
