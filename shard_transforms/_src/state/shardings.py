"""`state_shardings`: ZeRO-1 sharding of optimizer state under `jax.jit`."""

from collections.abc import Hashable
import contextlib
import math
from typing import Any, Literal
import warnings

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import optax

from shard_transforms._src.base import arguments
from shard_transforms._src.base import divisions
from shard_transforms._src.base import jaxprs
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import mapping
from shard_transforms._src.base import partition_specs
from shard_transforms._src.state import state_types

_CALLER = 'state_shardings'


def state_shardings(
    tx: optax.GradientTransformation,
    params: leaves_lib.ParamTree,
    mesh: jax.sharding.Mesh,
    *,
    axis_name: Hashable = 'data',
    on_replicated: Literal['warn', 'raise', 'ignore'] = 'warn',
    whole_dims: int = 0,
) -> Any:
  """Returns shardings of the optimizer state for ZeRO-1 under `jax.jit`.

  With these shardings, each device along `axis_name` keeps and computes only a
  part of the moments and of the updates; the compiler inserts the collectives,
  including the gather of the updates. In `jax.shard_map`, use `shard_update`
  instead.

  A leaf of the state with the shape of its parameter is sharded like the
  parameter and also over `axis_name`: along the first divisible dimension that
  is not sharded yet, or otherwise along a sharded dimension. If the parameter
  is already sharded over `axis_name`, as in FSDP, the leaf has the sharding of
  the parameter; this is not an error, because each device keeps only a part.
  All other leaves are replicated. A warning names the replicated leaves with
  more than one element, because each device needs memory for the whole leaf. It
  is an error if no leaf with the shape of a parameter can be divided.

  If an optimizer multiplies matrices, as Muon does, the compiler gathers each
  divided matrix at least once per product. For Muon, this is 5 times the bytes
  of an all-reduce of the gradients. A warning names such leaves. With
  `whole_dims=2`, matrices stay whole, and stacked layers, [layers, m, n], are
  divided along the layers, so that only the updates are gathered.

  Create the state with `jax.jit(tx.init, out_shardings=shardings)(params)`, so
  that no device holds more than its part, and preserve the shardings with
  `out_shardings` of the training step. A checkpoint can be restored with these
  shardings on any number of devices.

  If the axes of the mesh have type `Explicit`, shardings are part of the types,
  so the shardings of the results of `update` must be specified::

    specs = jax.tree.map(lambda sharding: sharding.spec, shardings)
    update = jax.sharding.auto_axes(
        tx.update, out_sharding=(specs_of(params), specs))

  Args:
    tx: Any transformation that does not need a bound axis.
    params: Tree of arrays, or of `jax.ShapeDtypeStruct`, with the shardings of
      the parameters. Leaves without a sharding are replicated.
    mesh: The mesh of the step.
    axis_name: The mesh axis over which to shard, usually the batch axis.
    on_replicated: The behaviour for leaves that cannot be divided: `'warn'`,
      which raises if no leaf can be divided; `'raise'`; or `'ignore'`.
    whole_dims: The number of trailing dimensions of a leaf that are never
      divided. A leaf with fewer dimensions, such as a vector among matrices,
      may be divided along any dimension.

  Returns:
    A tree like the state, with a `jax.sharding.NamedSharding` for each leaf.

  Raises:
    NameError: If `tx` reduces over a mapped axis in `init`.
    TypeError: If an argument has the wrong type.
    ValueError: If `whole_dims` is negative; if the mesh has no axis
      `axis_name`; if a parameter is on another mesh; if no leaf with the shape
      of a parameter can be divided, except with `'ignore'`; or, with `'raise'`,
      if any leaf cannot be divided.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import shard_transforms
    >>> auto = jax.sharding.AxisType.Auto
    >>> mesh = jax.make_mesh((8,), ('data',), (auto,))
    >>> tx = optax.adam(1e-3)
    >>> params = {'w': jnp.ones((3, 16))}
    >>> shardings = shard_transforms.state_shardings(tx, params, mesh)
    >>> state = jax.jit(tx.init, out_shardings=shardings)(params)
    >>> mu = optax.tree_utils.tree_get(state, 'mu')['w']
    >>> print(mu.sharding.spec, mu.addressable_shards[0].data.shape)
    P(None, 'data') (3, 2)

  References:
    Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion
    Parameter Models, 2020, https://arxiv.org/abs/1910.02054 (stage 1);
    Xu et al., Automatic Cross-Replica Sharding of Weight Update in
    Data-Parallel Training, 2020, https://arxiv.org/abs/2004.13336.
  """
  arguments.as_inner(tx, _CALLER, 'tx')
  _check_arguments(mesh, axis_name, on_replicated)
  arguments.as_at_least('whole_dims', whole_dims, 0)
  state = jax.eval_shape(tx.init, leaves_lib.shapes_of(params))

  def shard(leaf, param):
    if leaf.shape != jnp.shape(param):
      return leaf
    _check_mesh_of_param(param, mesh)
    spec = partition_specs.spec_of(param)
    spec = _divided(leaf.shape, spec, mesh, axis_name, whole_dims)
    return leaf.update(sharding=NamedSharding(mesh, spec))

  # Only leaves with the shape of their parameter get a sharding.
  leaves = leaves_lib.shapes_of(state)
  leaves = state_types.map_with_params(tx, shard, leaves, params)
  if on_replicated != 'ignore':
    _warn_replicated(leaves, axis_name, on_replicated)
    _warn_gathered(tx, leaves, params, state, axis_name)
  return jax.tree.map(
      lambda leaf: leaf.sharding or NamedSharding(mesh, P()), leaves
  )


