"""`update` of `on_mesh` under plain `jax.jit`, where no axis is mapped."""

from collections.abc import Callable
from collections.abc import Hashable
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import optax

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import mapping
from shard_transforms._src.base import partition_specs as specs_lib
from shard_transforms._src.base import stacked as stacked_lib
from shard_transforms._src.state import state_specs as state_specs_lib
from shard_transforms._src.transforms import stacked_arguments

_CALLER = 'on_mesh'


def stacked_update(
    inner: optax.GradientTransformationExtraArgs,
    mesh: jax.sharding.Mesh,
    axes: tuple[Hashable, ...],
    in_specs: specs_lib.SpecTree,
) -> Callable[..., tuple[Any, Any]]:
  """Returns an `update` function that maps `axes` over per-shard gradients."""

  @functools.lru_cache(maxsize=8)
  def get_state_specs(treedef, *types):
    params = treedef.unflatten(types)
    return state_specs_lib.state_specs(inner, params, mesh, in_specs=in_specs)

  def update(updates, state, params, extra_args):
    if not stacked_arguments.are_global(updates, params, in_specs):
      updates, extra_args = stacked_arguments.stack_arguments(
          updates,
          params,
          extra_args,
          mesh=mesh,
          axes=axes,
          in_specs=in_specs,
      )
    grads = _entry_types(updates)
    leaves, treedef = jax.tree.flatten(grads if params is None else params)
    state_specs = get_state_specs(treedef, *map(_abstract, leaves))
    grad_specs = specs_lib.of_params(in_specs, grads, _CALLER)
    _check_state(state, state_specs)
    with mapping.translate_closure_error(
        'The transformation of `on_mesh`',
        'Keep them in its state, for example by `optax.inject_hyperparams`'
        ' inside of `on_mesh`.',
    ):
      return mapping.call(
          functools.partial(_update_shard, inner, grad_specs, state_specs),
          (updates, state, params, extra_args),
          in_specs=(
              _update_specs(updates, grads, grad_specs, params),
              state_specs,
              specs_lib.of_params(in_specs, params, _CALLER),
              _extra_arg_specs(extra_args),
          ),
          out_specs=(grad_specs, state_specs),
          mesh=mesh,
          axes=axes,
          out_types=(
              _new_update_specs(updates, grads, params),
              jax.tree.map(mapping.explicit_spec_of, state),
          ),
      )

  return update


def _update_shard(
    inner, grad_specs, state_specs, updates, state, params, extra_args
):
  """Returns the update and the state of a shard, inside the map."""
  grads, extra_args = jax.tree.map(
      stacked_lib.shard_value,
      (updates, extra_args),
      is_leaf=stacked_lib.is_stacked,
  )
  updates, state = inner.update(grads, state, params, **extra_args)
  if stacked_arguments.has_same_tree(updates, params):
    _check_shapes(updates, params)
  _check_reduced(updates, grad_specs, 'updates')
  _check_reduced(state, state_specs, 'state')
  return updates, state


def _abstract(x):
  return jax.ShapeDtypeStruct(jnp.shape(x), leaves_lib.dtype_of(x))


def _entry_types(updates):
  """Returns the types of the gradients of one shard; global ones unchanged."""
  if not stacked_lib.is_stacked(updates):
    return updates
  return jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), updates.tree
  )


def _update_specs(updates, grads, grad_specs, params):
  """Returns the specs of gradients, which may be stacked.

  Args:
    updates: The gradients: a `Stacked`, or global gradients.
    grads: The types of the gradients of one shard.
    grad_specs: The spec of each of these gradients, without an axis of towers.
    params: The parameters, or `None`.
  """
  if not stacked_lib.is_stacked(updates):
    return grad_specs

  def stack_spec(spec, grad, param):
    # An axis of towers may follow the axis of shards.
    num_axes_of_towers = jnp.ndim(grad) - jnp.ndim(param)
    return P(updates.axes, *(None,) * num_axes_of_towers, *spec)

  like = params if stacked_arguments.has_same_tree(grads, params) else grads
  tree = jax.tree.map(stack_spec, grad_specs, grads, like)
  return dataclasses.replace(updates, tree=tree)


def _new_update_specs(updates, grads, params):
  """Returns the specs of the new updates on axes of type `Explicit`."""
  if stacked_arguments.has_same_tree(grads, params):
    return jax.tree.map(mapping.explicit_spec_of, params)
  return jax.tree.map(
      lambda x: P(*tuple(mapping.explicit_spec_of(x))[1:]), updates.tree
  )


def _extra_arg_specs(extra_args):
  return jax.tree.map(
      lambda x: P(x.axes) if stacked_lib.is_stacked(x) else P(),
      extra_args,
      is_leaf=stacked_lib.is_stacked,
  )


def _check_state(state, state_specs):
  """Checks that the state has the tree that `init` returns.

  Raises:
    ValueError: If the state has another tree.
  """
  try:
    jax.tree.broadcast(state_specs, state, is_leaf=specs_lib.is_spec)
  except ValueError as error:
    raise ValueError(
        '`state` of `on_mesh` does not have the tree of the state for these'
        f' parameters, got {jax.tree.structure(state)}. Pass the state that'
        ' `init` of this transformation, or its last `update`, returned.'
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
          'The transformation of `on_mesh` returned an update of the shape'
          f' {jnp.shape(x)} instead of {jnp.shape(param)} at'
          f' {leaves_lib.name_of(path)}. Average gradients of towers, [shards,'
          ' towers, ...], with `shard_transforms.reduce_stacked_towers`.'
      )


def _check_reduced(tree, tree_specs, name):
  """Checks that leaves vary only over the axes in their specs.

  Raises:
    ValueError: If a leaf differs between shards over another axis.
  """
  leaves = jax.tree.leaves_with_path(tree)
  leaf_specs = mapping.flat_specs(tree_specs, tree)
  for (path, leaf), spec in zip(leaves, leaf_specs, strict=True):
    if spec is None:
      continue
    if differing := axes_lib.varying_axes(leaf) - specs_lib.axes_of(spec):
      axis = min(differing, key=str)
      raise ValueError(
          f'The transformation of `on_mesh` does not reduce the gradients over'
          f' {axis!r}: {leaves_lib.name_of(path)} of the {name} differs between'
          ' shards. Put a reduction in front of the optimizer, as in'
          f' `optax.chain(cross_shard_mean({axis!r}), ...)`.'
      )
