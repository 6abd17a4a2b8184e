"""`compressed_mean`: the mean over shards in fewer bytes.

For the update u_i of shard i, its residual e_i, the residual E_j of the owner j
of a slice of each leaf, and a compressor C:

  p_i = u_i + e_i,  s_j = mean_i C(p_i)[j] + E_j,  result[j] = C(s_j)
  e_i = p_i - C(p_i),  E_j = s_j - C(s_j)

All results and all residuals add up to the means of all updates, up to rounding
in float32.
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
from shard_transforms._src.compression import compressed_reduction
from shard_transforms._src.compression import compressor as compressor_lib
from shard_transforms._src.compression import residuals
from shard_transforms._src.compression import two_phase
from shard_transforms._src.reduction import leaf_sums

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

  Takes the place of `cross_shard_mean` where the link between shards is slow.
  With the updates :math:`u_i` of N shards and a compressor C, shard i sends
  :math:`C(p_i)`, in parts, to the owners of the slices of each leaf; owner j
  sends :math:`C(s_j)` to all:

  .. math:: p_i = u_i + e_i, \quad s_j = \frac1N \sum_i C(p_i)_j + E_j, \quad
     u \leftarrow C(s)

  Each error is held back and added in the next step, :math:`e_i \leftarrow p_i
  - C(p_i)` and :math:`E_j \leftarrow s_j - C(s_j)`, so that nothing is lost:
  the sum of all results, with :math:`\frac1N \sum_i e_i + E`, is the sum of all
  means, up to rounding in float32. The results of leaves of 16 bits are then
  rounded to 16 bits, and this rounding is not held back. The result is the same
  on all shards, to the bit; with one shard, it is the update itself.

  With the extra argument `weight`, a scalar :math:`w_i` a shard, :math:`u_i`
  stands for :math:`N w_i u_i / \sum_i w_i`. A shard of weight zero sends zeros
  and keeps its residuals; a total of zero gives a zero update, and all shards
  keep theirs. A NaN with a weight enters the residuals and stays there:
  `guard` around the reduction keeps it out.

  Leaves of fewer than `min_elements` elements and complex leaves are reduced as
  by `cross_shard_mean`. Put compression before transformations that keep
  moments. Make the state with `init_state`; it is for this number of shards,
  and `resize_state` converts it to another. It does not depend on the
  compressor, which may change between runs.

  Args:
    axis_name: The mapped axis to reduce over, or a sequence of them.
    compressor: How blocks of updates are compressed, such as `quantize(8)`.
    feedback: `'residual'` to add each error to the next update, or `None` to
      forget errors.
    min_elements: The least number of elements of a leaf that is compressed. The
      slice of each shard is filled up to whole blocks, so that leaves of less
      than a block for each shard gain little, or send more.
    warmup_steps: For how many steps nothing is compressed.
    seed: The seed of compressors that draw random numbers.

  Returns:
    An `optax.GradientTransformationExtraArgs` with a `CompressedMeanState`,
    whose `update` takes the optional extra argument `weight`.

  Raises:
    NameError: In `init` and `update`, if an axis is not bound.
    TypeError: If an argument is of the wrong kind; in `update`, if a leaf is an
      integer or boolean, `weight` is not a real number, or the state is of
      another transformation.
    ValueError: If an argument has a wrong value; in `update`, if a leaf is
      already reduced, `weight` is not a scalar or known to be negative, or the
      state was made for other parameters, another number of shards, or with
      another `feedback` or `min_elements`.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from shard_transforms import compression
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
  reduction = _CompressedMean(
      leaf_sums.Reduction(_CALLER, 'mean', axes_lib.as_axes(axis_name)),
      warmup_steps,
      seed,
      compressor,
      feedback,
      min_elements,
  )

  def update_fn(updates, state, params=None, *, weight=None, **extra_args):
    del extra_args
    reduction.options.check_params(params)
    return reduction.update(updates, state, weight)

  return optax.GradientTransformationExtraArgs(reduction.init, update_fn)


@dataclasses.dataclass(frozen=True)
class _CompressedMean(compressed_reduction.CompressedReduction):
  """The options and the steps of `compressed_mean`."""

  compressor: compressor_lib.Compressor
  feedback: Feedback
  min_elements: int
  kind = residuals.CompressedMeanState
  names = 'residual', 'server_residual'

  def __post_init__(self):
    super().__post_init__()
    compressor_lib.check(self.compressor, _CALLER)
    if self.feedback not in ('residual', None):
      raise ValueError(
          f"`feedback` must be 'residual' or None, got {self.feedback!r}."
      )
    arguments.as_at_least('min_elements', self.min_elements, 1)

  def compresses(self, leaf):
    """Whether a leaf is compressed; complex ones and small ones are not."""
    is_real = jnp.issubdtype(leaves_lib.dtype_of(leaf), jnp.floating)
    return is_real and math.prod(jnp.shape(leaf)) >= self.min_elements

  def _begin(self, param, position):
    del position
    if self.feedback is None:
      return None, None, None
    length = two_phase.slice_length(param.shape, self.num_shards())
    server = jnp.zeros((1,) * (param.ndim - 1) + (length,), jnp.float32)
    return (
        compressed_reduction.no_residual(param),
        compressed_reduction.like_param(server, param),
        compressed_reduction.no_norm(param),
    )

  def _check_kept(self, leaf, kept):
    own, server, _ = kept
    is_held = own is not None
    keeps = bool(self.feedback) and leaf is not None and self.compresses(leaf)
    if leaf is not None and keeps != is_held:
      verb = 'keeps' if is_held else 'lacks'
      raise ValueError(
          f'State of `{_CALLER}` must be made with the same `feedback`'
          f' and `min_elements`, got one that {verb} a residual for a leaf of'
          f' the shape {jnp.shape(leaf)}.'
      )
    num_shards = self.num_shards()
    if is_held and server.size != two_phase.slice_length(own.shape, num_shards):
      raise ValueError(
          f'State of `{_CALLER}` must be made for {num_shards} shards, got'
          f' slices of {server.size} elements of {own.shape}. Make it fit them'
          ' with `shard_transforms.resize_state`.'
      )

  def _compressed_mean(self, values, others, held, share, counting):
    plain = leaf_sums.reduce(others, share, self.options)
    key = jax.random.fold_in(jax.random.key(self.seed), held.step)
    exchange = two_phase.Exchange(self.compressor, self.axes, key)
    pending = [
        counting.keep(0, _plus(value, rest))
        for value, rest in zip(values, held.residual, strict=True)
    ]
    # A shared buffer would vary over all axes over which one of its leaves
    # does.
    groups = collections.defaultdict(list)
    for i, leaf in enumerate(pending):
      groups[axes_lib.varying_axes(leaf)].append(i)
    found = {}
    for some in groups.values():
      parts = _exchanged(
          [pending[i] for i in some],
          [held.server_residual[i] for i in some],
          counting,
          exchange,
      )
      found.update(zip(some, zip(*parts, strict=True), strict=True))
    means, rests, server_rests = zip(
        *(found[i] for i in range(len(pending))), strict=True
    )

    keep, keep_of_any = counting.keep, counting.keep_of_any
    held = held._replace(
        residual=compressed_reduction.map_kept(keep, held.residual, rests),
        server_residual=compressed_reduction.map_kept(
            keep_of_any, held.server_residual, server_rests
        ),
    )
    return list(means), plain, held


def _exchanged(pending, server, counting, exchange):
  """Returns means of leaves, the errors of this shard, and those of owners.

  Args:
    pending: What this shard sends, all varying over the same axes.
    server: The residuals of the slices that it owns; `None` without feedback.
    counting: Whether any shard counts.
    exchange: How leaves are sent.
  """
  slices, sent = exchange.scatter(pending)
  owned = [
      counting.keep_of_any(0, _plus(value, rest))
      for value, rest in zip(slices, server, strict=True)
  ]
  means, server_rests = exchange.gather(owned, [x.shape for x in pending])
  rests = [x - y.astype(x.dtype) for x, y in zip(pending, sent, strict=True)]
  return means, rests, server_rests


def _plus(value, residual):
  return value if residual is None else value + residual
