"""`on_mesh`: binds a transformation to a mesh, for plain `jax.jit`."""

import math

import jax
from jax import lax
from jax.sharding import PartitionSpec as P
import optax

from shard_transforms._src.base import arguments
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import mapping
from shard_transforms._src.base import partition_specs as specs_lib
from shard_transforms._src.state import placement
from shard_transforms._src.transforms import stacked_update


def on_mesh(
    tx: optax.GradientTransformation,
    mesh: jax.sharding.Mesh,
    axis_name: axes_lib.AxisName | None = None,
    *,
    in_specs: specs_lib.SpecTree = P(),
    stacked: bool = False,
) -> optax.GradientTransformationExtraArgs:
  """Binds a transformation to a mesh, to be used under plain `jax.jit`.

  `init` takes global parameters and creates the state on the mesh. `update`
  takes per-shard gradients, as `value_and_grad` returns them if no axis is
  mapped, and returns global updates, with the shapes and shardings of the
  parameters. Both functions map the axes of `tx` over the mesh, so the step
  needs no `jax.shard_map`. The communication is the same as in a mapped step.

  If `in_specs` shards parameters, `update` also accepts the gradient of the
  entire batch, sharded like its parameter, as `jax.grad` returns it under plain
  `jax.jit`. A transformation that would reduce this gradient again refuses it
  because of its type. Transformations with an option for gradients that are
  already reduced accept it, such as `contrib.owned_update` with
  `if_sliced='mean'` and `if_reduced='mean'`.

  The extra arguments `weight`, `local_step` and `value` are arrays [shards],
  with one element per shard, or scalars, which apply to all shards. All other
  extra arguments are the same for all shards, unless they are a `Stacked`.

  If an axis of the mesh is mapped, as in a step under `jax.shard_map`, `init`
  and `update` are those of `tx`. Therefore frameworks that call
  `tx.init(params)` outside of a mapped function, such as `TrainState.create`
  and `nnx.Optimizer` of Flax, work with mapped and unmapped steps.

  Args:
    tx: The transformation.
    mesh: The mesh of the step.
    axis_name: The axes that `tx` names. The compiler shards the step over the
      other axes of the mesh, and shards the state over these axes like the
      parameters, so every transformation receives parameters that are not
      sliced over these axes. `None` stands for all axes of the mesh. Parameters
      that are sharded over the axes that are named here, but not in `in_specs`,
      are gathered in each step, and `init` replicates their state over these
      axes. On axes of type `Auto`, their updates are also replicated.
    in_specs: The `PartitionSpec`s of parameters that are slices inside the
      mapped step, as in `init_state`.
    stacked: As in `init_state`; only for steps that are mapped.

  Returns:
    An `optax.GradientTransformationExtraArgs` with the state of `tx`.

  Raises:
    NameError: If `tx` names an axis that is neither in `axis_name` nor mapped.
    TypeError: If an argument has the wrong type; in `update`, in the cases of
      `tx`.
    ValueError: If `axis_name` or `in_specs` names an axis that the mesh lacks;
      in `init`, in the cases of `init_state`, or if the mesh has several axes,
      parameters are sharded over some of its axes, and `axis_name` is not
      given; in `update`, if updates are not gradients as above, if the updates
      of `tx` differ between shards or do not have the shapes of the parameters,
      because `tx` does not reduce them, if `tx` closes over arrays on a mesh of
      `Explicit` axes, if `in_specs` names axes of the batch, or if the step
      maps an axis whose size is not that of the mesh.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import shard_transforms
    >>> mesh = jax.make_mesh((8,), ('data',))
    >>> tx = shard_transforms.shard_update(optax.sgd(0.1), 'data')
    >>> tx = shard_transforms.on_mesh(tx, mesh)
    >>> params = jnp.float32(2)
    >>> grad_fn = shard_transforms.value_and_grad(
    ...     lambda w, x: jnp.mean(w * x), 'data', mesh=mesh)
    >>> @jax.jit
    ... def step(params, state, x):
    ...   loss, grads = grad_fn(params, x)
    ...   updates, state = tx.update(grads, state, params)
    ...   return optax.apply_updates(params, updates), state, loss
    >>> place = jax.NamedSharding(mesh, jax.P('data'))
    >>> x = jax.device_put(jnp.arange(16.0), place)
    >>> params, state, loss = step(params, tx.init(params), x)
    >>> print(params, loss)
    1.25 15.0
  """
  mapping.check_mesh(mesh)
  inner = arguments.as_inner(tx, 'on_mesh', 'tx')
  specs_lib.check(in_specs, 'on_mesh', 'in_specs')
  arguments.check_bool('stacked', stacked)
  axes = _axes(mesh, axis_name, in_specs)

  def init_fn(params):
    # Also on other meshes: `unshard_state` and `resize_state` call `init` on
    # one shard, and on the mesh of another number of shards.
    if any(map(axes_lib.is_bound, mesh.axis_names)):
      return inner.init(params)
    if axis_name is None:
      _check_axes_are_named(params, mesh, in_specs)
    return placement.make_state(
        inner, params, mesh, axes, in_specs=in_specs, stacked=stacked
    )

  update = stacked_update.stacked_update(inner, mesh, axes, in_specs)

  def update_fn(updates, state, params=None, **extra_args):
    if _mapped_sizes(mesh):
      return inner.update(updates, state, params, **extra_args)
    if stacked:
      raise ValueError(
          '`update` of `on_mesh(..., stacked=True)` was called where no axis'
          ' is mapped, although parameters and state differ between shards.'
          ' Call it inside `jax.shard_map`.'
      )
    return update(updates, state, params, extra_args)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _axes(mesh, axis_name, in_specs):
  """Returns the axes that are mapped, in the order of the mesh.

  Raises:
    ValueError: If the mesh lacks one of the axes.
  """
  named = mesh.axis_names if axis_name is None else axes_lib.as_axes(axis_name)
  named = specs_lib.axes_of(in_specs).union(named)
  if missing := named.difference(mesh.axis_names):
    raise ValueError(
        f'`mesh` of `on_mesh` must have the axes {sorted(missing, key=str)},'
        f' got one with {mesh.axis_names}. Pass the mesh of the step, or leave'
        ' these axes out of `axis_name` and `in_specs`.'
    )
  return tuple(axis for axis in mesh.axis_names if axis in named)


