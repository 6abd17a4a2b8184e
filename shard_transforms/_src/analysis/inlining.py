"""Programs with calls inlined, in which a value is one object everywhere.

A reader that follows values through a jaxpr, which nests, would have to enter
and leave each call. `flatten` makes one sequence of steps of it. Loops and
branches keep their bodies, because they do not run them exactly once.
"""

import jax
import jax.extend

from shard_transforms._src.analysis import jaxprs


def flatten(
    jaxpr: jax.extend.core.Jaxpr | jax.extend.core.ClosedJaxpr,
) -> jaxprs.Program:
  """Returns a program in which only loops and branches have bodies.

  A map becomes a step `shard_map` for each array that enters or leaves it in
  slices, over its `axes`. A loop of at most one turn becomes a `cond`: such a
  loop decides whether its body runs, and nothing else.
  """
  return _flatten_body(jaxpr, jaxprs.NOWHERE)


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
      inside = around.within(name_stack)
    given = _read(eqn.invars, values)
    bodies = jaxprs.held(eqn.params) if eqn.params else ()
    called = _called(eqn, bodies, given, inside) if bodies else None
    if called is not None:
      outputs = called.outputs
      steps += called.steps
      constants += called.constants
    else:
      outputs = jaxprs.own_values(eqn.outvars)
      ends = given, outputs, inside
      if bodies:
        steps.append(jaxprs.step_with_bodies(eqn, bodies, *ends, _flatten_body))
      else:
        steps.append(
            jaxprs.Step(
                jaxprs.common_name(eqn.primitive.name), eqn.params, *ends
            )
        )
    # A strict `zip` takes three times as long.
    for i, variable in enumerate(eqn.outvars):
      values[variable] = outputs[i]
  outputs = _read(jaxpr.outvars, values)
  return jaxprs.Program(inputs, tuple(steps), outputs, constants)


def _flatten_body(jaxpr, around):
  return _flatten(jaxpr, jaxprs.own_values(jaxpr.invars), around)


def _constants(jaxpr):
  known = getattr(jaxpr, 'consts', ())
  if len(known) != len(jaxpr.constvars):
    return jaxprs.own_values(jaxpr.constvars)
  pairs = zip(jaxpr.constvars, known, strict=True)
  return tuple(jaxprs.Value(var.aval, number=array) for var, array in pairs)


def _read(atoms, values):
  """Returns the values of variables; each literal is a new value."""
  return tuple(
      [
          jaxprs.Value(atom.aval, True, atom.val)
          if type(atom) is jaxprs.LITERAL
          else values[atom]
          for atom in atoms
      ]
  )


def _called(eqn, bodies, inputs, around):
  """Returns the inlined call or map of an equation, or `None` for a step."""
  if eqn.primitive.name == 'shard_map':
    return _program_of_map(eqn, bodies[0], inputs, around)
  if jaxprs.is_call(eqn, bodies):
    return _flatten(bodies[0], inputs, around)
  return None


def _program_of_map(eqn, body, inputs, outside):
  sizes = {**outside.axis_sizes, **eqn.params['mesh'].shape}
  inside = jaxprs.Surroundings(outside.name_stacks, sizes)
  given, cuts = _cross(inputs, body.invars, eqn.params['in_specs'], inside)
  called = _flatten(body, given, inside)
  outputs, joins = _cross(
      called.outputs, eqn.outvars, eqn.params['out_specs'], outside
  )
  steps = (*cuts, *called.steps, *joins)
  return jaxprs.Program(inputs, steps, outputs, called.constants)


def _cross(values, variables, specs, around):
  """Returns the values beyond an edge of a map, and the steps there."""
  made, steps = list(values), []
  for i, spec in enumerate(specs):
    axes = tuple(jax.tree.leaves(tuple(spec)))
    if axes:
      made[i] = jaxprs.Value(variables[i].aval)
      ends = (values[i],), (made[i],)
      steps.append(jaxprs.Step('shard_map', {'axes': axes}, *ends, around))
  return tuple(made), steps
