"""Types of the global state, from a trace of `tx.init` on a mesh."""

from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Iterator
from collections.abc import Mapping
import contextlib
import contextvars
import dataclasses
import functools
import itertools
import math
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import optax

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import divisions
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import partition_specs as specs_lib
from shard_transforms._src.base import states
from shard_transforms._src.state import fields

# The shape and the spec of each parameter where `init` is traced on a mesh.
_SPECS_IN_USE: contextvars.ContextVar[Mapping[str, tuple[Any, P]]] = (
    contextvars.ContextVar('specs_in_use')
)


def state_types(
    tx: optax.GradientTransformation,
    params: leaves_lib.ParamTree,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
    param_specs: Any,
    lead: tuple[Hashable, ...] = (),
    on_one_shard: Callable[[], Any] | None = None,
) -> Any:
  """Returns the types of the global state, with shardings.

  `tx.init` is traced once on the mesh. If the state contains slices, `tx.init`
  is traced again on one shard, for the shapes of the unsliced leaves.

  Args:
    tx: The transformation.
    params: Tree of arrays, or of `jax.ShapeDtypeStruct`.
    mesh: The mesh of the step.
    param_specs: The spec of each parameter.
    lead: Axes over which every leaf gets an additional leading dimension.
    on_one_shard: Returns the result of `types_on_one_shard` for each shard's
      part of the parameters; only called if the state contains slices.
  """

  def init(params):
    return jax.tree.map(jax.typeof, (params, tx.init(params)))

  local_params, state = _traced(init, params, mesh, param_specs)
  if any(map(_has_slices, jax.tree.leaves(state, is_leaf=_has_slices))):
    if on_one_shard is None:
      on_one_shard = functools.partial(
          types_on_one_shard, tx, local_params, mesh, param_specs
      )
    leaves = _with_divisions(state, on_one_shard(), mesh)
  else:
    leaves = jax.tree.map(_Leaf, state)
  likes = leaves
  if any(map(specs_lib.axes_of, jax.tree.leaves(param_specs))):
    # The trace binds the axes that `tx.init` may need.
    likes = _traced(
        lambda params: map_with_params(
            tx, _spec_like, leaves, params, param_specs
        ),
        params,
        mesh,
        param_specs,
    )

  def global_type(path, leaf, like):
    spec = _spec(path, leaf, _spec_anywhere(like), mesh, lead)
    shape = (*(1,) * bool(lead), *leaf.kind.shape)
    sizes = _num_parts(spec, mesh)
    return jax.ShapeDtypeStruct(
        tuple(map(math.prod, itertools.zip_longest(shape, sizes, fillvalue=1))),
        leaf.kind.dtype,
        sharding=jax.sharding.NamedSharding(mesh, spec),
    )

  return jax.tree.map_with_path(global_type, leaves, likes)


def types_on_one_shard(
    tx: optax.GradientTransformation,
    params: Any,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
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
        '`tx` needs a state on one shard, because slices get their shardings,'
        ' and a checkpoint its shapes, from that state. There, `tx.init`'
        f' raised: {error}'
    ) from error


def without_mesh() -> contextlib.AbstractContextManager[None]:
  """Sets an empty mesh as the context, so that any mesh can be used inside."""
  return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


def spec_tree(types: Any) -> Any:
  """Returns the specs of a tree of types with shardings."""
  return jax.tree.map(lambda leaf: leaf.sharding.spec, types)


def shardings(
    specs: Any, mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh
) -> Any:
  """Returns the shardings over a mesh for a tree of specs."""
  return jax.tree.map(
      lambda spec: jax.sharding.NamedSharding(mesh, spec), specs
  )


def _slice_rules_of(node, _=None):
  """Returns the rules of the sliced fields of a node."""
  rules = type(node).rules if states.declares(node) else {}
  return {k: rule for k, rule in rules.items() if rule is fields.DIVIDED}


def _has_slices(node):
  return bool(_slice_rules_of(node))


def _with_divisions(state, on_one_shard, mesh):
  """Returns the leaves of a state, sliced leaves with their divisions.

  Raises:
    ValueError: If a sliced field is missing, or has a different tree, on one
      shard.
  """
  unsharded = fields.sharded_fields(_slice_rules_of, on_one_shard)

  def describe(path, rule, part, _):
    if rule is not fields.DIVIDED:
      return jax.tree.map(_Leaf, part)
    _, like = unsharded.get(path, (None, None))
    found, expected = map(jax.tree.structure, (part, like))
    if found != expected:
      raise ValueError(
          '`tx` must slice state whose tree does not depend on the number of'
          f' shards, got the tree {found} at {leaves_lib.name_of(path)}, but'
          f' {expected} on one shard.'
      )
    return jax.tree.map(functools.partial(_slice, mesh), part, like)

  return fields.map_fields(describe, _slice_rules_of, state, state)


