"""`compressed_shard_update`: sharded updates, sent in fewer bytes."""

from collections.abc import Mapping
import dataclasses
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax

from shard_transforms._src.base import arguments
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import counters
from shard_transforms._src.base import full_rules
from shard_transforms._src.compression import compressed_reduction
from shard_transforms._src.compression import compressor as compressor_lib
from shard_transforms._src.compression import error_feedback
from shard_transforms._src.compression import residuals
from shard_transforms._src.reduction import leaf_sums
from shard_transforms._src.reduction import sharded_reduction
from shard_transforms._src.transforms import sliced_inner

_CALLER = 'compressed_shard_update'


class CompressedShardUpdateState(NamedTuple):
  """State of `compressed_shard_update`.

  Attributes:
    inner_state: State of the inner transformation, as in `ShardUpdateState`.
    mean_state: A `CompressedMeanState`. Its `residual` is of each shard's
      gradients. Its `server_residual` is of the updates of the slice that a
      shard owns, and zero where these are not compressed.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import shard_transforms
    >>> from shard_transforms import compression
    >>> mesh = jax.make_mesh((8,), ('data',))
    >>> tx = compression.compressed_shard_update(
    ...     optax.adam(0.1), 'data', compression.quantize(8))
    >>> state = shard_transforms.init_state(tx, jnp.ones((200, 300)), mesh)
    >>> print(optax.tree_utils.tree_get(state, 'mu').shape)
    (8, 1, 7500)
    >>> print(state.mean_state.residual.shape)
    (8, 200, 300)
  """

  inner_state: optax.OptState
  mean_state: error_feedback.CompressedMeanState

  def full_rules(self) -> Mapping[str, full_rules.FullRule]:
    """Returns how `full_state` joins its slices."""
    return {'inner_state': full_rules.SLICES}


def compressed_shard_update(
    inner: optax.GradientTransformation,
    axis_name: axes_lib.AxisName,
    compressor: compressor_lib.Compressor,
    *,
    update_compressor: compressor_lib.Compressor | None = None,
    min_elements: int = 16384,
    warmup_steps: int = 0,
    seed: int = 0,
) -> optax.GradientTransformationExtraArgs:
  r"""Shards the optimizer (ZeRO-1), and sends fewer bytes.

  It is `shard_update` with the two halves of `compressed_mean` in place of the
  reduce-scatter and the all-gather. With the gradients :math:`u_i` of N
  shards, compressors C and D, and the update :math:`d_j` of `inner` for the
  slice of shard j:

  .. math:: p_i = u_i + e_i, \quad d_j = \text{inner}\Big(\frac1N \sum_i
     C(p_i)_j\Big), \quad u \leftarrow D(d + E)

  The errors :math:`e_i \leftarrow p_i - C(p_i)` and :math:`E_j \leftarrow d_j +
  E_j - D(d_j + E_j)` are kept for the next step. So the sum of all inputs of
  `inner`, plus the mean of :math:`e_i`, is the sum of all mean gradients, and
  the sum of all results, plus E, is the sum of all updates, but for rounding as
  in `compressed_mean`. Without D, updates are sent as they are.

  `inner` must treat each element alone, as for `shard_update`. Weights, leaves
  that are not compressed, and NaN are treated as by `compressed_mean`. Make
  the state with `init_state`, and convert it to another number of shards with
  `resize_state`. A single shard runs `inner` on its gradient itself. Where no
  shard counts, `inner` is given zeros.

  Args:
    inner: The transformation that runs on slices.
    axis_name: The mapped axis, or a sequence of them, as in `shard_update`.
    compressor: How blocks of gradients are compressed.
    update_compressor: How blocks of updates are compressed, or `None` to send
      updates as they are.
    min_elements: The least number of elements of a leaf that is compressed.
    warmup_steps: For how many steps nothing is compressed.
    seed: The seed of compressors that draw random numbers.

  Returns:
    An `optax.GradientTransformationExtraArgs` with a
    `CompressedShardUpdateState`, whose `update` takes the optional extra
    argument `weight`, and passes all others to `inner`.

  Raises:
    NameError: In `init` and `update`, if an axis is not bound.
    TypeError: If an argument is of the wrong kind; in `update`, as in
      `compressed_mean`.
    ValueError: If an argument has a wrong value; in `init` and `update`, if
      `inner` looks across elements; in `update`, as in `compressed_mean`.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> from shard_transforms import compression
    >>> tx = compression.compressed_shard_update(
    ...     optax.sgd(1.0), 'data', compression.group_max(2), min_elements=1)
    >>> def two_steps(grads):
    ...   first, state = tx.update(grads, tx.init(grads))
    ...   second, state = tx.update(jnp.zeros(4), state)
    ...   return first, second
    >>> grads = jnp.array([[4.0, 1.0, 1.0, 2.0], [4.0, 3.0, 1.0, 2.0]])
    >>> first, second = jax.vmap(two_steps, axis_name='data')(grads)
    >>> print(first[0], second[0])
    [-4. -0. -0. -2.] [-0. -2. -1. -0.]

  References:
    Wang et al., ZeRO++: Extremely Efficient Collective Communication for Giant
    Model Training, 2023, https://arxiv.org/abs/2306.10209.
  """
  axes = axes_lib.as_axes(axis_name)
  exchange = _Slices(
      leaf_sums.Reduction(_CALLER, 'mean', axes),
      warmup_steps,
      seed,
      compressor,
      'residual',
      min_elements,
      sharded_reduction.ShardedReduction(_CALLER, 'mean', axes),
      update_compressor,
  )
  inner = arguments.as_inner(inner, _CALLER)
  own = sliced_inner.SlicedInner(inner, exchange.plain)

  def init_fn(params):
    return CompressedShardUpdateState(own.init(params), exchange.start(params))

  def update_fn(updates, state, params=None, *, weight=None, **extra_args):
    arguments.check_state(state, CompressedShardUpdateState, _CALLER)
    exchange.plain.check_mapped()
    slices, mean_state = exchange.scatter(updates, state.mean_state, weight)
    slices, inner_state = own.update(
        slices, state.inner_state, updates, params, extra_args
    )
    updates, mean_state = exchange.gather(slices, updates, mean_state)
    return updates, CompressedShardUpdateState(inner_state, mean_state)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


