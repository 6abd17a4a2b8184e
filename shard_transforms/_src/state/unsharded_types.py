"""Types of a state on a mesh, and of its sharded fields without sharding."""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import optax

from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import partition_specs
from shard_transforms._src.base import states
from shard_transforms._src.state import fields
from shard_transforms._src.state import specs
from shard_transforms._src.state import state_types


class ShardedField(NamedTuple):
  """The types of a sharded field of a state.

  Attributes:
    rule: The rule of the field.
    on_mesh: The types of the field on the mesh, with shardings.
    on_one_shard: The types of the field on one shard, where nothing is sliced.
    full: The types of the field in its full form.
  """

  rule: states.Rule
  on_mesh: Any
  on_one_shard: Any
  full: Any


@dataclasses.dataclass(frozen=True)
class UnshardedTypes:
  """Types of a state on a mesh, and of its sharded fields without sharding.

  Attributes:
    mesh: The mesh.
    in_specs: The `PartitionSpec`s of the parameters.
    state: The types of the state on the mesh, with shardings.
    sharded_fields: The types of the sharded fields, by path.
  """

  mesh: jax.sharding.Mesh
  in_specs: Any
  state: Any
  sharded_fields: dict[fields.Path, ShardedField]

  def check_tree(self, state: Any) -> None:
    """Checks that a state has the tree of the state on this mesh.

    Raises:
      ValueError: If the trees differ.
    """
    # A checkpoint may restore dictionaries instead of state classes.
    fields.map_fields(lambda *_: None, fields.full_rules_of, state, self.state)

  def check_created_on_mesh(self, path: fields.Path, field: Any) -> None:
    """Checks that a field was created on this mesh with these `in_specs`.

    Comparing shapes does not suffice, because slices that were created for
    other `in_specs` may have the same shapes. Such slices are sharded over
    additional axes.

    Raises:
      ValueError: If the field has other shapes or shardings.
    """
    types = self._types_of(path)
    is_full = fields.types_of(field) == fields.types_of(types.full)
    # If the tree differs, leave the check to the rule.
    same_tree = jax.tree.structure(field) == jax.tree.structure(types.on_mesh)
    if is_full or not same_tree:
      return
    pairs = zip(*map(jax.tree.leaves, (field, types.on_mesh)), strict=True)
    if fields.types_of(field) != fields.types_of(types.on_mesh) or any(
        _axes_of(leaf) - _axes_of(like) for leaf, like in pairs
    ):
      raise ValueError(
          f'The shapes or shardings of the state at {leaves_lib.name_of(path)}'
          ' are not those that `init_state` gives it for this `mesh` and these'
          ' `in_specs`. Pass the `mesh` and the `in_specs` with which the state'
          ' was created.'
      )

  def joining(
      self, path: fields.Path, to_full: Callable[[Any, Any, str], Any]
  ) -> Callable[[Any], Any]:
    """Returns a function that converts the field at a path to its full form.

    Args:
      path: The path of the field.
      to_full: The function `full` of the rule of the field.

    Raises:
      ValueError: If the field at this path is not sharded.
    """
    name = leaves_lib.name_of(path)
    types = self._types_of(path)

    def join(field):
      if fields.types_of(field) != fields.types_of(types.on_one_shard):
        self._check_whole_params(path, types)
      full = to_full(field, types.on_one_shard, name)
      fields.check_same_shapes(name, full, types.full)
      return full

    return join

  def check_full(self, path: fields.Path, full: Any, target: Any) -> None:
    """Checks that a field in its full form can be sharded like `target`.

    Raises:
      TypeError: If a leaf has another dtype.
      ValueError: If the field was created for other parameters.
    """
    name = leaves_lib.name_of(path)
    types = self._types_of(path)
    fields.check_same_shapes(name, full, types.full)

    def check_dtype(path, leaf, like):
      fields.check_dtype(name + jax.tree_util.keystr(path), leaf, like)

    jax.tree.map_with_path(check_dtype, full, types.full)
    if fields.types_of(target) != fields.types_of(types.on_one_shard):
      self._check_whole_params(path, types)
    # Raises for `groups`: each group keeps a different state, so the slices do
    # not join to one full state.
    _full_types(types.rule, target, types.on_one_shard, name)

  def _types_of(self, path):
    if path not in self.sharded_fields:
      name = leaves_lib.name_of(path)
      raise ValueError(fields.mismatch(name, 'a sharded field', 'a leaf'))
    return self.sharded_fields[path]

  def _check_whole_params(self, path, types):
    # Slices of sharded parameters cannot be distinguished from slices of
    # unsharded parameters. All other rules handle sharded parameters.
    is_sharded = bool(partition_specs.axes_of(self.in_specs))
    if types.rule is fields.DIVIDED and is_sharded:
      raise ValueError(
          '`in_specs` shards parameters whose state is sharded further, such as'
          f' by `shard_update`: got {self.in_specs!r} for'
          f' {leaves_lib.name_of(path)}. Such a state cannot be converted.'
          ' Continue on the same mesh, or create the state again with'
          ' `init_state`.'
      )


def unsharded_types(
    tx: optax.GradientTransformation,
    params: leaves_lib.ParamTree,
    mesh: jax.sharding.Mesh,
    in_specs: partition_specs.SpecTree,
    caller: str,
) -> UnshardedTypes:
  """Traces the `init` of a transformation on a mesh and on one shard.

  On one shard, sharded fields have the shapes of the replicated state.

  Raises:
    TypeError: If an argument has the wrong type.
    ValueError: If `in_specs` does not have the tree of the parameters, or
      `tx.init` raises on one shard.
  """
  specs.check_mesh(mesh)
  param_specs = specs.checked_specs(tx, params, in_specs, caller)
  shapes = jax.eval_shape(lambda params: params, params)

  @functools.cache
  def types_on_one_shard():
    return state_types.types_on_one_shard(tx, shapes, mesh, param_specs)

  # If parameters are sharded, `state_types` needs the state for the local
  # shapes of the parameters instead.
  state = state_types.state_types(
      tx,
      shapes,
      mesh,
      param_specs,
      on_one_shard=(
          None if partition_specs.axes_of(in_specs) else types_on_one_shard
      ),
  )
  rules_of = fields.full_rules_of
  on_mesh = fields.sharded_fields(rules_of, state)
  sharded_fields = {}
  # An error that also occurs on the mesh was raised by the trace on the mesh.
  if on_mesh:
    on_one_shard = fields.sharded_fields(rules_of, types_on_one_shard())
    for path in on_mesh.keys() & on_one_shard.keys():
      rule, types = on_one_shard[path]
      types = fields.without_shardings(types)
      full = _full_types(rule, types, types, leaves_lib.name_of(path))
      sharded_fields[path] = ShardedField(rule, on_mesh[path][1], types, full)
  return UnshardedTypes(mesh, in_specs, state, sharded_fields)


def _full_types(rule, field, on_one_shard, name):
  """Returns the types of a field in its full form."""
  return jax.eval_shape(
      lambda field: rule.full(field, on_one_shard, name),
      fields.without_shardings(field),
  )


def _axes_of(leaf):
  """Returns the axes over which a leaf is sharded; empty if it is unknown."""
  sharding = getattr(leaf, 'sharding', None)
  if not isinstance(sharding, jax.sharding.NamedSharding):
    return frozenset()
  return partition_specs.axes_of(sharding.spec)
