"""`track_agreement`: the shard whose gradient points away from the mean."""

from collections.abc import Mapping
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from shard_transforms._src.base import arguments
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import counters
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import per_shard_state
from shard_transforms._src.base import state_rules
from shard_transforms._src.monitoring import watched_reduction
from shard_transforms._src.reduction import collectives
from shard_transforms._src.reduction import norms

_CALLER = 'track_agreement'


class AgreementState(NamedTuple):
  """State of `track_agreement`; all but `cosine` is the same on all shards.

  Attributes:
    cosine: The moving average of the cosine of each shard's update with the
      mean, float32 []; it starts at 1. Its leading axis has length 1 inside the
      mapped function, and the number of shards outside.
    least_cosine: The least cosine of all shards, float32 [].
    least_shard: The shard that has it, int32 []; -1 before the first update.
    inner_state: State of the reduction.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import shard_transforms
    >>> tx = shard_transforms.monitoring.track_agreement('data')
    >>> mesh = jax.make_mesh((8,), ('data',))
    >>> state = shard_transforms.init_state(tx, jnp.zeros(2), mesh)
    >>> print(state.cosine, state.least_shard)
    [1. 1. 1. 1. 1. 1. 1. 1.] -1
  """

  cosine: jax.Array
  least_cosine: jax.Array
  least_shard: jax.Array
  inner_state: optax.OptState

  def metric_rules(self) -> Mapping[str, state_rules.MetricRule]:
    """Returns how `metrics` reads its attributes."""
    return {
        'cosine': state_rules.MetricRule('mean'),
        'least_cosine': state_rules.MetricRule(),
        'least_shard': state_rules.MetricRule(),
    }

  def resize_rules(
      self, reduction: state_rules.Reduction | None
  ) -> Mapping[str, state_rules.ResizeRule]:
    """Returns how `resize_state` converts it: merging keeps the minimum."""
    del reduction
    return {
        'cosine': state_rules.ResizeRule('minimum', 1.0),
        'least_shard': state_rules.ResizeRule('begin_anew', counters.NEVER),
    }


def track_agreement(
    axis_name: axes_lib.AxisName,
    inner: optax.GradientTransformation | None = None,
    *,
    decay: chex.Numeric = 0.9,
) -> optax.GradientTransformationExtraArgs:
  r"""Measures how far the updates of each shard agree with their mean.

  The state keeps, for each shard, a moving average of the cosine of its update
  :math:`u_i` with the mean :math:`g`, :math:`u_i \cdot g / (\|u_i\| \|g\|)`,
  and the least cosine of all shards with the number of that shard. A shard with
  wrong labels, or data of another kind, is below the others, unless its updates
  are so large that they dominate the mean. If all are low, gradients are noisy:
  see `track_noise_scale`.

  Put it where per-shard gradients become one: in place of `cross_shard_mean`,
  or around it or one of `shard_transforms.aggregators`. Updates are those of
  the reduction, to the bit. The cosine of a zero update is 0. The average of a
  shard does not change in a step in which the shard has no weight, or a norm is
  not finite. Besides the reduction, each shard sends two numbers to every other
  shard.

  Args:
    axis_name: The mapped axis, or a sequence of them.
    inner: The reduction of the updates; `cross_shard_mean(axis_name)` by
      default.
    decay: The decay of the moving averages, from 0 to below 1.

  Returns:
    An `optax.GradientTransformationExtraArgs` with an `AgreementState`, whose
    `update` takes the optional extra argument `weight`.

  Raises:
    NameError: In `init` and `update`, if an axis is not bound.
    TypeError: If an argument is of the wrong kind; in `update`, if a leaf is an
      integer or boolean, `weight` is not a real number, or the state is of
      another transformation.
    ValueError: If an argument has a wrong value; in `update`, if a leaf is
      already reduced, or `weight` is not a scalar or known to be negative.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from shard_transforms import monitoring
    >>> tx = monitoring.track_agreement('data', decay=0.0)
    >>> def measure(update):
    ...   _, state = tx.update(update, tx.init(update))
    ...   return state.cosine[0], state.least_shard
    >>> measure = jax.vmap(measure, axis_name='data')
    >>> print(*measure(jnp.array([[1.0, 0.0], [1.0, 0.0], [0.0, -1.0]])))
    [0.8944272 0.8944272 0.4472136] [2 2 2]

  References:
    Muñoz-González, Co and Lupu, Byzantine-Robust Federated Machine Learning
    through Adaptive Model Averaging, 2019, https://arxiv.org/abs/1909.05125,
    which drops participants with an unusual cosine.
  """
  arguments.as_decay('decay', decay)

  def start(axes, inner_state):
    axes_lib.size(axes, _CALLER)
    one = jnp.ones([], jnp.float32)
    return AgreementState(
        cosine=per_shard_state.store(one, axes),
        least_cosine=one,
        least_shard=jnp.full([], counters.NEVER, jnp.int32),
        inner_state=inner_state,
    )

  def watch(seen, state, axes):
    found = _cosine(seen.updates, seen.reduced)
    is_known = jnp.isfinite(found) & (seen.weight > 0)
    before = per_shard_state.own(state.cosine, axes, _CALLER)
    cosine = watched_reduction.averaged(before, found, decay, is_known)
    least_cosine, least_shard = _least(cosine, is_known, state, axes)
    return {
        'cosine': per_shard_state.store(cosine, axes),
        'least_cosine': least_cosine,
        'least_shard': least_shard,
    }

  return watched_reduction.transformation(
      _CALLER, axis_name, inner, AgreementState, start, watch
  )


def _least(cosine, is_known, state, axes):
  """Returns the least cosine of all shards, and the shard that has it.

  Both are those of the state if no shard has a new value.
  """
  own = jnp.stack([cosine, is_known.astype(jnp.float32)])
  with jax.named_scope(_CALLER):
    rows = collectives.gather(axes_lib.to_varying(own, axes), axes)
  cosines, is_any_known = rows[:, 0], rows[:, 1].any()
  return (
      jnp.where(is_any_known, cosines.min(), state.least_cosine),
      jnp.where(
          is_any_known, cosines.argmin().astype(jnp.int32), state.least_shard
      ),
  )


def _cosine(one, other):
  """Returns the cosine of two trees, float32 []; 0 where one is zero."""
  squares = [norms.sum_of_squares(x, (), None, _CALLER) for x in (one, other)]
  wide = leaves_lib.as_accumulator
  products = [
      jnp.sum((wide(x) * wide(y).conj()).real)
      for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
      if not leaves_lib.is_float0(x)
  ]
  lengths = jnp.sqrt(squares[0]) * jnp.sqrt(squares[1])
  is_zero = lengths == 0
  cosine = sum(products, jnp.float32(0)) / jnp.where(is_zero, 1, lengths)
  return jnp.where(is_zero, 0, cosine).astype(jnp.float32)