def _check_arguments(mesh, axis_name, on_replicated):
  mapping.check_mesh(mesh, jax.sharding.Mesh)
  if axis_name not in mesh.shape:
    raise ValueError(
        f'`axis_name` must be an axis of the mesh, {tuple(mesh.shape)}, got'
        f' {axis_name!r}.'
    )
  if on_replicated not in ('warn', 'raise', 'ignore'):
    raise ValueError(
        "`on_replicated` must be 'warn', 'raise' or 'ignore', got"
        f' {on_replicated!r}.'
    )


def _check_mesh_of_param(param, mesh):
  """Checks that a parameter is on this mesh, or not on a mesh.

  Raises:
    ValueError: If the parameter is on another mesh.
  """
  sharding = getattr(param, 'sharding', None)
  other = sharding.mesh if isinstance(sharding, NamedSharding) else mesh
  if dict(other.shape) != dict(mesh.shape):
    raise ValueError(
        f'`params` of `{_CALLER}` are on the mesh {dict(other.shape)}, but'
        f' `mesh` is {dict(mesh.shape)}. Pass the mesh of the parameters.'
    )


def _divided(shape, spec, mesh, axis, whole_dims):
  """Returns the spec of a leaf, divided over one more axis if possible.

  Args:
    shape: The shape of the leaf.
    spec: The spec of its parameter.
    mesh: The mesh.
    axis: The additional axis.
    whole_dims: The number of trailing dimensions that are not divided.
  """
  spec = P(*spec, *(None,) * (len(shape) - len(spec)))
  entries = partition_specs.entries(spec)
  sizes = [
      size // math.prod(map(mesh.shape.get, entry))
      for size, entry in zip(shape, entries, strict=True)
  ]
  if whole_dims <= len(shape):
    sizes = sizes[: len(shape) - whole_dims]
  if axis in partition_specs.axes_of(spec) or not math.prod(shape) or not sizes:
    return spec
  dim = divisions.dimension(sizes, mesh.shape[axis], list(map(bool, entries)))
  if sizes[dim] % mesh.shape[axis]:
    return spec
  divided = (*entries[dim], axis) if entries[dim] else axis
  return P(*spec[:dim], divided, *spec[dim + 1 :])


