"""Types of the global state, from a trace of `tx.init` on a mesh."""

from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Mapping
import contextlib
import contextvars
import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import optax

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import divisions
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import mapping
from shard_transforms._src.base import partition_specs
from shard_transforms._src.base import states
from shard_transforms._src.state import fields

# The local shape and the spec of each parameter, by its name, while `_traced`
# runs `tx.init`. Only `owned_update` reads it: types do not show which
# dimension of a parameter an axis slices.
PARAMS_IN_TRACE: contextvars.ContextVar[Mapping[str, tuple[Any, P]] | None] = (
    contextvars.ContextVar('params_in_trace', default=None)
)


def state_types(
    tx: optax.GradientTransformation,
    params: leaves_lib.ParamTree,
    mesh: mapping.AnyMesh,
    param_specs: Any,
    stacked_axes: tuple[Hashable, ...] = (),
) -> Any:
  """Returns the types of the global state, with shardings.

  Args:
    tx: The transformation.
    params: Tree of arrays, or of `jax.ShapeDtypeStruct`.
    mesh: The mesh of the step.
    param_specs: The spec of each parameter.
    stacked_axes: Axes over which every leaf gets an additional leading
      dimension.
  """
  return types_on_mesh_and_one_shard(
      tx, params, mesh, param_specs, stacked_axes
  )[0]


def types_on_mesh_and_one_shard(
    tx: optax.GradientTransformation,
    params: leaves_lib.ParamTree,
    mesh: mapping.AnyMesh,
    param_specs: Any,
    stacked_axes: tuple[Hashable, ...] = (),
) -> tuple[Any, Any]:
  """Returns the result of `state_types`, and the types on one shard.

  `tx.init` is traced once on the mesh. If the state contains slices, `tx.init`
  is traced again on one shard, with each shard's part of the parameters, for
  the shapes of the unsliced leaves; otherwise the types on one shard are
  `None`.
  """

  def init(params):
    return jax.tree.map(jax.typeof, (params, tx.init(params)))

  local_params, state = _traced(init, params, mesh, param_specs)
  one_shard, leaves = None, jax.tree.map(_Leaf, state)
  if any(map(_has_slices, jax.tree.leaves(state, is_leaf=_has_slices))):
    one_shard = types_on_one_shard(tx, local_params, mesh, param_specs)
    leaves = _with_divisions(state, one_shard, mesh)
  if partition_specs.axes_of(param_specs):
    # The trace binds the axes that `tx.init` may need.
    leaves = _traced(
        lambda params: map_with_params(
            tx, _shard_like_param, leaves, params, param_specs
        ),
        params,
        mesh,
        param_specs,
    )

  def global_type(path, leaf):
    spec = _global_spec(path, leaf, mesh, stacked_axes)
    shape = leaf.type.shape
    if stacked_axes:
      shape = (1, *shape)
    sizes = itertools.zip_longest(shape, _num_parts(spec, mesh), fillvalue=1)
    return jax.ShapeDtypeStruct(
        tuple(map(math.prod, sizes)),
        leaf.type.dtype,
        sharding=jax.sharding.NamedSharding(mesh, spec),
    )

  return jax.tree.map_with_path(global_type, leaves), one_shard


def types_on_one_shard(
    tx: optax.GradientTransformation,
    params: Any,
    mesh: mapping.AnyMesh,
    param_specs: Any,
) -> Any:
  """Returns the types that the state has if each mesh axis has one shard.

  Raises:
    ValueError: If `tx.init` raises on such a mesh.
  """
  names = mesh.axis_names
  mesh = jax.sharding.AbstractMesh((1,) * len(names), names)

  def init(params):
    return jax.tree.map(jax.typeof, tx.init(params))

  try:
    with without_mesh():
      return _traced(init, params, mesh, param_specs)
  # `tx.init` succeeded on the actual mesh, so any error here is about one
  # shard.
  except Exception as error:
    raise ValueError(
        '`tx.init` raised an error on a mesh with one shard. The shardings of'
        ' slices and the shapes of a checkpoint are those of the state on one'
        f' shard, so `tx` must support it. The error was: {error}'
    ) from error


def without_mesh() -> contextlib.AbstractContextManager[None]:
  """Sets an empty mesh as the context, so that any mesh can be used inside."""
  return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


def spec_tree(types: Any) -> Any:
  """Returns the specs of a tree of types with shardings."""
  return jax.tree.map(lambda leaf: leaf.sharding.spec, types)


def shardings(specs: Any, mesh: mapping.AnyMesh) -> Any:
  """Returns the shardings over a mesh for a tree of specs."""
  return jax.tree.map(
      lambda spec: jax.sharding.NamedSharding(mesh, spec), specs
  )


