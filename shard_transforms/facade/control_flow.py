"""Control flow of TensorFlow 1: `cond`, `group` and `control_dependencies`."""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Iterator
import contextlib
from typing import Any

import jax
from jax import core
import jax.numpy as jnp

from shard_transforms.facade import arrays as arrays_lib
from shard_transforms.facade import contexts
from shard_transforms.facade import frames
from shard_transforms.facade import passes
from shard_transforms.facade import variables as variables_lib


def cond(
    pred: jax.typing.ArrayLike | variables_lib.Variable,
    true_fn: Callable[[], Any],
    false_fn: Callable[[], Any],
    strict: bool = False,
    name: str | None = None,
) -> Any:
  """`tf.cond`: chooses between two branches, which may assign to variables.

  In a compiled step, where `pred` is traced, both branches are computed from
  the values before, and the assignments and the result of one are selected;
  `pred` must be the same on all shards if a branch assigns. (The branches of
  `jax.lax.cond` cannot assign to variables.) If one branch returns `None`, so
  does `cond` in a compiled step.

  Examples:
    >>> from shard_transforms import facade
    >>> from shard_transforms.facade import tf
    >>> w = tf.Variable(1.0)
    >>> step = facade.function(
    ...     lambda x: tf.cond(x > 0, lambda: w.assign_add(x), lambda: x)
    ... )
    >>> for x in (2.0, -5.0):
    ...   _ = step(x)
    >>> print(w)
    3.0
  """
  pred_array = jnp.asarray(pred)
  if isinstance(pred_array, core.Tracer):
    return select(pred_array, true_fn, false_fn)
  out = true_fn() if pred_array else false_fn()
  if arrays_lib.is_step() or not isinstance(pred, jax.Array | arrays_lib.Leaf):
    return out
  is_number = type(out) in (int, float) and abs(out) < 2**31
  # Optimizers warn of an array as a rate: this choice is not made again.
  return (
      jnp.asarray(out) if is_number or isinstance(out, arrays_lib.Leaf) else out
  )


def select(
    pred: jax.Array, true_fn: Callable[[], Any], false_fn: Callable[[], Any]
) -> Any:
  """Computes both branches of `cond`, then selects one result.

  Raises:
    ValueError: If the branches return different structures or shapes.
  """
  outputs, frames_of_branches, runs = [], [], []
  before = contexts.current.run
  for branch in (true_fn, false_fn):
    with contexts.replaced(run=before), frames.frame('undecided') as frame:
      outputs.append(jax.tree.map(jnp.asarray, branch()))
      runs.append(contexts.current.run)
    frames_of_branches.append(frame)
  passes.join(runs)
  if any(output is None for output in outputs):
    outputs = [None, None]
  shapes = [jax.tree.map(jnp.shape, output) for output in outputs]
  if shapes[0] != shapes[1]:
    raise ValueError(
        f'`true_fn` of `tf.cond` returned the shapes {shapes[0]}, but'
        f' `false_fn` returned {shapes[1]}. Both must return the same'
        ' structure and shapes.'
    )
  for variable in {
      **frames_of_branches[0].written,
      **frames_of_branches[1].written,
  }:
    new = [
        f.values.get(variable, frames.read(variable))
        for f in frames_of_branches
    ]
    frames.commit([variable], [jnp.where(pred, *new)])
  return jax.tree.map(lambda x, y: jnp.where(pred, x, y), *outputs)


def group(*inputs: Any, name: str | None = None) -> None:
  """`tf.group`: calls those inputs that are functions, in order.

  All other inputs are results of operations that have run already.
  """
  for operation in inputs:
    if callable(operation):
      operation()


def no_op(name: str | None = None) -> None:
  """`tf.no_op`: does nothing."""


@contextlib.contextmanager
def control_dependencies(
    control_inputs: Iterable[Any] | None,
) -> Iterator[None]:
  """`tf.control_dependencies`: runs the lines inside after those before.

  Lines run in order anyway. Inputs that are functions are called first, and a
  variable that is read inside does not cause the warning of a read after an
  assignment.

  Examples:
    >>> from shard_transforms.facade import tf
    >>> w = tf.Variable(1.0)
    >>> with tf.control_dependencies([w.assign(2.0)]):
    ...   print(w)
    2.0
  """
  inputs = tuple(control_inputs or ())
  group(*inputs)
  with passes.after_assignments() if inputs else contextlib.nullcontext():
    yield
