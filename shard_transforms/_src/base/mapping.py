"""Utilities to map axes of a mesh from outside of a mapped function."""

from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Iterable
from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import partition_specs

AnyMesh = jax.sharding.Mesh | jax.sharding.AbstractMesh


def check_mesh(mesh: Any, types: Any = AnyMesh) -> None:
  """Checks that an argument is a mesh.

  Raises:
    TypeError: If it is not a mesh of one of the `types`.
  """
  if not isinstance(mesh, types):
    raise TypeError(
        f'`mesh` must be a `jax.sharding.Mesh`, got {mesh!r}. Make one with'
        " `jax.make_mesh((8,), ('data',))`."
    )


def num_shards(mesh: AnyMesh, axes: Iterable[Hashable]) -> int:
  """Returns the number of shards along `axes` of a mesh."""
  return math.prod(mesh.shape[axis] for axis in axes)


def mesh_with(
    axes: Sequence[Hashable], mesh: AnyMesh | None, caller: str
) -> AnyMesh:
  """Returns `mesh`, or, if it is `None`, the mesh of `jax.set_mesh`.

  Raises:
    NameError: If the mesh does not have these axes.
    ValueError: If `jax.set_mesh` has set a mesh of other sizes.
  """
  in_use = jax.sharding.get_abstract_mesh()
  mesh = in_use if mesh is None else mesh
  if in_use.axis_names and dict(in_use.shape) != dict(mesh.shape):
    raise ValueError(
        f'`mesh` of `{caller}` must be the mesh of `jax.set_mesh`,'
        f' {dict(in_use.shape)}, got {dict(mesh.shape)}. Set the mesh of the'
        ' step, or leave out `mesh`.'
    )
  missing = [axis for axis in axes if axis not in mesh.axis_names]
  if missing:
    axes_lib.check_bound(missing, caller)
  return mesh


@contextlib.contextmanager
def set_if_explicit(mesh: AnyMesh) -> Iterator[None]:
  """Sets the abstract mesh if it has `Explicit` axes, unless one is set."""
  if not mesh.explicit_axes or jax.sharding.get_abstract_mesh().axis_names:
    yield
    return
  abstract = mesh.abstract_mesh if isinstance(mesh, jax.sharding.Mesh) else mesh
  with jax.sharding.use_abstract_mesh(abstract):
    yield


def call(
    fn: Callable[..., Any],
    args: Any,
    in_specs: Any,
    out_specs: Any,
    mesh: AnyMesh,
    axes: Sequence[Hashable],
    *,
    out_types: Any = None,
    check_vma: bool = True,
) -> Any:
  """Calls a function of global arrays with `axes` mapped.

  The other axes of the mesh are left unchanged. Leaves that are not arrays,
  such as the float0 gradient of an integer, are passed through.

  Args:
    fn: The function.
    args: The positional arguments of `fn`.
    in_specs: The specs of `args`, a tree or a prefix of one.
    out_specs: The specs of the results, a tree or a prefix of one.
    mesh: The mesh.
    axes: The axes to map.
    out_types: The specs of the results on axes of type `Explicit`, which `fn`
      then gets as `Auto` axes, a tree or a prefix of one. `None` keeps the
      types of `Explicit` axes that are not mapped.
    check_vma: As in `jax.shard_map`.
  """
  leaves, treedef = jax.tree.flatten(args)
  specs = flat_specs(in_specs, args)
  outputs = []

  def mapped(arrays):
    values = [
        x if spec is None else array
        for x, array, spec in zip(leaves, arrays, specs, strict=True)
    ]
    results = fn(*treedef.unflatten(values))
    arrays, restore = leaves_lib.split_arrays(results)
    outputs.append((jax.tree.structure(results), restore))
    return outputs[-1][0].unflatten(arrays)

  def call_mapped(arrays: Any) -> Any:
    is_in_use = bool(jax.sharding.get_abstract_mesh().axis_names)
    # JAX 0.10 supports a partly mapped mesh only under `jax.jit`.
    call = jax.jit(
        jax.shard_map(
            mapped,
            mesh=None if is_in_use else mesh,
            axis_names=set(axes),
            in_specs=([spec or P() for spec in specs],),
            out_specs=out_specs,
            check_vma=check_vma,
        )
    )
    return call(arrays)

  arrays = [
      None if spec is None else x for x, spec in zip(leaves, specs, strict=True)
  ]
  run: Any = call_mapped
  if out_types is not None and mesh.explicit_axes:
    run = jax.sharding.auto_axes(call_mapped, out_sharding=out_types)
  with set_if_explicit(mesh):
    results = run(arrays)
  structure, restore = outputs[0]
  return restore(structure.flatten_up_to(results))


@contextlib.contextmanager
def translate_closure_error(what: str, remedy: str) -> Iterator[None]:
  """Replaces JAX's error about closed-over arrays by one that names a remedy.

  Raises:
    ValueError: If the body closes over an array.
  """
  try:
    yield
  except (NotImplementedError, ValueError) as error:
    if not ('Closing over' in str(error) or 'aval mesh' in str(error)):
      raise
    raise ValueError(
        f'{what} closes over arrays, which JAX cannot map on a mesh with'
        f' `Explicit` axes. {remedy}'
    ) from error


def is_array(x: Any) -> bool:
  """Whether a leaf is an array that can be passed to a mapped function."""
  return isinstance(x, jax.Array | np.ndarray) and not leaves_lib.is_float0(x)


def flat_specs(specs: Any, tree: Any) -> list[P | None]:
  """Returns the spec of each leaf, or `None` for leaves that are not arrays."""
  specs = jax.tree.broadcast(specs, tree, is_leaf=partition_specs.is_spec)
  specs = jax.tree.leaves(specs, is_leaf=partition_specs.is_spec)
  return [
      spec if is_array(x) else None
      for x, spec in zip(jax.tree.leaves(tree), specs, strict=True)
  ]


def explicit_spec_of(x: Any) -> P:
  """Returns the spec of an array over axes of type `Explicit`."""
  if not is_array(x):
    return P()
  return P(*axes_lib.partitions(jax.typeof(x).sharding.spec))


def reshard(axes: Sequence[Hashable], x: Any, is_split: bool) -> Any:
  """Reshards an array such that `axes` split its first dimension, or nothing.

  An array whose sharding over axes of type `Explicit` differs from `in_specs`
  cannot be passed to a mapped function. All other leaves are unchanged.
  """
  explicit = jax.sharding.get_abstract_mesh().explicit_axes
  if not explicit or not is_array(x):
    return x
  x = jnp.asarray(x)
  entries = [
      tuple(axis for axis in entry if axis not in axes)
      for entry in partition_specs.entries(explicit_spec_of(x))
  ]
  if is_split:
    first, *rest = entries or [()]
    named = (axis for axis in axes if axis in explicit)
    entries = [(*named, *first), *rest]
  to = P(*(entry or None for entry in entries))
  return x if to == jax.typeof(x).sharding.spec else jax.reshard(x, to)
