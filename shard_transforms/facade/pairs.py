"""Pairs of a gradient and its variable: checks and conversions."""

from collections.abc import Iterable
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy.typing as npt

from shard_transforms.facade import arrays as arrays_lib
from shard_transforms.facade import variables as variables_lib

Variable = variables_lib.Variable
Pairs = list[tuple[jax.Array | None, Variable]]


def check_variables(
    var_list: Variable | Iterable[Variable], name: str = 'var_list'
) -> list[Variable]:
  """Returns one or several variables as a checked list.

  Args:
    var_list: The variables.
    name: The name of the argument.

  Raises:
    ValueError: If there are none, an item is not a `Variable`, one is not of a
      floating-point type, or one comes twice.
  """
  variables = [var_list] if isinstance(var_list, Variable) else list(var_list)
  for item in variables:
    if not isinstance(item, Variable):
      raise ValueError(
          f'`{name}` contains {item!r}, which is not a `tf.Variable`. To'
          ' differentiate with respect to an array, use `jax.grad`.'
      )
    if not jnp.issubdtype(item.dtype, jnp.floating):
      raise ValueError(
          f'Invalid type {item.dtype} for {item.name}: optimizers update only'
          ' floating-point variables. Create it with `trainable=False`.'
      )
  if not variables:
    raise ValueError(
        'No variables to optimize. Create trainable variables before the'
        ' optimizer is called, or pass `var_list`.'
    )
  _check_distinct(variables)
  return variables


def check_pairs(
    grads_and_vars: Iterable[tuple[npt.ArrayLike | None, Variable]],
) -> Pairs:
  """Returns checked pairs, with gradients as arrays or `None`.

  Raises:
    TypeError: If a gradient is not an array, or if a gradient or its variable
      is not of a floating-point type.
    ValueError: If there are no pairs, an item is not a pair or does not contain
      a `Variable`, a variable comes twice, or a gradient and its variable have
      different shapes.
  """
  pairs: Pairs = [_check_pair(pair) for pair in grads_and_vars]
  if not pairs:
    raise ValueError('No variables provided.')
  _check_distinct([variable for _, variable in pairs])
  return pairs


def check_any_gradient(pairs: Pairs, advice: str = '') -> None:
  """Checks that not all gradients are `None`.

  Raises:
    ValueError: If they are.
  """
  if all(grad is None for grad, _ in pairs):
    names = [variable.name for _, variable in pairs]
    raise ValueError(
        f'No gradients provided for any variable: {names}.{advice}'
    )


def by_name(pairs: Pairs) -> dict[str, jax.Array]:
  """Returns the gradients that are not `None`, by name of the variable."""
  return {v.op.name: grad for grad, v in pairs if grad is not None}


def of_variables(grads: Any, pairs: Pairs) -> Pairs:
  """Returns the variables of pairs with other gradients.

  Args:
    grads: The gradients by name of the variable; missing ones become `None`.
    pairs: The pairs.
  """
  return [(grads.get(v.op.name), v) for _, v in pairs]


def stack(calls: Sequence[Pairs]) -> dict[str, jax.Array]:
  """Stacks the gradients of several calls by variable [calls, ...].

  If the loss of a call does not read a variable, the call contributes zero.
  """
  grads_of_calls = [by_name(call) for call in calls]
  zeros = {
      k: jnp.zeros_like(g) for call in grads_of_calls for k, g in call.items()
  }
  return {
      name: jnp.stack([call.get(name, zero) for call in grads_of_calls])
      for name, zero in zeros.items()
  }


def _check_pair(pair):
  if not isinstance(pair, tuple | list) or len(pair) != 2:
    raise ValueError(
        f'`grads_and_vars` contains {pair!r}, which is not a pair of a gradient'
        ' and its variable.'
    )
  grad, variable = pair
  if not isinstance(variable, Variable):
    raise ValueError(
        f'`grads_and_vars` contains {variable!r} as the second item of a pair,'
        ' which must be a `tf.Variable`.'
    )
  if grad is None:
    return None, variable
  grad = arrays_lib.as_array(
      grad, f'The gradient of {variable.name} must be an array or None'
  )
  dtypes = grad.dtype, variable.dtype
  if not all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes):
    raise TypeError(
        'Optimizers need floating-point gradients of floating-point variables,'
        f' but the gradient of {variable.name} has the dtype {grad.dtype}, and'
        f' the variable has the dtype {variable.dtype}.'
    )
  if grad.shape != variable.shape:
    raise ValueError(
        f'The gradient of {variable.name} has the shape {grad.shape}, but the'
        f' variable has the shape {variable.shape}.'
    )
  return grad, variable


def _check_distinct(variables):
  names = [variable.op.name for variable in variables]
  repeated = sorted({name for name in names if names.count(name) > 1})
  if repeated:
    raise ValueError(
        f'Variables occur more than once: {repeated}. Pass each variable once.'
    )
