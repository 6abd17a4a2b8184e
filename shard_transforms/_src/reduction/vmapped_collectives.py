"""Collectives over axes of `jax.vmap` that the compiler shards over a mesh.

`jax.vmap` turns a collective into array operations; XLA's partitioner then
decides what to send, often more than the collective would, and `jax.vmap` has
no collectives in groups. These functions call `jax.shard_map` once `jax.vmap`
maps them, so that they stay collectives of the mesh.
"""

from collections.abc import Callable
from collections.abc import Hashable
import dataclasses
from typing import Any

import jax
from jax import custom_batching
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from shard_transforms._src.base import axes as axes_lib

Axes = tuple[Hashable, ...]


def on_mesh(
    collective: Callable[..., jax.Array],
    x: jax.Array,
    axes: Hashable | Axes,
    *args: Any,
    is_same: bool = False,
    **kwargs: Any,
) -> jax.Array:
  """Returns `collective(x, axes, ...)`, over the mesh if there is one.

  It is linear in `x`, a shard's own, in any mode. With `is_same`, the result is
  the same on all shards.
  """

  def fn(x):
    return collective(x, axes, *args, **kwargs)

  names = axes_lib.as_axes(axes)
  mesh = axes_lib.vmapped_mesh(x, names)
  if mesh is None:
    return fn(x)
  vmapped = _vmapped(mesh, x)
  # Only the `jax.vmap` of an axis maps its index, by which the rule knows it.
  indices = tuple(map(lax.axis_index, vmapped))
  same = names if is_same else ()
  on_shards = _Collective(
      fn, jax.eval_shape(fn, x), mesh, names, same, vmapped, vmapped
  )
  return _linear(on_shards, fn, x, indices)


def on_each_shard(fn: Callable[..., Any], axes: Axes, *trees: Any) -> Any:
  """Returns `fn(*trees)`, computed by each shard from its own values.

  Without it, the partitioner gathers the operands of operations such as
  `lax.top_k`.
  """
  first, *_ = jax.tree.leaves(trees)
  mesh = axes_lib.vmapped_mesh(first, axes)
  if mesh is not None:
    # `spmd_axis_name` adds the axes to the specs.
    fn = jax.shard_map(
        fn,
        mesh=mesh,
        axis_names=set(_vmapped(mesh, first)),
        in_specs=P(),
        out_specs=P(),
        check_vma=False,
    )
  return fn(*trees)


def _vmapped(mesh, x):
  """Returns the axes of a mesh that are those of `jax.vmap`.

  They include axes that the collective does not use: JAX cannot `vmap` over
  them after the `jax.shard_map`.
  """
  return tuple(
      axis
      for axis in mesh.axis_names
      if axes_lib.is_bound(axis) and axes_lib.vmapped_mesh(x, (axis,))
  )


def _linear(collective, traced, x, indices):
  """Returns what `collective` does, so that it can be transposed.

  JAX transposes nothing that has a rule of its own for `jax.vmap`.
  """
  kind = jax.ShapeDtypeStruct(x.shape, x.dtype)

  def transposed(cotangent):
    return jax.linear_transpose(collective.fn, kind)(cotangent)[0]

  def backward(indices, cotangent):
    for axis, index in zip(collective.vmapped, indices, strict=True):
      # A result that is the same along an axis has one cotangent outside of the
      # `jax.vmap` of that axis, not one for each shard.
      if axis in collective.same and not axes_lib.is_bound(axis):
        cotangent = jnp.where(index == 0, cotangent, 0)
    back = dataclasses.replace(collective, fn=transposed, kind=kind, same=())
    return _linear(back, back.zeros, cotangent, indices), None

  @jax.custom_vjp
  def call(x, indices):
    return collective(traced, x, indices)

  call.defvjp(lambda x, indices: (call(x, indices), indices), backward)
  return call(x, indices)


@dataclasses.dataclass(frozen=True)
class _Collective:
  """A function of each shard's array, some of whose axes `jax.vmap` has mapped.

  Attributes:
    fn: The function, of one shard's array.
    kind: The shape and dtype of its result.
    mesh: The mesh.
    axes: The axes of its collectives.
    same: Those of them along which its result is the same.
    vmapped: The axes of the mesh that `jax.vmap` maps.
    left: Those of them that it has not mapped yet.
    mapped: The axes that are batched already, as leading dimensions of the
      array, and, but for `same`, of the result.
  """

  fn: Callable[[jax.Array], jax.Array]
  kind: jax.ShapeDtypeStruct
  mesh: jax.sharding.AbstractMesh
  axes: Axes
  same: Axes
  vmapped: Axes
  left: Axes
  mapped: Axes = ()

  def __call__(self, traced, x, indices):
    """Returns what the function does; `traced` is what JAX takes it for."""
    if not self.left:
      traced = self._by_shard_map
    call = custom_batching.custom_vmap(lambda x, _: traced(x))
    call.def_vmap(self._vmap)
    return call(x, indices)

  @property
  def _leading(self):
    return tuple(axis for axis in self.mapped if axis not in self.same)

  def zeros(self, _):
    """Returns zeros of the type of the result."""
    sizes = [self.mesh.shape[axis] for axis in self._leading]
    return jnp.zeros((*sizes, *self.kind.shape), self.kind.dtype)

  def _by_shard_map(self, x):
    def on_shard(x):
      out = self.fn(lax.squeeze(x, range(len(self.mapped))))
      return lax.expand_dims(out, range(len(self._leading)))

    return jax.shard_map(
        on_shard,
        mesh=self.mesh,
        axis_names=set(self.vmapped),
        in_specs=P(*self.mapped),
        out_specs=P(*self._leading),
        check_vma=False,
    )(x)

  def _vmap(self, size, are_mapped, x, indices):
    is_mapped, is_index_mapped = are_mapped
    for axis, is_this in zip(self.vmapped, is_index_mapped, strict=True):
      if is_this:
        return self._vmap_axis(axis, size, is_mapped, x, indices)
    # Another `jax.vmap` is inside of those of the axes, between or outside.
    kind = jax.ShapeDtypeStruct((size, *self.kind.shape), self.kind.dtype)
    each = dataclasses.replace(self, fn=jax.vmap(self.fn), kind=kind)
    out = each(each.zeros, jnp.moveaxis(x, 0, len(self.mapped)), indices)
    return jnp.moveaxis(out, len(self._leading), 0), True

  def _vmap_axis(self, axis, size, is_mapped, x, indices):
    if axis in self.axes and not is_mapped:
      x, is_mapped = jnp.broadcast_to(x, (size, *x.shape)), True
    mapped = dataclasses.replace(
        self,
        left=tuple(left for left in self.left if left != axis),
        mapped=(axis, *self.mapped) if is_mapped else self.mapped,
    )
    out = mapped(mapped.zeros, x, indices)
    return out, is_mapped and axis not in self.same
