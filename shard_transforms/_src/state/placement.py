"""`init_state`: creates optimizer state on the devices of a mesh."""

from collections.abc import Hashable
from collections.abc import Sequence
import functools
from typing import Any

import jax
from jax import core
from jax.sharding import PartitionSpec as P
import optax

from shard_transforms._src.base import arguments
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import mapping
from shard_transforms._src.base import partition_specs
from shard_transforms._src.state import state_specs
from shard_transforms._src.state import state_types


def init_state(
    tx: optax.GradientTransformation,
    params: leaves_lib.ParamTree,
    mesh: mapping.AnyMesh,
    *,
    in_specs: partition_specs.SpecTree = P(),
    stacked: bool = False,
) -> optax.OptState:
  """Returns the state of a transformation as global arrays on a mesh.

  `tx.init` is called inside `jax.shard_map`, where the axes are bound, as
  transformations with per-shard state need, such as `tower_reduce` with
  `axis_name`. Pass the state to a mapped function with the specs of
  `state_specs`. Under `jax.pmap`, use
  `jax.pmap(tx.init, axis_name=...)(replicated_params)` instead of both
  functions. If a framework calls `tx.init`, pass `on_mesh(tx, mesh)` to it.

  Args:
    tx: The transformation.
    params: Tree of arrays, or of `jax.ShapeDtypeStruct`.
    mesh: The mesh of the step.
    in_specs: The `PartitionSpec`s of the parameters, as for `jax.shard_map`: a
      tree or a prefix tree.
    stacked: Whether *every* leaf gets a leading axis of shards, over all mesh
      axes that `in_specs` does not use. For training in which the parameters
      and the whole state differ between shards, as with `groups`: take `x[0]`
      of every leaf at the start of the mapped function and return `x[None]`.

  Returns:
    The state, with a global array for each leaf; if the parameters are
    abstract, `jax.ShapeDtypeStruct`s with shardings, which can be the target of
    a checkpoint restore.

  Raises:
    NameError: As in `state_specs`.
    TypeError: As in `state_specs`.
    ValueError: As in `state_specs`, or if the parameters are arrays but the
      devices of the mesh are not available.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import shard_transforms
    >>> mesh = jax.make_mesh((8,), ('data',))
    >>> tx = shard_transforms.tower_reduce(
    ...     4, optax.sgd(0.1), axis_name='data')
    >>> state = shard_transforms.init_state(tx, {'w': jnp.ones(3)}, mesh)
    >>> print(state.tower_count.shape, state.total['w'].shape)
    () (8, 3)
  """
  mapping.check_mesh(mesh)
  return make_state(
      tx, params, mesh, mesh.axis_names, in_specs=in_specs, stacked=stacked
  )


def make_state(
    tx: optax.GradientTransformation,
    params: leaves_lib.ParamTree,
    mesh: mapping.AnyMesh,
    axes: Sequence[Hashable],
    *,
    in_specs: partition_specs.SpecTree = P(),
    stacked: bool = False,
) -> optax.OptState:
  """Like `init_state`, but maps only `axes`.

  Over the other axes of the mesh, a leaf of the state that has the shape of its
  parameter is sharded like the parameter.
  """
  param_specs = state_specs.checked_specs(tx, params, in_specs, 'init_state')
  arguments.check_bool('stacked', stacked)
  stacked_axes = state_specs.free_axes(mesh, in_specs) if stacked else ()
  types = state_types.state_types(tx, params, mesh, param_specs, stacked_axes)
  out_specs = state_types.spec_tree(types)

  def init(params):
    state = tx.init(params)
    if not stacked_axes:
      return state
    return jax.tree.map(
        lambda x: axes_lib.to_varying(x[None], stacked_axes), state
    )

  mapped: Any = jax.shard_map(
      init, mesh=mesh, in_specs=(param_specs,), out_specs=out_specs
  )
  unmapped_axes = [axis for axis in mesh.axis_names if axis not in axes]
  unmapped_specs = jax.tree.map(
      lambda x: partition_specs.restricted(
          partition_specs.spec_of(x), unmapped_axes
      ),
      params,
  )
  if partition_specs.axes_of(unmapped_specs):
    types = state_types.types_over_unmapped_axes(
        tx, params, mesh, param_specs, types, unmapped_specs
    )
    mapped = functools.partial(
        _call_partly_mapped,
        init,
        in_specs=(param_specs,),
        out_specs=out_specs,
        mesh=mesh,
        axes=axes,
        out_types=state_types.spec_tree(types),
    )
    param_specs = jax.tree.map(
        partition_specs.joined, param_specs, unmapped_specs
    )
  # Parameters without leaves are neither abstract nor concrete.
  is_nowhere = isinstance(mesh, jax.sharding.AbstractMesh)
  if state_types.is_abstract(params) or (
      is_nowhere and not jax.tree.leaves(params)
  ):
    return types
  params = _placed(params, param_specs, mesh)
  shardings = jax.tree.map(lambda leaf: leaf.sharding, types)
  return jax.jit(mapped, out_shardings=shardings)(params)


def _call_partly_mapped(init, params, **options):
  """Calls `init` with the other axes of the mesh left to the compiler."""
  return mapping.call(init, (params,), **options)


def _placed(params, param_specs, mesh):
  """Places parameters on a mesh.

  Raises:
    JaxRuntimeError: If JAX cannot place them.
    ValueError: If the devices of the mesh are not available.
  """
  # Traced parameters can be on an abstract mesh.
  is_traced = any(isinstance(x, core.Tracer) for x in jax.tree.leaves(params))
  try:
    if is_traced or isinstance(mesh, jax.sharding.Mesh):
      return jax.device_put(params, state_types.shardings(param_specs, mesh))
    problem = None
  except jax.errors.JaxRuntimeError as error:
    # The devices of a topology can only be compiled for.
    if 'compile-only' not in str(error):
      raise
    problem = error
  raise ValueError(
      'The devices of `mesh` are not available, so the state cannot be created'
      f' from arrays: got {mesh}. Pass the shapes of the parameters,'
      ' `jax.eval_shape(lambda: params)`.'
  ) from problem
