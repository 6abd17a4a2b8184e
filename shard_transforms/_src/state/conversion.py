"""Conversion of state: to its full form, to a mesh, to other shards."""

import contextlib
import dataclasses
import functools
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
from shard_transforms._src.state import one_shard as one_shard_lib
from shard_transforms._src.state import resizing
from shard_transforms._src.state import shardings
from shard_transforms._src.state import state_types


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

  The full leaves are sharded over the devices, along dimensions that divide
  evenly, so that no device needs memory for the whole state. A leaf that cannot
  be divided is replicated. With several processes, every process must call this
  function.

  Args:
    state: A state returned by `init_state` or `tx.update`, or
      `jax.ShapeDtypeStruct`s. NumPy arrays are converted to NumPy arrays.
    tx: The transformation.
    params: Tree of arrays, or of `jax.ShapeDtypeStruct`.
    mesh: The mesh of the state.
    in_specs: The `PartitionSpec`s of the parameters, as for `init_state`.

  Returns:
    The state in its full form; if `state` is abstract, `jax.ShapeDtypeStruct`s
    with shardings, which can be the target of a checkpoint restore.

  Raises:
    NameError: If the transformation names an axis that the mesh lacks.
    TypeError: If a state declares a rule that is not a `Rule`.
    ValueError: If `state` was not made by `tx` for these parameters, on this
      mesh with these `in_specs`; if `in_specs` shards parameters whose state is
      sharded further; or if a state declares a rule for a missing field.

  Examples:
    >>> import jax
    >>> import optax
    >>> import shard_transforms
    >>> mesh = jax.make_mesh((8,), ('data',))
    >>> tx = shard_transforms.shard_update(optax.adam(0.1), 'data')
    >>> params = jax.numpy.ones((3, 5))
    >>> state = shard_transforms.init_state(tx, params, mesh)
    >>> full = shard_transforms.unshard_state(state, tx, params, mesh)
    >>> print(state.inner_state[0].mu.shape, full.inner_state[0].mu.shape)
    (1, 16) (3, 5)
  """
  one_shard = one_shard_lib.OneShard(
      tx, params, mesh, in_specs, 'unshard_state'
  )
  return _join_fields(state, state, one_shard, one_shard)


def shard_state(
    state: optax.OptState,
    tx: optax.GradientTransformation,
    params: leaves_lib.ParamTree,
    mesh: jax.sharding.Mesh,
    *,
    in_specs: partition_specs.SpecTree = P(),
    reduction: states.Reduction | None = None,
) -> optax.OptState:
  """Places the state of a checkpoint on a mesh with any number of shards.

  This is the inverse of `unshard_state`: full leaves are sharded again. If the
  number of shards has changed, per-shard state, such as residuals and the
  towers of an unfinished window, is converted as in `resize_state`. Such state
  must then be on this process, for example as NumPy arrays.

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
    ValueError: If `state` was not made by `tx` for these parameters, a leaf
      cannot be converted or is not on this process, `in_specs` shards
      parameters whose state is sharded further, `reduction` is missing or
      unknown, or a state declares a rule for a missing field.

  Examples:
    >>> import jax
    >>> import optax
    >>> import shard_transforms
    >>> mesh = jax.make_mesh((8,), ('data',))
    >>> tx = shard_transforms.shard_update(optax.adam(0.1), 'data')
    >>> params = jax.numpy.ones((3, 5))
    >>> state = shard_transforms.init_state(tx, params, mesh)
    >>> full = shard_transforms.unshard_state(state, tx, params, mesh)
    >>> four = jax.make_mesh((4,), ('data',), devices=jax.devices()[:4])
    >>> state = shard_transforms.shard_state(full, tx, params, four)
    >>> print(state.inner_state[0].mu.shape)
    (1, 16)
  """
  _check_reduction(reduction)
  one_shard = one_shard_lib.OneShard(tx, params, mesh, in_specs, 'shard_state')
  return _place_fields(state, one_shard, reduction)


def resize_state(
    state: optax.OptState,
    tx: optax.GradientTransformation,
    params: leaves_lib.ParamTree,
    mesh: jax.sharding.Mesh,
    *,
    in_specs: partition_specs.SpecTree = P(),
    reduction: states.Reduction | None = None,
) -> optax.OptState:
  """Converts the state of a transformation to another number of shards.

  This function combines `unshard_state` and `shard_state`: sharded state, such
  as the slices of `shard_update`, is joined and sharded again. Leaves that are
  the same on all shards, or sharded like a parameter, are copied. Per-shard
  state is converted as follows:

  * An unfinished window of `tower_reduce` is merged or spread such that its
    result stays the same. Conversion preserves the totals and the total weights
    over all shards or, without weights, their `reduction`. Weights that only
    include or exclude shards, as in `guard`, are added like numbers of tokens.
    In a window with `reduction='sum'`, a shard that has no weight yet counts as
    a shard that receives weight later.
  * The `reduction` of the pending updates of `delay_updates` stays the same.
  * The mean squares of `compensate_delay` become their maximum.
  * In `guard`, a merged shard keeps the latest bad step of the original shards.
    The rolling mean of norms restarts, because other batches have other norms.
  * All shards of `local_updates` continue from the mean of the per-shard
    parameters and inner states, weighted by the steps of each shard, and share
    the total weight equally, so that an unfinished round contains the steps of
    all shards.

  Custom states declare `rules`; see `shard_transforms.state_rules.Rule`. For
  any other leaf that differs between shards, this function raises an error.

  Args:
    state: A state returned by `init_state` or `tx.update`, for any number of
      shards, as JAX or NumPy arrays on this process. NumPy arrays do not record
      how they were sharded: if `in_specs` shards parameters whose state is
      sliced, pass JAX arrays, or use `unshard_state`.
    tx: The transformation.
    params: Tree of arrays, or of `jax.ShapeDtypeStruct`.
    mesh: The new mesh.
    in_specs: The `PartitionSpec`s of the parameters, as for `init_state`.
    reduction: How `inner` of `tower_reduce` reduces over shards. An unfinished
      window without weights requires `'mean'` or `'sum'`; if all of its weights
      are 1, which looks the same, use `'weighted'`. `delay_updates` before the
      reduction also requires `'mean'` or `'sum'`.

  Returns:
    A new state with the same placement as the result of `init_state`. It does
    not share memory with `state`.

  Raises:
    NameError: If the transformation names an axis that the mesh lacks.
    TypeError: If a leaf does not have the dtype that the transformation uses,
      or a state declares a rule that is not a `Rule`.
    ValueError: If `state` was not made by `tx` for these parameters, a leaf
      cannot be converted or is not on this process, `reduction` is missing or
      unknown, or a state declares a rule for a missing field.

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
  after = one_shard_lib.OneShard(tx, params, mesh, in_specs, 'resize_state')
  made = _made_on(_mesh_of(state), after)
  here = jax.tree.map_with_path(_on_this_process, state)
  full = _join_fields(here, state, after, made)
  return _place_fields(full, after, reduction)


