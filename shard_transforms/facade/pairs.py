"""Checks of pairs of a gradient and its variable."""

from collections.abc import Iterable
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy.typing as npt

from shard_transforms.facade import variables

Pairs = list[tuple[jax.Array | None, variables.Variable]]


def check_variables(
    var_list: variables.Variable | Iterable[variables.Variable],
) -> list[variables.Variable]:
  """Returns one or several variables as a checked list.

  Raises:
    TypeError: If an item is no `Variable`.
    ValueError: If there is none, one twice, or one that is not real.
  """
  single = isinstance(var_list, variables.Variable)
  found = [var_list] if single else list(var_list)
  for item in found:
    if not isinstance(item, variables.Variable):
      raise TypeError(f'`var_list` must hold `facade.Variable`s, got {item!r}.')
    if not jnp.issubdtype(item.dtype, jnp.floating):
      raise ValueError(
          f'Invalid type {item.dtype} for {item.name}: optimizers take real'
          ' variables. Make it with `trainable=False`.'
      )
  if not found:
    raise ValueError('No variables to optimize.')
  _check_distinct(found)
  return found


def check(
    grads_and_vars: Iterable[tuple[npt.ArrayLike | None, variables.Variable]],
) -> Pairs:
  """Returns checked pairs, with gradients as arrays or `None`.

  Raises:
    TypeError: If a gradient is no array, a variable no `Variable`, or one of
      the two not of a floating-point type.
    ValueError: If there is no pair, an item is not a pair, a variable comes
      twice, or a gradient has another shape than its variable.
  """
  found: Pairs = [_check_pair(pair) for pair in grads_and_vars]
  if not found:
    raise ValueError('No variables provided.')
  _check_distinct([variable for _, variable in found])
  return found


def check_any_gradient(pairs: Pairs, what: str = '') -> None:
  """Checks that not all gradients are `None`.

  Raises:
    ValueError: If they are.
  """
  if all(grad is None for grad, _ in pairs):
    names = [variable.name for _, variable in pairs]
    raise ValueError(f'No gradients provided for any variable{what}: {names}.')


def stack(calls: Sequence[Pairs]) -> dict[str, jax.Array]:
  """Returns the gradients of several calls by variable [calls, ...].

  A call whose loss does not read a variable contributes zero.
  """
  by_name = [{v.op.name: grad for grad, v in call} for call in calls]
  stacked = {}
  for name in by_name[0]:
    grads = [of_call.get(name) for of_call in by_name]
    present = [grad for grad in grads if grad is not None]
    if present:
      stacked[name] = jnp.stack(
          [jnp.zeros_like(present[0]) if g is None else g for g in grads]
      )
  return stacked


def _check_pair(pair):
  if not isinstance(pair, tuple | list) or len(pair) != 2:
    raise ValueError(
        '`grads_and_vars` must hold pairs of a gradient and its variable, got'
        f' {pair!r}.'
    )
  grad, variable = pair
  if not isinstance(variable, variables.Variable):
    raise TypeError(
        '`grads_and_vars` must hold pairs of a gradient and its'
        f' `facade.Variable`, got {variable!r} in its place.'
    )
  if grad is None:
    return None, variable
  try:
    grad = jnp.asarray(grad)
  except (TypeError, ValueError) as error:
    raise TypeError(
        f'The gradient of {variable.name} must be an array or None, got'
        f' {grad!r}.'
    ) from error
  dtypes = grad.dtype, variable.dtype
  if not all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes):
    raise TypeError(
        '`grads_and_vars` must hold floating-point gradients of floating-point'
        f' variables, got {grad.dtype} for {variable.name} of'
        f' {variable.dtype}.'
    )
  if grad.shape != variable.shape:
    raise ValueError(
        f'The gradient of {variable.name} must have the shape'
        f' {variable.shape}, got {grad.shape}.'
    )
  return grad, variable


def _check_distinct(found):
  names = [variable.op.name for variable in found]
  twice = sorted({name for name in names if names.count(name) > 1})
  if twice:
    raise ValueError(f'Each variable must come once, got {twice} again.')
