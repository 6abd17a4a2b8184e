"""Checks of arguments: numbers, steps, transformations and updates."""

from collections.abc import Callable
from collections.abc import Hashable
import operator
from typing import Any

import jax
from jax import core
import jax.numpy as jnp
import numpy as np
import optax

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves


def as_int(name: str, value: Any) -> int:
  """Returns `value`, which must not be traced, as a Python integer.

  Raises:
    TypeError: If `value` is not an integer, or is a JAX array.
  """
  if isinstance(value, jax.Array):
    raise TypeError(
        f'`{name}` must be a Python integer, got the array {value!r}. With'
        f' `optax.inject_hyperparams`, list it in `static_args`.'
    )
  try:
    if isinstance(value, (bool, np.bool_)):
      raise TypeError
    return operator.index(value)
  except TypeError as error:
    raise TypeError(f'`{name}` must be an integer, got {value!r}.') from error


def as_at_least(name: str, value: Any, least: int) -> int:
  """Returns `value` as a Python integer that is not less than `least`.

  Raises:
    TypeError: As in `as_int`.
    ValueError: If `value` is less than `least`.
  """
  value = as_int(name, value)
  if value < least:
    raise ValueError(f'`{name}` must be at least {least}, got {value!r}.')
  return value


def as_positive(name: str, value: Any) -> Any:
  """Returns a real number, checked to be positive unless it is traced."""
  return as_real(name, value, 'be positive', lambda x: x > 0)


def as_not_negative(name: str, value: Any) -> Any:
  """Returns a real number, checked to be non-negative unless it is traced."""
  return as_real(name, value, 'not be negative', lambda x: x >= 0)


def as_real(
    name: str, value: Any, requirement: str, fits: Callable[[Any], bool]
) -> Any:
  """Returns a real number; a requirement is checked unless it is traced.

  Raises:
    TypeError: If `value` is not a real number.
    ValueError: If `fits` is false for the value.
  """
  dtype = leaves.dtype_of_number(value)
  kinds = (jnp.integer, jnp.floating)
  is_real = dtype is not None and any(jnp.issubdtype(dtype, k) for k in kinds)
  if not is_real or jnp.shape(value):
    raise TypeError(f'`{name}` must be a real number, got {value!r}.')
  if not isinstance(value, core.Tracer) and not fits(value):
    raise ValueError(f'`{name}` must {requirement}, got {value!r}.')
  return value


def check_bool(name: str, value: Any) -> None:
  """Checks that an argument is `True` or `False`.

  Raises:
    TypeError: If it is not a boolean.
  """
  if not isinstance(value, bool):
    raise TypeError(f'`{name}` must be a boolean, got {value!r}.')


def check_reduction(reduction: Any) -> None:
  """Checks the argument `reduction`.

  Raises:
    ValueError: If the reduction is unknown.
  """
  if reduction not in ('mean', 'sum'):
    raise ValueError(f"`reduction` must be 'mean' or 'sum', got {reduction!r}.")


def as_local_step(
    local_step: Any, caller: str, shape: tuple[int, ...] = ()
) -> jax.Array:
  """Returns `local_step` as int32; it is a scalar or has the shape `shape`.

  Raises:
    TypeError: If `local_step` is missing, or is not an integer.
    ValueError: If `local_step` has another shape, or does not fit int32.
  """
  name = f'`local_step` of `{caller}`'
  if local_step is None:
    raise TypeError(
        f'{name} is missing. It is the global step at which the parameters of'
        ' the updates were read. Call `tx.update(updates, state, params,'
        ' local_step=...)`.'
    )
  dtype = leaves.dtype_of_number(local_step)
  if dtype is None or not jnp.issubdtype(dtype, jnp.integer):
    raise TypeError(f'{name} must be an integer, got {local_step!r}.')
  if jnp.shape(local_step) not in ((), shape):
    allowed = ' or '.join(map(str, dict.fromkeys([(), shape])))
    raise ValueError(
        f'{name} must have the shape {allowed}, got {jnp.shape(local_step)}.'
        ' It is one step for all leaves.'
    )
  if not isinstance(local_step, core.Tracer):
    int32 = np.iinfo(np.int32)
    step = np.asarray(local_step)
    if np.any((step < int32.min) | (step > int32.max)):
      raise ValueError(f'{name} must fit int32, got {local_step!r}.')
  return jnp.asarray(local_step, jnp.int32)


