"""An abstract interpreter of jaxprs, the programs that JAX traces.

A program runs on *kinds* in place of arrays: what a reader wants to know of a
value, such as the axes over which it differs between shards. A reader says what
it knows of each primitive and how kinds join. What all readers share is here:
branches are joined, loops run until the kinds of their carry stay the same, and
calls are entered.

A jaxpr nests: what `jax.jit`, `jax.checkpoint`, a custom derivative or
`jax.shard_map` calls is a jaxpr of its own, with variables of its own. `view`
reads it as it is; `inlining.flatten` makes one sequence of steps of it.
"""

from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
from typing import Any, Generic, NamedTuple, TypeVar

import chex
import jax.extend

Kind = TypeVar('Kind')

LITERAL = jax.extend.core.Literal
_JAXPRS = jax.extend.core.Jaxpr, jax.extend.core.ClosedJaxpr

# An input or output of a step: in a `view` a variable or literal of JAX, which
# only has an `aval`; after `inlining.flatten` an `inlining.Value`.
Value = Any

# The name of a step that runs its body once, as it is, in a `view`.
CALL = 'call of a body'


# Not frozen, because frozen ones take longer to make: a tree of 1,000 leaves
# makes tens of thousands of them.
@dataclasses.dataclass(eq=False, slots=True)
class Step:
  """An operation, or a loop or branch with its bodies.

  Attributes:
    name: The primitive, by one name for all of its variants.
    params: The parameters of the primitive.
    inputs: Its inputs.
    outputs: Its outputs.
    bodies: The programs in its parameters, in the order of the primitive.
    around: What `inlining` knows of the calls and maps around it.
  """

  name: str
  params: Mapping[str, Any]
  inputs: Sequence[Value]
  outputs: Sequence[Value]
  bodies: 'tuple[Program, ...]' = ()
  around: Any = None

  @property
  def axes(self) -> tuple[Hashable, ...]:
    """The mapped axes that a collective is over."""
    return mapped_axes(self.params)


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
  """Steps in the order in which they were traced.

  Attributes:
    inputs: Its inputs.
    steps: Its steps.
    outputs: Its outputs.
    constants: The constants of it and of the programs that it calls.
  """

  inputs: Sequence[Value]
  steps: Sequence[Step]
  outputs: Sequence[Value]
  constants: Sequence[Value] = ()


class Reader(Generic[Kind]):
  """The questions of a reader about a program.

  Kinds are ordered by how little they say. `join` must give a kind that says no
  more than any of those given, and the first of them if the others add nothing;
  and there must be no endless chain of such kinds. Otherwise a loop would not
  end.
  """

  def constant(self, value: Value) -> Kind:
    """Returns the kind of a literal or a constant."""
    raise NotImplementedError

  def join(self, kinds: Sequence[Kind]) -> Kind:
    """Returns the kind of a value that is one of several."""
    raise NotImplementedError

  def primitive(self, step: Step, kinds: Sequence[Kind]) -> Sequence[Kind]:
    """Returns the kinds of the results of a step without known bodies."""
    raise NotImplementedError

  def inside(self, step: Step, kinds: Sequence[Kind]) -> Kind:
    """Returns the kind of all inputs of bodies that a step runs somehow.

    Such a step is no branch and no loop; a linear solver is one.
    """
    del step
    return self.join(kinds)

  def chosen(
      self, step: Step, predicate: Kind, kinds: Sequence[Kind]
  ) -> Sequence[Kind]:
    """Returns the kinds of what a `cond` or `while` returns.

    Without the predicate, which decides, they would be `kinds`.
    """
    del step, predicate
    return kinds

  def carried(self, kind: Kind) -> Kind:
    """Returns what is known in a loop of a value that its turns change."""
    return kind

  def row(self, kind: Kind) -> Kind:
    """Returns the kind of one turn's part of a scanned array, or the reverse.

    That is an array that stacks results of all turns.
    """
    return kind


def interpret(
    program: Program, kinds: Sequence[Kind], reader: Reader[Kind]
) -> list[Kind]:
  """Returns the kinds of the results of a program on inputs of these kinds."""
  # By identity: a literal of JAX has no hash in 0.10.
  found = dict(zip(map(id, program.inputs), kinds, strict=True))

  def of(values):
    return [
        found[id(value)] if id(value) in found else reader.constant(value)
        for value in values
    ]

  for step in program.steps:
    given = of(step.inputs)
    if step.bodies:
      results = _run_bodies(step, given, reader)
    else:
      results = reader.primitive(step, given)
    # A strict `zip` takes three times as long.
    for i, value in enumerate(step.outputs):
      found[id(value)] = results[i]
  return of(program.outputs)


