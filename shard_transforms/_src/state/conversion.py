"""`unshard_state`, `shard_state` and `resize_state`."""

import contextlib
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import optax

from shard_transforms._src.base import divisions
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import partition_specs
from shard_transforms._src.base import states
from shard_transforms._src.state import fields
from shard_transforms._src.state import resizing
from shard_transforms._src.state import state_types
from shard_transforms._src.state import unsharded_types


def unshard_state(
    state: optax.OptState,
    tx: optax.GradientTransformation,
    params: leaves_lib.ParamTree,
    mesh: jax.sharding.Mesh,
    *,
    in_specs: partition_specs.SpecTree = P(),
) -> optax.OptState:
  """Returns a state with the shapes of the replicated state, for checkpoints.

  State that a transformation such as `shard_update` has sharded gets the shapes
  of `inner.init(params)`, so that the checkpoint does not depend on the number
  of shards. All other leaves are copied. Save the result, and restore it with
  `shard_state` on any number of shards.

  The unsharded leaves are distributed over the devices, along dimensions that
  divide evenly, so that no device needs memory for the whole state. A leaf that
  cannot be divided is replicated. With several processes, every process must
  call this function.

  Args:
    state: A state returned by `init_state` or `tx.update`, or
      `jax.ShapeDtypeStruct`s. NumPy arrays are converted to NumPy arrays.
    tx: The transformation.
    params: Tree of arrays, or of `jax.ShapeDtypeStruct`.
    mesh: The mesh of the state.
    in_specs: The `PartitionSpec`s of the parameters, as for `init_state`.

  Returns:
    The unsharded state; if `state` is abstract, `jax.ShapeDtypeStruct`s with
    shardings, which can be the target of a checkpoint restore.

  Raises:
    NameError: If the transformation names an axis that the mesh lacks.
    TypeError: If a sharded leaf does not have the dtype that the transformation
      uses, or a state declares a rule that is not a `Rule`.
    ValueError: If `state` was not created by `tx` for these parameters, on this
      mesh with these `in_specs`; if `in_specs` shards parameters and the state
      of `shard_update` is sharded over further axes; or if a state declares a
      rule for a missing field.

  Examples:
    >>> import jax
    >>> import optax
    >>> import shard_transforms
    >>> mesh = jax.make_mesh((8,), ('data',))
    >>> tx = shard_transforms.shard_update(optax.adam(0.1), 'data')
    >>> params = jax.numpy.ones((3, 5))
    >>> state = shard_transforms.init_state(tx, params, mesh)
    >>> saved = shard_transforms.unshard_state(state, tx, params, mesh)
    >>> print(state.inner_state[0].mu.shape, saved.inner_state[0].mu.shape)
    (1, 16) (3, 5)
  """
  types = unsharded_types.unsharded_types(
      tx, params, mesh, in_specs, 'unshard_state'
  )
  unsharded = _unshard(state, types)
  types.check_created_on_mesh(state)
  return unsharded


def shard_state(
    state: optax.OptState,
    tx: optax.GradientTransformation,
    params: leaves_lib.ParamTree,
    mesh: jax.sharding.Mesh,
    *,
    in_specs: partition_specs.SpecTree = P(),
    reduction: states.ResizeReduction | None = None,
) -> optax.OptState:
  """Places the state of a checkpoint on a mesh with any number of shards.

  This is the inverse of `unshard_state`. If the number of shards has changed,
  per-shard state, such as residuals and the towers of an unfinished window, is
  converted as in `resize_state`. Such state must then be on this process, for
  example as NumPy arrays.

  Args:
    state: The result of `unshard_state`, as JAX arrays or, when restored from a
      checkpoint, as NumPy arrays.
    tx: The transformation.
    params: Tree of arrays, or of `jax.ShapeDtypeStruct`.
    mesh: The mesh of the step.
    in_specs: The `PartitionSpec`s of the parameters, as for `init_state`.
    reduction: As for `resize_state`.

  Returns:
    The state, with the same placement as the result of `init_state`.

  Raises:
    NameError: If the transformation names an axis that the mesh lacks.
    TypeError: If a leaf does not have the dtype that the transformation uses,
      or a state declares a rule that is not a `Rule`.
    ValueError: If `state` was not created by `tx` for these parameters, a leaf
      cannot be converted or is not on this process, `in_specs` shards
      parameters and the state of `shard_update` is sharded over further axes,
      `reduction` is missing or unknown, or a state declares a rule for a
      missing field.

  Examples:
    >>> import jax
    >>> import optax
    >>> import shard_transforms
    >>> mesh = jax.make_mesh((8,), ('data',))
    >>> tx = shard_transforms.shard_update(optax.adam(0.1), 'data')
    >>> params = jax.numpy.ones((3, 5))
    >>> state = shard_transforms.init_state(tx, params, mesh)
    >>> saved = shard_transforms.unshard_state(state, tx, params, mesh)
    >>> four = jax.make_mesh((4,), ('data',), devices=jax.devices()[:4])
    >>> state = shard_transforms.shard_state(saved, tx, params, four)
    >>> print(state.inner_state[0].mu.shape)
    (1, 16)
  """
  _check_reduction(reduction)
  types = unsharded_types.unsharded_types(
      tx, params, mesh, in_specs, 'shard_state'
  )
  return _shard(state, types, reduction)


