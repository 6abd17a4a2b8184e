"""How state is sharded: replicated, per shard, or like the parameters."""

from collections.abc import Callable
from collections.abc import Hashable
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import optax

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import partition_specs as specs_lib


def state_specs(
    tx: optax.GradientTransformation,
    params: leaves_lib.ParamTree,
    mesh: jax.sharding.Mesh,
    *,
    in_specs: specs_lib.SpecTree = P(),
    per_shard: bool = False,
) -> Any:
  """Returns the `PartitionSpec`s of the state of a transformation.

  They are read off the types of the leaves of `tx.init`, which is traced inside
  `jax.shard_map`; nothing is computed. A leaf that differs between shards is
  sharded along its first dimension, of length 1 a shard; a leaf that is shaped
  like a parameter, or like several in a stack, is sharded like it.

  Args:
    tx: The transformation.
    params: Tree of arrays, or of `jax.ShapeDtypeStruct`.
    mesh: The mesh of the step.
    in_specs: The `PartitionSpec`s of the parameters, as for `jax.shard_map`.
    per_shard: As in `init_state`.

  Returns:
    A tree like the state, for `in_specs` and `out_specs` of `jax.shard_map`.

  Raises:
    NameError: If the transformation names an axis that the mesh lacks.
    TypeError: If `mesh` is not a mesh.
    ValueError: If a leaf varies over an axis and neither has a leading
      dimension of 1 nor the shape of its parameter, or if `per_shard` is true
      and `in_specs` uses all axes.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import shard_transforms
    >>> mesh = jax.make_mesh((8,), ('data',))
    >>> tx = shard_transforms.tower_reduce(
    ...     4, optax.identity(), axis_name='data')
    >>> specs = shard_transforms.state_specs(tx, jnp.ones(3), mesh)
    >>> print(specs.tower, specs.total)
    P() P('data',)
  """
  check_mesh(mesh)
  lead = free_axes(mesh, in_specs) if per_shard else ()
  param_specs = jax.tree.broadcast(in_specs, params, is_leaf=specs_lib.is_spec)
  return read(tx, params, mesh, param_specs, param_specs, lead)


def specs_of(tree: Any) -> Any:
  """Returns the `PartitionSpec`s of the arrays of a tree, as they are placed.

  They are the `in_specs` and `out_specs` of `jax.shard_map` for training state
  that is sharded in part, such as flax's `TrainState` or the state of an nnx
  graph.

  Args:
    tree: Tree of arrays, or of `jax.ShapeDtypeStruct`s with shardings, and of
      numbers.

  Returns:
    A tree like this, with `PartitionSpec()` for all that is on no mesh.

  Raises:
    ValueError: If arrays are on several meshes.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import shard_transforms
    >>> mesh = jax.make_mesh((8,), ('data',))
    >>> tx = shard_transforms.shard_update(optax.sgd(0.1, momentum=0.9), 'data')
    >>> state = shard_transforms.init_state(tx, jnp.zeros((2, 8)), mesh)
    >>> train_state = {'step': 0, 'momentum': state.inner_state[0].trace}
    >>> print(shard_transforms.specs_of(train_state))
    {'momentum': P('data',), 'step': P()}
  """
  meshes = {}

  def spec_of(path, leaf):
    sharding = getattr(leaf, 'sharding', None)
    if not isinstance(sharding, jax.sharding.NamedSharding):
      return P()
    meshes.setdefault(sharding.mesh, leaves_lib.name_of(path))
    return sharding.spec

  specs = jax.tree.map_with_path(spec_of, tree)
  if len(meshes) > 1:
    raise ValueError(
        'All arrays of `tree` must be on one mesh, got'
        f' {[(name, dict(mesh.shape)) for mesh, name in meshes.items()]}. Place'
        ' them with `jax.device_put`.'
    )
  return specs


def read(
    tx: optax.GradientTransformation,
    params: leaves_lib.ParamTree,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
    mapped_specs: Any,
    param_specs: Any,
    lead: tuple[Hashable, ...] = (),
) -> Any:
  """Reads the `PartitionSpec`s of the state off the types of its leaves.

  Args:
    tx: The transformation.
    params: Tree of arrays, or of `jax.ShapeDtypeStruct`.
    mesh: The axes that are mapped.
    mapped_specs: How the parameters are sharded over them, a tree like these.
    param_specs: How the parameters are sharded over all axes, a tree as well.
    lead: The mesh axes of the leading dimension that every leaf gets.

  Raises:
    NameError: As in `state_specs`.
    ValueError: As in `state_specs`.
  """
  traced = []

  def trace(params):
    state = tx.init(params)
    described = jax.tree.map(_describe, state)
    if any(specs_lib.axes_of(spec) for spec in jax.tree.leaves(param_specs)):
      described = _with_param_specs(
          tx, described, params, param_specs, frozenset(mesh.axis_names)
      )
    traced.append(described)
    return ()

  mapped = jax.shard_map(
      trace, mesh=mesh, in_specs=(mapped_specs,), out_specs=()
  )
  jax.eval_shape(mapped, abstract(params, mapped_specs, mesh))
  return jax.tree.map_with_path(
      lambda path, leaf: _spec(path, leaf, mesh, lead),
      traced[0],
      is_leaf=lambda leaf: isinstance(leaf, _Leaf),
  )


