"""Error feedback: the part that a step does not send is added to the next.

For the update u_i of shard i, its residual e_i, the residual E_j of the owner j
of a slice of each leaf, and a compressor C:

  p_i = u_i + e_i,  s_j = mean_i C(p_i)[j] + E_j,  result[j] = C(s_j)
  e_i = p_i - C(p_i),  E_j = s_j - C(s_j)

so that all results and all that is held back add up to the means of all
updates, but for rounding in float32.
"""

import collections
from collections.abc import Hashable
from collections.abc import Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import weights
from shard_transforms._src.compression import residuals
from shard_transforms._src.compression import two_phase
from shard_transforms._src.reduction import collectives
from shard_transforms._src.reduction import leaf_sums


class Held(NamedTuple):
  """The parts of a leaf that a shard has not sent yet.

  Attributes:
    residual: The unsent part of its own updates, shaped like the leaf.
    server_residual: The unsent part of the mean of the slice that it owns, [1,
      ..., 1, elements].
    update_norm: The norm of its last update that was not zero, float32 [].
  """

  residual: jax.Array
  server_residual: jax.Array
  update_norm: jax.Array


class Counting(NamedTuple):
  """Whether a shard counts in a step, and how much.

  Attributes:
    factor: The number by which its updates are multiplied in an unweighted
      mean, float32 [], or `None` where all shards count the same.
    is_any: Whether any shard counts, bool [], or `None`.
  """

  factor: jax.Array | None
  is_any: jax.Array | None

  @classmethod
  def of(cls, share: leaf_sums.Share, num_shards: int) -> 'Counting':
    """Returns the counting of a shard with this share."""
    if share.weight is None or share.total is None:
      return EVERYONE
    total = weights.safe_divisor(share.total)
    return cls(share.weight * num_shards / total, share.total > 0)

  def weigh(self, leaf: jax.Array) -> jax.Array:
    """Returns a leaf as it enters an unweighted mean, in 32 bits or more."""
    return weights.weighing(self.factor)(leaves_lib.as_accumulator(leaf))

  def keep(self, after: jax.Array, before: chex.Numeric) -> jax.Array:
    """Returns `after`, or `before` for a shard that does not count."""
    if self.factor is None:
      return after
    return jnp.where(self.factor > 0, after, before)

  def keep_of_any(self, after: jax.Array, before: chex.Numeric) -> jax.Array:
    """Returns `after`, or `before` where no shard counts."""
    if self.is_any is None:
      return after
    return jnp.where(self.is_any, after, before)

  def flush(
      self,
      value: jax.Array,
      held: Sequence[jax.Array],
      axes: tuple[Hashable, ...],
  ) -> tuple[jax.Array, list[jax.Array]]:
    """Returns the result of a single shard: the leaf and all it held back.

    Args:
      value: The leaf, as `weigh` returns it.
      held: The residuals of the leaf, as arrays of as many elements.
      axes: The mapped axes, on which there is one shard.

    Returns:
      The value with all that was held back, and zeros in place of that.
    """
    for x in held:
      pending = self.keep(x.reshape(value.shape), 0)
      # Adding zero would turn a -0 into a 0.
      value = jnp.where(pending == 0, value, value + pending)
    # Unlike a sum, this keeps the sign of a zero too.
    whole = collectives.gather(value, axes).reshape(value.shape)
    return whole, [self.keep(jnp.zeros_like(x), x) for x in held]


# All shards count the same.
EVERYONE = Counting(None, None)


