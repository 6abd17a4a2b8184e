"""`on_mesh`: binds a transformation to a mesh, outside of a mapped step."""

import jax
from jax import lax
from jax.sharding import PartitionSpec as P
import optax

from shard_transforms._src.base import arguments
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import partition_specs as specs_lib
from shard_transforms._src.state import placement
from shard_transforms._src.state import specs


def on_mesh(
    tx: optax.GradientTransformation,
    mesh: jax.sharding.Mesh,
    *,
    in_specs: specs_lib.SpecTree = P(),
    per_shard: bool = False,
) -> optax.GradientTransformationExtraArgs:
  """Binds a transformation to a mesh, so that `init` works outside of the step.

  For frameworks that call `tx.init(params)` where no axis is mapped, such as
  `TrainState.create` and `nnx.Optimizer` of flax. Outside of the mapped step,
  `init` is `init_state` on the mesh; inside, it is `tx.init`, and `update` is
  `tx.update`. `specs_of` returns the specs of the whole training state that the
  framework makes.

  Args:
    tx: The transformation.
    mesh: The mesh of the step.
    in_specs: As for `init_state`.
    per_shard: As for `init_state`.

  Returns:
    An `optax.GradientTransformationExtraArgs` with the state of `tx`.

  Raises:
    NameError: In `init`, if `tx` names an axis that the mesh lacks; in
      `update`, if `tx` names an axis that is not mapped.
    TypeError: If `tx` is no transformation, `mesh` not a mesh, `in_specs` no
      `PartitionSpec`s, or `per_shard` no boolean.
    ValueError: In `init`, as in `init_state`; in `init` and `update`, if the
      step maps an axis of another size than that of the mesh.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import shard_transforms
    >>> mesh = jax.make_mesh((8,), ('data',))
    >>> tx = shard_transforms.shard_update(optax.adam(0.1), 'data')
    >>> tx = shard_transforms.on_mesh(tx, mesh)
    >>> state = tx.init(jnp.zeros((2, 8)))
    >>> mu = optax.tree_utils.tree_get(state, 'mu')
    >>> print(mu.shape, shard_transforms.specs_of(mu))
    (2, 8) P(None, 'data')
  """
  specs.check_mesh(mesh)
  inner = arguments.as_inner(tx, 'on_mesh', 'tx')
  specs_lib.check(in_specs, 'on_mesh', 'in_specs')
  arguments.check_bool('per_shard', per_shard)

  def init_fn(params):
    # `full_state` reads the shapes of the state on one shard, of any mesh.
    if _check_sizes(mesh, or_one=True):
      return inner.init(params)
    return placement.init_state(
        inner, params, mesh, in_specs=in_specs, per_shard=per_shard
    )

  def update_fn(updates, state, params=None, **extra_args):
    _check_sizes(mesh)
    return inner.update(updates, state, params, **extra_args)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _check_sizes(mesh, or_one=False):
  """Returns the mapped axes of a mesh, and checks their sizes.

  Raises:
    ValueError: If one is of another size.
  """
  mapped = {
      axis: lax.axis_size(axis)
      for axis in mesh.axis_names
      if axes_lib.is_bound(axis)
  }
  sizes = {axis: mesh.shape[axis] for axis in mapped}
  if mapped != sizes and not (or_one and set(mapped.values()) == {1}):
    raise ValueError(
        f'`mesh` of `on_mesh` must be the mesh of the step, got {sizes} where'
        f' the step maps {mapped}. Bind the transformation to that mesh; there,'
        ' `shard_transforms.resize_state` converts a state of another number'
        ' of shards.'
    )
  return mapped
