"""The sharded fields of a state, with their types on one shard."""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import partition_specs
from shard_transforms._src.state import fields
from shard_transforms._src.state import specs
from shard_transforms._src.state import state_types

Path = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class OneShard:
  """Types of the state on one shard, where nothing is sliced.

  Sharded fields have the shapes of the replicated state there. The types are
  computed when they are first needed.

  Attributes:
    tx: The transformation.
    given: The parameters.
    mesh: A mesh with the axes that the transformation names.
    in_specs: The `PartitionSpec`s of the parameters.
    caller: The name of the public function, for error messages.
  """

  tx: optax.GradientTransformation
  given: Any
  mesh: jax.sharding.Mesh
  in_specs: Any
  caller: str

  def __post_init__(self):
    specs.check_mesh(self.mesh)
    specs.checked_specs(self.tx, self.given, self.in_specs, self.caller)

  @functools.cached_property
  def params(self) -> Any:
    """The shapes of the parameters."""
    return jax.eval_shape(lambda params: params, self.given)

  @functools.cached_property
  def _param_specs(self):
    return partition_specs.of_params(self.in_specs, self.params, self.caller)

  @functools.cached_property
  def state(self) -> Any:
    """The types of the state on the mesh, with shardings."""
    # If parameters are sharded, `state_types` traces with the local shapes of
    # the parameters instead.
    is_sharded = any(map(partition_specs.axes_of, self._leaf_specs()))
    return state_types.state_types(
        self.tx,
        self.params,
        self.mesh,
        self._param_specs,
        on_one_shard=None if is_sharded else lambda: self._on_one_shard,
    )

  @functools.cached_property
  def parts(self) -> dict[Path, tuple[Any, Any]]:
    """The rules and the types on the mesh of the sharded fields, by path."""
    return fields.parts_of(fields.full_rules_of, self.state)

  @functools.cached_property
  def _on_one_shard(self):
    return state_types.types_on_one_shard(
        self.tx, self.params, self.mesh, self._param_specs
    )

  @functools.cached_property
  def _fields(self):
    """The kept and the full types of the sharded fields on one shard."""
    # Reading `parts` traces on the mesh first: an error that also occurs there
    # is raised unchanged.
    if not self.parts:
      return {}
    found = {}
    parts = fields.parts_of(fields.full_rules_of, self._on_one_shard)
    for path, (rule, field) in parts.items():
      types = fields.without_shardings(field)
      full = _full_types(rule, types, types, leaves_lib.name_of(path))
      found[path] = types, full
    return found

  def check_tree(self, state: Any) -> None:
    """Checks that a state has the tree of the state on this mesh.

    Raises:
      ValueError: If the trees differ.
    """
    # A checkpoint may restore dictionaries instead of state classes.
    fields.map_fields(lambda *_: None, fields.full_rules_of, state, self.state)

  def check_made_on_mesh(self, path: Path, field: Any) -> None:
    """Checks that a field was made on this mesh with these `in_specs`.

    Comparing shapes does not suffice, because slices that were made for other
    `in_specs` may have the same shapes. Such slices are sharded over additional
    axes.

    Raises:
      ValueError: If the field has other shapes or shardings.
    """
    _, full = self._types_of(path)
    _, made = self.parts.get(path, (None, None))
    is_full = fields.types_of(field) == fields.types_of(full)
    # If the tree differs, leave the check to the rule.
    if is_full or jax.tree.structure(field) != jax.tree.structure(made):
      return
    if fields.types_of(field) != fields.types_of(made) or any(
        _axes_of(x) - _axes_of(y)
        for x, y in zip(*map(jax.tree.leaves, (field, made)), strict=True)
    ):
      name = leaves_lib.name_of(path)
      raise ValueError(
          '`mesh` and `in_specs` must be those with which `init_state` made the'
          f' state, got other shapes or shardings at {name}. Give both as to'
          ' `init_state`.'
      )

  def joining(self, path: Path, rule: Any) -> Callable[[Any], Any]:
    """Returns a function that converts the field at a path to its full form.

    Raises:
      ValueError: If the field at this path is not sharded.
    """
    name = leaves_lib.name_of(path)
    one_shard, _ = self._types_of(path)

    def join(field):
      if fields.types_of(field) != fields.types_of(one_shard):
        self._check_whole_params(path)
      full = rule.full(field, one_shard, name)
      self._check_shapes(path, full)
      return full

    return join

  def check(self, path: Path, full: Any, target: Any) -> None:
    """Checks that a field in its full form can be placed like `target`.

    Raises:
      TypeError: If a leaf has another dtype.
      ValueError: If the field was made for other parameters.
    """
    one_shard, expected = self._types_of(path)
    self._check_shapes(path, full, ' It must be what `unshard_state` returns.')
    for (sub, leaf), like in _pairs(full, expected):
      fields.check_dtype(leaves_lib.name_of((*path, *sub)), leaf, like)
    if fields.types_of(target) != fields.types_of(one_shard):
      self._check_whole_params(path)
    rule, _ = self.parts[path]
    # Raises for `groups`: each group keeps a different state, so the slices do
    # not join to one full state.
    _full_types(rule, target, one_shard, leaves_lib.name_of(path))

  def _types_of(self, path):
    if path not in self._fields:
      name = leaves_lib.name_of(path)
      raise ValueError(f'{fields.made_for_others("a part", name)}.')
    return self._fields[path]

  def _check_shapes(self, path, full, hint=''):
    _, expected = self._types_of(path)
    fields.check_same_trees(path, full, expected)
    for (sub, leaf), like in _pairs(full, expected):
      if jnp.shape(leaf) != like.shape:
        name = leaves_lib.name_of((*path, *sub))
        got = f'the shape {jnp.shape(leaf)}'
        raise ValueError(
            f'{fields.made_for_others(got, name)} instead of {like.shape}.'
            f'{hint}'
        )

  def _leaf_specs(self):
    return jax.tree.leaves(self.in_specs, is_leaf=partition_specs.is_spec)

  def _check_whole_params(self, path):
    # Slices of sharded parameters cannot be distinguished from slices of
    # unsharded parameters. All other rules handle sharded parameters.
    rule, _ = self.parts.get(path, (fields.DIVIDED, None))
    if rule is not fields.DIVIDED:
      return
    if any(map(partition_specs.axes_of, self._leaf_specs())):
      raise ValueError(
          '`in_specs` must not shard parameters whose state is sharded further,'
          f' such as by `shard_update`, got {self.in_specs} for'
          f' {leaves_lib.name_of(path)}. Go on with the same mesh, or start'
          ' again with `init_state`.'
      )


def _full_types(rule, part, one_shard, name):
  """Returns the types of a field in its full form."""
  return jax.eval_shape(
      lambda part: rule.full(part, one_shard, name),
      fields.without_shardings(part),
  )


def _axes_of(leaf):
  """Returns the axes over which a leaf is sharded; empty if it is unknown."""
  sharding = getattr(leaf, 'sharding', None)
  if not isinstance(sharding, jax.sharding.NamedSharding):
    return frozenset()
  return partition_specs.axes_of(sharding.spec)


def _pairs(tree, like):
  return zip(
      jax.tree.leaves_with_path(tree), jax.tree.leaves(like), strict=True
  )
