"""`power_sgd`: the mean of matrices over shards, as two thin factors."""

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
from shard_transforms._src.compression import compressed_reduction
from shard_transforms._src.compression import residuals
from shard_transforms._src.reduction import leaf_sums

_CALLER = 'power_sgd'
# Up to this rank, factors are multiplied as a sum of outer products, which XLA
# fuses with what follows. On CPU it takes half the time of a product: python
# benchmarks/compressors.py. For TPUs it is half the code, compiled in half the
# time: python benchmarks/hardware.py v5e:2x4
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

  Takes the place of `cross_shard_mean` where the link between shards is slow.
  For each leaf of two axes or more, seen as a matrix [n, m] whose columns are
  the last axis and whose rows are all others, with a sketch Q [m, r] from the
  last step:

  .. math:: M_i = u_i + e_i, \quad
     P = \operatorname{orth} \Big(\frac1N \sum_i M_i Q\Big)

  .. math:: Q \leftarrow \frac1N \sum_i M_i^\top P, \quad
     u \leftarrow P Q^\top

  so that :math:`r (n + m)` numbers are sent in place of :math:`n m`, by plain
  sums. The error is held back and added in the next step, :math:`e_i
  \leftarrow M_i - P (M_i^\top P)^\top`: the sum of all results, with the mean
  of :math:`e_i`, is the sum of all means, up to rounding as in
  `compressed_mean`. A constant mean of rank at most r comes out as it is, up
  to errors of a few 1e-6 of its largest singular value.

  The last axis must be the outputs, as in kernels of JAX libraries: [height,
  width, inputs, outputs] becomes [height * width * inputs, outputs]. A
  convolution in PyTorch's order, [outputs, inputs, height, width], would have
  `width` columns, too few to compress: keep it as `jnp.moveaxis(kernel, 0,
  -1)`, whose matrix is that of PyTorch's hook, transposed.

  All other leaves, and those that two factors make smaller by less than
  `min_ratio` because `rank` is not far below both dimensions, are reduced as by
  `cross_shard_mean`, in the same all-reduce as the first factors. The result of
  one shard is its update itself. Weights and NaN are treated as by
  `compressed_mean`.

  Args:
    axis_name: The mapped axis to reduce over, or a sequence of them.
    rank: The number of columns r of the factors, at least 1.
    min_ratio: The least compression ratio at which a matrix is compressed, at
      least 1.
    warmup_steps: For how many steps nothing is compressed.
    seed: The seed of the first sketches.

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
      leaf_sums.Reduction(_CALLER, 'mean', axes_lib.as_axes(axis_name)),
      warmup_steps,
      seed,
      rank,
      min_ratio,
  )

  def update_fn(updates, state, params=None, *, weight=None, **extra_args):
    del extra_args
    factors.options.check_params(params)
    return factors.update(updates, state, weight)

  return optax.GradientTransformationExtraArgs(factors.init, update_fn)


