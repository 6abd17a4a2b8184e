"""`drop_stale`: drops updates that were computed too many steps ago."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from shard_transforms._src.base import arguments
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves
from shard_transforms._src.base import states
from shard_transforms._src.gates import gating
from shard_transforms._src.reduction import collectives

_CALLER = 'drop_stale'
_INT32 = jnp.iinfo(jnp.int32)


class DropStaleState(NamedTuple):
  """State of `drop_stale`, the same on all shards.

  Attributes:
    global_step: Number of accepted updates, int32 [].
    stale_count: Number of updates that were dropped because of their age,
      int32 [].
    stale_shard_count: Number of updates of single shards that were dropped,
      int32 []; without `axis_name`, the caller counts as one shard.
    inner_state: State of the inner transformation.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import shard_transforms
    >>> tx = optax.chain(shard_transforms.drop_stale(0), optax.sgd(0.1))
    >>> state = tx.init(jnp.zeros(2))
    >>> print(optax.tree_utils.tree_get(state, 'stale_count'))
    0
    >>> drop_state = optax.tree_utils.tree_get(state, 'DropStaleState')
    >>> print(drop_state.stale_fraction)
    0.0
  """

  global_step: jax.Array
  stale_count: jax.Array
  stale_shard_count: jax.Array
  inner_state: optax.OptState

  rules = {
      'global_step': states.Rule(metric='same'),
      'stale_count': states.Rule(metric='same'),
      'stale_shard_count': states.Rule(metric='same'),
      'stale_fraction': states.Rule(metric='same'),
  }

  @property
  def stale_fraction(self) -> jax.Array:
    """The fraction of updates that was dropped, float32 []; 0 at the start."""
    stale, taken = (
        jnp.asarray(count, jnp.float32)
        for count in (self.stale_count, self.global_step)
    )
    return stale / jnp.maximum(stale + taken, 1)


def drop_stale(
    staleness: int,
    inner: optax.GradientTransformation | None = None,
    *,
    axis_name: axes_lib.AxisName | None = None,
    assume_weighted: bool = False,
) -> optax.GradientTransformationExtraArgs:
  r"""Drops updates that were computed too many steps ago.

  Each call of `update` takes `local_step`, the global step at which the
  parameters of the update were read. The update is accepted if

  .. math:: \text{global step} - \text{local step} \le \text{staleness}

  Then `inner` takes a step, and the global step grows by one. Otherwise the
  update is dropped: the result is zero, the global step and every bit of the
  state of `inner` stay, and `stale_count` grows by one. (`inner` runs in that
  step too, on zeros, and its result is thrown away: only side effects such as
  `jax.debug.print` remain.) Read `global_step` of this state when you read the
  parameters, and pass it with the gradient of these parameters.

  With `axis_name`, each shard has its own `local_step`. Shards that are too
  late, or whose extra argument `weight` is zero, get weight zero and an update
  of zero, and `inner` receives both: a `cross_shard_mean` inside leaves them
  out. If no shard has any weight left, nothing changes, and the step counts as
  dropped if any shard was late. All shards of the axis decide together, even if
  `inner` reduces in groups.

  Without `inner`, the update goes to the next link of an `optax.chain`, as
  zeros if it is dropped. That is right only for links that keep no state and do
  not read the parameters: with a dropped update, weight decay would still
  shrink them, a schedule would count, and moments would decay. No error tells.

  Args:
    staleness: The age up to which updates are accepted, in steps. 0 accepts
      updates that were computed from the present parameters; a negative number
      accepts only updates that claim a later step.
    inner: The transformation for accepted updates.
    axis_name: The mapped axis, or a sequence of them, between whose shards
      `local_step` may differ; needs `inner`. `None` if it is the same on all
      shards, or if updates are already reduced: where JAX tracks types, the
      smallest `local_step` of the shards then decides, without shards whose
      `weight` is zero, and updates that are not reduced raise an error. Where
      it does not, different steps let shards diverge.
    assume_weighted: Turns off the check that `inner` uses `weight` in all of
      its sums over shards. Set it if `inner` is refused although it does: a sum
      without the weight then counts all shards, without an error.

  Returns:
    An `optax.GradientTransformationExtraArgs` with a `DropStaleState`, whose
    `update` requires the extra argument `local_step`, an integer scalar.

  Raises:
    NameError: In `update`, if an axis is not bound.
    TypeError: If an argument is of the wrong kind; in `update`, if `local_step`
      is missing or not an integer, a leaf is an integer or boolean, or the
      state is of another transformation.
    ValueError: If `axis_name` is given without `inner`; in `update`, if
      `local_step` is not a scalar or differs between shards, as the updates
      do, without `axis_name`; or, with it, if updates are already reduced or
      `inner` does not use the weight.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import shard_transforms
    >>> tx = shard_transforms.drop_stale(1, optax.sgd(1.0))
    >>> state = tx.init(jnp.zeros(()))
    >>> for local_step in 0, 0, 0, 2:
    ...   updates, state = tx.update(jnp.ones(()), state, local_step=local_step)
    ...   print(updates, state.global_step, state.stale_count)
    -1.0 1 0
    -1.0 2 0
    0.0 2 1
    -1.0 3 1
    >>> print(state.stale_fraction)
    0.25

  References:
    `tf.contrib.opt.DropStaleGradientOptimizer` of TensorFlow 1.15; Chen et al.,
    Revisiting Distributed Synchronous SGD, 2016,
    https://arxiv.org/abs/1604.00981 (late gradients are dropped).
  """
  staleness = arguments.as_int('staleness', staleness)
  staleness = min(max(staleness, -_INT32.max), _INT32.max)
  axes = axes_lib.optional_axes(axis_name)
  if axes and inner is None:
    raise ValueError(
        f'`axis_name` of `drop_stale` must come with `inner`, got {axis_name!r}'
        ' alone. A link of a chain cannot tell the next which shards to leave'
        ' out: write `drop_stale(staleness, optax.chain(...), axis_name=...)`.'
    )
  gate = gating.gate(_CALLER, inner, axes, assume_weighted, may_be_local=False)

  def init_fn(params):
    return DropStaleState(
        global_step=states.counter(),
        stale_count=states.counter(),
        stale_shard_count=states.counter(),
        inner_state=gate.inner.init(params),
    )

  def step(checked, updates, state, params=None, *, weight=None, **extra_args):
    arguments.check_update(updates, state, DropStaleState, axes, _CALLER)
    local_step = arguments.as_local_step(extra_args.get('local_step'), _CALLER)
    local_step = collectives.oldest(local_step, updates, axes, weight)
    is_fresh = _is_fresh(local_step, state.global_step, staleness)
    accept, num_stale, counts = is_fresh, jnp.where(is_fresh, 0, 1), is_fresh
    if axes:
      given = gate.as_weight(checked, weight)
      weight = jnp.where(is_fresh, given, 0)
      total_weight, num_stale = collectives.total(
          jnp.stack([weight, jnp.where(is_fresh, 0.0, 1.0)]), axes
      )
      accept, counts = total_weight > 0, weight > 0
    updates, inner_state = gate.update_or_skip(
        checked,
        accept,
        leaves.zero_unless(counts, updates),
        state.inner_state,
        params,
        weight,
        extra_args,
    )
    return updates, DropStaleState(
        global_step=states.count(state.global_step, accept),
        stale_count=states.count(state.stale_count, ~accept & (num_stale > 0)),
        stale_shard_count=states.count(state.stale_shard_count, num_stale),
        inner_state=inner_state,
    )

  return gating.transformation(init_fn, step)


def _is_fresh(local_step, global_step, staleness):
  """Returns whether an update is at most `staleness` steps old, bool []."""
  # The oldest accepted step, in arithmetic that cannot overflow: below the
  # range of int32 every step is fresh, and above it none is.
  lowest = _INT32.min + max(staleness, 0)
  highest = _INT32.max + min(staleness, 0)
  oldest = jnp.clip(global_step, lowest, highest) - staleness
  return (local_step >= oldest) & (global_step <= highest)
