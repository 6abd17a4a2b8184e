"""`update` of `on_mesh` under plain `jax.jit`, for per-shard gradients."""

from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Mapping
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import mapping
from shard_transforms._src.base import partition_specs as specs_lib
from shard_transforms._src.base import stacked as stacked_lib
from shard_transforms._src.state import specs
from shard_transforms._src.transforms import unreduced

_CALLER = 'on_mesh'
# Extra arguments that may differ between shards.
_OF_SHARDS = ('weight', 'local_step', 'value')


def stacked_update(
    inner: optax.GradientTransformationExtraArgs,
    mesh: jax.sharding.Mesh,
    axes: tuple[Hashable, ...],
    in_specs: specs_lib.SpecTree,
) -> Callable[..., tuple[Any, Any]]:
  """Returns an `update` function that maps `axes` over per-shard gradients."""

  @functools.lru_cache(maxsize=8)
  def state_specs(treedef, types):
    params = treedef.unflatten([jax.ShapeDtypeStruct(*x) for x in types])
    return specs.state_specs(inner, params, mesh, in_specs=in_specs)

  def kept_specs(like):
    leaves, treedef = jax.tree.flatten(like)
    return state_specs(
        treedef, tuple((jnp.shape(x), leaves_lib.dtype_of(x)) for x in leaves)
    )

  def explaining():
    return mapping.explaining_closures(
        'The transformation of `on_mesh`',
        'Keep them in its state: put `optax.inject_hyperparams` inside of'
        ' `on_mesh`, for one.',
    )

  def update_global(updates, state, params, extra_args):
    kept = kept_specs(params)
    of_updates = specs_lib.of_params(in_specs, updates, _CALLER)
    of_params = specs_lib.of_params(in_specs, params, _CALLER)

    def of_shard(updates, state, params, extra_args):
      updates, state = inner.update(updates, state, params, **extra_args)
      _check_reduced(updates, of_updates, 'updates')
      _check_reduced(state, kept, 'state')
      return updates, state

    _check_state(state, kept)
    args = updates, state, params, extra_args
    of_extra = jax.tree.map(lambda _: P(), extra_args)
    of_args = of_updates, kept, of_params, of_extra
    with explaining():
      return mapping.call(
          of_shard,
          args,
          mapping.flat_specs(of_args, args),
          jax.tree.leaves((of_updates, kept), is_leaf=specs_lib.is_spec),
          mesh,
          axes,
          out_types=list(map(mapping.spec_of, jax.tree.leaves(args[:2]))),
      )

  def update(updates, state, params, extra_args):
    if _are_global(updates, params, in_specs):
      return update_global(updates, state, params, extra_args)
    stack = _as_stacked(updates, params, extra_args.get('weight'), mesh, axes)
    _check_axes(stack, axes)
    _check_slices(stack, in_specs)
    extra_args = _as_of_shards(extra_args, stack, mesh)
    _check(stack, params, extra_args, mesh)
    grads = jax.tree.map(_entry, stack.tree)
    like = grads if params is None else params
    kept = kept_specs(like)
    of_grads = specs_lib.of_params(in_specs, grads, _CALLER)
    of_params = specs_lib.of_params(in_specs, params, _CALLER)

    def of_shard(stack, state, params, extra_args):
      grads = stacked_lib.local_entry(stack)
      extra_args = _own(extra_args)
      updates, state = inner.update(grads, state, params, **extra_args)
      if _has_same_tree(updates, params):
        _check_shapes(updates, params)
      _check_reduced(updates, of_grads, 'updates')
      _check_reduced(state, kept, 'state')
      return updates, state

    of_stack = jax.tree.map(
        functools.partial(_stack_spec, stack.axes),
        of_grads,
        grads,
        params if _has_same_tree(grads, params) else grads,
    )
    of_extra = jax.tree.map(
        lambda x: P(stack.axes) if stacked_lib.is_stacked(x) else P(),
        extra_args,
        is_leaf=stacked_lib.is_stacked,
    )
    of_args = (
        dataclasses.replace(stack, tree=of_stack),
        kept,
        of_params,
        of_extra,
    )
    args = stack, state, params, extra_args
    _check_state(state, kept)
    with explaining():
      return mapping.call(
          of_shard,
          args,
          mapping.flat_specs(of_args, args),
          jax.tree.leaves((of_grads, kept), is_leaf=specs_lib.is_spec),
          mesh,
          axes,
          out_types=_types(stack, params, state),
      )

  return update


