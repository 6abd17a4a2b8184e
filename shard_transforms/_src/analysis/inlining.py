"""Flat jaxprs: calls are inlined, and a value is one object everywhere.

An analysis of a nested jaxpr would have to enter and leave each call. `flatten`
converts it to one sequence of equations. Loops and branches keep their bodies,
because they do not run them exactly once.
"""

from collections.abc import Hashable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.extend

from shard_transforms._src.analysis import interpreter


class _Context(NamedTuple):
  """The calls and maps around an equation.

  Attributes:
    name_stacks: JAX's records of the scopes, one per call.
    axis_sizes: The sizes of the mapped mesh axes.
  """

  name_stacks: tuple[Any, ...] = ()
  axis_sizes: Mapping[Hashable, int] = {}


def scope(equation: interpreter.Equation) -> str:
  """Returns the `jax.named_scope`s around an equation, outermost first."""
  # Computed on demand, because it is the most expensive part of an equation,
  # and few equations need it.
  return '/'.join(filter(None, map(str, equation.context.name_stacks)))


def axis_sizes(equation: interpreter.Equation) -> Mapping[Hashable, int]:
  """Returns the sizes of the mapped mesh axes around an equation."""
  return equation.context.axis_sizes


def label(equation: interpreter.Equation) -> str:
  """Returns the description of an equation for warnings."""
  scopes = scope(equation)
  return f'`{equation.name}` in {scopes!r}' if scopes else f'`{equation.name}`'


def flatten(
    jaxpr: jax.extend.core.Jaxpr | jax.extend.core.ClosedJaxpr,
) -> interpreter.Program:
  """Inlines the calls of a jaxpr; only loops and branches keep bodies.

  A map becomes one equation `shard_map` for each array that enters or leaves it
  in slices, over its `axes`.
  """
  return _flatten_body(jaxpr, _Context())


def _flatten_body(jaxpr, context):
  return _flatten(jaxpr, _new_values(jaxpr.invars), context)


def _new_values(variables: Sequence[Any]) -> tuple[interpreter.Value, ...]:
  return tuple([interpreter.Value(variable.aval) for variable in variables])


def _flatten(jaxpr, inputs, context):
  """Returns the equations and outputs of a jaxpr called with these values."""
  constants = _constants(jaxpr)
  variables = *jaxpr.invars, *jaxpr.constvars
  values = dict(zip(variables, (*inputs, *constants), strict=True))
  equations = []
  name_stack = inner_context = None
  for eqn in jaxpr.eqns:
    if inner_context is None or eqn.source_info.name_stack is not name_stack:
      name_stack = eqn.source_info.name_stack
      stacks = *context.name_stacks, name_stack
      inner_context = context._replace(name_stacks=stacks)
    operands = _read(eqn.invars, values)
    bodies = interpreter.sub_jaxprs(eqn.params) if eqn.params else ()
    inlined = _inlined(eqn, bodies, operands, inner_context) if bodies else None
    if inlined is not None:
      outputs = inlined.outputs
      equations += inlined.equations
      constants += inlined.constants
    else:
      outputs = _new_values(eqn.outvars)
      equations.append(_equation(eqn, operands, outputs, bodies, inner_context))
    # A strict `zip` takes three times as long.
    for i, variable in enumerate(eqn.outvars):
      values[variable] = outputs[i]
  outputs = _read(jaxpr.outvars, values)
  return interpreter.Program(inputs, tuple(equations), outputs, constants)


def _equation(eqn, inputs, outputs, bodies, context):
  """Converts an equation, and its bodies.

  A loop of at most one iteration becomes a `cond`, because it only decides
  whether its body runs.
  """
  equation = interpreter.Equation(
      name=interpreter.common_name(eqn.primitive.name),
      params=eqn.params,
      inputs=inputs,
      outputs=outputs,
      bodies=tuple([_flatten_body(body, context) for body in bodies]),
      context=context,
  )
  predicate = _branch_predicate(eqn)
  if predicate is None:
    return equation
  operands = inputs[eqn.params['cond_nconsts'] :]
  body = interpreter.loop(equation).body
  num_carry = len(outputs)
  identity = interpreter.Program(body.inputs, (), body.inputs[-num_carry:])
  return interpreter.Equation(
      name='cond',
      params={},
      inputs=(operands[-num_carry:][predicate], *operands),
      outputs=outputs,
      bodies=(identity, body),
      context=context,
  )


def _branch_predicate(eqn):
  """Returns the index of the carry that makes a loop run at most once.

  The condition of such a loop returns this value, and the body sets it to
  false. `None` for all other equations.
  """
  if eqn.primitive.name != 'while':
    return None
  condition, body = (
      eqn.params[name].jaxpr for name in ('cond_jaxpr', 'body_jaxpr')
  )
  carry = condition.invars[eqn.params['cond_nconsts'] :]
  (is_due,) = condition.outvars
  # A literal is not a variable, and is not hashable in JAX 0.10.
  if isinstance(is_due, interpreter.LITERAL) or is_due not in carry:
    return None
  index = carry.index(is_due)
  next_value = body.outvars[index]
  is_false = isinstance(next_value, interpreter.LITERAL) and not next_value.val
  return index if is_false else None


def _constants(jaxpr):
  arrays = getattr(jaxpr, 'consts', ())
  if len(arrays) != len(jaxpr.constvars):
    return _new_values(jaxpr.constvars)
  pairs = zip(jaxpr.constvars, arrays, strict=True)
  return tuple(
      interpreter.Value(var.aval, constant=array) for var, array in pairs
  )


def _read(atoms, values):
  """Returns the values of variables; each literal becomes a new value."""
  return tuple(
      [
          interpreter.Value(atom.aval, True, atom.val)
          if type(atom) is interpreter.LITERAL
          else values[atom]
          for atom in atoms
      ]
  )


def _inlined(eqn, bodies, inputs, context):
  """Inlines the call or map of an equation; `None` for other equations."""
  if eqn.primitive.name == 'shard_map':
    return _inlined_map(eqn, bodies[0], inputs, context)
  if interpreter.is_call(eqn, bodies):
    return _flatten(bodies[0], inputs, context)
  return None


def _inlined_map(eqn, body, inputs, outer_context):
  # The compiler handles the other axes of the mesh.
  mapped = eqn.params['newly_manual_axes']
  shape = eqn.params['mesh'].shape
  sizes = {**outer_context.axis_sizes, **{axis: shape[axis] for axis in mapped}}
  inner_context = outer_context._replace(axis_sizes=sizes)
  body_inputs, slices = _cross_boundary(
      inputs, body.invars, eqn.params['in_specs'], inner_context
  )
  inlined = _flatten(body, body_inputs, inner_context)
  outputs, joins = _cross_boundary(
      inlined.outputs, eqn.outvars, eqn.params['out_specs'], outer_context
  )
  equations = (*slices, *inlined.equations, *joins)
  return interpreter.Program(inputs, equations, outputs, inlined.constants)


def _cross_boundary(values, variables, specs, context):
  """Returns the values on the other side of a map, and the equations there."""
  results, equations = list(values), []
  for i, spec in enumerate(specs):
    axes = tuple(jax.tree.leaves(tuple(spec)))
    if axes:
      results[i] = interpreter.Value(variables[i].aval)
      equations.append(
          interpreter.Equation(
              name='shard_map',
              params={'axes': axes},
              inputs=(values[i],),
              outputs=(results[i],),
              context=context,
          )
      )
  return tuple(results), equations
