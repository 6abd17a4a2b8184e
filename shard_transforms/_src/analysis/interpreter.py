"""An abstract interpreter of jaxprs.

A jaxpr is evaluated on *facts* instead of arrays: abstract values, such as the
axes over which a value differs between shards. An analysis defines the transfer
function of each primitive and the join of facts. This module contains the part
that all analyses share: branches are joined, and loops are iterated to a fixed
point. `inlining.flatten` converts a jaxpr to the form that is interpreted, in
which calls are inlined.
"""

from collections.abc import Hashable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
from typing import Any, Generic, NamedTuple, TypeVar

import chex
import jax.extend

Fact = TypeVar('Fact')

LITERAL = jax.extend.core.Literal
_JAXPRS = jax.extend.core.Jaxpr, jax.extend.core.ClosedJaxpr


# Not frozen, because frozen instances take longer to create: a tree of 1,000
# leaves has tens of thousands of values and equations.
@dataclasses.dataclass(eq=False, slots=True)
class Value:
  """An input or output of an equation; equal only to itself.

  Attributes:
    aval: Its type.
    is_literal: Whether it is a literal of the jaxpr.
    constant: The literal, or the array of a constant, if it is known.
  """

  aval: Any
  is_literal: bool = False
  constant: Any = None


@dataclasses.dataclass(eq=False, slots=True)
class Equation:
  """An operation, or a loop or branch with its bodies.

  Attributes:
    name: The primitive, with one name for all of its variants.
    params: The parameters of the primitive.
    inputs: Its inputs.
    outputs: Its outputs.
    bodies: The jaxprs in its parameters, in the order of the primitive.
    context: The calls and maps around it, for `inlining`.
  """

  name: str
  params: Mapping[str, Any]
  inputs: Sequence[Value]
  outputs: Sequence[Value]
  bodies: 'tuple[Program, ...]' = ()
  context: Any = None

  @property
  def axes(self) -> tuple[Hashable, ...]:
    """The mapped axes that a collective is over."""
    return mapped_axes(self.params)


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
  """A jaxpr, as equations in the order in which they were traced.

  Attributes:
    inputs: Its inputs.
    equations: Its equations.
    outputs: Its outputs.
    constants: Its constants, including those of inlined calls.
  """

  inputs: Sequence[Value]
  equations: Sequence[Equation]
  outputs: Sequence[Value]
  constants: Sequence[Value] = ()

  def all_equations(self) -> Iterator[Equation]:
    """Yields the equations, each followed by those of its bodies."""
    for equation in self.equations:
      yield equation
      for body in equation.bodies:
        yield from body.all_equations()


class Analysis(Generic[Fact]):
  """An analysis: facts, transfer functions and joins.

  Facts form a lattice. `join` must return an upper bound of its arguments,
  which is the first argument if the others do not change it, and ascending
  chains must be finite; otherwise the fixed point of a loop would not be
  reached.
  """

  def constant(self, value: Value) -> Fact:
    """Returns the fact for a literal or a constant."""
    raise NotImplementedError

  def join(self, facts: Sequence[Fact]) -> Fact:
    """Returns the fact for a value that is one of several."""
    raise NotImplementedError

  def primitive(
      self, equation: Equation, facts: Sequence[Fact]
  ) -> Sequence[Fact]:
    """Returns the facts for the results of an equation without known bodies."""
    raise NotImplementedError

  def sub_jaxpr_inputs(self, equation: Equation, facts: Sequence[Fact]) -> Fact:
    """Returns the fact for all inputs of the bodies of an unknown equation.

    Such an equation is neither a branch nor a loop, for example a linear
    solver.
    """
    del equation
    return self.join(facts)

  def select(
      self, equation: Equation, predicate: Fact, facts: Sequence[Fact]
  ) -> Sequence[Fact]:
    """Returns the facts for the results of a `cond` or `while`.

    Independent of the predicate, they would be `facts`.
    """
    del equation, predicate
    return facts

  def loop_carry(self, fact: Fact) -> Fact:
    """Returns the initial fact for a carried value inside a loop."""
    return fact

  def scan_slice(self, fact: Fact) -> Fact:
    """Returns the fact for a slice of a scanned array, or a stacked result."""
    return fact


def interpret(
    program: Program, facts: Sequence[Fact], analysis: Analysis[Fact]
) -> list[Fact]:
  """Evaluates a jaxpr on facts of its inputs; returns facts of its results."""
  fact_of = dict(zip(program.inputs, facts, strict=True))

  def facts_of(values):
    return [
        fact_of[value] if value in fact_of else analysis.constant(value)
        for value in values
    ]

  for equation in program.equations:
    operands = facts_of(equation.inputs)
    if equation.bodies:
      results = _run_bodies(equation, operands, analysis)
    else:
      results = analysis.primitive(equation, operands)
    # A strict `zip` takes three times as long.
    for i, value in enumerate(equation.outputs):
      fact_of[value] = results[i]
  return facts_of(program.outputs)


def _run_bodies(equation, facts, analysis):
  if equation.name == 'cond':
    predicate, *operands = facts
    results_of_branches = [
        interpret(body, operands, analysis) for body in equation.bodies
    ]
    joined = [
        analysis.join(results)
        for results in zip(*results_of_branches, strict=True)
    ]
    return analysis.select(equation, predicate, joined)
  if equation.name in ('scan', 'while'):
    return _run_loop(equation, facts, analysis)
  fact_inside = analysis.sub_jaxpr_inputs(equation, facts)
  for body in equation.bodies:
    interpret(body, [fact_inside] * len(body.inputs), analysis)
  return analysis.primitive(equation, facts)