def _run_bodies(step, kinds, reader):
  if step.name == CALL:
    return interpret(step.bodies[0], kinds, reader)
  if step.name == 'cond':
    predicate, *given = kinds
    ends = [interpret(body, given, reader) for body in step.bodies]
    joined = [reader.join(results) for results in zip(*ends, strict=True)]
    return reader.chosen(step, predicate, joined)
  if step.name in ('scan', 'while'):
    return _run_loop(step, kinds, reader)
  inside = reader.inside(step, kinds)
  for body in step.bodies:
    interpret(body, [inside] * len(body.inputs), reader)
  return reader.primitive(step, kinds)


def _run_loop(step, kinds, reader):
  parts = loop(step)
  first = parts.num_condition + parts.num_read
  read, given = kinds[parts.num_condition : first], kinds[first:]
  results = step.outputs[parts.num_carry :]
  if not step.params.get('length', 1):
    # A scan without turns, whose body sends nothing.
    return [*given[: parts.num_carry], *map(reader.constant, results)]
  rows = list(map(reader.row, given[parts.num_carry :]))
  before, ends = None, []
  carry = list(map(reader.carried, given[: parts.num_carry]))
  # A turn may read what the one before it has put into the carry.
  while carry != before:
    before = carry
    ends = interpret(parts.body, [*read, *carry, *rows], reader)
    carried = zip(carry, ends[: parts.num_carry], strict=True)
    carry = list(map(reader.join, carried))
  if parts.condition is not None:
    condition_reads = kinds[: parts.num_condition]
    (go_on,) = interpret(parts.condition, condition_reads + carry, reader)
    return reader.chosen(step, go_on, carry)
  stacks = map(reader.row, ends[parts.num_carry :])
  # The carry is that of the last turn.
  return [*ends[: parts.num_carry], *stacks]


class Loop(NamedTuple):
  """The parts of a `scan` or `while`.

  Attributes:
    body: What each turn runs.
    condition: What decides whether there is another turn; `None` in a scan.
    num_carry: The number of values that a turn passes to the next.
    num_read: The number of inputs of the body before these.
    num_condition: The number of inputs that the condition alone reads.
  """

  body: Program
  condition: Program | None
  num_carry: int
  num_read: int
  num_condition: int = 0


def loop(step: Step) -> Loop:
  """Returns the parts of a `scan` or `while`."""
  if step.name == 'while':
    names = [name for name in step.params if name.endswith('_jaxpr')]
    bodies = dict(zip(names, step.bodies, strict=True))
    return Loop(
        bodies['body_jaxpr'],
        bodies['cond_jaxpr'],
        len(step.outputs),
        step.params['body_nconsts'],
        step.params['cond_nconsts'],
    )
  # The parameters of a scan differ between versions of JAX. Its inputs are the
  # constants, the carry, and the scanned arrays; its outputs are the carry and
  # the stacked arrays. In the body, scanned and stacked arrays lack an axis.
  (body,) = step.bodies
  num_carry = _num_whole(step.outputs, body.outputs)
  num_read = _num_whole(step.inputs, body.inputs) - num_carry
  carry = body.inputs[num_read : num_read + num_carry]
  chex.assert_equal(_types(carry), _types(body.outputs[:num_carry]))
  return Loop(body, None, num_carry, num_read)


def _num_whole(outer, inner):
  pairs = zip(outer, inner, strict=True)
  return sum(a.aval.ndim == b.aval.ndim for a, b in pairs)


def _types(values):
  return [(value.aval.shape, value.aval.dtype) for value in values]


def view(jaxpr: Any, around: None = None) -> Program:
  """Returns a jaxpr as a program without a copy, to be read once in each trace.

  Its steps can only be iterated over. A call or a map is a step `CALL` with a
  body.
  """
  del around
  steps: Any = _Equations(jaxpr)
  return Program(jaxpr.invars, steps, jaxpr.outvars)


