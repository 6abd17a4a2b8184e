"""`track_noise_scale`: the gradient noise scale, a guide to the batch size."""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from shard_transforms._src.base import arguments
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves
from shard_transforms._src.base import states
from shard_transforms._src.base import weights
from shard_transforms._src.reduction import collectives
from shard_transforms._src.reduction import leaf_sums
from shard_transforms._src.reduction import norms
from shard_transforms.contrib._src import arguments as contrib_arguments

_CALLER = 'track_noise_scale'


class NoiseScaleState(NamedTuple):
  """State of `track_noise_scale`, the same on all shards.

  Attributes:
    num_measured: Number of updates in which at least two shards had a weight,
      int32 [].
    gradient_square: The moving average of the squared norm of the true
      gradient, float32 []; like `noise`, it starts at 0.
    noise: The moving average of the trace of the covariance of the gradient of
      a single example, float32 [].
    inner_state: State of the reduction.

  Examples:
    >>> import jax.numpy as jnp
    >>> from shard_transforms import contrib
    >>> tx = contrib.track_noise_scale('data')
    >>> print(tx.init(jnp.zeros(2)).noise_scale)
    0.0
  """

  num_measured: jax.Array
  gradient_square: jax.Array
  noise: jax.Array
  inner_state: optax.OptState

  rules = {
      'num_measured': states.Rule(metric='same'),
      'gradient_square': states.Rule(metric='same'),
      'noise': states.Rule(metric='same'),
      'noise_scale': states.Rule(metric='same'),
  }

  @property
  def noise_scale(self) -> jax.Array:
    """The gradient noise scale, float32 []; 0 if it is unknown."""
    # The initial bias of the two moving averages cancels in the quotient.
    is_known = jnp.asarray(self.gradient_square) > 0
    divisor = jnp.where(is_known, self.gradient_square, 1)
    return jnp.where(is_known, self.noise / divisor, 0)


def track_noise_scale(
    axis_name: axes_lib.AxisName,
    inner: optax.GradientTransformation | None = None,
    *,
    decay: chex.Numeric = 0.95,
) -> optax.GradientTransformationExtraArgs:
  r"""Averages updates over shards, and measures the gradient noise scale.

  Each of the updates :math:`u_i` of n shards is the mean over :math:`w_i`
  examples, the extra argument `weight`; g is the mean over all :math:`W =
  \sum_i w_i` examples. Then

  .. math:: S = \frac{W}{n - 1} \left(\sum_i \frac{w_i}{W} \|u_i\|^2 -
     \|g\|^2\right), \quad G^2 = \|g\|^2 - S / W

  are unbiased estimates of the trace of the covariance of the gradient of one
  example and of the squared norm of the true gradient, even if shards have
  different numbers of examples. The noise scale is the quotient of the moving
  averages: the number of examples at which noise and gradient have equal size.
  Below it, a smaller batch makes about the same progress per example; far above
  it, a larger batch brings little benefit.

  Without `weight`, the batch of a shard counts as one example, and the noise
  scale is a number of shards.

  Use it instead of `cross_shard_mean`, or around it. The updates have the same
  bits as those of the reduction. A step is not measured if fewer than two
  shards have a weight, or if a norm is not finite. In addition to the
  reduction, it sends three values.

  Inside `tower_reduce`, the towers of a shard count as one batch, with their
  total weight.

  Args:
    axis_name: The mapped axis, or a sequence of axes.
    inner: The reduction of updates to their mean, weighted if `weight` is
      given; `cross_shard_mean(axis_name)` by default.
    decay: The decay of the moving averages, at least 0 and less than 1.

  Returns:
    An `optax.GradientTransformationExtraArgs` with a `NoiseScaleState`, whose
    `update` takes the optional extra argument `weight`.

  Raises:
    NameError: In `update`, if an axis is not bound.
    TypeError: If an argument has the wrong type; in `update`, if a leaf is an
      integer or boolean, `weight` is not a real number, or the state is from
      another transformation.
    ValueError: If an argument has a wrong value; in `update`, if a leaf is
      already reduced, or `weight` is not a scalar or is known to be negative.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from shard_transforms import contrib
    >>> tx = contrib.track_noise_scale('data', decay=0.5)
    >>> def measure(update):
    ...   mean, state = tx.update(update, tx.init(update))
    ...   return mean, state.noise_scale
    >>> measure = jax.vmap(measure, axis_name='data')
    >>> print(*measure(jnp.array([1.0, 4.0])))
    [2.5 2.5] [1.125 1.125]

  References:
    McCandlish et al., An Empirical Model of Large-Batch Training, 2018,
    appendix A.1, https://arxiv.org/abs/1812.06162.
  """
  axes = axes_lib.as_axes(axis_name)
  inner = _mean(axes) if inner is None else arguments.as_inner(inner, _CALLER)
  contrib_arguments.as_decay('decay', decay)

  def init_fn(params):
    zero = jnp.zeros([], jnp.float32)
    return NoiseScaleState(states.counter(), zero, zero, inner.init(params))

  def update_fn(updates, state, params=None, *, weight=None, **extra_args):
    arguments.check_update(updates, state, NoiseScaleState, axes, _CALLER)
    extra_args |= weights.drop_none(weight=weight)
    reduced, inner_state = inner.update(
        updates, state.inner_state, params, **extra_args
    )
    leaves.check_inexact(reduced, _CALLER)
    weight = weights.as_weight(1.0 if weight is None else weight, (), _CALLER)
    weight = weight.astype(jnp.float32)
    noise, gradient_square = _estimates(updates, reduced, weight, axes)
    is_known = jnp.isfinite(noise) & jnp.isfinite(gradient_square)

    def average(old, new):
      return jnp.where(is_known, decay * old + (1 - decay) * new, old)

    return reduced, NoiseScaleState(
        num_measured=states.safe_add(state.num_measured, is_known),
        gradient_square=average(state.gradient_square, gradient_square),
        noise=average(state.noise, noise),
        inner_state=inner_state,
    )

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _mean(axes):
  """Returns the default reduction."""
  mean = leaf_sums.Reduction(_CALLER, 'mean', axes)

  def update_fn(updates, state, params=None, *, weight=None, **extra_args):
    del params, extra_args
    return mean(updates, weight), state

  return optax.GradientTransformationExtraArgs(
      lambda params: optax.EmptyState(), update_fn
  )


def _estimates(updates, reduced, weight, axes):
  """Estimates the trace of the covariance and the squared norm of the gradient.

  The estimates are NaN if they are unknown.
  """
  is_counted = weight > 0
  local_sums = jnp.stack(
      [weight * _square(updates), weight, jnp.ones_like(weight)]
  )
  with jax.named_scope(_CALLER):
    total_square, total_weight, num_shards = collectives.psum(
        jnp.where(is_counted, local_sums, 0), axes
    )
  degrees = jnp.where(num_shards > 1, num_shards - 1, jnp.nan)
  square_of_mean = _square(reduced)
  noise = (total_square - total_weight * square_of_mean) / degrees
  return noise, square_of_mean - noise / weights.safe_divisor(total_weight)


def _square(tree):
  return norms.sum_of_squares(tree, (), None, _CALLER).astype(jnp.float32)
