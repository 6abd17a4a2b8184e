"""An abstract interpreter of programs.

A program runs on *kinds* in place of arrays: what a reader wants to know of a
value, such as the axes over which it differs between shards. A reader says what
it knows of each primitive and how kinds join. What all readers share is here:
branches are joined, loops run until the kinds of their carry stay the same, and
calls are entered, unless `inlining.flatten` has inlined them.
"""

from collections.abc import Sequence
from typing import Generic, TypeVar

from shard_transforms._src.analysis import jaxprs

Kind = TypeVar('Kind')


class Reader(Generic[Kind]):
  """What is asked of a program.

  Kinds are ordered by how little they say. `join` must give a kind that says no
  more than any of those given, and the first of them if the others add nothing;
  and there must be no endless chain of such kinds. Otherwise a loop would not
  end.
  """

  def constant(self, value: jaxprs.Value) -> Kind:
    """Returns the kind of a literal or a constant."""
    raise NotImplementedError

  def join(self, kinds: Sequence[Kind]) -> Kind:
    """Returns the kind of a value that is one of several."""
    raise NotImplementedError

  def primitive(
      self, step: jaxprs.Step, kinds: Sequence[Kind]
  ) -> Sequence[Kind]:
    """Returns the kinds of the results of a step without known bodies."""
    raise NotImplementedError

  def inside(self, step: jaxprs.Step, kinds: Sequence[Kind]) -> Kind:
    """Returns the kind of what a step may hand to bodies that it runs somehow.

    Args:
      step: A step that is no branch and no loop, such as a linear solver.
      kinds: The kinds of its inputs.
    """
    del step
    return self.join(kinds)

  def chosen(
      self, step: jaxprs.Step, predicate: Kind, kinds: Sequence[Kind]
  ) -> Sequence[Kind]:
    """Returns the kinds of results that depend on a decision, too.

    Args:
      step: A `cond` or `while`.
      predicate: The kind of what decides.
      kinds: The kinds of the results whatever is decided.
    """
    del step, predicate
    return kinds

  def carried(self, kind: Kind) -> Kind:
    """Returns what is known in a loop of a value that its turns change."""
    return kind

  def row(self, kind: Kind, value: jaxprs.Value) -> Kind:
    """Returns the kind of one turn's part of a scanned array."""
    del value
    return kind

  def stacked(self, kind: Kind, value: jaxprs.Value) -> Kind:
    """Returns the kind of an array that stacks results of all turns."""
    del value
    return kind


def interpret(
    program: jaxprs.Program, kinds: Sequence[Kind], reader: Reader[Kind]
) -> list[Kind]:
  """Returns the kinds of the results of a program.

  Args:
    program: The program.
    kinds: The kinds of its inputs.
    reader: What is asked.
  """
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
  if step.name == jaxprs.CALL:
    return interpret(step.bodies[0], kinds, reader)
  if step.name == 'cond':
    return _branch(step, kinds, reader)
  if step.name in ('scan', 'while'):
    return _loop(step, kinds, reader)
  inside = reader.inside(step, kinds)
  for body in step.bodies:
    interpret(body, [inside] * len(body.inputs), reader)
  return reader.primitive(step, kinds)


def _branch(step, kinds, reader):
  predicate, *given = kinds
  ends = [interpret(body, given, reader) for body in step.bodies]
  joined = [reader.join(results) for results in zip(*ends, strict=True)]
  return reader.chosen(step, predicate, joined)


def _loop(step, kinds, reader):
  loop = jaxprs.loop(step)
  first = loop.num_condition + loop.num_read
  read, given = kinds[loop.num_condition : first], kinds[first:]
  results = step.outputs[loop.num_carry :]
  if not step.params.get('length', 1):
    # A scan without turns, whose body sends nothing.
    return [*given[: loop.num_carry], *map(reader.constant, results)]
  scanned = loop.body.inputs[loop.num_read + loop.num_carry :]
  rows = list(map(reader.row, given[loop.num_carry :], scanned))
  before, ends = None, []
  carry = list(map(reader.carried, given[: loop.num_carry]))
  # A turn may read what the one before it has put into the carry.
  while carry != before:
    before = carry
    ends = interpret(loop.body, [*read, *carry, *rows], reader)
    carried = zip(carry, ends[: loop.num_carry], strict=True)
    carry = list(map(reader.join, carried))
  if loop.condition is not None:
    condition_reads = kinds[: loop.num_condition]
    (go_on,) = interpret(loop.condition, condition_reads + carry, reader)
    return reader.chosen(step, go_on, carry)
  stacks = map(reader.stacked, ends[loop.num_carry :], results)
  # The carry is that of the last turn.
  return [*ends[: loop.num_carry], *stacks]