@dataclasses.dataclass(frozen=True, eq=False)
class _Equations:
  """The steps of a jaxpr, each made when it is reached and not kept."""

  jaxpr: Any

  def __iter__(self) -> Iterator[Step]:
    for eqn in self.jaxpr.eqns:
      name, ends = eqn.primitive.name, (eqn.invars, eqn.outvars)
      bodies = held(eqn.params) if eqn.params else ()
      if not bodies:
        yield Step(common_name(name), eqn.params, *ends)
      elif name == 'shard_map' or is_call(eqn, bodies):
        yield Step(CALL, {}, *ends, (view(bodies[0]),))
      else:
        yield step_of(eqn, *ends, bodies, view)


def step_of(
    eqn: jax.extend.core.JaxprEqn,
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    bodies: Sequence[Any],
    read: Callable[[Any, Any], Program],
    around: Any = None,
) -> Step:
  """Returns the step of an equation; its bodies become programs by `read`.

  A loop of at most one turn becomes a `cond`: such a loop decides whether its
  body runs, and nothing else.
  """
  name = common_name(eqn.primitive.name)
  if not bodies:
    return Step(name, eqn.params, inputs, outputs, (), around)
  programs = tuple([read(body, around) for body in bodies])
  decision = _decision(eqn)
  if decision is None:
    return Step(name, eqn.params, inputs, outputs, programs, around)
  given = inputs[eqn.params['cond_nconsts'] :]
  body = loop(Step(name, eqn.params, inputs, outputs, programs)).body
  kept = Program(body.inputs, (), body.inputs[-len(outputs) :])
  ends = (given[-len(outputs) :][decision], *given), outputs
  return Step('cond', {}, *ends, (kept, body), around)


def _decision(eqn):
  """Returns which value of its carry makes a loop run once, or not at all.

  The condition of such a loop returns that value as it is, and the body makes
  it false. `None` for all other equations.
  """
  if eqn.primitive.name != 'while':
    return None
  condition, body = (
      eqn.params[name].jaxpr for name in ('cond_jaxpr', 'body_jaxpr')
  )
  carry = condition.invars[eqn.params['cond_nconsts'] :]
  (is_due,) = condition.outvars
  # A literal is no variable, and has no hash in JAX 0.10.
  if isinstance(is_due, LITERAL) or is_due not in carry:
    return None
  number = carry.index(is_due)
  next_one = body.outvars[number]
  ends = isinstance(next_one, LITERAL) and not next_one.val
  return number if ends else None


def held(params: Mapping[str, Any]) -> list[Any]:
  """Returns the jaxprs in the parameters of an equation."""
  # Those of `jax.extend.core.jaxprs_in_params` come without their constants.
  found = []
  for param in params.values():
    if isinstance(param, _JAXPRS):
      found.append(param)
    elif isinstance(param, tuple):
      found += [item for item in param if isinstance(item, _JAXPRS)]
  return found


def is_call(eqn: jax.extend.core.JaxprEqn, bodies: Sequence[Any]) -> bool:
  """Whether an equation runs its only program once, as it is."""
  # A scan without scanned or stacked arrays looks like a call.
  if eqn.primitive.name == 'scan' or len(bodies) != 1:
    return False
  (body,) = bodies
  if len(body.invars) != len(eqn.invars):
    return False
  # So does a `lax.reduce` of one array: it takes the array and a number to
  # start from, and its body two elements. Shapes tell.
  return _shapes(body) == _shapes(eqn)


def _shapes(program):
  return [v.aval.shape for v in (*program.invars, *program.outvars)]


@functools.cache
def common_name(primitive: str) -> str:
  """Returns one name for all variants of a primitive."""
  # JAX has separate primitives for tracked types (`psum_invariant`) and for
  # asynchronous starts (`psum_start`); JAX 0.10 ends some names in `_p`.
  name = primitive.removeprefix('unreduced_').removesuffix('_p')
  for suffix in ('_start', '_invariant', '_reduced'):
    name = name.removesuffix(suffix)
  return name


def mapped_axes(params: Mapping[str, Any]) -> tuple[Hashable, ...]:
  """Returns the mapped axes that a collective of these parameters is over."""
  return tuple(a for a in all_axes(params) if not isinstance(a, int))


def all_axes(params: Mapping[str, Any]) -> tuple[Hashable, ...]:
  """Returns the axes of a collective; integers are axes of its input."""
  axes = params.get('axes', params.get('axis_name', ()))
  return axes if isinstance(axes, tuple) else (axes,)
