"""Stacks: matrices of one shape, for which owners run one program."""

import collections
from collections.abc import Callable
from collections.abc import Sequence
import functools
import itertools
import operator
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from shard_transforms._src.owners import dependence
from shard_transforms._src.owners import equal_programs
from shard_transforms._src.owners import inputs as inputs_lib
from shard_transforms._src.owners import layout as layout_lib
from shard_transforms._src.owners import leaf_program
from shard_transforms._src.owners import owners as owners_lib


class Stack(NamedTuple):
  """A stack whose leaves have equal programs.

  Attributes:
    length: The number of leaves of an owner.
    outputs: The outputs of the program of the first leaf.
    inputs: For each input of its own that it reads, that of each leaf, those of
      an owner one after the other.
  """

  length: int
  outputs: Sequence[int]
  inputs: Sequence[Sequence[int]]

  def reads_from(self, number: int) -> bool:
    """Whether it reads inputs from this number on."""
    return any(numbers[0] >= number for numbers in self.inputs)

  def run(
      self,
      program: leaf_program.LeafProgram,
      given: inputs_lib.Inputs,
      owners: owners_lib.Owners,
  ) -> dict[int, jax.Array]:
    """Returns its outputs for all leaves of this shard, [leaves, ...].

    Args:
      program: The program.
      given: Its inputs.
      owners: The owners.
    """

    def chosen(numbers):
      def own(owner):
        leaves, first = given.of_owner(owner), owner * self.length
        own = numbers[first : first + self.length]
        return jnp.stack([leaves[i] for i in own])

      return owners.on_own_shard(own)

    def run(own):
      return program.run(self.outputs, {**given.shared, **own})

    own = {
        numbers[0]: chosen(numbers) if kept is None else kept
        for numbers in self.inputs
        for kept in [given.stack(numbers[0])]
    }
    if self.length > 1:
      return jax.vmap(run, axis_size=self.length)(own)
    made = run({i: lax.squeeze(x, (0,)) for i, x in own.items()})
    return {i: lax.expand_dims(x, (0,)) for i, x in made.items()}


def results(
    found: dependence.Dependence,
    owners: owners_lib.Owners,
    layouts: Sequence[layout_lib.Layout],
    given: inputs_lib.Inputs,
    trace: Callable[[], tuple[leaf_program.LeafProgram, Any]],
) -> dict[int, jax.Array]:
  """Returns the stacks of results that equal programs make, by number.

  Args:
    found: The program of `update`, and what belongs to what.
    owners: The owners.
    layouts: How owners keep results.
    given: The inputs.
    trace: Returns the program for parameters that differ between shards.
  """
  program, made = found.program, {}
  stacks = _equal_stacks(program, found.of, owners, layouts)
  if any(stack.reads_from(len(found.of)) for stack in stacks):
    program, _ = trace()
  for stack in stacks:
    made |= stack.run(program, given, owners)
  return made


def _equal_stacks(program, of, owners, layouts):
  """Returns the stacks whose leaves have equal programs."""
  results = collections.defaultdict(list)
  for layout in layouts:
    for i in filter(layout.stack_of, layout.places):
      results[of[i]].append(i)
  given = collections.defaultdict(list)
  num_params = program.num_inputs - len(of)
  for i, param in enumerate((*of, *range(num_params))):
    given[param].append(i)
  places = {
      i: place
      for param in itertools.chain(*owners.stacks)
      for place, i in enumerate(given[param])
  }
  numbered, found = equal_programs.numbered(program.flat, places), []

  def program_of(param):
    """Returns the numbers of its results, and which own inputs it reads."""
    pairs = [numbered[i] for i in results[param]]
    read = functools.reduce(operator.or_, (bits for _, bits in pairs), 0)
    own = [k for k, i in enumerate(given[param]) if read >> i & 1]
    # What reads those of others is equal to nothing.
    is_alone = read.bit_count() == len(own)
    return tuple(x for x, _ in pairs) if is_alone else object(), own

  for params in owners.stacks:
    programs, (read, *_) = zip(*map(program_of, params), strict=True)
    if len(set(programs)) == 1:
      own = [[given[param][k] for param in params] for k in read]
      length = len(params) // len(owners.all)
      found.append(Stack(length, results[params[0]], own))
  return found
