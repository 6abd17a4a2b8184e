"""Control flow of lines that run in order: `cond`, `group` and others."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
import contextlib
from typing import Any

import jax
from jax import core
import jax.numpy as jnp

from shard_transforms.facade import frames
from shard_transforms.facade import variables


def cond(
    pred: jax.typing.ArrayLike | variables.Variable,
    true_fn: Callable[[], Any],
    false_fn: Callable[[], Any],
    strict: bool = False,
    name: str | None = None,
) -> Any:
  """Chooses between two branches, which may assign to variables.

  Where `pred` is not known, as in a compiled step, both branches compute, each
  from the values before; what one of them assigns or returns is then chosen.
  (In a branch of `jax.lax.cond`, variables cannot be assigned.)

  Args:
    pred: A scalar; the same on all shards if a branch assigns.
    true_fn: A function of no arguments.
    false_fn: The same; returns a tree of the same structure and shapes.
    strict: Ignored.
    name: Ignored.

  Returns:
    What the chosen branch returns.

  Raises:
    ValueError: If the branches return other structures or shapes.

  Examples:
    >>> from shard_transforms import facade
    >>> w = facade.Variable(1.0)
    >>> step = facade.function(
    ...     lambda x: facade.cond(x > 0, lambda: w.assign_add(x), lambda: x)
    ... )
    >>> for x in (2.0, -5.0):
    ...   _ = step(x)
    >>> print(w)
    3.0

  References:
    `tf.cond` of TensorFlow 1.15.
  """
  del strict, name
  chosen = jnp.asarray(pred)
  if not isinstance(chosen, core.Tracer):
    return true_fn() if chosen else false_fn()
  outputs, tried = [], []
  for branch in (true_fn, false_fn):
    with frames.frame('undecided') as opened:
      outputs.append(jax.tree.map(jnp.asarray, branch()))
    tried.append(opened)
  shapes = [jax.tree.map(jnp.shape, output) for output in outputs]
  if shapes[0] != shapes[1]:
    raise ValueError(
        '`true_fn` and `false_fn` must return the same structure and shapes,'
        f' got {shapes[0]} and {shapes[1]}.'
    )
  for variable in {**tried[0].written, **tried[1].written}:
    new = [f.values.get(variable, frames.read(variable)) for f in tried]
    frames.commit([variable], [jnp.where(chosen, *new)])
  return jax.tree.map(lambda x, y: jnp.where(chosen, x, y), *outputs)


def group(*inputs: Any, name: str | None = None) -> None:
  """Stands for operations that have run: lines run in order.

  Args:
    *inputs: What was returned for operations; functions of no arguments are
      called, in this order.
    name: Ignored.

  Examples:
    >>> from shard_transforms import facade
    >>> w, step = facade.Variable(1.0), facade.Variable(0, trainable=False)
    >>> opt = facade.GradientDescentOptimizer(0.5)
    >>> facade.group(opt.minimize(lambda: w, var_list=[w]), step.assign_add(1))
    >>> print(w, step)
    0.5 1

  References:
    `tf.group` of TensorFlow 1.15.
  """
  del name
  _call(inputs)


def no_op(name: str | None = None) -> None:
  """Does nothing.

  Args:
    name: Ignored.

  Examples:
    >>> from shard_transforms import facade
    >>> print(facade.no_op())
    None

  References:
    `tf.no_op` of TensorFlow 1.15.
  """
  del name


@contextlib.contextmanager
def control_dependencies(
    control_inputs: Iterable[Any] | None,
) -> Iterator[None]:
  """Runs the lines inside after those before, as all lines do.

  Args:
    control_inputs: What was returned for operations; functions of no arguments
      are called first.

  Yields:
    `None`.

  Examples:
    >>> from shard_transforms import facade
    >>> w = facade.Variable(1.0)
    >>> with facade.control_dependencies([w.assign(2.0)]):
    ...   print(w)
    2.0

  References:
    `tf.control_dependencies` of TensorFlow 1.15.
  """
  _call(control_inputs or ())
  yield


def _call(operations):
  for operation in operations:
    if callable(operation):
      operation()