@dataclasses.dataclass(frozen=True)
class _Leaf:
  """What decides the spec of a leaf of the state.

  Attributes:
    shape: Its shape on a shard.
    varying: The axes over which it varies.
    like: The spec of its parameter, without the leading axis of shards.
  """

  shape: tuple[int, ...]
  varying: frozenset[Hashable]
  like: P


def check_mesh(mesh: Any) -> None:
  """Checks a mesh.

  Raises:
    TypeError: If it is not a mesh.
  """
  if not isinstance(mesh, jax.sharding.Mesh | jax.sharding.AbstractMesh):
    raise TypeError(
        f'`mesh` must be a `jax.sharding.Mesh`, got {mesh!r}. Make one with'
        " `jax.make_mesh((8,), ('data',))`."
    )


def _describe(leaf):
  return _Leaf(jnp.shape(leaf), axes_lib.varying_axes(leaf), P())


def _with_param_specs(tx, described, params, param_specs, mapped):
  """Records the spec of its parameter in each leaf that is shaped like it."""

  def note(leaf, param, spec):
    like = _spec_like(leaf, jnp.shape(param), spec, mapped)
    return _Leaf(leaf.shape, leaf.varying, like)

  return map_with_params(tx, note, described, params, param_specs)


def _spec_like(leaf, shape, spec, mapped):
  """Returns the spec of a leaf like a parameter, or like a stack of it."""
  lead = len(leaf.shape) - len(shape)
  axes = specs_lib.axes_of(spec)
  if lead < 0 or leaf.shape[lead:] != shape or not axes:
    return P()
  # A leaf of the same shape on all shards may look like a stack by chance.
  is_row = leaf.shape[:lead] in ((), (1,))
  if not is_row and not axes & mapped <= leaf.varying:
    return P()
  is_own = bool(leaf.varying - axes)
  return P(*(None,) * (lead - is_own), *spec)


def _spec(path, leaf, mesh, lead):
  """Returns the spec of a leaf of the state, with the axes `lead` in front."""
  own = leaf.varying - specs_lib.axes_of(leaf.like)
  if own and leaf.shape[:1] != (1,):
    raise ValueError(
        'Each leaf of the state that differs between shards must have a leading'
        ' dimension of length 1, or the shape of a parameter that `in_specs`'
        f' shards the same way, got the shape {leaf.shape} at'
        f' {leaves_lib.name_of(path)}, which varies over'
        f' {sorted(own, key=str)}.'
    )
  split = tuple(a for a in mesh.axis_names if a in own and a not in lead)
  entries = [_entry(lead)] if lead else []
  entries += [_entry(split)] if own else []
  return P(*entries, *leaf.like)


def _entry(axes):
  return (axes[0] if len(axes) == 1 else axes) or None


def free_axes(
    mesh: jax.sharding.Mesh, in_specs: specs_lib.SpecTree
) -> tuple[Hashable, ...]:
  """Returns the axes of a mesh that shard no parameter.

  Raises:
    ValueError: If there is none.
  """
  used = set().union(
      *map(
          specs_lib.axes_of,
          jax.tree.leaves(in_specs, is_leaf=specs_lib.is_spec),
      )
  )
  free = tuple(axis for axis in mesh.axis_names if axis not in used)
  if not free:
    raise ValueError(
        '`per_shard` must be False where `in_specs` uses all axes of the mesh,'
        f' got True with {in_specs!r}.'
    )
  return free


def is_abstract(params: leaves_lib.ParamTree) -> bool:
  """Whether parameters are shapes alone."""
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
  """Maps the leaves of a state that belong to a parameter; keeps the others.

  Unlike `optax.tree_utils.tree_map_params`, it accepts a state with several
  arrays for a parameter, such as the statistics of Shampoo.

  Args:
    tx: The transformation that keeps the state.
    fn: Takes a leaf, its parameter, and the leaves of `rest` in its place.
    state: The state; its leaves may be of any kind.
    params: The parameters.
    *rest: Trees like the parameters.
  """

  def map_below(kept, param, *others):
    if isinstance(kept, optax.MaskedNode) or kept is None:
      return kept
    children, node = jax.tree.flatten(param, is_leaf=lambda x: x is not param)
    if jax.tree_util.treedef_is_leaf(node):
      return jax.tree.map(lambda leaf: fn(leaf, param, *others), kept)
    below = [node.flatten_up_to(tree) for tree in (kept, *others)]
    mapped = map(map_below, below[0], children, *below[1:])
    return node.unflatten(list(mapped))

  try:
    return optax.tree_utils.tree_map_params(
        tx, map_below, state, params, *rest, is_leaf=lambda _: True
    )
  except ValueError:
    # Optax has one stand-in for all parameters, which a fixed tree does not
    # fit, such as the dimension numbers of `optax.contrib.muon`.
    return _map_each(tx, map_below, state, params, *rest)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _StandIn:
  """In place of the parameter of this number, a tree without leaves."""

  number: int


def _map_each(tx, fn, state, *trees):
  """Maps a state, whose places of parameters are found one by one."""
  treedef = jax.tree.structure(trees[0])
  args = list(zip(*map(treedef.flatten_up_to, trees), strict=True))
  made = tx.init(treedef.unflatten(map(_StandIn, range(len(args)))))

  def map_one(stand_in, kept):
    if not isinstance(stand_in, _StandIn):
      return kept
    return fn(kept, *args[stand_in.number])

  return jax.tree.map(
      map_one, made, state, is_leaf=lambda x: isinstance(x, _StandIn)
  )
