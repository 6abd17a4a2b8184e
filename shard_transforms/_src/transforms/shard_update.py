"""`shard_update`: ZeRO-1, where each shard runs the optimizer on its slices."""

from typing import NamedTuple

import optax

from shard_transforms._src.base import arguments
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import groups as groups_lib
from shard_transforms._src.base import weights
from shard_transforms._src.reduction import leaf_sums
from shard_transforms._src.reduction import sharded_reduction
from shard_transforms._src.state import fields
from shard_transforms._src.transforms import sliced_optimizer

_CALLER = 'shard_update'


class ShardUpdateState(NamedTuple):
  """State of `shard_update`.

  Attributes:
    inner_state: State of the inner transformation. Inside the mapped function,
      a leaf with the shape of a parameter is the shard's slice of that leaf.
      Outside, the leaf has the shape of the parameter, or is a vector of its
      elements, with zeros at the end of a dimension that cannot be divided
      evenly. With `groups`, a slice has a leading axis, of length 1 inside the
      mapped function and of the number of shards outside.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import shard_transforms
    >>> mesh = jax.make_mesh((8,), ('data',))
    >>> tx = shard_transforms.shard_update(optax.adam(0.1), 'data')
    >>> params = {'w': jnp.ones((3, 16)), 'b': jnp.ones(3)}
    >>> state = shard_transforms.init_state(tx, params, mesh)
    >>> mu = optax.tree_utils.tree_get(state, 'mu')
    >>> print(mu['w'].shape, mu['w'].sharding.spec, mu['b'].shape)
    (3, 16) P(None, 'data') (8,)
  """

  inner_state: optax.OptState

  rules = {'inner_state': fields.SLICES}


def shard_update(
    inner: optax.GradientTransformation,
    axis_name: axes_lib.AxisName,
    *,
    reduction: weights.MeanOrSum = 'mean',
    groups: groups_lib.GroupsLike | None = None,
    if_reduced: leaf_sums.IfReduced = 'error',
    assume_elementwise: bool = False,
) -> optax.GradientTransformationExtraArgs:
  r"""Shards the optimizer (ZeRO-1): each shard updates its slice of each leaf.

  Computes the same updates as `optax.chain(cross_shard_mean(axis_name),
  inner)`, with the state and the work of `inner` divided among the N shards. A
  reduce-scatter gives each shard the mean of its slice of every leaf, `inner`
  computes a slice of the updates from it, and an all-gather joins the slices.
  The two collectives communicate as many bytes as the all-reduce that they
  replace.

  A leaf is sliced along its first dimension that is divisible by the number of
  shards, as in `state_shardings`, or else along the dimension that needs the
  least padding. If the padding would exceed 1/16 of the leaf, the leaf is
  flattened before it is sliced. With several axes, the leaf is sliced over one
  axis after the other, along a different dimension for each axis if possible.
  The state is therefore that of the replicated optimizer, but sharded.

  `inner` receives the tree of the parameters, with leaves of the same rank, so
  masks and labels that use paths or ranks work unchanged. It must be
  element-wise, like SGD, Adam, AdamW, Lion, Adagrad and RMSProp. An `inner`
  that combines elements of a leaf or draws noise, such as LAMB, Adafactor or
  Muon, is refused, because each shard has only a slice. Use
  `contrib.owned_update` for such transformations. A sum over all elements of
  sliced leaves is correct if it is followed by one `psum` over `axis_name`. To
  clip by the global norm, put `clip_by_global_norm(max_norm, axis_name)` of
  this library first in `inner`.

  Scalars are not sliced: they are reduced as in `cross_shard_mean`, and every
  shard updates them. Create the state with `init_state`, and map it with the
  specs from `state_specs`. `unshard_state` removes the padding for a
  checkpoint, and `resize_state` converts the state to another number of shards.
  All axes of the mesh must be mapped, and parameters may be sharded over axes
  other than `axis_name`.

  Args:
    inner: The transformation that runs on slices.
    axis_name: The mapped axis, or a sequence of mapped axes, over whose shards
      the updates are reduced and sliced. The last axis of the mesh is scattered
      first, and the other axes then communicate only a slice, so the last axis
      should be the one with the fastest links.
    reduction: `'mean'` or `'sum'` over the shards.
    groups: A partition of the shards into groups of equal size. Each group
      reduces only among its own shards and holds the state once.
    if_reduced: The treatment, in a mean, of a leaf whose type shows that it
      is the same on all shards; see `cross_shard_mean`.
    assume_elementwise: Turns off the check that `inner` is element-wise. Set it
      only if `inner` is refused although it is element-wise: any other `inner`
      then trains incorrectly without an error.

  Returns:
    An `optax.GradientTransformationExtraArgs` with a `ShardUpdateState`, whose
    `update` takes the optional extra argument `weight`, as in
    `cross_shard_mean`, and passes all other extra arguments to `inner`.

  Raises:
    NameError: In `init` and `update`, if an axis is not bound.
    TypeError: If an argument has the wrong type; in `update`, if a leaf is an
      integer or boolean, `weight` is not a real number, or the state belongs to
      another transformation.
    ValueError: If an argument has an invalid value, such as groups of different
      sizes; in `init`, if the tree of the state of `inner` depends on the
      shapes of the parameters, or if types show that the parameters are slices
      over `axis_name` (FSDP); in `update`, in the cases of `cross_shard_mean`,
      if `inner` is not element-wise, unless `assume_elementwise` is set, or if
      the state was made for other parameters or another number of shards.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import shard_transforms
    >>> tx = shard_transforms.shard_update(optax.sgd(0.1, 0.9), 'data')
    >>> def step(params, grads):
    ...   return tx.update(grads, tx.init(params), params)[0]
    >>> step = jax.vmap(step, in_axes=(None, 0), axis_name='data')
    >>> print(step(jnp.zeros(3), jnp.array([[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]])))
    [[-0.2 -0.2 -0.2]
     [-0.2 -0.2 -0.2]]

  References:
    Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion
    Parameter Models, 2020, https://arxiv.org/abs/1910.02054 (stage 1).
  """
  arguments.check_reduction(reduction)
  arguments.check_bool('assume_elementwise', assume_elementwise)
  reduce = sharded_reduction.ShardedReduction(
      _CALLER,
      reduction,
      axes_lib.as_axes(axis_name),
      None if groups is None else groups_lib.as_groups(groups),
      if_reduced,
  )
  inner = arguments.as_inner(inner, _CALLER)
  optimizer = sliced_optimizer.SlicedOptimizer(
      inner, reduce, assume_elementwise
  )

  def init_fn(params):
    return ShardUpdateState(optimizer.init(params))

  def update_fn(updates, state, params=None, *, weight=None, **extra_args):
    arguments.check_state(state, ShardUpdateState, _CALLER)
    reduce.check_mapped()
    slices = reduce.scatter(updates, weight)
    slices, inner_state = optimizer.update(
        slices, state.inner_state, updates, params, extra_args
    )
    updates = reduce.gather(slices, updates)
    return updates, ShardUpdateState(inner_state)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)
