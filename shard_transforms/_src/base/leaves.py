"""Which leaves of a tree carry a gradient, and in which dtype they add up."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import functools
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import optax

from shard_transforms._src.base import axes as axes_lib

# Parameters, or their shapes where nothing is computed with them.
ParamTree = (
    optax.Params
    | jax.ShapeDtypeStruct
    | Iterable['ParamTree']
    | Mapping[Any, 'ParamTree']
)


def is_none(leaf: Any) -> bool:
  """Whether `leaf` is `None`, for the `is_leaf` of a tree map."""
  return leaf is None


def is_float0(leaf: Any) -> bool:
  """Whether `leaf` is the empty gradient of an integer parameter."""
  return getattr(leaf, 'dtype', float) == jax.dtypes.float0


def name_of(path: Sequence[Any]) -> str:
  """Returns what errors call the leaf at a path of keys in its tree."""
  return jax.tree_util.keystr(tuple(path)) or 'the root'


def dtype_of(leaf: Any) -> Any:
  """Returns the dtype of an array, a scalar or a `jax.ShapeDtypeStruct`."""
  return jnp.dtype(getattr(leaf, 'dtype', None) or jnp.result_type(leaf))


def accumulator_dtype(dtype: Any) -> Any:
  """Returns the dtype in which values of `dtype` are summed."""
  narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.dtype(dtype).itemsize < 4
  return jnp.dtype(jnp.float32) if narrow else jnp.dtype(dtype)


def as_dtype(x: jax.Array, dtype: Any) -> jax.Array:
  """Returns an array in this dtype, not weakly; one that has it is not cast."""
  kind = jax.typeof(x)
  is_same = kind.dtype == dtype and not kind.weak_type
  return x if is_same else x.astype(dtype)


def as_accumulator(leaf: Any) -> jax.Array:
  """Returns a leaf as an array of the dtype in which it is summed."""
  x = jnp.asarray(leaf)
  return as_dtype(x, accumulator_dtype(x.dtype))


def zeroing_unless(condition: jax.Array) -> Callable[[jax.Array], jax.Array]:
  """Returns a function that zeroes an array unless a condition holds."""
  zeros = functools.cache(axes_lib.zeros)

  def choose(x):
    # `jnp.where` takes several times as long to trace.
    is_kept = condition
    if is_kept.ndim:
      is_kept = jnp.broadcast_to(is_kept, x.shape)
    return lax.select_n(is_kept, zeros(jax.typeof(x)), x)

  return choose


def zero_unless(condition: jax.Array, tree: Any) -> Any:
  """Returns a tree of zeros, unless a scalar condition holds."""
  choose = zeroing_unless(condition)

  def zero(leaf):
    # For an array without elements, JAX loses the type of the condition.
    if is_float0(leaf) or not jnp.size(leaf):
      return leaf
    return choose(jnp.asarray(leaf))

  return jax.tree.map(zero, tree)


def check_inexact(tree: Any, caller: str) -> None:
  """Checks that every leaf of `tree` is real or complex, or a `float0`.

  Raises:
    TypeError: If a leaf is of another dtype.
  """
  for path, leaf in jax.tree.leaves_with_path(tree):
    # `jnp.result_type` takes ten times as long.
    dtype = getattr(leaf, 'dtype', None) or jnp.result_type(leaf)
    if not jnp.issubdtype(dtype, jnp.inexact) and not is_float0(leaf):
      raise TypeError(
          f'`updates` of `{caller}` must be real or complex, got'
          f' {dtype.name}{list(jnp.shape(leaf))} at {name_of(path)}. Leave'
          ' such leaves out with `optax.masked`.'
      )


def check_like(tree: Any, reference: Any, caller: str) -> None:
  """Checks `tree` against `reference`; a leaf of either may be `None`.

  Raises:
    TypeError: If a leaf is complex where the reference is real.
    ValueError: If a leaf is missing, unknown or of another shape.
  """
  got = dict(jax.tree.leaves_with_path(tree, is_leaf=is_none))
  want = dict(jax.tree.leaves_with_path(reference, is_leaf=is_none))
  for path in want | got:
    if path not in got or path not in want:
      raise ValueError(
          f'`updates` of `{caller}` must have the tree that its state was made'
          f' for, but {name_of(path)} is only in'
          f' {"the state" if path in want else "the updates"}. Call `init` with'
          ' parameters of the same tree.'
      )
    update, kept = got[path], want[path]
    if update is None or kept is None:
      continue
    if jnp.iscomplexobj(update) and not jnp.iscomplexobj(kept):
      raise TypeError(
          f'`updates` of `{caller}` must be real where the parameters are, got'
          f' a complex leaf at {name_of(path)}.'
      )
    if jnp.shape(update) != jnp.shape(kept):
      raise ValueError(
          f'`updates` of `{caller}` must have the shapes that its state was'
          f' made for, got {jnp.shape(update)} instead of {jnp.shape(kept)} at'
          f' {name_of(path)}.'
      )
