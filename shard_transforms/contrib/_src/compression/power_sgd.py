"""`power_sgd`: low-rank means of matrices over shards."""

import collections
from collections.abc import Sequence
import dataclasses
import math

import jax
from jax import lax
import jax.numpy as jnp
import optax

from shard_transforms._src.base import arguments
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.reduction import leaf_sums
from shard_transforms.contrib._src.compression import compressed_reduction
from shard_transforms.contrib._src.compression import residuals

_CALLER = 'power_sgd'
# Up to this rank, factors are multiplied as a sum of outer products, which XLA
# fuses with what follows. On CPU it takes half the time of a product: python
# benchmarks/compressors.py. For TPUs it gives half the code, in half the
# compile time: python benchmarks/hardware.py v5e:2x4
_FUSED_RANK = {'cpu': 8, 'tpu': 8}


def power_sgd(
    axis_name: axes_lib.AxisName,
    rank: int,
    *,
    min_ratio: float = 2.0,
    warmup_steps: int = 0,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
  r"""Replaces matrices by a low-rank mean over all shards of a mapped axis.

  Use it instead of `cross_shard_mean` where the link between shards is slow.
  Each leaf with two axes or more is reshaped to a matrix [n, m], whose columns
  are the last axis and whose rows are all other axes. With a sketch Q [m, r]
  from the last step:

  .. math:: M_i = u_i + e_i, \quad
     P = \operatorname{orth} \Big(\frac1N \sum_i M_i Q\Big)

  .. math:: Q \leftarrow \frac1N \sum_i M_i^\top P, \quad
     u \leftarrow P Q^\top

  so that :math:`r (n + m)` elements are sent instead of :math:`n m`, by plain
  sums. The compression error is kept and added in the next step, :math:`e_i
  \leftarrow M_i - P (M_i^\top P)^\top`: the results of all steps plus the mean
  of :math:`e_i` equal the sum of the means of all steps, up to rounding as in
  `compressed_mean`. A constant mean of rank at most r is reproduced, up to
  errors of a few 1e-6 of its largest singular value.

  The last axis must be the outputs, as in kernels of JAX libraries: [height,
  width, inputs, outputs] becomes [height * width * inputs, outputs]. A
  convolution in PyTorch's order, [outputs, inputs, height, width], would have
  `width` columns, too few to compress: store it as `jnp.moveaxis(kernel, 0,
  -1)`, whose matrix is the transpose of the matrix in PyTorch's hook.

  All other leaves are reduced as in `cross_shard_mean`, in the same all-reduce
  as the first factors. These leaves include each matrix whose two factors
  together are not at least `min_ratio` times smaller than the matrix, because
  `rank` is too close to one of its dimensions. With one shard, the result is
  the update itself. Weights and NaN are treated as in `compressed_mean`.

  Args:
    axis_name: The mapped axis to reduce over, or a sequence of axes.
    rank: The number of columns r of the factors, at least 1.
    min_ratio: The minimum compression ratio of a matrix that is compressed, at
      least 1.
    warmup_steps: The number of first steps without compression.
    seed: The seed of the first sketches.

  Returns:
    An `optax.GradientTransformationExtraArgs` with a `PowerSGDState`, whose
    `update` takes the optional extra argument `weight`.

  Raises:
    NameError: In `init` and `update`, if an axis is not bound.
    TypeError: If an argument has the wrong type; in `update`, if a leaf is an
      integer or boolean, `weight` is not a real number, or the state is from
      another transformation.
    ValueError: If an argument has a wrong value; in `update`, if a leaf is
      already reduced, `weight` is not a scalar or is known to be negative, or
      the state was created for other parameters, or with another `rank` or
      `min_ratio`.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from shard_transforms.contrib import compression
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
      leaf_sums.Reduction(_CALLER, 'mean', axes_lib.as_axes(axis_name)),
      warmup_steps,
      seed,
      rank,
      min_ratio,
  )

  def update_fn(updates, state, params=None, *, weight=None, **extra_args):
    del extra_args
    factors.reduction.check_params(params)
    return factors.update(updates, state, weight)

  return optax.GradientTransformationExtraArgs(factors.init, update_fn)


@dataclasses.dataclass(frozen=True)
class _Factors(compressed_reduction.CompressedReduction):
  """The implementation of `power_sgd`."""

  rank: int
  min_ratio: float
  state_type = residuals.PowerSGDState
  residual_names = ('residual',)

  def __post_init__(self):
    super().__post_init__()
    arguments.as_at_least('rank', self.rank, 1)
    if arguments.as_positive('min_ratio', self.min_ratio) < 1:
      raise ValueError(
          f'`min_ratio` must be at least 1, got {self.min_ratio!r}.'
      )

  def compresses(self, leaf):
    """Whether a leaf is a matrix with a sufficient compression ratio."""
    if jnp.ndim(leaf) < 2:
      return False
    *rows, columns = jnp.shape(leaf)
    is_real = jnp.issubdtype(leaves_lib.dtype_of(leaf), jnp.floating)
    size = math.prod(rows) * columns
    sent = self.rank * (math.prod(rows) + columns)
    return is_real and size > 0 and size >= self.min_ratio * sent

  def _init_leaf(self, param, position):
    key = jax.random.fold_in(jax.random.key(self.seed), position)
    shape = 1, param.shape[-1], self.rank
    sketch = jax.random.normal(key, shape, jnp.float32)
    return (
        compressed_reduction.zero_residual(param),
        compressed_reduction.vary_like(sketch, param),
        compressed_reduction.zero_norm(param),
    )

  def _check_leaf_state(self, leaf, leaf_state):
    _, sketch, _ = leaf_state
    has_sketch = sketch is not None and sketch.shape[-1] == self.rank
    if leaf is not None and self.compresses(leaf) != has_sketch:
      raise ValueError(
          f'The state of `{_CALLER}` was created with another `rank` or'
          f' `min_ratio`: for a leaf of the shape {jnp.shape(leaf)}, the shape'
          f' of its sketch is {getattr(sketch, "shape", None)}. Use the options'
          ' that the state was created with, or create a new state with'
          ' `init_state`.'
      )

  def _compressed_mean(self, values, plain, state, share, shard_weight):
    matrices = [
        shard_weight.select(0, value + rest).reshape(-1, value.shape[-1])
        for value, rest in zip(values, state.residual, strict=True)
    ]
    lefts, plain_means = self._lefts(matrices, plain, state.sketch, share)
    # Transposed: XLA on CPU takes twice as long for the columns of `m.T @ p`.
    local_rights = [
        _product(p.T, m) for m, p in zip(matrices, lefts, strict=True)
    ]
    rights = self.reduction.reduce(local_rights)

    def mean(left, right, value):
      return _multiply_factors(left, right).reshape(value.shape)

    def rest(last, matrix, left, right):
      rest = matrix - _multiply_factors(left, right)
      return shard_weight.select(last, rest.reshape(last.shape))

    def sketch(last, right):
      right = right.T[None].astype(jnp.float32)
      return shard_weight.select_if_any(last, right)

    means = list(map(mean, lefts, rights, values))
    state = state._replace(
        residual=list(map(rest, state.residual, matrices, lefts, local_rights)),
        sketch=list(map(sketch, state.sketch, rights)),
    )
    return means, plain_means, state

  def _lefts(self, matrices, plain, sketches, share):
    """Returns the left factors, the same on all shards, and the plain means."""
    sketched = [
        _product(m, _normalize_columns(sketch[0]))
        for m, sketch in zip(matrices, sketches, strict=True)
    ]
    if share.weight is None:
      # A single all-reduce.
      sums = self.reduction.reduce([*sketched, *plain], share)
      sketched, plain_means = sums[: len(sketched)], sums[len(sketched) :]
    else:
      sketched = self.reduction.reduce(sketched)
      plain_means = self.reduction.reduce(plain, share)
    return _orthonormalize(sketched), plain_means


def _normalize_columns(sketch):
  """Scales each column to a largest element of 1."""
  # Without scaling, the product of two sketches of small gradients would
  # underflow. Orthogonal columns from a QR decomposition would change the error
  # in float32 only in the first steps.
  largest = jnp.max(jnp.abs(sketch), axis=0, keepdims=True)
  return sketch / jnp.where(largest > 0, largest, 1)


def _orthonormalize(matrices: Sequence[jax.Array]) -> list[jax.Array]:
  """Returns orthonormal columns with the span of the columns of each matrix."""
  # Matrices of one type in one call: for TPUs, each call is 3 MB of code.
  positions_by_type, columns_of = collections.defaultdict(list), {}
  for i, x in enumerate(matrices):
    positions_by_type[jax.typeof(x)].append(i)
  for positions in positions_by_type.values():
    columns = jnp.linalg.qr(jnp.stack([matrices[i] for i in positions]))[0]
    columns_of.update(zip(positions, columns, strict=True))
  return [columns_of[i] for i in range(len(matrices))]


def _multiply_factors(left, right):
  """Returns the matrix [n, m] of factors [n, rank] and [rank, m]."""
  if len(right) > _FUSED_RANK.get(axes_lib.platform(), 0):
    return _product(left, right)
  terms = [left[:, i : i + 1] * right[i : i + 1] for i in range(len(right))]
  return sum(terms[1:], terms[0])


def _product(x, y):
  # On all platforms, shards must subtract exactly the values that they add.
  return jnp.matmul(x, y, precision=lax.Precision.HIGHEST)
