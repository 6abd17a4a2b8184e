"""Whether a shard counts in a step, and so what it sends and keeps."""

from collections.abc import Hashable
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import weights
from shard_transforms._src.reduction import collectives
from shard_transforms._src.reduction import leaf_sums


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
  def of(cls, share: leaf_sums.Share, num_shards: int) -> 'Counting':
    """Returns the counting of a shard with this share."""
    if share.weight is None or share.total is None:
      return cls(None, None)
    total = weights.safe_divisor(share.total)
    return cls(share.weight * num_shards / total, share.total > 0)

  def weigh(self, leaf: jax.Array) -> jax.Array:
    """Returns a leaf as it enters an unweighted mean, in 32 bits or more."""
    return weights.weighing(self.factor)(leaves_lib.as_accumulator(leaf))

  def only(self, x: jax.Array) -> jax.Array:
    """Returns `x`, or zeros for a shard that does not count."""
    if self.factor is None:
      return x
    return leaves_lib.zeroing_unless(self.factor > 0)(x)

  def only_of_any(self, x: jax.Array) -> jax.Array:
    """Returns `x`, or zeros where no shard counts."""
    if self.is_any is None:
      return x
    return leaves_lib.zeroing_unless(self.is_any)(x)

  def keep(self, after: jax.Array, before: jax.Array) -> jax.Array:
    """Returns `after`, or `before` for a shard that does not count."""
    if self.factor is None:
      return after
    return jnp.where(self.factor > 0, after, before)

  def still_held(self, before: jax.Array, rest: jax.Array) -> jax.Array:
    """Returns what is held back: the rest, and the old one if left out.

    Args:
      before: What the shard held back.
      rest: What is left after sending.
    """
    if self.factor is None:
      return rest
    return jnp.where(self.factor > 0, rest, before + rest)

  def keep_of_any(self, after: jax.Array, before: jax.Array) -> jax.Array:
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
      value: What `weigh` gives of the leaf.
      held: What is held back of it, as arrays of as many elements.
      axes: The mapped axes, on which there is one shard.

    Returns:
      The value with what was held back, and zeros in place of that.
    """
    for x in held:
      pending = self.only(x.reshape(value.shape))
      # Adding zero would turn a -0 into a 0.
      value = jnp.where(pending == 0, value, value + pending)
    # Unlike a sum, this keeps the sign of a zero too.
    whole = collectives.gather(value, axes).reshape(value.shape)
    return whole, [self.keep(jnp.zeros_like(x), x) for x in held]
