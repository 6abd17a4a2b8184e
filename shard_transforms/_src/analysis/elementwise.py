"""Whether a transformation is element-wise.

Such a transformation gives the same numbers on slices of the parameters as on
the whole. It is recognized from its program, traced on types alone, by two
questions that are both needed:

* Which results depend on an element (`element_flow`)? An abstract
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

from collections.abc import Hashable
from collections.abc import Sequence
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax

from shard_transforms._src.analysis import element_flow
from shard_transforms._src.analysis import equivalence
from shard_transforms._src.analysis import interpreter
from shard_transforms._src.analysis import primitives
from shard_transforms._src.analysis import slice_types
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib

# Primitives whose arrays may have other shapes on slices.
_FLEXIBLE = primitives.ELEMENTWISE | primitives.REPEATING
_FLEXIBLE |= {'cond', 'scan', 'while'}


def find_problem(
    inner: optax.GradientTransformationExtraArgs,
    updates: Any,
    params: Any,
    num_slices: int,
    axes: Sequence[Hashable] = (),
) -> str | None:
  """Returns why `inner` cannot run on slices of the parameters alone.

  Nothing is computed; `inner` is traced on the whole and on slices.

  Args:
    inner: The transformation, with its extra arguments.
    updates: The updates, in the shapes of the parameters.
    params: The parameters, or `None`.
    num_slices: The number of slices of a leaf.
    axes: The axes over which slices alone may vary, and over which a sum is one
      over all slices.

  Returns:
    A clause that says what it does, or `None` if it is element-wise.
  """
  cutting = slice_types.Cutting(num_slices, tuple(axes))
  params_kinds = jax.tree.map(lambda x: _kind_of_param(x, axes), params)
  given = _Given(*cutting.whole((updates, params)))
  kinds = _Given(jax.tree.map(_kind_of_leaf, given.updates), params_kinds)
  init, state = equivalence.trace(inner.init, given.like)
  slices = _Given(cutting.slices(given.updates), cutting.slices(given.params))
  sliced_init, sliced_state = equivalence.trace(inner.init, slices.like)
  # Leaves whose shapes change there are shaped like the parameters.
  other_state = sliced_state
  if any(map(slice_types.is_its_own_slice, jax.tree.leaves(given.like))):
    other_state = jax.eval_shape(inner.init, slice_types.longer(given.like))
  # A mask of leaves of more than ten elements may be the same for longer
  # leaves, and not for slices.
  for tree in other_state, sliced_state:
    if jax.tree.structure(state) != jax.tree.structure(tree):
      return 'its state depends on their shapes'
  state_kinds = jax.tree.map(_kind_of_state, state, other_state)
  if problem := _problem_of_shapes(state_kinds, given.like):
    return problem
  task = _Task(inner, cutting, kinds, state_kinds)
  whole = task.trace(given, init, state)
  problem, understood = _problem_of_elements(task, whole)
  if problem:
    return problem
  try:
    sliced = task.trace(slices, sliced_init, sliced_state)
  except (TypeError, ValueError) as error:
    return f'on slices it raises: {error}'
  return _problem_of_slices(whole, sliced, understood)


@dataclasses.dataclass(frozen=True)
class _Given:
  """The arguments of a transformation: types of arrays, or their kinds.

  Attributes:
    updates: Those of the updates.
    params: Those of the parameters, or `None`.
  """

  updates: Any
  params: Any

  @property
  def like(self) -> Any:
    """The argument of `init`."""
    return self.updates if self.params is None else self.params


@dataclasses.dataclass(frozen=True)
class _Traced:
  """A transformation, traced on arrays of certain types.

  Attributes:
    given: These types.
    state: The types of its state, as it comes back from the last step.
    init: Its `init`.
    update: Its `update`.
    results: The types of its updates and its next state.
  """

  given: _Given
  state: Any
  init: interpreter.Program
  update: interpreter.Program
  results: Any


@dataclasses.dataclass(frozen=True)
class _Task:
  """A transformation to check, and what is known of its arguments.

  Attributes:
    inner: The transformation.
    cutting: How leaves are cut.
    kinds: The kinds of its arguments.
    state_kinds: The kinds of its state.
  """

  inner: optax.GradientTransformationExtraArgs
  cutting: slice_types.Cutting
  kinds: _Given
  state_kinds: Any

  def trace(self, given, init, state):
    """Traces `update`.

    Args:
      given: The types of the updates and parameters.
      init: The program of `init` on them.
      state: The types of the state.
    """
    is_cut = jax.tree.map(
        lambda kind: isinstance(kind, element_flow.Cut), self.state_kinds
    )
    state = self.cutting.varying(state, is_cut)
    program, results = equivalence.trace(
        self.inner.update, given.updates, state, given.params
    )
    return _Traced(given, state, init, program, results)


def _problem_of_shapes(state_kinds, like):
  """Returns what is wrong with the shapes of the leaves of the state."""
  shapes = {
      jnp.shape(x) for x in jax.tree.leaves(like) if slice_types.can_be_cut(x)
  }
  for path, kind in jax.tree.leaves_with_path(state_kinds):
    if isinstance(kind, element_flow.Cut) and kind.shape not in shapes:
      name = jax.tree_util.keystr(path)
      return f'its state at {name} has a shape of its own, {kind.shape}'
  return None


def _problem_of_elements(task, whole):
  """Returns what is wrong with the flow of elements, and what is understood."""
  before = whole.given.updates, whole.state
  if jax.tree.structure(whole.results) != jax.tree.structure(before):
    return 'it changes the tree of the updates or of its state', set()
  kinds, cutting = task.kinds, task.cutting
  problem, _ = _problem_of_results(
      whole.init, kinds.like, ((), task.state_kinds), cutting
  )
  if problem:
    return problem, set()
  given = kinds.updates, task.state_kinds
  return _problem_of_results(
      whole.update, (*given, kinds.params), given, cutting
  )


def _problem_of_results(program, taken, given, cutting):
  """Returns what is wrong with the results of a program, and what is not.

  Args:
    program: The program.
    taken: The kinds of its inputs.
    given: The kinds that its results must have: of updates and of the state.
    cutting: How leaves are cut.

  Returns:
    A clause or `None`, and the steps that are understood.
  """
  results, understood = element_flow.follow(
      program, jax.tree.leaves(taken), cutting.num_slices, cutting.axes
  )
  for (path, kind), result in zip(
      jax.tree.leaves_with_path(given), results, strict=True
  ):
    match result:
      case element_flow.Mixed(reason):
        return f'{reason}, in {_name(path)}', understood
      case element_flow.Whole() if isinstance(kind, element_flow.Cut):
        return f'{result.differs}, in {_name(path)}', understood
      case element_flow.Partial():
        return f'{_name(path)} depends on a sum over one slice', understood
      case element_flow.Cut() if not isinstance(kind, element_flow.Cut):
        return (
            f'{_name(path)}, which is not cut, depends on elements',
            understood,
        )
      case element_flow.Cut() if not result.is_plain:
        return f'{_name(path)} has further dimensions', understood
  return None, understood


def _problem_of_slices(whole, sliced, understood):
  """Returns what is wrong if the program on slices is a different one.

  Args:
    whole: The trace on the whole.
    sliced: The trace on slices.
    understood: The steps of the former that are known to do the same.
  """
  pairs = zip(
      jax.tree.leaves(whole.given.like),
      jax.tree.leaves(sliced.given.like),
      strict=True,
  )
  sizes = {
      (math.prod(jnp.shape(x)), math.prod(jnp.shape(y)))
      for x, y in pairs
      if jnp.shape(x) != jnp.shape(y)
  }
  if not equivalence.are_equivalent(
      whole.init, sliced.init, sizes, _is_flexible
  ):
    return 'how its state starts depends on their shapes'
  if not equivalence.are_equivalent(
      whole.update,
      sliced.update,
      sizes,
      lambda step: step in understood or _is_flexible(step),
  ):
    return 'what it does depends on their shapes'
  return None


def _is_flexible(step):
  return step.name in _FLEXIBLE


def _kind_of_state(leaf, longer):
  if leaf.shape != longer.shape:
    return element_flow.Cut(leaf.shape)
  return element_flow.fixed(leaf, 'its state')


def _kind_of_leaf(leaf):
  if slice_types.can_be_cut(leaf):
    return element_flow.Cut(jnp.shape(leaf), ends_in_zeros=True)
  return element_flow.fixed(leaf, 'a parameter that is not cut')


def _kind_of_param(leaf, axes):
  if axes_lib.varying_axes(leaf).intersection(axes):
    return element_flow.Mixed(
        'shards bring numbers of their own, such as parameters of `per_shard`'
        ' in place of replicated ones'
    )
  return _kind_of_leaf(leaf)


def _name(path):
  number, *rest = path
  name = leaves_lib.name_of(rest)
  return f'its {("updates", "state")[number.idx]} at {name}'
