"""`shard_update`: ZeRO-1, each shard runs the optimizer on its part."""

from collections.abc import Mapping
from typing import Literal, NamedTuple, get_args

import optax

from shard_transforms._src.base import arguments
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import groups as groups_lib
from shard_transforms._src.base import state_rules
from shard_transforms._src.base import weights
from shard_transforms._src.reduction import leaf_sums
from shard_transforms._src.reduction import sharded_reduction
from shard_transforms._src.transforms import owned_inner
from shard_transforms._src.transforms import owners
from shard_transforms._src.transforms import sliced_inner

Slices = Literal['elements', 'leaves']

_CALLER = 'shard_update'


class ShardUpdateState(NamedTuple):
  """State of `shard_update`.

  Attributes:
    inner_state: State of the inner transformation. Leaves of the shape of a
      parameter that is cut hold each shard's slice, of shape
      [1, 1, ..., 1, elements]: a leading axis, of length 1 inside the mapped
      function and of the number of shards outside, and as many axes as the
      parameter has. (A parameter of a single element has no further axis.)
      With `slices='leaves'`, an `OwnedLeaves`: its `leaves` are the state of
      the inner transformation, with a `Place` for each leaf that its owner
      keeps; its `rows` hold these leaves, of shape [1, elements]; and its
      `whole()` returns the state of the replicated optimizer, in arrays of
      NumPy, for any number of shards.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import shard_transforms
    >>> mesh = jax.make_mesh((8,), ('data',))
    >>> tx = shard_transforms.shard_update(optax.adam(0.1), 'data')
    >>> state = shard_transforms.init_state(tx, jnp.ones((3, 5)), mesh)
    >>> print(optax.tree_utils.tree_get(state, 'mu').shape)
    (8, 1, 2)
  """

  inner_state: optax.OptState

  def resize_rules(
      self, reduction: state_rules.Reduction | None
  ) -> Mapping[str, state_rules.ResizeRule]:
    """Returns how `resize_state` converts its field."""
    del reduction
    return {'inner_state': state_rules.ResizeRule('cut_anew')}


