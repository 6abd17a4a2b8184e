"""`init_state`: makes state on the devices of a mesh, for a mapped step.

`jax.shard_map` maps the step, or `jax.vmap` over an axis of the mesh, under
plain `jax.jit`.
"""

from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import optax

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import partition_specs as specs_lib
from shard_transforms._src.state import specs


def init_state(
    tx: optax.GradientTransformation,
    params: leaves_lib.ParamTree,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
    *,
    in_specs: specs_lib.SpecTree = P(),
    per_shard: bool = False,
    spmd_axis_name: Hashable | None = None,
) -> optax.OptState:
  """Returns the state of a transformation as global arrays on a mesh.

  Calls `tx.init` inside `jax.shard_map`, where the axes are bound, for
  transformations that keep a value for each shard, such as `tower_reduce` with
  `axis_name`. Pass the state to a mapped function with the specs of
  `state_specs`. Under `jax.pmap`, use
  `jax.pmap(tx.init, axis_name=...)(replicated_params)` in place of both; where
  a framework calls `tx.init`, give it `on_mesh(tx, mesh)`.

  Args:
    tx: The transformation.
    params: Tree of arrays, or of `jax.ShapeDtypeStruct`.
    mesh: The mesh of the step.
    in_specs: The `PartitionSpec`s of the parameters, as for `jax.shard_map`: a
      tree or a prefix tree.
    per_shard: Whether *every* leaf gets a leading axis of shards, over all mesh
      axes that `in_specs` does not use. For steps in which parameters and all
      state differ between shards, as with `groups`: take `x[0]` of every leaf
      at the start of the mapped function and return `x[None]`.
    spmd_axis_name: The axis of the mesh that `jax.vmap` maps, if it maps the
      step in place of `jax.shard_map`; the argument of `jax.vmap` has the same
      name. Leaves that are kept per shard then have the shape
      `[shards, 1, ...]`; `state_axes` returns `in_axes` and `out_axes`.

  Returns:
    The state, each leaf a global array; `jax.ShapeDtypeStruct`s with shardings
    (the target of a checkpoint restore) if the parameters are abstract.

  Raises:
    NameError: As in `state_specs`.
    TypeError: As in `state_specs`.
    ValueError: As in `state_specs`; or if `spmd_axis_name` is no axis of the
      mesh, is used in `in_specs` or comes with `per_shard`.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import shard_transforms
    >>> mesh = jax.make_mesh((8,), ('data',))
    >>> tx = shard_transforms.tower_reduce(
    ...     4, optax.sgd(0.1), axis_name='data')
    >>> state = shard_transforms.init_state(tx, {'w': jnp.ones(3)}, mesh)
    >>> print(state.tower.shape, state.total['w'].shape)
    () (8, 3)
  """
  if spmd_axis_name is not None and per_shard:
    raise ValueError(
        '`per_shard` must be False where `jax.vmap` maps the step, got True'
        f' with spmd_axis_name={spmd_axis_name!r}. Map every leaf over axis 0'
        ' there.'
    )
  param_specs = jax.tree.broadcast(in_specs, params)
  if spmd_axis_name is None:
    out_specs = specs.state_specs(
        tx, params, mesh, in_specs=in_specs, per_shard=per_shard
    )
    lead = specs.free_axes(mesh, in_specs) if per_shard else ()
    init, init_mesh = _mapped_init(tx, mesh, param_specs, out_specs, lead), mesh
  else:
    read = _read(tx, params, mesh, param_specs, spmd_axis_name)
    out_specs = jax.tree.map(
        lambda spec: _with_own_axis(spec, spmd_axis_name), read
    )
    init = jax.vmap(
        tx.init,
        in_axes=None,
        out_axes=_axes(read, spmd_axis_name),
        axis_name=spmd_axis_name,
        axis_size=mesh.shape[spmd_axis_name],
        spmd_axis_name=spmd_axis_name,
    )
    # JAX cannot `vmap` over an axis whose shardings it tracks.
    auto = (AxisType.Auto,) * len(mesh.axis_names)
    init_mesh = mesh.update(axis_types=auto)
  if specs.is_abstract(params):
    given = specs.abstract(params, param_specs, init_mesh)
    return specs.abstract(jax.eval_shape(init, given), out_specs, mesh)
  params = jax.device_put(params, _shardings(param_specs, init_mesh))
  made = jax.jit(init, out_shardings=_shardings(out_specs, init_mesh))(params)
  return jax.device_put(made, _shardings(out_specs, mesh))


def _mapped_init(tx, mesh, param_specs, out_specs, lead):
  def init(params):
    state = tx.init(params)
    if not lead:
      return state
    return jax.tree.map(lambda x: axes_lib.to_varying(x[None], lead), state)

  return jax.shard_map(
      init, mesh=mesh, in_specs=(param_specs,), out_specs=out_specs
  )


def _shardings(tree, mesh):
  return jax.tree.map(lambda spec: NamedSharding(mesh, spec), tree)


def state_axes(
    tx: optax.GradientTransformation,
    params: leaves_lib.ParamTree,
    mesh: jax.sharding.Mesh,
    spmd_axis_name: Hashable,
) -> Any:
  """Returns the axis over which `jax.vmap` maps each leaf of the state.

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
  return _axes(read, spmd_axis_name)


def _axes(read, axis):
  return jax.tree.map(
      lambda spec: 0 if axis in specs_lib.axes_of(spec) else None, read
  )


def without_own_axis(state: optax.OptState, axes: Any) -> optax.OptState:
  """Returns a state as `jax.shard_map` has it, with one axis of shards.

  Args:
    state: Arrays, or `jax.ShapeDtypeStruct`s with shardings.
    axes: What `state_axes` returns.

  Raises:
    ValueError: If a leaf that is kept per shard is not `[shards, 1, ...]`.
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
