"""What the results of the program of an `update` depend on.

Whether `inner` treats each leaf alone is read off its program: on which updates
and which state each of its results depends. What depends on parameters may
depend on all of them, because they are the same on all shards. A result may be
found to depend on an input that does not change it, as where leaves are
concatenated and split again; it never depends on an input that is not found.
"""

from collections.abc import Hashable
from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import functools
import math
import operator
from typing import Any

import jax

from shard_transforms._src.analysis import interpreter
from shard_transforms._src.analysis import primitives
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms.contrib._src.owners import leaf_program

# What an array belongs to, where that is not the number of one parameter: to
# none, and is the same on all shards; or to several of them.
SHARED, MIXED = -1, -2
# The bit of numbers that differ between shards; those of inputs are above it.
_OWN_NUMBERS = 1


@dataclasses.dataclass(frozen=True)
class Dependence:
  """What the results of the program of an `update` depend on.

  The inputs of the program are the updates, the state, the parameters and the
  totals; its outputs the updates, the state, and the terms of the totals.

  Attributes:
    program: The program.
    of: What each update and each leaf of the state belongs to: the number of a
      parameter, `SHARED` or `MIXED`.
    num_updates: The number of updates.
    depends: On which inputs each output depends, in bits.
    stacks: The stacks of the parameters; all shards have what stands in none.
    sent: The name of a collective that the program runs, if any.
  """

  program: leaf_program.LeafProgram
  of: Sequence[int]
  num_updates: int
  depends: Sequence[int]
  stacks: Any
  sent: str | None

  @classmethod
  def find(
      cls,
      program: leaf_program.LeafProgram,
      of: Sequence[int],
      num_updates: int,
      axes: Sequence[Hashable],
      stacks: Any,
  ) -> 'Dependence':
    """Reads a program.

    Args:
      program: The program.
      of: As the attribute.
      num_updates: As the attribute.
      axes: The mapped axes over which parameters must not vary.
      stacks: As the attribute.
    """
    kinds = [
        _OWN_NUMBERS if axes_lib.varying_axes(x) & set(axes) else 0
        for x in program.jaxpr.in_avals
    ]
    for i, number in enumerate(of):
      kinds[i] = 0 if i < num_updates and number == SHARED else _bit(i)
    kinds[program.num_inputs :] = [0] * len(program.terms)
    reader = _Inputs(frozenset(axes))
    depends = interpreter.interpret(program.flat, kinds, reader)
    return cls(program, of, num_updates, depends, stacks, reader.first_sent)

  def belongs(self, output: int) -> set[int]:
    """Returns to which parameters belongs what an output depends on."""
    return {self.of[i] for i in _numbers(self.depends[output])} - {SHARED}

  @functools.cached_property
  def _of_all_shards(self):
    """The numbers of the parameters that all shards update."""
    places = {MIXED, *self.stacks.places}
    return {number for number in self.of if number not in places}

  def problem(self) -> str | None:
    """Returns a clause that says how the program mixes leaves, or `None`."""
    # Collectives are effects named after their axes.
    if any(not hasattr(x, 'name') for x in self.program.jaxpr.effects):
      return (
          'its side effects, such as `jax.debug.print`, would show each shard'
          ' the leaves that it owns, and zeros for all others'
      )
    if self.sent is not None:
      return (
          f'`{self.sent}` in it waits for shards that update other leaves (it'
          ' may use only `psum`, over all axes of the shards, outside of'
          ' branches and loops)'
      )
    if self.program.averaged:
      return '`pmean` divides a sum over leaves by the number of shards'
    return self._problem_of_results() or self._problem_of_totals()

  def _problem_of_results(self):
    paths = [x for x, _ in jax.tree.leaves_with_path(self.program.results)]
    for output, path in enumerate(paths):
      own, bits = self.of[output], self.depends[output]
      if bits & _OWN_NUMBERS:
        return (
            'shards bring numbers of their own, such as parameters of'
            ' `per_shard` in place of replicated ones, in'
            f' {_name(path)}'
        )
      same = {own, SHARED, *self._of_all_shards}
      if self.belongs(output) - same or own == MIXED:
        others = (i for i in _numbers(bits) if self.of[i] not in same)
        other = next(others, output)
        problem = f'{_name(path)} depends on {_name(paths[other])}'
        is_unknown = own == SHARED and len(self.belongs(output)) == 1
        if is_unknown and output >= self.num_updates:
          problem += (
              ', which `init` could not see without the extra arguments that'
              ' `update` requires: keep such state in a tree like the'
              ' parameters, or give these arguments defaults'
          )
        return problem
    return None

  def _problem_of_totals(self):
    pairs = zip(self.program.over, self.program.terms, strict=True)
    for axes, term in ((axes, term) for axes, terms in pairs for term in terms):
      belongs = self.belongs(term)
      if self.depends[term] & _OWN_NUMBERS:
        return 'shards add up numbers of their own'
      if not belongs:
        return '`psum` adds up what is the same on all shards'
      if len(belongs) > 1 or MIXED in belongs:
        return '`psum` adds up more than numbers that each come from one leaf'
      (number,) = belongs
      if not axes.issuperset(over := self.stacks.axes_of(number)):
        return (
            f'`psum` over {sorted(axes, key=str)} adds up a leaf with owners'
            f' over {over}: name all these axes'
        )
    return None

  def associated(self, known: Sequence[int | None]) -> list[int]:
    """Returns what each leaf of the state belongs to.

    Args:
      known: The same, where it is known.
    """
    first, found = self.num_updates, []
    for i, (reach, before) in enumerate(
        zip(self._reach(), known, strict=True), first
    ):
      of = {self.of[k] for k in _numbers(reach) if k < first}
      of -= self._of_all_shards
      if before is not None:
        found.append(before)
      elif of:
        found.append(of.pop() if len(of) == 1 else MIXED)
      else:
        readers = {
            self.of[k] for k in range(first) if self.depends[k] & _bit(i)
        }
        size = math.prod(self.program.jaxpr.in_avals[i].shape)
        is_of_one = len(readers) == 1 and size > 1
        found.append(readers.pop() if is_of_one else SHARED)
    return found

  def _reach(self):
    """Returns on which inputs each leaf of the state comes to depend."""
    first, last = self.num_updates, len(self.of)
    reach, before = list(self.depends[first:last]), None
    while reach != before:
      before = list(reach)
      for i, bits in enumerate(before):
        for k in _numbers(bits):
          if k >= first:
            reach[i] |= before[k - first]
    return reach