def resize_state(
    state: optax.OptState,
    tx: optax.GradientTransformation,
    params: leaves_lib.ParamTree,
    mesh: jax.sharding.Mesh,
    *,
    in_specs: partition_specs.SpecTree = P(),
    reduction: states.ResizeReduction | None = None,
) -> optax.OptState:
  """Converts the state of a transformation to another number of shards.

  This function calls `unshard_state` with the mesh of the state, and then
  `shard_state`: sharded state, such as the slices of `shard_update`, is sharded
  again. Leaves that are the same on all shards, or sharded like a parameter,
  are copied. Per-shard state is converted as follows:

  * An unfinished window of `tower_reduce` is merged or spread such that its
    result stays the same. Conversion preserves the totals and the total weights
    over all shards or, without weights, their `reduction`. Weights that only
    include or exclude shards, as in `guard`, are added like numbers of tokens.
    With `reduction='sum'`, every new shard counts once, even if the old shards
    had no tower with a weight yet.
  * The `reduction` of the pending updates of `delay_updates` stays the same.
  * The mean squares of `compensate_delay` become their maximum.
  * In `guard` over an axis, a merged shard keeps the latest bad step of the
    original shards, and the rolling mean of the norms of shards restarts,
    because the batches of the new shards have another size and so other norms.
    Without an axis, the mean is that of reduced updates, and is kept.
  * All shards of `local_updates` continue from the mean of the per-shard
    parameters and inner states, weighted by the steps of each shard, and share
    the total weight equally, so that an unfinished round contains the steps of
    all shards.

  Custom states declare `rules`; see `shard_transforms.state_rules.Rule`. For
  any other leaf that differs between shards, this function raises an error.

  Args:
    state: A state returned by `init_state` or `tx.update`, for any number of
      shards, as arrays on this process. Slices of `shard_update` must be JAX
      arrays on their mesh: NumPy arrays do not show how they were sharded, so
      convert them with `unshard_state` and `shard_state`.
    tx: The transformation.
    params: Tree of arrays, or of `jax.ShapeDtypeStruct`.
    mesh: The new mesh.
    in_specs: The `PartitionSpec`s of the parameters, as for `init_state`.
    reduction: How `inner` of `tower_reduce` reduces over shards. Required in an
      unfinished window in which the weight of every tower was 1: `'mean'` or
      `'sum'` if no `weight` was passed, and `'weighted'` otherwise.
      `delay_updates` before the reduction also requires `'mean'` or `'sum'`.

  Returns:
    A new state with the same placement as the result of `init_state`. It does
    not share memory with `state`.

  Raises:
    NameError: If the transformation names an axis that the mesh lacks.
    TypeError: If a leaf does not have the dtype that the transformation uses,
      or a state declares a rule that is not a `Rule`.
    ValueError: If `state` was not created by `tx` for these parameters, a leaf
      cannot be converted or is not on this process, slices are not on the mesh
      for which they were created, `reduction` is missing or unknown, or a state
      declares a rule for a missing field.

  Examples:
    >>> import jax
    >>> import optax
    >>> import shard_transforms
    >>> eight = jax.make_mesh((8,), ('data',))
    >>> four = jax.make_mesh((4,), ('data',), devices=jax.devices()[:4])
    >>> tx = shard_transforms.shard_update(optax.adam(0.1), 'data')
    >>> params = jax.numpy.ones((3, 5))
    >>> state = shard_transforms.init_state(tx, params, eight)
    >>> state = shard_transforms.resize_state(state, tx, params, four)
    >>> print(optax.tree_utils.tree_get(state, 'mu').shape)
    (1, 16)
  """
  _check_reduction(reduction)
  trace = functools.partial(
      unsharded_types.unsharded_types,
      tx,
      params,
      in_specs=in_specs,
      caller='resize_state',
  )
  types = trace(mesh=mesh)
  unsharded = _unshard(jax.tree.map_with_path(_to_numpy_or_raise, state), types)
  if types.sharded_fields:
    old_types = _types_on_old_mesh(state, trace)
    if old_types is None:
      types.check_without_slices(state, 'resize_state')
    else:
      old_types.check_created_on_mesh(state)
  return _shard(unsharded, types, reduction)


