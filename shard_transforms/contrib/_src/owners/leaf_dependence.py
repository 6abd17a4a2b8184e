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

  def problem_of_types(self, arguments: Any) -> str | None:
    """Returns the results that differ in type from updates and state, if any.

    Args:
      arguments: The types of the updates and the state before.
    """
    results = self.program.results
    tree, expected = map(jax.tree.structure, (results, arguments))
    if tree != expected:
      return f'the tree {tree} for {expected}'
    pairs = zip(*map(jax.tree.leaves, (results, arguments)), strict=True)
    for i, (x, y) in enumerate(pairs):
      is_state = i >= self.num_updates
      if x.shape != y.shape or (is_state and x.dtype != y.dtype):
        types = [f'{kind.dtype}{list(kind.shape)}' for kind in (x, y)]
        return f'{types[0]} for {types[1]} in {self._names[i]}'
    return None

  def params_of_terms(self) -> list[set[int]]:
    """Returns, for each term of a total, the parameters that it depends on."""
    totals = self.program.totals
    return [self.params_of(term) for _, terms in totals for term in terms]

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
    equations = self.program.flat.all_equations()
    draws = any(equation.name in _RANDOM for equation in equations)
    if draws and any(x.has_layers for x in self.stacks.layouts):
      return (
          'draws random values, which would be the same for all layers of a'
          ' leaf with `whole_dims`'
      )
    if name := self._reduction_of_layers():
      return (
          f'combines all layers of a leaf by `{name}`, while it receives only'
          ' one layer with `whole_dims`'
      )
    results = self._problem_of(range(len(self.params)))
    return results or self._problem_of_totals()

  def _reduction_of_layers(self):
    """Returns a primitive that reduces an array over dimensions of layers.

    It does not find each combination of layers, such as one after a reshape.
    Terms of totals may be such sums, because owners add up those of all layers.
    """
    num_layer_dims = {
        x.inner_shape: len(x.local_layers)
        for x in self.stacks.layouts
        if x.has_layers
    }
    program = self.program.flat
    used = set(program.outputs[: len(self.params)])
    for equation in reversed(program.equations if num_layer_dims else ()):
      if used.isdisjoint(equation.outputs):
        continue
      used.update(equation.inputs)
      bodies = [body.all_equations() for body in equation.bodies]
      for part in itertools.chain([equation], *bodies):
        for x, dims in _reduced_dims(part):
          if any(dim < num_layer_dims.get(x.aval.shape, 0) for dim in dims):
            return part.name
    return None

  def problem_of_shared_state(self) -> str | None:
    """Like `problem`, but only for state that no single owner keeps."""
    outputs = range(self.num_updates, len(self.params))
    shared = (i for i in outputs if self.params[i] not in self.stacks.rows)
    return self._problem_of(shared)

  def _problem_of(self, outputs):
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
    return [
        f'its {("updates", "state")[part.idx]} at {leaves_lib.name_of(path)}'
        for (part, *path), _ in jax.tree.leaves_with_path(self.program.results)
    ]

  def _problem_of_totals(self):
    totals = self.program.totals
    for axes, term in ((axes, x) for axes, terms in totals for x in terms):
      params = self.params_of(term)
      if self.program.is_varying(term):
        return 'adds up values that differ between shards by `psum`'
      if len(params) != 1:
        return 'adds up values by `psum` that do not each come from one leaf'
      (param,) = params
      owner_axes = self.stacks.axes_of(param)
      if not axes.issuperset(owner_axes):
        name = self.stacks.layouts[param].name
        return (
            f'adds up values by `psum` over {sorted(axes, key=str)}, which must'
            f' include all axes of the owners of {name}, {owner_axes}'
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
    params = []
    for i, position in enumerate(positions, self.num_updates):
      written_by = self.params_of(i).intersection(self.stacks.rows)
      if position is not None:
        params.append(position)
      elif len(written_by) > 1:
        params.append(None)
      else:
        params.append(next(iter(written_by), stacks_lib.SHARED))
    return params


def _reduced_dims(equation):
  """Returns each input that an equation reduces, and its reduced dimensions."""
  if equation.name == 'dot_general':
    contracted, _ = equation.params['dimension_numbers']
    return list(zip(equation.inputs, contracted, strict=True))
  if equation.name.startswith(('reduce_', 'arg')):
    return [(equation.inputs[0], equation.params.get('axes', ()))]
  return []
