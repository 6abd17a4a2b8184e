"""State for `jax.vmap` over an axis of the mesh, under plain `jax.jit`."""

from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import optax

from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import partition_specs as specs_lib
from shard_transforms._src.state import specs


def state_axes(
    tx: optax.GradientTransformation,
    params: leaves_lib.ParamTree,
    mesh: jax.sharding.Mesh,
    spmd_axis_name: Hashable,
) -> Any:
  """Returns over which axis `jax.vmap` maps each leaf of the state.

  For steps under plain `jax.jit` that `jax.vmap` maps over the shards, with one
  axis of the mesh as its `axis_name` and its `spmd_axis_name`. Leaves that are
  kept per shard are mapped; all others are the same for all shards, so that a
  `lax.cond` on them stays a branch and does not become a select. `init_state`
  makes such a state.

  Args:
    tx: The transformation.
    params: Tree of arrays, or of `jax.ShapeDtypeStruct`.
    mesh: The mesh of the step.
    spmd_axis_name: The axis of the mesh that is mapped.

  Returns:
    A tree like the state, of 0 and `None`, for `in_axes` and `out_axes`.

  Raises:
    NameError: As in `state_specs`.
    TypeError: As in `state_specs`.
    ValueError: If the mesh lacks the axis, or as in `state_specs`.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import shard_transforms
    >>> mesh = jax.make_mesh((8,), ('data',))
    >>> tx = shard_transforms.tower_reduce(
    ...     4, optax.identity(), axis_name='data')
    >>> axes = shard_transforms.state_axes(tx, jnp.ones(3), mesh, 'data')
    >>> print(axes.tower, axes.total)
    None 0
  """
  whole = jax.tree.map(lambda _: P(), params)
  read = _read(tx, params, mesh, whole, spmd_axis_name)
  return jax.tree.map(
      lambda spec: 0 if spmd_axis_name in specs_lib.axes_of(spec) else None,
      read,
      is_leaf=specs_lib.is_spec,
  )


def init(
    tx: optax.GradientTransformation,
    params: leaves_lib.ParamTree,
    mesh: jax.sharding.Mesh,
    in_specs: specs_lib.SpecTree,
    spmd_axis_name: Hashable,
) -> optax.OptState:
  """Returns the state of `init_state` with `spmd_axis_name`.

  Raises:
    NameError: As in `state_specs`.
    TypeError: As in `state_specs`.
    ValueError: If the mesh lacks the axis, or a parameter is sharded over it.
  """
  axes = state_axes(tx, params, mesh, spmd_axis_name)
  param_specs = jax.tree.broadcast(in_specs, params, is_leaf=specs_lib.is_spec)
  state_specs = jax.tree.map(
      lambda spec: _with_own_axis(spec, spmd_axis_name),
      _read(tx, params, mesh, param_specs, spmd_axis_name),
      is_leaf=specs_lib.is_spec,
  )
  vmapped = jax.vmap(
      tx.init,
      in_axes=None,
      out_axes=axes,
      axis_name=spmd_axis_name,
      axis_size=mesh.shape[spmd_axis_name],
      spmd_axis_name=spmd_axis_name,
  )
  given = specs.abstract(params, param_specs, mesh)
  if specs.is_abstract(params):
    shapes = jax.eval_shape(vmapped, jax.tree.map(_without_sharding, given))
    return specs.abstract(shapes, state_specs, mesh)
  # JAX cannot map an axis over which it tracks shardings.
  auto = (AxisType.Auto,) * len(mesh.axis_names)
  auto_mesh = jax.sharding.Mesh(mesh.devices, mesh.axis_names, auto)
  params = jax.device_put(params, _shardings(param_specs, auto_mesh))
  shardings = _shardings(state_specs, auto_mesh)
  state = jax.jit(vmapped, out_shardings=shardings)(params)
  return jax.device_put(state, _shardings(state_specs, mesh))


def without_own_axis(state: optax.OptState, axes: Any) -> optax.OptState:
  """Returns a state as `jax.shard_map` has it, with one axis of shards.

  Args:
    state: Arrays, or `jax.ShapeDtypeStruct`s with shardings.
    axes: What `state_axes` returns.

  Raises:
    ValueError: If what each shard keeps has no axis of its own, of length 1.
  """

  def without(path, leaf, axis):
    if axis is None:
      return leaf
    if jnp.ndim(leaf) < 2 or leaf.shape[1] != 1:
      raise ValueError(
          'State that each shard keeps must be made by `init_state` with'
          f' `spmd_axis_name`, got the shape {leaf.shape} at'
          f' {leaves_lib.name_of(path)}.'
      )
    shape = leaf.shape[:1] + leaf.shape[2:]
    if not isinstance(leaf, jax.ShapeDtypeStruct):
      return leaf.reshape(shape)
    lead, _, *others = leaf.sharding.spec
    sharding = NamedSharding(leaf.sharding.mesh, P(lead, *others))
    return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

  return jax.tree.map_with_path(without, state, axes)


def _read(tx, params, mesh, param_specs, axis):
  """Returns the specs of the state as `jax.shard_map` over one axis has it.

  Raises:
    ValueError: If the mesh lacks the axis, or a parameter is sharded over it.
  """
  specs.check_mesh(mesh)
  if axis not in mesh.shape:
    raise ValueError(
        f'`spmd_axis_name` must be an axis of the mesh, {tuple(mesh.shape)},'
        f' got {axis!r}.'
    )
  if any(axis in specs_lib.axes_of(x) for x in jax.tree.leaves(param_specs)):
    raise ValueError(
        '`in_specs` must not use `spmd_axis_name`, over which parameters are'
        f' replicated, got {axis!r} in both.'
    )
  one_axis = jax.sharding.AbstractMesh((mesh.shape[axis],), (axis,))
  whole = jax.tree.map(lambda _: P(), params)
  return specs.read(tx, params, one_axis, whole, param_specs)


def _with_own_axis(spec, axis):
  """Adds the mapped axis in front of the leading axis of a shard."""
  return P(axis, None, *spec[1:]) if axis in specs_lib.axes_of(spec) else spec


def _without_sharding(leaf):
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _shardings(tree, mesh):
  return jax.tree.map(
      lambda spec: NamedSharding(mesh, spec), tree, is_leaf=specs_lib.is_spec
  )