@dataclasses.dataclass(frozen=True)
class _Slices(compressed_reduction.CompressedReduction):
  """The two halves of a compressed mean, for an optimizer in between.

  Attributes:
    plain: How leaves that are not compressed are scattered and gathered.
    slice_compressor: How rows of slices become bytes for the gather; `None`
      sends them as they are.
  """

  plain: sharded_reduction.ShardedReduction
  slice_compressor: compressor_lib.Compressor | None

  def __post_init__(self):
    super().__post_init__()
    if self.slice_compressor is not None:
      compressor_lib.check(
          self.slice_compressor, self.caller, 'update_compressor'
      )

  def compresses(self, leaf: Any) -> bool:
    """Whether a leaf is compressed; scalars, which are not cut, are not."""
    return super().compresses(leaf) and jnp.ndim(leaf) > 0

  def scatter(
      self,
      updates: optax.Updates,
      state: error_feedback.CompressedMeanState,
      weight: chex.Numeric | None = None,
  ) -> tuple[optax.Updates, error_feedback.CompressedMeanState]:
    """Returns each shard's slices of the (weighted) mean, and the state.

    Raises:
      NameError: If an axis is not bound.
      TypeError: If a leaf carries no gradient, or the weight is not a number.
      ValueError: If a leaf is reduced already, the weight is not a scalar or is
        negative, or the state was made for other parameters or shards.
    """
    share = self._share(updates, weight)
    split, own, held = self._opened(updates, state)
    leaves, others = split.parts(updates)
    counting = error_feedback.Counting.of(share, self.plain.num_shards())

    def compressed(rests):
      exchange = self._exchange(self.compressor, state.step)
      return error_feedback.scatter(values, rests, counting, exchange)

    def plain(rests):
      return self.plain.scatter_leaves(leaves, share), rests

    with jax.named_scope(self.caller):
      values = [counting.weigh(leaf) for leaf in leaves]
      run = self._after_warmup(state.step, compressed, plain, leaves)
      slices, rests = run(held.residual)
      norms = list(map(residuals.next_norm, held.update_norm, values))
      whole_slices = self.plain.scatter_leaves(others, share)
    held = held._replace(residual=rests, update_norm=norms)
    slices = split.replace(updates, slices, whole_slices)
    return slices, self._closed(split, own, held)

  def gather(
      self,
      slices: optax.Updates,
      like: optax.Updates,
      state: error_feedback.CompressedMeanState,
  ) -> tuple[optax.Updates, error_feedback.CompressedMeanState]:
    """Returns the tree that is gathered from slices, and the state.

    Args:
      slices: This shard's slices.
      like: Whole updates.
      state: As `scatter` returns it.
    """
    step = counters.add(state.step, 1)
    if self.slice_compressor is None:
      return self.plain.gather(slices, like), state._replace(step=step)
    split, own, held = self._opened(like, state)
    (kinds, other_kinds), (parts, others) = map(split.parts, (like, slices))

    def compressed(rests):
      exchange = self._exchange(self.slice_compressor, state.step)
      return error_feedback.gather(
          parts, rests, kinds, error_feedback.EVERYONE, exchange
      )

    def plain(rests):
      return self.plain.gather(parts, kinds), rests

    with jax.named_scope(self.caller):
      run = self._after_warmup(state.step, compressed, plain, parts)
      wholes, rests = run(held.server_residual)
      plain_wholes: Any = self.plain.gather(others, other_kinds)
    held = held._replace(step=step, server_residual=rests)
    wholes = split.replace(like, wholes, plain_wholes)
    return wholes, self._closed(split, own, held)
