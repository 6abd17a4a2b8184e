"""`shard_update`: each shard runs the optimizer on its slice of the whole."""

from collections.abc import Mapping
import contextlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from shard_transforms._src.base import arguments
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import groups as groups_lib
from shard_transforms._src.base import per_shard_state
from shard_transforms._src.base import state_rules
from shard_transforms._src.base import weights
from shard_transforms._src.base import wrapper
from shard_transforms._src.reduction import flat_slices
from shard_transforms._src.reduction import reduction_options
from shard_transforms._src.reduction import sharded_reduction
from shard_transforms._src.tracing import elementwise


class ShardUpdateState(NamedTuple):
  """State of `shard_update`.

  Attributes:
    inner_state: State of the inner transformation. Leaves of the shape of a
      parameter that is cut hold each shard's slice, of shape
      [1, 1, ..., 1, elements]: a leading axis, of length 1 inside the mapped
      function and of the number of shards outside, and as many axes as the
      parameter has. (A parameter of a single element has no further axis.)

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
    """Returns what `resize_state` does with its field."""
    del reduction
    return {'inner_state': state_rules.ResizeRule('cut_anew')}


def shard_update(
    inner: optax.GradientTransformation,
    axis_name: axes_lib.AxisName,
    *,
    reduction: weights.Kind = 'mean',
    groups: Any = None,
    on_invariant: reduction_options.OnInvariant = 'error',
    bucket_bytes: int | str = 'auto',
) -> optax.GradientTransformationExtraArgs:
  r"""Reduces updates, and has each shard run an optimizer on its slice of them.

  Gives what `optax.chain(cross_shard_mean(axis_name), inner)` gives, with the
  state and the work of `inner` divided among the N shards: a reduce-scatter
  leaves each shard the mean of its slice of every leaf, `inner` turns that
  into a slice of the updates, and an all-gather joins them. Together these send
  as many bytes as the all-reduce that they replace.

  `inner` sees the tree of the parameters, and the rank of each, with all
  elements of a slice along the last axis: masks and labels that go by path or
  rank work as ever. It must treat each element alone, as SGD, Adam, AdamW,
  Lion, Adagrad and RMSProp do. What looks across elements is refused, because
  a shard sees a slice: LAMB, Adafactor, Muon, noise. To clip by the global
  norm, `clip_by_global_norm(max_norm, axis_name)` of this library comes first
  in `inner`; a sum over shards by hand is refused.

  Scalars are not cut: they are reduced as by `cross_shard_mean`, and all shards
  update them. Make the state with `init_state`, and map it with the specs of
  `state_specs`; it fits this number of shards alone, and `resize_state` makes
  it fit another. All axes of the mesh must be mapped, and parameters may be
  sharded over others than `axis_name`.

  Args:
    inner: The transformation that runs on slices.
    axis_name: The mapped axis, or a sequence of them, the fast one last, over
      whose shards the updates are reduced and cut. The last axis is scattered
      first, so that the others carry but a part.
    reduction: `'mean'` or `'sum'` over the shards.
    groups: A partition of the shards into groups of one size, each of which
      reduces among itself and holds the state once.
    on_invariant: What a leaf is whose type says that it is the same on all
      shards; see `cross_shard_mean`. Nothing is sent to reduce such a leaf.
    bucket_bytes: Slices of leaves that are smaller than this travel together;
      see `cross_shard_mean`.

  Returns:
    An `optax.GradientTransformationExtraArgs` with a `ShardUpdateState`, whose
    `update` takes the optional extra argument `weight`, as that of
    `cross_shard_mean` does, and hands all others to `inner`.

  Raises:
    NameError: In `init` and `update`, if an axis is not bound.
    TypeError: If an argument is of the wrong kind; in `update`, if a leaf is an
      integer or boolean, `weight` is not a real number, or the state is of
      another transformation.
    ValueError: If an argument has a wrong value, such as groups of different
      sizes; in `init` and `update`, if `inner` looks across elements; in
      `update`, as in `cross_shard_mean`, or if the state was made for other
      parameters or another number of shards.

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
  caller = 'shard_update'
  arguments.check_reduction(reduction)
  if groups is not None:
    groups = groups_lib.as_groups(groups)
    if not groups_lib.is_even(groups):
      raise ValueError(
          f'`groups` of `{caller}` must be of one size, because each of them'
          f' holds the state once, in equal slices, got {groups!r}.'
      )
  reduce = sharded_reduction.ShardedReduction(
      caller,
      reduction,
      axes_lib.as_axes(axis_name),
      groups,
      on_invariant,
      bucket_bytes,
  )
  inner = wrapper.as_inner(inner, caller)

  checked = set()

  def find_problem(updates, params, extra_args):
    """Returns why `inner` cannot run on slices, if it cannot."""
    # Tracing takes long, and a state is made for what is updated then.
    leaves, treedef = jax.tree.flatten((updates, params))
    num_slices = reduce.num_slices()
    key = num_slices, treedef, _describe(leaves, reduce.axes)
    if key in checked and not extra_args:
      return None
    # What is reduced over all shards is the same on all of them.
    invariant = () if groups else reduce.axes
    problem = elementwise.find_problem(
        inner, updates, params, extra_args, num_slices, invariant
    )
    if problem is None and not extra_args:
      checked.add(key)
    return problem

  def store(own_state, whole_kinds):
    def store(own, whole):
      is_slice = jnp.shape(own) != jnp.shape(whole)
      return per_shard_state.store(own, reduce.axes) if is_slice else own

    return jax.tree.map(store, own_state, whole_kinds)

  def init_fn(params):
    _check_mapped(reduce.axes)
    problem = None
    # `inner` may need extra arguments, which only `update` has.
    with contextlib.suppress(Exception):
      problem = find_problem(params, params, {})
    _raise(problem)
    own_state = inner.init(reduce.own(params))
    whole_kinds = jax.eval_shape(inner.init, params)
    return ShardUpdateState(store(own_state, whole_kinds))

  def update_fn(updates, state, params=None, *, weight=None, **extra_args):
    wrapper.check_state(state, ShardUpdateState, caller)
    _check_mapped(reduce.axes)
    reduced = reduce.scatter(updates, weight)
    _raise(find_problem(updates, params, extra_args))
    own_params = None if params is None else reduce.own(params)
    like = updates if params is None else params
    whole_kinds = jax.eval_shape(inner.init, like)
    num_slices = reduce.num_slices()
    own_kinds = jax.eval_shape(
        inner.init,
        jax.tree.map(lambda x: flat_slices.kind(x, num_slices), like),
    )
    own_updates, own_state = inner.update(
        reduced,
        _take(state.inner_state, own_kinds, whole_kinds),
        own_params,
        **extra_args,
    )
    new_state = store(own_state, whole_kinds)
    return reduce.gather(own_updates, updates), ShardUpdateState(new_state)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _check_mapped(axes):
  """Refuses a mesh of which an axis is left to the compiler.

  Raises:
    ValueError: If there is one.
  """
  unmapped = axes_lib.unmapped_axes(axes)
  if unmapped:
    raise ValueError(
        'The mesh of `shard_update` must have no axis that is not mapped, got'
        f' {unmapped!r}: cutting a leaf would gather what such an axis shards.'
        ' Name all axes in `axis_names` of `jax.shard_map`.'
    )


