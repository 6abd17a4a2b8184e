"""Losses: Python functions, and their gradients for the variables they read."""

from collections.abc import Callable
from collections.abc import Iterable
import inspect

import jax
import jax.numpy as jnp
import numpy.typing as npt

import shard_transforms
from shard_transforms.facade import contexts
from shard_transforms.facade import frames
from shard_transforms.facade import lookup
from shard_transforms.facade import pairs
from shard_transforms.facade import variables as variables_lib

Variable = variables_lib.Variable


def compute_gradients(
    loss: Callable[..., npt.ArrayLike],
    var_list: Variable | Iterable[Variable] | None = None,
    grad_loss: jax.typing.ArrayLike | Variable | None = None,
    scale: float | None = None,
) -> pairs.Pairs:
  """Returns the gradients of a loss by variable, `None` where it reads none.

  Args:
    loss: A function of no arguments, or of the values of `var_list`.
    var_list: The variables; all trainable ones of the graph if `None`.
    grad_loss: The gradient for the loss, of its shape or a scalar; ones if
      `None`, which is the gradient of the sum of the loss's elements.
    scale: A number that the loss is multiplied by.

  Returns:
    The pairs, in the order of `var_list`. Among shards, gradients are each
    shard's own.

  Raises:
    TypeError: If `loss` is no function, its result no real array, or
      `grad_loss` no real array.
    ValueError: If there are no variables, one is of an integer type, `loss`
      takes another number of arguments or is already reduced over the shards,
      `grad_loss` is of another shape, or the loss makes new variables each
      time.
  """
  if not callable(loss):
    raise TypeError(
        '`loss` must be a function of no arguments, or of the values of'
        f' `var_list`, got {loss!r}. Write `lambda: ...` around the loss.'
    )
  chosen = None if var_list is None else pairs.check_variables(var_list)
  arity = _arity(loss, None if chosen is None else len(chosen))
  # The first evaluation may create variables; the second differentiates them.
  for _ in range(2):
    found = lookup.trainable_variables() if chosen is None else chosen
    if found:
      pairs.check_variables(found)
    grads, written, assigned = _differentiate(
        loss, found, grad_loss, scale, arity
    )
    if chosen is not None or found == lookup.trainable_variables():
      pairs.check_variables(found)
      frames.commit(written, assigned)
      return list(zip(grads, found, strict=True))
  raise ValueError(
      '`loss` must not make other variables each time, as `facade.Variable`'
      ' does. Use `facade.get_variable`, or make them outside.'
  )


def _differentiate(loss, found, grad_loss, scale, arity):
  """Returns the gradients, and the assignments of the loss."""
  written = []

  def differentiated(values):
    with frames.frame('plain', zip(found, values, strict=True)) as frame:
      out = _as_loss(loss(*values[:arity]), grad_loss)
    read = [arity > 0 or v in frame.used for v in found]
    written[:] = frame.written
    if scale is not None:
      out = out * scale
    total = jnp.sum(out if grad_loss is None else out * grad_loss)
    return total, (read, [frame.values[v] for v in frame.written])

  axes = contexts.mapped_axes()
  if axes:
    value_and_grad = shard_transforms.value_and_grad(
        differentiated, axes, has_aux=True
    )
  else:
    value_and_grad = jax.value_and_grad(differentiated, has_aux=True)
  (_, (read, assigned)), grads = value_and_grad([v.value() for v in found])
  grads = [
      g if is_read else None for g, is_read in zip(grads, read, strict=True)
  ]
  return grads, written, assigned


def _arity(loss, num_variables):
  """Returns how many arguments a loss takes: none, or one a variable."""
  signature = inspect.signature(loss)
  kinds = {p.kind for p in signature.parameters.values()}
  if num_variables and inspect.Parameter.VAR_POSITIONAL in kinds:
    return num_variables
  try:
    signature.bind()
    return 0
  except TypeError:
    if num_variables is None:
      raise ValueError(
          '`loss` must be a function of no arguments where `var_list` is not'
          f' given, got one of {signature}.'
      ) from None
  try:
    signature.bind(*range(num_variables))
    return num_variables
  except TypeError:
    raise ValueError(
        f'`loss` must be a function of no arguments or of {num_variables}, the'
        f' length of `var_list`, got one of {signature}.'
    ) from None


def _as_loss(out, grad_loss):
  """Returns the loss as an array, checked against the gradient for it."""
  try:
    out = jnp.asarray(out)
  except (TypeError, ValueError) as error:
    raise TypeError(f'`loss` must return an array, got {out!r}.') from error
  if not jnp.issubdtype(out.dtype, jnp.floating):
    raise TypeError(f'`loss` must return real numbers, got {out.dtype}.')
  if grad_loss is not None:
    _check_grad_loss(grad_loss, out.shape)
  return out


def _check_grad_loss(grad_loss, shape):
  is_array = hasattr(grad_loss, 'shape') or isinstance(grad_loss, int | float)
  if not is_array:
    raise TypeError(f'`grad_loss` must be an array, got {grad_loss!r}.')
  dtype = jnp.result_type(grad_loss)
  if not any(jnp.issubdtype(dtype, k) for k in (jnp.integer, jnp.floating)):
    raise TypeError(f'`grad_loss` must hold real numbers, got {dtype}.')
  if jnp.shape(grad_loss) not in ((), shape):
    raise ValueError(
        f'`grad_loss` must have the shape of the loss, {shape}, got'
        f' {jnp.shape(grad_loss)}.'
    )
