"""`shard_update`: ZeRO-1, each shard runs the optimizer on its part."""

from typing import NamedTuple

import optax

from shard_transforms._src.base import arguments
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import full_rules
from shard_transforms._src.base import groups as groups_lib
from shard_transforms._src.base import weights
from shard_transforms._src.reduction import leaf_sums
from shard_transforms._src.reduction import sharded_reduction
from shard_transforms._src.transforms import sliced_inner

_CALLER = 'shard_update'


class ShardUpdateState(NamedTuple):
  """State of `shard_update`.

  Attributes:
    inner_state: State of the inner transformation. Inside the mapped function,
      a leaf of the shape of a parameter is the shard's slice of it. Outside it
      has the shape of the parameter, or of a row of its elements, with zeros at
      the end of a dimension that cannot be divided. With `groups`, a slice has
      a leading axis of length 1, and of the number of shards outside.

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

  rules = {'inner_state': full_rules.DIVIDED}


def shard_update(
    inner: optax.GradientTransformation,
    axis_name: axes_lib.AxisName,
    *,
    reduction: weights.Kind = 'mean',
    groups: groups_lib.GroupsLike | None = None,
    on_invariant: leaf_sums.OnInvariant = 'error',
    assume_elementwise: bool = False,
) -> optax.GradientTransformationExtraArgs:
  r"""Shards the optimizer (ZeRO-1): each shard updates its part of the leaves.

  Gives what `optax.chain(cross_shard_mean(axis_name), inner)` gives, with the
  state and the work of `inner` divided among the N shards. A reduce-scatter
  gives each shard the mean of its slice of every leaf, `inner` turns that into
  a slice of the updates, and an all-gather joins the slices. Together these
  send as many bytes as the all-reduce that they replace.

  A leaf is sliced along the first dimension that the shards divide, as by
  `state_shardings`, or else along the one that needs the least padding. Where
  that is more than 1/16, all its elements are sliced as one row. Over
  several axes it is sliced axis by axis, if possible along a dimension each.
  So the state is that of the replicated optimizer, sharded.

  `inner` sees the tree of the parameters, and the rank of each: masks and
  labels that use paths or ranks work unchanged. It must treat each element
  alone, as SGD, Adam, AdamW, Lion, Adagrad and RMSProp do. An `inner` that
  looks across elements is refused, because a shard sees only a slice: LAMB,
  Adafactor, Muon, noise. For these, use `owners.owned_update`. A sum of all
  elements of sliced leaves is right if one `psum` over `axis_name` follows. To
  clip by the global norm, put
  `clip_by_global_norm(max_norm, axis_name)` of this library first in `inner`.

  Scalars are not sliced: they are reduced as by `cross_shard_mean`, and all
  shards update them. Make the state with `init_state`, and map it with the
  specs of `state_specs`. `full_state` removes the padding for a checkpoint, and
  `resize_state` converts it to another number of shards. All axes of the mesh
  must be mapped, and parameters may be sharded over others than `axis_name`.

  Args:
    inner: The transformation that runs on slices.
    axis_name: The mapped axis, or a sequence of them, over whose shards the
      updates are reduced and sliced. The last axis of the mesh is scattered
      first, so that the others carry only a part: make it the fast one.
    reduction: `'mean'` or `'sum'` over the shards.
    groups: A partition of the shards into groups of one size, each of which
      reduces among itself and holds the state once.
    on_invariant: How to read a leaf whose type says that it is the same on all
      shards, for a mean; see `cross_shard_mean`.
    assume_elementwise: Turns off the check that `inner` treats each element
      alone. Set it if `inner` is refused although it does: one that looks
      across elements then trains wrongly without an error.

  Returns:
    An `optax.GradientTransformationExtraArgs` with a `ShardUpdateState`, whose
    `update` takes the optional extra argument `weight`, as that of
    `cross_shard_mean` does, and passes all others to `inner`.

  Raises:
    NameError: In `init` and `update`, if an axis is not bound.
    TypeError: If an argument is of the wrong kind; in `update`, if a leaf is an
      integer or boolean, `weight` is not a real number, or the state is of
      another transformation.
    ValueError: If an argument has a wrong value, such as groups of different
      sizes; in `init`, if the tree of the state of `inner` depends on the
      shapes of the parameters, or if types show that the parameters are slices
      over `axis_name` (FSDP); in `update`, if `inner` looks across elements,
      unless it is assumed not to, as in `cross_shard_mean`, or if the state
      was made for other parameters or another number of shards.

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
      on_invariant,
  )
  inner = arguments.as_inner(inner, _CALLER)
  own = sliced_inner.SlicedInner(inner, reduce, assume_elementwise)

  def init_fn(params):
    return ShardUpdateState(own.init(params))

  def update_fn(updates, state, params=None, *, weight=None, **extra_args):
    arguments.check_state(state, ShardUpdateState, _CALLER)
    reduce.check_mapped()
    parts = reduce.scatter(updates, weight)
    parts, inner_state = own.update(
        parts, state.inner_state, updates, params, extra_args
    )
    updates = reduce.gather(parts, updates)
    return updates, ShardUpdateState(inner_state)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)
