"""`CrossShardOptimizer` and `cross_replica_sum`: sums over the shards."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax

import shard_transforms
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import groups as groups_lib
from shard_transforms.facade import contexts
from shard_transforms.facade import frames
from shard_transforms.facade import losses
from shard_transforms.facade import optimizer
from shard_transforms.facade import pairs as pairs_lib
from shard_transforms.facade import variables as variables_lib
from shard_transforms.facade import wrapper

Variable = variables_lib.Variable
_Groups = Sequence[Sequence[int]] | np.ndarray | jax.Array


class CrossShardOptimizer(wrapper.Wrapper):
  """Averages gradients over shards and applies them with another optimizer.

  With `MEAN`, `compute_gradients` divides the loss by the number of shards (or
  by the size of a group), and `apply_gradients` sums over the shards with
  `shard_transforms.cross_shard_sum`. Code between the two calls, such as
  clipping, works on the scaled gradient of each shard. Gradients that were not
  computed by `compute_gradients` are therefore summed, not averaged.

  Make both calls in the computation of `shard`, which sets the number of
  shards. With groups, variables and slots differ between the groups, and keep
  one value per shard.

  Args:
    opt: The optimizer that applies the reduced gradients.
    reduction: `tf.losses.Reduction.MEAN` or `SUM`.
    name: The name.
    group_assignment: A partition of the shards into groups of equal size that
      reduce separately: lists (or tuples or arrays) of shard ids. All shards
      form one group if it is `None` or empty.

  Raises:
    TypeError: If `opt` is not an optimizer of the façade, or gathers gradients
      itself.
    ValueError: If `reduction` is neither `MEAN` nor `SUM`, or `name` is empty.
      In `compute_gradients` and `apply_gradients`, outside of a
      `shard_context`, or if `group_assignment` does not divide the shards into
      groups of equal size.
    NameError: In `apply_gradients`, with several shards, if their axis is not
      bound.

  Examples:
    >>> import jax.numpy as jnp
    >>> from shard_transforms import facade
    >>> from shard_transforms.facade import tf
    >>> w = tf.Variable(0.0)
    >>> opt = facade.CrossShardOptimizer(tf.train.MomentumOptimizer(1.0, 0.9))
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
      reduction: str = losses.Reduction.MEAN,
      name: str = 'CrossShardOptimizer',
      group_assignment: _Groups | None = None,
  ):
    supported = losses.Reduction.SUM, losses.Reduction.MEAN
    if reduction not in supported:
      raise ValueError(
          f'Unsupported reduction: {reduction!r}. `reduction` must be one of'
          f' {supported}.'
      )
    super().__init__(wrapper.check_optimizer('opt', opt), False, name)
    self._reduction = reduction
    self._group_assignment = group_assignment

  @property
  def _loss_scale(self):
    shards, groups = self._reduced_over()
    if self._reduction == losses.Reduction.SUM:
      return 1.0
    return 1 / (shards.num_shards if groups is None else len(groups[0]))

  def _apply(self, pairs, global_step, name):
    shards, groups = self._reduced_over()
    pairs = pairs_lib.check_pairs(pairs)
    if shards.num_shards > 1:
      pairs = _sum(pairs, shards, groups)
    if groups is None:
      return super()._apply(pairs, global_step, name)
    with frames.transaction() as opened:
      out = super()._apply(pairs, global_step, name)
      shards.differing.update(opened.written)
      return out

  def _reduced_over(self):
    """Returns the current shards, and the groups among them."""
    shards = _shards('CrossShardOptimizer')
    return shards, _as_groups(self._group_assignment, shards.num_shards)


def cross_replica_sum(
    x: npt.ArrayLike,
    group_assignment: _Groups | None = None,
    name: str | None = None,
) -> jax.Array:
  """`tf.contrib.tpu.cross_replica_sum`: the sum of an array over the shards.

  Use it for batch statistics; divide by the number of shards to get the mean.
  For gradients, use `CrossShardOptimizer`.

  Examples:
    >>> from shard_transforms import facade
    >>> from shard_transforms.facade import tf
    >>> print(facade.shard(tf.tpu.cross_replica_sum, [[1.0, 2.0]]))
    [Array([1., 2.], dtype=float32)]
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
  """Returns the current shards.

  Raises:
    ValueError: Outside of a `shard_context`.
  """
  shards = contexts.current.shards
  if shards is None:
    raise ValueError(
        f'`{caller}` was used outside of a shard context, so it does not know'
        ' the number of shards. Call it in a computation that `facade.shard`'
        ' runs, with `num_shards=1` on a single device.'
    )
  return shards


def _sum(pairs, shards, groups):
  """Returns the sum of gradients over the shards of each group.

  Raises:
    NameError: If the axis of the shards is not bound.
    ValueError: If it has another size than the number of shards.
  """
  if not axes_lib.is_bound(shards.axis_name):
    raise NameError(
        f'`CrossShardOptimizer` reduces over {shards.num_shards} shards, but'
        f' the axis {shards.axis_name!r} is not bound here. Call'
        ' `apply_gradients` in a computation that `facade.shard` runs.'
    )
  size = axes_lib.num_shards([shards.axis_name], 'CrossShardOptimizer')
  if size != shards.num_shards:
    raise ValueError(
        f'The axis {shards.axis_name!r} has {size} shards, but its'
        f' `shard_context` was entered with {shards.num_shards}. Pass the size'
        ' of the axis to `shard_context`.'
    )
  tx = shard_transforms.cross_shard_sum(shards.axis_name, groups=groups)
  summed, _ = tx.update(pairs_lib.by_name(pairs), optax.EmptyState())
  return pairs_lib.of_variables(summed, pairs)


def _as_groups(group_assignment, num_shards):
  """Returns a checked partition, or `None` if all shards form one group.

  Raises:
    ValueError: If it is not a partition into groups of equal size.
  """
  if isinstance(group_assignment, jax.Array | np.ndarray):
    group_assignment = group_assignment.tolist()
  if group_assignment is None or group_assignment in ([], ()):
    return None
  try:
    groups = groups_lib.as_groups(group_assignment)
    groups_lib.check_size(groups, num_shards)
  except (TypeError, ValueError) as error:
    raise ValueError(
        '`group_assignment` must be a list of lists of shard ids that divides'
        ' the shards into groups of equal size, and be a permutation of'
        f' range({num_shards}), got {group_assignment!r}: {error}'
    ) from error
  return groups if len(groups) > 1 else None
