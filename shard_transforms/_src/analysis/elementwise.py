"""Whether a transformation is element-wise.

Such a transformation gives the same numbers on slices of the parameters as on
the whole. It is recognized from its program, traced on types alone, by two
questions that are both needed:

* Which results depend on an element (`element_analysis`)? An abstract
  interpretation, with a kind in place of each array. Comparing programs does
  not show this: the steps of `u * b[0]` are the same on slices where `b` has
  one element, although all shards but one then multiply by the zero of its
  padding.
* Is the program on slices the same, but for shapes (`equivalence`)? Following
  elements does not show this: the size in `u / u.size` is a number to the
  program.

This is sound, but not complete: a transformation that is accepted is
element-wise, as long as `inner` is the same each time that it is traced; one
that is not understood is refused.
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
  """Returns why `inner` cannot run on slices of the parameters alone.

  Nothing is computed; `inner` is traced on the whole and on slices.

  Args:
    inner: The transformation, with its extra arguments.
    updates: The updates, in the shapes of the parameters.
    params: The parameters, or `None`.
    num_slices: The number of slices of a leaf for each axis.
    axes: The axes over which slices alone may vary, and over which a sum is one
      over all slices.

  Returns:
    A clause that says what it does, or `None` if it is element-wise.
  """
  # With one slice everything is right; it should be with the next number, too.
  num_slices = tuple(num_slices) if math.prod(num_slices) > 1 else (2,)
  cutting = Cutting(num_slices, tuple(axes))
  whole = cutting.whole((updates, params))
  slices, distinct = cutting.slices(whole), cutting.slices(whole, distinct=True)
  state, sliced_state, other_state = (
      equivalence.closed(inner.init, _like(*given))[1]
      for given in (whole, slices, distinct)
  )
  trees = set(map(jax.tree.structure, (state, sliced_state, other_state)))
  if len(trees) > 1:
    return 'its state depends on their shapes'
  # Leaves whose shapes change are shaped like the parameters.
  is_cut = jax.tree.map(lambda x, y: x.shape != y.shape, state, other_state)
  if problem := _problem_of_shapes(state, is_cut, whole):
    return problem

  def trace(given, state):
    before = given[0], cutting.varying(state, is_cut)
    init, _ = equivalence.trace(inner.init, _like(*given))
    update, results = equivalence.trace(inner.update, *before, given[1])
    return _joined(init, update), _shapes(results) == _shapes(before)

  program, keeps_shapes = trace(whole, state)
  if not keeps_shapes:
    return 'it changes the trees or the shapes of the updates or of its state'
  flow = element_analysis.Flow(axes)
  of_state = jax.tree.map(_kind_of_state, is_cut, state)
  before, of_params = (_kinds(updates), of_state), _kinds(params, axes)
  taken = _like(before[0], of_params), before, of_params
  if problem := _problem_of_elements(flow, program, taken, (of_state, *before)):
    return problem
  try:
    sliced, keeps_shapes = trace(slices, sliced_state)
  except (TypeError, ValueError) as error:
    return f'on slices it raises: {error}'
  pairs = zip(*map(jax.tree.leaves, (whole, slices)), strict=True)
  sizes = {(x.size, y.size) for x, y in pairs if x.size != y.size}
  comparison = equivalence.Comparison(sizes, flow.sums)
  if not keeps_shapes or not comparison.of_programs(program, sliced):
    return 'what it does depends on their shapes'
  return None


def _joined(init, update):
  """Returns the program that starts a state, and does a step from another."""
  return interpreter.Program(
      (*init.inputs, *update.inputs),
      (*init.steps, *update.steps),
      (*init.outputs, *update.outputs),
      (*init.constants, *update.constants),
  )


def _like(updates, params):
  """Returns the argument of `init`."""
  return updates if params is None else params


def _shapes(tree):
  return jax.tree.map(lambda x: x.shape, tree)


def _problem_of_shapes(state, is_cut, given):
  """Returns what is wrong with the shapes of the leaves of the state."""
  shapes = {leaf.shape for leaf in jax.tree.leaves(given)}
  leaves = jax.tree.leaves_with_path(state)
  for (path, leaf), cut in zip(leaves, jax.tree.leaves(is_cut), strict=True):
    if cut and leaf.shape not in shapes:
      name = leaves_lib.name_of(path)
      return f'its state at {name} has a shape of its own, {leaf.shape}'
  return None


def _kind_of_state(is_cut, leaf):
  if not is_cut:
    return element_analysis.Shared()
  return element_analysis.Elements(of=leaf.shape)


def _kinds(tree, axes=()):
  """Returns the kinds of updates or parameters."""

  def kind(leaf):
    if axes_lib.varying_axes(leaf).intersection(axes):
      return element_analysis.OWN_NUMBERS
    if _can_be_cut(leaf):
      return element_analysis.Elements(True, jnp.shape(leaf))
    return element_analysis.Shared()

  return jax.tree.map(kind, tree)


def _problem_of_elements(flow, program, taken, given):
  """Returns what is wrong with the results of a program, if anything.

  Args:
    flow: Follows elements.
    program: The program.
    taken: The kinds of its inputs.
    given: The kinds that its results must have, as `_joined` gives them.
  """
  results = interpreter.interpret(program, jax.tree.leaves(taken), flow)
  given = jax.tree.leaves_with_path(given)
  found = zip(given, results, program.outputs, strict=True)
  for ((number, *path), kind), result, value in found:
    place = ('state', 'updates', 'state')[number.idx]
    name = f'its {place} at {leaves_lib.name_of(path)}'
    match result:
      case element_analysis.Mixed(reason):
        return f'{reason}, in {name}'
      case element_analysis.Partial():
        return f'{name} depends on a sum over one slice'
      case element_analysis.Elements(of=shape):
        if isinstance(kind, element_analysis.Shared):
          return f'{name}, which is not cut, depends on elements'
        if shape != kind.of:
          return f'{name} depends on elements of another shape, {shape}'
      case _ if isinstance(kind, element_analysis.Elements):
        if not element_analysis.is_one(value, result):
          return (
              f'{name} depends on their shapes: each place has its own number'
          )
  return None


@dataclasses.dataclass(frozen=True)
class Cutting:
  """How leaves are cut.

  Attributes:
    num_slices: The number of slices of a leaf for each axis, several together.
    axes: The mapped axes over which only slices vary.
  """

  num_slices: tuple[int, ...]
  axes: tuple[Hashable, ...]

  def whole(self, tree: Any) -> Any:
    """Returns the types of whole leaves, typed as the slices are."""

    # They vary as slices do: JAX refuses a `cond` between an update and the old
    # state if only one of them varies.
    def zeros(leaf):
      varying = axes_lib.varying_axes(leaf).difference(self.axes)
      if _can_be_cut(leaf):
        varying = varying.union(self.axes)
      zeros = jnp.zeros(jnp.shape(leaf), jnp.result_type(leaf))
      return axes_lib.to_varying(zeros, tuple(varying))

    is_number = jax.tree.map(lambda x: not leaves_lib.is_float0(x), tree)
    return _map_types(zeros, tree, is_number)

  def slices(self, tree: Any, distinct: bool = False) -> Any:
    """Returns the types of slices of those leaves that can be cut.

    Args:
      tree: Tree of types.
      distinct: Whether a leaf of one element, which is its own slice, gets two,
        so that each slice differs from its leaf.
    """

    def first(leaf):
      if distinct and leaf.size == 1:
        return jnp.concatenate([leaf, leaf], axis=-1)
      division = divisions.divide(leaf.shape, self.num_slices)
      return division.own(leaf, [0] * len(self.num_slices))

    return _map_types(first, tree, jax.tree.map(_can_be_cut, tree))

  def varying(self, tree: Any, is_cut: Any) -> Any:
    """Returns the types of a tree in which some leaves vary as slices do.

    Args:
      tree: Tree of types.
      is_cut: Whether each leaf is sliced.
    """
    return _map_types(
        lambda leaf: axes_lib.to_varying(leaf, self.axes), tree, is_cut
    )


def _can_be_cut(leaf: Any) -> bool:
  """Whether a leaf is sliced where there is more than one shard."""
  return leaves_lib.is_cut(leaf, num_slices=2)


def _map_types(fn: Callable[[Any], Any], tree: Any, is_chosen: Any) -> Any:
  """Returns a tree with the types of `fn` of the chosen leaves."""
  leaves, treedef = jax.tree.flatten(tree)
  types = [
      _type_of(leaf) if chosen else None
      for leaf, chosen in zip(leaves, jax.tree.leaves(is_chosen), strict=True)
  ]
  # Trees have many leaves of few types, and tracing takes long.
  distinct = list({kind: None for kind in types if kind is not None})
  made = jax.eval_shape(lambda arrays: list(map(fn, arrays)), distinct)
  by_type = dict(zip(distinct, made, strict=True))
  return treedef.unflatten(
      leaf if kind is None else by_type[kind]
      for leaf, kind in zip(leaves, types, strict=True)
  )


def _type_of(leaf):
  is_type = isinstance(leaf, core.AbstractValue | jax.ShapeDtypeStruct)
  return leaf if is_type else jax.typeof(leaf)
