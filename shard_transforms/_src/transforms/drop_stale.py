"""`drop_stale`: drops updates that were computed too many steps ago."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from shard_transforms._src.base import arguments
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves
from shard_transforms._src.base import states
from shard_transforms._src.base import weights
from shard_transforms._src.gates import gating
from shard_transforms._src.reduction import collectives

_CALLER = 'drop_stale'
_INT32 = jnp.iinfo(jnp.int32)


class DropStaleState(NamedTuple):
  """State of `drop_stale`, the same on all shards.

  Attributes:
    global_step: Number of accepted updates, int32 [].
    stale_count: Number of steps that were dropped while at least one shard was
      too late, int32 [].
    stale_shard_count: Number of updates that were too late, counted over all
      shards, int32 []; without `axis_name`, all shards together count as one.
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
    """The fraction of dropped updates, float32 []; 0 before any update."""
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
  parameters for this update were read. The update is accepted if

  .. math:: \text{global step} - \text{local step} \le \text{staleness}

  For an accepted update, `inner` takes a step, and the global step is
  incremented. Otherwise the update is dropped: the result is zero, the global
  step and every bit of the state of `inner` are unchanged, and `stale_count` is
  incremented. (`inner` also runs in that step, on zeros, and its result is
  discarded; only side effects such as `jax.debug.print` remain.) Read
  `global_step` from this state when you read the parameters, and pass it as
  `local_step` with the gradient for these parameters.

  With `axis_name`, each shard has its own `local_step`. A shard whose update is
  too old, or whose extra argument `weight` is zero, gets an update of zero and
  weight zero, which `inner` receives, so that a `cross_shard_mean` inside
  leaves the shard out. If the total weight is then zero, nothing changes, and
  the step counts as dropped if any shard was too late. All shards of the axis
  share one decision, even if `inner` reduces in groups.

  Without `inner`, the update is passed to the next transformation of an
  `optax.chain`, as zeros if it is dropped. This is correct only for
  transformations that keep no state and do not read the parameters. For a
  dropped update, weight decay would still shrink the parameters, a schedule
  would count the step, and moments would decay, and there is no error in these
  cases.

  Args:
    staleness: The maximum age of accepted updates, in steps. 0 accepts updates
      that were computed from the current parameters; a negative value accepts
      only updates with a `local_step` after the global step.
    inner: The transformation for accepted updates.
    axis_name: The mapped axis, or a sequence of mapped axes, over whose shards
      `local_step` may differ; needs `inner`. `None` if `local_step` is the same
      on all shards, or if updates are already reduced. In the latter case, if
      JAX tracks types, the decision uses the smallest `local_step` of the
      shards with positive `weight`, and updates that are not reduced raise an
      error; if JAX does not track types, shards with different steps diverge.
    assume_weighted: Turns off the check that `inner` uses `weight` in all its
      sums over shards. Set it only if `inner` is refused although it uses the
      weight: a sum without the weight then includes all shards, without an
      error.

  Returns:
    An `optax.GradientTransformationExtraArgs` with a `DropStaleState`, whose
    `update` requires the extra argument `local_step`, an integer scalar.

  Raises:
    NameError: In `update`, if an axis is not bound.
    TypeError: If an argument has the wrong type; in `update`, if `local_step`
      is missing or not an integer, a leaf is an integer or boolean, or the
      state belongs to another transformation.
    ValueError: If `axis_name` is given without `inner`; in `update`, if
      `local_step` is not a scalar; without `axis_name`, if `local_step` and the
      updates differ between shards; with `axis_name`, if updates are already
      reduced or `inner` does not use the weight.

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
        f'`drop_stale(axis_name={axis_name!r})` needs `inner`, because a'
        ' transformation cannot pass weights to the next element of a chain.'
        ' Write `drop_stale(staleness, optax.chain(...), axis_name=...)`.'
    )
  gate = gating.make_gate(
      _CALLER, inner, axes, assume_weighted, may_be_unsummed=False
  )

  def init_fn(params):
    return DropStaleState(
        global_step=states.counter(),
        stale_count=states.counter(),
        stale_shard_count=states.counter(),
        inner_state=gate.inner.init(params),
    )

  def step(check, updates, state, params=None, *, weight=None, **extra_args):
    arguments.check_update(updates, state, DropStaleState, axes, _CALLER)
    local_step = arguments.as_local_step(extra_args.get('local_step'), _CALLER)
    local_step = collectives.oldest(local_step, updates, axes, weight, _CALLER)
    is_fresh = _is_fresh(local_step, state.global_step, staleness)
    accept = is_counted = is_fresh
    num_stale = jnp.where(is_fresh, 0, 1)
    if axes:
      if weight is None:
        weight = jnp.float32(1)
      weight = weights.as_weight(weight, (), _CALLER)
      weight = jnp.where(is_fresh, weight, 0)
      total_weight, num_stale = collectives.sum_scalars(
          (weight, ~is_fresh), axes
      )
      accept, is_counted = total_weight > 0, weight > 0
    _, updates, inner_state = gate.update_or_skip(
        check,
        accept,
        leaves.where_or_zeros(is_counted, updates),
        state.inner_state,
        params,
        weight,
        extra_args,
    )
    return updates, DropStaleState(
        global_step=states.safe_add(state.global_step, accept),
        stale_count=states.safe_add(
            state.stale_count, ~accept & (num_stale > 0)
        ),
        stale_shard_count=states.safe_add(state.stale_shard_count, num_stale),
        inner_state=inner_state,
    )

  return gating.gated_transformation(init_fn, step)


def _is_fresh(local_step, global_step, staleness):
  """Returns a bool [], true if an update is at most `staleness` steps old."""
  # The oldest accepted step, in arithmetic that cannot overflow. If it is below
  # the range of int32, every step is fresh; if it is above, no step is.
  lowest = _INT32.min + max(staleness, 0)
  highest = _INT32.max + min(staleness, 0)
  oldest = jnp.clip(global_step, lowest, highest) - staleness
  return (local_step >= oldest) & (global_step <= highest)
