"""`scale_by_staleness`: scales updates down by their age."""

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
# The smallest exponential factor of a shard. With smaller ones, the products of
# updates and weights could underflow on all shards if all of them are old.
_LEAST_EXPONENTIAL = 2.0**-60

StalenessFactor = (
    Literal['inverse', 'exponential'] | Callable[[jax.Array], chex.Numeric]
)


class ScaleByStalenessState(NamedTuple):
  """State of `scale_by_staleness`, the same on all shards.

  Attributes:
    global_step: Number of accepted updates, int32 [].
    inner_state: State of the inner transformation.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import shard_transforms
    >>> tx = shard_transforms.contrib.scale_by_staleness('inverse')
    >>> state = optax.chain(tx, optax.sgd(0.1)).init(jnp.zeros(2))
    >>> print(optax.tree_utils.tree_get(state, 'global_step'))
    0
  """

  global_step: jax.Array
  inner_state: optax.OptState

  rules = {'global_step': states.Rule(metric='same')}


def scale_by_staleness(
    kind: StalenessFactor,
    inner: optax.GradientTransformation | None = None,
    *,
    rate: chex.Numeric | None = None,
    axis_name: axes_lib.AxisName | None = None,
    assume_weighted: bool = False,
) -> optax.GradientTransformationExtraArgs:
  r"""Scales updates down by their age, the number of steps that they are late.

  Each call of `update` takes `local_step`, the global step at which the
  parameters for this update were read, as in `drop_stale`. The age of the
  update is

  .. math:: \tau = \max(\text{global step} - \text{local step}, 0)

  and the update is scaled by a factor :math:`f(\tau)`, which is
  :math:`1 / \max(\tau, 1)` for `'inverse'`,
  :math:`e^{-\text{rate} \cdot \tau}` for `'exponential'`, or the result of a
  function.

  Without `inner` and `axis_name`, updates are multiplied by the factor, before
  or after a reduction. If the factor is zero, the update is zero, even if it
  was NaN.

  With `inner` and `axis_name`, each shard has its own `local_step`, and the
  factor multiplies the weight of the shard: `inner` receives the weight
  :math:`f(\tau_i) w_i`, where :math:`w_i` is the extra argument `weight`, or 1.
  A `cross_shard_mean` inside then computes

  .. math:: u = \sum_i f(\tau_i) w_i u_i / \sum_i f(\tau_i) w_i

  so only differences in age matter: if the updates of all shards have the same
  age, :math:`u` is the plain mean. The exponential factor of a shard is at
  least :math:`2^{-60}`, so every shard keeps a weight. If the total weight of
  all shards is zero, nothing changes. All shards of the axis share one
  decision, even if `inner` reduces in groups.

  The global step is incremented in each call, unless the total weight is zero.
  Inside `drop_stale`, it equals the global step of `drop_stale`.

  Args:
    kind: `'inverse'`, `'exponential'`, or a function that takes the age, int32
      [], and returns the factor, a real scalar of any dtype. A factor that is
      negative, not finite or not a normal float32 counts as zero.
    inner: The transformation that receives the weight.
    rate: The rate of the exponential decay per step of age, a positive number;
      only for `'exponential'`.
    axis_name: The mapped axis, or a sequence of mapped axes, over whose shards
      `local_step` may differ; must be given together with `inner`. Without
      `axis_name`, updates that are already reduced are scaled by the smallest
      `local_step` of the shards with positive `weight`, if JAX tracks types.
    assume_weighted: Turns off the check that `inner` uses `weight` in all its
      sums over shards. Set it only if `inner` is refused although it uses the
      weight: a sum without the weight then includes all shards, without an
      error.

  Returns:
    An `optax.GradientTransformationExtraArgs` with a `ScaleByStalenessState`,
    whose `update` requires the extra argument `local_step`, an integer scalar.

  Raises:
    NameError: In `update`, if an axis is not bound.
    TypeError: If an argument has the wrong type; in `update`, if `local_step`
      is missing or not an integer, a leaf is an integer or boolean, the factor
      is not real, or the state belongs to another transformation.
    ValueError: If `kind` is unknown, if `rate` does not fit `kind` or is not
      positive, or if only one of `inner` and `axis_name` is given; in `update`,
      if `local_step` or the factor is not a scalar, if updates are already
      reduced although `axis_name` is given, if only some updates are reduced
      and local steps differ, or if `inner` does not use the weight.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import shard_transforms
    >>> tx = shard_transforms.contrib.scale_by_staleness('inverse')
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
    >>> tx = shard_transforms.contrib.scale_by_staleness(
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
    only = 'axis_name' if axes else 'inner'
    raise ValueError(
        '`scale_by_staleness` needs both `inner` and `axis_name` or neither,'
        f' got only `{only}`. If ages differ between shards, pass'
        ' the reduction as `inner`, which receives the factors as weights; if'
        ' not, write `optax.chain(scale_by_staleness(kind), ...)`.'
    )
  gate = gating.make_gate(
      _CALLER, inner, axes, assume_weighted, may_be_unsummed=False
  )

  def init_fn(params):
    return ScaleByStalenessState(states.counter(), gate.inner.init(params))

  def step(check, updates, state, params=None, *, weight=None, **extra_args):
    arguments.check_update(updates, state, ScaleByStalenessState, axes, _CALLER)
    local_step = arguments.as_local_step(extra_args.get('local_step'), _CALLER)
    local_step = collectives.oldest(local_step, updates, axes, weight, _CALLER)
    age = _age(local_step, state.global_step)
    factor = factor_of(age, weights.dtype_for(updates))
    if axes:
      if weight is None:
        weight = jnp.float32(1)
      weight = weights.as_weight(weight, (), _CALLER)
      weight = weights.sanitized(weights.scale_by_weight(weight)(factor))
      accept = collectives.psum(weight, axes) > 0
      updates = leaves_lib.where_or_zeros(weight > 0, updates)
    else:
      accept, weight = None, None
      updates = _scale(updates, factor)
    _, updates, inner_state = gate.update_or_skip(
        check,
        accept,
        updates,
        state.inner_state,
        params,
        weight,
        extra_args,
    )
    num_steps = 1 if accept is None else accept
    return updates, ScaleByStalenessState(
        global_step=states.safe_add(state.global_step, num_steps),
        inner_state=inner_state,
    )

  return gating.gated_transformation(init_fn, step)


def _age(local_step, global_step):
  """Returns the age of an update in steps, at least 0, int32 []."""
  # The difference may overflow int32, but fits uint32 if it is not negative.
  age = global_step.astype(jnp.uint32) - local_step.astype(jnp.uint32)
  age = jnp.minimum(age, states.MAX_COUNT).astype(jnp.int32)
  return jnp.where(local_step < global_step, age, 0)


def _as_factor(kind, rate, least):
  """Returns a function that computes the factor from an age and a dtype.

  The exponential factor is at least `least`.

  Raises:
    TypeError: If `kind` is neither a name nor a function, or if `rate` is not a
      number.
    ValueError: If `kind` is unknown, or if `rate` does not fit `kind` or is not
      positive.
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
        "`scale_by_staleness` needs `rate` if `kind` is 'exponential', and only"
        f' then, got `kind={kind!r}` and `rate={rate!r}`.'
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
  """Checks and casts the factor that a function of the user returns.

  Raises:
    TypeError: If the factor is not real.
    ValueError: If the factor is not a scalar.
  """
  name = 'The factor that `kind` of `scale_by_staleness` returns'
  if leaves_lib.dtype_of_number(factor) is None or jnp.iscomplexobj(factor):
    raise TypeError(f'{name} must be a real number, got {factor!r}.')
  if jnp.shape(factor):
    raise ValueError(
        f'{name} must be a scalar, got the shape {jnp.shape(factor)}.'
    )
  return jnp.asarray(factor, dtype)


def _scale(updates, factor):
  """Returns the updates times the factor, in their own dtypes.

  Raises:
    ValueError: If the factor differs between shards and an update does not.
  """
  arguments.check_varies_with(
      updates, jax.tree.map(lambda _: factor, updates), _CALLER
  )
  scale_by_factor = weights.scale_by_weight(weights.sanitized(factor))

  def scale(update):
    if leaves_lib.is_float0(update):
      return update
    return scale_by_factor(jnp.asarray(update)).astype(
        leaves_lib.dtype_of(update)
    )

  return jax.tree.map(scale, updates)