def start(param: jax.Array, num_shards: int) -> Held:
  """Returns the residuals of a leaf before the first step: zeros."""
  dtype = leaves_lib.accumulator_dtype(leaves_lib.dtype_of(param))
  length = two_phase.slice_length(param.shape, num_shards)
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
  """Returns the compressed mean of real leaves, and their next residuals.

  A shard of weight zero sends zeros and keeps its residuals; a total weight of
  zero gives zeros.

  Args:
    leaves: This shard's leaves, none of them empty.
    held: The residuals of each, or `None` without feedback.
    share: How much it counts.
    exchange: How it sends.
  """
  counting = Counting.of(share, exchange.num_shards())
  values = [counting.weigh(leaf) for leaf in leaves]
  own = [None if kept is None else kept.residual for kept in held]
  slices, own = scatter(values, own, counting, exchange)
  server = [None if kept is None else kept.server_residual for kept in held]
  wholes, server = gather(slices, server, values, counting, exchange)
  after = [
      None
      if kept is None
      else Held(rest, server_rest, residuals.next_norm(value, kept.update_norm))
      for kept, value, rest, server_rest in zip(
          held, values, own, server, strict=True
      )
  ]
  means = [
      whole.astype(leaf.dtype)
      for whole, leaf in zip(wholes, leaves, strict=True)
  ]
  return means, after


def scatter(
    values: Sequence[jax.Array],
    held: Sequence[jax.Array | None],
    counting: Counting,
    exchange: two_phase.Exchange,
) -> tuple[list[jax.Array], list[Any]]:
  """Returns each shard's slices of the means, and its next residuals.

  Args:
    values: Leaves as they enter the mean.
    held: The residual of each, or `None` without feedback.
    counting: Whether it counts.
    exchange: How it sends.

  Returns:
    Slices [1, ..., 1, elements] of as many axes as the leaves, with zeros
    behind the last element of a leaf; and the next residuals.
  """
  if exchange.num_shards() == 1:
    return _flush(values, held, counting, exchange)
  pending = [
      value if before is None else counting.keep(value + before, 0)
      for value, before in zip(values, held, strict=True)
  ]

  def send(some):
    return exchange.scatter([pending[i] for i in some])

  slices, sent = _in_groups(send, pending)
  rests = []
  for before, whole, x in zip(held, pending, sent, strict=True):
    if before is None:
      rests.append(None)
      continue
    rest = whole - x.astype(whole.dtype)
    # A shard of weight zero has sent something if it encodes the sum of its
    # host: the error of that must not be lost.
    rests.append(counting.keep(rest, before + rest))
  return slices, rests


def gather(
    slices: Sequence[jax.Array],
    held: Sequence[jax.Array | None],
    like: Sequence[jax.Array],
    counting: Counting,
    exchange: two_phase.Exchange,
) -> tuple[list[jax.Array], list[Any]]:
  """Returns leaves as all shards decode them, and the owner's next residuals.

  Args:
    slices: Those that this shard owns.
    held: The residual of each, or `None` without feedback.
    like: Arrays of the shapes of the leaves.
    counting: Whether any shard counts.
    exchange: How it sends.
  """
  if exchange.num_shards() == 1:
    return _flush(slices, held, counting, exchange)
  pending = [
      counting.keep_of_any(part if before is None else part + before, 0)
      for part, before in zip(slices, held, strict=True)
  ]

  def send(some):
    shapes = [like[i].shape for i in some]
    return exchange.gather([pending[i] for i in some], shapes)

  wholes, rests = _in_groups(send, pending)
  rests = [
      None if before is None else counting.keep_of_any(rest, before)
      for before, rest in zip(held, rests, strict=True)
  ]
  return wholes, rests


def _in_groups(send, leaves):
  """Sends leaves together that vary over the same axes.

  A shared buffer would vary over all axes over which one of its leaves does.

  Args:
    send: Takes positions of leaves, and gives two arrays for each, in two
      lists.
    leaves: All of them.

  Returns:
    The two arrays of all leaves, in two lists.
  """
  groups = collections.defaultdict(list)
  for i, leaf in enumerate(leaves):
    groups[axes_lib.varying_axes(leaf)].append(i)
  found = {}
  for some in groups.values():
    found.update(zip(some, zip(*send(some), strict=True), strict=True))
  pairs = [found[i] for i in range(len(leaves))]
  return [first for first, _ in pairs], [second for _, second in pairs]


def _flush(values, held, counting, exchange):
  """Returns the results of a single shard, and residuals of zero."""
  wholes, after = [], []
  for value, before in zip(values, held, strict=True):
    rests = [] if before is None else [before]
    whole, rests = counting.flush(value, rests, exchange.axes)
    wholes.append(whole)
    after.append(*(rests or [None]))
  return wholes, after