def _types_on_old_mesh(state, trace):
  """Returns the types on the mesh of a state; `None` if it is not known."""
  mesh = _mesh_of(state)
  if mesh is None:
    return None
  # A restored state may be on a mesh whose axes have other names. With
  # `jax.set_mesh` of the new mesh, JAX refuses to trace on the old one.
  with contextlib.suppress(NameError, ValueError), state_types.without_mesh():
    return trace(mesh=mesh)
  return None


def _mesh_of(state):
  """Returns the mesh over which a state is sharded, or `None`."""
  for leaf in jax.tree.leaves(state):
    if partition_specs.axes_of(partition_specs.spec_of(leaf)):
      return leaf.sharding.mesh
  return None


def _check_reduction(reduction):
  """Checks the argument `reduction`.

  Raises:
    ValueError: If the reduction is unknown.
  """
  if reduction not in (None, 'mean', 'sum', 'weighted'):
    raise ValueError(
        "`reduction` must be 'mean', 'sum', 'weighted' or None, got"
        f' {reduction!r}.'
    )


def _unshard(state, types):
  """Unshards the fields of a state that has the tree of `types.state`.

  Raises:
    ValueError: If a field was created for other parameters.
  """

  def convert(path, rule, field, _):
    if rule.unshard is None:
      return jax.tree.map(_copied, field)
    unshard = functools.partial(types.unshard, path, rule)
    return _unsharded_field(unshard, field, types.mesh)

  return fields.map_fields(convert, fields.sharded_rules_of, state, state)


def _unsharded_field(unshard, field, mesh):
  """Unshards a field; JAX arrays are distributed over the mesh."""
  is_abstract = state_types.is_abstract(field)
  if not is_abstract and not _is_on_devices(field):
    return jax.tree.map(_copied, unshard(field))
  types = jax.eval_shape(unshard, leaves_lib.shapes_of(field))
  specs = jax.tree.map(lambda x: _distributed_spec(x.shape, mesh), types)
  if is_abstract:
    return state_types.abstract(types, specs, mesh)
  auto_mesh = _with_auto_axes(mesh)
  field_specs = jax.tree.map(partition_specs.spec_of, field)
  field = jax.device_put(field, state_types.shardings(field_specs, auto_mesh))
  shardings = state_types.shardings(specs, auto_mesh)
  with state_types.without_mesh():
    unsharded = jax.jit(unshard, out_shardings=shardings)(field)
  return jax.device_put(unsharded, state_types.shardings(specs, mesh))


def _shard(state, types, reduction):
  """Places an unsharded state on a mesh.

  Args:
    state: The state.
    types: The types on the mesh.
    reduction: As for `resize_state`.

  Raises:
    TypeError: As in `shard_state`.
    ValueError: As in `shard_state`.
  """

  def rules_of(node, like):
    return {
        **resizing.resize_rules_of(node, like, reduction),
        **fields.sharded_rules_of(node, like),
    }

  def convert(path, rule, field, like):
    if rule.shard is not None:
      types.check_unsharded(path, rule, field, like)
      return _sharded_field(rule, field, like, types.mesh)
    fields.check_same_structure(leaves_lib.name_of(path), field, like)

    def convert_leaf(subpath, leaf, like):
      name = leaves_lib.name_of((*path, *subpath))
      return _put(resizing.resized(rule, name, leaf, like), like.sharding)

    return jax.tree.map_with_path(convert_leaf, field, like)

  state = jax.tree.map(_to_numpy, state)
  return fields.map_fields(convert, rules_of, state, types.state)


