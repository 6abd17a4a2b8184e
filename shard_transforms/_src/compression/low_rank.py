"""Means of matrices as products of two thin factors, with feedback."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.compression import counting as counting_lib
from shard_transforms._src.compression import residuals
from shard_transforms._src.reduction import leaf_sums
from shard_transforms._src.reduction import reduction_options

# Up to this rank, a sum of outer products, which XLA fuses with what follows,
# takes half of the time of a product of matrices on CPU.
_FUSED_RANK = 8


class Held(NamedTuple):
  """What a shard keeps of a leaf between steps.

  Attributes:
    residual: What it has not yet sent of its updates, shaped like the leaf.
    sketch: The right factor of the last mean, float32 [1, columns, rank].
    update_norm: The norm of its last update that was not zero, float32 [].
  """

  residual: jax.Array
  sketch: jax.Array
  update_norm: jax.Array


def start(param: jax.Array, rank: int, key: jax.Array) -> Held:
  """Returns what is kept before the first step, the same on all shards."""
  dtype = leaves_lib.accumulator_dtype(leaves_lib.dtype_of(param))
  sketch = jax.random.normal(key, (1, param.shape[-1], rank), jnp.float32)
  sketch = axes_lib.to_varying(sketch, tuple(axes_lib.varying_axes(param)))
  return Held(jnp.zeros_like(param, dtype), sketch, residuals.no_norm(param))


def mean(
    leaves: Sequence[jax.Array],
    others: Sequence[jax.Array],
    held: Sequence[Held],
    share: leaf_sums.Share,
    options: reduction_options.ReductionOptions,
) -> tuple[list[jax.Array], list[jax.Array], list[Held]]:
  """Returns the means of matrices and of other leaves, and what is kept.

  Args:
    leaves: Real arrays, each seen as a matrix.
    others: Leaves that are reduced uncompressed, in the same all-reduce.
    held: What is kept of each of `leaves`.
    share: How much a shard counts.
    options: How factors and `others` are reduced.
  """
  num_shards = axes_lib.size(options.axes, options.caller)
  counting = counting_lib.Counting.of(share, num_shards)
  values = [counting.weigh(leaf) for leaf in leaves]
  if num_shards == 1:
    means, after = [], []
    for value, kept in zip(values, held, strict=True):
      whole, (zeros,) = counting.flush(value, kept[:1], options.axes)
      means.append(whole)
      after.append(kept._replace(residual=zeros))
    plain = leaf_sums.reduce(others, share, options)
  else:
    matrices = [
        _as_matrix(counting.only(value + kept.residual))
        for value, kept in zip(values, held, strict=True)
    ]
    lefts, plain = _lefts(matrices, others, held, share, options)
    # As rows: XLA on CPU takes twice as long for the columns of `m.T @ p`.
    own_rights = [
        _product(p.T, m) for m, p in zip(matrices, lefts, strict=True)
    ]
    unweighted = leaf_sums.Share(None, None)
    rights = leaf_sums.reduce(own_rights, unweighted, options)
    means, after = [], []
    for m, p, own, q, kept in zip(
        matrices, lefts, own_rights, rights, held, strict=True
    ):
      rest = (m - _of_factors(p, own)).reshape(kept.residual.shape)
      means.append(_of_factors(p, q))
      after.append(
          kept._replace(
              residual=counting.keep(rest, kept.residual),
              sketch=counting.keep_of_any(
                  q.T[None].astype(jnp.float32), kept.sketch
              ),
          )
      )
  norms = [
      residuals.next_norm(value, kept.update_norm)
      for value, kept in zip(values, held, strict=True)
  ]
  after = [
      x._replace(update_norm=norm) for x, norm in zip(after, norms, strict=True)
  ]
  means = [
      x.reshape(leaf.shape).astype(leaf.dtype)
      for x, leaf in zip(means, leaves, strict=True)
  ]
  return means, plain, after


def _lefts(matrices, others, held, share, options):
  """Returns the left factors, the same on all shards, and the other means."""
  sketched = [
      _product(m, _normalized(kept.sketch[0]))
      for m, kept in zip(matrices, held, strict=True)
  ]
  if share.weight is None:
    # All in one all-reduce.
    sums = leaf_sums.reduce([*sketched, *others], share, options)
    sketched, plain = sums[: len(sketched)], sums[len(sketched) :]
  else:
    unweighted = leaf_sums.Share(None, None)
    sketched = leaf_sums.reduce(sketched, unweighted, options)
    plain = leaf_sums.reduce(others, share, options)
  return [jnp.linalg.qr(x)[0] for x in sketched], plain


def _as_matrix(x):
  return x.reshape(-1, x.shape[-1])


def _normalized(sketch):
  """Returns columns scaled to a largest element of 1, with the same span."""
  # The product of two sketches of small gradients would underflow.
  largest = jnp.max(jnp.abs(sketch), axis=0, keepdims=True)
  return sketch / jnp.where(largest > 0, largest, 1)


def _of_factors(left, right):
  """Returns the matrix [n, m] of factors [n, rank] and [rank, m]."""
  if len(right) > _FUSED_RANK:
    return _product(left, right)
  terms = [left[:, i : i + 1] * right[i : i + 1] for i in range(len(right))]
  return sum(terms[1:], terms[0])


def _product(x, y):
  # Shards must subtract exactly what they add, on all platforms.
  return jnp.matmul(x, y, precision=lax.Precision.HIGHEST)
