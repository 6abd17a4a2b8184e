"""Sharding of an optimizer by matrices, each of which has an owner."""

from typing import NamedTuple, get_args

from jax.sharding import PartitionSpec as P
import optax

from shard_transforms._src.base import arguments
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import groups as groups_lib
from shard_transforms._src.base import partition_specs as specs_lib
from shard_transforms._src.base import weights
from shard_transforms._src.reduction import leaf_sums
from shard_transforms._src.reduction import sharded_reduction
from shard_transforms.contrib._src.owners import owned_inner
from shard_transforms.contrib._src.owners import owned_leaves

_CALLER = 'owned_update'


class OwnedUpdateState(NamedTuple):
  """State of `owned_update`.

  Attributes:
    inner_state: State of the inner transformation.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import shard_transforms
    >>> from shard_transforms import contrib
    >>> mesh = jax.make_mesh((8,), ('data',))
    >>> tx = contrib.owned_update(optax.lamb(0.1), 'data')
    >>> params = {str(i): jnp.ones((4, 4)) for i in range(16)}
    >>> state = shard_transforms.init_state(tx, params, mesh)
    >>> print([row.shape for row in state.inner_state.stacks.values()])
    [(8, 2, 4, 4), (8, 2, 4, 4)]
  """

  inner_state: owned_leaves.OwnedLeaves

  rules = {'inner_state': owned_leaves.OWNERS_RULE}


