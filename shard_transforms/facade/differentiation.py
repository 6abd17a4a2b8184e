"""Gradients of a loss by variable: how they are computed and checked."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Sequence
import functools
import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy.typing as npt

import shard_transforms
from shard_transforms.facade import contexts
from shard_transforms.facade import frames
from shard_transforms.facade import graph as graph_lib
from shard_transforms.facade import lookup
from shard_transforms.facade import passes
from shard_transforms.facade import variables as variables_lib

Variable = variables_lib.Variable
Pairs = list[tuple[jax.Array | None, Variable]]


def compute_gradients(
    loss: Callable[..., npt.ArrayLike],
    var_list: Variable | Iterable[Variable] | None = None,
    grad_loss: jax.typing.ArrayLike | Variable | None = None,
) -> Pairs:
  """Returns the gradient of a loss for each variable, `None` if it reads none.

  Args:
    loss: A function of no arguments, or of the values of `var_list`.
    var_list: The variables; all trainable ones of the graph if `None`.
    grad_loss: The gradient for the loss, of its shape or a scalar; ones if
      `None`, so that the elements of the loss are summed.

  Returns:
    The pairs, in the order of `var_list`. Among shards, gradients are each
    shard's own.

  Raises:
    TypeError: If `loss` is no function, its result no real array, or
      `grad_loss` no real array.
    ValueError: If there are no variables, one is none or of an integer type,
      `loss` takes another number of arguments or is already reduced over the
      shards, `grad_loss` is of another shape, or the loss makes new variables
      each time.
  """
  _check_function(loss)
  chosen = None if var_list is None else check_variables(var_list)
  arity = _arity(loss, None if chosen is None else len(chosen))
  # The first evaluation may create variables, which have no gradient yet; the
  # second differentiates by them too.
  of_one_pass = passes.repeated(loss)
  for _ in range(2):
    found = _all_trainable() if chosen is None else chosen
    if found:
      check_variables(found)
    grads, written, assigned = _differentiate(
        of_one_pass, found, grad_loss, arity
    )
    wanted = lookup.trainable_variables() if chosen is None else chosen
    if set(wanted) <= set(found):
      check_variables(wanted)
      frames.commit(written, assigned)
      towers = contexts.towers()
      if towers is not None:  # What the loss assigns counts for each tower.
        values = zip(written, assigned, strict=True)
        towers.assigned |= {v: x for v, x in values if isinstance(v, Variable)}
      pairs = zip(grads, found, strict=True)
      return [(grad, v) for grad, v in pairs if v in wanted]
  raise ValueError(
      '`loss` must not make other variables each time, as `facade.Variable`'
      ' does. Use `facade.get_variable`, or make them outside.'
  )


def _all_trainable():
  """Returns the trainable variables, also those that the loss will find."""
  graph = graph_lib.get_default_graph()
  return list(
      graph.get_collection_ref(variables_lib.GraphKeys.TRAINABLE_VARIABLES)
  )


def gradients(
    ys: Callable[..., Any] | Sequence[Callable[..., Any]],
    xs: Variable | Iterable[Variable],
    grad_ys: Any = None,
    name: str = 'gradients',
    colocate_gradients_with_ops: bool = False,
    gate_gradients: bool = False,
    aggregation_method: int | None = None,
    *,
    return_loss: bool = False,
    has_aux: bool = False,
) -> Any:
  """Returns the gradient of a loss, or of a sum of losses, by each variable.

  Nothing is scaled. Among shards or towers, it is the gradient of the shard's
  own loss, and `apply_gradients` of `CrossShardOptimizer` and `TowerOptimizer`
  sums: the update is that of the sum of all losses. For their mean, divide the
  loss by the number of shards, as `CrossShardOptimizer.compute_gradients` does.
  (Optimizers that divide by a norm of the gradient, such as Adam, hide the
  difference.)

  Args:
    ys: A loss, as in `Optimizer.compute_gradients`, or several.
    xs: The variables.
    grad_ys: The gradient for each loss, of its shape; ones if `None`.
    name: Ignored.
    colocate_gradients_with_ops: Ignored.
    gate_gradients: Ignored.
    aggregation_method: Ignored.
    return_loss: Whether to return what `ys` returned, too.
    has_aux: Whether each loss returns a pair of the loss and a tree of other
      arrays, to return both.

  Returns:
    A list of gradients; `None` where no loss reads the variable. With
    `return_loss` or `has_aux`, a pair of it and what the loss, or the list of
    what each loss, returned.

  Raises:
    TypeError: If a loss is no such function.
    ValueError: If there are no variables, an item is none or of an integer
      type, or `grad_ys` is not one for each loss.

  Examples:
    >>> from shard_transforms import facade
    >>> w = facade.Variable(3.0)
    >>> grads, loss = facade.gradients(lambda: w**2, [w], return_loss=True)
    >>> print(*grads, loss)
    6.0 9.0

  References:
    `tf.gradients` of TensorFlow 1.15.
  """
  is_one = not isinstance(ys, list | tuple)
  losses: list[Any] = [ys] if is_one else list(ys)
  weights = [grad_ys] if is_one or grad_ys is None else list(grad_ys)
  if grad_ys is None:
    weights *= len(losses)
  if not losses or len(weights) != len(losses):
    raise ValueError(
        f'`grad_ys` must have an item for each of {len(losses)} losses, at'
        f' least one, got {grad_ys!r}.'
    )
  found = check_variables(xs, 'xs')
  returns = return_loss or has_aux
  calls, outputs = [], []
  for loss, weight in zip(losses, weights, strict=True):
    run = functools.partial(compute_gradients, var_list=found, grad_loss=weight)
    result = with_loss(run, loss, return_loss, has_aux)
    pairs, out = result if returns else (result, None)
    calls.append([grad for grad, _ in pairs])
    outputs.append(out)
  grads = [_add(of_variable) for of_variable in zip(*calls, strict=True)]
  if not returns:
    return grads
  return grads, outputs[0] if is_one else outputs


def _add(grads):
  """Returns the sum of the gradients that are not `None`."""
  present = [grad for grad in grads if grad is not None]
  return functools.reduce(jnp.add, present) if present else None


def _check_function(loss):
  if not callable(loss):
    raise TypeError(
        '`loss` must be a function of no arguments, or of the values of'
        f' `var_list`, got {loss!r}. Write `lambda: ...` around the loss.'
    )


def scaled(
    loss: Callable[..., npt.ArrayLike], scale: float
) -> Callable[..., npt.ArrayLike]:
  """Returns a loss that is multiplied by a number.

  Raises:
    TypeError: If `loss` is no function.
  """
  _check_function(loss)
  if scale == 1:
    return loss
  return _mapped(loss, lambda out: _as_loss(out) * scale)


def with_loss(
    compute: Callable[[Callable[..., Any]], Any],
    loss: Callable[..., Any],
    return_loss: bool,
    has_aux: bool,
) -> Any:
  """Returns what `compute` returns for a loss, and what the loss returned.

  Args:
    compute: Takes a loss without other results, and differentiates it.
    loss: The loss.
    return_loss: Whether to return what it returned; so does `has_aux`.
    has_aux: Whether it returns a pair of the loss and a tree of arrays.

  Raises:
    TypeError: If `loss` is no function, or returns no pair with `has_aux`.
    ValueError: If `compute` did not evaluate it.
  """
  if not (return_loss or has_aux):
    return compute(loss)
  _check_function(loss)
  returned = frames.Output('of what the loss returned')

  def kept(out):
    if has_aux and not (isinstance(out, tuple) and len(out) == 2):
      raise TypeError(
          '`loss` must return a pair of the loss and other arrays with'
          f' `has_aux`, got {out!r}.'
      )
    value = _as_loss(out[0] if has_aux else out)
    aux = jax.tree.map(lambda x: x, out[1]) if has_aux else None
    frames.write(returned, (value, aux) if has_aux else value)
    return value

  with frames.transaction() as opened:
    result = compute(_mapped(loss, kept))
    out = opened.values.pop(returned, returned.stored)
    for known in (opened.used, opened.written):
      known.pop(returned, None)  # It is no variable of the step.
    if out is None:
      raise ValueError(
          'An optimizer must evaluate the loss that it is given, got one that'
          ' does not: there is nothing for `return_loss` or `has_aux`.'
      )
  return result, out


def _mapped(loss, function):
  """Returns `loss`, followed by a function."""
  return functools.wraps(loss)(lambda *values: function(loss(*values)))


def _differentiate(loss, found, grad_loss, arity):
  """Returns the gradients, and the assignments of the loss."""
  written = []
  prefixes = graph_lib.loss_prefixes()

  def differentiated(values):
    with (
        frames.frame('plain', zip(found, values, strict=True)) as frame,
        contexts.replaced(loss=contexts.Loss(prefixes)),
    ):
      out = _as_loss(loss(*values[:arity]))
      if grad_loss is not None:
        _check_grad_loss(grad_loss, out.shape)
    read = [arity > 0 or v in frame.used for v in found]
    written[:] = frame.written
    total = jnp.sum(out if grad_loss is None else out * grad_loss)
    return total, (read, [frame.values[v] for v in frame.written])

  axes = contexts.mapped_axes()
  if axes:
    value_and_grad = shard_transforms.value_and_grad(
        differentiated, axes, has_aux=True
    )
  else:
    value_and_grad = jax.value_and_grad(differentiated, has_aux=True)
  with contexts.replaced(run=None):
    values = [v.value() for v in found]
  (_, (read, assigned)), grads = value_and_grad(values)
  pairs = zip(grads, read, strict=True)
  return [g if used else None for g, used in pairs], written, assigned


def _arity(loss, num_variables):
  """Returns how many arguments a loss takes: none, or one a variable."""
  signature = inspect.signature(loss)
  kinds = {p.kind for p in signature.parameters.values()}
  if num_variables and inspect.Parameter.VAR_POSITIONAL in kinds:
    return num_variables
  for arity in [0, num_variables or 0]:
    try:
      signature.bind(*range(arity))
      return arity
    except TypeError:
      pass
  wanted = ' where `var_list` is not given'
  if num_variables is not None:
    wanted = f' or of {num_variables}, the length of `var_list`'
  raise ValueError(
      f'`loss` must be a function of no arguments{wanted}, got one of'
      f' {signature}.'
  )


def _as_loss(out):
  """Returns the loss as an array."""
  if isinstance(out, list | tuple):
    raise TypeError(
        f'`loss` must return one array, got {out!r}. Add several losses up; if'
        ' other results come along, give `has_aux=True`.'
    )
  out = variables_lib.as_array(out, '`loss` must return an array')
  if not jnp.issubdtype(out.dtype, jnp.floating):
    raise TypeError(f'`loss` must return real numbers, got {out.dtype}.')
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


def check_variables(
    var_list: Variable | Iterable[Variable], name: str = 'var_list'
) -> list[Variable]:
  """Returns one or several variables, under a name, as a checked list.

  Raises:
    ValueError: If there is none, one twice, one that is not real, or an item is
      no `Variable`.
  """
  found = [var_list] if isinstance(var_list, Variable) else list(var_list)
  for item in found:
    if not isinstance(item, Variable):
      raise ValueError(
          f'`{name}` must hold `facade.Variable`s and nothing else, got'
          f' {item!r}. (`jax.grad` differentiates by arrays.)'
      )
    if not jnp.issubdtype(item.dtype, jnp.floating):
      raise ValueError(
          f'Invalid type {item.dtype} for {item.name}: optimizers take real'
          ' variables. Make it with `trainable=False`.'
      )
  if not found:
    raise ValueError('No variables to optimize.')
  _check_distinct(found)
  return found


def check_pairs(
    grads_and_vars: Iterable[tuple[npt.ArrayLike | None, Variable]],
) -> Pairs:
  """Returns checked pairs, with gradients as arrays or `None`.

  Raises:
    TypeError: If a gradient is no array, or it or its variable not of a
      floating-point type.
    ValueError: If there is no pair, an item is not a pair or has no `Variable`,
      a variable comes twice, or a gradient has another shape than its variable.
  """
  found: Pairs = [_check_pair(pair) for pair in grads_and_vars]
  if not found:
    raise ValueError('No variables provided.')
  _check_distinct([variable for _, variable in found])
  return found


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
  """Returns the gradients that are not `None`, by variable."""
  return {v.op.name: grad for grad, v in pairs if grad is not None}


def of_variables(grads: Any, pairs: Pairs) -> Pairs:
  """Returns pairs with other gradients, by variable; `None` without one."""
  return [(grads.get(v.op.name), v) for _, v in pairs]


def stack(calls: Sequence[Pairs]) -> dict[str, jax.Array]:
  """Returns the gradients of several calls by variable [calls, ...].

  A call whose loss does not read a variable contributes zero.
  """
  given = [by_name(call) for call in calls]
  zeros = {k: jnp.zeros_like(g) for call in given for k, g in call.items()}
  return {
      name: jnp.stack([call.get(name, zero) for call in given])
      for name, zero in zeros.items()
  }


def _check_pair(pair):
  if not isinstance(pair, tuple | list) or len(pair) != 2:
    raise ValueError(
        '`grads_and_vars` must hold pairs of a gradient and its variable, got'
        f' {pair!r}.'
    )
  grad, variable = pair
  if not isinstance(variable, Variable):
    raise ValueError(
        '`grads_and_vars` must hold pairs of a gradient and its'
        f' `facade.Variable`, got {variable!r} in its place.'
    )
  if grad is None:
    return None, variable
  grad = variables_lib.as_array(
      grad, f'The gradient of {variable.name} must be an array or None'
  )
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
