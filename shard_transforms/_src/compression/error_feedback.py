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
from shard_transforms._src.compression import residuals as residuals_lib
from shard_transforms._src.compression import two_phase
from shard_transforms._src.reduction import collectives
from shard_transforms._src.reduction import leaf_sums


class Held(NamedTuple):
  """What a shard holds back of a list of leaves.

  Attributes:
    residual: Of its own updates, shaped like the leaves, or `None` for each.
    server_residual: Of the mean of the slices that it owns, [1, ..., 1,
      elements], or `None` for each.
    update_norm: The norm of its last update that counted, float32 [].
  """

  residual: list[jax.Array | None]
  server_residual: list[jax.Array | None]
  update_norm: jax.Array


def mean(
    leaves: Sequence[jax.Array],
    held: Held,
    share: leaf_sums.Share,
    exchange: two_phase.Exchange,
) -> tuple[list[jax.Array], Held]:
  """Returns the compressed mean of real leaves, and what is held back next.

  A shard of weight zero sends zeros and holds back what it did; a total weight
  of zero gives zeros.

  Args:
    leaves: Those of a shard, none of them empty.
    held: What it holds back.
    share: How much it counts.
    exchange: How it sends.
  """
  num_shards = axes_lib.size(exchange.axes, 'compression')
  counting = counting_lib.Counting.of(share, num_shards)
  values = [counting.weigh(leaf) for leaf in leaves]
  if num_shards == 1:
    means, after = _flushed(values, held, counting, exchange.axes)
  else:
    means, after = _compressed(values, held, counting, exchange)
  if any(e is not None for e in held.residual):
    norm = counting.keep(residuals_lib.norm(values), held.update_norm)
    after = after._replace(update_norm=norm)
  return [
      x.astype(leaf.dtype) for x, leaf in zip(means, leaves, strict=True)
  ], after


def _flushed(values, held, counting, axes):
  """Returns what one shard alone gives, and that nothing is held back."""
  means, residual, server_residual = [], [], []
  for value, *kept in zip(
      values, held.residual, held.server_residual, strict=True
  ):
    pending = [x for x in kept if x is not None]
    value, pending = counting.flush(value, pending, axes)
    kept = pending or kept
    means.append(value)
    residual.append(kept[0])
    server_residual.append(kept[1])
  return means, held._replace(
      residual=residual, server_residual=server_residual
  )


def _compressed(values, held, counting, exchange):
  """Returns the means, and what is held back, leaf by leaf."""
  means: list = [None] * len(values)
  residual, server_residual = list(means), list(means)
  # A block of leaves that differ over other axes would make all of them differ.
  alike = collections.defaultdict(list)
  for i, value in enumerate(values):
    alike[axes_lib.varying_axes(value)].append(i)
  for positions in alike.values():
    found = _mean_of_alike(
        *(
            [part[i] for i in positions]
            for part in (values, held.residual, held.server_residual)
        ),
        counting,
        exchange,
    )
    for i, m, e, s in zip(positions, *found, strict=True):
      means[i], residual[i], server_residual[i] = m, e, s
  return means, held._replace(
      residual=residual, server_residual=server_residual
  )


def _mean_of_alike(values, residual, server_residual, counting, exchange):
  """Returns the means of leaves that travel together, and what is held back."""
  shapes = [value.shape for value in values]
  pending = [
      value if e is None else counting.only(value + e)
      for value, e in zip(values, residual, strict=True)
  ]
  slices, sent = scatter(pending, exchange)
  slices = [
      counting.only_of_any(part if s is None else part + s.ravel())
      for part, s in zip(slices, server_residual, strict=True)
  ]
  means, own_rest = gather(slices, shapes, exchange)
  residual = [
      None if e is None else counting.keep(p - q.astype(p.dtype), e)
      for p, q, e in zip(pending, sent, residual, strict=True)
  ]
  server_residual = [
      None if s is None else counting.keep_of_any(r.reshape(s.shape), s)
      for r, s in zip(own_rest, server_residual, strict=True)
  ]
  return means, residual, server_residual


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
