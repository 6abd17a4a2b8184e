"""`scale_by_staleness`: updates scaled down by their age."""

from collections.abc import Callable
from typing import Literal, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from shard_transforms._src.base import arguments
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import states
from shard_transforms._src.base import weights
from shard_transforms._src.gates import gating
from shard_transforms._src.reduction import collectives

_CALLER = 'scale_by_staleness'
# Of shards: products of a smaller one with updates could all be zero.
_LEAST_EXPONENTIAL = 2.0**-60

Kind = Literal['inverse', 'exponential'] | Callable[[jax.Array], chex.Numeric]


class ScaleByStalenessState(NamedTuple):
  """State of `scale_by_staleness`, the same on all shards.

  Attributes:
    global_step: Number of accepted updates, int32 [].
    inner_state: State of the inner transformation.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import shard_transforms
    >>> tx = shard_transforms.scale_by_staleness('inverse')
    >>> state = optax.chain(tx, optax.sgd(0.1)).init(jnp.zeros(2))
    >>> print(optax.tree_utils.tree_get(state, 'global_step'))
    0
  """

  global_step: jax.Array
  inner_state: optax.OptState

  rules = {'global_step': states.Rule(metric='same')}


def scale_by_staleness(
    kind: Kind,
    inner: optax.GradientTransformation | None = None,
    *,
    rate: chex.Numeric | None = None,
    axis_name: axes_lib.AxisName | None = None,
    assume_weighted: bool = False,
) -> optax.GradientTransformationExtraArgs:
  r"""Scales updates down by how many steps ago they were computed.

  Each call of `update` takes `local_step`, the global step at which the
  parameters of the update were read, as for `drop_stale`. Its age is

  .. math:: \tau = \max(\text{global step} - \text{local step}, 0)

  and it counts by a factor :math:`f(\tau)`: :math:`1 / \max(\tau, 1)` for
  `'inverse'`, :math:`e^{-\text{rate} \cdot \tau}` for `'exponential'`, or the
  result of a function.

  Without `inner` and `axis_name`, updates are multiplied by the factor, before
  or after a reduction. An update of factor zero is zero, even where it is NaN.

  With both, each shard has its own `local_step`, and the factor goes into its
  weight: `inner` receives :math:`f(\tau_i) w_i`, where :math:`w_i` is the extra
  argument `weight`, or 1. A `cross_shard_mean` inside then gives

  .. math:: u = \sum_i f(\tau_i) w_i u_i / \sum_i f(\tau_i) w_i

  so that only differences in age matter: if all shards are equally old, it is
  the plain mean. An exponential of shards is at least :math:`2^{-60}`, so that
  shards of any age keep a weight. If no shard has any weight left, nothing
  changes. All shards of the axis decide together, even if `inner` reduces in
  groups.

  The global step grows by one with each call, except if nothing changes. Inside
  `drop_stale` it equals the global step there.

  Args:
    kind: `'inverse'`, `'exponential'`, or a function of the age, int32 [], for
      the factor, a real scalar. A factor that is negative, not finite or no
      normal float32 counts as zero.
    inner: The transformation that receives the weight.
    rate: By how much the logarithm of the factor falls with each step of age, a
      positive number; only for `'exponential'`.
    axis_name: The mapped axis, or a sequence of them, between whose shards
      `local_step` may differ; comes with `inner`. Without it, the smallest
      `local_step` of the shards, without those whose `weight` is zero, scales
      updates that are already reduced, where JAX tracks types.
    assume_weighted: Turns off the check that `inner` uses `weight` in all of
      its sums over shards. Set it if `inner` is refused although it does: a sum
      without the weight then counts all shards, without an error.

  Returns:
    An `optax.GradientTransformationExtraArgs` with a `ScaleByStalenessState`,
    whose `update` requires the extra argument `local_step`, an integer scalar.

  Raises:
    NameError: In `update`, if an axis is not bound.
    TypeError: If an argument is of the wrong kind; in `update`, if `local_step`
      is missing or not an integer, a leaf is an integer or boolean, the factor
      is not real, or the state is of another transformation.
    ValueError: If `kind` is unknown, `rate` does not fit it or is not positive,
      or `inner` and `axis_name` do not come together; in `update`, if
      `local_step` or the factor is not a scalar, updates are already reduced
      although `axis_name` is given, only some are where local steps differ, or
      `inner` does not use the weight.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import shard_transforms
    >>> tx = shard_transforms.scale_by_staleness('inverse')
    >>> state = tx.init(jnp.zeros(()))
    >>> for local_step in 0, 0, 0, 1:
    ...   updates, state = tx.update(jnp.ones(()), state, local_step=local_step)
    ...   print(updates)
    1.0
    1.0
    0.5
    0.5

    Three shards; the first one read its parameters two steps ago:

    >>> mean = shard_transforms.cross_shard_mean('data')
    >>> tx = shard_transforms.scale_by_staleness(
    ...     'inverse', mean, axis_name='data')
    >>> def step(update, local_step):
    ...   state = tx.init(update)._replace(global_step=jnp.int32(2))
    ...   return tx.update(update, state, local_step=local_step)[0]
    >>> step = jax.vmap(step, axis_name='data')
    >>> print(step(jnp.array([6.0, 1.0, 1.0]), jnp.array([0, 1, 2])))
    [2. 2. 2.]

  References:
    Zhang et al., Staleness-aware Async-SGD for Distributed Deep Learning, 2015,
    https://arxiv.org/abs/1511.05950 (`'inverse'`).
  """
  axes = axes_lib.optional_axes(axis_name)
  factor_of = _as_factor(kind, rate, _LEAST_EXPONENTIAL if axes else 0)
  if bool(axes) != (inner is not None):
    raise ValueError(
        '`inner` and `axis_name` of `scale_by_staleness` must come together,'
        f' got {inner!r} and {axis_name!r}. Ages that differ between shards'
        ' are weights, for the reduction in `inner`; else write'
        ' `optax.chain(scale_by_staleness(kind), ...)`.'
    )
  gate = gating.gate(_CALLER, inner, axes, assume_weighted, may_be_local=False)

  def init_fn(params):
    return ScaleByStalenessState(states.counter(), gate.inner.init(params))

  def step(checked, updates, state, params=None, *, weight=None, **extra_args):
    arguments.check_update(updates, state, ScaleByStalenessState, axes, _CALLER)
    step = arguments.as_local_step(extra_args.get('local_step'), _CALLER)
    step = collectives.oldest(step, updates, axes, weight)
    dtype = weights.dtype_for(updates)
    factor = factor_of(_age(step, state.global_step), dtype)
    if axes:
      given = gate.as_weight(checked, weight)
      weight = weights.usable(weights.weighing(given)(factor))
      accept = collectives.total(weight, axes) > 0
      updates = leaves_lib.zero_unless(weight > 0, updates)
    else:
      accept, weight = None, None
      updates = _scale(updates, factor)
    updates, inner_state = gate.update_or_skip(
        checked, accept, updates, state.inner_state, params, weight, extra_args
    )
    is_step = True if accept is None else accept
    return updates, ScaleByStalenessState(
        states.count(state.global_step, is_step), inner_state
    )

  return gating.transformation(init_fn, step)


