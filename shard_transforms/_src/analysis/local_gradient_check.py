"""At which of two sets of parameters a gradient was taken.

No type shows it, but a program shows what the gradient was computed from. The
names of `jax.ad_checkpoint.checkpoint_name`, which cost nothing in the compiled
program, mark where a transformation is given the three.
"""

from typing import Any

import jax
from jax import ad_checkpoint

from shard_transforms._src.analysis import interpreter
from shard_transforms._src.base import leaves as leaves_lib

_GRADIENT, _OWN, _SHARED = (
    f'local_updates: {what}'
    for what in ('gradient', 'own parameters', 'shared parameters')
)


def mark(gradient: Any, own: Any, shared: Any) -> tuple[Any, Any, Any]:
  """Returns three trees, with their names in the program.

  Args:
    gradient: The gradient, which must be that at `own`.
    own: A shard's own parameters, as its state keeps them.
    shared: Parameters that all shards share.
  """
  return (
      _named(gradient, _GRADIENT),
      _named(own, _OWN),
      _named(shared, _SHARED),
  )


def _named(tree, name):
  def name_leaf(leaf):
    if leaves_lib.is_float0(leaf):
      return leaf
    return ad_checkpoint.checkpoint_name(leaf, name)

  return jax.tree.map(name_leaf, tree)


def find(program: interpreter.Program) -> tuple[str, ...]:
  """Returns warnings of gradients that were taken at the wrong parameters.

  That is sure where a gradient depends on the parameters that shards share, and
  not on their own. Where neither is found, as in the branch of an outer gate,
  there is no warning.
  """
  found = [_problem(call, program) for call in _calls(program)]
  for step in program.steps:
    for body in step.bodies:
      found += find(body)
  return tuple(dict.fromkeys(filter(None, found)))


def _calls(program):
  """Returns, for each call, the marked values by their mark."""
  calls, last = [], None
  for step in program.steps:
    name = step.params.get('name') if step.name == 'name' else None
    if name not in (_GRADIENT, _OWN, _SHARED):
      continue
    if name == _GRADIENT and last != _GRADIENT:
      calls.append({_GRADIENT: set(), _OWN: set(), _SHARED: set()})
    if calls:
      calls[-1][name].update(step.inputs)
    last = name
  return calls


def _problem(call, program):
  sources = _sources(call[_GRADIENT], program)
  if sources.isdisjoint(call[_SHARED]) or not sources.isdisjoint(call[_OWN]):
    return None
  return (
      'the gradient that `local_updates` is given was taken at `params`, which'
      " stay as they are for a whole round, and not at each shard's own"
      ' parameters: take it at `shard_transforms.local_params(params, state)`.'
  )


def _sources(values, program):
  """Returns some values of a program, and all that they depend on."""
  made_by = {value: step for step in program.steps for value in step.outputs}
  found, left = set(), list(values)
  while left:
    value = left.pop()
    if value in found:
      continue
    found.add(value)
    if value in made_by:
      left += made_by[value].inputs
  return found
