"""Utilities for trees of `PartitionSpec`s."""

from collections.abc import Collection
from collections.abc import Hashable
from collections.abc import Iterable
from collections.abc import Mapping
import itertools
from typing import Any

import jax
from jax import core
from jax import lax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib

# `PartitionSpec`s in a tree or a prefix tree, as for `jax.shard_map`.
SpecTree = P | None | Iterable['SpecTree'] | Mapping[Any, 'SpecTree']


def is_spec(spec: Any) -> bool:
  """Whether `spec` is a `PartitionSpec`, for the `is_leaf` of a tree map."""
  return isinstance(spec, P)


def spec_of(x: Any) -> P:
  """Returns the spec with which an array, or the type of one, is sharded.

  It is `PartitionSpec()` if the array is not on a mesh. A traced array has a
  spec only over axes of type `Explicit`.
  """
  if isinstance(x, core.Tracer):
    return P(*axes_lib.partitions(jax.typeof(x).sharding.spec))
  sharding = getattr(x, 'sharding', None)
  return sharding.spec if isinstance(sharding, NamedSharding) else P()


def axes_of(specs: SpecTree) -> frozenset[Hashable]:
  """Returns the set of all axes in a `PartitionSpec` or a tree of them."""
  leaves = jax.tree.leaves(specs, is_leaf=is_spec)
  return frozenset(a for spec in leaves for e in entries(spec) for a in e)


def entries(spec: P) -> list[tuple[Hashable, ...]]:
  """Returns the entries of a spec, each as a tuple of axes."""
  return [e if isinstance(e, tuple) else (e,) * (e is not None) for e in spec]


def from_entries(axes: Iterable[tuple[Hashable, ...]]) -> P:
  """Returns the spec with these entries, each a tuple of axes."""
  return P(*((e[0] if len(e) == 1 else e) or None for e in axes))


def joined(spec: P, other: P) -> P:
  """Returns the spec of an array that is sharded by `spec`, then by `other`."""
  pairs = itertools.zip_longest(entries(spec), entries(other), fillvalue=())
  return P(*(x + y or None for x, y in pairs))


def restricted(specs: SpecTree, axes: Collection[Hashable]) -> Any:
  """Removes all axes but `axes` from a tree of `PartitionSpec`s."""

  def restrict(spec):
    common = [tuple(axis for axis in e if axis in axes) for e in entries(spec)]
    return P(*(e or None for e in common))

  return jax.tree.map(restrict, specs, is_leaf=is_spec)


def check(specs: Any, caller: str, name: str = 'specs') -> None:
  """Checks that `specs` is a tree of `PartitionSpec`s.

  Raises:
    TypeError: If a leaf is not a `PartitionSpec`.
  """
  if not all(map(is_spec, jax.tree.leaves(specs, is_leaf=is_spec))):
    raise TypeError(
        f'`{name}` of `{caller}` must be a `PartitionSpec` or a tree of them,'
        f" got {specs!r}. Write `PartitionSpec('model')`, or"
        ' `PartitionSpec()` for a leaf that is not sharded.'
    )


def check_names_all(
    specs: SpecTree, axes: Collection[Hashable], caller: str
) -> None:
  """Checks that all mapped axes that specs name are in `axes`.

  Raises:
    ValueError: If a spec names another mapped axis.
  """
  others = axes_of(specs).difference(axes)
  missing = sorted(filter(axes_lib.is_bound, others), key=str)
  if missing and axes:
    raise ValueError(
        f'`axis_name` of `{caller}` must name all mapped axes over which'
        f' `specs` slices leaves, but {tuple(axes)!r} does not contain'
        f' {missing}. The shards of a missing axis would get different norms.'
        f' Write `axis_name={(*axes, *missing)!r}`.'
    )


def of_params(
    in_specs: SpecTree, params: Any, caller: str, name: str = 'in_specs'
) -> Any:
  """Broadcasts `in_specs` to one `PartitionSpec` per parameter.

  Raises:
    TypeError: If `in_specs` contains values that are not `PartitionSpec`s.
    ValueError: If `in_specs` does not have the tree of the parameters or a
      prefix of this tree.
  """
  check(in_specs, caller, name)
  try:
    return jax.tree.broadcast(in_specs, params, is_leaf=is_spec)
  except ValueError as error:
    raise ValueError(
        f'`{name}` of `{caller}` must have the tree of the parameters, or a'
        f' prefix of it, got {in_specs!r} for {jax.tree.structure(params)}.'
    ) from error


def sliced_axes(
    tree: Any, axes: tuple[Hashable, ...], specs: Any, caller: str
) -> list[tuple[Hashable, ...]]:
  """Returns the axes over which each leaf is sliced, from specs or types.

  Raises:
    ValueError: If `specs` is given without axes, or contradicts the types.
  """
  if specs is not None and not axes:
    raise ValueError(
        f'`specs` of `{caller}` must come with `axis_name`, got only {specs!r}.'
        ' Name the axes over which leaves are sliced.'
    )
  axes_lib.check_bound(axes, caller)
  leaves = jax.tree.leaves_with_path(tree)
  leaf_specs = [None] * len(leaves)
  if specs is not None:
    specs = jax.tree.broadcast(specs, tree, is_leaf=is_spec)
    leaf_specs = jax.tree.leaves(specs, is_leaf=is_spec)
  return [
      tuple(axis for axis in axes if _is_sliced(path, leaf, axis, spec, caller))
      for (path, leaf), spec in zip(leaves, leaf_specs, strict=True)
  ]


def _is_sliced(path, leaf, axis, spec, caller):
  """Whether a leaf is sliced over an axis, according to its spec or type.

  Raises:
    ValueError: If there is no information, or the spec contradicts the type.
  """
  # Neither an empty array nor a scalar can be sliced.
  if leaves_lib.is_float0(leaf) or not jnp.size(leaf):
    return False
  variance = axes_lib.variance_of(leaf, axis)
  if spec is None and variance == 'untracked':
    raise ValueError(
        f'`{caller}` cannot infer which leaves are sliced over {axis!r},'
        ' because JAX does not track this axis in types here. Pass the'
        ' `PartitionSpec`s of the leaves as `specs`.'
    )
  by_type = variance == 'varying'
  if spec is None:
    by_spec = by_type
  else:
    by_spec = axis in axes_of(spec) and jnp.ndim(leaf) > 0
  contradicted = by_spec != by_type and variance != 'untracked'
  # With one shard, the slice is the whole leaf, so nothing is contradicted.
  if variance == 'unreduced' or (contradicted and lax.axis_size(axis) > 1):
    raise ValueError(
        f'`specs` of `{caller}` do not agree with the types of the leaves:'
        f' {leaves_lib.name_of(path)} {list(jnp.shape(leaf))} has the spec'
        f' {spec!r}, but is typed {variance} over {axis!r}. Pass the specs of'
        ' the leaves. A gradient that is not reduced over an axis yet is not a'
        ' slice: reduce it first.'
    )
  return by_spec