def _age(local_step, global_step):
  """Returns how many steps ago parameters were read, at least 0, int32 []."""
  # The difference may not fit int32; it fits uint32 where it is not negative.
  age = global_step.astype(jnp.uint32) - local_step.astype(jnp.uint32)
  age = jnp.minimum(age, states.MAX_COUNT).astype(jnp.int32)
  return jnp.where(local_step < global_step, age, 0)


def _as_factor(kind, rate, least):
  """Returns a function of the age and a dtype for the factor, in that dtype.

  An exponential is not less than `least`.

  Raises:
    TypeError: If `kind` is neither a name nor a function, or `rate` no number.
    ValueError: If `kind` is unknown, or `rate` not for it, or not positive.
  """
  if not isinstance(kind, str) and not callable(kind):
    raise TypeError(
        '`kind` of `scale_by_staleness` must be a name or a function of the'
        f' age, got {kind!r}. Under `optax.inject_hyperparams`, name it in'
        ' `static_args`.'
    )
  if isinstance(kind, str) and kind not in ('inverse', 'exponential'):
    raise ValueError(
        "`kind` of `scale_by_staleness` must be 'inverse', 'exponential' or a"
        f' function of the age, got {kind!r}.'
    )
  if (rate is None) == (kind == 'exponential'):
    raise ValueError(
        "`rate` of `scale_by_staleness` must come with 'exponential', and with"
        f' no other `kind`, got {rate!r} with {kind!r}.'
    )
  if kind == 'inverse':
    return lambda age, dtype: 1 / jnp.maximum(age, 1).astype(dtype)
  if kind == 'exponential':
    rate = arguments.as_positive('rate', rate)

    def factor(age, dtype):
      age = age.astype(dtype)
      return jnp.maximum(jnp.exp(-jnp.asarray(rate, dtype) * age), least)

    return factor
  return lambda age, dtype: _as_scalar(kind(age), dtype)


def _as_scalar(factor, dtype):
  """Returns the result of a user's function of the age, checked.

  Raises:
    TypeError: If it is not real.
    ValueError: If it is no scalar.
  """
  name = 'The factor that `kind` of `scale_by_staleness` gives'
  dtype = leaves_lib.dtype_of_number(factor)
  if dtype is None or jnp.issubdtype(dtype, jnp.complexfloating):
    raise TypeError(f'{name} must be a real number, got {factor!r}.')
  if jnp.shape(factor):
    raise ValueError(
        f'{name} must be a scalar, got the shape {jnp.shape(factor)}.'
    )
  return jnp.asarray(factor, dtype)


def _scale(updates, factor):
  """Returns the updates times the factor, in their own dtypes.

  Raises:
    ValueError: If the factor differs between shards, and an update does not.
  """
  arguments.check_varies_with(
      updates, jax.tree.map(lambda _: factor, updates), _CALLER
  )
  weigh = weights.weighing(weights.usable(factor))

  def scale(update):
    if leaves_lib.is_float0(update):
      return update
    return weigh(jnp.asarray(update)).astype(leaves_lib.dtype_of(update))

  return jax.tree.map(scale, updates)