def _join_fields(
    state: optax.OptState,
    placed: optax.OptState,
    one_shard: one_shard_lib.OneShard,
    made: one_shard_lib.OneShard | None,
) -> optax.OptState:
  """Returns a state in its full form.

  Args:
    state: The state.
    placed: The same state, with its original placement.
    one_shard: The state on one shard, and the target mesh.
    made: The same for the mesh on which the state was made, if it is known.

  Raises:
    ValueError: As in `unshard_state`.
  """

  def convert(path, rule, field, placed):
    if rule.full is None:
      return jax.tree.map(_copied, field)
    full = _joined(one_shard.joining(path, rule), field, one_shard.mesh)
    if made is not None:
      made.check_made_on_mesh(path, placed)
    elif rule is fields.DIVIDED:
      pairs = zip(*map(fields.types_of, (field, full)), strict=True)
      divided.extend((found[0], shape[0]) for found, shape in pairs)
    return full

  divided = []
  if made is not None:
    made.check_tree(state)
  full = fields.map_fields(convert, fields.full_rules_of, state, placed)
  if not divisions.is_of_one_mesh(divided):
    raise ValueError(
        f'{fields.made_for_others("slices", "several leaves")} that no'
        ' number of shards gives.'
    )
  return full


def _place_fields(
    state: optax.OptState,
    one_shard: one_shard_lib.OneShard,
    reduction: states.Reduction | None,
) -> optax.OptState:
  """Places a state in its full form on the mesh.

  Args:
    state: The state.
    one_shard: The state on one shard, and the target mesh.
    reduction: As for `resize_state`.

  Raises:
    ValueError: As in `shard_state`.
  """

  def rules_of(node, like):
    return {
        **resizing.resize_rules_of(node, like, reduction),
        **fields.full_rules_of(node, like),
    }

  def convert(path, rule, field, like):
    if rule.full is not None:
      one_shard.check(path, field, like)
      return _sharded(rule, field, like, one_shard.mesh)
    fields.check_same_trees(path, field, like)
    carry_over = functools.partial(_carried_over, path, rule)
    return jax.tree.map_with_path(carry_over, field, like)

  state = jax.tree.map(_on_host, state)
  return fields.map_fields(convert, rules_of, state, one_shard.state)


def _check_reduction(reduction: Any) -> None:
  """Checks the argument `reduction`.

  Raises:
    ValueError: If the reduction is unknown.
  """
  if reduction not in (None, 'mean', 'sum', 'weighted'):
    raise ValueError(
        "`reduction` must be 'mean', 'sum', 'weighted' or None, got"
        f' {reduction!r}.'
    )


def _joined(join, field, mesh):
  """Returns the full form of a field; JAX arrays are sharded over the mesh."""
  is_abstract = state_types.is_abstract(field)
  if not is_abstract and not _is_on_devices(field):
    return jax.tree.map(_copied, join(field))
  types = jax.eval_shape(join, fields.without_shardings(field))
  spread = jax.tree.map(lambda x: shardings.spread(x.shape, mesh), types)
  if is_abstract:
    return state_types.abstract(types, spread, mesh)
  compiled = _automatic(mesh)
  placed = jax.device_put(
      field, _shardings(jax.tree.map(_spec_of, field), compiled)
  )
  with state_types.without_mesh():
    made = jax.jit(join, out_shardings=_shardings(spread, compiled))(placed)
  return jax.device_put(made, _shardings(spread, mesh))


