"""`state_specs` and `specs_of`: the `PartitionSpec`s of training state."""

from collections.abc import Hashable
from typing import Any

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import optax

from shard_transforms._src.base import arguments
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import mapping
from shard_transforms._src.base import partition_specs
from shard_transforms._src.state import state_types


def state_specs(
    tx: optax.GradientTransformation,
    params: leaves_lib.ParamTree,
    mesh: mapping.AnyMesh,
    *,
    in_specs: partition_specs.SpecTree = P(),
    stacked: bool = False,
) -> Any:
  """Returns the `PartitionSpec`s of the state of a transformation.

  The specs are derived from the types of the state. `tx.init` is traced inside
  `jax.shard_map`; nothing is computed. A leaf that differs between shards is
  sharded along its first dimension, which has length 1 on each shard. A leaf
  with the shape of a parameter, or of a stack of such arrays, is sharded like
  the parameter. A slice, as in `shard_update`, is sharded along the sliced
  dimensions.

  Args:
    tx: The transformation.
    params: Tree of arrays, or of `jax.ShapeDtypeStruct`.
    mesh: The mesh of the step.
    in_specs: The `PartitionSpec`s of the parameters, as for `jax.shard_map`.
    stacked: As in `init_state`.

  Returns:
    A tree like the state, for `in_specs` and `out_specs` of `jax.shard_map`.

  Raises:
    NameError: If the transformation names an axis that the mesh lacks.
    TypeError: If an argument has the wrong type.
    ValueError: If a leaf varies over an axis, but has no leading dimension of
      length 1 and is not shaped like its parameter or a slice of it; or if
      `stacked` is true and `in_specs` uses all axes.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import shard_transforms
    >>> mesh = jax.make_mesh((8,), ('data',))
    >>> tx = shard_transforms.tower_reduce(
    ...     4, optax.identity(), axis_name='data')
    >>> specs = shard_transforms.state_specs(tx, jnp.ones(3), mesh)
    >>> print(specs.tower_count, specs.total)
    P() P('data',)
  """
  mapping.check_mesh(mesh)
  arguments.check_bool('stacked', stacked)
  param_specs = checked_specs(tx, params, in_specs, 'state_specs')
  lead = free_axes(mesh, in_specs) if stacked else ()
  return state_types.spec_tree(
      state_types.state_types(tx, params, mesh, param_specs, lead)
  )


def specs_of(tree: Any) -> Any:
  """Returns the `PartitionSpec`s with which the arrays of a tree are placed.

  Use them as `in_specs` and `out_specs` of `jax.shard_map` for training state
  that is partly sharded, such as flax's `TrainState` or the state of an nnx
  graph.

  Args:
    tree: Tree of arrays, numbers, or `jax.ShapeDtypeStruct`s with shardings.

  Returns:
    A tree like `tree`, with `PartitionSpec()` for leaves that are not on a
    mesh.

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
    {'momentum': P(None, 'data'), 'step': P()}
  """
  meshes = {}
  for path, leaf in jax.tree.leaves_with_path(tree):
    if isinstance(getattr(leaf, 'sharding', None), NamedSharding):
      meshes.setdefault(leaf.sharding.mesh, leaves_lib.name_of(path))
  if len(meshes) > 1:
    raise ValueError(
        'All arrays of `tree` must be on one mesh, got'
        f' {[(name, dict(mesh.shape)) for mesh, name in meshes.items()]}. Place'
        ' them with `jax.device_put`.'
    )
  return jax.tree.map(partition_specs.spec_of, tree)


def checked_specs(
    tx: Any, params: Any, in_specs: partition_specs.SpecTree, caller: str
) -> Any:
  """Returns the `PartitionSpec` of each parameter of a transformation.

  Raises:
    TypeError: If `tx` is not a transformation, or `in_specs` contains values
      that are not `PartitionSpec`s.
    ValueError: If `in_specs` does not have the tree of the parameters or a
      prefix of this tree.
  """
  arguments.as_inner(tx, caller, 'tx')
  return partition_specs.of_params(in_specs, params, caller)


def free_axes(
    mesh: mapping.AnyMesh,
    in_specs: partition_specs.SpecTree,
) -> tuple[Hashable, ...]:
  """Returns the axes of a mesh that do not shard any parameter.

  Raises:
    ValueError: If every axis shards a parameter.
  """
  used = partition_specs.axes_of(in_specs)
  free = tuple(axis for axis in mesh.axis_names if axis not in used)
  if not free:
    raise ValueError(
        '`stacked` must be False where `in_specs` uses all axes of the mesh,'
        f' got True with {in_specs!r}.'
    )
  return free
