"""`compressed_mean`: the mean over shards in fewer bytes, with error feedback.

Let u_i be the update of shard i, e_i its residual, E_j the residual of owner j
of a slice of each leaf, and C a compressor:

  p_i = u_i + e_i,  s_j = mean_i C(p_i)[j] + E_j,  result[j] = C(s_j)
  e_i = p_i - C(p_i),  E_j = s_j - C(s_j)

The results of all steps and the residuals add up to the means of the updates of
all steps, up to rounding in float32.
"""

import collections
import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp
import optax

from shard_transforms._src.base import arguments
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.reduction import leaf_sums
from shard_transforms.contrib._src.compression import compressed_reduction
from shard_transforms.contrib._src.compression import (
    compressor as compressor_lib,
)
from shard_transforms.contrib._src.compression import residuals
from shard_transforms.contrib._src.compression import two_phase

_CALLER = 'compressed_mean'
Feedback = Literal['residual'] | None


def compressed_mean(
    axis_name: axes_lib.AxisName,
    compressor: compressor_lib.Compressor,
    *,
    feedback: Feedback = 'residual',
    min_elements: int = 16384,
    warmup_steps: int = 0,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
  r"""Replaces updates by a compressed mean over all shards of a mapped axis.

  Use it instead of `cross_shard_mean` where the link between shards is slow.
  Let :math:`u_i` be the updates of N shards and C a compressor. Shard i sends
  :math:`C(p_i)`, in parts, to the owners of the slices of each leaf, and owner
  j sends :math:`C(s_j)` to all shards:

  .. math:: p_i = u_i + e_i, \quad s_j = \frac1N \sum_i C(p_i)_j + E_j, \quad
     u \leftarrow C(s)

  Each compression error is kept and added in the next step, :math:`e_i
  \leftarrow p_i - C(p_i)` and :math:`E_j \leftarrow s_j - C(s_j)`, so that
  nothing is lost: the results of all steps plus :math:`\frac1N \sum_i e_i + E`
  equal the sum of the means of all steps, up to rounding in float32. The
  results of 16-bit leaves are then rounded to 16 bits, without feedback. The
  result has the same bits on all shards. With one shard, it is the update
  itself.

  With the extra argument `weight`, one scalar :math:`w_i` per shard,
  :math:`u_i` stands for :math:`N w_i u_i / \sum_i w_i`. A shard of weight zero
  sends zeros and keeps its residuals. If the total weight is zero, the update
  is zero and all shards keep their residuals. A NaN on a shard whose weight is
  not zero enters the residuals and stays there; wrap the reduction in `guard`
  to keep it out.

  Leaves with fewer than `min_elements` elements and complex leaves are reduced
  as in `cross_shard_mean`. Put compression before transformations that keep
  moments. Create the state with `init_state`; it belongs to this number of
  shards, and `resize_state` converts it to another. It does not depend on the
  compressor, which may change between runs.

  Args:
    axis_name: The mapped axis to reduce over, or a sequence of axes.
    compressor: The compressor of blocks of updates, such as `quantize(8)`.
    feedback: `'residual'` to add each error to the next update, or `None` to
      forget errors.
    min_elements: The minimum number of elements of a leaf that is compressed.
      The slice of each shard is padded to whole blocks, so that compressing a
      leaf with less than one block per shard saves little, or sends more.
    warmup_steps: The number of first steps without compression.
    seed: The seed of compressors that draw random numbers.

  Returns:
    An `optax.GradientTransformationExtraArgs` with a `CompressedMeanState`,
    whose `update` takes the optional extra argument `weight`.

  Raises:
    NameError: In `init` and `update`, if an axis is not bound.
    TypeError: If an argument has the wrong type; in `update`, if a leaf is an
      integer or boolean, `weight` is not a real number, or the state is from
      another transformation.
    ValueError: If an argument has a wrong value; in `update`, if a leaf is
      already reduced, `weight` is not a scalar or is known to be negative, or
      the state was created for other parameters, another number of shards, or
      with another `feedback` or `min_elements`.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from shard_transforms.contrib import compression
    >>> tx = compression.compressed_mean(
    ...     'data', compression.top_k(0.5, block=2), min_elements=1)
    >>> def two_steps(update):
    ...   first, state = tx.update(update, tx.init(update))
    ...   second, state = tx.update(jnp.zeros(4), state)
    ...   return first, second
    >>> updates = jnp.array([[4.0, 1.0, 1.0, 2.0], [4.0, 3.0, 1.0, 2.0]])
    >>> first, second = jax.vmap(two_steps, axis_name='data')(updates)
    >>> print(first[0], second[0])
    [4. 0. 0. 2.] [0. 2. 1. 0.]

  References:
    Karimireddy et al., Error Feedback Fixes SignSGD and other Gradient
    Compression Schemes, 2019, https://arxiv.org/abs/1901.09847.
    Tang et al., DoubleSqueeze: Parallel Stochastic Gradient Descent with
    Double-pass Error-Compensated Compression, 2019,
    https://arxiv.org/abs/1905.05957.
  """
  compressed = _CompressedMean(
      leaf_sums.Reduction(_CALLER, 'mean', axes_lib.as_axes(axis_name)),
      warmup_steps,
      seed,
      compressor,
      feedback,
      min_elements,
  )

  def update_fn(updates, state, params=None, *, weight=None, **extra_args):
    del extra_args
    compressed.reduction.check_params(params)
    return compressed.update(updates, state, weight)

  return optax.GradientTransformationExtraArgs(compressed.init, update_fn)


@dataclasses.dataclass(frozen=True)
class _CompressedMean(compressed_reduction.CompressedReduction):
  """The implementation of `compressed_mean`."""

  compressor: compressor_lib.Compressor
  feedback: Feedback
  min_elements: int
  state_type = residuals.CompressedMeanState
  residual_names = 'residual', 'server_residual'

  def __post_init__(self):
    super().__post_init__()
    compressor_lib.check(self.compressor, _CALLER)
    if self.feedback not in ('residual', None):
      raise ValueError(
          f"`feedback` must be 'residual' or None, got {self.feedback!r}."
      )
    arguments.as_at_least('min_elements', self.min_elements, 1)

  def compresses(self, leaf):
    """Whether a leaf is compressed: a real leaf that is large enough."""
    is_real = jnp.issubdtype(leaves_lib.dtype_of(leaf), jnp.floating)
    return is_real and math.prod(jnp.shape(leaf)) >= self.min_elements

  def _init_leaf(self, param, position):
    del position
    if self.feedback is None:
      return None, None, None
    length = two_phase.slice_length(param.shape, self.num_shards())
    server = jnp.zeros((1,) * (param.ndim - 1) + (length,), jnp.float32)
    return (
        compressed_reduction.zero_residual(param),
        compressed_reduction.vary_like(server, param),
        compressed_reduction.zero_norm(param),
    )

  def _check_leaf_state(self, leaf, leaf_state):
    residual, server, _ = leaf_state
    has_residual = residual is not None
    needs_residual = (
        bool(self.feedback) and leaf is not None and self.compresses(leaf)
    )
    if leaf is not None and needs_residual != has_residual:
      verb = 'has' if has_residual else 'lacks'
      raise ValueError(
          f'The state of `{_CALLER}` {verb} a residual for a leaf of the shape'
          f' {jnp.shape(leaf)}, so it was created with another `feedback` or'
          ' `min_elements`. Use the options that the state was created with,'
          ' or create a new state with `init_state`.'
      )
    num_shards = self.num_shards()
    if has_residual and server.size != two_phase.slice_length(
        residual.shape, num_shards
    ):
      raise ValueError(
          f'The state of `{_CALLER}` was created for another number of shards:'
          f' it has {server.size} elements per slice of a leaf of the shape'
          f' {residual.shape[1:]}, which do not fit {num_shards} shards.'
          ' Convert the state with `shard_transforms.resize_state`.'
      )

  def _compressed_mean(self, values, plain, state, share, shard_weight):
    plain_means = self.reduction.reduce(plain, share)
    key = jax.random.fold_in(jax.random.key(self.seed), state.step)
    exchange = two_phase.Exchange(self.compressor, self.axes, key)
    pending = [
        shard_weight.select(0, _plus(value, residual))
        for value, residual in zip(values, state.residual, strict=True)
    ]
    # A shared buffer would vary over every axis over which one of its leaves
    # varies.
    groups = collections.defaultdict(list)
    for i, leaf in enumerate(pending):
      groups[axes_lib.varying_axes(leaf)].append(i)
    results = {}
    for positions in groups.values():
      parts = _exchange(
          [pending[i] for i in positions],
          [state.server_residual[i] for i in positions],
          shard_weight,
          exchange,
      )
      results.update(zip(positions, zip(*parts, strict=True), strict=True))
    means, next_residuals, next_server_residuals = zip(
        *(results[i] for i in range(len(pending))), strict=True
    )

    select, select_if_any = shard_weight.select, shard_weight.select_if_any
    state = state._replace(
        residual=compressed_reduction.map_present(
            select, state.residual, next_residuals
        ),
        server_residual=compressed_reduction.map_present(
            select_if_any, state.server_residual, next_server_residuals
        ),
    )
    return list(means), plain_means, state


def _exchange(pending, server, shard_weight, exchange):
  """Returns the means, this shard's errors, and its errors as an owner.

  Args:
    pending: The leaves that this shard sends, all varying over the same axes.
    server: The residuals of the owned slices; `None` without feedback.
    shard_weight: The weight of this shard.
    exchange: The exchange of the leaves.
  """
  slices, sent = exchange.scatter(pending)
  owned = [
      shard_weight.select_if_any(0, _plus(value, residual))
      for value, residual in zip(slices, server, strict=True)
  ]
  means, next_server_residuals = exchange.gather(
      owned, [x.shape for x in pending]
  )
  next_residuals = [
      x - y.astype(x.dtype) for x, y in zip(pending, sent, strict=True)
  ]
  return means, next_residuals, next_server_residuals


def _plus(value, residual):
  return value if residual is None else value + residual
