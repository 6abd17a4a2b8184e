"""The check that a value depends on one tree and not only on another.

Types do not show this, but the jaxpr does: it shows, for example, at which
parameters a gradient was taken. A transformation marks the value and both trees
with names of `jax.ad_checkpoint.checkpoint_name`, which the compiler removes.
The names contain the warning, so the check knows no transformation.
"""

from typing import Any

import jax
from jax import ad_checkpoint

from shard_transforms._src.analysis import interpreter
from shard_transforms._src.base import leaves as leaves_lib

_VALUE, _SOURCE, _OTHER = _MARKS = (
    'shard_transforms value: ',
    'shard_transforms source: ',
    'shard_transforms other: ',
)


def mark(
    value: Any, source: Any, other: Any, warning: str
) -> tuple[Any, Any, Any]:
  """Marks three trees in the jaxpr.

  Args:
    value: The value, which should depend on `source`.
    source: The tree on which the value should depend.
    other: The tree on which it depends if the caller has made a mistake.
    warning: The warning if the value depends on `other` and not on `source`.
  """

  def name_leaf(leaf, name):
    if leaves_lib.is_float0(leaf):
      return leaf
    return ad_checkpoint.checkpoint_name(leaf, name)

  def named(tree, mark):
    return jax.tree.map(lambda leaf: name_leaf(leaf, mark + warning), tree)

  return named(value, _VALUE), named(source, _SOURCE), named(other, _OTHER)


def find(program: interpreter.Program) -> tuple[str, ...]:
  """Returns the warnings of values that depend on the wrong tree.

  If a value depends on neither of the trees, as in the branch of an outer gate,
  there is no warning.
  """
  warnings = []
  for warning, values in _marked(program):
    sources = _dependencies(values[_VALUE], program)
    if sources.isdisjoint(values[_SOURCE]) and not sources.isdisjoint(
        values[_OTHER]
    ):
      warnings.append(warning)
  for equation in program.equations:
    for body in equation.bodies:
      warnings += find(body)
  return tuple(dict.fromkeys(warnings))


def _marked(program):
  """Returns, for each call of `mark`, its warning and the values by mark."""
  calls, last = [], None
  for equation in program.equations:
    name = equation.params.get('name') if equation.name == 'name' else ''
    mark = next((mark for mark in _MARKS if name.startswith(mark)), None)
    if mark is None:
      continue
    if mark == _VALUE and last != _VALUE:
      calls.append((name.removeprefix(mark), {x: set() for x in _MARKS}))
    if calls:
      calls[-1][1][mark].update(equation.inputs)
    last = mark
  return calls


def _dependencies(values, program):
  """Returns values and all values that they depend on."""
  dependencies = set(values)
  for equation in reversed(program.equations):
    if not dependencies.isdisjoint(equation.outputs):
      dependencies.update(equation.inputs)
  return dependencies
