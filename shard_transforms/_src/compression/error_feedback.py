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
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import weights
from shard_transforms._src.compression import blocks
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
  counting = Counting.of(share, exchange)
  values = [counting.weigh(as_accumulator(leaf)) for leaf in leaves]
  if axes_lib.size(exchange.axes, 'compression') == 1:
    means, after = _flushed(values, held, counting)
  else:
    means, after = _compressed(values, held, counting, exchange)
  if any(e is not None for e in held.residual):
    norm = counting.keep(norm_of(values), held.update_norm)
    after = after._replace(update_norm=norm)
  return [
      x.astype(leaf.dtype) for x, leaf in zip(means, leaves, strict=True)
  ], after


class Counting(NamedTuple):
  """Whether a shard counts, and how much.

  Attributes:
    factor: What its updates are multiplied by in an unweighted mean, float32
      [], or `None` where all shards count the same.
    is_any: Whether any shard counts, bool [], or `None`.
  """

  factor: jax.Array | None
  is_any: jax.Array | None

  @classmethod
  def of(
      cls, share: leaf_sums.Share, exchange: two_phase.Exchange
  ) -> 'Counting':
    """Returns that of a share."""
    if share.weight is None or share.total is None:
      return cls(None, None)
    num_shards = axes_lib.size(exchange.axes, 'compression')
    total = weights.safe_divisor(share.total)
    return cls(share.weight * num_shards / total, share.total > 0)

  def weigh(self, x: jax.Array) -> jax.Array:
    """Returns an update as it enters an unweighted mean."""
    return weights.weighing(self.factor)(x)

  def only(self, x: jax.Array) -> jax.Array:
    """Returns `x`, or zeros for a shard that does not count."""
    if self.factor is None:
      return x
    return leaves_lib.zeroing_unless(self.factor > 0)(x)

  def only_of_any(self, x: jax.Array) -> jax.Array:
    """Returns `x`, or zeros where no shard counts."""
    return x if self.is_any is None else leaves_lib.zeroing_unless(self.is_any)(x)

  def keep(self, after: jax.Array, before: jax.Array) -> jax.Array:
    """Returns `after`, or `before` for a shard that does not count."""
    if self.factor is None:
      return after
    return jnp.where(self.factor > 0, after, before)

  def keep_of_any(self, after: jax.Array, before: jax.Array) -> jax.Array:
    """Returns `after`, or `before` where no shard counts."""
    if self.is_any is None:
      return after
    return jnp.where(self.is_any, after, before)


def as_accumulator(leaf: jax.Array) -> jax.Array:
  """Returns a leaf in the dtype in which it is held back."""
  leaf = jnp.asarray(leaf)
  return leaf.astype(leaves_lib.accumulator_dtype(leaf.dtype))


def norm_of(values: Sequence[jax.Array]) -> jax.Array:
  """Returns the norm of all elements of some arrays, float32 []."""
  squares = [jnp.sum(jnp.square(x)).astype(jnp.float32) for x in values]
  return jnp.sqrt(sum(squares, jnp.float32(0)))


def _flushed(values, held, counting):
  """Returns what one shard alone gives: its update, and all it has held back."""
  means, residual, server_residual = [], [], []
  for v, e, s in zip(values, held.residual, held.server_residual, strict=True):
    if e is not None:
      pending = counting.only(e + s.reshape(e.shape))
      # Adding zero would turn a -0 into a 0.
      v = jnp.where(pending == 0, v, v + pending)
      e = counting.keep(jnp.zeros_like(e), e)
      s = counting.keep(jnp.zeros_like(s), s)
    means.append(v)
    residual.append(e)
    server_residual.append(s)
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