def _traced(fn, params, mesh, param_specs):
  """Traces a function of each shard's parameters, and returns its result.

  The axes of the mesh are bound in the trace. The result is not made of arrays,
  so it can leave the trace.
  """
  results = []

  def trace(params):
    with _specs_in_use(params, param_specs):
      results.append(fn(params))
    return ()

  mapped = jax.shard_map(
      trace, mesh=mesh, in_specs=(param_specs,), out_specs=()
  )
  jax.eval_shape(mapped, abstract(params, param_specs, mesh))
  return results[0]


@contextlib.contextmanager
def _specs_in_use(params: Any, specs: specs_lib.SpecTree) -> Iterator[None]:
  """Makes the specs of parameters known to the `init` that is traced.

  Args:
    params: The parameters as a shard holds them.
    specs: The `PartitionSpec` of each parameter.
  """
  leaves = jax.tree.leaves_with_path(params)
  pairs = zip(
      leaves, jax.tree.leaves(specs, is_leaf=specs_lib.is_spec), strict=True
  )
  specs_of_names = {
      leaves_lib.name_of(path): (jnp.shape(x), spec)
      for (path, x), spec in pairs
  }
  token = _SPECS_IN_USE.set(specs_of_names)
  try:
    yield
  finally:
    _SPECS_IN_USE.reset(token)


def check_specs_in_use(
    name: str, shape: tuple[int, ...], spec: P, caller: str
) -> None:
  """Checks that a spec slices a parameter as the specs in use do.

  Types do not tell which dimension an axis slices. A parameter without a spec
  in use, such as that of another tree, is not checked.

  Args:
    name: The path of the parameter.
    shape: The shape of the slice that a shard holds.
    spec: The spec to check.
    caller: The public name that errors show.

  Raises:
    ValueError: If the specs differ.
  """
  shape_in_use, in_use = _SPECS_IN_USE.get({}).get(name, (None, None))
  if shape_in_use != shape or in_use is None:
    return

  def slicing(spec):
    parts = [
        [a for a in e if lax.axis_size(a) > 1] for e in specs_lib.entries(spec)
    ]
    return parts + [[]] * (len(shape) - len(parts))

  if slicing(spec) != slicing(in_use):
    raise ValueError(
        f'`param_specs` of `{caller}` must be the `in_specs` of the step, got'
        f' {spec!r} for {name}, which `in_specs` shards by {in_use!r}. Give'
        ' the same specs to `param_specs`, `init_state`, `state_specs`,'
        ' `on_mesh` and `jax.shard_map`.'
    )


def _num_parts(spec, mesh):
  """Returns the number of parts into which a spec divides each dimension."""
  return [
      math.prod(mesh.shape[axis] for axis in entry)
      for entry in specs_lib.entries(spec)
  ]


def beside(
    tx: optax.GradientTransformation,
    params: leaves_lib.ParamTree,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
    in_specs: Any,
    state: Any,
    others: Any,
) -> Any:
  """Returns the types of a state, also sharded over axes that are not mapped.

  Args:
    tx: The transformation.
    params: Tree of arrays, or of `jax.ShapeDtypeStruct`.
    mesh: The mesh of the step.
    in_specs: The spec of each parameter over the mapped axes.
    state: The types of the state, sharded over the mapped axes.
    others: The spec of each parameter over the axes that are not mapped; leaves
      of the state with the shape of a parameter get this spec, too.
  """

  def join(leaf, param, other):
    spec, shape = leaf.sharding.spec, jnp.shape(param)
    rank = len(leaf.shape) - len(shape)
    if rank < 0 or leaf.shape[rank:] != shape:
      return leaf
    spec = specs_lib.joined(spec, P(*(None,) * rank, *other))
    sizes = _num_parts(spec, mesh)
    if any(n % size for n, size in zip(leaf.shape, sizes, strict=False)):
      return leaf
    return leaf.update(sharding=jax.sharding.NamedSharding(mesh, spec))

  # The trace binds the axes that `tx.init` may need.
  return _traced(
      lambda _: map_with_params(tx, join, state, params, others),
      params,
      mesh,
      in_specs,
  )


