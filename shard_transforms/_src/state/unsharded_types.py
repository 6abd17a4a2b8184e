"""Types of a state on a mesh, and of its sharded fields without sharding."""

import dataclasses
from typing import Any, NamedTuple

import jax
import optax

from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import mapping
from shard_transforms._src.base import partition_specs
from shard_transforms._src.base import states
from shard_transforms._src.state import fields
from shard_transforms._src.state import state_specs
from shard_transforms._src.state import state_types


class FieldTypes(NamedTuple):
  """The types of a sharded field of a state.

  Attributes:
    on_one_shard: The types of the field on one shard, where nothing is sliced.
    unsharded: The types of the field in the result of `unshard_state`.
  """

  on_one_shard: Any
  unsharded: Any


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
  sharded_fields: dict[fields.Path, FieldTypes]

  def unshard(self, path: fields.Path, rule: Any, field: Any) -> Any:
    """Returns the field at a path, unsharded by its rule.

    Raises:
      TypeError: If a leaf has another dtype.
      ValueError: If the field was created for other parameters, or the
        parameters are sharded such that it cannot be converted.
    """
    name = leaves_lib.name_of(path)
    types = self._types_of(path)
    self._check_whole_params(path, rule, field)
    unsharded = rule.unshard(field, types.on_one_shard, name)
    fields.check_same_types(name, unsharded, types.unsharded)
    return unsharded

  def check_created_on_mesh(self, state: Any) -> None:
    """Checks that a state was created on this mesh with these `in_specs`.

    Comparing shapes does not suffice, because slices that were created for
    other `in_specs` may have the same shapes. Such slices are sharded over
    additional axes.

    Raises:
      ValueError: If a sharded field has other shapes or shardings.
    """

    def check(path, rule, field, like):
      if rule.unshard is None:
        return
      is_unsharded = fields.types_of(field) == fields.types_of(
          self._types_of(path).unsharded
      )
      # If the tree differs, leave the check to the rule.
      same_tree = jax.tree.structure(field) == jax.tree.structure(like)
      if is_unsharded or not same_tree:
        return
      pairs = zip(*map(jax.tree.leaves, (field, like)), strict=True)
      if fields.types_of(field) != fields.types_of(like) or any(
          _axes_of(leaf) - _axes_of(like) for leaf, like in pairs
      ):
        raise ValueError(
            'The shapes or shardings of the state at'
            f' {leaves_lib.name_of(path)} are not those that `init_state` gives'
            ' it for this `mesh` and these `in_specs`. Pass the `mesh` and the'
            ' `in_specs` with which the state was created.'
        )

    fields.map_fields(check, fields.sharded_rules_of, state, self.state)

  def check_without_slices(self, state: Any, caller: str) -> None:
    """Checks that a state, whose mesh is unknown, has no slices.

    Raises:
      ValueError: If a leaf is sliced. Its padding depends on the mesh.
    """

    def check(path, rule, field, _):
      if rule is not fields.SLICES:
        return
      types = self._types_of(path).unsharded
      if fields.types_of(field) != fields.types_of(types):
        raise ValueError(
            f'`{caller}` got slices at {leaves_lib.name_of(path)} that are not'
            ' on the mesh for which they were created, so their padding is'
            ' unknown. Call `unshard_state(jax.device_get(state), old_tx,'
            ' params, old_mesh)` with that mesh and the transformation for its'
            ' axes, and then `shard_state` with the new ones.'
        )

    fields.map_fields(check, fields.sharded_rules_of, state, self.state)

  def check_unsharded(
      self, path: fields.Path, rule: states.Rule, field: Any, target: Any
  ) -> None:
    """Checks that an unsharded field can be sharded like `target`.

    Raises:
      TypeError: If a leaf has another dtype.
      ValueError: If the field was created for other parameters.
    """
    name = leaves_lib.name_of(path)
    types = self._types_of(path)
    advice = ' Pass the result of `unshard_state` to `shard_state`.'
    fields.check_same_types(name, field, types.unsharded, advice)
    self._check_whole_params(path, rule, target)
    # Raises for `groups`: each group keeps a different state.
    target = leaves_lib.shapes_of(target)
    _unsharded_field_types(rule, target, types.on_one_shard, name)

  def _types_of(self, path):
    if path not in self.sharded_fields:
      name = leaves_lib.name_of(path)
      raise ValueError(fields.mismatch(name, 'a sharded field', 'a leaf'))
    return self.sharded_fields[path]

  def _check_whole_params(self, path, rule, field):
    """Checks that slices are not those of sharded parameters."""
    one_shard = self._types_of(path).on_one_shard
    is_sharded = fields.types_of(field) != fields.types_of(one_shard)
    # Slices of sharded parameters cannot be distinguished from slices of
    # unsharded parameters. All other rules handle sharded parameters.
    params_are_sharded = bool(partition_specs.axes_of(self.in_specs))
    if is_sharded and params_are_sharded and rule is fields.SLICES:
      raise ValueError(
          '`in_specs` shards parameters over some axes, and their state is'
          ' sharded over further axes, such as by `shard_update`: got'
          f' {self.in_specs!r} for {leaves_lib.name_of(path)}. Such a state'
          ' cannot be converted. Continue on the same mesh, or create the state'
          ' again with `init_state`.'
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
  mapping.check_mesh(mesh)
  param_specs = state_specs.checked_specs(tx, params, in_specs, caller)
  shapes = leaves_lib.shapes_of(params)
  state, one_shard = state_types.types_on_mesh_and_one_shard(
      tx, shapes, mesh, param_specs
  )
  on_mesh = fields.sharded_fields(fields.sharded_rules_of, state)
  if not on_mesh:
    return UnshardedTypes(mesh, in_specs, state, {})
  # For sharded parameters, `one_shard` is the state of a shard's part of them.
  if one_shard is None or partition_specs.axes_of(in_specs):
    one_shard = state_types.types_on_one_shard(tx, shapes, mesh, param_specs)
  on_one_shard = fields.sharded_fields(fields.sharded_rules_of, one_shard)
  sharded_fields = {}
  for path in on_mesh.keys() & on_one_shard.keys():
    rule, types = on_one_shard[path]
    types = leaves_lib.shapes_of(types)
    unsharded = _unsharded_field_types(
        rule, types, types, leaves_lib.name_of(path)
    )
    sharded_fields[path] = FieldTypes(types, unsharded)
  return UnshardedTypes(mesh, in_specs, state, sharded_fields)


def _unsharded_field_types(rule, field, on_one_shard, name):
  """Returns the types of a field that its rule has unsharded."""
  return jax.eval_shape(
      lambda field: rule.unshard(field, on_one_shard, name), field
  )


def _axes_of(leaf):
  return partition_specs.axes_of(partition_specs.spec_of(leaf))