def _are_global(updates, params, in_specs):
  """Whether updates are global gradients, in the tree of their parameters.

  This is allowed only if parameters are sharded: then a transformation that
  reduces can read from the types that the updates are already reduced.
  """
  told = jax.tree.leaves(in_specs, is_leaf=specs_lib.is_spec)
  if stacked_lib.is_stacked(updates) or not any(map(specs_lib.axes_of, told)):
    return False
  is_like = jax.tree.leaves(updates) and _has_same_tree(updates, params)
  return bool(is_like) and not unreduced.axes_of(updates, _CALLER)


def _as_stacked(updates, params, weight, mesh, axes):
  """Returns the per-shard gradients as a `Stacked`.

  Raises:
    ValueError: If the updates are not per-shard gradients.
  """
  if stacked_lib.is_stacked(updates):
    return updates
  # `nnx.Optimizer` converts a `Stacked` to a mapping, like every other node.
  if isinstance(updates, Mapping) and len(updates) == 1:
    ((name, tree),) = updates.items()
    is_one = name in stacked_lib.NAMES and params is not None
    if is_one and _has_same_tree(tree, params):
      _check_num_stacked(tree, mesh, axes)
      is_weighted = stacked_lib.NAMES.index(name) == 1
      return stacked_lib.Stacked(tree, axes, is_weighted)
  if not jax.tree.leaves(updates):
    return stacked_lib.Stacked(updates, axes)
  if unreduced_axes := unreduced.axes_of(updates, _CALLER):
    return unreduced.to_stacked(updates, unreduced_axes, mesh, weight)
  (path, leaf), *_ = jax.tree.leaves_with_path(updates)
  raise ValueError(
      '`update` of `on_mesh` must get the gradient of each shard, got an array'
      f' {leaves_lib.name_of(path)} of the shape {jnp.shape(leaf)}, which may'
      ' be reduced already. Take the gradients with'
      ' `shard_transforms.value_and_grad`; if they are stacked, [shards, ...],'
      ' pass `shard_transforms.Stacked(grads, axes)`. A global gradient needs'
      ' no reduction: pass it to the optimizer without `on_mesh`.'
  )


def _check_num_stacked(tree, mesh, axes):
  """Checks the number of shards of gradients that have lost their axes.

  Raises:
    ValueError: If the gradients have another number of shards.
  """
  num_shards = mapping.num_shards(mesh, axes)
  found = {len(x) for x in jax.tree.leaves(tree)}
  if not found <= {num_shards}:
    raise ValueError(
        '`axis_name` of `on_mesh` must name the axes of the batch where the'
        ' framework does not keep those of the gradients, as'
        f' `nnx.Optimizer`, got {axes} of {num_shards} shards for gradients of'
        f' {sorted(found)}.'
    )


def _as_of_shards(extra_args, stack, mesh):
  """Returns the extra arguments, with each per-shard argument as a `Stacked`.

  Raises:
    ValueError: If the length of an argument is not the number of shards.
  """
  num_shards = mapping.num_shards(mesh, stack.axes)

  def as_stacked(name, x):
    if name not in _OF_SHARDS or not jnp.ndim(x):
      return x
    if jnp.shape(x)[0] != num_shards:
      raise ValueError(
          f'`{name}` of `on_mesh` must be a scalar or have an element for each'
          f' of the {num_shards} shards, got the shape {jnp.shape(x)}.'
      )
    return stacked_lib.Stacked(x, stack.axes)

  return {
      name: x if stacked_lib.is_stacked(x) else as_stacked(name, x)
      for name, x in extra_args.items()
      if x is not None
  }


def _check_axes(stack, axes):
  """Checks the axes over which gradients are stacked.

  Raises:
    ValueError: If the transformation does not name all these axes.
  """
  if not isinstance(stack.axes, tuple) or not stack.axes:
    raise ValueError(
        '`axes` of stacked gradients must be the tuple of axes over which'
        f' their first dimension is sharded, got {stack.axes!r}. Write'
        f' `shard_transforms.Stacked(grads, {axes!r})`.'
    )
  if not set(stack.axes) <= set(axes):
    raise ValueError(
        f'`axis_name` of `on_mesh` must name all axes of the gradients,'
        f' {stack.axes}, got {axes}.'
    )


def _check_slices(stack, in_specs):
  """Checks that the gradient of each shard is unsharded over the batch axes.

  Raises:
    ValueError: If `in_specs` shards parameters over the axes of the batch.
  """
  named = jax.tree.leaves(in_specs, is_leaf=specs_lib.is_spec)
  sliced = set().union(*map(specs_lib.axes_of, named)).intersection(stack.axes)
  if sliced:
    raise ValueError(
        '`in_specs` of `on_mesh` must not name the axes of the batch where no'
        f' axis is mapped, got {sorted(sliced, key=str)}: the gradient of each'
        ' shard is whole there. Leave them out, also for parameters that are'
        ' sharded over them, and name the axes with `axis_name`.'
    )


