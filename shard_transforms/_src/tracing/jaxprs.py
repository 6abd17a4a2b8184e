"""Programs as JAX has traced them, flat: calls are replaced by what they do."""

from collections.abc import Hashable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
import jax.extend


@dataclasses.dataclass(frozen=True, eq=False)
class Value:
  """What a step takes or gives; equal to itself alone.

  Attributes:
    aval: Its type.
    is_literal: Whether the program names the number itself.
    number: That number.
  """

  aval: Any
  is_literal: bool = False
  number: Any = None


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
  """An operation, or a loop or branch with its bodies.

  Attributes:
    name: The primitive, by one name for all of its variants.
    params: What the primitive is told.
    inputs: What it takes.
    outputs: What it gives.
    scope: The `jax.named_scope`s around it, outermost first.
    axis_sizes: The sizes of the mapped mesh axes around it.
    bodies: The programs that it holds, in the order of the primitive.
  """

  name: str
  params: Mapping[str, Any]
  inputs: tuple[Value, ...]
  outputs: tuple[Value, ...]
  scope: str
  axis_sizes: Mapping[Hashable, int]
  bodies: 'tuple[Program, ...]'

  @property
  def axes(self) -> tuple[Hashable, ...]:
    """The mapped axes that a collective is over."""
    return tuple(axis for axis in self._axes() if not isinstance(axis, int))

  @property
  def positional_axes(self) -> tuple[int, ...]:
    """The axes of its input that it is over as well, as under `jax.vmap`."""
    return tuple(axis for axis in self._axes() if isinstance(axis, int))

  @property
  def label(self) -> str:
    """What a sentence calls it."""
    return (
        f'`{self.name}` in {self.scope!r}' if self.scope else f'`{self.name}`'
    )

  def _axes(self):
    axes = self.params.get('axes', self.params.get('axis_name', ()))
    return axes if isinstance(axes, tuple) else (axes,)


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
  """Steps in the order in which they were traced.

  Attributes:
    inputs: What it takes.
    steps: What it does.
    outputs: What it gives.
  """

  inputs: tuple[Value, ...]
  steps: tuple[Step, ...]
  outputs: tuple[Value, ...]


def flatten(
    jaxpr: jax.extend.core.Jaxpr,
    inputs: Sequence[Value] | None = None,
    scope: str = '',
    axis_sizes: Mapping[Hashable, int] | None = None,
) -> Program:
  """Returns a program in which only loops and branches have bodies.

  Of a map there stays a step `shard_map` for each array that goes in or comes
  out in slices, over its `axes`.

  Args:
    jaxpr: What JAX has traced.
    inputs: What it is called with; `None` for values of its own.
    scope: The scopes around the call.
    axis_sizes: The sizes of the mapped mesh axes around the call.
  """
  if inputs is None:
    inputs = [Value(var.aval) for var in jaxpr.invars]
  axis_sizes = axis_sizes or {}
  values = {var: Value(var.aval) for var in jaxpr.constvars}
  values.update(zip(jaxpr.invars, inputs, strict=True))

  def read(atoms):
    return tuple(
        Value(atom.aval, is_literal=True, number=atom.val)
        if isinstance(atom, jax.extend.core.Literal)
        else values[atom]
        for atom in atoms
    )

  steps = []
  for eqn in jaxpr.eqns:
    stack = str(eqn.source_info.name_stack)
    around = '/'.join(part for part in (scope, stack) if part)
    held = tuple(jax.extend.core.jaxprs_in_params(eqn.params))
    if eqn.primitive.name == 'shard_map':
      sizes = {**axis_sizes, **eqn.params['mesh'].shape}
      specs, own = eqn.params['in_specs'], held[0].invars
      given, cuts = _cross(read(eqn.invars), own, specs, around, sizes)
      called = flatten(held[0], given, around, sizes)
      specs, own = eqn.params['out_specs'], eqn.outvars
      outputs, joins = _cross(called.outputs, own, specs, around, axis_sizes)
      steps += [*cuts, *called.steps, *joins]
    elif _is_call(eqn, held):
      called = flatten(held[0], read(eqn.invars), around, axis_sizes)
      steps += called.steps
      outputs = called.outputs
    else:
      outputs = tuple(Value(var.aval) for var in eqn.outvars)
      step = Step(
          name=_name(eqn.primitive.name),
          params=eqn.params,
          inputs=read(eqn.invars),
          outputs=outputs,
          scope=around,
          axis_sizes=axis_sizes,
          bodies=tuple(flatten(j, None, around, axis_sizes) for j in held),
      )
      steps.append(step)
    values.update(zip(eqn.outvars, outputs, strict=True))
  return Program(tuple(inputs), tuple(steps), read(jaxpr.outvars))


def carry(scan: Step) -> tuple[Value, ...]:
  """Returns those inputs of the body of a scan that are its carry."""
  # How a scan counts its inputs differs between versions of JAX. They are the
  # constants, the carry, and what is scanned; the outputs are the carry and
  # what is stacked. The body lacks an axis of what is scanned or stacked.
  (body,) = scan.bodies
  num_carry = _num_whole(scan.outputs, body.outputs)
  num_whole = _num_whole(scan.inputs, body.inputs)
  return body.inputs[num_whole - num_carry : num_whole]


def _num_whole(outer, inner):
  pairs = zip(outer, inner, strict=True)
  return sum(a.aval.ndim == b.aval.ndim for a, b in pairs)


def _cross(values, variables, specs, scope, axis_sizes):
  """Returns what is made of values at an edge of a map, and the steps there."""
  made, steps = list(values), []
  for i, spec in enumerate(specs):
    axes = tuple(jax.tree.leaves(tuple(spec)))
    if axes:
      made[i] = Value(variables[i].aval)
      ends, params = ((values[i],), (made[i],)), {'axes': axes}
      steps.append(Step('shard_map', params, *ends, scope, axis_sizes, ()))
  return made, steps


def _is_call(eqn, held):
  """Whether an equation runs the one program that it holds, once, as it is."""
  # A scan may look like a call.
  if eqn.primitive.name == 'scan' or len(held) != 1:
    return False
  # A reduction holds what it does to two elements.
  inside = [v.aval for v in (*held[0].invars, *held[0].outvars)]
  outside = [v.aval for v in (*eqn.invars, *eqn.outvars)]
  return len(held[0].invars) == len(eqn.invars) and (
      [x.shape for x in inside] == [x.shape for x in outside]
  )


def _name(primitive):
  # JAX has primitives of their own for what types track (`psum_invariant`) and
  # for what starts early (`psum_start`).
  name = primitive.removeprefix('unreduced_').removesuffix('_start')
  return name.removesuffix('_invariant').removesuffix('_reduced')