def _slice_rules_of(node, _=None):
  """Returns the rules of the sliced fields of a node."""
  rules = type(node).rules if states.declares(node) else {}
  return {k: rule for k, rule in rules.items() if rule is fields.SLICES}


def _has_slices(node):
  return bool(_slice_rules_of(node))


def _with_divisions(state, on_one_shard, mesh):
  """Returns the leaves of a state, sliced leaves with their divisions.

  Raises:
    ValueError: If a sliced field is missing, or has a different tree, on one
      shard.
  """
  unsharded_fields = fields.sharded_fields(_slice_rules_of, on_one_shard)

  def describe(path, rule, field, _):
    if rule is not fields.SLICES:
      return jax.tree.map(_Leaf, field)
    _, like = unsharded_fields.get(path, (None, None))
    got, expected = map(jax.tree.structure, (field, like))
    if got != expected:
      raise ValueError(
          'The tree of a sliced state depends on the number of shards:'
          f' {leaves_lib.name_of(path)} has the tree {got}, but {expected} on'
          ' one shard. Use an `inner` whose state has the same tree for slices'
          ' and for whole parameters.'
      )
    return jax.tree.map(functools.partial(_slice, mesh), field, like)

  return fields.map_fields(describe, _slice_rules_of, state, state)


def _traced(fn, params, mesh, param_specs):
  """Traces a function of each shard's parameters, and returns its result.

  The axes of the mesh are bound in the trace. The result is not made of arrays,
  so it can leave the trace.
  """
  results = []

  def trace(params):
    names = map(leaves_lib.name_of, dict(jax.tree.leaves_with_path(params)))
    shapes = map(jnp.shape, jax.tree.leaves(params))
    specs = jax.tree.leaves(param_specs, is_leaf=partition_specs.is_spec)
    pairs = zip(shapes, specs, strict=True)
    token = PARAMS_IN_TRACE.set(dict(zip(names, pairs, strict=True)))
    try:
      results.append(fn(params))
    finally:
      PARAMS_IN_TRACE.reset(token)
    return ()

  mapped = jax.shard_map(
      trace, mesh=mesh, in_specs=(param_specs,), out_specs=()
  )
  jax.eval_shape(mapped, abstract(params, param_specs, mesh))
  return results[0]


def _num_parts(spec, mesh):
  """Returns the number of parts into which a spec divides each dimension."""
  return [
      math.prod(mesh.shape[axis] for axis in entry)
      for entry in partition_specs.entries(spec)
  ]


def types_over_unmapped_axes(
    tx: optax.GradientTransformation,
    params: leaves_lib.ParamTree,
    mesh: mapping.AnyMesh,
    in_specs: Any,
    state: Any,
    unmapped_specs: Any,
) -> Any:
  """Returns the types of a state, also sharded over axes that are not mapped.

  Args:
    tx: The transformation.
    params: Tree of arrays, or of `jax.ShapeDtypeStruct`.
    mesh: The mesh of the step.
    in_specs: The spec of each parameter over the mapped axes.
    state: The types of the state, sharded over the mapped axes.
    unmapped_specs: The spec of each parameter over the axes that are not
      mapped; leaves of the state with the shape of a parameter get this spec,
      too.
  """

  def join(leaf, param, unmapped_spec):
    spec, shape = leaf.sharding.spec, jnp.shape(param)
    num_leading = len(leaf.shape) - len(shape)
    if num_leading < 0 or leaf.shape[num_leading:] != shape:
      return leaf
    spec = partition_specs.joined(
        spec, P(*(None,) * num_leading, *unmapped_spec)
    )
    sizes = _num_parts(spec, mesh)
    if any(n % size for n, size in zip(leaf.shape, sizes, strict=False)):
      return leaf
    return leaf.update(sharding=jax.sharding.NamedSharding(mesh, spec))

  # The trace binds the axes that `tx.init` may need.
  return _traced(
      lambda _: map_with_params(tx, join, state, params, unmapped_specs),
      params,
      mesh,
      in_specs,
  )


@dataclasses.dataclass(frozen=True)
class _Leaf:
  """A leaf of the state on each shard.

  Attributes:
    type: The type of the leaf.
    spec: The spec of the leaf, without the leading axis of a per-shard leaf.
    division: If the leaf is a slice, the division of the whole leaf; otherwise
      `None`.
    axes: The axes of the division.
  """

  type: Any
  spec: P = P()
  division: divisions.Division | None = None
  axes: tuple[Hashable, ...] = ()

  @property
  def varying(self) -> frozenset[Hashable]:
    """The axes over which the leaf differs between shards."""
    return axes_lib.varying_axes(self.type)


