"""`owned_update`: ZeRO-1, each shard runs the optimizer on whole leaves."""

from typing import NamedTuple, get_args

import jax
from jax.sharding import PartitionSpec as P
import optax

from shard_transforms._src.base import arguments
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import groups as groups_lib
from shard_transforms._src.base import partition_specs as specs_lib
from shard_transforms._src.base import weights
from shard_transforms._src.owners import owned_inner
from shard_transforms._src.owners import owned_leaves
from shard_transforms._src.reduction import leaf_sums
from shard_transforms._src.reduction import sharded_reduction

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
    >>> from shard_transforms import owners
    >>> mesh = jax.make_mesh((8,), ('data',))
    >>> tx = owners.owned_update(optax.lamb(0.1), 'data')
    >>> params = {str(i): jnp.ones((4, 4)) for i in range(16)}
    >>> state = shard_transforms.init_state(tx, params, mesh)
    >>> print([row.shape for row in state.inner_state.stacks.values()])
    [(8, 2, 4, 4), (8, 2, 4, 4)]
  """

  inner_state: owned_leaves.OwnedLeaves

  rules = {'inner_state': owned_leaves.FULL_RULE}


def owned_update(
    inner: optax.GradientTransformation,
    axis_name: axes_lib.AxisName,
    *,
    param_specs: specs_lib.SpecTree = P(),
    whole_dims: int | None = None,
    reduction: weights.Kind = 'mean',
    groups: groups_lib.GroupsLike | None = None,
    on_invariant: leaf_sums.OnInvariant = 'error',
    on_sliced: owned_inner.OnSliced = 'error',
    assume_leafwise: bool = False,
) -> optax.GradientTransformationExtraArgs:
  r"""Shards the optimizer (ZeRO-1): each shard updates the leaves that it owns.

  Gives what `optax.chain(cross_shard_mean(axis_name), inner)` gives, with the
  state and the work of `inner` divided among the N shards. Each leaf has an
  owner, which alone keeps its state and updates it. So optimizers that look at
  whole leaves are divided among shards, too: Muon, LAMB, LARS, Adafactor, SOAP,
  Shampoo. For optimizers that treat each element alone, such as Adam, take
  `shard_transforms.shard_update`.

  A reduce-scatter brings the mean of each gradient to its owner, and an
  all-gather brings the updates back. There are K owners: the smallest divisor
  of N for which more owners would lessen neither the work nor the memory of the
  busiest one by more than a fifth. N / K shards do the work of the same owner,
  so that what a shard sends, computes and holds is that of K shards, however
  many there are. With one leaf, K is 1, and all shards update all of it.

  Matrices of one shape stand in stacks, as many as all owners have. If the
  programs that update them are equal, an owner runs one of them on its own
  matrices. For all other leaves, each owner takes its own branch.

  `inner` is traced on the whole tree, so that paths, masks, labels, random
  numbers and the number of leaves are those of the replicated optimizer, and
  each shard runs its part of that program. `inner` must treat each leaf alone.
  If it mixes leaves, as `optax.clip_by_global_norm` and `optax.flatten` do, it
  is refused. A `psum` over `axis_name` of a sum of numbers of single
  leaves counts each leaf once. Side effects such as `jax.debug.print` are
  refused. Under `jax.vmap`, each shard updates all leaves and uses its own. A
  leaf [L, m, n] of L layers has one owner, unless `inner` is shown its layers:
  `docs/sharded_optimizer.md` has the lines for it.

  Scalars have no owner: they are reduced as by `cross_shard_mean`, and all
  shards update them. Make the state with `init_state`, and map it with the
  specs of `state_specs`. It fits this number of shards; `resize_state` converts
  it to another. All axes of the mesh must be mapped.

  Args:
    inner: The transformation.
    axis_name: The mapped axis, or a sequence of them, over whose shards the
      updates are reduced and the leaves divided. The last axis of the mesh is
      scattered first, so that the others carry only a part: make it the fast
      one.
    reduction: `'mean'` or `'sum'` over the shards.
    groups: A partition of the shards into groups of one size, each of which
      reduces among itself and holds the state once.
    on_invariant: How to read a leaf whose type says that it is the same on all
      shards, for a mean; see `cross_shard_mean`.
    cost: How long the update of each leaf takes: a function of the parameters,
      or of their shapes, that returns a tree of numbers of at least 0. Without
      it, the cost of a matrix [m, n] is m * n * min(m, n), as for Muon, times
      the other dimensions of a stack; that of a vector is its number of
      elements.
    assume_leafwise: Turns off the check that `inner` treats each leaf alone.
      Set it if `inner` is refused although it does: one that mixes leaves then
      trains wrongly without an error. Each shard then keeps the state that
      belongs to several leaves.

  Returns:
    An `optax.GradientTransformationExtraArgs` with an `OwnedUpdateState`, whose
    `update` takes the optional extra argument `weight`, as that of
    `cross_shard_mean` does, and passes all others to `inner`.

  Raises:
    NameError: In `init` and `update`, if an axis is not bound.
    TypeError: If an argument is of the wrong kind, or `cost` gives something
      that is not a number; in `update`, if a leaf is an integer or boolean,
      `weight` is not a real number, or the state is of another transformation.
    ValueError: If an argument has a wrong value, such as groups of different
      sizes, or `cost` gives a negative number; in `init` and `update`, if
      `inner` mixes leaves, unless it is assumed not to; in `init`, if types
      show that the parameters are slices over `axis_name` (FSDP); in `update`,
      as in
      `cross_shard_mean`, or if the state was made for other parameters or
      another number of shards.

  Examples:
    Muon, each of whose matrices one shard updates:

    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import shard_transforms
    >>> from shard_transforms import owners
    >>> tx = owners.owned_update(optax.contrib.muon(0.1), 'data')
    >>> mesh = jax.make_mesh((8,), ('data',))
    >>> params = {str(i): jnp.ones((4, 4)) for i in range(16)}
    >>> state = shard_transforms.init_state(tx, params, mesh)
    >>> print([row.shape for row in state.inner_state.stacks.values()])
    [(8, 2, 4, 4)]

  References:
    Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion
    Parameter Models, 2020, https://arxiv.org/abs/1910.02054 (stage 1).
  """
  arguments.check_reduction(reduction)
  arguments.check_bool('assume_leafwise', assume_leafwise)
  specs_lib.check(param_specs, _CALLER, 'param_specs')
  _check_options(whole_dims, on_sliced, reduction, groups, param_specs)
  reduce = sharded_reduction.ShardedReduction(
      _CALLER,
      reduction,
      axes_lib.as_axes(axis_name),
      None if groups is None else groups_lib.as_groups(groups),
      on_invariant,
  )
  own = owned_inner.OwnedInner(
      arguments.as_inner(inner, _CALLER),
      reduce,
      param_specs,
      on_sliced,
      whole_dims,
      assume_leafwise,
  )

  def init_fn(params):
    return OwnedUpdateState(own.init(params))

  def update_fn(updates, state, params=None, *, weight=None, **extra_args):
    arguments.check_state(state, OwnedUpdateState, _CALLER)
    updates, inner_state = own.update(
        updates, weight, state.inner_state, params, extra_args
    )
    return updates, OwnedUpdateState(inner_state)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _check_options(whole_dims, on_sliced, reduction, groups, param_specs):
  """Checks how parameters are said to be laid out.

  Raises:
    TypeError: If an option is of the wrong kind.
    ValueError: If one has a wrong value.
  """
  is_number = isinstance(whole_dims, int) and not isinstance(whole_dims, bool)
  if whole_dims is not None and not is_number:
    raise TypeError(
        f'`whole_dims` must be None or a number of dimensions, got'
        f' {whole_dims!r}.'
    )
  if is_number and whole_dims < 1:
    raise ValueError(f'`whole_dims` must be at least 1, got {whole_dims}.')
  if on_sliced not in get_args(owned_inner.OnSliced):
    raise ValueError(
        "`on_sliced` must be 'error', 'summed' or 'averaged', got"
        f' {on_sliced!r}.'
    )
  if on_sliced == 'averaged' and reduction == 'sum':
    raise ValueError(
        f"`reduction` of `{_CALLER}` must be 'mean' with on_sliced='averaged',"
        " got 'sum'."
    )
  specs = jax.tree.leaves(param_specs, is_leaf=specs_lib.is_spec)
  if groups is not None and any(map(specs_lib.axes_of, specs)):
    raise ValueError(
        f'`param_specs` of `{_CALLER}` must not slice parameters with `groups`,'
        f' got {param_specs!r}.'
    )
