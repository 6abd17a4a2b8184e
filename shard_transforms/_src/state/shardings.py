"""`state_shardings`: shards the optimizer state over devices, under `jit`."""

from collections.abc import Hashable
import contextlib
import math
from typing import Any, Literal
import warnings

import jax
import jax.extend
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import optax

from shard_transforms._src.base import arguments
from shard_transforms._src.base import divisions
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import partition_specs as specs_lib
from shard_transforms._src.state import specs

_CALLER = 'state_shardings'


def state_shardings(
    tx: optax.GradientTransformation,
    params: leaves_lib.ParamTree,
    mesh: jax.sharding.Mesh,
    *,
    shard_over: Hashable = 'data',
    on_whole: Literal['warn', 'raise', 'ignore'] = 'warn',
    whole_dims: int = 0,
) -> Any:
  """Returns shardings by which `jax.jit` shards the state of an optimizer.

  ZeRO stage 1 for programs under plain `jax.jit`, in which the compiler inserts
  the collectives: each device along `shard_over` keeps and computes a part of
  the moments, and sends the updates of its part. In `jax.shard_map`, use
  `shard_update`.

  A leaf of the state that is shaped like its parameter is sharded like it, and
  also over `shard_over`: along the first divisible dimension that is not
  sharded yet, or else along one that is. Where the parameter is already sharded
  over `shard_over`, as in FSDP, the leaf is sharded as the parameter is: that
  is no error, because each device then keeps a part of it. All other leaves are
  replicated. A warning names the leaves of more than one element that stay
  whole, because each device needs memory for all of them. It is an error if no
  leaf that is shaped like a parameter can be divided.

  An optimizer that multiplies matrices, such as Muon, makes the compiler gather
  each matrix that is divided, once or more a product: for Muon, 5 times the
  bytes of the gradients' all-reduce. A warning names such leaves. With
  `whole_dims=2`, matrices stay whole, and layers that are stacked, [layers, m,
  n], are divided along the layers: nothing is gathered then but the updates.

  Make the state with `jax.jit(tx.init, out_shardings=shardings)(params)`, so
  that no device holds more than its part, and keep it so with `out_shardings`
  of the step. A checkpoint can be restored with these shardings on any number
  of devices.

  Where the axes of the mesh are of type `Explicit`, types are those of the
  shardings, so that `update` must be told how its results are sharded::

    specs = jax.tree.map(lambda sharding: sharding.spec, shardings)
    update = jax.sharding.auto_axes(
        tx.update, out_sharding=(specs_of(params), specs))

  Args:
    tx: Any transformation that needs no bound axis.
    params: Tree of arrays or of `jax.ShapeDtypeStruct`; their shardings say
      how the parameters are sharded, and those without one are replicated.
    mesh: The mesh of the step.
    shard_over: The axis of the mesh, as a rule the one of the batch.
    on_whole: What to do where leaves cannot be divided: `'warn'`, and raise if
      none can; `'raise'`; or `'ignore'`.
    whole_dims: How many of the last dimensions of a leaf are never divided; a
      leaf of fewer dimensions, such as a vector beside matrices, is divided
      along any.

  Returns:
    A tree like the state, of a `jax.sharding.NamedSharding` for each leaf.

  Raises:
    NameError: If `tx` reduces over a mapped axis in `init`.
    TypeError: If an argument is of the wrong kind.
    ValueError: If `whole_dims` is negative; if the mesh has no axis
      `shard_over`; if a parameter is on another mesh; if no leaf that is shaped
      like a parameter can be divided, unless with `'ignore'`; or, with
      `'raise'`, if any leaf cannot be.

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
  arguments.as_inner(tx, 'state_shardings', 'tx')
  _check(mesh, shard_over, on_whole)
  arguments.as_at_least('whole_dims', whole_dims, 0)
  shapes = jax.eval_shape(tx.init, jax.tree.map(_shape, params))

  def divide(leaf, param):
    if leaf.shape != jnp.shape(param):
      return leaf
    spec = _spec_of(param, mesh)
    spec = _divided(leaf.shape, spec, mesh, shard_over, whole_dims)
    return leaf.update(sharding=NamedSharding(mesh, spec))

  # A leaf that is not shaped like its parameter has no sharding.
  whole = jax.tree.map(
      lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), shapes
  )
  leaves = specs.map_with_params(tx, divide, whole, params)
  if on_whole != 'ignore':
    _tell_whole(leaves, shard_over, on_whole)
    _tell_gathered(tx, leaves, params, shapes, shard_over)
  return jax.tree.map(
      lambda leaf: leaf.sharding or NamedSharding(mesh, P()), leaves
  )


def _check(mesh, shard_over, on_whole):
  if not isinstance(mesh, jax.sharding.Mesh):
    raise TypeError(
        f'`mesh` of `{_CALLER}` must be a `jax.sharding.Mesh`, got {mesh!r}.'
    )
  if shard_over not in mesh.shape:
    raise ValueError(
        f'`shard_over` must be an axis of the mesh, {tuple(mesh.shape)}, got'
        f' {shard_over!r}.'
    )
  if on_whole not in ('warn', 'raise', 'ignore'):
    raise ValueError(
        f"`on_whole` must be 'warn', 'raise' or 'ignore', got {on_whole!r}."
    )


def _shape(x):
  return jax.ShapeDtypeStruct(jnp.shape(x), leaves_lib.dtype_of(x))


def _spec_of(param, mesh):
  """Returns how a parameter is sharded, with an entry for each dimension.

  Raises:
    ValueError: If that is on another mesh.
  """
  sharding = getattr(param, 'sharding', None)
  if not isinstance(sharding, NamedSharding):
    return (None,) * jnp.ndim(param)
  if dict(sharding.mesh.shape) != dict(mesh.shape):
    raise ValueError(
        f'`params` of `{_CALLER}` must be on the mesh {dict(mesh.shape)}, got'
        f' one on {dict(sharding.mesh.shape)}.'
    )
  spec = tuple(sharding.spec)
  return spec + (None,) * (jnp.ndim(param) - len(spec))


def _divided(shape, spec, mesh, axis, whole_dims):
  """Returns the spec of a leaf, divided over one more axis if possible.

  Args:
    shape: Its shape.
    spec: How its parameter is sharded, an entry for each dimension.
    mesh: The mesh.
    axis: The axis.
    whole_dims: How many of the last dimensions are not divided.
  """
  if axis in specs_lib.axes_of(P(*spec)):
    return P(*spec)
  entries = specs_lib.entries(P(*spec))
  sizes = [
      size // math.prod(map(mesh.shape.get, entry))
      for size, entry in zip(shape, entries, strict=True)
  ]
  sizes = sizes[: len(shape) - (whole_dims <= len(shape)) * whole_dims]
  if not math.prod(shape) or not sizes:
    return P(*spec)
  dim = divisions.dimension(sizes, mesh.shape[axis], list(map(bool, entries)))
  if sizes[dim] % mesh.shape[axis]:
    return P(*spec)
  divided = (*entries[dim], axis) if entries[dim] else axis
  return P(*spec[:dim], divided, *spec[dim + 1 :])


def spread(shape: tuple[int, ...], mesh: jax.sharding.Mesh) -> P:
  """Returns the spec of an array, divided over each axis that divides it.

  It is divided as by `shard_update`, but for padding: between other orders of
  axes, XLA would gather it.
  """
  spec = (None,) * len(shape)
  if not spec or not math.prod(shape):
    return P(*spec)
  entries, left = specs_lib.entries(P(*spec)), list(shape)
  axes = mesh.axis_names[::-1]
  sizes = [mesh.shape[axis] for axis in axes]
  division = divisions.along_dimensions(shape, sizes)
  for axis, dim in zip(axes, division.dims, strict=True):
    if left[dim] % mesh.shape[axis] == 0:
      left[dim] //= mesh.shape[axis]
      entries[dim] += (axis,)
  return P(*((e[0] if len(e) == 1 else e) or None for e in entries))


def _tell_whole(leaves, axis, on_whole):
  """Warns of the leaves that each device keeps whole, or raises.

  Raises:
    ValueError: If there must be none, or if no leaf like a parameter is
      divided.
  """
  whole = {
      leaves_lib.name_of(path): leaf
      for path, leaf in jax.tree.leaves_with_path(leaves)
      if axis not in specs_lib.axes_of(_spec(leaf))
  }
  found = {n: leaf for n, leaf in whole.items() if math.prod(leaf.shape) > 1}
  if not found:
    return
  sizes = {name: _num_bytes(leaf) for name, leaf in found.items()}
  all_bytes = sum(map(_num_bytes, jax.tree.leaves(leaves)))
  listed = ', '.join(
      f'{name} {found[name].dtype.name}{list(found[name].shape)}'
      for name in sorted(sizes, key=sizes.__getitem__, reverse=True)
  )
  message = (
      f'The state must have dimensions that can be divided over {axis!r}, got'
      f' {len(found)} leaves, {sum(sizes.values()):,} of {all_bytes:,} bytes,'
      f' that each device keeps whole: {listed}.'
  )
  divides_none = len(whole) == len(jax.tree.leaves(leaves))
  like_param = any(leaf.sharding for leaf in found.values())
  if on_whole == 'raise' or (divides_none and like_param):
    raise ValueError(
        f'{message} Choose another `shard_over`, or keep them whole by'
        " `on_whole='ignore'`."
    )
  warnings.warn(message, UserWarning, stacklevel=3)


def _spec(leaf):
  return leaf.sharding.spec if leaf.sharding else P()


def _num_bytes(leaf):
  return math.prod(leaf.shape) * leaf.dtype.itemsize


def _tell_gathered(tx, leaves, params, state, axis):
  """Warns of divided matrices that the optimizer multiplies."""
  divided = {
      leaves_lib.name_of(path): leaf
      for path, leaf in jax.tree.leaves_with_path(leaves)
      if leaf.ndim > 1
      and axis in specs_lib.axes_of(P(*_spec(leaf)[leaf.ndim - 2 :]))
  }
  products = _products(tx, params, state) if divided else ()
  multiplied = {frozenset(shape[-2:]) for shape in products}
  found = {
      name: leaf
      for name, leaf in divided.items()
      if frozenset(leaf.shape[-2:]) in multiplied
  }
  if found:
    warnings.warn(
        f'The optimizer multiplies matrices that are divided over {axis!r},'
        f' {", ".join(found)}: the compiler gathers them,'
        f' {sum(map(_num_bytes, found.values())):,} bytes, for each product or'
        ' two. Keep matrices whole by `whole_dims=2`, with stacked layers'
        ' [layers, m, n]; or use `owners.owned_update` in `jax.shard_map`.',
        UserWarning,
        stacklevel=3,
    )


def _products(tx, params, state):
  """Returns the shapes of the matrices that an optimizer multiplies."""
  shapes = jax.tree.map(_shape, params)
  # Nothing is known of what needs extra arguments or a bound axis.
  with contextlib.suppress(KeyError, NameError, TypeError, ValueError):
    return list(_multiplied(jax.make_jaxpr(tx.update)(shapes, state, shapes)))
  return []


def _multiplied(jaxpr):
  """Yields the shapes of the matrices that a program multiplies."""
  for eqn in jaxpr.eqns:
    if eqn.primitive.name == 'dot_general':
      yield from (x.aval.shape for x in eqn.invars if x.aval.ndim > 1)
    for body in jax.extend.core.jaxprs_in_params(eqn.params):
      yield from _multiplied(body)
