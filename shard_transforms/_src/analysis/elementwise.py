"""The check that a transformation is element-wise.

An element-wise transformation computes the same values on slices of the
parameters as on the parameters. It is recognized from its jaxpr, traced only on
types, by two analyses that are both needed:

* `element_analysis` determines the elements on which each result depends, by
  abstract interpretation. Comparing jaxprs does not show this: the equations of
  `u * b[0]` are the same on slices if `b` has one element, although all shards
  but one then multiply by the zero of its padding.
* `equivalence` determines whether the jaxpr on slices is the same except for
  shapes. Tracking elements does not show this: the size in `u / u.size` is a
  constant of the jaxpr.

The check is sound, but not complete: an accepted transformation is
element-wise, provided that `inner` is the same each time it is traced; a
transformation with unknown primitives is refused.
"""

from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Sequence
import dataclasses
import math
from typing import Any

import jax
from jax import core
import jax.numpy as jnp
import optax

from shard_transforms._src.analysis import element_analysis
from shard_transforms._src.analysis import equivalence
from shard_transforms._src.analysis import interpreter
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import divisions
from shard_transforms._src.base import leaves as leaves_lib


def find_problem(
    inner: optax.GradientTransformationExtraArgs,
    updates: Any,
    params: Any,
    num_slices: Sequence[int],
    axes: Sequence[Hashable] = (),
) -> str | None:
  """Returns the reason why `inner` cannot run on slices of the parameters.

  Nothing is computed; `inner` is traced on unsliced parameters and on slices.

  Args:
    inner: The transformation, with its extra arguments.
    updates: The updates, in the shapes of the parameters.
    params: The parameters, or `None`.
    num_slices: The number of slices of a leaf for each axis.
    axes: The axes over which only slices may vary, and over which a sum is a
      sum over all slices.

  Returns:
    The reason as a clause, or `None` if `inner` is element-wise.
  """
  # One slice is always correct, so the check is made with two.
  num_slices = tuple(num_slices) if math.prod(num_slices) > 1 else (2,)
  slicing = Slicing(num_slices, tuple(axes))
  unsliced = slicing.unsliced((updates, params))
  slices = slicing.slices(unsliced)
  distinct_slices = slicing.slices(unsliced, distinct=True)
  init, state = equivalence.trace(inner.init, _like(*unsliced))
  sliced_init, sliced_state = equivalence.trace(inner.init, _like(*slices))
  _, distinct_state = equivalence.closed(inner.init, _like(*distinct_slices))
  states = state, sliced_state, distinct_state
  if len(set(map(jax.tree.structure, states))) > 1:
    return 'its state depends on the shapes of the parameters'
  # Leaves whose shapes change are shaped like the parameters.
  is_sliced = jax.tree.map(
      lambda x, y: x.shape != y.shape, state, distinct_state
  )
  if problem := _problem_of_shapes(state, is_sliced, unsliced):
    return problem

  def trace(init, arguments, state):
    updates, params = arguments
    state = slicing.varying(state, is_sliced)
    update, results = equivalence.trace(inner.update, updates, state, params)
    keeps_shapes = _shapes(results) == _shapes((updates, state))
    return _joined(init, update), keeps_shapes

  program, keeps_shapes = trace(init, unsliced, state)
  if not keeps_shapes:
    return 'it changes the trees or the shapes of the updates or of its state'
  analysis = element_analysis.ElementAnalysis(axes)
  of_state = jax.tree.map(_fact_of_state, is_sliced, state)
  of_updates, of_params = _facts(updates), _facts(params, axes)
  of_init = _like(of_updates, of_params)
  if problem := _problem_of_elements(
      analysis,
      program,
      input_facts=(of_init, of_updates, of_state, of_params),
      expected=(of_state, of_updates, of_state),
  ):
    return problem
  try:
    sliced, keeps_shapes = trace(sliced_init, slices, sliced_state)
  except (TypeError, ValueError) as error:
    return f'it raises an error on slices: {error}'
  pairs = zip(*map(jax.tree.leaves, (unsliced, slices)), strict=True)
  sizes = {(x.size, y.size) for x, y in pairs if x.size != y.size}
  comparison = equivalence.Comparison(sizes, analysis.sums)
  if not keeps_shapes or not comparison.of_programs(program, sliced):
    return 'its computation depends on the shapes of the parameters'
  return None


def _joined(init, update):
  """Joins the jaxprs of `init` and `update`."""
  return interpreter.Program(
      (*init.inputs, *update.inputs),
      (*init.equations, *update.equations),
      (*init.outputs, *update.outputs),
      (*init.constants, *update.constants),
  )


def _like(updates, params):
  """Returns the argument of `init`."""
  return updates if params is None else params


def _shapes(tree):
  return jax.tree.map(lambda x: x.shape, tree)


def _problem_of_shapes(state, is_sliced, arguments):
  """Returns the problem with the shapes of the leaves of the state, if any."""
  shapes = {leaf.shape for leaf in jax.tree.leaves(arguments)}
  leaves = jax.tree.leaves_with_path(state)
  for (path, leaf), sliced_leaf in zip(
      leaves, jax.tree.leaves(is_sliced), strict=True
  ):
    if sliced_leaf and leaf.shape not in shapes:
      name = leaves_lib.name_of(path)
      return (
          f'its state at {name} has the shape {leaf.shape}, which no parameter'
          ' has'
      )
  return None


