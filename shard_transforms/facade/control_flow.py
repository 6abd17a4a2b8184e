"""`group`, `no_op`, `control_dependencies`: of lines that run in order."""

from collections.abc import Iterable
from collections.abc import Iterator
import contextlib
from typing import Any


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
