"""Utilities for the leaves of trees: dtypes, checks and slices."""

from collections.abc import Callable
from collections.abc import Collection
from collections.abc import Hashable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import functools
import math
from typing import Any

import chex
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

from shard_transforms._src.base import axes as axes_lib

# Parameters, or their shapes if nothing is computed with them.
ParamTree = (
    optax.Params
    | jax.ShapeDtypeStruct
    | Iterable['ParamTree']
    | Mapping[Any, 'ParamTree']
)

_REMEDIES = {
    'invariant': (
        'it is already reduced. `jax.grad` of replicated parameters returns the'
        ' sum over the shards, and `lax.pmean` of this sum is still the sum.'
        ' Take the gradient with `shard_transforms.value_and_grad`, and reduce'
        ' it once. If it is already the mean over the shards, as the result of'
        " `cross_shard_mean` is, pass `if_reduced='mean'` and no `weight` to"
        ' `shard_mean`, `cross_shard_mean`, `shard_update` or `owned_update`;'
        ' leave out any other reduction, and `axis_name` of wrappers such as'
        ' `guard` and `tower_reduce`.'
    ),
    'unreduced': (
        'its sum over the shards is pending. Compute the gradient of each shard'
        ' with `shard_transforms.value_and_grad`; only `cross_shard_mean` and'
        ' `cross_shard_sum` without a weight finish such a sum.'
    ),
}


def is_none(leaf: Any) -> bool:
  """Whether `leaf` is `None`, for the `is_leaf` of a tree map."""
  return leaf is None


def tree_map(fn: Callable[..., Any], tree: Any, *rest: Any) -> Any:
  """Like `jax.tree.map`, but treats `None` as a leaf."""
  return jax.tree.map(fn, tree, *rest, is_leaf=is_none)


def is_float0(leaf: Any) -> bool:
  """Whether `leaf` is the float0 gradient of an integer parameter."""
  return getattr(leaf, 'dtype', float) == jax.dtypes.float0


def name_of(path: Sequence[Any]) -> str:
  """Returns the name of the leaf at a path of keys, for error messages."""
  return jax.tree_util.keystr(tuple(path)) or 'the root'


def dtype_of(leaf: Any) -> Any:
  """Returns the dtype of an array, a scalar or a `jax.ShapeDtypeStruct`."""
  # `jnp.result_type` takes ten times as long.
  return getattr(leaf, 'dtype', None) or jnp.result_type(leaf)


def shapes_of(tree: Any) -> Any:
  """Returns the shapes and dtypes of a tree of arrays, without shardings."""
  return jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)), tree
  )


def dtype_of_number(value: Any) -> np.dtype | None:
  """Returns the dtype of an array or a Python number; otherwise `None`."""
  if isinstance(value, (bool, int, float, complex)):
    return np.dtype(type(value))
  is_array = isinstance(value, (jax.Array, np.ndarray, np.generic))
  return value.dtype if is_array else None


def accumulator_dtype(dtype: Any) -> Any:
  """Returns the dtype in which values of `dtype` are summed."""
  narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4
  return jnp.dtype(jnp.float32) if narrow else jnp.dtype(dtype)


def accumulators(tree: Any) -> Any:
  """Returns zeros that leaves can be added to; `None` for integer leaves.

  Unlike `jnp.zeros`, the result varies over the same axes as the leaf.
  """

  def zeros(leaf):
    dtype = dtype_of(leaf)
    if not jnp.issubdtype(dtype, jnp.inexact):
      return None
    return jnp.zeros_like(leaf, dtype=accumulator_dtype(dtype))

  return jax.tree.map(zeros, tree)


def as_dtype(x: jax.Array, dtype: Any) -> jax.Array:
  """Casts to `dtype`, strongly typed; a no-op if the array already has it."""
  array_type = jax.typeof(x)
  is_same = array_type.dtype == dtype and not array_type.weak_type
  return x if is_same else x.astype(dtype)


def as_accumulator(leaf: Any) -> jax.Array:
  """Casts a leaf to the dtype in which it is summed."""
  x = jnp.asarray(leaf)
  return as_dtype(x, accumulator_dtype(x.dtype))


def split_arrays(
    tree: Any,
) -> tuple[list[jax.Array | None], Callable[[list[jax.Array | None]], Any]]:
  """Returns the arrays in a tree, and a function that restores the tree."""
  leaves, treedef = jax.tree.flatten(tree)
  arrays = [x if isinstance(x, jax.Array) else None for x in leaves]
  # JAX may keep `join` alive, which must not keep tracers alive.
  others = [None if isinstance(x, jax.Array) else x for x in leaves]

  def join(arrays):
    pairs = zip(others, arrays, strict=True)
    return treedef.unflatten([x if a is None else a for x, a in pairs])

  return arrays, join


def where_or_zeros_fn(condition: jax.Array) -> Callable[[jax.Array], jax.Array]:
  """Returns a function that zeroes an array unless a condition holds."""
  zeros = functools.cache(axes_lib.zeros)

  def choose(x):
    # `jnp.where` takes several times as long to trace.
    is_kept = condition
    if condition.ndim:
      is_kept = jnp.broadcast_to(condition, x.shape)
    return lax.select_n(is_kept, zeros(jax.typeof(x)), x)

  return choose


def where_or_zeros(condition: jax.Array, tree: Any) -> Any:
  """Replaces a tree by zeros unless a scalar condition holds."""
  choose = where_or_zeros_fn(condition)

  def zero(leaf):
    # For an empty array, JAX loses the axes over which the condition varies.
    if is_float0(leaf) or not jnp.size(leaf):
      return leaf
    return choose(jnp.asarray(leaf))

  return jax.tree.map(zero, tree)