def _fact_of_state(is_sliced, leaf):
  if not is_sliced:
    return element_analysis.Shared()
  return element_analysis.Elements(of=leaf.shape)


def _facts(tree, axes=()):
  """Returns the facts of updates or parameters."""

  def fact(leaf):
    if axes_lib.varying_axes(leaf).intersection(axes):
      return element_analysis.PER_SHARD
    if _can_be_sliced(leaf):
      return element_analysis.Elements(True, jnp.shape(leaf))
    return element_analysis.Shared()

  return jax.tree.map(fact, tree)


def _problem_of_elements(analysis, program, input_facts, expected):
  """Returns the problem with the results of a jaxpr, if any.

  Args:
    analysis: The analysis of elements.
    program: The jaxpr.
    input_facts: The facts of its inputs.
    expected: The facts that its results must have, in the order of `_joined`.
  """
  results = interpreter.interpret(
      program, jax.tree.leaves(input_facts), analysis
  )
  expected = jax.tree.leaves_with_path(expected)
  triples = zip(expected, results, program.outputs, strict=True)
  for ((number, *path), fact), result, value in triples:
    place = ('state', 'updates', 'state')[number.idx]
    name = f'its {place} at {leaves_lib.name_of(path)}'
    match result:
      case element_analysis.Mixed(reason):
        return f'{reason}, in {name}'
      case element_analysis.Partial():
        return f'{name} depends on a sum over one slice'
      case element_analysis.Elements(of=shape):
        if isinstance(fact, element_analysis.Shared):
          return f'{name}, which is not sliced, depends on sliced leaves'
        if shape != fact.of:
          return f'{name} depends on a leaf of another shape, {shape}'
      case _ if isinstance(fact, element_analysis.Elements):
        if not element_analysis.is_one(value, result):
          return (
              f'{name} has a different value for each position, which depends'
              ' on the shapes of the parameters'
          )
  return None


@dataclasses.dataclass(frozen=True)
class Slicing:
  """The slicing of leaves.

  Attributes:
    num_slices: The number of slices of a leaf for each axis.
    axes: The mapped axes over which only slices vary.
  """

  num_slices: tuple[int, ...]
  axes: tuple[Hashable, ...]

  def unsliced(self, tree: Any) -> Any:
    """Returns the types of unsliced leaves, varying like the slices."""

    # They vary like slices, because JAX refuses a `cond` between an update and
    # the old state if only one of the two varies.
    def zeros(leaf):
      varying = axes_lib.varying_axes(leaf).difference(self.axes)
      if _can_be_sliced(leaf):
        varying = varying.union(self.axes)
      zeros = jnp.zeros(jnp.shape(leaf), jnp.result_type(leaf))
      return axes_lib.to_varying(zeros, tuple(varying))

    is_number = jax.tree.map(lambda x: not leaves_lib.is_float0(x), tree)
    return _map_types(zeros, tree, is_number)

  def slices(self, tree: Any, distinct: bool = False) -> Any:
    """Returns the types of the slices of leaves that can be sliced.

    Args:
      tree: Tree of types.
      distinct: Whether the slice of a leaf with one element gets two elements,
        so that the shape of each slice differs from its leaf.
    """

    def first(leaf):
      if distinct and leaf.size == 1:
        return jnp.concatenate([leaf, leaf], axis=-1)
      division = divisions.divide(leaf.shape, self.num_slices)
      return division.local_slice(leaf, [0] * len(self.num_slices))

    return _map_types(first, tree, jax.tree.map(_can_be_sliced, tree))

  def varying(self, tree: Any, is_sliced: Any) -> Any:
    """Returns the types of a tree in which some leaves vary like slices.

    Args:
      tree: Tree of types.
      is_sliced: Whether each leaf is sliced.
    """
    return _map_types(
        lambda leaf: axes_lib.to_varying(leaf, self.axes), tree, is_sliced
    )


def _can_be_sliced(leaf: Any) -> bool:
  """Whether a leaf is sliced if there is more than one shard."""
  return leaves_lib.is_sliced(leaf, num_slices=2)


def _map_types(
    fn: Callable[[Any], Any], tree: Any, is_selected_tree: Any
) -> Any:
  """Applies `fn` to the types of the selected leaves of a tree."""
  leaves, treedef = jax.tree.flatten(tree)
  types = [
      _type_of(leaf) if is_selected else None
      for leaf, is_selected in zip(
          leaves, jax.tree.leaves(is_selected_tree), strict=True
      )
  ]
  # Trees have many leaves of few types, and tracing is slow.
  distinct = list(
      {leaf_type: None for leaf_type in types if leaf_type is not None}
  )
  result_types = jax.eval_shape(lambda arrays: list(map(fn, arrays)), distinct)
  by_type = dict(zip(distinct, result_types, strict=True))
  return treedef.unflatten(
      leaf if leaf_type is None else by_type[leaf_type]
      for leaf, leaf_type in zip(leaves, types, strict=True)
  )


def _type_of(leaf):
  is_type = isinstance(leaf, core.AbstractValue | jax.ShapeDtypeStruct)
  return leaf if is_type else jax.typeof(leaf)