def _run_loop(equation, facts, analysis):
  parts = loop(equation)
  first = parts.num_condition + parts.num_read
  read, carried_facts = facts[parts.num_condition : first], facts[first:]
  results = equation.outputs[parts.num_carry :]
  if not equation.params.get('length', 1):
    # A scan without iterations, whose body does not run.
    return [*carried_facts[: parts.num_carry], *map(analysis.constant, results)]
  rows = list(map(analysis.scan_slice, carried_facts[parts.num_carry :]))
  previous_carry, results_of_body = None, []
  carry = list(map(analysis.loop_carry, carried_facts[: parts.num_carry]))
  # An iteration reads the carry of the previous one.
  while carry != previous_carry:
    previous_carry = carry
    results_of_body = interpret(parts.body, [*read, *carry, *rows], analysis)
    next_carry = results_of_body[: parts.num_carry]
    carry = list(map(analysis.join, zip(carry, next_carry, strict=True)))
  if parts.condition is not None:
    condition_reads = facts[: parts.num_condition]
    (predicate,) = interpret(parts.condition, condition_reads + carry, analysis)
    return analysis.select(equation, predicate, carry)
  stacks = map(analysis.scan_slice, results_of_body[parts.num_carry :])
  # The carry of the last iteration.
  return [*results_of_body[: parts.num_carry], *stacks]


class Loop(NamedTuple):
  """The parts of a `scan` or `while`.

  Attributes:
    body: The jaxpr of an iteration.
    condition: The jaxpr that decides whether there is another iteration; `None`
      in a scan.
    num_carry: The number of values that an iteration passes to the next.
    num_read: The number of inputs of the body before the carry.
    num_condition: The number of inputs that only the condition reads.
  """

  body: Program
  condition: Program | None
  num_carry: int
  num_read: int
  num_condition: int = 0


def loop(equation: Equation) -> Loop:
  """Returns the parts of a `scan` or `while`."""
  if equation.name == 'while':
    names = [name for name in equation.params if name.endswith('_jaxpr')]
    bodies = dict(zip(names, equation.bodies, strict=True))
    return Loop(
        bodies['body_jaxpr'],
        bodies['cond_jaxpr'],
        len(equation.outputs),
        equation.params['body_nconsts'],
        equation.params['cond_nconsts'],
    )
  # The parameters of a scan differ between versions of JAX. Its inputs are the
  # constants, the carry, and the scanned arrays; its outputs are the carry and
  # the stacked arrays. In the body, scanned and stacked arrays lack an axis.
  (body,) = equation.bodies
  num_carry = _num_unsliced(equation.outputs, body.outputs)
  num_read = _num_unsliced(equation.inputs, body.inputs) - num_carry
  carry = body.inputs[num_read : num_read + num_carry]
  chex.assert_equal(_types(carry), _types(body.outputs[:num_carry]))
  return Loop(body, None, num_carry, num_read)


def _num_unsliced(outer, inner):
  pairs = zip(outer, inner, strict=True)
  return sum(a.aval.ndim == b.aval.ndim for a, b in pairs)


def _types(values):
  return [(value.aval.shape, value.aval.dtype) for value in values]


def sub_jaxprs(params: Mapping[str, Any]) -> list[Any]:
  """Returns the jaxprs in the parameters of an equation."""
  # `jax.extend.core.jaxprs_in_params` would drop the constants.
  jaxprs = []
  for param in params.values():
    if isinstance(param, _JAXPRS):
      jaxprs.append(param)
    elif isinstance(param, tuple):
      jaxprs += [item for item in param if isinstance(item, _JAXPRS)]
  return jaxprs


def is_call(eqn: jax.extend.core.JaxprEqn, bodies: Sequence[Any]) -> bool:
  """Whether an equation runs its only jaxpr once, unchanged."""
  # A scan without scanned or stacked arrays has the form of a call.
  if eqn.primitive.name == 'scan' or len(bodies) != 1:
    return False
  (body,) = bodies
  if len(body.invars) != len(eqn.invars):
    return False
  # So does a `lax.reduce` of one array: its inputs are the array and the
  # initial value, and those of its body two elements. Only the shapes differ.
  return _shapes(body) == _shapes(eqn)


def _shapes(program):
  return [v.aval.shape for v in (*program.invars, *program.outvars)]


@functools.cache
def common_name(primitive: str) -> str:
  """Returns one name for all variants of a primitive."""
  # JAX has separate primitives for tracked types (`psum_invariant`), for
  # asynchronous starts (`psum_start`), and for a source that is not a constant
  # (`pbroadcast_dynamic`); JAX 0.10 ends some names in `_p`.
  name = primitive.removeprefix('unreduced_').removesuffix('_p')
  for suffix in ('_start', '_invariant', '_reduced', '_dynamic'):
    name = name.removesuffix(suffix)
  return name


def mapped_axes(params: Mapping[str, Any]) -> tuple[Hashable, ...]:
  """Returns the mapped axes that a collective of these parameters is over."""
  return tuple(a for a in all_axes(params) if not isinstance(a, int))


def all_axes(params: Mapping[str, Any]) -> tuple[Hashable, ...]:
  """Returns the axes of a collective; integers are axes of its input."""
  axes = params.get('axes', params.get('axis_name', ()))
  return axes if isinstance(axes, tuple) else (axes,)
