"""The per-shard arguments of `update` of `on_mesh`, and their checks."""

from collections.abc import Hashable
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import mapping
from shard_transforms._src.base import partition_specs as specs_lib
from shard_transforms._src.base import stacked as stacked_lib
from shard_transforms._src.transforms import unreduced

_CALLER = 'on_mesh'
# Extra arguments that may differ between shards.
_PER_SHARD = ('weight', 'local_step', 'value')


def are_global(
    updates: Any, params: optax.Params | None, in_specs: specs_lib.SpecTree
) -> bool:
  """Whether updates are global gradients, in the tree of their parameters.

  This is allowed only if parameters are sharded: then a transformation that
  reduces can read from the types that the updates are already reduced.
  """
  if stacked_lib.is_stacked(updates) or not specs_lib.axes_of(in_specs):
    return False
  is_like_params = jax.tree.leaves(updates) and has_same_tree(updates, params)
  return bool(is_like_params) and not unreduced.axes_of(updates, _CALLER)


def has_same_tree(tree: Any, other: Any) -> bool:
  """Whether two trees have the same structure."""
  return jax.tree.structure(tree) == jax.tree.structure(other)


def stack_arguments(
    updates: Any,
    params: optax.Params | None,
    extra_args: Mapping[str, Any],
    *,
    mesh: jax.sharding.Mesh,
    axes: tuple[Hashable, ...],
    in_specs: specs_lib.SpecTree,
) -> tuple[stacked_lib.Stacked, dict[str, Any]]:
  """Returns gradients, and extra arguments of the shards, as `Stacked`s.

  Args:
    updates: A `Stacked`, unreduced gradients, or a mapping with the tree of a
      `Stacked`.
    params: The parameters, or `None`.
    extra_args: The extra arguments of `update`.
    mesh: The mesh.
    axes: The axes that the transformation names.
    in_specs: The specs of the parameters.

  Raises:
    TypeError: If an extra argument of the shards is a list or a tuple.
    ValueError: If the arguments do not belong to these shards and parameters.
  """
  stack = _stacked_updates(
      updates, params, extra_args.get('weight'), mesh, axes
  )
  _check_axes(stack, axes, in_specs)
  num_shards = mapping.num_shards(mesh, stack.axes)
  _check_shapes(stack, params, num_shards)
  extra_args = {
      name: _stack_argument(name, x, stack.axes, num_shards)
      for name, x in extra_args.items()
      if x is not None
  }
  if stack.is_weighted and 'weight' not in extra_args:
    raise ValueError(
        '`update` of `on_mesh` got gradients of weighted shards, from'
        ' `value_and_grad` with `weight_fn`, but not the weights. Pass the'
        ' `weight` that `value_and_grad` returned with these gradients.'
    )
  return stack, extra_args


def _stacked_updates(updates, params, weight, mesh, axes):
  """Returns the per-shard gradients as a `Stacked`.

  Raises:
    ValueError: If the updates are not per-shard gradients.
  """
  if stacked_lib.is_stacked(updates):
    return updates
  # `nnx.Optimizer` converts a `Stacked` to a mapping, like every other node.
  if isinstance(updates, Mapping) and len(updates) == 1 and params is not None:
    ((name, tree),) = updates.items()
    names = stacked_lib.TREE, stacked_lib.WEIGHTED_TREE
    if name in names and has_same_tree(tree, params):
      return stacked_lib.Stacked(tree, axes, name == stacked_lib.WEIGHTED_TREE)
  if not jax.tree.leaves(updates):
    return stacked_lib.Stacked(updates, axes)
  if unreduced_axes := unreduced.axes_of(updates, _CALLER):
    return unreduced.to_stacked(updates, unreduced_axes, mesh, weight)
  (path, leaf), *_ = jax.tree.leaves_with_path(updates)
  raise ValueError(
      '`update` of `on_mesh` needs the gradient of each shard, but got an array'
      f' of the shape {jnp.shape(leaf)} at {leaves_lib.name_of(path)}, which'
      ' may already be reduced. Take the gradients with'
      ' `shard_transforms.value_and_grad`; if they are stacked, [shards, ...],'
      ' pass `shard_transforms.Stacked(grads, axes)`. A global gradient does'
      ' not need a reduction: pass it to the optimizer without `on_mesh`.'
  )


def _check_axes(stack, axes, in_specs):
  """Checks the axes over which gradients are stacked.

  Raises:
    ValueError: If they are not a tuple of axes of the transformation, or shard
      parameters as well.
  """
  if not isinstance(stack.axes, tuple) or not stack.axes:
    raise ValueError(
        '`axes` of stacked gradients must be the tuple of axes over which'
        f' their first dimension is sharded, got {stack.axes!r}. Write'
        f' `shard_transforms.Stacked(grads, {axes!r})`.'
    )
  if not set(stack.axes) <= set(axes):
    raise ValueError(
        f'The gradients are stacked over the axes {stack.axes}, but `on_mesh`'
        f' binds only {axes}. Name all axes of the gradients in `axis_name` of'
        ' `on_mesh`.'
    )
  if sliced := specs_lib.axes_of(in_specs).intersection(stack.axes):
    raise ValueError(
        '`in_specs` of `on_mesh` shards parameters over axes of the batch,'
        f' {sorted(sliced, key=str)}, but each entry of stacked gradients is'
        ' the gradient of unsharded parameters. Leave these axes out of'
        ' `in_specs`, even for parameters that are sharded over them, and name'
        ' them in `axis_name`.'
    )


def _stack_argument(name, x, axes, num_shards):
  """Returns an extra argument; a per-shard argument as a `Stacked`.

  Raises:
    TypeError: If the argument is a list or a tuple.
    ValueError: If the length of the argument is not the number of shards.
  """
  is_per_shard = name in _PER_SHARD and not stacked_lib.is_stacked(x)
  if is_per_shard and isinstance(x, list | tuple):
    raise TypeError(
        f'`{name}` of `on_mesh` must be an array or a scalar, got {x!r}. Pass'
        f' `jnp.array({name})`.'
    )
  if not is_per_shard or not jnp.ndim(x):
    return x
  if jnp.shape(x)[0] != num_shards:
    raise ValueError(
        f'`{name}` of `on_mesh` must be a scalar or have an element for each of'
        f' the {num_shards} shards, got the shape {jnp.shape(x)}.'
    )
  return stacked_lib.Stacked(x, axes)


def _check_shapes(stack, params, num_shards):
  """Checks the shapes of stacked gradients.

  Raises:
    ValueError: If they have another number of shards, or belong to other
      parameters.
  """
  shapes = {}
  if params is not None:
    shapes = {p: jnp.shape(x) for p, x in jax.tree.leaves_with_path(params)}
  for path, leaf in jax.tree.leaves_with_path(stack.tree):
    length, *shape = jnp.shape(leaf) or (None,)
    expected = shapes.get(path, tuple(shape))
    # An axis of towers may follow the axis of shards.
    has_shape = tuple(shape[len(shape) - len(expected) :]) == expected
    if length != num_shards or not has_shape:
      raise ValueError(
          f'`updates` of `on_mesh` must have an entry for each of the'
          f' {num_shards} shards of {stack.axes}, got the shape'
          f' {jnp.shape(leaf)} instead of {(num_shards, *expected)} at'
          f' {leaves_lib.name_of(path)}. Compute the gradients with respect to'
          ' these parameters on this mesh. If a framework, such as'
          ' `nnx.Optimizer`, drops the axes of the gradients, pass the axes of'
          ' the batch as `axis_name` to `on_mesh`.'
      )