def _check(stack, params, extra_args, mesh):
  """Checks the per-shard gradients against the parameters and the mesh.

  Raises:
    ValueError: If the gradients belong to another mesh or to other parameters,
      or if they need a weight and there is none.
  """
  if stack.is_weighted and 'weight' not in extra_args:
    raise ValueError(
        '`update` of `on_mesh` must get the `weight` that `value_and_grad`'
        ' returned with these gradients, because `weight_fn` says that shards'
        ' count differently.'
    )
  num_shards = mapping.num_shards(mesh, stack.axes)
  shapes = {}
  if params is not None:
    shapes = {p: jnp.shape(x) for p, x in jax.tree.leaves_with_path(params)}
  for path, leaf in jax.tree.leaves_with_path(stack.tree):
    shape = (num_shards, *shapes.get(path, jnp.shape(leaf)[1:]))
    # An axis of towers may follow the axis of shards.
    first, rest = jnp.shape(leaf)[:1], jnp.shape(leaf)[1:]
    if first != shape[:1] or rest[len(rest) - len(shape) + 1 :] != shape[1:]:
      raise ValueError(
          '`updates` of `on_mesh` must have the gradient of each of the'
          f' {num_shards} shards, got the shape {jnp.shape(leaf)} instead of'
          f' {shape} at {leaves_lib.name_of(path)}.'
      )


def _stack_spec(axes, spec, grad, param):
  """Returns the spec of a stacked gradient, with or without a tower axis."""
  return P(axes, *(None,) * (jnp.ndim(grad) - jnp.ndim(param)), *spec)


def _check_state(state, kept):
  """Checks that the state has the tree that `init` returns.

  Raises:
    ValueError: If the state has another tree.
  """
  try:
    jax.tree.broadcast(kept, state, is_leaf=specs_lib.is_spec)
  except ValueError as error:
    raise ValueError(
        '`state` of `on_mesh` must be what its `init` returned for these'
        f' parameters, got {jax.tree.structure(state)}.'
    ) from error


def _check_shapes(updates, params):
  """Checks that updates have the shapes of the parameters.

  Raises:
    ValueError: If a shape differs, for example by an axis of towers.
  """
  pairs = zip(
      jax.tree.leaves_with_path(updates), jax.tree.leaves(params), strict=True
  )
  for (path, x), param in pairs:
    if jnp.shape(x) != jnp.shape(param):
      raise ValueError(
          'The transformation of `on_mesh` must return updates in the shapes of'
          f' the parameters, got {jnp.shape(x)} instead of'
          f' {jnp.shape(param)} at {leaves_lib.name_of(path)}. Gradients of'
          ' towers, [shards, towers, ...], need'
          ' `shard_transforms.reduce_stacked_towers`.'
      )


def _check_reduced(tree, tree_specs, what):
  """Checks that leaves vary only over the axes in their specs.

  Raises:
    ValueError: If a leaf differs between shards over another axis.
  """
  leaves = jax.tree.leaves_with_path(tree)
  flat = mapping.flat_specs(tree_specs, tree)
  for (path, leaf), spec in zip(leaves, flat, strict=True):
    if spec is None:
      continue
    differs = axes_lib.varying_axes(leaf) - specs_lib.axes_of(spec)
    if differs:
      axis = sorted(differs, key=str)[0]
      raise ValueError(
          f'The transformation of `on_mesh` must reduce the gradients over'
          f' {axis!r}, but {leaves_lib.name_of(path)} of the {what} still'
          ' differs between shards. Put a reduction in front of the optimizer,'
          f' as in `optax.chain(cross_shard_mean({axis!r}), ...)`.'
      )


def _entry(x):
  """Returns the type of one shard's entry in a stacked array."""
  if leaves_lib.is_float0(x):
    return np.zeros(x.shape[1:], x.dtype)
  return jax.ShapeDtypeStruct(x.shape[1:], x.dtype)


def _own(extra_args):
  return jax.tree.map(
      stacked_lib.local_entry, extra_args, is_leaf=stacked_lib.is_stacked
  )


def _has_same_tree(tree, other):
  return jax.tree.structure(tree) == jax.tree.structure(other)


def _types(stack, params, state):
  """Returns the specs in the types of the inputs, for updates and state."""
  grads = jax.tree.leaves(stack.tree)
  if _has_same_tree(stack.tree, params):
    of_updates = list(map(mapping.spec_of, jax.tree.leaves(params)))
  else:
    of_updates = [P(*tuple(mapping.spec_of(x))[1:]) for x in grads]
  return of_updates + list(map(mapping.spec_of, jax.tree.leaves(state)))