def _sharded(rule, full, target, mesh):
  """Shards a full field like `target`."""
  compiled = _automatic(mesh)
  # Spread first, so that no device needs memory for the whole field.
  spread = jax.tree.map(
      lambda x: NamedSharding(compiled, shardings.spread(jnp.shape(x), mesh)),
      full,
  )
  placed = jax.tree.map(_put, full, spread)
  kept = jax.tree.map(lambda x: x.sharding.spec, target)
  place = jax.jit(
      lambda full: rule.place(full, target),
      out_shardings=_shardings(kept, compiled),
  )
  with state_types.without_mesh():
    made = place(placed)
  return jax.device_put(made, _shardings(kept, mesh))


def _automatic(mesh):
  """Returns the mesh with `Auto` axes, which allow reshaping sharded arrays."""
  return mesh.update(axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def _shardings(specs, mesh):
  return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def _spec_of(leaf):
  sharding = getattr(leaf, 'sharding', None)
  return sharding.spec if isinstance(sharding, NamedSharding) else P()


def _carried_over(path, rule, sub, leaf, like):
  """Resizes a leaf by its rule, and places it."""
  name = leaves_lib.name_of((*path, *sub))
  fields.check_dtype(name, leaf, like)
  if rule.resize == 'reset' or jnp.shape(leaf) != like.shape:
    if not resizing.is_here(leaf):
      resizing.refuse_elsewhere(name)
    leaf = resizing.apply_rule(rule, name, leaf, like)
  return _put(leaf, like.sharding)


def _made_on(mesh, after):
  """Returns a `OneShard` for the original mesh of a state, or `None`."""
  told = jax.tree.leaves(after.in_specs, is_leaf=partition_specs.is_spec)
  axes = set().union(*map(partition_specs.axes_of, told))
  if mesh is None or not axes <= set(mesh.axis_names):
    return None
  made = dataclasses.replace(after, mesh=mesh)
  # The axes of the original mesh may have other names, and `on_mesh` only
  # supports its own mesh.
  with contextlib.suppress(NameError, ValueError):
    return made if made.parts else None
  return None


def _mesh_of(state):
  """Returns the mesh over which a state is sharded, or `None`."""
  for leaf in jax.tree.leaves(state):
    sharding = getattr(leaf, 'sharding', None)
    is_on_mesh = isinstance(sharding, jax.sharding.NamedSharding)
    if is_on_mesh and partition_specs.axes_of(sharding.spec):
      return sharding.mesh
  return None


def _on_this_process(path, leaf):
  """Returns a leaf as a NumPy array; a random key is returned unchanged.

  Raises:
    ValueError: If part of the leaf is on another process.
  """
  leaf = _on_host(leaf)
  if not resizing.is_here(leaf):
    raise ValueError(
        '`state` of `resize_state` must be on this process, got a part of'
        f' {leaves_lib.name_of(path)}. Save `unshard_state` of it, restore'
        ' that, and place it with `shard_state`.'
    )
  return leaf


def _on_host(leaf: Any) -> Any:
  """Returns a leaf as a NumPy array if this process can read the whole leaf."""
  is_array = isinstance(leaf, jax.Array)
  if is_array and (resizing.is_key(leaf) or not resizing.is_here(leaf)):
    return leaf
  return np.asarray(leaf, fields.dtype_of(leaf))


def _is_on_devices(field: Any) -> bool:
  """Whether a field has JAX arrays other than random keys."""
  leaves = jax.tree.leaves(field)
  return any(
      isinstance(x, jax.Array) and not resizing.is_key(x) for x in leaves
  )


def _copied(leaf: Any) -> Any:
  """Copies a leaf without moving it; returns a type unchanged."""
  if isinstance(leaf, jax.ShapeDtypeStruct):
    return leaf
  if isinstance(leaf, jax.Array):
    return _copy(leaf)
  return np.array(leaf, fields.dtype_of(leaf))


def _put(leaf: Any, sharding: jax.sharding.Sharding) -> jax.Array:
  """Returns a copy of a leaf, placed with a sharding."""
  if not resizing.is_here(leaf):
    return jax.jit(_copy, out_shardings=sharding)(leaf)
  if isinstance(leaf, jax.Array) and resizing.is_key(leaf):
    # `jax.device_put` of a random key could share its memory.
    bits = _put(np.asarray(jax.random.key_data(leaf)), sharding)
    return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(leaf))
  # JAX may alias the memory of a NumPy array.
  values = np.array(leaf)
  return jax.make_array_from_callback(
      values.shape, sharding, values.__getitem__, dtype=values.dtype
  )


def _copy(leaf):
  if not resizing.is_key(leaf):
    return jnp.copy(leaf)
  bits = jnp.copy(jax.random.key_data(leaf))
  return jax.random.wrap_key_data(bits, impl=jax.random.key_impl(leaf))