def _slice(mesh, type_, unsharded):
  """Returns a leaf with its division, or without one if it is not a slice."""
  varying = axes_lib.varying_axes(type_) - axes_lib.varying_axes(unsharded)
  axes = tuple(axis for axis in reversed(mesh.axis_names) if axis in varying)
  shape = unsharded.shape
  if not axes or len(type_.shape) != len(shape) or not all((shape, *shape)):
    return _Leaf(type_)
  division = divisions.divide(shape, [mesh.shape[axis] for axis in axes])
  if division.slice_shape != type_.shape:
    return _Leaf(type_)
  return _Leaf(type_, division.spec(axes), division, axes)


def _shard_like_param(leaf, param, param_spec):
  """Returns a leaf that belongs to a parameter, with its spec.

  The leaf may have the shape of the parameter, of a slice or of a stack.

  Args:
    leaf: The leaf.
    param: The parameter on one shard.
    param_spec: The spec of the parameter.
  """
  shape, leaf_shape = jnp.shape(param), leaf.type.shape
  axes, spec = partition_specs.axes_of(param_spec), P()
  num_leading = len(leaf_shape) - len(shape)
  is_varying = axes <= leaf.varying
  if leaf.division is not None:
    if leaf.division.shape == shape and is_varying:
      spec = leaf.division.spec(leaf.axes, param_spec)
  elif (
      axes
      and num_leading >= 0
      and leaf_shape[num_leading:] == shape
      # A leaf that is the same on all shards may have the shape of a stack by
      # coincidence.
      and (leaf_shape[:num_leading] in ((), (1,)) or is_varying)
  ):
    is_per_shard = bool(leaf.varying - axes)
    spec = P(*(None,) * (num_leading - is_per_shard), *param_spec)
  return dataclasses.replace(leaf, spec=spec)


def _global_spec(path, leaf, mesh, stacked_axes):
  """Returns the spec of a leaf of the state, first over `stacked_axes`."""
  per_shard_axes = leaf.varying - partition_specs.axes_of(leaf.spec)
  shape = leaf.type.shape
  if per_shard_axes and (leaf.division is not None or shape[:1] != (1,)):
    raise ValueError(
        f'The state at {leaves_lib.name_of(path)} has the shape {shape} and'
        f' differs between the shards of {sorted(per_shard_axes, key=str)}. A'
        ' leaf of the state that differs between shards must have a leading'
        ' dimension of length 1, or the shape of a parameter that `in_specs`'
        ' shards the same way.'
    )
  leading, spec = [], leaf.spec
  if stacked_axes:
    leading.append(stacked_axes)
    free_axes = set(mesh.axis_names).difference(stacked_axes)
    spec = partition_specs.restricted(spec, free_axes)
  if per_shard_axes:
    row_axes = per_shard_axes.difference(stacked_axes)
    leading.append(tuple(axis for axis in mesh.axis_names if axis in row_axes))
  return P(*partition_specs.from_entries(leading), *spec)


def is_abstract(params: leaves_lib.ParamTree) -> bool:
  """Whether a tree has leaves that are only shapes."""
  leaves = jax.tree.leaves(params)
  return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)


def abstract(tree: Any, specs: Any, mesh: mapping.AnyMesh) -> Any:
  """Returns the shapes, dtypes and shardings of a tree of arrays."""
  return jax.tree.map(
      lambda x, spec: jax.ShapeDtypeStruct(
          jnp.shape(x),
          jnp.result_type(x),
          sharding=jax.sharding.NamedSharding(mesh, spec),
      ),
      tree,
      specs,
  )


def map_with_params(
    tx: optax.GradientTransformation,
    fn: Callable[..., Any],
    state: Any,
    params: Any,
    *rest: Any,
) -> Any:
  """Maps the leaves of a state that belong to a parameter.

  All other leaves are kept. Unlike `optax.tree_utils.tree_map_params`, this
  function accepts a state with several arrays per parameter, such as the
  statistics of Shampoo.

  Args:
    tx: The transformation that keeps the state.
    fn: Takes a leaf of the state, its parameter, and the leaves of `rest` at
      the position of this parameter.
    state: The state; its leaves may have any type.
    params: The parameters.
    *rest: Trees like the parameters.
  """
  treedef = jax.tree.structure(params)
  args = list(zip(*map(treedef.flatten_up_to, (params, *rest)), strict=True))
  stand_ins = treedef.unflatten(map(_StandIn, range(len(args))))

  def map_part(stand_in, part):
    if not isinstance(stand_in, _StandIn):
      return part
    return jax.tree.map(lambda leaf: fn(leaf, *args[stand_in.number]), part)

  return jax.tree.map(
      map_part,
      tx.init(stand_ins),
      state,
      is_leaf=lambda x: isinstance(x, _StandIn),
  )


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _StandIn:
  """A pytree without leaves that replaces the parameter with this number."""

  number: int
