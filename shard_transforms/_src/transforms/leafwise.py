"""Whether a transformation treats each leaf alone, and what belongs to a leaf.

Read off the program on the whole tree: on which updates and which state each of
its results depends. What depends on parameters may depend on all of them,
because they are the same on all shards.
"""

from collections.abc import Hashable
from collections.abc import Iterator
from collections.abc import Sequence
import dataclasses
import math
from typing import Any

import jax

from shard_transforms._src.analysis import leaf_flow
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.transforms import leaf_program

# What an array belongs to, where that is not the number of one parameter: to
# none, and is the same on all shards; or to several of them.
SHARED, MIXED = -1, -2


@dataclasses.dataclass(frozen=True)
class Leafwise:
  """The program of an `update`, and what belongs to which parameter.

  Its inputs are the updates, the state, the parameters and the totals; its
  outputs the updates, the state, and the terms of the totals.

  Attributes:
    program: The program.
    update_of: The number of the parameter of each update; `SHARED` for one that
      all shards compute.
    state_of: The number of the parameter of each leaf of the state, `SHARED` or
      `MIXED`.
    depends: On which inputs each output depends, in bits.
    sent: The name of a collective that the program runs, if any.
  """

  program: leaf_program.LeafProgram
  update_of: tuple[int, ...]
  state_of: tuple[int, ...]
  depends: tuple[int, ...]
  sent: str | None

  @classmethod
  def of(
      cls,
      program: leaf_program.LeafProgram,
      update_of: Sequence[int],
      state_of: Sequence[int],
      axes: Sequence[Hashable],
  ) -> 'Leafwise':
    """Returns what is known of a program.

    Args:
      program: The program.
      update_of: As the attribute.
      state_of: As the attribute.
      axes: The mapped axes over which parameters must not vary.
    """
    kinds = [
        leaf_flow.OWN_NUMBERS if axes_lib.varying_axes(x) & set(axes) else 0
        for x in program.inputs()
    ]
    for i in range(len(update_of) + len(state_of)):
      is_same = i < len(update_of) and update_of[i] == SHARED
      kinds[i] = 0 if is_same else _bit(i)
    kinds[program.num_inputs :] = [0] * len(program.terms)
    depends, sent = leaf_flow.follow(program.flat(), kinds, axes)
    return cls(program, tuple(update_of), tuple(state_of), tuple(depends), sent)

  def belongs(self, output: int) -> set[int]:
    """Returns to which parameters belongs what an output depends on."""
    of = self.update_of + self.state_of
    return {of[i] for i in _numbers(self.depends[output])} - {SHARED}

  def problem(self) -> str | None:
    """Returns a clause that says how it mixes leaves, or `None`."""
    if self.sent is not None:
      return (
          f'`{self.sent}` in it waits for shards that update other leaves (only'
          ' a `psum` over all axes of the shards, in no branch or loop, can be'
          ' done for all of them)'
      )
    if self.program.averaged:
      return '`pmean` divides a sum over leaves by the number of shards'
    of = self.update_of + self.state_of
    paths = jax.tree.leaves_with_path(self.program.results)
    for output, (path, _) in enumerate(paths):
      if self.depends[output] & leaf_flow.OWN_NUMBERS:
        return (
            'shards bring numbers of their own, such as parameters of'
            ' `per_shard` in place of replicated ones, in'
            f' {_name(path)}'
        )
      others = self.belongs(output) - {of[output]}
      if others or of[output] == MIXED:
        return self._mixing(output, path)
    return self._problem_of_totals()

  def _mixing(self, output, path):
    paths = jax.tree.leaves_with_path(self.program.results)
    own = (self.update_of + self.state_of)[output]
    of = self.update_of + self.state_of
    other = next(
        (i for i in _numbers(self.depends[output]) if of[i] not in (own, -1)),
        output,
    )
    return f'{_name(path)} depends on {_name(paths[other][0])}'

  def _problem_of_totals(self):
    for terms in self.program.terms:
      for term in terms:
        belongs = self.belongs(term)
        if self.depends[term] & leaf_flow.OWN_NUMBERS:
          return 'shards add up numbers of their own'
        if not belongs:
          return '`psum` adds up what is the same on all shards'
        if len(belongs) > 1 or MIXED in belongs:
          return 'what it gives to `psum` is no sum of numbers of single leaves'
    return None

  def associated(self, known: Sequence[int | None]) -> list[int]:
    """Returns what each leaf of the state belongs to.

    Args:
      known: The same, where it is known.
    """
    first = len(self.update_of)
    sizes = [
        math.prod(kind.shape)
        for kind in self.program.inputs()[first : first + len(self.state_of)]
    ]
    reach = self._reach()
    found = []
    for i, (size, before) in enumerate(zip(sizes, known, strict=True)):
      of = {self.update_of[k] for k in _numbers(reach[i]) if k < first}
      if before is not None:
        found.append(before)
      elif of:
        found.append(of.pop() if len(of) == 1 else MIXED)
      else:
        readers = {
            self.update_of[k]
            for k in range(first)
            if self.depends[k] & _bit(first + i)
        }
        is_of_one = len(readers) == 1 and size > 1
        found.append(readers.pop() if is_of_one else SHARED)
    return found

  def _reach(self):
    """Returns on which inputs each leaf of the state comes to depend."""
    first = len(self.update_of)
    last = first + len(self.state_of)
    reach, before = list(self.depends[first:last]), None
    while reach != before:
      before = list(reach)
      for i, bits in enumerate(before):
        for k in _numbers(bits):
          if k >= first:
            reach[i] |= before[k - first]
    return reach


def _bit(number):
  return 2 * leaf_flow.OWN_NUMBERS << number


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
