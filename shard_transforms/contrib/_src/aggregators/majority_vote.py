"""`majority_vote`: the sign of most shards, at one bit per element."""

import jax.numpy as jnp
import optax

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.reduction import collectives
from shard_transforms.contrib._src import exchanges
from shard_transforms.contrib._src.aggregators import aggregator

_CALLER = 'majority_vote'
_BITS = 8


def majority_vote(
    axis_name: axes_lib.AxisName,
) -> optax.GradientTransformationExtraArgs:
  """Replaces each element of the updates by the sign of most shards.

  Each shard votes -1 where its update is negative, and 1 elsewhere, including
  zero and NaN. The result is -1 where more than half of the shards vote -1, and
  1 elsewhere, including ties. An element whose gradients are all zero, such as
  an embedding that is not in any batch, therefore also changes: exclude such
  leaves with `optax.masked`. Use it instead of `cross_shard_mean`, before
  `optax.sgd` with a learning rate like that of Adam.

  As long as fewer than half of the shards are faulty, an element on which the
  correct shards agree keeps its sign. A shard whose extra argument `weight` is
  zero has no vote; every other shard has one. If no shard has a vote, the
  update is zero. With one shard, the result is the sign of its update, so that
  the same learning rate fits any number of shards.

  It sends one bit per element all-to-all, and one bit per element back; with
  `weight`, one more byte each way per shard and buffer. If a mesh axis is not
  mapped, each shard instead gathers one byte per element from all shards.

  Complex leaves get the signs of their real and imaginary parts.

  Args:
    axis_name: The mapped axis to reduce over, or a sequence of axes.

  Returns:
    An `optax.GradientTransformationExtraArgs` without state, whose `update`
    takes the optional extra argument `weight`.

  Raises:
    NameError: In `update`, if an axis is not bound.
    TypeError: If `axis_name` is not a name or a sequence of names; in `update`,
      if a leaf is an integer or boolean, or `weight` is not a real number.
    ValueError: If `axis_name` is empty or names an axis twice; in `update`, if
      a leaf is already reduced, or `weight` is not a scalar or is known to be
      negative.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from shard_transforms import contrib
    >>> tx = contrib.majority_vote('data')
    >>> reduce = lambda update: tx.update(update, tx.init(update))[0]
    >>> updates = jnp.array([[-0.1, 5.0], [-0.2, 7.0], [1e9, -1.0]])
    >>> print(jax.vmap(reduce, axis_name='data')(updates)[0])
    [-1.  1.]

  References:
    Bernstein et al., signSGD with Majority Vote is Communication Efficient and
    Fault Tolerant, 2018, https://arxiv.org/abs/1810.05291.
  """
  return aggregator.transformation(_CALLER, axis_name, _aggregate)


def _aggregate(leaves, is_counted, axes):
  """Returns the majority of the signs of all shards, 1 or -1."""
  if not aggregator.is_sliced(axes):
    return [_vote_in_bytes(leaf, is_counted, axes) for leaf in leaves]
  return aggregator.map_packed(
      lambda buffer: _vote_in_bits(buffer, is_counted, axes), leaves, axes
  )


def _vote_in_bytes(leaf, is_counted, axes):
  """Gathers votes of one byte each, and counts them on every shard."""
  votes = jnp.where(leaf < 0, -1, 1).astype(jnp.int8)
  if is_counted is not None:
    votes = jnp.where(is_counted, votes, 0).astype(jnp.int8)
  votes = collectives.gather(votes, axes)
  has_votes = jnp.any(votes != 0)
  signs = jnp.where(jnp.sum(votes, 0, jnp.int32) < 0, -1, 1)
  return jnp.where(has_votes, signs, 0).astype(leaf.dtype)


def _vote_in_bits(leaf, is_counted, axes):
  """Exchanges votes of one bit each; each shard counts those on its slice."""
  num_shards = axes_lib.num_shards(axes, _CALLER)
  rows = leaves_lib.slice_evenly(leaf, _BITS * num_shards).reshape(
      num_shards, -1
  )
  ballots = exchanges.pack_integers(rows < 0, _BITS)
  if is_counted is not None:
    has_vote = jnp.full((num_shards, 1), is_counted, jnp.uint8)
    ballots = jnp.concatenate([ballots, has_vote], axis=1)
  ballots = exchanges.exchange(ballots, axes)
  num_votes, has_vote = num_shards, jnp.ones(num_shards, bool)
  if is_counted is not None:
    ballots, has_vote = ballots[:, :-1], ballots[:, -1] > 0
    num_votes = jnp.sum(has_vote, dtype=jnp.int32)
  is_negative = exchanges.unpack_integers(ballots, _BITS) > 0
  is_negative &= has_vote[:, None]
  num_negative = jnp.sum(is_negative, axis=0, dtype=jnp.int32)
  winners = exchanges.pack_integers(2 * num_negative > num_votes, _BITS)
  if is_counted is not None:
    winners = jnp.append(winners, jnp.uint8(num_votes > 0))
  winners, has_votes = collectives.gather(winners, axes), True
  if is_counted is not None:
    # The gathered flag is typed as the same on all shards.
    winners, has_votes = winners[:, :-1], winners[:, -1:] > 0
  signs = 1 - 2 * exchanges.unpack_integers(winners, _BITS).astype(jnp.int8)
  signs = jnp.where(has_votes, signs, 0)
  return leaves_lib.join_slices(signs, leaf).astype(leaf.dtype)