def _warn_replicated(leaves, axis, on_replicated):
  """Warns about leaves that are not divided over the axis, or raises.

  Raises:
    ValueError: If there are such leaves and `on_replicated` is `'raise'`, or if
      no leaf with the shape of a parameter is divided.
  """
  undivided = {
      leaves_lib.name_of(path): leaf
      for path, leaf in jax.tree.leaves_with_path(leaves)
      if axis not in partition_specs.axes_of(partition_specs.spec_of(leaf))
  }
  large = {
      k: leaf for k, leaf in undivided.items() if math.prod(leaf.shape) > 1
  }
  if not large:
    return
  sizes = {name: _num_bytes(leaf) for name, leaf in large.items()}
  all_bytes = sum(map(_num_bytes, jax.tree.leaves(leaves)))
  names = ', '.join(
      f'{name} {undivided[name].dtype.name}{list(undivided[name].shape)}'
      for name in sorted(sizes, key=sizes.__getitem__, reverse=True)
  )
  message = (
      f'{len(sizes)} leaves of the state, {sum(sizes.values()):,} of'
      f' {all_bytes:,} bytes, have no dimension that can be divided over'
      f' {axis!r}, so each device stores a full copy of them: {names}.'
  )
  divides_none = len(undivided) == len(jax.tree.leaves(leaves))
  has_like_param = any(undivided[name].sharding for name in sizes)
  if on_replicated == 'raise' or (divides_none and has_like_param):
    raise ValueError(
        f'{message} Choose another `axis_name`, or accept the copies with'
        " `on_replicated='ignore'`."
    )
  warnings.warn(message, UserWarning, stacklevel=3)


def _num_bytes(leaf):
  return math.prod(leaf.shape) * leaf.dtype.itemsize


def _warn_gathered(tx, leaves, params, state, axis):
  """Warns about divided matrices that the optimizer multiplies."""
  divided = {
      leaves_lib.name_of(path): leaf
      for path, leaf in jax.tree.leaves_with_path(leaves)
      if leaf.ndim > 1 and axis in _axes_of_matrix(leaf)
  }
  products = _products(tx, params, state) if divided else ()
  multiplied = {frozenset(shape[-2:]) for shape in products}
  gathered = {
      name: leaf
      for name, leaf in divided.items()
      if frozenset(leaf.shape[-2:]) in multiplied
  }
  if gathered:
    warnings.warn(
        f'The optimizer multiplies matrices that are divided over {axis!r},'
        f' {", ".join(gathered)}. The compiler gathers all of them,'
        f' {sum(map(_num_bytes, gathered.values())):,} bytes, again for every'
        ' one or two products. If layers are stacked, as [layers, m, n], pass'
        ' `whole_dims=2`, which divides only the layers; otherwise, use'
        ' `contrib.owned_update` in `jax.shard_map`.',
        UserWarning,
        stacklevel=3,
    )


def _axes_of_matrix(leaf):
  """Returns the axes over which the last two dimensions are divided."""
  entries = partition_specs.entries(partition_specs.spec_of(leaf))
  return sum(entries[leaf.ndim - 2 :], ())


def _products(tx, params, state):
  """Returns the shapes of the matrices that an optimizer multiplies."""
  shapes = leaves_lib.shapes_of(params)
  # Skip optimizers that need extra arguments or a bound axis.
  with contextlib.suppress(KeyError, NameError, TypeError, ValueError):
    jaxpr = jax.make_jaxpr(tx.update)(shapes, state, shapes)
    return [
        shape
        for eqn in jaxprs.all_equations(jaxpr)
        for shape in _multiplied(eqn)
    ]
  return []


def _multiplied(eqn):
  """Returns the shapes of the matrices that an equation multiplies."""
  if eqn.primitive.name != 'dot_general':
    return []
  return [x.aval.shape for x in eqn.invars if x.aval.ndim > 1]
