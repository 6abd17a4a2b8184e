"""`on_mesh`: binds a transformation to a mesh, outside of a mapped step."""

from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Mapping
import dataclasses
import functools
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec as P
import optax

from shard_transforms._src.base import arguments
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import explicit_shards
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import partition_specs as specs_lib
from shard_transforms._src.gates import gating
from shard_transforms._src.state import placement
from shard_transforms._src.state import specs

_CALLER = 'on_mesh'


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

  On a mesh of type `Explicit`, `update` also works outside of a mapped step,
  under plain `jax.jit`, with the unreduced gradients of
  `value_and_grad(fun, axis_name)`: it maps `tx` over the axes over which they
  are unreduced. Parameters may be sharded over other axes. An extra argument
  that is sharded over these axes, [shards, ...], such as the `weight` of each
  shard, gives each shard its element. For parameters typed `reduced`, JAX gives
  the unreduced gradient of the loss of all shards: sum it by `cross_shard_sum`,
  because a mean would divide twice.

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
    TypeError: If `tx` is no transformation or `mesh` is not a mesh.
    ValueError: If `tx` is bound already; in `init`, as in `init_state`; in
      `init` and `update`, if the step maps an axis of another size than that of
      the mesh; in `update` outside of a mapped step, if the mesh in use has
      axes that are not of type `Explicit`, if parameters are sharded over the
      axes that are mapped, or otherwise than the updates, if some updates are
      reduced already or have no gradient (float0), or if what `tx` returns is
      not reduced or has another tree.

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
    (8, 1, 2) P('data',)
  """
  specs.check_mesh(mesh)
  inner = arguments.as_inner(tx, _CALLER, 'tx')
  if isinstance(inner.init, _BoundInit):
    raise ValueError(
        f'`tx` of `{_CALLER}` must not be bound to a mesh already, got one on'
        f' {dict(inner.init.mesh.shape)}. Bind the transformation itself.'
    )

  def step(gate, updates, state, params=None, **extra_args):
    run = functools.partial(gate.update, inner)
    if not _check_sizes(mesh):
      axes = explicit_shards.pending_axes(updates, _CALLER)
      if axes:
        like = params if gate.applies else updates
        return _mapped(run, axes, updates, state, params, extra_args, like)
    return run(updates, state, params, **extra_args)

  options = {'in_specs': in_specs, 'per_shard': per_shard}
  init = _BoundInit(inner, mesh, options)
  return gating.transformation(init, step)


def _mapped(
    run: Callable[..., Any],
    axes: tuple[Hashable, ...],
    updates: Any,
    state: Any,
    params: Any,
    extra_args: Any,
    like: Any,
) -> tuple[Any, Any]:
  """Runs an update on each shard; what it returns is sharded like `like`.

  Raises:
    ValueError: If types do not allow it, or what it returns is not reduced.
  """
  explicit_shards.check_mesh(_CALLER)
  _check_params(updates, params, axes)
  arrays, join = leaves_lib.split_arrays(extra_args)
  is_own = [x is not None and explicit_shards.is_row(x, axes) for x in arrays]
  shardings = jax.tree.map(explicit_shards.spec_of, (like, state))
  specs = specs_lib.restricted(shardings, axes)

  def shard(updates, state, params, arrays):
    updates = jax.tree.map(explicit_shards.own_row, updates)
    pairs = zip(arrays, is_own, strict=True)
    own = [explicit_shards.own_row(x) if is_row else x for x, is_row in pairs]
    result = run(updates, state, params, **join(own))
    _check_tree(result, (like, state))
    _check_reduced(result, specs, axes)
    return result

  args = explicit_shards.rows_of(updates, axes), state, params, arrays
  return explicit_shards.map_shards(shard, axes, args, specs, shardings)


def _check_params(updates, params, axes):
  """Checks that parameters are sharded like the updates, over other axes.

  Raises:
    ValueError: If one is not.
  """
  if params is None:
    return
  explicit_shards.check_whole(params, axes, _CALLER)

  def check(path, param, update):
    specs = [explicit_shards.spec_of(x) for x in (param, update)]
    if specs[0] != specs[1]:
      raise ValueError(
          f'`params` of `{_CALLER}` must be sharded like `updates`, got'
          f' {specs[0]!r} instead of {specs[1]!r} at'
          f' {leaves_lib.name_of(path)}. Take gradients of these parameters.'
      )

  jax.tree.map_with_path(check, params, updates)


def _check_tree(result, given):
  """Checks that a step returns the trees that it is given.

  Raises:
    ValueError: If it does not.
  """
  found, expected = map(jax.tree.structure, (result, given))
  if found != expected:
    raise ValueError(
        f'`tx` of `{_CALLER}` must keep the trees of the updates and of its'
        f' state, got {found} instead of {expected}. Make the state by its'
        ' `init`.'
    )


def _check_reduced(result, specs, axes):
  """Checks that what a step returns is the same on all shards, if shared.

  Raises:
    ValueError: If a leaf is not.
  """
  specs = jax.tree.leaves(specs)
  found = jax.tree.leaves_with_path(result)
  for (path, leaf), spec in zip(found, specs, strict=True):
    varying = axes_lib.varying_axes(leaf).intersection(axes)
    if differs := varying - specs_lib.axes_of(spec):
      where = 'state' if path[0].idx else 'updates'
      raise ValueError(
          f'`tx` of `{_CALLER}` must reduce what it returns over'
          f' {sorted(differs, key=str)}, got {where} that differ between shards'
          f' at {leaves_lib.name_of(path[1:])}. Put `cross_shard_mean` before'
          ' what keeps moments; a state with values of each shard is that of'
          ' `init` or `init_state`.'
      )


@dataclasses.dataclass(frozen=True)
class _BoundInit:
  """The `init` of a transformation on a mesh, inside and outside of the step.

  Attributes:
    tx: The transformation.
    mesh: The mesh of the step.
    options: The options of `init_state`.
  """

  tx: optax.GradientTransformationExtraArgs
  mesh: jax.sharding.Mesh
  options: Mapping[str, Any]

  def __call__(self, params: optax.Params) -> optax.OptState:
    """Returns the state."""
    # `full_state` reads the shapes of the state on one shard, of any mesh.
    if _check_sizes(self.mesh, or_one=True):
      return self.tx.init(params)
    return placement.init_state(self.tx, params, self.mesh, **self.options)


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
        f'`mesh` of `{_CALLER}` must be the mesh of the step, got {sizes} where'
        f' the step maps {mapped}. Bind the transformation to that mesh; there,'
        ' `shard_transforms.resize_state` converts a state of another number'
        ' of shards.'
    )
  return mapped