@dataclasses.dataclass(frozen=True)
class _Leaf:
  """A leaf of the state on each shard.

  Attributes:
    kind: The type of the leaf.
    division: If the leaf is a slice, the division of the whole leaf; otherwise
      `None`.
    axes: The axes of the division.
  """

  kind: Any
  division: divisions.Division | None = None
  axes: tuple[Hashable, ...] = ()

  @property
  def varying(self) -> frozenset[Hashable]:
    """The axes over which the leaf differs between shards."""
    return axes_lib.varying_axes(self.kind)


def _slice(mesh, kind, unsharded):
  """Returns a leaf with its division, or without one if it is not a slice."""
  varying, of_unsharded = map(axes_lib.varying_axes, (kind, unsharded))
  axes = tuple(
      axis
      for axis in reversed(mesh.axis_names)
      if axis in varying - of_unsharded
  )
  shape = unsharded.shape
  if not axes or len(kind.shape) != len(shape) or not all((shape, *shape)):
    return _Leaf(kind)
  division = divisions.divide(shape, [mesh.shape[axis] for axis in axes])
  is_slice = division.of_slice == kind.shape
  return _Leaf(kind, division, axes) if is_slice else _Leaf(kind)


def _spec_anywhere(leaf):
  """Returns the spec of a leaf that belongs to no sharded parameter.

  Args:
    leaf: The leaf, or its spec if it belongs to a parameter.
  """
  if specs_lib.is_spec(leaf):
    return leaf
  division = leaf.division
  return P() if division is None else division.spec(leaf.axes)


def _spec_like(leaf, param, spec):
  """Returns the spec of a leaf that belongs to a parameter.

  The leaf may have the shape of the parameter, of a slice or of a stack. The
  spec has no entry for the leading axis of a per-shard leaf.

  Args:
    leaf: The leaf.
    param: The parameter on one shard.
    spec: The spec of the parameter.
  """
  shape, of_leaf = jnp.shape(param), leaf.kind.shape
  axes, division = specs_lib.axes_of(spec), leaf.division
  if division is not None:
    is_like = division.shape == shape and axes <= leaf.varying
    return division.spec(leaf.axes, spec) if is_like else P()
  rank = len(of_leaf) - len(shape)
  if rank < 0 or of_leaf[rank:] != shape or not axes:
    return P()
  # A leaf that is the same on all shards may have the shape of a stack by
  # coincidence.
  is_row = of_leaf[:rank] in ((), (1,))
  if not is_row and not axes <= leaf.varying:
    return P()
  return P(*(None,) * (rank - bool(leaf.varying - axes)), *spec)


def _spec(path, leaf, like, mesh, lead):
  """Returns the spec of a leaf of the state, with an entry for `lead` first."""
  own = leaf.varying - specs_lib.axes_of(like)
  shape = leaf.kind.shape
  if own and (leaf.division is not None or shape[:1] != (1,)):
    raise ValueError(
        'Each leaf of the state that differs between shards must have a leading'
        ' dimension of length 1, or the shape of a parameter that `in_specs`'
        f' shards the same way, got the shape {shape} at'
        f' {leaves_lib.name_of(path)}, which varies over'
        f' {sorted(own, key=str)}.'
    )
  split = tuple(a for a in mesh.axis_names if a in own and a not in lead)
  entries = [_entry(lead)] if lead else []
  entries += [_entry(split)] if own else []
  like = specs_lib.restricted(like, set(mesh.axis_names).difference(lead))
  return P(*entries, *like)


def _entry(axes):
  return (axes[0] if len(axes) == 1 else axes) or None


def is_abstract(params: leaves_lib.ParamTree) -> bool:
  """Whether a tree has leaves that are only shapes."""
  leaves = jax.tree.leaves(params)
  return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)


def abstract(
    tree: Any,
    specs: Any,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
) -> Any:
  """Returns the shapes, dtypes and shardings of a tree of arrays."""
  return jax.tree.map(
      lambda leaf, spec: jax.ShapeDtypeStruct(
          jnp.shape(leaf),
          jnp.result_type(leaf),
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
  made = tx.init(treedef.unflatten(map(_StandIn, range(len(args)))))

  def map_one(stand_in, kept):
    if not isinstance(stand_in, _StandIn):
      return kept
    return jax.tree.map(lambda leaf: fn(leaf, *args[stand_in.number]), kept)

  return jax.tree.map(
      map_one, made, state, is_leaf=lambda x: isinstance(x, _StandIn)
  )


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _StandIn:
  """A pytree without leaves that replaces the parameter with this number."""

  number: int
