"""Compressed reduce-scatter of a tree, and all-gather of its slices."""

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax

from shard_transforms._src.base import counters
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.compression import blocks
from shard_transforms._src.compression import compressed_reduction
from shard_transforms._src.compression import compressor as compressor_lib
from shard_transforms._src.compression import counting as counting_lib
from shard_transforms._src.compression import error_feedback
from shard_transforms._src.compression import residuals
from shard_transforms._src.compression import selective_compression
from shard_transforms._src.reduction import collectives
from shard_transforms._src.reduction import sharded_reduction


@dataclasses.dataclass(frozen=True)
class CompressedSlices(compressed_reduction.CompressedReduction):
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
      compressor_lib.check(self.slice_compressor, self.caller)

  def compresses(self, leaf: Any) -> bool:
    """Whether a leaf is compressed; scalars, which are not cut, are not."""
    return super().compresses(leaf) and jnp.ndim(leaf) > 0

  def scatter(
      self,
      updates: optax.Updates,
      state: compressed_reduction.CompressedMeanState,
      weight: chex.Numeric | None = None,
  ) -> tuple[optax.Updates, compressed_reduction.CompressedMeanState]:
    """Returns each shard's slices of the (weighted) mean, and the state.

    Raises:
      NameError: If an axis is not bound.
      TypeError: If a leaf carries no gradient, or the weight is no number.
      ValueError: If a leaf is reduced already, the weight is no scalar or
        negative, or the state was made for other parameters or shards.
    """
    share = self._share(updates, weight)

    def scatter(leaves, others, held):
      slices, held = self._scatter(leaves, held, share, state.step)
      return slices, self.plain.scatter_leaves(others, share), held

    return self._map_leaves(scatter, updates, state, state.step)

  def gather(
      self,
      slices: optax.Updates,
      like: optax.Updates,
      state: compressed_reduction.CompressedMeanState,
  ) -> tuple[optax.Updates, compressed_reduction.CompressedMeanState]:
    """Gathers the tree of which each shard has slices; returns the state too.

    Args:
      slices: This shard's slices.
      like: Whole updates.
      state: As `scatter` returns it.
    """
    step = counters.add(state.step, 1)
    if self.slice_compressor is None:
      return self.plain.gather(slices, like), state._replace(step=step)
    own = jax.tree.leaves(slices, is_leaf=leaves_lib.is_none)
    chosen, others = selective_compression.choose(
        jax.tree.leaves(like, is_leaf=leaves_lib.is_none), self.compresses
    )

    def gather(kinds, other_kinds, held):
      parts = [own[i] for i in chosen]
      wholes, held = self._gather(parts, kinds, held, state.step)
      rest = [own[i] for i in others]
      return wholes, self.plain.gather(rest, other_kinds), held

    return self._map_leaves(gather, like, state, step)

  def _scatter(self, leaves, held, share, step):
    """Returns slices of means, and what is held back."""
    counting = counting_lib.Counting.of(share, self.plain.num_shards())
    values = [counting.weigh(leaf) for leaf in leaves]

    def compressed(rests):
      exchange = self._exchange(self.compressor, step)
      slices, rests = error_feedback.scatter(values, rests, counting, exchange)
      return _cast(slices, leaves), rests

    def plain(rests):
      return self.plain.scatter_leaves(leaves, share), rests

    rests = [kept.residual for kept in held]
    slices, rests = self._after_warmup(step, compressed, plain, rests)
    after = [
        kept._replace(
            residual=rest,
            update_norm=residuals.next_norm(value, kept.update_norm),
        )
        for kept, rest, value in zip(held, rests, values, strict=True)
    ]
    return slices, after

  def _gather(self, slices, like, held, step):
    """Returns whole leaves, and what is held back of slices."""
    everyone = counting_lib.Counting(None, None)

    def compressed(rests):
      exchange = self._exchange(self.slice_compressor, step)
      parts = map(self._without_padding, slices, like)
      wholes, rests = error_feedback.gather(
          list(parts), rests, like, everyone, exchange
      )
      return _cast(wholes, slices), rests

    def plain(rests):
      return self.plain.gather(slices, like), rests

    rests = [kept.server_residual for kept in held]
    wholes, rests = self._after_warmup(step, compressed, plain, rests)
    after = [
        kept._replace(server_residual=rest)
        for kept, rest in zip(held, rests, strict=True)
    ]
    return wholes, after

  def _without_padding(self, part, like):
    """Returns a slice with zeros in its padding, whatever they decode to."""
    owner = collectives.row_index(self.axes)
    flat = blocks.without_padding(part.ravel(), like.shape, owner)
    return flat.reshape(part.shape)


def _cast(leaves, like):
  return [x.astype(y.dtype) for x, y in zip(leaves, like, strict=True)]
