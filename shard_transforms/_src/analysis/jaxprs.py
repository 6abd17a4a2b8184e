"""Programs as JAX has traced them: steps, loops and branches.

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
from typing import Any, NamedTuple

import chex
import jax.extend

LITERAL = jax.extend.core.Literal
_JAXPRS = jax.extend.core.Jaxpr, jax.extend.core.ClosedJaxpr

# The name of a step that runs its body once, as it is, in a `view`.
CALL = 'call of a body'


# Neither this nor `Step` is frozen, because frozen ones take longer to make: a
# tree of 1,000 leaves makes tens of thousands of them.
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


@dataclasses.dataclass(eq=False, slots=True)
class Step:
  """An operation, or a loop or branch with its bodies.

  Attributes:
    name: The primitive, by one name for all of its variants.
    params: The parameters of the primitive.
    inputs: Its inputs.
    outputs: Its outputs.
    surroundings: The calls and maps around it.
    bodies: The programs in its parameters, in the order of the primitive.
  """

  name: str
  params: Mapping[str, Any]
  inputs: Sequence[Value]
  outputs: Sequence[Value]
  surroundings: 'Surroundings'
  bodies: 'tuple[Program, ...]' = ()

  @property
  def scope(self) -> str:
    """The `jax.named_scope`s around it, outermost first."""
    # Computed only on demand, because it takes longer than everything else
    # about a step, and few steps need it.
    names = map(str, self.surroundings.name_stacks)
    return '/'.join(filter(None, names))

  @property
  def axis_sizes(self) -> Mapping[Hashable, int]:
    """The sizes of the mapped mesh axes around it."""
    return self.surroundings.axis_sizes

  @property
  def axes(self) -> tuple[Hashable, ...]:
    """The mapped axes that a collective is over."""
    return mapped_axes(self.params)

  @property
  def positional_axes(self) -> tuple[int, ...]:
    """The axes of its input that it also reduces, as under `jax.vmap`."""
    return tuple(axis for axis in _axes(self.params) if isinstance(axis, int))

  @property
  def label(self) -> str:
    """Its name in warnings."""
    return (
        f'`{self.name}` in {self.scope!r}' if self.scope else f'`{self.name}`'
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
  """Steps in the order in which they were traced.

  Attributes:
    inputs: Its inputs.
    steps: Its steps.
    outputs: Its outputs.
    constants: The constants of it and of the programs that it calls.
  """

  inputs: tuple[Value, ...]
  steps: tuple[Step, ...]
  outputs: tuple[Value, ...]
  constants: tuple[Value, ...] = ()


class Surroundings(NamedTuple):
  """What is around an equation.

  Attributes:
    name_stacks: JAX's own records of the scopes, one for each call entered.
    axis_sizes: The sizes of the mapped mesh axes.
  """

  name_stacks: tuple[Any, ...]
  axis_sizes: Mapping[Hashable, int]

  def within(self, name_stack: Any) -> 'Surroundings':
    """Returns the surroundings inside of a call that has this scope."""
    return self._replace(name_stacks=(*self.name_stacks, name_stack))


NOWHERE = Surroundings((), {})


def view(
    jaxpr: jax.extend.core.Jaxpr | jax.extend.core.ClosedJaxpr,
) -> Program:
  """Returns a jaxpr as a program without a copy, to be read once in each trace.

  Its values are JAX's own variables and literals, which only have an `aval`.
  Its steps do not know their surroundings, and can only be iterated over. A
  call or a map is a step `CALL` with a body.
  """
  steps: Any = _Equations(jaxpr)
  inputs: Any = jaxpr.invars
  outputs: Any = jaxpr.outvars
  return Program(inputs, steps, outputs)


@dataclasses.dataclass(frozen=True, eq=False)
class _Equations:
  """The steps of a jaxpr, each made when it is reached and not kept."""

  jaxpr: Any

  def __iter__(self) -> Iterator[Step]:
    for eqn in self.jaxpr.eqns:
      ends = eqn.invars, eqn.outvars, NOWHERE
      bodies = held(eqn.params) if eqn.params else ()
      if not bodies:
        yield Step(common_name(eqn.primitive.name), eqn.params, *ends)
      elif eqn.primitive.name == 'shard_map' or is_call(eqn, bodies):
        yield Step(CALL, {}, *ends, (view(bodies[0]),))
      else:
        yield step_with_bodies(eqn, bodies, *ends, _view_body)


def mapped_axes(params: Mapping[str, Any]) -> tuple[Hashable, ...]:
  """Returns the mapped axes that a collective of these parameters is over."""
  return tuple(axis for axis in _axes(params) if not isinstance(axis, int))


class Loop(NamedTuple):
  """The parts of a `scan` or `while`.

  Attributes:
    body: What each turn runs.
    condition: What decides whether there is another turn; `None` in a scan.
    num_carry: The number of values that a turn hands to the next.
    num_read: The number of inputs of the body before these.
    num_condition: The number of inputs that the condition alone reads.
  """

  body: Program
  condition: Program | None
  num_carry: int
  num_read: int
  num_condition: int = 0

  @property
  def carry(self) -> tuple[Value, ...]:
    """Those inputs of the body that are its carry."""
    return self.body.inputs[self.num_read : self.num_read + self.num_carry]


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
  found = Loop(body, None, num_carry, num_read)
  chex.assert_equal(_kinds(found.carry), _kinds(body.outputs[:num_carry]))
  return found


def _num_whole(outer, inner):
  pairs = zip(outer, inner, strict=True)
  return sum(a.aval.ndim == b.aval.ndim for a, b in pairs)


def _kinds(values):
  return [(value.aval.shape, value.aval.dtype) for value in values]


def _view_body(jaxpr, around):
  del around
  return view(jaxpr)


def own_values(variables: Sequence[Any]) -> tuple[Value, ...]:
  """Returns a new value for each variable of a jaxpr."""
  return tuple([Value(variable.aval) for variable in variables])


def _decision(eqn: jax.extend.core.JaxprEqn) -> int | None:
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


def step_with_bodies(
    eqn: jax.extend.core.JaxprEqn,
    bodies: Sequence[Any],
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    around: Surroundings,
    read: Callable[[Any, Surroundings], Program],
) -> Step:
  """Returns the step of an equation, whose bodies become programs by `read`."""
  decision = _decision(eqn)
  if decision is not None:
    return _step_of_decision(eqn, decision, inputs, outputs, around, read)
  name = common_name(eqn.primitive.name)
  programs = tuple([read(body, around) for body in bodies])
  return Step(name, eqn.params, inputs, outputs, around, programs)


def _step_of_decision(eqn, decision, inputs, outputs, around, read):
  """Returns a `cond` that skips the body of a loop or runs it once."""
  body = eqn.params['body_jaxpr']
  given = inputs[eqn.params['cond_nconsts'] :]
  num_carry = len(outputs)
  kept = own_values(body.jaxpr.invars)
  bodies = Program(kept, (), kept[-num_carry:]), read(body, around)
  predicate = given[-num_carry:][decision]
  return Step('cond', {}, (predicate, *given), outputs, around, bodies)


def _axes(params):
  axes = params.get('axes', params.get('axis_name', ()))
  return axes if isinstance(axes, tuple) else (axes,)


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
