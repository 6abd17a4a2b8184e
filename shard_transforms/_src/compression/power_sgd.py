"""`power_sgd`: the mean of matrices over shards, as two thin factors."""

from collections.abc import Mapping
import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from shard_transforms._src.base import arguments
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import per_shard_state
from shard_transforms._src.base import state_rules
from shard_transforms._src.base import wrapper
from shard_transforms._src.compression import low_rank
from shard_transforms._src.compression import residuals
from shard_transforms._src.compression import selective_compression
from shard_transforms._src.reduction import reduction_options

_CALLER = 'power_sgd'


class PowerSGDState(NamedTuple):
  """State of `power_sgd`.

  A leaf that is not compressed has `None` in place of its residual and sketch.

  Attributes:
    step: Number of updates, int32 [].
    residual: What each shard has not yet sent of its updates, a tree like the
      parameters, each leaf [1, ...], in float32 for leaves of fewer bits: a
      leading axis, of length 1 inside the mapped function and of the number of
      shards outside.
    sketch: The right factor of the last mean of each matrix, float32 [1,
      columns, rank], the same on all shards.
    update_norm: The norm of each leaf of each shard's last update that was not
      zero, float32 [1].

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import shard_transforms
    >>> from shard_transforms import compression
    >>> mesh = jax.make_mesh((8,), ('data',))
    >>> tx = compression.power_sgd('data', 2)
    >>> params = {'w': jnp.ones((20, 30)), 'b': jnp.ones(30)}
    >>> state = shard_transforms.init_state(tx, params, mesh)
    >>> print(state.residual['w'].shape, state.sketch['w'].shape)
    (8, 20, 30) (1, 30, 2)
  """

  step: jax.Array
  residual: Any
  sketch: Any
  update_norm: Any

  def resize_rules(
      self, reduction: state_rules.Reduction | None
  ) -> Mapping[str, state_rules.ResizeRule]:
    """Returns how `resize_state` converts its fields."""
    del reduction
    return {
        'residual': state_rules.ResizeRule('mean'),
        'update_norm': state_rules.ResizeRule('maximum'),
    }

  def metric_rules(self) -> Mapping[str, state_rules.MetricRule]:
    """Returns how `metrics` reads its attributes."""
    return {'step': state_rules.MetricRule()}

  def health_problem(self) -> str | None:
    """Returns what `check_health` raises, if a residual is not finite."""
    return residuals.problem(self.residual)

  def error_squares(self) -> tuple[jax.Array | None, jax.Array | None]:
    """Returns the two squares of `compression_error`, per shard."""
    return (
        residuals.squares(self.residual),
        residuals.norm_squares(self.update_norm, self.residual),
    )


