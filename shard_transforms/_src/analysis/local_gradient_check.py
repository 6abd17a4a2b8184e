"""The check that a gradient was taken at the local parameters.

Types do not show this, but the jaxpr shows the values from which the gradient
was computed. The names of `jax.ad_checkpoint.checkpoint_name`, which are
removed by the compiler, mark the gradient and the two sets of parameters.
"""

from typing import Any

import jax
from jax import ad_checkpoint

from shard_transforms._src.analysis import interpreter
from shard_transforms._src.base import leaves as leaves_lib

_GRADIENT, _LOCAL, _SHARED = (
    f'local_updates: {name}'
    for name in ('gradient', 'local parameters', 'shared parameters')
)


def mark(
    gradient: Any, local_params: Any, shared_params: Any
) -> tuple[Any, Any, Any]:
  """Marks three trees with their names in the jaxpr.

  Args:
    gradient: The gradient, which should be taken at `local_params`.
    local_params: The local parameters of a shard.
    shared_params: The parameters that all shards share.
  """
  return (
      _named(gradient, _GRADIENT),
      _named(local_params, _LOCAL),
      _named(shared_params, _SHARED),
  )


def _named(tree, name):
  def name_leaf(leaf):
    if leaves_lib.is_float0(leaf):
      return leaf
    return ad_checkpoint.checkpoint_name(leaf, name)

  return jax.tree.map(name_leaf, tree)


def find(program: interpreter.Program) -> tuple[str, ...]:
  """Returns warnings about gradients at the wrong parameters.

  A gradient is wrong if it depends on the shared parameters and not on the
  local parameters. If it depends on neither, as in the branch of an outer gate,
  there is no warning.
  """
  problems = [_problem(call, program) for call in _calls(program)]
  for equation in program.equations:
    for body in equation.bodies:
      problems += find(body)
  return tuple(dict.fromkeys(filter(None, problems)))


def _calls(program):
  """Returns the marked values of each call, by their mark."""
  calls, last = [], None
  for equation in program.equations:
    name = equation.params.get('name') if equation.name == 'name' else None
    if name not in (_GRADIENT, _LOCAL, _SHARED):
      continue
    if name == _GRADIENT and last != _GRADIENT:
      calls.append({_GRADIENT: set(), _LOCAL: set(), _SHARED: set()})
    if calls:
      calls[-1][name].update(equation.inputs)
    last = name
  return calls


def _problem(call, program):
  sources = _dependencies(call[_GRADIENT], program)
  if sources.isdisjoint(call[_SHARED]) or not sources.isdisjoint(call[_LOCAL]):
    return None
  return (
      'the gradient for `local_updates` was taken at `params`, which are'
      ' constant during a round, and not at the local parameters of each'
      ' shard: take it at `contrib.local_params(params, state)`.'
  )


def _dependencies(values, program):
  """Returns values and all values that they depend on."""
  producer = {
      value: equation
      for equation in program.equations
      for value in equation.outputs
  }
  dependencies, pending = set(), list(values)
  while pending:
    value = pending.pop()
    if value in dependencies:
      continue
    dependencies.add(value)
    if value in producer:
      pending += producer[value].inputs
  return dependencies