@dataclasses.dataclass(frozen=True)
class _Factors(compressed_reduction.CompressedReduction):
  """The options and the steps of `power_sgd`."""

  rank: int
  min_ratio: float
  kind = residuals.PowerSGDState
  names = ('residual',)

  def __post_init__(self):
    super().__post_init__()
    arguments.as_at_least('rank', self.rank, 1)
    if arguments.as_positive('min_ratio', self.min_ratio) < 1:
      raise ValueError(
          f'`min_ratio` must be at least 1, got {self.min_ratio!r}.'
      )

  def compresses(self, leaf):
    """Whether a leaf is a matrix with a large enough compression ratio."""
    if jnp.ndim(leaf) < 2:
      return False
    *rows, columns = jnp.shape(leaf)
    is_real = jnp.issubdtype(leaves_lib.dtype_of(leaf), jnp.floating)
    size = math.prod(rows) * columns
    sent = self.rank * (math.prod(rows) + columns)
    return is_real and size > 0 and size >= self.min_ratio * sent

  def _begin(self, param, position):
    key = jax.random.fold_in(jax.random.key(self.seed), position)
    shape = 1, param.shape[-1], self.rank
    sketch = jax.random.normal(key, shape, jnp.float32)
    return (
        compressed_reduction.no_residual(param),
        compressed_reduction.like_param(sketch, param),
        compressed_reduction.no_norm(param),
    )

  def _check_kept(self, leaf, kept):
    _, sketch, _ = kept
    is_same = sketch is not None and sketch.shape[-1] == self.rank
    if leaf is not None and self.compresses(leaf) != is_same:
      raise ValueError(
          f'State of `{_CALLER}` must be made with the same `rank` and'
          ' `min_ratio`, got a sketch of the shape'
          f' {getattr(sketch, "shape", None)} for a leaf of the shape'
          f' {jnp.shape(leaf)}.'
      )

  def _compressed_mean(self, values, others, held, share, counting):
    matrices = [
        counting.keep(0, value + rest).reshape(-1, value.shape[-1])
        for value, rest in zip(values, held.residual, strict=True)
    ]
    lefts, plain = self._lefts(matrices, others, held.sketch, share)
    # As rows: XLA on CPU takes twice as long for the columns of `m.T @ p`.
    own_rights = [
        _product(p.T, m) for m, p in zip(matrices, lefts, strict=True)
    ]
    rights = leaf_sums.reduce(own_rights, leaf_sums.UNWEIGHTED, self.options)

    def mean(left, right, value):
      return _of_factors(left, right).reshape(value.shape)

    def rest(before, matrix, left, right):
      rest = matrix - _of_factors(left, right)
      return counting.keep(before, rest.reshape(before.shape))

    def sketch(before, right):
      right = right.T[None].astype(jnp.float32)
      return counting.keep_of_any(before, right)

    means = list(map(mean, lefts, rights, values))
    held = held._replace(
        residual=list(map(rest, held.residual, matrices, lefts, own_rights)),
        sketch=list(map(sketch, held.sketch, rights)),
    )
    return means, plain, held

  def _lefts(self, matrices, others, sketches, share):
    """Returns the left factors, the same on all shards, and other means."""
    sketched = [
        _product(m, _normalized(sketch[0]))
        for m, sketch in zip(matrices, sketches, strict=True)
    ]
    if share.weight is None:
      # All in one all-reduce.
      sums = leaf_sums.reduce([*sketched, *others], share, self.options)
      sketched, plain = sums[: len(sketched)], sums[len(sketched) :]
    else:
      sketched = leaf_sums.reduce(sketched, leaf_sums.UNWEIGHTED, self.options)
      plain = leaf_sums.reduce(others, share, self.options)
    return _orthogonal(sketched), plain


def _normalized(sketch):
  """Returns columns scaled to a largest element of 1, with the same span."""
  # Unscaled, the product of two sketches of small gradients would underflow.
  # Orthogonal columns, by a QR decomposition, change the error of float32 only
  # in the first steps.
  largest = jnp.max(jnp.abs(sketch), axis=0, keepdims=True)
  return sketch / jnp.where(largest > 0, largest, 1)


def _orthogonal(matrices: Sequence[jax.Array]) -> list[jax.Array]:
  """Returns orthogonal columns that span those of each matrix."""
  # Those of one type together: for TPUs, each call is 3 MB of code.
  of_type, found = collections.defaultdict(list), {}
  for i, x in enumerate(matrices):
    of_type[jax.typeof(x)].append(i)
  for places in of_type.values():
    columns = jnp.linalg.qr(jnp.stack([matrices[i] for i in places]))[0]
    found.update(zip(places, columns, strict=True))
  return [found[i] for i in range(len(matrices))]


def _of_factors(left, right):
  """Returns the matrix [n, m] of factors [n, rank] and [rank, m]."""
  if len(right) > _FUSED_RANK.get(axes_lib.platform(), 0):
    return _product(left, right)
  terms = [left[:, i : i + 1] * right[i : i + 1] for i in range(len(right))]
  return sum(terms[1:], terms[0])


def _product(x, y):
  # Shards must subtract exactly what they add, on all platforms.
  return jnp.matmul(x, y, precision=lax.Precision.HIGHEST)
