"""The parameters that each result of an `update` depends on.

The jaxpr of `inner.update` shows whether `inner` treats each leaf
independently: on which updates and which state each result depends. Results may
depend on any parameters, because those are available to all shards. The
analysis may find a dependence on an input that does not change the result, for
example if leaves are concatenated and split again, but it never misses a
dependence.
"""

from collections.abc import Sequence
import dataclasses
import functools
import itertools
import math
from typing import Any

import jax

from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms.contrib._src.owners import leaf_program
from shard_transforms.contrib._src.owners import stacks as stacks_lib

# Primitives that draw random values from keys.
_RANDOM = frozenset(('random_bits', 'rng_bit_generator', 'threefry2x32'))


@dataclasses.dataclass(frozen=True)
class LeafDependence:
  """The dependence of the outputs of an `update` on its inputs.

  The inputs of the program are the updates, the state, the parameters and the
  totals; its outputs are the updates, the state, and the terms of the totals.

  Attributes:
    program: The program.
    params: The parameter of each update and each leaf of the state, `SHARED`,
      or `None` for a leaf that belongs to several parameters.
    num_updates: The number of updates.
    stacks: The stacks of the parameters.
  """

  program: leaf_program.LeafProgram
  params: Sequence[int | None]
  num_updates: int
  stacks: stacks_lib.Stacks

  def params_of(self, output: int) -> set[int]:
    """Returns the parameters that an output depends on by updates or state."""
    inputs = self.program.inputs_of(output)
    params = (self.params[i] for i in inputs if i < len(self.params))
    return {x for x in params if x is not None and x != stacks_lib.SHARED}

  def params_of_terms(self) -> list[set[int]]:
    """Returns, for each term of a total, the parameters that it depends on."""
    terms = itertools.chain(*self.program.terms)
    return list(map(self.params_of, terms))

  def problem(self) -> str | None:
    """Returns a predicate that says how `inner` mixes leaves, or `None`."""
    # Collectives are effects named after their axes.
    if any(not hasattr(x, 'name') for x in self.program.jaxpr.effects):
      return (
          'has side effects, such as `jax.debug.print`, which would show on'
          ' each shard only the leaves that it owns, and zeros for all others'
      )
    if self.program.collective is not None:
      return (
          f'uses `{self.program.collective}`, which would wait for shards that'
          ' update other leaves (only `psum` is possible, over all axes of the'
          ' shards and outside of branches and loops)'
      )
    if self.program.averaged:
      return 'divides a sum over leaves by the number of shards, by `pmean`'
    if any(x.has_layers for x in self.stacks.layouts) and _draws(
        self.program.flat
    ):
      return (
          'draws random values, which would be the same for all layers of a'
          ' leaf with `whole_dims`'
      )
    return self._problem_of_results() or self._problem_of_totals()

  def problem_of_shared_state(self) -> str | None:
    """Like `problem`, but only for state that no single owner keeps."""
    outputs = range(self.num_updates, len(self.params))
    shared = (i for i in outputs if self.params[i] not in self.stacks.rows)
    return next(filter(None, map(self._problem_of_result, shared)), None)

  def _problem_of_results(self):
    outputs = range(len(self.params))
    return next(filter(None, map(self._problem_of_result, outputs)), None)

  def _problem_of_result(self, output):
    if self.program.is_varying(output):
      name = self._names[output]
      return f'uses values that differ between shards for {name}'
    # All shards have the updates and the state of parameters without owners.
    param, params = self.params[output], self.params_of(output)
    others = {x for x in params if x in self.stacks.rows} - {param}
    if not others:
      return None
    inputs = self.program.inputs_of(output)
    other = next(i for i in inputs if self.params[i] in others)
    problem = f'computes {self._names[output]} from {self._names[other]}'
    is_state = output >= self.num_updates
    if param == stacks_lib.SHARED and len(params) == 1 and is_state:
      problem += (
          ', which `init` could not detect because `update` requires extra'
          ' arguments: keep such state in a tree like the parameters, or give'
          ' these arguments defaults'
      )
    return problem

  @functools.cached_property
  def _names(self):
    paths = [x for x, _ in jax.tree.leaves_with_path(self.program.results)]
    return list(map(_name, paths))

  def _problem_of_totals(self):
    pairs = zip(self.program.total_axes, self.program.terms, strict=True)
    for axes, term in ((axes, term) for axes, terms in pairs for term in terms):
      params = self.params_of(term)
      if self.program.is_varying(term):
        return 'adds up values that differ between shards by `psum`'
      if not params:
        return 'adds up values that are the same on all shards by `psum`'
      if len(params) > 1:
        return 'adds up values by `psum` that do not each come from one leaf'
      (param,) = params
      owner_axes = self.stacks.axes_of(param)
      if not axes.issuperset(owner_axes):
        return (
            f'adds up values by `psum` over {sorted(axes, key=str)}, but the'
            f' owners of {self.stacks.names[param]} lie along {owner_axes}:'
            ' name all these axes'
        )
    return None

  def params_of_state(
      self, positions: Sequence[int | None]
  ) -> list[int | None]:
    """Returns the parameter that each leaf of the state belongs to.

    It is `None` for a leaf that belongs to several parameters.

    Args:
      positions: The parameter at the same tree position, where there is one.
    """
    first, params = self.num_updates, []
    for i, position in enumerate(positions, first):
      inputs = self._transitive_inputs[i]
      written = {self.params[k] for k in inputs if k < first}
      written.intersection_update(self.stacks.rows)
      if position is not None:
        params.append(position)
      elif len(written) > 1:
        params.append(None)
      elif written:
        params.append(written.pop())
      else:
        updates = (k for k in range(first) if i in self.program.inputs_of(k))
        readers = {self.params[k] for k in updates}
        size = math.prod(self.program.jaxpr.in_avals[i].shape)
        is_of_one = len(readers) == 1 and size > 1
        params.append(readers.pop() if is_of_one else stacks_lib.SHARED)
    return params

  @functools.cached_property
  def _transitive_inputs(self):
    """For each leaf of the state, its inputs over several steps."""
    states = range(self.num_updates, len(self.params))
    inputs = {i: {*self.program.inputs_of(i)} for i in states}
    before: dict[int, set[int]] = {}
    while inputs != before:
      before = inputs
      inputs = {
          i: set().union(x, *(before[k] for k in x if k in before))
          for i, x in before.items()
      }
    return inputs


def _draws(program):
  """Whether a program draws random values."""
  return any(
      equation.name in _RANDOM or any(map(_draws, equation.bodies))
      for equation in program.equations
  )


def _name(path: Sequence[Any]) -> str:
  number, *rest = path
  name = leaves_lib.name_of(rest)
  return f'its {("updates", "state")[number.idx]} at {name}'