def as_inner(
    inner: Any, caller: str, argument: str = 'inner'
) -> optax.GradientTransformationExtraArgs:
  """Returns a transformation with support for extra arguments.

  Raises:
    TypeError: If `inner` is not an Optax transformation.
  """
  parts = (getattr(inner, name, None) for name in ('init', 'update'))
  if not all(map(callable, parts)):
    raise TypeError(
        f'`{argument}` of `{caller}` must be an Optax gradient transformation,'
        f' got {inner!r}. Call its factory, such as `optax.sgd(0.1)`.'
    )
  return optax.with_extra_args_support(inner)


def check_state(state: Any, state_type: type, caller: str) -> None:
  """Checks that `update` receives the state of its own transformation.

  Raises:
    TypeError: If the state has another type.
  """
  if not isinstance(state, state_type):
    raise TypeError(
        f'`state` of `{caller}` must be a `{state_type.__name__}`, the result'
        f' of its `init`, got {type(state).__name__}. Restore a checkpoint with'
        ' the state of `init` or `init_state` as the target.'
    )


def check_update(
    updates: optax.Updates,
    state: Any,
    state_type: type,
    axes: tuple[Hashable, ...],
    caller: str,
) -> None:
  """Checks the arguments of the `update` of a gate, before any arithmetic.

  Reduced updates times a mask of each shard are typed as varying, and a later
  reduction would accept them.
  """
  check_state(state, state_type, caller)
  leaves.check_inexact(updates, caller)
  axes_lib.check_bound(axes, caller)
  leaves.check_per_shard(updates, axes, caller)


def check_like(updates: Any, reference: Any, caller: str) -> None:
  """Checks that updates match a tree of the state; leaves may be `None`.

  Raises:
    TypeError: If an update is complex but the leaf of the state is real.
    ValueError: If the trees or the shapes differ.
  """
  update_leaves, state_leaves = (
      dict(jax.tree.leaves_with_path(tree, is_leaf=leaves.is_none))
      for tree in (updates, reference)
  )
  for path in state_leaves | update_leaves:
    name = leaves.name_of(path)
    if path not in update_leaves or path not in state_leaves:
      raise ValueError(
          f'`updates` do not have the tree of the state of `{caller}`: {name}'
          f' is only in the {"state" if path in state_leaves else "updates"}.'
          ' Pass gradients with the tree of the parameters that `init`'
          ' received.'
      )
    update, like = update_leaves[path], state_leaves[path]
    if update is None or like is None:
      continue
    if jnp.iscomplexobj(update) and not jnp.iscomplexobj(like):
      raise TypeError(
          f'`updates` of `{caller}` are complex at {name}, but the parameters'
          ' that `init` received are real there. Pass real gradients.'
      )
    if jnp.shape(update) != jnp.shape(like):
      raise ValueError(
          f'`updates` of `{caller}` have the shape {jnp.shape(update)} instead'
          f' of {jnp.shape(like)} at {name}. Pass gradients with the shapes of'
          ' the parameters that `init` received.'
      )


def check_varies_with(tree: Any, others: Any, caller: str) -> None:
  """Checks that each leaf varies over all axes of its counterpart in `others`.

  Otherwise, the sum of both leaves would hide that the leaf of `tree` is
  already reduced. Leaves of both trees may be `None`.
  """
  axes = set().union(*map(axes_lib.varying_axes, jax.tree.leaves(others)))
  for axis in sorted(axes, key=str):

    def select(other, leaf, axis=axis):
      varies = other is not None and axis in axes_lib.varying_axes(other)
      return leaf if varies else None

    selected = jax.tree.map(select, others, tree, is_leaf=leaves.is_none)
    leaves.check_per_shard(selected, (axis,), caller)
