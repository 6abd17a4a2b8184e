"""Sums over shards, of the gradients for an update and of any array."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax

import shard_transforms
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import groups as groups_lib
from shard_transforms.facade import bases
from shard_transforms.facade import contexts
from shard_transforms.facade import differentiation
from shard_transforms.facade import frames
from shard_transforms.facade import optimizer
from shard_transforms.facade import variables as variables_lib

Variable = variables_lib.Variable
_Groups = Sequence[Sequence[int]] | np.ndarray | jax.Array


class CrossShardOptimizer(bases.Wrapper):
  """Averages gradients over shards, and applies them with another optimizer.

  With `MEAN`, `compute_gradients` divides the loss by the number of shards, or
  by the size of a group; `apply_gradients` is an all-reduce (sum). Code between
  the two, such as clipping, sees the scaled gradient of each shard, and
  `apply_gradients` alone sums gradients. The sum is `cross_shard_sum`.

  Make both calls in the computation of `shard`, which sets the number of
  shards. With groups, variables and slots differ between the groups, and keep
  one value per shard.

  Args:
    opt: The optimizer that applies the reduced gradients.
    reduction: `Reduction.MEAN` or `Reduction.SUM`.
    name: The name.
    group_assignment: A partition of the shards into groups of equal size that
      reduce among themselves: lists (or tuples or arrays) of shard ids. All
      shards are one group if it is `None` or empty.

  Raises:
    TypeError: If `opt` is no optimizer of the façade, or one that gathers
      gradients itself.
    ValueError: If `reduction` is neither, or `name` empty. In
      `compute_gradients` and `apply_gradients`, outside of a `shard_context`,
      or if `group_assignment` is no such partition.
    NameError: In `apply_gradients`, among several shards without a mapped axis.

  Examples:
    >>> import jax.numpy as jnp
    >>> from shard_transforms import facade
    >>> w = facade.Variable(0.0)
    >>> opt = facade.CrossShardOptimizer(
    ...     facade.MomentumOptimizer(1.0, 0.9))
    >>> def step(x):
    ...   opt.minimize(lambda: 0.5 * jnp.mean((w - x) ** 2), var_list=[w])
    >>> _ = facade.shard(step, [jnp.arange(16.0)], num_shards=8)
    >>> print(w, opt.get_slot(w, 'momentum'))
    7.5 -7.5

  References:
    `tf.contrib.tpu.CrossShardOptimizer` of TensorFlow 1.15.
  """

  def __init__(
      self,
      opt: optimizer.Optimizer,
      reduction: str = contexts.Reduction.MEAN,
      name: str = 'CrossShardOptimizer',
      group_assignment: _Groups | None = None,
  ):
    kinds = contexts.Reduction.SUM, contexts.Reduction.MEAN
    if reduction not in kinds:
      raise ValueError(
          f'Unsupported reduction: {reduction!r}. `reduction` must be one of'
          f' {kinds}.'
      )
    super().__init__(bases.check_optimizer('opt', opt), False, name)
    self._reduction = reduction
    self._group_assignment = group_assignment

  @property
  def _loss_scale(self):
    shards, groups = self._reduced_over()
    if self._reduction == contexts.Reduction.SUM:
      return 1.0
    return 1 / (shards.num_shards if groups is None else len(groups[0]))

  def _apply(self, pairs, global_step, name):
    shards, groups = self._reduced_over()
    pairs = differentiation.check_pairs(pairs)
    if shards.num_shards > 1:
      pairs = _sum(pairs, shards, groups)
    if groups is None:
      return super()._apply(pairs, global_step, name)
    with frames.transaction() as opened:
      out = super()._apply(pairs, global_step, name)
      shards.parted.update(opened.written)
      return out

  def _reduced_over(self):
    """Returns the shards around the caller, and the groups among them."""
    shards = _shards('CrossShardOptimizer')
    return shards, _as_groups(self._group_assignment, shards.num_shards)


def cross_replica_sum(
    x: npt.ArrayLike,
    group_assignment: _Groups | None = None,
    name: str | None = None,
) -> jax.Array:
  """Returns the sum of an array over the shards around the caller.

  Use it for the statistics of a batch that lies on all shards; divide by the
  number of shards for their mean. For gradients, use `CrossShardOptimizer`.

  Args:
    x: An array of floating-point numbers.
    group_assignment: As in `CrossShardOptimizer`.
    name: Ignored.

  Returns:
    The sum, of the shape of `x`.

  Raises:
    TypeError: If `x` holds no floating-point numbers.
    ValueError: Outside of a computation that `shard` runs, or if
      `group_assignment` is no such partition.

  Examples:
    >>> from shard_transforms import facade
    >>> print(facade.shard(facade.cross_replica_sum, [[1.0, 2.0]]))
    [Array([1., 2.], dtype=float32)]

  References:
    `tf.contrib.tpu.cross_replica_sum` of TensorFlow 1.15.
  """
  shards = _shards('cross_replica_sum')
  array = jnp.asarray(x)
  if shards.num_shards == 1:
    return array
  groups = _as_groups(group_assignment, shards.num_shards)
  tx = shard_transforms.cross_shard_sum(shards.axis_name, groups=groups)
  array = axes_lib.to_varying(array, [shards.axis_name])
  summed, _ = tx.update(array, tx.init(array))
  return jnp.asarray(summed)


def _shards(caller):
  """Returns the shards around the caller."""
  found = contexts.shards()
  if found is None:
    raise ValueError(
        f'`{caller}` must be used inside a shard context, got none: each shard'
        ' would count by itself. Call it in a computation that `facade.shard`'
        ' runs, for one device with `num_shards=1`.'
    )
  return found


def _sum(pairs, shards, groups):
  """Returns the sum over the shards, of each group if there are several."""
  if not axes_lib.is_bound(shards.axis_name):
    raise NameError(
        f'`CrossShardOptimizer` of {shards.num_shards} shards needs the mapped'
        f' axis {shards.axis_name!r}, which is not bound here. Call it in a'
        ' computation that `facade.shard` runs.'
    )
  size = axes_lib.size([shards.axis_name], 'CrossShardOptimizer')
  if size != shards.num_shards:
    raise ValueError(
        f'The axis {shards.axis_name!r} must have the {shards.num_shards}'
        f' shards of its `shard_context`, got {size}.'
    )
  tx = shard_transforms.cross_shard_sum(shards.axis_name, groups=groups)
  summed, _ = tx.update(differentiation.by_name(pairs), optax.EmptyState())
  return differentiation.of_variables(summed, pairs)


def _as_groups(group_assignment, num_shards):
  """Returns a checked partition, or `None` if all shards are one group."""
  if isinstance(group_assignment, jax.Array | np.ndarray):
    group_assignment = group_assignment.tolist()
  if group_assignment is None or group_assignment in ([], ()):
    return None
  try:
    groups = groups_lib.as_groups(group_assignment)
    groups_lib.check_size(groups, num_shards)
  except TypeError as error:
    raise ValueError(
        '`group_assignment` must be a list of lists of shard ids, got'
        f' {group_assignment!r}.'
    ) from error
  except ValueError as error:
    raise ValueError(
        '`group_assignment` must be a partition of the shards into groups of'
        f' equal size, a permutation of range({num_shards}), got'
        f' {group_assignment!r}: {error}'
    ) from error
  return groups if len(groups) > 1 else None