def _check_axes_are_named(params, mesh, in_specs):
  """Checks that all axes can be mapped if `axis_name` is not given.

  Raises:
    ValueError: If parameters are sharded over only some axes of the mesh, which
      may be meant for the compiler.
  """
  for path, leaf in jax.tree.leaves_with_path(params):
    axes = specs_lib.axes_of(specs_lib.spec_of(leaf))
    axes -= specs_lib.axes_of(in_specs)
    if axes and math.prod(mesh.axis_sizes) > mapping.num_shards(mesh, axes):
      raise ValueError(
          '`on_mesh` needs `axis_name` or `in_specs`, because the parameter'
          f' {leaves_lib.name_of(path)} is sharded over'
          f' {sorted(axes, key=str)}, and the compiler may have to shard the'
          f' step over some of the axes {mesh.axis_names}. Name the axes that'
          " the transformation names, as in `on_mesh(tx, mesh, 'data')`; around"
          ' a transformation that slices leaves, such as `shard_update`, pass'
          ' the specs of the parameters over the other axes as `in_specs`'
          ' instead.'
      )


def _mapped_sizes(mesh):
  """Returns the sizes of the mapped axes of a mesh, which must be its own.

  Raises:
    ValueError: If the size of a mapped axis is not that of the mesh.
  """
  mapped = {
      axis: lax.axis_size(axis)
      for axis in mesh.axis_names
      if axes_lib.is_bound(axis)
  }
  sizes = {axis: mesh.shape[axis] for axis in mapped}
  if mapped != sizes:
    raise ValueError(
        f'`mesh` of `on_mesh` must be the mesh of the step, got {sizes}, but'
        f' the step maps {mapped}. Pass the mesh of the step to `on_mesh`. If'
        ' the state was created for another number of shards, convert it with'
        ' `shard_transforms.resize_state`.'
    )
  return mapped
