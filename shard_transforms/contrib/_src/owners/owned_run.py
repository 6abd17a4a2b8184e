"""A step of the shards: owners run the program of `inner` on their matrices.

The members of a stack whose programs are equal run one program, on the rows of
the owner. For all others, a `lax.switch` on the owner runs the part of `inner`
that each of its members needs. All shards run the rest.
"""

import collections
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import operator
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import states
from shard_transforms._src.reduction import collectives
from shard_transforms.contrib._src.owners import dependence
from shard_transforms.contrib._src.owners import equal_programs
from shard_transforms.contrib._src.owners import exchange as exchange_lib
from shard_transforms.contrib._src.owners import leaf_program
from shard_transforms.contrib._src.owners import stacks as stacks_lib

# An owner's rows of one input or output of the members of a stack, by number
# or by key.
Rows = Mapping[Any, jax.Array]


@dataclasses.dataclass(frozen=True)
class OwnedRun:
  """A program, of which each shard runs the part for its own matrices.

  Attributes:
    program: The program.
    of_inputs: What each of its inputs belongs to, but for the totals.
    of_outputs: What each of its results belongs to.
    keys: The keys of the results that belong to parameters with owners.
    stacks: The stacks of matrices.
    exchanges: The way of each stack.
    params: The parameters as a shard holds them, its last inputs.
    program_of_rows: Returns the program for owners that have those parameters
      alone that they own.
  """

  program: leaf_program.LeafProgram
  of_inputs: Sequence[int]
  of_outputs: Sequence[int]
  keys: Mapping[int, str]
  stacks: stacks_lib.Stacks
  exchanges: Sequence[exchange_lib.Exchange]
  params: Sequence[jax.Array]
  program_of_rows: Callable[[], leaf_program.LeafProgram]

  def results(
      self,
      shared: Mapping[int, jax.Array],
      rows: Sequence[Rows],
      belongs: Callable[[int], set[int]] = lambda _: set(),
  ) -> tuple[list[Any], dict[int, jax.Array]]:
    """Returns an owner's rows of results, and those that all shards have.

    Args:
      shared: The inputs that all shards have, by number.
      rows: For each stack, the owner's rows of inputs, by number.
      belongs: Returns the parameters to which a term of a sum belongs.

    Returns:
      For each stack, the rows of its results by key; and by number all results
      that belong to no parameter with an owner, or to several.
    """
    rows = [
        {**x, **self._rows_of_params(stack, way)}
        for stack, way, x in zip(
            self.stacks.stacks, self.exchanges, rows, strict=True
        )
    ]
    others = [i for i in range(len(self.of_outputs)) if i not in self.keys]
    shared = {**shared, **self._whole_params(others)}
    shared |= self._totals(shared, rows, belongs)
    made = [
        self._of_stack(stack, way, shared, own)
        for stack, way, own in zip(
            self.stacks.stacks, self.exchanges, rows, strict=True
        )
    ]
    mixed = [i for i in others if self.of_outputs[i] == dependence.MIXED]
    whole = self.program.run([i for i in others if i not in mixed], shared)
    if mixed:
      own = self._on_own_shard(
          lambda given: self.program.run(mixed, {**shared, **given}), rows
      )
      whole |= states.with_shard_axis(own, self.stacks.axes)
    return made, whole

  @functools.cached_property
  def _inputs_of(self):
    return _numbers_by(self.of_inputs)

  @functools.cached_property
  def _outputs_of(self):
    return _numbers_by(self.of_outputs)

  @functools.cached_property
  def _first_param(self):
    return len(self.of_inputs) - len(self.params)

  @functools.cached_property
  def _numbered(self):
    places = {
        i: place
        for param in self.stacks.places
        for place, i in enumerate(self._inputs_of[param])
    }
    return equal_programs.numbered(self.program.flat, places)

  def _read_by(self, param):
    """Returns the bits of the inputs that the results of a parameter read."""
    bits = (self._numbered[i][1] for i in self._outputs_of[param])
    return functools.reduce(operator.or_, bits, 0)

  def _own_inputs(self, param):
    """Returns the inputs of a parameter that its results read."""
    read = self._read_by(param)
    return [i for i in self._inputs_of[param] if read >> i & 1]

  def _reads_own(self, stack):
    """Whether members of a stack read no inputs of others with owners."""
    return all(
        self._read_by(param).bit_count() == len(self._own_inputs(param))
        for param in stack.params
    )

  def _are_equal(self, stack):
    programs = {
        tuple(self._numbered[i][0] for i in self._outputs_of[param])
        for param in stack.params
    }
    return len(programs) == 1 and self._reads_own(stack)

  def _rows_of_params(self, stack, way):
    """Returns the rows of the parameters of a stack, if they are read."""
    read = {i for param in stack.params for i in self._own_inputs(param)}
    terms = [i for terms in self.program.terms for i in terms]
    read |= self.program.reads(terms)
    numbers = {
        i
        for param in stack.params
        for i in self._inputs_of[param]
        if i >= self._first_param
    }
    if not (self._reads_own(stack) and numbers & read):
      return {}
    rows = way.own(self.stacks.members(stack, dict(enumerate(self.params))))
    return dict.fromkeys(numbers, rows)

  def _whole_params(self, others):
    """Returns whole parameters that all shards read, by the number of input."""
    apart = [x for x in self.stacks.stacks if not self._reads_own(x)]
    outputs = [
        i for x in apart for param in x.params for i in self._outputs_of[param]
    ]
    found = {}
    for i in sorted(self.program.reads([*others, *outputs])):
      if self._first_param <= i < len(self.of_inputs):
        number = i - self._first_param
        leaf = self.stacks.leaves[number]
        if leaf.shown != leaf.shape:
          raise ValueError(
              f'`inner` of `{self.stacks.reduction.caller}` must read the'
              ' layers of no other parameter with `whole_dims`, but reads'
              f' {self.stacks.names[number]}.'
          )
        found[i] = exchange_lib.gathered(self.params[number], leaf.slicing)
    return found

  def _totals(self, shared, rows, belongs):
    """Returns the sums over all leaves that `inner` asks for, by number."""
    found = {}
    for i, terms in enumerate(self.program.terms, self.program.num_inputs):
      of = {term: belongs(term) for term in terms}
      found[i] = self._total(i, of, {**shared, **found}, rows)
    return found

  def _total(self, number, of, shared, rows):
    """Returns the sum of some terms, each of which belongs to parameters."""
    kind = self.program.jaxpr.in_avals[number]
    zero = jnp.zeros(kind.shape, kind.dtype)

    def added(terms, given):
      made = self.program.run(terms, given)
      return sum((x.astype(kind.dtype) for x in made.values()), start=zero)

    places = self.stacks.places
    terms = [x for x, own in of.items() if not own or own.difference(places)]
    total = added(terms, shared)
    for stack, way, own in zip(
        self.stacks.stacks, self.exchanges, rows, strict=True
    ):

      def sum_of(owner, stack=stack, own=own):
        total = zero
        for slot, member in enumerate(stack.of_owner(owner)):
          param, _ = stack.members[member]
          given = {**shared, **self._row(own, param, slot)}
          total += added([x for x in of if param in of[x]], given)
        return total

      if any(not of[x].isdisjoint(stack.params) for x in of):
        total += collectives.psum(way.switch(sum_of), stack.layout.axes)
    return total

  def _row(self, rows, param, slot):
    """Returns the inputs of one member, given rows of its stack."""
    return {i: rows[i][slot] for i in self._inputs_of[param] if i in rows}

  def _on_own_shard(self, fn, rows):
    """Returns `fn(inputs)` of all members that this shard owns."""
    stacks, reduction = self.stacks, self.stacks.reduction
    sizes = tuple(map(lax.axis_size, stacks.axes))
    number = reduction.num_shards() if reduction.groups else np.prod(sizes)

    def owner_of(stack, shard):
      if reduction.groups is not None:
        return shard
      at = dict(zip(stacks.axes, np.unravel_index(shard, sizes), strict=True))
      owned = stack.layout.owned_over
      index = [int(at[axis]) for axis in owned]
      return int(np.ravel_multi_index(index, [lax.axis_size(a) for a in owned]))

    def branch(shard):
      given = {}
      for stack, own in zip(stacks.stacks, rows, strict=True):
        for slot, member in enumerate(stack.of_owner(owner_of(stack, shard))):
          given |= self._row(own, stack.members[member][0], slot)
      return axes_lib.to_varying(fn(given), stacks.axes)

    branches = [functools.partial(branch, i) for i in range(int(number))]
    if len(branches) == 1:
      return branches[0]()
    index = collectives.row_index(stacks.axes, reduction.groups)
    return lax.switch(index, branches)

  def _of_stack(self, stack, way, shared, rows):
    """Returns the results of an owner's members by key, [rows, ...] each."""
    program, keys = self.program, self.keys
    if self._reads_own(stack) and any(i >= self._first_param for i in rows):
      program = self.program_of_rows()
    if self._are_equal(stack):
      return self._of_equal(stack, program, shared, rows)
    kinds = {
        keys[i]: program.jaxpr.out_avals[i]
        for param in stack.params
        for i in self._outputs_of[param]
    }

    def branch(owner):
      made = []
      for slot, member in enumerate(stack.of_owner(owner)):
        param, _ = stack.members[member]
        given = {**shared, **self._row(rows, param, slot)}
        outputs = program.run(self._outputs_of[param], given)
        made.append({keys[i]: x for i, x in outputs.items()})

      def row(slot, key, kind):
        known = slot < len(made) and key in made[slot]
        return made[slot][key] if known else jnp.zeros(kind.shape, kind.dtype)

      return {
          key: jnp.stack([row(i, key, kind) for i in range(stack.length)])
          for key, kind in kinds.items()
      }

    return way.switch(branch)

  def _of_equal(self, stack, program, shared, rows):
    """Returns the results of members whose programs are equal."""
    param, length = stack.params[0], stack.length
    outputs = self._outputs_of[param]
    own = {i: rows[i] for i in self._own_inputs(param)}

    def run(own):
      return program.run(outputs, {**shared, **own})

    if length > 1:
      made = jax.vmap(run, axis_size=length)(own)
    else:
      made = run({i: lax.squeeze(x, (0,)) for i, x in own.items()})
      made = {i: lax.expand_dims(x, (0,)) for i, x in made.items()}
    made = axes_lib.to_varying(made, stack.layout.axes)
    return {self.keys[i]: x for i, x in made.items()}


def _numbers_by(of):
  found = collections.defaultdict(list)
  for i, param in enumerate(of):
    found[param].append(i)
  return found