def sum_of_empty(leaf: Any, axes: Sequence[Hashable]) -> Any:
  """Returns the sum of a float0 or empty leaf; `None` for all other leaves."""
  if is_float0(leaf):
    return leaf
  if jnp.size(leaf) > 0:
    return None
  stays = axes_lib.varying_axes(leaf).difference(axes)
  return axes_lib.to_varying(axes_lib.zeros(jax.typeof(leaf)), tuple(stays))


def check_inexact(tree: Any, caller: str) -> None:
  """Checks that leaves are real, complex or `float0`, and not unreduced.

  Raises:
    TypeError: If a leaf is an integer or boolean.
    ValueError: If a leaf is unreduced over axes of type `Explicit`.
  """
  for path, leaf in jax.tree.leaves_with_path(tree):
    dtype = dtype_of(leaf)
    if not jnp.issubdtype(dtype, jnp.inexact) and not is_float0(leaf):
      raise TypeError(
          f'`updates` of `{caller}` must be real or complex, got'
          f' {dtype.name}{list(jnp.shape(leaf))} at {name_of(path)}. Exclude'
          ' such leaves from a transformation with `optax.masked`, and leave'
          ' them out of the argument of a function.'
      )
    spec = getattr(jax.typeof(leaf).sharding, 'spec', None)
    if unreduced := getattr(spec, 'unreduced', None):
      raise ValueError(
          f'`updates` of `{caller}` are unreduced over {sorted(unreduced)} at'
          f' {name_of(path)}, {jax.typeof(leaf)}. Call `update` through'
          ' `shard_transforms.on_mesh(tx, mesh)`, which accepts such gradients,'
          ' or sum them with `jax.reshard`.'
      )


def check_per_shard(
    tree: Any,
    axes: Sequence[Hashable],
    caller: str,
    allowed: Collection[axes_lib.Variance] = (),
) -> None:
  """Checks that leaves vary over `axes`, as per-shard gradients do.

  Raises:
    ValueError: If a leaf is invariant or unreduced over one of `axes`, unless
      `allowed` contains this type.
  """
  leaves = jax.tree.leaves_with_path(tree)
  for axis in filter(axes_lib.is_tracked, axes):
    for path, leaf in leaves:
      if is_float0(leaf) or axis in axes_lib.varying_axes(leaf):
        continue
      variance = axes_lib.variance_of(leaf, axis)
      if variance in allowed:
        continue
      raise ValueError(
          f'`updates` of `{caller}` must be per shard over {axis!r}, got'
          f' {name_of(path)} {list(jnp.shape(leaf))}, typed {variance}:'
          f' {_REMEDIES[variance]}'
      )


def check_not_slices(
    params: Any, axes: Sequence[Hashable], caller: str
) -> None:
  """Checks that parameters are not sliced over the axes of a reduction.

  The gradients of slices have different elements on each shard, so a mean or
  sum over the shards would be meaningless.

  Raises:
    ValueError: If the type of a parameter varies over one of `axes`.
  """
  # On one shard, the slice is the whole parameter.
  axes = [a for a in axes if axes_lib.is_bound(a) and lax.axis_size(a) > 1]
  for path, leaf in jax.tree.leaves_with_path(params) if axes else ():
    if not isinstance(leaf, jax.Array):
      continue
    if sliced := axes_lib.varying_axes(leaf).intersection(axes):
      raise ValueError(
          f'`params` of `{caller}` must be the same on all shards of'
          f' {sorted(sliced, key=str)}, got {name_of(path)}'
          f' {list(jnp.shape(leaf))}, typed varying: each shard has a'
          ' different slice (FSDP), or the parameter was passed through'
          ' `per_shard`. Pass whole parameters, with `PartitionSpec()` in'
          ' `in_specs`, and shard the state of the optimizer with'
          ' `shard_update`. For sharded parameters, use `contrib.owned_update`'
          ' with `param_specs`, or train under plain `jax.jit` with'
          ' `accumulated_value_and_grad`. Inside `shard_update` and'
          ' `owned_update`, which reduce by themselves, leave out the'
          ' reduction; with `local_updates`, reduce in `outer`.'
      )


def is_sliced(leaf: chex.Array | jax.ShapeDtypeStruct, num_slices: int) -> bool:
  """Whether a leaf is sliced: inexact, neither empty nor a scalar."""
  is_inexact = jnp.issubdtype(dtype_of(leaf), jnp.inexact)
  has_axis = bool(jnp.shape(leaf)) and math.prod(jnp.shape(leaf)) > 0
  return is_inexact and has_axis and num_slices > 1


def slice_evenly(leaf: chex.Array, num_slices: int) -> jax.Array:
  """Slices a leaf into one slice per shard, [slices, 1, ..., 1, elements].

  The leaf is flattened, padded with zeros at the end, and split into equal
  parts. Each slice has the rank of the leaf.
  """
  rows = jnp.asarray(leaf)
  if padding := -rows.size % num_slices:
    rows = jnp.pad(rows.ravel(), (0, padding))
  shape = num_slices, *(1,) * (jnp.ndim(leaf) - 1), rows.size // num_slices
  return lax.reshape(rows, shape)


def join_slices(
    slices: jax.Array, like: chex.Array | jax.ShapeDtypeStruct
) -> jax.Array:
  """Joins the slices of `slice_evenly` into a leaf of the shape of `like`."""
  shape = jnp.shape(like)
  num_elements = math.prod(shape)
  if slices.size > num_elements:
    slices = lax.slice(slices.ravel(), (0,), (num_elements,))
  return lax.reshape(slices, shape)
