"""The program of `inner`, of which each shard runs a part.

Owners run the part for their matrices; see `stack_program`. All shards run the
part that belongs to no parameter with an owner.
"""

import collections
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from shard_transforms.contrib._src.owners import equal_programs
from shard_transforms.contrib._src.owners import exchange as exchange_lib
from shard_transforms.contrib._src.owners import leaf_program
from shard_transforms.contrib._src.owners import stack_program
from shard_transforms.contrib._src.owners import stacks as stacks_lib
from shard_transforms.contrib._src.owners import tree_exchange


class Outputs(NamedTuple):
  """Outputs that are computed together.

  Attributes:
    shared: The outputs that all shards compute.
    programs: For each stack, the program that its owners run.
  """

  shared: list[int]
  programs: list[stack_program.StackProgram]


@dataclasses.dataclass(frozen=True)
class ShardedProgram:
  """A program, of which each shard runs a part.

  Attributes:
    program: The program, traced with the types that owners have.
    replicated: Traces the program with the types of the replicated optimizer.
    input_params: The parameter of each input, without the totals. The last
      inputs are the parameters.
    output_params: The parameter of each result.
    keys: A key for each result that belongs to a parameter with owners, by
      index. The results of a stack with the same key have the same type.
    exchange: The exchange between shards and owners.
    params: The parameters as a shard holds them.
  """

  program: leaf_program.LeafProgram
  replicated: Callable[[], leaf_program.LeafProgram]
  input_params: Sequence[int]
  output_params: Sequence[int]
  keys: Mapping[int, str]
  exchange: tree_exchange.TreeExchange
  params: Sequence[jax.Array]

  @property
  def stacks(self) -> stacks_lib.Stacks:
    """The stacks of the parameters."""
    return self.exchange.stacks

  def run(
      self,
      shared: Mapping[int, jax.Array],
      rows: Sequence[Mapping[int, jax.Array]],
      params_of: Callable[[int], set[int]],
  ) -> tuple[list[dict[str, jax.Array]], dict[int, jax.Array]]:
    """Runs the part of this shard.

    Args:
      shared: The inputs that all shards have, by index.
      rows: For each stack, the owner's rows of inputs, by index.
      params_of: Returns the parameters that a term of a total depends on.

    Returns:
      For each stack, the owner's rows of results by key; and by index, the
      results that belong to no parameter with an owner.
    """
    totals = [
        self._outputs({term: params_of(term) for term in terms})
        for terms in self.program.terms
    ]
    params = {i: {param} for i, param in enumerate(self.output_params)}
    results = self._outputs(params, self.keys)
    shared = {**shared, **self._unsharded_params([*totals, results])}
    programs = zip(*(x.programs for x in (*totals, results)), strict=True)
    inputs = [
        {**of_stack, **self._rows_of_params(of_programs)}
        for of_stack, of_programs in zip(rows, programs, strict=True)
    ]
    for i, total in enumerate(totals, self.program.num_inputs):
      shared[i] = self._total(
          total, self.program.jaxpr.in_avals[i], shared, inputs
      )
    outputs = [
        program.run(shared, of_stack)
        for program, of_stack in zip(results.programs, inputs, strict=True)
    ]
    return outputs, self._program_of(results.shared).run(results.shared, shared)

  def _outputs(self, params_of_outputs, keys=None):
    """Divides outputs among all shards and the owners of the stacks."""
    programs = []
    for exchange in self.exchange.of_stacks:
      outputs = {param: {} for param in exchange.stack.params}
      for i, params in params_of_outputs.items():
        for of_param in (outputs[x] for x in params if x in outputs):
          of_param[keys[i] if keys else str(len(of_param))] = i
      programs.append(
          stack_program.StackProgram(
              self.program, exchange, outputs, self._owners, self._digests
          )
      )
    shared = [
        i
        for i, params in params_of_outputs.items()
        if not params or params.difference(self.stacks.rows)
    ]
    return Outputs(shared, programs)

  @functools.cached_property
  def _owners(self):
    """The parameters with owners that inputs belong to, by index."""
    params = enumerate(self.input_params)
    return {i: param for i, param in params if param in self.stacks.rows}

  @functools.cached_property
  def _digests(self):
    counts, positions = collections.Counter(), {}
    for i, param in self._owners.items():
      positions[i] = counts[param]
      counts[param] += 1
    return equal_programs.digests(self.program.flat, positions)

  @functools.cached_property
  def _first_param(self):
    return len(self.input_params) - len(self.params)

  def _total(self, outputs, kind, shared, rows):
    """Returns the sum of the terms of a total over all shards."""
    total = jnp.zeros(kind.shape, kind.dtype)
    for x in self.program.run(outputs.shared, shared).values():
      total += x.astype(kind.dtype)
    for program, of_stack in zip(outputs.programs, rows, strict=True):
      if any(program.outputs.values()):
        total += program.total(shared, of_stack, kind)
    return total

  def _program_of(self, outputs):
    """Returns a program in which outputs have the types of all shards."""
    inputs = self.program.inputs_of(*outputs)
    is_own = any(i in self._owners for i in inputs)
    return self.replicated() if is_own else self.program

  def _rows_of_params(self, programs):
    """Returns the owner's rows of the parameters of a stack, if they are read.

    Args:
      programs: All programs of the stack.
    """
    exchange = programs[0].exchange
    members = {
        i: param
        for i, param in self._owners.items()
        if i >= self._first_param and param in exchange.stack.params
    }
    is_read = any(
        not members.keys().isdisjoint(inputs)
        for program in programs
        if program.reads_only_own
        for inputs in program.inputs_read.values()
    )
    if not is_read:
      return {}
    params = dict(enumerate(self.params))
    rows = exchange.own(self.stacks.matrices(exchange.stack, params))
    return dict.fromkeys(members, rows)

  def _unsharded_params(self, groups):
    """Returns the unsharded parameters that are read, by the index of input.

    Owners have their own rows of the parameters in a stack, so that those are
    needed only if other shards or the owners of other matrices read them.

    Args:
      groups: All groups of outputs.

    Raises:
      ValueError: If `inner` reads layers of another parameter.
    """
    read = set()
    for outputs in groups:
      read.update(self.program.inputs_of(*outputs.shared))
      for program in outputs.programs:
        read_by_owners = set().union(*program.inputs_read.values())
        own = self._owners.keys() if program.reads_only_own else ()
        read.update(read_by_owners.difference(own))
    params = {}
    for number, layout in enumerate(self.stacks.layouts):
      if number >= len(self.params) or self._first_param + number not in read:
        continue
      if layout.has_layers:
        raise ValueError(
            f'`inner` of `{self.stacks.reduction.caller}` must not read the'
            ' layers of another parameter with `whole_dims`, but reads'
            f' {self.stacks.names[number]}.'
        )
      x = exchange_lib.gathered(self.params[number], layout.slicing)
      params[self._first_param + number] = x
    return params
