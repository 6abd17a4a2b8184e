"""The arithmetic of feedback: what is not sent in a step is added in the next.

Of the update u_i of shard i, with what it and the owners j of the slices of
each leaf have held back, e_i and E_j, and a compressor C:

  p_i = u_i + e_i,  s_j = mean_i C(p_i)[j] + E_j,  result[j] = C(s_j)
  e_i = p_i - C(p_i),  E_j = s_j - C(s_j)

so that all results and what is held back add up to the means of all updates.
"""

import collections
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.compression import blocks
from shard_transforms._src.compression import counting as counting_lib
from shard_transforms._src.compression import residuals
from shard_transforms._src.compression import two_phase
from shard_transforms._src.reduction import collectives
from shard_transforms._src.reduction import leaf_sums


class Held(NamedTuple):
  """What a shard holds back of a leaf, between steps.

  Attributes:
    residual: Of its own updates, shaped like the leaf.
    server_residual: Of the mean of the slice that it owns, [1, ..., 1,
      elements].
    update_norm: The norm of its last update that was not zero, float32 [].
  """

  residual: jax.Array
  server_residual: jax.Array
  update_norm: jax.Array


def mean(
    leaves: Sequence[jax.Array],
    held: Sequence[Held | None],
    share: leaf_sums.Share,
    exchange: two_phase.Exchange,
) -> tuple[list[jax.Array], list[Held | None]]:
  """Returns the compressed mean of real leaves, and what is held back next.

  A shard of weight zero sends zeros and holds back what it did; a total weight
  of zero gives zeros.

  Args:
    leaves: Those of a shard, none of them empty.
    held: What it holds back of each, or `None` without feedback.
    share: How much it counts.
    exchange: How it sends.
  """
  num_shards = axes_lib.size(exchange.axes, 'compression')
  counting = counting_lib.Counting.of(share, num_shards)
  values = [counting.weigh(leaf) for leaf in leaves]
  reduced: dict[int, tuple[jax.Array, Held | None]] = {}
  if num_shards == 1:
    for i, value in enumerate(values):
      reduced[i] = _flushed(value, held[i], counting, exchange.axes)
  else:
    # Blocks of leaves that differ over other axes must not travel together:
    # all of them would differ.
    alike = collections.defaultdict(list)
    for i, value in enumerate(values):
      alike[axes_lib.varying_axes(value)].append(i)
    for positions in alike.values():
      some = [values[i] for i in positions], [held[i] for i in positions]
      found = _compressed(*some, counting, exchange)
      reduced.update(zip(positions, found, strict=True))
  means = [reduced[i][0].astype(leaf.dtype) for i, leaf in enumerate(leaves)]
  return means, [reduced[i][1] for i in range(len(leaves))]


def _flushed(value, held, counting, axes):
  """Returns what one shard alone gives, and that nothing is held back."""
  if held is None:
    return counting.flush(value, (), axes)[0], None
  whole, (residual, server_residual) = counting.flush(value, held[:2], axes)
  norm = residuals.next_norm(value, held.update_norm)
  return whole, Held(residual, server_residual, norm)


def _compressed(values, held, counting, exchange):
  """Returns the mean of each leaf, and what is held back of it."""
  pending = [
      value if kept is None else counting.only(value + kept.residual)
      for value, kept in zip(values, held, strict=True)
  ]
  slices, sent = scatter(pending, exchange)
  slices = [
      counting.only_of_any(
          part if kept is None else part + kept.server_residual.ravel()
      )
      for part, kept in zip(slices, held, strict=True)
  ]
  shapes = [value.shape for value in values]
  means, own_rest = gather(slices, shapes, exchange)
  after = []
  for i, kept in enumerate(held):
    if kept is None:
      after.append(None)
      continue
    rest = pending[i] - sent[i].astype(pending[i].dtype)
    server_rest = own_rest[i].reshape(kept.server_residual.shape)
    after.append(
        Held(
            counting.keep(rest, kept.residual),
            counting.keep_of_any(server_rest, kept.server_residual),
            residuals.next_norm(values[i], kept.update_norm),
        )
    )
  return list(zip(means, after, strict=True))


def scatter(
    leaves: Sequence[jax.Array], exchange: two_phase.Exchange
) -> tuple[list[jax.Array], list[jax.Array]]:
  """Returns each shard's slices of the compressed means, and what it has sent.

  Args:
    leaves: Arrays that vary over the same axes.
    exchange: How they are sent.

  Returns:
    Slices, float32 [elements], with zeros behind the last element of a leaf;
    and what this shard has sent, float32 of the shapes of the leaves.
  """
  num_shards = axes_lib.size(exchange.axes, 'compression')
  block = exchange.compressor.block
  shapes = [leaf.shape for leaf in leaves]
  rows = blocks.cut(
      [leaf.astype(jnp.float32) for leaf in leaves], num_shards, block
  )
  mean_rows, sent = exchange.scatter(rows)
  lengths = [blocks.slice_length(shape, num_shards) for shape in shapes]
  slices = blocks.join_slices(mean_rows, lengths)
  return _unpadded(slices, shapes, exchange), blocks.join(sent, shapes)


def gather(
    slices: Sequence[jax.Array],
    shapes: Sequence[tuple[int, ...]],
    exchange: two_phase.Exchange,
) -> tuple[list[jax.Array], list[jax.Array]]:
  """Returns leaves as all shards decode them, and what this one has not sent.

  Args:
    slices: Those that this shard owns, float32 [elements].
    shapes: The shapes of the leaves.
    exchange: How they are sent.
  """
  rows = blocks.cut_slices(slices, exchange.compressor.block)
  whole, sent = exchange.gather(rows)
  rest = blocks.join_slices(rows - sent, [len(part) for part in slices])
  return blocks.join(whole, shapes), _unpadded(rest, shapes, exchange)


def _unpadded(slices, shapes, exchange):
  owner = collectives.row_index(exchange.axes)
  return [
      blocks.without_padding(part, shape, owner)
      for part, shape in zip(slices, shapes, strict=True)
  ]