def shard_update(
    inner: optax.GradientTransformation,
    axis_name: axes_lib.AxisName,
    *,
    reduction: weights.Kind = 'mean',
    groups: groups_lib.GroupsLike | None = None,
    on_invariant: leaf_sums.OnInvariant = 'error',
    assume_elementwise: bool = False,
    slices: Slices = 'elements',
    cost: owners.Cost | None = None,
    assume_leafwise: bool = False,
) -> optax.GradientTransformationExtraArgs:
  r"""Shards the optimizer (ZeRO-1): each shard updates its part of the leaves.

  Gives what `optax.chain(cross_shard_mean(axis_name), inner)` gives, with the
  state and the work of `inner` divided among the N shards. A reduce-scatter
  gives each shard the mean of its slice of every leaf, `inner` turns that into
  a slice of the updates, and an all-gather joins the slices. Together these
  send as many bytes as the all-reduce that they replace.

  `inner` sees the tree of the parameters, and the rank of each, with all
  elements of a slice along the last axis: masks and labels that use paths or
  ranks work unchanged. It must treat each element alone, as SGD, Adam, AdamW,
  Lion, Adagrad and RMSProp do. An `inner` that looks across elements is
  refused, because a shard sees only a slice: LAMB, Adafactor, Muon, noise. For
  these, use `slices='leaves'`. A sum of all elements of sliced leaves is right
  if one `psum` over `axis_name` follows. To clip by the global norm, put
  `clip_by_global_norm(max_norm, axis_name)` of this library first in `inner`.

  With `slices='leaves'`, each leaf has an owner, which alone keeps its state
  and updates it: Muon, LAMB, LARS, Adafactor, SOAP and Shampoo are divided
  among shards. Owners are chosen so that all have about the same work. As many
  bytes are sent as by an all-reduce if all owners have the same number of
  elements; otherwise, each sends as much as the largest. `inner` is traced on
  the whole tree, so that paths, masks, labels, random numbers and the number of
  leaves are those of the replicated optimizer, and each shard runs its part of
  that program. `inner` must treat each leaf alone. One that mixes leaves is
  refused, such as `optax.clip_by_global_norm` and `optax.flatten`. A `psum`
  over `axis_name` of a sum of numbers of single leaves counts each leaf once.
  Shards stay idle if there are fewer leaves than shards. Under `jax.vmap`, each
  shard updates all leaves and uses its own.

  Scalars are not sliced and have no owner: they are reduced as by
  `cross_shard_mean`, and all shards update them. Make the state with
  `init_state`, and map it with the specs of `state_specs`. It fits this number
  of shards; `resize_state` converts it to another. All axes of the
  mesh must be mapped, and parameters may be sharded over others than
  `axis_name`.

  Args:
    inner: The transformation that runs on slices.
    axis_name: The mapped axis, or a sequence of them, the fast one last, over
      whose shards the updates are reduced and sliced. The last axis is
      scattered first, so that the others carry only a part.
    reduction: `'mean'` or `'sum'` over the shards.
    groups: A partition of the shards into groups of one size, each of which
      reduces among itself and holds the state once.
    on_invariant: How to read a leaf whose type says that it is the same on all
      shards, for a mean; see `cross_shard_mean`.
    assume_elementwise: Whether to take your word that `inner` treats each
      element alone, for an `inner` that is refused because its program is not
      understood. Nothing is checked then: if it looks across elements, it
      trains wrongly without an error.
    slices: What a shard updates: its part of the `'elements'` of each leaf, or
      whole `'leaves'`.
    cost: For whole leaves, how long the update of each takes: a function of the
      parameters, or of their shapes, that returns a tree of numbers of at least
      0. Without it, the cost of a matrix [m, n] is m * n * min(m, n), as
      for Muon, times the other dimensions of a stack; that of a vector is its
      number of elements.
    assume_leafwise: As `assume_elementwise`, for whole leaves. State that
      belongs to several leaves is then kept by each shard.

  Returns:
    An `optax.GradientTransformationExtraArgs` with a `ShardUpdateState`, whose
    `update` takes the optional extra argument `weight`, as that of
    `cross_shard_mean` does, and passes all others to `inner`.

  Raises:
    NameError: In `init` and `update`, if an axis is not bound.
    TypeError: If an argument is of the wrong kind, or `cost` gives something
      that is not a number; in `update`, if a leaf is an integer or boolean,
      `weight` is not a real number, or the state is of another transformation.
    ValueError: If an argument has a wrong value, such as groups of different
      sizes, or `cost` gives a negative number; in `init` and `update`, if
      `inner` looks across elements or mixes leaves, unless it is assumed not
      to; in `update`, as in `cross_shard_mean`, or if the state was made for
      other parameters or another number of shards.

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

    Muon, each of whose matrices one shard updates:

    >>> tx = shard_transforms.shard_update(
    ...     optax.contrib.muon(0.1), 'data', slices='leaves')
    >>> mesh = jax.make_mesh((8,), ('data',))
    >>> params = {str(i): jnp.ones((4, 4)) for i in range(16)}
    >>> state = shard_transforms.init_state(tx, params, mesh)
    >>> print(state.inner_state.rows['float32'].shape)
    (8, 32)

  References:
    Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion
    Parameter Models, 2020, https://arxiv.org/abs/1910.02054 (stage 1).
  """
  arguments.check_reduction(reduction)
  _check_slices(slices, cost, assume_elementwise, assume_leafwise)
  reduce = sharded_reduction.ShardedReduction(
      _CALLER,
      reduction,
      axes_lib.as_axes(axis_name),
      None if groups is None else groups_lib.as_groups(groups),
      on_invariant,
  )
  inner = arguments.as_inner(inner, _CALLER)
  if slices == 'leaves':
    own = owned_inner.OwnedInner(inner, reduce, cost, assume_leafwise)
    update = own.update
  else:
    own = sliced_inner.SlicedInner(inner, reduce, assume_elementwise)

    def update(updates, weight, state, params, extra_args):
      reduce.check_mapped()
      parts = reduce.scatter(updates, weight)
      parts, state = own.update(parts, state, updates, params, extra_args)
      return reduce.gather(parts, updates), state

  def init_fn(params):
    return ShardUpdateState(own.init(params))

  def update_fn(updates, state, params=None, *, weight=None, **extra_args):
    arguments.check_state(state, ShardUpdateState, _CALLER)
    updates, inner_state = update(
        updates, weight, state.inner_state, params, extra_args
    )
    return updates, ShardUpdateState(inner_state)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _check_slices(slices, cost, assume_elementwise, assume_leafwise):
  """Checks what is cut, and the arguments that belong to it.

  Raises:
    TypeError: If one is of the wrong kind.
    ValueError: If one belongs to other slices.
  """
  arguments.check_bool('assume_elementwise', assume_elementwise)
  arguments.check_bool('assume_leafwise', assume_leafwise)
  if slices not in get_args(Slices):
    raise ValueError(
        f"`slices` must be 'elements' or 'leaves', got {slices!r}."
    )
  if cost is not None and not callable(cost):
    raise TypeError(
        '`cost` must be a function from the tree of the parameters to a tree of'
        f' numbers, got {cost!r}.'
    )
  needed = {'elements': assume_elementwise, 'leaves': assume_leafwise}
  if needed.pop(slices) is False and True in needed.values():
    name = 'elementwise' if slices == 'leaves' else 'leafwise'
    raise ValueError(
        f'`assume_{name}` must be False with slices={slices!r}, got True.'
    )
  if cost is not None and slices == 'elements':
    raise ValueError(
        "`cost` must come with slices='leaves', which have owners, got"
        f' {cost!r} with slices={slices!r}.'
    )
