"""Gradients of a loss with respect to variables."""

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
from shard_transforms.facade import arrays as arrays_lib
from shard_transforms.facade import contexts
from shard_transforms.facade import frames
from shard_transforms.facade import graph as graph_lib
from shard_transforms.facade import lookup
from shard_transforms.facade import pairs as pairs_lib
from shard_transforms.facade import passes
from shard_transforms.facade import scopes
from shard_transforms.facade import variables as variables_lib

Variable = variables_lib.Variable


def compute_gradients(
    loss: Callable[..., npt.ArrayLike],
    var_list: Variable | Iterable[Variable] | None = None,
    grad_loss: jax.typing.ArrayLike | Variable | None = None,
) -> pairs_lib.Pairs:
  """Returns pairs of a gradient and its variable, in the order of `var_list`.

  See `Optimizer.compute_gradients`. Among shards, each shard has the gradient
  of its own loss.

  Raises:
    TypeError: If `loss` is not such a function.
    ValueError: If an argument is wrong, `loss` is already reduced over the
      shards, or it creates new variables each time.
  """
  _check_function(loss)
  requested = None if var_list is None else pairs_lib.check_variables(var_list)
  arity = _arity(loss, None if requested is None else len(requested))
  # The first evaluation may create variables, which do not have gradients yet;
  # the second also differentiates with respect to these.
  repeated_loss = passes.from_present_pass(loss)
  for _ in range(2):
    variables = _all_trainable() if requested is None else requested
    if variables:
      pairs_lib.check_variables(variables)
    grads, written, assigned = _differentiate(
        repeated_loss, variables, grad_loss, arity
    )
    trainable = lookup.trainable_variables() if requested is None else requested
    if set(trainable) <= set(variables):
      pairs_lib.check_variables(trainable)
      frames.commit(written, assigned)
      towers = contexts.towers()
      if towers is not None:  # Assignments of the loss count for each tower.
        values = zip(written, assigned, strict=True)
        towers.assigned |= {v: x for v, x in values if isinstance(v, Variable)}
      pairs = zip(grads, variables, strict=True)
      return [(grad, v) for grad, v in pairs if v in trainable]
  raise ValueError(
      'The loss created new variables each time it was evaluated. Create them'
      ' with `tf.get_variable`, which finds them again, or outside of the loss.'
  )


def _all_trainable():
  """Returns the trainable variables, including those hidden from this call."""
  graph = graph_lib.get_default_graph()
  return list(graph.get_collection_ref(graph_lib.GraphKeys.TRAINABLE_VARIABLES))


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
  """`tf.gradients`: the gradients of a loss, or of a sum of losses.

  Nothing is scaled. Among shards or towers, it is the gradient of the shard's
  own loss, and `apply_gradients` of `CrossShardOptimizer` and `TowerOptimizer`
  sums, so that the update is that of the sum of all losses. For their mean,
  divide the loss by the number of shards, as
  `CrossShardOptimizer.compute_gradients` does. (Optimizers that divide by a
  norm of the gradient, such as Adam, hide the difference.)

  Args:
    ys: A loss, as in `Optimizer.compute_gradients`, or a list of losses.
    xs: The variables.
    grad_ys: The gradient with respect to each loss; ones if `None`.
    name: Ignored.
    colocate_gradients_with_ops: Ignored.
    gate_gradients: Ignored.
    aggregation_method: Ignored.
    return_loss: Whether to also return the result of `ys`.
    has_aux: Whether each loss returns a pair of the loss and a tree of other
      arrays; both are returned.

  Returns:
    A list of gradients, `None` for variables that no loss reads. With
    `return_loss` or `has_aux`, a pair of this list and the result of the loss,
    or the list of results.

  Raises:
    TypeError: If a loss is not such a function.
    ValueError: If there are no variables, an item is not a `Variable` of a
      floating-point type, or `grad_ys` does not match the losses.

  Examples:
    >>> from shard_transforms.facade import tf
    >>> w = tf.Variable(3.0)
    >>> grads, loss = tf.gradients(lambda: w**2, [w], return_loss=True)
    >>> print(*grads, loss)
    6.0 9.0
  """
  is_single = not isinstance(ys, list | tuple)
  losses: list[Any] = [ys] if is_single else list(ys)
  weights = [grad_ys] if is_single or grad_ys is None else list(grad_ys)
  if grad_ys is None:
    weights *= len(losses)
  if not losses or len(weights) != len(losses):
    raise ValueError(
        f'`tf.gradients` got {len(losses)} losses and {grad_ys!r} as `grad_ys`.'
        ' Pass at least one loss, and one item of `grad_ys` for each.'
    )
  variables = pairs_lib.check_variables(xs, 'xs')
  returns_outputs = return_loss or has_aux
  calls, outputs = [], []
  for loss, weight in zip(losses, weights, strict=True):
    run = functools.partial(
        compute_gradients, var_list=variables, grad_loss=weight
    )
    result = with_loss(run, loss, return_loss, has_aux)
    pairs, out = result if returns_outputs else (result, None)
    calls.append([grad for grad, _ in pairs])
    outputs.append(out)
  grads = [_add(of_variable) for of_variable in zip(*calls, strict=True)]
  if not returns_outputs:
    return grads
  return grads, outputs[0] if is_single else outputs


def _add(grads):
  """Returns the sum of the gradients that are not `None`."""
  present = [grad for grad in grads if grad is not None]
  return functools.reduce(jnp.add, present) if present else None


