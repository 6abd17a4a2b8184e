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
from shard_transforms.contrib._src.owners import leaf_program
from shard_transforms.contrib._src.owners import stack as stack_lib
from shard_transforms.contrib._src.owners import stack_program
from shard_transforms.contrib._src.owners import stacks as stacks_lib


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
    output_params: The parameters that each output belongs to: one for a result,
      and all that the term of a total depends on.
    keys: A key for each result that belongs to a parameter with owners, by
      index. The results of a stack with the same key have the same type.
    stacks: The stacks of the parameters.
    params: The parameters as a shard holds them.
  """

  program: leaf_program.LeafProgram
  replicated: Callable[[], leaf_program.LeafProgram]
  input_params: Sequence[int]
  output_params: Sequence[set[int]]
  keys: Mapping[int, str]
  stacks: stacks_lib.Stacks
  params: Sequence[jax.Array]

  def run(
      self,
      shared: Mapping[int, jax.Array],
      rows: Sequence[Mapping[int, jax.Array]],
  ) -> tuple[list[dict[str, jax.Array]], dict[int, jax.Array]]:
    """Runs the part of this shard.

    Args:
      shared: The inputs that all shards have, by index.
      rows: For each stack, the owner's rows of inputs, by index.

    Returns:
      For each stack, the owner's rows of results by key; and by index, the
      results that belong to no parameter with an owner.
    """
    totals = [self._outputs(terms) for _, terms in self.program.totals]
    num_results = len(jax.tree.leaves(self.program.results))
    results = self._outputs(range(num_results))
    params, rows_of_params = self._params([*totals, results])
    shared = {**shared, **params}
    rows = [{**x, **y} for x, y in zip(rows, rows_of_params, strict=True)]
    for i, total in enumerate(totals, self.program.num_inputs):
      kind = self.program.jaxpr.in_avals[i]
      shared[i] = self._total(total, kind, shared, rows)
    outputs = [
        program.run(shared, of_stack)
        for program, of_stack in zip(results.programs, rows, strict=True)
    ]
    # All shards have inputs of the types of the replicated optimizer.
    inputs = self.program.inputs_of(*results.shared)
    is_own = not self._owners.keys().isdisjoint(inputs)
    program = self.replicated() if is_own else self.program
    return outputs, program.run(results.shared, shared)

  def _outputs(self, outputs):
    """Divides outputs among all shards and the owners of the stacks."""
    programs = []
    for stack in self.stacks.stacks:
      of_params = {param: {} for param in stack.params}
      for i in outputs:
        for param in self.output_params[i] & of_params.keys():
          of_param = of_params[param]
          of_param[self.keys.get(i, str(len(of_param)))] = i
      programs.append(
          stack_program.StackProgram(
              self.program, stack, of_params, self._owners, self._digests
          )
      )
    with_owners = self.stacks.rows.keys()
    shared = [
        i
        for i in outputs
        if not self.output_params[i] or self.output_params[i] - with_owners
    ]
    return Outputs(shared, programs)

  @functools.cached_property
  def _owners(self):
    """The parameters with owners that inputs belong to, by index."""
    with_owners = self.stacks.rows
    params = enumerate(self.input_params)
    return {i: param for i, param in params if param in with_owners}

  @functools.cached_property
  def _digests(self):
    counts, positions = collections.Counter(), {}
    for i, param in self._owners.items():
      positions[i] = counts[param]
      counts[param] += 1
    return equal_programs.digests(self.program.flat, positions)

  def _total(self, outputs, kind, shared, rows):
    """Returns the sum of the terms of a total over all shards."""
    total = jnp.zeros(kind.shape, kind.dtype)
    for x in self.program.run(outputs.shared, shared).values():
      total += x.astype(kind.dtype)
    for program, of_stack in zip(outputs.programs, rows, strict=True):
      if any(program.outputs.values()):
        total += program.total(shared, of_stack, kind)
    return total

  def _params(self, parts):
    """Returns the parameters that are read: unsharded, and rows of the stacks.

    Owners have only their own rows of the parameters in a stack. A parameter
    that all shards or the owners of others read is unsharded.

    Args:
      parts: All outputs that are computed.

    Raises:
      ValueError: If `inner` reads layers of another parameter.
    """
    params, rows = dict(enumerate(self.params)), []
    first = len(self.input_params) - len(params)
    read = {i for x in parts for i in self.program.inputs_of(*x.shared)}
    for s, stack in enumerate(self.stacks.stacks):
      programs = [part.programs[s] for part in parts]
      read.update(*(program.other_inputs for program in programs))
      own = set().union(*(program.own_inputs for program in programs))
      rows.append({})
      if own := [i for i in own if i >= first]:
        matrices = self.stacks.matrices(stack, params)
        rows[s] = dict.fromkeys(own, stack.own(matrices))
    unsharded = {}
    for i in filter(read.__contains__, range(first, len(self.input_params))):
      layout = self.stacks.layouts[i - first]
      if layout.has_layers:
        raise ValueError(
            f'`inner` of `{self.stacks.reduction.caller}` must not read the'
            ' layers of another parameter with `whole_dims`, but reads'
            f' {layout.name}.'
        )
      unsharded[i] = stack_lib.gathered(params[i - first], layout.slicing)
    return unsharded, rows
