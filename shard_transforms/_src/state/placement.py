"""`init_state`: makes state on the devices of a mesh, for a mapped step."""

from collections.abc import Hashable

import jax
from jax.sharding import PartitionSpec as P
import optax

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import partition_specs as specs_lib
from shard_transforms._src.state import specs
from shard_transforms._src.state import vmapped_state


def init_state(
    tx: optax.GradientTransformation,
    params: leaves_lib.ParamTree,
    mesh: jax.sharding.Mesh,
    *,
    in_specs: specs_lib.SpecTree = P(),
    per_shard: bool = False,
    spmd_axis_name: Hashable | None = None,
) -> optax.OptState:
  """Returns the state of a transformation as global arrays on a mesh.

  Calls `tx.init` inside `jax.shard_map`, where the axes are bound, for
  transformations that keep a value a shard, such as `tower_reduce` with
  `axis_name`. Pass the state to a mapped function with the specs of
  `state_specs`. Under `jax.pmap`, use
  `jax.pmap(tx.init, axis_name=...)(replicated_params)` in place of both.

  Args:
    tx: The transformation.
    params: Tree of arrays, or of `jax.ShapeDtypeStruct`.
    mesh: The mesh of the step.
    in_specs: The `PartitionSpec`s of the parameters, as for `jax.shard_map`: a
      tree or a prefix tree.
    per_shard: Whether *every* leaf gets a leading axis of shards, over all mesh
      axes that `in_specs` does not use. For steps in which parameters and all
      state differ between shards, as with `groups`: take `x[0]` of every leaf
      at the start of the mapped function and return `x[None]`.
    spmd_axis_name: The axis of the mesh that `jax.vmap` maps, if it maps the
      step in place of `jax.shard_map`, as its argument of this name says. What
      each shard keeps has an axis of shards of its own then, in front of the
      one of length 1; `state_axes` tells `in_axes` and `out_axes`.

  Returns:
    The state, each leaf a global array; `jax.ShapeDtypeStruct`s with shardings
    (the target of a checkpoint restore) if the parameters are abstract.

  Raises:
    NameError: As in `state_specs`.
    TypeError: As in `state_specs`.
    ValueError: As in `state_specs`; or if `spmd_axis_name` is no axis of the
      mesh, is used in `in_specs` or comes with `per_shard`.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import shard_transforms
    >>> mesh = jax.make_mesh((8,), ('data',))
    >>> tx = shard_transforms.tower_reduce(
    ...     4, optax.sgd(0.1), axis_name='data')
    >>> state = shard_transforms.init_state(tx, {'w': jnp.ones(3)}, mesh)
    >>> print(state.tower.shape, state.total['w'].shape)
    () (8, 3)
  """
  if spmd_axis_name is not None:
    if per_shard:
      raise ValueError(
          '`per_shard` must be False where `jax.vmap` maps the step, got True'
          f' with spmd_axis_name={spmd_axis_name!r}. Map every leaf over axis 0'
          ' there.'
      )
    return vmapped_state.init(tx, params, mesh, in_specs, spmd_axis_name)
  out_specs = specs.state_specs(
      tx, params, mesh, in_specs=in_specs, per_shard=per_shard
  )
  lead = specs.free_axes(mesh, in_specs) if per_shard else ()
  param_specs = jax.tree.broadcast(in_specs, params, is_leaf=specs_lib.is_spec)
  init = jax.shard_map(
      lambda params: _with_lead(tx.init(params), lead),
      mesh=mesh,
      in_specs=(param_specs,),
      out_specs=out_specs,
  )
  if specs.is_abstract(params):
    shapes = jax.eval_shape(init, specs.abstract(params, param_specs, mesh))
    return specs.abstract(shapes, out_specs, mesh)
  shardings = jax.tree.map(
      lambda spec: jax.sharding.NamedSharding(mesh, spec), param_specs
  )
  return jax.jit(init)(jax.device_put(params, shardings))


def _with_lead(state, lead):
  if not lead:
    return state
  return jax.tree.map(lambda x: axes_lib.to_varying(x[None], lead), state)
