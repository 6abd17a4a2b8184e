"""Reproducible accumulation over towers and shards."""

import optax

from shard_transforms._src.base import arguments
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import weights
from shard_transforms._src.transforms import shard_update as shard_update_lib
from shard_transforms._src.transforms import sliced_optimizer
from shard_transforms.contrib._src.reproducible import accumulation
from shard_transforms.contrib._src.reproducible import tree_reduction


def tower_reduce(
    num_towers: int,
    inner: optax.GradientTransformation,
    axis_name: axes_lib.AxisName,
    *,
    reduction: weights.MeanOrSum = 'mean',
) -> optax.GradientTransformationExtraArgs:
  r"""Gradient accumulation with the same bits on any number of shards.

  Like `tower_reduce` around `optax.chain(cross_shard_mean(axis_name), inner)`,
  but the updates of all towers of all shards are added as the leaves of one
  balanced binary tree: each shard adds the subtree of its own towers, and the
  shards add these sums in pairs. All but the last of `num_towers` calls return
  zero updates. The last call divides the sum once, by the number of all towers
  or by their total weight, and runs `inner`:

  .. math:: u = \sum_{t: w_t > 0} w_t u_t / W,
     \quad W = \sum_{t: w_t > 0} w_t

  A window keeps log2 `num_towers` partial sums of each parameter, at least one.
  If a gradient of a tower is `None`, the tower adds zero, and counts in the
  mean. A tower of weight 0 is left out, even if it is not finite. If all
  weights are zero, the update is zero, and the state of `inner` does not
  change: `inner` runs on zeros, where its derivative must be finite. `inner`
  receives the extra arguments of the last tower, without the weight. Weights,
  such as numbers of tokens, are not normalized before they multiply the
  updates, so that the products must be in the range of float32.

  Give each shard `num_towers` consecutive micro-batches, so that the number of
  micro-batches in a step is `num_towers` times the number of shards. Do not put
  `guard`, `drop_stale` or another transformation that skips updates around it,
  because the towers that a skipped call leaves out depend on the number of
  shards. `inner` may contain such a transformation without `axis_name`.

  Args:
    num_towers: The number of updates of a shard that count as one step, a power
      of two.
    inner: The transformation after the reduction, such as an optimizer.
    axis_name: The mapped axis, or a sequence of axes, to reduce over. The
      number of shards must be a power of two.
    reduction: `'mean'` or `'sum'` over all towers of all shards.

  Returns:
    An `optax.GradientTransformationExtraArgs` with a `ReproducibleState`, whose
    `update` takes the optional extra argument `weight`, one scalar per tower.
    Create the state with `init_state`.

  Raises:
    NameError: In `init` and `update`, if an axis is not bound.
    TypeError: If an argument has the wrong type; in `update`, if a leaf is an
      integer or boolean, `weight` is not a real number, or the state is from
      another transformation.
    ValueError: If `num_towers` is not a power of two, or `reduction` is
      unknown; in `init` and `update`, if the number of shards is not a power of
      two; in `update`, if the state was created for another tree or number of
      towers, updates are already reduced, or `weight` has a wrong value.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> from shard_transforms.contrib import reproducible
    >>> tx = reproducible.tower_reduce(2, optax.sgd(1.0), 'data')
    >>> def step(towers):
    ...   state = tx.init(jnp.zeros([]))
    ...   for tower in towers:
    ...     updates, state = tx.update(tower, state)
    ...   return updates
    >>> towers = jnp.array([[1.0, 2.0], [3.0, 6.0]])
    >>> print(jax.vmap(step, axis_name='data')(towers))
    [-3. -3.]
  """
  reduce = _as_reduction('tower_reduce', reduction, axis_name)
  inner = arguments.as_inner(inner, reduce.caller)

  def finish(inner_state, params, sums, total, like, extra_args):
    updates = reduce.of_sums(sums, total, like)
    return inner.update(updates, inner_state, params, **extra_args)

  return accumulation.transformation(num_towers, reduce, inner.init, finish)


def sharded_tower_reduce(
    num_towers: int,
    inner: optax.GradientTransformation,
    axis_name: axes_lib.AxisName,
    *,
    reduction: weights.MeanOrSum = 'mean',
    assume_elementwise: bool = False,
) -> optax.GradientTransformationExtraArgs:
  """Shards the optimizer (ZeRO-1), with the same bits on any number of shards.

  Returns the same updates as `tower_reduce`, with the state and the work of
  `inner` divided among the shards, as in `shard_update`: shards exchange halves
  until each has the mean of its slice of every leaf, `inner` computes a slice
  of the updates, and an all-gather joins the slices. `inner` must be
  element-wise. Sums over slices, as for the global norm, are refused, because
  their bits depend on the number of slices.

  Args:
    num_towers: As in `tower_reduce`; 1 without accumulation.
    inner: The transformation that runs on slices.
    axis_name: As in `tower_reduce`.
    reduction: `'mean'` or `'sum'` over all towers of all shards.
    assume_elementwise: Whether to skip the check that `inner` is element-wise.
      Set it only if `inner` is refused although it is element-wise: any other
      `inner` then trains incorrectly without an error.

  Returns:
    An `optax.GradientTransformationExtraArgs` with a `ReproducibleState`, like
    `tower_reduce`.

  Raises:
    NameError: As in `tower_reduce`.
    TypeError: As in `tower_reduce`.
    ValueError: As in `tower_reduce`; in `init` and `update`, if `inner` is not
      element-wise, or an axis of the mesh is not mapped.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import shard_transforms
    >>> from shard_transforms.contrib import reproducible
    >>> mesh = jax.make_mesh((8,), ('data',))
    >>> tx = reproducible.sharded_tower_reduce(2, optax.adam(0.1), 'data')
    >>> state = shard_transforms.init_state(tx, jnp.ones((3, 16)), mesh)
    >>> mu = optax.tree_utils.tree_get(state, 'mu')
    >>> print(mu.shape, mu.addressable_shards[0].data.shape)
    (3, 16) (3, 2)
  """
  reduce = _as_reduction('sharded_tower_reduce', reduction, axis_name)
  arguments.check_bool('assume_elementwise', assume_elementwise)
  inner = arguments.as_inner(inner, reduce.caller)
  optimizer = sliced_optimizer.SlicedOptimizer(
      inner, reduce, assume_elementwise
  )

  def init(params):
    return shard_update_lib.ShardUpdateState(optimizer.init(params))

  def finish(inner_state, params, sums, total, like, extra_args):
    reduce.check_mapped()
    slices = reduce.of_sums(sums, total, like, in_slices=True)
    slices, slices_state = optimizer.update(
        slices, inner_state.inner_state, like, params, extra_args
    )
    updates = reduce.gather(slices, like)
    return updates, shard_update_lib.ShardUpdateState(slices_state)

  return accumulation.transformation(num_towers, reduce, init, finish)


def _as_reduction(name, kind, axis_name):
  arguments.check_reduction(kind)
  axes = axes_lib.as_axes(axis_name)
  return tree_reduction.TreeReduction(f'reproducible.{name}', kind, axes)
