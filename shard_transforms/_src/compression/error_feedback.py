"""Error feedback: what is not sent in a step is added in the next.

For the update u_i of shard i, its residual e_i, the residual E_j of the owner j
of a slice of each leaf, and a compressor C:

  p_i = u_i + e_i,  s_j = mean_i C(p_i)[j] + E_j,  result[j] = C(s_j)
  e_i = p_i - C(p_i),  E_j = s_j - C(s_j)

so that all results and what is held back add up to the means of all updates.
"""

import collections
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
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


def start(param: jax.Array, num_shards: int) -> Held:
  """Returns what is held back of a leaf before the first step."""
  dtype = leaves_lib.accumulator_dtype(leaves_lib.dtype_of(param))
  length = blocks.slice_length(param.shape, num_shards)
  flat = axes_lib.to_varying(
      jnp.zeros(length, jnp.float32), tuple(axes_lib.varying_axes(param))
  )
  return Held(
      jnp.zeros_like(param, dtype),
      flat.reshape((1,) * (param.ndim - 1) + (length,)),
      residuals.no_norm(param),
  )


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
    leaves: This shard's leaves, none of them empty.
    held: What it holds back of each, or `None` without feedback.
    share: How much it counts.
    exchange: How it sends.
  """
  counting = counting_lib.Counting.of(share, exchange.num_shards())
  values = [counting.weigh(leaf) for leaf in leaves]
  own = [None if kept is None else kept.residual for kept in held]
  slices, own = scatter(values, own, counting, exchange)
  server = [None if kept is None else kept.server_residual for kept in held]
  wholes, server = gather(slices, server, values, counting, exchange)
  after = list(map(_next, held, values, own, server))
  means = [
      whole.astype(leaf.dtype)
      for whole, leaf in zip(wholes, leaves, strict=True)
  ]
  return means, after


def _next(held, value, residual, server_residual):
  if held is None:
    return None
  norm = residuals.next_norm(value, held.update_norm)
  return Held(residual, server_residual, norm)


def scatter(
    values: Sequence[jax.Array],
    held: Sequence[jax.Array | None],
    counting: counting_lib.Counting,
    exchange: two_phase.Exchange,
) -> tuple[list[jax.Array], list[Any]]:
  """Returns each shard's slices of the means, and what it has not sent.

  Args:
    values: Leaves as they enter the mean.
    held: What the shard holds back of each, or `None` without feedback.
    counting: Whether it counts.
    exchange: How it sends.

  Returns:
    Slices [1, ..., 1, elements] of as many axes as the leaves, with zeros
    behind the last element of a leaf; and what is held back next.
  """

  def scatter_alike(positions):
    some = [values[i] for i in positions], [held[i] for i in positions]
    return _scatter(*some, counting, exchange)

  if exchange.num_shards() == 1:
    found = _flush(values, held, counting, exchange)
  else:
    found = _each_alike(values, scatter_alike)
  return [part for part, _ in found], [rest for _, rest in found]


def gather(
    slices: Sequence[jax.Array],
    held: Sequence[jax.Array | None],
    like: Sequence[jax.Array],
    counting: counting_lib.Counting,
    exchange: two_phase.Exchange,
) -> tuple[list[jax.Array], list[Any]]:
  """Returns leaves as all shards decode them, and what this one has not sent.

  Args:
    slices: Those that this shard owns.
    held: What it holds back of each, or `None` without feedback.
    like: Arrays of the shapes of the leaves.
    counting: Whether any shard counts.
    exchange: How it sends.
  """

  def gather_alike(positions):
    some = [slices[i] for i in positions], [held[i] for i in positions]
    shapes = [like[i].shape for i in positions]
    return _gather(*some, shapes, counting, exchange)

  if exchange.num_shards() == 1:
    found = _flush(slices, held, counting, exchange)
  else:
    found = _each_alike(slices, gather_alike)
  return [whole for whole, _ in found], [rest for _, rest in found]


def _each_alike(leaves, fn):
  """Applies `fn` to the positions of leaves that are sent together."""
  # Leaves that vary over different axes are sent apart: a shared buffer would
  # vary over all of these axes.
  alike = collections.defaultdict(list)
  for i, leaf in enumerate(leaves):
    alike[axes_lib.varying_axes(leaf)].append(i)
  found = {}
  for positions in alike.values():
    found.update(zip(positions, fn(positions), strict=True))
  return [found[i] for i in range(len(leaves))]


def _flush(values, held, counting, exchange):
  """Returns the results of a single shard, and residuals of zero."""
  found = []
  for value, rest in zip(values, held, strict=True):
    rests = [] if rest is None else [rest]
    whole, rests = counting.flush(value, rests, exchange.axes)
    found.append((whole, *(rests or [None])))
  return found


def _scatter(values, held, counting, exchange):
  """Returns a slice of each mean, and what is held back of it."""
  num_shards, block = exchange.num_shards(), exchange.compressor.block
  pending = [
      value if rest is None else counting.only(value + rest)
      for value, rest in zip(values, held, strict=True)
  ]
  rows = [x.astype(jnp.float32) for x in pending]
  mean_rows, sent = exchange.scatter(blocks.cut(rows, num_shards, block))
  shapes = [value.shape for value in values]
  lengths = [blocks.slice_length(shape, num_shards) for shape in shapes]
  slices = blocks.join_slices(mean_rows, lengths)
  slices = _unpadded(slices, shapes, exchange)
  found = []
  for value, part, before, whole, x in zip(
      values, slices, held, pending, blocks.join(sent, shapes), strict=True
  ):
    rest = None
    if before is not None:
      rest = counting.still_held(before, whole - x.astype(whole.dtype))
    found.append((part.reshape((1,) * (value.ndim - 1) + (-1,)), rest))
  return found


def _gather(slices, held, shapes, counting, exchange):
  """Returns each whole leaf, and what is held back of a slice of it."""
  pending = [
      counting.only_of_any(part if rest is None else part + rest).ravel()
      for part, rest in zip(slices, held, strict=True)
  ]
  pending = [x.astype(jnp.float32) for x in pending]
  rows = blocks.cut_slices(pending, exchange.compressor.block)
  whole_rows, sent = exchange.gather(rows)
  rests = blocks.join_slices(rows - sent, [len(part) for part in pending])
  rests = _unpadded(rests, shapes, exchange)
  rests = [
      None
      if before is None
      else counting.keep_of_any(rest.reshape(before.shape), before)
      for before, rest in zip(held, rests, strict=True)
  ]
  return zip(blocks.join(whole_rows, shapes), rests, strict=True)


def _unpadded(slices, shapes, exchange):
  owner = collectives.row_index(exchange.axes)
  return [
      blocks.without_padding(part, shape, owner)
      for part, shape in zip(slices, shapes, strict=True)
  ]