def _raise(problem):
  if problem:
    raise ValueError(
        '`inner` of `shard_update` must treat each element of the parameters'
        ' alone, whatever their shapes, and alike on all shards, because each'
        f' shard holds a slice of them, but {problem}. Keep such a'
        ' transformation whole, as in `optax.chain(cross_shard_mean(axis_name),'
        ' inner)`: for all parameters, or for some of them with'
        ' `optax.partition`. To clip by the global norm, put'
        ' `shard_transforms.clip_by_global_norm(max_norm, axis_name)` first in'
        ' `inner`. Or let what comes first see what is reduced:'
        ' `optax.chain(cross_shard_mean(axis_name), first,'
        " shard_update(inner, axis_name, on_invariant='averaged'))`."
    )


def _describe(leaves, axes):
  """Returns what the check of `inner` depends on."""
  tracked = tuple(map(axes_lib.is_tracked, axes))
  kinds = [
      (jnp.shape(leaf), jnp.result_type(leaf), axes_lib.varying_axes(leaf))
      for leaf in leaves
  ]
  return tracked, tuple(kinds)


def _take(state, own_kinds, whole_kinds):
  """Takes each shard's slices out of the state.

  Raises:
    ValueError: If it has other leaves, or leaves of other shapes.
  """
  found = jax.tree.structure(state), jax.tree.structure(own_kinds)
  if found[0] != found[1]:
    raise ValueError(_MADE_FOR_OTHERS + f'the tree {found[0]}.')

  def take(path, leaf, own, whole):
    is_slice = own.shape != whole.shape
    if jnp.shape(leaf) != (1,) * is_slice + own.shape:
      raise ValueError(
          f'{_MADE_FOR_OTHERS}the shape {jnp.shape(leaf)} at'
          f' {jax.tree_util.keystr(path)}, where a shard has'
          f' {(1,) * is_slice + own.shape}.'
      )
    return leaf[0] if is_slice else leaf

  return jax.tree_util.tree_map_with_path(take, state, own_kinds, whole_kinds)


_MADE_FOR_OTHERS = (
    'State of `shard_update` must be made for these parameters and this number'
    ' of shards by `shard_transforms.init_state`, and mapped with the specs of'
    ' `shard_transforms.state_specs`, got '
)