def _check_function(loss):
  if not callable(loss):
    raise TypeError(
        f'`loss` must be a function, got {loss!r}. Write `lambda: ...` around'
        ' the lines that compute it.'
    )


def scaled(
    loss: Callable[..., npt.ArrayLike], scale: float
) -> Callable[..., npt.ArrayLike]:
  """Returns a loss that is multiplied by a number.

  Raises:
    TypeError: If `loss` is not a function.
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
  """Returns the result of `compute`, and the result of the loss if requested.

  Args:
    compute: Differentiates a loss that returns only a number.
    loss: The loss.
    return_loss: Whether to return the result of the loss; implied by `has_aux`.
    has_aux: Whether the loss returns a pair of a number and a tree of arrays.

  Raises:
    TypeError: If `loss` is not a function, or does not return a pair with
      `has_aux`.
    ValueError: If `compute` did not evaluate the loss.
  """
  if not (return_loss or has_aux):
    return compute(loss)
  _check_function(loss)
  output = frames.Output('the result of the loss')

  def record(value_or_pair):
    if has_aux and not (
        isinstance(value_or_pair, tuple) and len(value_or_pair) == 2
    ):
      raise TypeError(
          'With `has_aux=True`, `loss` must return a pair of the loss and other'
          f' arrays, but it returned {value_or_pair!r}.'
      )
    value = _as_loss(value_or_pair[0] if has_aux else value_or_pair)
    aux = jax.tree.map(lambda x: x, value_or_pair[1]) if has_aux else None
    frames.write(output, (value, aux) if has_aux else value)
    return value

  with frames.transaction() as frame:
    result = compute(_mapped(loss, record))
    value_or_pair = frame.values.pop(output, output.stored)
    for variables in (frame.used, frame.written):
      variables.pop(output, None)  # It is not a variable of the step.
    if value_or_pair is None:
      raise ValueError(
          'The optimizer did not evaluate the loss, so `return_loss` and'
          ' `has_aux` do not have a result to return. Call the loss in'
          ' `compute_gradients`, or leave both arguments out.'
      )
  return result, value_or_pair


def _mapped(loss, function):
  """Returns `loss` followed by a function of its result."""
  return functools.wraps(loss)(lambda *values: function(loss(*values)))


def _differentiate(loss, variables, grad_loss, arity):
  """Returns the gradients, and the variables that the loss assigns."""
  written = []
  prefixes = scopes.loss_prefixes()

  def differentiated(values):
    with (
        frames.frame('plain', zip(variables, values, strict=True)) as frame,
        contexts.replaced(loss=contexts.Loss(prefixes)),
    ):
      out = _as_loss(loss(*values[:arity]))
      if grad_loss is not None:
        _check_grad_loss(grad_loss, out.shape)
    read = [arity > 0 or v in frame.used for v in variables]
    written[:] = frame.written
    total = jnp.sum(out if grad_loss is None else out * grad_loss)
    return total, (read, [frame.values[v] for v in frame.written])

  axis_names = contexts.mapped_axes()
  if axis_names:
    value_and_grad = shard_transforms.value_and_grad(
        differentiated, axis_names, has_aux=True
    )
  else:
    value_and_grad = jax.value_and_grad(differentiated, has_aux=True)
  with contexts.replaced(run=None):
    values = [v.value() for v in variables]
  (_, (read, assigned)), grads = value_and_grad(values)
  pairs = zip(grads, read, strict=True)
  return [g if is_read else None for g, is_read in pairs], written, assigned


def _arity(loss, num_variables):
  """Returns the number of arguments of a loss: 0, or the number of variables.

  Raises:
    ValueError: If the loss takes another number.
  """
  signature = inspect.signature(loss)
  parameter_kinds = {p.kind for p in signature.parameters.values()}
  if num_variables and inspect.Parameter.VAR_POSITIONAL in parameter_kinds:
    return num_variables
  for arity in [0, num_variables or 0]:
    try:
      signature.bind(*range(arity))
      return arity
    except TypeError:
      pass
  alternative = ' if `var_list` is None'
  if num_variables is not None:
    alternative = f' or {num_variables}, the length of `var_list`'
  raise ValueError(
      f'`loss` takes the arguments {signature}. It must take no'
      f' arguments{alternative}.'
  )


def _as_loss(out):
  """Converts the result of a loss to an array.

  Raises:
    TypeError: If it is not one real array.
  """
  if isinstance(out, list | tuple):
    raise TypeError(
        f'`loss` must return one array, got {out!r}. Add several losses; to'
        ' also return other arrays, pass `has_aux=True`.'
    )
  out = arrays_lib.as_array(out, '`loss` must return an array')
  if not jnp.issubdtype(out.dtype, jnp.floating):
    raise TypeError(f'`loss` must return real numbers, got {out.dtype}.')
  return out


def _check_grad_loss(grad_loss, shape):
  """Checks `grad_loss`.

  Raises:
    TypeError: If it is not a real array.
    ValueError: If its shape is not that of the loss.
  """
  is_array = hasattr(grad_loss, 'shape') or isinstance(grad_loss, int | float)
  if not is_array:
    raise TypeError(f'`grad_loss` must be an array, got {grad_loss!r}.')
  dtype = jnp.result_type(grad_loss)
  if not any(jnp.issubdtype(dtype, k) for k in (jnp.integer, jnp.floating)):
    raise TypeError(f'`grad_loss` must hold real numbers, got {dtype}.')
  if jnp.shape(grad_loss) not in ((), shape):
    raise ValueError(
        f'`grad_loss` has the shape {jnp.shape(grad_loss)}, but the loss has'
        f' the shape {shape}.'
    )
