"""`compensate_delay`: the correction of stale gradients (DC-ASGD)."""

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from shard_transforms._src.base import arguments
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import states
from shard_transforms._src.base import weights
from shard_transforms.contrib._src import arguments as contrib_arguments

_CALLER = 'compensate_delay'


class CompensateDelayState(NamedTuple):
  """State of `compensate_delay`.

  With `axis_name`, the leaves of `mean_square` have a leading axis, of length 1
  inside the mapped function and of the number of shards outside.

  Attributes:
    mean_square: The moving mean of squared updates, a tree like the parameters,
      in float32 for leaves of fewer bits; `()` without `decay`.

  Examples:
    >>> import jax.numpy as jnp
    >>> import shard_transforms
    >>> tx = shard_transforms.contrib.compensate_delay(2.0, decay=0.95)
    >>> print(tx.init(jnp.ones(3)).mean_square)
    [0. 0. 0.]
  """

  mean_square: optax.Updates

  # Larger mean squares mean a smaller correction. With the maximum over shards,
  # the correction does not grow on any shard.
  rules = {'mean_square': states.Rule(resize='maximum')}


def compensate_delay(
    strength: chex.Numeric,
    *,
    decay: chex.Numeric | None = None,
    eps: chex.Numeric = 1e-7,
    axis_name: axes_lib.AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Corrects stale gradients for the change of the parameters (DC-ASGD).

  A gradient :math:`u` that was computed from the parameters
  :math:`x_\text{read}` is corrected towards the gradient at the current
  parameters :math:`x`,

  .. math:: u + \lambda u \odot u \odot (x - x_\text{read})

  where :math:`\lambda u \odot u` stands for the diagonal of the Hessian. With
  `decay`, :math:`\lambda` adapts to each element, by the moving mean of squares
  :math:`m \leftarrow \text{decay} \cdot m + (1 - \text{decay}) u \odot u`:

  .. math:: \lambda_t = \lambda / \sqrt{m + \epsilon}

  The gradient of an element that has not moved is unchanged. For complex
  leaves, the absolute value is squared.

  The caller keeps the parameters that were read, and passes them with the
  gradient. Put the transformation where updates are still gradients: first in a
  chain, on the gradient of each shard before the reduction, or on the mean over
  shards that read the same parameters. Before the reduction, a shard whose
  extra argument `weight` is zero keeps its moving mean.

  Args:
    strength: The strength of the correction, at least 0; 0.04 in the paper, and
      2 with `decay`.
    decay: The decay of the moving mean of squares, at least 0 and less than 1,
      0.95 in the paper; `None` for a constant :math:`\lambda`.
    eps: A positive number that is added to the moving mean.
    axis_name: The mapped axis, or a sequence of axes, between whose shards the
      updates differ; the moving mean is then kept per shard (see `init_state`).
      `None` if updates are already the same on all shards.

  Returns:
    An `optax.GradientTransformationExtraArgs` with a `CompensateDelayState`,
    whose `update` requires `params` and the extra argument `read_params`, a
    tree like them, and takes the optional extra argument `weight`.

  Raises:
    NameError: In `init` and `update`, if an axis is not bound.
    TypeError: If an argument is not a real number; in `update`, if
      `read_params` is missing, a leaf is an integer or boolean, or the state is
      from another transformation.
    ValueError: If `strength` is negative, `decay` is not at least 0 and less
      than 1, or `eps` is not positive; in `update`, if `params` is missing, the
      trees do not match, updates are already reduced although `axis_name` is
      given or `read_params` differ, or updates differ between shards without
      `axis_name`.

  Examples:
    >>> import jax.numpy as jnp
    >>> import shard_transforms
    >>> tx = shard_transforms.contrib.compensate_delay(0.5)
    >>> params = jnp.array([1.0, 3.0])
    >>> updates, _ = tx.update(
    ...     jnp.array([2.0, 2.0]), tx.init(params), params,
    ...     read_params=jnp.array([1.0, 2.0]))
    >>> print(updates)
    [2. 4.]

  References:
    Zheng et al., Asynchronous Stochastic Gradient Descent with Delay
    Compensation, 2017, https://arxiv.org/abs/1609.08326.
  """
  strength = arguments.as_not_negative('strength', strength)
  eps = arguments.as_positive('eps', eps)
  if decay is not None:
    decay = contrib_arguments.as_decay('decay', decay)
  axes = axes_lib.optional_axes(axis_name)

  def init_fn(params):
    axes_lib.check_bound(axes, _CALLER)
    if decay is None:
      return CompensateDelayState(())
    zeros = jax.tree.map(jnp.real, leaves_lib.accumulators(params))
    return CompensateDelayState(states.with_shard_axis(zeros, axes))

  def update_fn(
      updates,
      state,
      params=None,
      *,
      read_params=None,
      weight=None,
      **extra_args,
  ):
    del extra_args
    arguments.check_update(updates, state, CompensateDelayState, axes, _CALLER)
    moved = _moved(updates, params, read_params)
    arguments.check_varies_with(updates, moved, _CALLER)
    squares = jax.tree.map(_square, updates)
    strengths = jax.tree.map(lambda _: strength, updates)
    if decay is not None:
      counts = _updates_mean(weight) if axes else True
      mean_square = _record(state.mean_square, squares, decay, counts, axes)
      strengths = jax.tree.map(
          lambda m: strength / jnp.sqrt(m + eps), mean_square
      )
      state = _next_state(state, mean_square, axes)
    nearer = leaves_lib.tree_map(
        _compensate, updates, moved, squares, strengths
    )
    return nearer, state

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _moved(updates, params, read_params):
  """Returns the change of each parameter since it was read.

  Raises:
    TypeError: If `read_params` is missing.
    ValueError: If `params` is missing, or a tree does not match the updates.
  """
  if params is None:
    raise ValueError(
        '`compensate_delay` needs the current parameters. Call'
        ' `tx.update(updates, state, params, read_params=...)`.'
    )
  if read_params is None:
    raise TypeError(
        '`compensate_delay` needs the parameters at which the updates were'
        ' computed. Call `tx.update(updates, state, params, read_params=...)`.'
    )
  # Matched by path, because masks apply to updates and parameters, but not to
  # extra arguments.
  now = dict(jax.tree.leaves_with_path(params))
  read = dict(jax.tree.leaves_with_path(read_params))

  def moved(path, update):
    if leaves_lib.is_float0(update):
      return None
    _check_fits('params', now, path, update)
    _check_fits('read_params', read, path, update)
    dtype = leaves_lib.accumulator_dtype(leaves_lib.dtype_of(now[path]))
    return jnp.asarray(now[path], dtype) - jnp.asarray(read[path], dtype)

  return jax.tree.map_with_path(moved, updates)


def _check_fits(name, leaves, path, update):
  if path not in leaves or jnp.shape(leaves[path]) != jnp.shape(update):
    shape = (
        f'the shape {jnp.shape(leaves[path])}' if path in leaves else 'no leaf'
    )
    raise ValueError(
        f'`{name}` of `compensate_delay` must have the tree and the shapes of'
        f' the updates, but has {shape} instead of the shape'
        f' {jnp.shape(update)} at {leaves_lib.name_of(path)}. Pass the whole'
        ' tree of parameters.'
    )


def _square(update):
  """Returns the square of a leaf, in the dtype of the moving mean."""
  if leaves_lib.is_float0(update):
    return update
  update = leaves_lib.as_accumulator(update)
  if jnp.iscomplexobj(update):
    return update.real**2 + update.imag**2
  return update**2


def _updates_mean(weight):
  """Returns whether this shard updates its moving mean, bool []."""
  if weight is None:
    return True
  return weights.as_weight(weight, (), _CALLER) > 0


def _record(stored, squares, decay, counts, axes):
  """Returns the moving mean of a shard after one more update.

  Raises:
    ValueError: If the squares do not match the mean, or are already reduced.
  """

  def record(mean, square):
    if mean is None or square is None:
      return mean
    after = decay * mean + (1 - decay) * square
    return jnp.where(counts, after.astype(mean.dtype), mean)

  mean_square = states.without_shard_axis(stored, axes, _CALLER)
  arguments.check_like(squares, mean_square, _CALLER)
  arguments.check_varies_with(squares, mean_square, _CALLER)
  return leaves_lib.tree_map(record, mean_square, squares)


def _next_state(state, mean_square, axes):
  """Returns the state after an update.

  Raises:
    ValueError: If the mean differs between shards, but the state has one copy.
  """
  after = CompensateDelayState(states.with_shard_axis(mean_square, axes))
  states.check_stays_replicated(state, after, _CALLER)
  return after


def _compensate(update, moved, square, strength):
  """Corrects the update of a leaf where its parameter has moved."""
  if update is None or moved is None:
    return update
  factor = (jnp.asarray(strength, square.dtype) * square).astype(moved.dtype)
  nearer = leaves_lib.as_accumulator(update) + factor * moved
  nearer = nearer.astype(leaves_lib.dtype_of(update))
  # A correction of zero could change the sign of a zero, and would turn
  # infinity into NaN.
  return jnp.where(moved == 0, update, nearer)
