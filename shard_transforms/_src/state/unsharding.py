"""`unshard_state` and `shard_state`: checkpoints of sharded optimizer state."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import optax

from shard_transforms._src.base import divisions
from shard_transforms._src.base import full_rules
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import partition_specs
from shard_transforms._src.base import states
from shard_transforms._src.state import copies
from shard_transforms._src.state import fields
from shard_transforms._src.state import one_shard as one_shard_lib
from shard_transforms._src.state import row_resizing
from shard_transforms._src.state import shardings
from shard_transforms._src.state import specs


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
  return joined(state, state, one_shard, one_shard)


def joined(
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
      return jax.tree.map(copies.copied, field)
    full = _joined(one_shard.joining(path, rule), field, one_shard.mesh)
    if made is not None:
      made.check_made_on_mesh(path, placed)
    elif rule is full_rules.DIVIDED:
      pairs = zip(*map(fields.types_of, (field, full)), strict=True)
      divided.extend((found[0], shape[0]) for found, shape in pairs)
    return full

  divided = []
  if made is not None:
    made.check_tree(state)
  full = fields.map_fields(convert, fields.full_rules_of, state, placed)
  if not divisions.is_of_one_mesh(divided):
    raise ValueError(
        f'{full_rules.made_for_others("slices", "several leaves")} that no'
        ' number of shards gives.'
    )
  return full


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
  check_reduction(reduction)
  one_shard = one_shard_lib.OneShard(tx, params, mesh, in_specs, 'shard_state')
  return place(state, one_shard, reduction)


def place(
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
        **fields.resize_rules_of(node, like, reduction),
        **fields.full_rules_of(node, like),
    }

  def convert(path, rule, field, like):
    if rule.full is not None:
      one_shard.check(path, field, like)
      return _sharded(rule, field, like, one_shard.mesh)
    fields.check_same_trees(path, field, like)
    carry_over = functools.partial(_carried_over, path, rule)
    return jax.tree.map_with_path(carry_over, field, like)

  state = jax.tree.map(copies.on_host, state)
  return fields.map_fields(convert, rules_of, state, one_shard.state)


def check_reduction(reduction: Any) -> None:
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
  is_abstract = specs.is_abstract(field)
  if not is_abstract and not copies.is_on_devices(field):
    return jax.tree.map(copies.copied, join(field))
  types = jax.eval_shape(join, fields.without_shardings(field))
  spread = jax.tree.map(lambda x: shardings.spread(x.shape, mesh), types)
  if is_abstract:
    return specs.abstract(types, spread, mesh)
  compiled = _automatic(mesh)
  placed = jax.device_put(
      field, _shardings(jax.tree.map(_spec_of, field), compiled)
  )
  with specs.without_mesh():
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
  placed = jax.tree.map(copies.put, full, spread)
  kept = jax.tree.map(lambda x: x.sharding.spec, target)
  place = jax.jit(
      lambda full: rule.place(full, target),
      out_shardings=_shardings(kept, compiled),
  )
  with specs.without_mesh():
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
    if not copies.is_here(leaf):
      copies.refuse_elsewhere(name)
    leaf = row_resizing.apply_rule(rule, name, leaf, like)
  return copies.put(leaf, like.sharding)
