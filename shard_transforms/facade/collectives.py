"""`cross_replica_sum`: sums over the shards inside a computation."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

import shard_transforms
from shard_transforms._src.base import axes as axes_lib
from shard_transforms.facade import contexts


def cross_replica_sum(
    x: npt.ArrayLike,
    group_assignment: Sequence[Sequence[int]] | np.ndarray | None = None,
    name: str | None = None,
) -> jax.Array:
  """Returns the sum of an array over the shards around the caller.

  Use it for the statistics of a batch that lies on all shards; divide by the
  number of shards for their mean. For gradients, use `CrossShardOptimizer`.

  Args:
    x: An array of floating-point numbers.
    group_assignment: Lists of shards that sum among themselves, a partition;
      all together if `None`.
    name: Ignored.

  Returns:
    The sum, of the shape of `x`.

  Raises:
    TypeError: If `x` holds no floating-point numbers.
    ValueError: Outside of a computation that `shard` runs, or if the groups are
      no partition.

  Examples:
    >>> from shard_transforms import facade
    >>> print(facade.shard(facade.cross_replica_sum, [[1.0, 2.0]]))
    [Array([1., 2.], dtype=float32)]

  References:
    `tf.contrib.tpu.cross_replica_sum` of TensorFlow 1.15.
  """
  del name
  shards = contexts.shards()
  if shards is None:
    raise ValueError(
        '`cross_replica_sum` must be used inside a shard context, got none.'
        ' Call it in a computation that `facade.shard` runs.'
    )
  array = jnp.asarray(x)
  if shards.num_shards == 1:
    return array
  groups = group_assignment
  if groups is not None:
    groups = [list(map(int, group)) for group in groups]
  tx = shard_transforms.cross_shard_sum(shards.axis_name, groups=groups or None)
  array = axes_lib.to_varying(array, [shards.axis_name])
  summed, _ = tx.update(array, tx.init(array))
  return jnp.asarray(summed)