def owned_update(
    inner: optax.GradientTransformation,
    axis_name: axes_lib.AxisName,
    *,
    param_specs: specs_lib.SpecTree = P(),
    whole_dims: int | None = None,
    reduction: weights.MeanOrSum = 'mean',
    groups: groups_lib.GroupsLike | None = None,
    if_reduced: leaf_sums.IfReduced = 'error',
    if_sliced: owned_inner.IfSliced = 'error',
    assume_leafwise: bool = False,
) -> optax.GradientTransformationExtraArgs:
  """Shards the optimizer by matrices: for Muon, LAMB, SOAP and others (ZeRO-1).

  The updates are those of `optax.chain(cross_shard_mean(axis_name), inner)`,
  but the state and the work of `inner` are divided among the N shards. Each
  matrix has an owner: the shard that keeps its state and updates it. This also
  divides optimizers that look at whole leaves: Muon, LAMB, LARS, Adafactor,
  SOAP and Shampoo. For optimizers that treat each element independently, such
  as Adam, use `shard_transforms.shard_update`.

  Parameters may be replicated or sharded (FSDP, tensor parallelism, or both),
  as given by `param_specs`, and keep their sharding. Matrices are sent to their
  owners axis by axis of the mesh:

  * Over an axis that slices a matrix, an all-to-all sends the slices of its
    gradient to the owner, and another one returns the slices of its update. If
    `inner` reads parameters, as for weight decay, one more all-to-all sends
    the slices of the parameter.
  * Over the axes of `axis_name` that do not slice a matrix, gradients are
    reduce-scattered and updates all-gathered. This sends as many bytes as the
    all-reduce that it replaces.
  * Layers that lie on different shards have owners among these shards
    (`whole_dims`).

  Matrices with the same shape, dtype and layout form a stack, whose rows are
  divided evenly among the owners. If their number is not a multiple of N, some
  rows are padding. If the matrices of a stack are updated by equal programs,
  an owner runs one program on its rows; otherwise, it takes a branch of its
  own. All shards update a parameter whose shape, dtype and layout no other
  parameter has, and keep its state, so a model that has only such parameters
  is not divided. `init` warns if they are a large part of the model. Use
  `shard_update` for large ones, such as an embedding, by `optax.partition`.

  `inner` is traced on the tree of the unsharded parameters, so that paths,
  masks, labels, random numbers and the number of leaves are those of the
  replicated optimizer, and each shard runs its part of the resulting program.
  `inner` must treat each leaf independently. If it mixes leaves that have
  owners, as `optax.clip_by_global_norm` and `optax.flatten` do, it is refused.
  A `psum` over `axis_name` of a sum of values of single leaves counts each leaf
  once. Side effects such as `jax.debug.print` are refused. Under `jax.vmap`,
  each shard updates all leaves and uses its own.

  Create the state with `init_state`, map it with the specs of `state_specs`,
  and pass `in_specs=param_specs` to both. It fits one number of shards;
  `unshard_state` converts it to the state of the replicated optimizer, and
  `resize_state` to another number of shards. All axes of the mesh must be
  mapped. Under plain `jax.jit`, use `on_mesh(tx, mesh, in_specs=param_specs)`.
  Its `update` also accepts the gradient of the whole batch: set
  `if_sliced='mean', if_reduced='mean'`.

  Args:
    inner: The transformation.
    axis_name: The mapped axis, or a sequence of mapped axes, over whose shards
      the updates are reduced: the axes of the batch. The last axis of the mesh
      is scattered first, so that the others carry only a part of the bytes; it
      should be the fastest one.
    param_specs: The `PartitionSpec`s of the parameters, as for the `in_specs`
      of `jax.shard_map`: a tree or a prefix tree. They may name axes of
      `axis_name` (FSDP) and others (tensor parallelism).
    whole_dims: The number of the last dimensions that form a matrix, if leaves
      contain stacked layers, such as 2 for [layers, m, n] and [experts, m, n].
      `inner` receives one layer, [1, m, n], and must treat each layer
      independently, as Muon does with `muon_weight_dimension_numbers`. LAMB,
      which scales a leaf by the norm of all layers, is refused, and so is each
      `inner` that reduces a leaf over its layers, but not one that reshapes it
      before. `None` means that a leaf is one matrix.
    reduction: `'mean'` or `'sum'` over the shards.
    groups: A partition of the shards into groups of equal size. Each group
      reduces separately and holds the state once.
    if_reduced: The treatment of a leaf whose type says that it is the same on
      all shards, for a mean; see `cross_shard_mean`.
    if_sliced: The meaning of the gradient of a leaf that is sliced over an axis
      of `axis_name`, for a mean. `'sum'`: it is the sum over the shards, as
      `jax.lax.all_gather` in the loss of each shard gives it, and is divided
      by their number. `'mean'`: it is the gradient of the mean of the losses,
      and is used as it is. With `reduction='sum'`, the gradient of a slice
      must be a sum.
    assume_leafwise: Whether to skip the check that `inner` treats each leaf and
      each layer independently. Set it only if `inner` is refused although it
      treats each leaf and layer independently: any other `inner` then trains
      incorrectly without an error. State that belongs to several leaves is
      refused in any case.

  Returns:
    An `optax.GradientTransformationExtraArgs` with an `OwnedUpdateState`. Its
    `update` accepts the optional extra argument `weight`, like that of
    `cross_shard_mean`, and passes all others to `inner`.

  Raises:
    NameError: In `init` and `update`, if an axis is not bound.
    TypeError: If an argument has the wrong type; in `update`, if a leaf is an
      integer or boolean, `weight` is not a real number, or the state belongs
      to another transformation.
    ValueError: If an argument has a wrong value, such as groups of different
      sizes; in `init` and `update`, if `inner` mixes leaves or layers, if
      `param_specs` does not agree with the types of the parameters, or with the
      `in_specs` of `init_state` or `on_mesh`, or if `if_sliced` does not say
      what the gradients of slices are; in `update`, as in `cross_shard_mean`,
      if slices come with a `weight`, if an extra argument has the shape of
      slices or of all layers, or if the state was made for other parameters or
      another number of shards.

  Examples:
    Muon for matrices whose rows are sharded; one shard updates each matrix:

    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import shard_transforms
    >>> from shard_transforms import contrib
    >>> spec = jax.P('data')
    >>> tx = contrib.owned_update(
    ...     optax.contrib.muon(0.1), 'data', param_specs=spec,
    ...     if_sliced='sum')
    >>> mesh = jax.make_mesh((8,), ('data',))
    >>> params = {str(i): jnp.ones((8, 4)) for i in range(16)}
    >>> state = shard_transforms.init_state(tx, params, mesh, in_specs=spec)
    >>> print([x.shape for x in state.inner_state.stacks.values()])
    [(8, 2, 8, 4)]

  References:
    Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion
    Parameter Models, 2020, https://arxiv.org/abs/1910.02054 (stage 1).
  """
  arguments.check_reduction(reduction)
  arguments.check_bool('assume_leafwise', assume_leafwise)
  specs_lib.check(param_specs, _CALLER, 'param_specs')
  _check_options(whole_dims, if_sliced, reduction, groups, param_specs)
  reduce = sharded_reduction.ShardedReduction(
      _CALLER,
      reduction,
      axes_lib.as_axes(axis_name),
      None if groups is None else groups_lib.as_groups(groups),
      if_reduced,
  )
  owned = owned_inner.OwnedInner(
      arguments.as_inner(inner, _CALLER),
      reduce,
      param_specs,
      if_sliced,
      whole_dims,
      assume_leafwise,
  )

  def init_fn(params):
    return OwnedUpdateState(owned.init(params))

  def update_fn(updates, state, params=None, *, weight=None, **extra_args):
    arguments.check_state(state, OwnedUpdateState, _CALLER)
    updates, inner_state = owned.update(
        updates, weight, state.inner_state, params, extra_args
    )
    return updates, OwnedUpdateState(inner_state)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _check_options(whole_dims, if_sliced, reduction, groups, param_specs):
  """Checks the options for the layout of parameters.

  Raises:
    TypeError: If an option has the wrong type.
    ValueError: If an option has a wrong value.
  """
  if whole_dims is not None:
    arguments.as_at_least('whole_dims', whole_dims, 1)
  if if_sliced not in get_args(owned_inner.IfSliced):
    raise ValueError(
        "`if_sliced` must be 'error', 'sum' or 'mean', got" f' {if_sliced!r}.'
    )
  if if_sliced == 'mean' and reduction == 'sum':
    raise ValueError(
        f"`reduction` of `{_CALLER}` must be 'mean' with if_sliced='mean',"
        " got 'sum'."
    )
  if groups is not None and specs_lib.axes_of(param_specs):
    raise ValueError(
        f'`param_specs` of `{_CALLER}` must not slice parameters with `groups`,'
        f' got {param_specs!r}. Leave out one of the two arguments.'
    )
