"""The parameters that each result of an `update` depends on.

The jaxpr of `inner.update` shows whether `inner` treats each leaf alone: on
which updates and which state each result depends. Results may depend on any
parameters, because those are available to all shards. The analysis may find a
dependence on an input that does not change the result, for example if leaves
are concatenated and split again, but it never misses a dependence.
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
from shard_transforms.contrib._src.owners import stacks as stacks_lib

# The bit of values that differ between shards. The bits of inputs follow.
_VARYING = 1


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

  @functools.cached_property
  def _analysis(self):
    """The inputs that each output depends on, as bits, and the analysis."""
    facts = [0] * len(self.program.jaxpr.in_avals)
    for i, param in enumerate(self.params):
      if i >= self.num_updates or param != stacks_lib.SHARED:
        facts[i] = _bit(i)
    analysis = _InputSets(frozenset(self.stacks.same_axes))
    bits = interpreter.interpret(self.program.flat, facts, analysis)
    return bits, analysis

  @property
  def inputs_of(self) -> Sequence[int]:
    """For each output, the inputs that it depends on, as bits."""
    return self._analysis[0]

  def params_of(self, output: int) -> set[int]:
    """Returns the parameters that an output depends on by updates or state."""
    params = {self.params[i] for i in _indices(self.inputs_of[output])}
    return params - {stacks_lib.SHARED}

  def problem(self) -> str | None:
    """Returns a predicate that says how `inner` mixes leaves, or `None`."""
    # Collectives are effects named after their axes.
    if any(not hasattr(x, 'name') for x in self.program.jaxpr.effects):
      return (
          'has side effects, such as `jax.debug.print`, which would show on'
          ' each shard only the leaves that it owns, and zeros for all others'
      )
    _, analysis = self._analysis
    if analysis.collective is not None:
      return (
          f'uses `{analysis.collective}`, which would wait for shards that'
          ' update other leaves (only `psum` is possible, over all axes of the'
          ' shards and outside of branches and loops)'
      )
    if self.program.averaged:
      return 'divides a sum over leaves by the number of shards, by `pmean`'
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
    param, inputs = self.params[output], self.inputs_of[output]
    if inputs & _VARYING:
      name = self._names[output]
      return f'uses values that differ between shards for {name}'
    # All shards have the updates and the state of parameters without owners.
    params = self.params_of(output)
    others = {x for x in params if x in self.stacks.rows} - {param}
    if not others:
      return None
    other = next(i for i in _indices(inputs) if self.params[i] in others)
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
      if self.inputs_of[term] & _VARYING:
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
    for i, (inputs, position) in enumerate(
        zip(self._transitive_inputs(), positions, strict=True), first
    ):
      written = {self.params[k] for k in _indices(inputs) if k < first}
      written.intersection_update(self.stacks.rows)
      if position is not None:
        params.append(position)
      elif len(written) > 1:
        params.append(None)
      elif written:
        params.append(written.pop())
      else:
        readers = {
            self.params[k] for k in range(first) if self.inputs_of[k] & _bit(i)
        }
        size = math.prod(self.program.jaxpr.in_avals[i].shape)
        is_of_one = len(readers) == 1 and size > 1
        params.append(readers.pop() if is_of_one else stacks_lib.SHARED)
    return params

  def _transitive_inputs(self):
    """Returns the inputs of each leaf of the state, over several steps."""
    first, last = self.num_updates, len(self.params)
    inputs, before = list(self.inputs_of[first:last]), None
    while inputs != before:
      before = list(inputs)
      for i, bits in enumerate(before):
        for k in _indices(bits):
          if k >= first:
            inputs[i] |= before[k - first]
    return inputs


class _InputSets(interpreter.Analysis[int]):
  """Follows sets of inputs, as the bits of an integer.

  The union of the sets of a large tree takes one operation.

  Attributes:
    axes: The mapped axes over which a constant must not vary.
    collective: The name of the first collective, if there is one.
  """

  def __init__(self, axes: frozenset[Hashable]):
    self.axes = axes
    self.collective = None

  def constant(self, value):
    is_varying = self.axes & axes_lib.varying_axes(value.aval)
    return _VARYING if is_varying else 0

  def join(self, facts):
    return functools.reduce(operator.or_, facts, 0)

  def select(self, equation, predicate, facts):
    return [predicate | fact for fact in facts]

  def primitive(self, equation, facts):
    if equation.name == 'optimization_barrier':
      return facts
    if equation.name in primitives.SENDING and self.collective is None:
      self.collective = equation.name
    inputs = self.join(facts)
    if equation.name == 'axis_index':
      inputs |= _VARYING
    return [inputs] * len(equation.outputs)


def _bit(index):
  return 2 * _VARYING << index


def _indices(bits: int) -> Iterator[int]:
  """Yields the indices of the inputs in a set of bits."""
  bits >>= 1
  while bits:
    yield (bits & -bits).bit_length() - 1
    bits &= bits - 1


def _name(path: Sequence[Any]) -> str:
  number, *rest = path
  name = leaves_lib.name_of(rest)
  return f'its {("updates", "state")[number.idx]} at {name}'
