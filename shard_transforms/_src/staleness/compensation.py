"""`compensate_delay`: corrects stale gradients for how parameters moved."""

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
    >>> tx = shard_transforms.compensate_delay(2.0, decay=0.95)
    >>> print(tx.init(jnp.ones(3)).mean_square)
    [0. 0. 0.]
  """

  mean_square: optax.Updates

  # Larger mean squares give less compensation. With the maximum over shards, no
  # shard compensates more than before.
  rules = {'mean_square': states.Rule(resize='maximum')}


def compensate_delay(
    lam: chex.Numeric,
    *,
    decay: chex.Numeric | None = None,
    eps: chex.Numeric = 1e-7,
    axis_name: axes_lib.AxisName | None = None,
) -> optax.GradientTransformationExtraArgs:
  r"""Corrects stale gradients for how far parameters have moved (DC-ASGD).

  A gradient :math:`u` that was computed from the parameters
  :math:`x_\text{read}` is corrected towards the gradient at the present ones,
  :math:`x`,

  .. math:: u + \lambda u \odot u \odot (x - x_\text{read})

  where :math:`\lambda u \odot u` stands for the diagonal of the Hessian. With
  `decay`, :math:`\lambda` adapts to each element, by the moving mean of squares
  :math:`m \leftarrow \text{decay} \cdot m + (1 - \text{decay}) u \odot u`:

  .. math:: \lambda_t = \lambda / \sqrt{m + \epsilon}

  An element that has not moved keeps its gradient, to the bit. For complex
  leaves, the absolute value is squared.

  The caller keeps the parameters that were read, and passes them with the
  gradient. Put it where updates are still gradients: first in a chain, on each
  shard's own gradient before the reduction, or on the mean of shards that read
  the same parameters. Before the reduction, a shard whose extra argument
  `weight` is zero keeps its moving mean.

  Args:
    lam: The strength of the correction, a number that is not negative; 0.04 in
      the paper, and 2 with `decay`.
    decay: The decay of the moving mean of squares, at least 0 and less than 1,
      0.95 in the paper; `None` for a constant :math:`\lambda`.
    eps: A positive number that is added to the moving mean.
    axis_name: The mapped axis, or a sequence of them, between whose shards the
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
      of another transformation.
    ValueError: If `lam` is negative, `decay` not a decay or `eps` not positive;
      in `update`, if `params` is missing, trees do not fit each other, updates
      are already reduced although `axis_name` is given or `read_params` differ,
      or updates differ between shards without `axis_name`.

  Examples:
    >>> import jax.numpy as jnp
    >>> import shard_transforms
    >>> tx = shard_transforms.compensate_delay(0.5)
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
  lam = arguments.as_not_negative('lam', lam)
  eps = arguments.as_positive('eps', eps)
  if decay is not None:
    decay = arguments.as_decay('decay', decay)
  axes = axes_lib.optional_axes(axis_name)

  def init_fn(params):
    axes_lib.size(axes, _CALLER)
    if decay is None:
      return CompensateDelayState(())
    zeros = jax.tree.map(jnp.real, leaves_lib.accumulators(params))
    return CompensateDelayState(states.store(zeros, axes))

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
    lams = jax.tree.map(lambda _: lam, updates)
    if decay is not None:
      counts = _counts(weight) if axes else True
      mean_square = _record(state.mean_square, squares, decay, counts, axes)
      lams = jax.tree.map(lambda m: lam / jnp.sqrt(m + eps), mean_square)
      state = _kept(state, mean_square, axes)
    nearer = leaves_lib.tree_map(_compensate, updates, moved, squares, lams)
    return nearer, state

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _moved(updates, params, read_params):
  """Returns for each update how far its parameter has moved since.

  Raises:
    TypeError: If `read_params` is missing.
    ValueError: If `params` is missing, or a tree does not fit the updates.
  """
  if params is None:
    raise ValueError(
        '`params` of `compensate_delay` must be the present parameters, got'
        ' None. Call `tx.update(updates, state, params, read_params=...)`.'
    )
  if read_params is None:
    raise TypeError(
        '`read_params` of `compensate_delay` must be the parameters that the'
        ' updates were computed from, got None. Call `tx.update(updates, state,'
        ' params, read_params=...)`.'
    )
  # By path, because masks cover updates and parameters, but not extra
  # arguments.
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
    found = jnp.shape(leaves[path]) if path in leaves else 'nothing'
    raise ValueError(
        f'`{name}` of `compensate_delay` must have the leaves and the shapes of'
        f' the updates, got {found} instead of {jnp.shape(update)} at'
        f' {leaves_lib.name_of(path)}.'
    )


def _square(update):
  """Returns the squares of a leaf, in the dtype of the moving mean."""
  if leaves_lib.is_float0(update):
    return update
  update = leaves_lib.as_accumulator(update)
  if jnp.iscomplexobj(update):
    return update.real**2 + update.imag**2
  return update**2


def _counts(weight):
  """Returns whether a shard's squares go into its moving mean, bool []."""
  if weight is None:
    return True
  return weights.as_weight(weight, (), _CALLER) > 0


def _record(kept, squares, decay, counts, axes):
  """Returns a shard's own moving mean after one more update.

  Raises:
    ValueError: If the squares do not fit the mean, or are already reduced.
  """

  def record(mean, square):
    if mean is None or square is None:
      return mean
    after = decay * mean + (1 - decay) * square
    return jnp.where(counts, after.astype(mean.dtype), mean)

  mean_square = states.own(kept, axes, _CALLER)
  arguments.check_like(squares, mean_square, _CALLER)
  arguments.check_varies_with(squares, mean_square, _CALLER)
  return leaves_lib.tree_map(record, mean_square, squares)


def _kept(state, mean_square, axes):
  """Returns the state after an update.

  Raises:
    ValueError: If the mean differs between shards, but is kept as one.
  """
  after = CompensateDelayState(states.store(mean_square, axes))
  states.check_kept(state, after, _CALLER)
  return after


def _compensate(update, moved, square, lam):
  """Returns the update of a leaf, corrected where its parameter has moved."""
  if update is None or moved is None:
    return update
  factor = (jnp.asarray(lam, square.dtype) * square).astype(moved.dtype)
  nearer = leaves_lib.as_accumulator(update) + factor * moved
  nearer = nearer.astype(leaves_lib.dtype_of(update))
  # A correction of zero may change the sign of a zero, and gives NaN for
  # infinity.
  return jnp.where(moved == 0, update, nearer)