def _sharded_field(rule, field, target, mesh):
  """Shards an unsharded field like `target`."""
  auto_mesh = _with_auto_axes(mesh)

  # First distribute the field, so that no device needs memory for all of it.
  def distribute(leaf):
    spec = _distributed_spec(jnp.shape(leaf), mesh)
    return _put(leaf, NamedSharding(auto_mesh, spec))

  specs = state_types.spec_tree(target)
  shard = jax.jit(
      lambda field: rule.shard(field, target),
      out_shardings=state_types.shardings(specs, auto_mesh),
  )
  field = jax.tree.map(distribute, field)
  with state_types.without_mesh():
    sharded = shard(field)
  return jax.device_put(sharded, state_types.shardings(specs, mesh))


def _with_auto_axes(mesh):
  """Returns the mesh with `Auto` axes, which allow reshaping sharded arrays."""
  return mesh.update(axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def _distributed_spec(shape, mesh):
  """Returns the spec of an array, sharded over every axis that divides it.

  The dimensions and the order of axes are those of `shard_update`, but nothing
  is padded. With another order of axes, XLA would gather the array.
  """
  if not math.prod(shape) or not shape:
    return P(*(None,) * len(shape))
  axes, sizes = mesh.axis_names[::-1], list(shape)
  division = divisions.divide_dimensions(shape, [mesh.shape[a] for a in axes])
  entries: list[tuple[Any, ...]] = [()] * len(shape)
  for axis, dim in zip(axes, division.dims, strict=True):
    if sizes[dim] % mesh.shape[axis] == 0:
      sizes[dim] //= mesh.shape[axis]
      entries[dim] += (axis,)
  return partition_specs.from_entries(entries)


def _to_numpy_or_raise(path, leaf):
  """Returns a leaf as a NumPy array; a random key is returned unchanged.

  Raises:
    ValueError: If part of the leaf is on another process.
  """
  leaf = _to_numpy(leaf)
  if not resizing.is_addressable(leaf):
    raise ValueError(
        '`resize_state` got a state that is partly on other processes, at'
        f' {leaves_lib.name_of(path)}. Save the result of `unshard_state`,'
        ' restore it, and place it with `shard_state`.'
    )
  return leaf


def _to_numpy(leaf):
  """Returns a leaf as a NumPy array if this process can read the whole leaf."""
  is_array = isinstance(leaf, jax.Array)
  if is_array and (resizing.is_key(leaf) or not resizing.is_addressable(leaf)):
    return leaf
  return np.asarray(leaf, leaves_lib.dtype_of(leaf))


def _is_on_devices(field):
  """Whether a field has JAX arrays other than random keys."""
  arrays = (x for x in jax.tree.leaves(field) if isinstance(x, jax.Array))
  return not all(map(resizing.is_key, arrays))


def _copied(leaf):
  """Copies a leaf without moving it; returns a type unchanged."""
  if isinstance(leaf, jax.ShapeDtypeStruct):
    return leaf
  if isinstance(leaf, jax.Array):
    return jnp.copy(leaf)
  return np.array(leaf, leaves_lib.dtype_of(leaf))


def _put(leaf, sharding):
  """Returns a copy of a leaf, placed with a sharding."""
  if not resizing.is_addressable(leaf):
    return jax.jit(jnp.copy, out_shardings=sharding)(leaf)
  if isinstance(leaf, jax.Array) and resizing.is_key(leaf):
    # `jax.device_put` may share the memory of its argument.
    return jax.device_put(jnp.copy(leaf), sharding)
  # JAX may alias the memory of a NumPy array.
  values = np.array(leaf)
  return jax.make_array_from_callback(
      values.shape, sharding, values.__getitem__, dtype=values.dtype
  )
