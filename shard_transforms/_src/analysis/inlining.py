"""Programs with calls inlined, in which a value is one object everywhere.

A reader that follows values through a jaxpr, which nests, would have to enter
and leave each call. `flatten` makes one sequence of steps of it. Loops and
branches keep their bodies, because they do not run them exactly once.
"""

from collections.abc import Hashable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.extend

from shard_transforms._src.analysis import interpreter


# Not frozen, because frozen ones take longer to make.
@dataclasses.dataclass(eq=False, slots=True)
class Value:
  """An input or output of a step; equal only to itself.

  Attributes:
    aval: Its type.
    is_literal: Whether it is a literal of the program.
    number: The literal, or the array of a constant, if it is known.
  """

  aval: Any
  is_literal: bool = False
  number: Any = None


class _Around(NamedTuple):
  """The calls and maps around a step.

  Attributes:
    name_stacks: JAX's own records of the scopes, one for each call entered.
    axis_sizes: The sizes of the mapped mesh axes.
  """

  name_stacks: tuple[Any, ...] = ()
  axis_sizes: Mapping[Hashable, int] = {}


def scope(step: interpreter.Step) -> str:
  """Returns the `jax.named_scope`s around a step, outermost first."""
  # Computed only on demand, because it takes longer than everything else about
  # a step, and few steps need it.
  return '/'.join(filter(None, map(str, step.around.name_stacks)))


def axis_sizes(step: interpreter.Step) -> Mapping[Hashable, int]:
  """Returns the sizes of the mapped mesh axes around a step."""
  return step.around.axis_sizes


def label(step: interpreter.Step) -> str:
  """Returns what warnings call a step."""
  scopes = scope(step)
  return f'`{step.name}` in {scopes!r}' if scopes else f'`{step.name}`'


def flatten(
    jaxpr: jax.extend.core.Jaxpr | jax.extend.core.ClosedJaxpr,
) -> interpreter.Program:
  """Returns a program in which only loops and branches have bodies.

  A map becomes a step `shard_map` for each array that enters or leaves it in
  slices, over its `axes`.
  """
  return _flatten_body(jaxpr, _Around())


def _flatten_body(jaxpr, around):
  return _flatten(jaxpr, _new_values(jaxpr.invars), around)


def _new_values(variables: Sequence[Any]) -> tuple[Value, ...]:
  return tuple([Value(variable.aval) for variable in variables])


def _flatten(jaxpr, inputs, around):
  """Returns the steps and outputs of a jaxpr called with these values."""
  constants = _constants(jaxpr)
  variables = *jaxpr.invars, *jaxpr.constvars
  values = dict(zip(variables, (*inputs, *constants), strict=True))
  steps = []
  name_stack = inside = None
  for eqn in jaxpr.eqns:
    if inside is None or eqn.source_info.name_stack is not name_stack:
      name_stack = eqn.source_info.name_stack
      stacks = *around.name_stacks, name_stack
      inside = around._replace(name_stacks=stacks)
    given = _read(eqn.invars, values)
    bodies = interpreter.held(eqn.params) if eqn.params else ()
    called = _called(eqn, bodies, given, inside) if bodies else None
    if called is not None:
      outputs = called.outputs
      steps += called.steps
      constants += called.constants
    else:
      outputs = _new_values(eqn.outvars)
      ends = given, outputs, bodies
      steps.append(interpreter.step_of(eqn, *ends, _flatten_body, inside))
    # A strict `zip` takes three times as long.
    for i, variable in enumerate(eqn.outvars):
      values[variable] = outputs[i]
  outputs = _read(jaxpr.outvars, values)
  return interpreter.Program(inputs, tuple(steps), outputs, constants)


def _constants(jaxpr):
  known = getattr(jaxpr, 'consts', ())
  if len(known) != len(jaxpr.constvars):
    return _new_values(jaxpr.constvars)
  pairs = zip(jaxpr.constvars, known, strict=True)
  return tuple(Value(var.aval, number=array) for var, array in pairs)


def _read(atoms, values):
  """Returns the values of variables; each literal is a new value."""
  return tuple(
      [
          Value(atom.aval, True, atom.val)
          if type(atom) is interpreter.LITERAL
          else values[atom]
          for atom in atoms
      ]
  )


def _called(eqn, bodies, inputs, around):
  """Returns the inlined call or map of an equation, or `None` for a step."""
  if eqn.primitive.name == 'shard_map':
    return _program_of_map(eqn, bodies[0], inputs, around)
  if interpreter.is_call(eqn, bodies):
    return _flatten(bodies[0], inputs, around)
  return None


def _program_of_map(eqn, body, inputs, outside):
  sizes = {**outside.axis_sizes, **eqn.params['mesh'].shape}
  inside = outside._replace(axis_sizes=sizes)
  given, cuts = _cross(inputs, body.invars, eqn.params['in_specs'], inside)
  called = _flatten(body, given, inside)
  outputs, joins = _cross(
      called.outputs, eqn.outvars, eqn.params['out_specs'], outside
  )
  steps = (*cuts, *called.steps, *joins)
  return interpreter.Program(inputs, steps, outputs, called.constants)


def _cross(values, variables, specs, around):
  """Returns the values beyond an edge of a map, and the steps there."""
  made, steps = list(values), []
  for i, spec in enumerate(specs):
    axes = tuple(jax.tree.leaves(tuple(spec)))
    if axes:
      made[i] = Value(variables[i].aval)
      ends = (values[i],), (made[i],), ()
      steps.append(interpreter.Step('shard_map', {'axes': axes}, *ends, around))
  return tuple(made), steps