class _Inputs(interpreter.Analysis[int]):
  """Follows sets of inputs, as the bits of an integer.

  Joining the sets of a large tree takes one operation.

  Attributes:
    axes: The mapped axes over which a constant must not vary.
    first_sent: The name of the first collective, if there is one.
  """

  def __init__(self, axes: frozenset[Hashable]):
    self.axes = axes
    self.first_sent = None

  def constant(self, value):
    varies = self.axes.intersection(axes_lib.varying_axes(value.aval))
    return _OWN_NUMBERS if varies else 0

  def join(self, facts):
    return functools.reduce(operator.or_, facts, 0)

  def select(self, equation, predicate, facts):
    return [predicate | kind for kind in facts]

  def primitive(self, equation, facts):
    if equation.name == 'optimization_barrier':
      return facts
    if equation.name in primitives.SENDING and self.first_sent is None:
      self.first_sent = equation.name
    kind = self.join(facts)
    if equation.name == 'axis_index':
      kind |= _OWN_NUMBERS
    return [kind] * len(equation.outputs)


def _bit(number):
  return 2 * _OWN_NUMBERS << number


def _numbers(bits: int) -> Iterator[int]:
  """Yields the numbers of the inputs that are in a set of bits."""
  bits >>= 1
  while bits:
    yield (bits & -bits).bit_length() - 1
    bits &= bits - 1


def _name(path: Sequence[Any]) -> str:
  number, *rest = path
  name = leaves_lib.name_of(rest)
  return f'its {("updates", "state")[number.idx]} at {name}'