def power_sgd(
    axis_name: axes_lib.AxisName,
    rank: int,
    *,
    min_ratio: float = 2.0,
    warmup_steps: int = 0,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
  r"""Replaces matrices by a low-rank mean over all shards of a mapped axis.

  Takes the place of `cross_shard_mean` where the link between shards is slow.
  For each leaf of two axes or more, reshaped to a matrix [n, m] of its first
  axis by all others, with a sketch Q [m, r] from the last step:

  .. math:: M_i = u_i + e_i, \quad P = \operatorname{orth} \Big(\frac1N \sum_i
     M_i Q\Big), \quad Q \leftarrow \frac1N \sum_i M_i^\top P, \quad
     u \leftarrow P Q^\top

  so that :math:`r (n + m)` numbers are sent in place of :math:`n m`, by plain
  sums. What is not sent is held back and added in the next step, :math:`e_i
  \leftarrow M_i - P (M_i^\top P)^\top`: the sum of all results, with the mean
  of :math:`e_i`, is the sum of all means. A constant mean of rank at most r is
  exact from the second step on.

  All other leaves, and those that two factors make smaller by less than
  `min_ratio` because `rank` is not far below both dimensions, are reduced as by
  `cross_shard_mean`, in the same all-reduce as the first factors. The result of
  one shard is its update itself. Weights, and what becomes of a NaN, are as in
  `compressed_mean`.

  Args:
    axis_name: The mapped axis to reduce over, or a sequence of them.
    rank: The number of columns r of the factors, at least 1.
    min_ratio: The least compression ratio at which a matrix is compressed, at
      least 1.
    warmup_steps: For how many steps nothing is compressed.
    seed: What the first sketches are drawn from.

  Returns:
    An `optax.GradientTransformationExtraArgs` with a `PowerSGDState`, whose
    `update` takes the optional extra argument `weight`.

  Raises:
    NameError: In `init` and `update`, if an axis is not bound.
    TypeError: If an argument is of the wrong kind; in `update`, if a leaf is an
      integer or boolean, `weight` is not a real number, or the state is of
      another transformation.
    ValueError: If an argument has a wrong value; in `update`, if a leaf is
      already reduced, `weight` is not a scalar or known to be negative, or the
      state was made for other parameters, another rank or `min_ratio`.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from shard_transforms import compression
    >>> tx = compression.power_sgd('data', 1)
    >>> def two_steps(update):
    ...   _, state = tx.update(update, tx.init(update))
    ...   return tx.update(update, state)[0]
    >>> one_row = jnp.zeros((2, 8, 8)).at[:, 3].set(jnp.arange(8.0))
    >>> updates = jax.vmap(two_steps, axis_name='data')(one_row)
    >>> print(updates[0, 3].round().astype(int))
    [0 1 2 3 4 5 6 7]

  References:
    Vogels et al., PowerSGD: Practical Low-Rank Gradient Compression for
    Distributed Optimization, 2019, https://arxiv.org/abs/1905.13727.
  """
  factors = _Factors(
      reduction_options.ReductionOptions(
          _CALLER, 'mean', axes_lib.as_axes(axis_name)
      ),
      arguments.as_at_least('warmup_steps', warmup_steps, 0),
      arguments.as_int('seed', seed),
      arguments.as_at_least('rank', rank, 1),
      _as_ratio(min_ratio),
  )

  def init_fn(params):
    return factors.start(params)

  def update_fn(updates, state, params=None, *, weight=None, **extra_args):
    del params, extra_args
    wrapper.check_state(state, PowerSGDState, _CALLER)
    return factors(updates, state, weight)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _as_ratio(min_ratio):
  """Returns the least ratio, checked.

  Raises:
    TypeError: If it is no real number.
    ValueError: If it is less than 1.
  """
  min_ratio = arguments.as_positive('min_ratio', min_ratio)
  if min_ratio < 1:
    raise ValueError(f'`min_ratio` must be at least 1, got {min_ratio!r}.')
  return min_ratio


@dataclasses.dataclass(frozen=True)
class _Factors(selective_compression.SelectiveCompression):
  """The options and the steps of `power_sgd`."""

  rank: int
  min_ratio: float

  def compresses(self, leaf):
    """Whether a leaf is a matrix with a large enough compression ratio."""
    if leaf is None or jnp.ndim(leaf) < 2:
      return False
    *rows, columns = jnp.shape(leaf)
    is_real = jnp.issubdtype(leaves_lib.dtype_of(leaf), jnp.floating)
    size = math.prod(rows) * columns
    sent = self.rank * (math.prod(rows) + columns)
    return is_real and size > 0 and size >= self.min_ratio * sent

  def _begin(self, param, position):
    key = jax.random.fold_in(jax.random.key(self.seed), position)
    return low_rank.start(param, self.rank, key)

  def _compressed_mean(self, leaves, others, held, share, step):
    del step
    return low_rank.mean(leaves, others, held, share, self.options)

  def _state(self, step, treedef, held):
    fields = selective_compression.by_field(treedef, held, 3)
    residual, sketch, norm = fields
    residual, norm = per_shard_state.store((residual, norm), self.axes)
    return PowerSGDState(step, residual, sketch, norm)

  def _held(self, updates, treedef, state):
    """Returns what is held back of each leaf, checked.

    Raises:
      TypeError: If a leaf is complex where the parameter is real.
      ValueError: If the state was made for other parameters, another rank or
        `min_ratio`.
    """
    own = state.residual, state.update_norm
    residual, norm = per_shard_state.own(own, self.axes, _CALLER)
    leaves_lib.check_like(updates, residual, _CALLER)
    trees = updates, residual, state.sketch, norm
    held = []
    for leaf, *kept in zip(*map(treedef.flatten_up_to, trees), strict=True):
      is_held = kept[0] is not None
      is_same = is_held and kept[1].shape[-1] == self.rank
      if leaf is not None and self.compresses(leaf) != is_same:
        shape = None if kept[1] is None else kept[1].shape
        raise ValueError(
            f'State of `{_CALLER}` must be made with the same `rank` and'
            f' `min_ratio`, got a sketch of the shape {shape} for a leaf of the'
            f' shape {jnp.shape(leaf)}.'
        )
      held.append(low_rank.Held(*kept) if is_held else None)
    return held
