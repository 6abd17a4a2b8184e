"""What each leaf of a state belongs to: one parameter, none or several."""

from collections.abc import Callable
from collections.abc import Sequence
import contextlib
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.state import state_types
from shard_transforms.contrib._src.owners import dependence
from shard_transforms.contrib._src.owners import leaf_program
from shard_transforms.contrib._src.owners import owned_leaves
from shard_transforms.contrib._src.owners import stacks as stacks_lib
from shard_transforms.contrib._src.owners import state_layout


def trace_init(inner: optax.GradientTransformation, types: Any) -> Any:
  """Returns the program of `init` for parameters of some types."""
  return leaf_program.trace(inner.init, (), (), 1, types)


def typed_params(stacks: stacks_lib.Stacks, types: Any) -> Any:
  """Returns the types of parameters of which owners have their own alone."""
  return _types(types, map(stacks.axes_of, stacks.of(types)))


@dataclasses.dataclass(frozen=True)
class Association:
  """Reads from programs what belongs to what, and whether leaves are mixed.

  Attributes:
    inner: The transformation.
    stacks: The stacks of the parameters.
    assume_leafwise: Whether it is assumed to treat each leaf alone.
  """

  inner: optax.GradientTransformationExtraArgs
  stacks: stacks_lib.Stacks
  assume_leafwise: bool

  @property
  def same(self) -> tuple[Any, ...]:
    """The axes over whose shards what is reduced is the same."""
    # In groups, it differs between shards.
    reduction = self.stacks.reduction
    return () if reduction.groups else reduction.axes

  def of_state(self, types: Any, kinds: Any) -> list[int]:
    """Returns what each leaf of a new state belongs to.

    Args:
      types: The types of the parameters, as `inner` is shown them.
      kinds: The types of the state.

    Raises:
      ValueError: If that, or an update, mixes leaves.
    """
    known = self._by_place(types, kinds)
    of = [dependence.SHARED if x is None else x for x in known]
    trace = functools.partial(
        self.trace, self.inner.update, types, kinds, types
    )
    try:
      traced = trace(of)
    except (TypeError, KeyError, ValueError):
      # `inner` may need an extra argument, or updates of another tree than the
      # parameters. Only `update` gets these, so it checks `inner`.
      if not self.assume_leafwise:
        return self._owned(of)
      return self._owned([dependence.MIXED if x is None else x for x in known])
    found = self._depend(*traced, of)
    if (associated := found.associated(known)) != of:
      found = self._depend(*trace(associated), associated)
    self._check(found)
    return self._owned(associated)

  def _owned(self, of):
    """Returns numbers of parameters with owners; all shards have the others."""
    places = {dependence.MIXED, *self.stacks.places}
    return [x if x in places else dependence.SHARED for x in of]

  def _by_place(self, types, kinds):
    """Returns to what leaves of the state belong that are in its place."""
    numbers = jax.tree.unflatten(
        jax.tree.structure(types), self.stacks.of(types)
    )
    # A state may have no place for each parameter, such as a list.
    with contextlib.suppress(AttributeError, IndexError, TypeError, ValueError):
      kinds = state_types.map_with_params(
          self.inner, lambda _, number: number, kinds, numbers
      )
    leaves = jax.tree.leaves(kinds)
    return [leaf if isinstance(leaf, int) else None for leaf in leaves]

  def read(
      self,
      update: Callable[..., Any],
      updates: Any,
      kinds: Any,
      params: Any,
      of: Sequence[int],
  ) -> dependence.Dependence:
    """Returns what the results of a program of `update` depend on.

    Args:
      update: The function.
      updates: The types of whole updates.
      kinds: The types of the state.
      params: The types of whole parameters, if any.
      of: What each leaf of the state belongs to.

    Raises:
      ValueError: If it mixes leaves, or changes the types of updates or state.
    """
    traced = self.trace(update, updates, kinds, params, of)
    found = self._depend(*traced, of)
    self._check(found)
    return found

  def trace(
      self,
      update: Callable[..., Any],
      updates: Any,
      kinds: Any,
      params: Any,
      of: Sequence[int],
      owned_params: bool = False,
  ) -> tuple[leaf_program.LeafProgram, tuple[Any, Any]]:
    """Returns the program of `update`, and the types of updates and state.

    Args:
      update: As for `read`.
      updates: As for `read`.
      kinds: As for `read`.
      params: As for `read`.
      of: As for `read`.
      owned_params: Whether an owner has those parameters alone that it owns.
    """
    stacks = self.stacks
    given = _types(updates, map(stacks.axes_of, stacks.of(updates)))
    state = _types(kinds, map(stacks.axes_of, of))
    if owned_params:
      params = typed_params(stacks, params)
    num_shards = stacks.reduction.num_shards()
    every = stacks.axes if self.same else ()
    program = leaf_program.trace(
        update, self.same, every, num_shards, given, state, params
    )
    return program, (given, state)

  def _depend(self, program, given, of):
    """Returns what the results of a program depend on.

    Raises:
      ValueError: If they have other types than `given`, the updates and state.
    """
    _check_types(program.results, given)
    numbers = self.stacks.of(given[0])
    return dependence.Dependence.find(
        program, [*numbers, *of], len(numbers), self.same, self.stacks
    )

  def _check(self, found):
    """Refuses an inner transformation that mixes leaves.

    Raises:
      ValueError: If it does, and nobody says otherwise.
    """
    problem = None if self.assume_leafwise else found.problem()
    if problem:
      raise ValueError(_refusal(self.stacks.reduction.caller, problem))


def read_state(
    state: Any,
    stacks: stacks_lib.Stacks,
    kinds: Any,
    full_kinds: Any,
) -> tuple[list[int], Any, state_layout.StateLayout]:
  """Reads what each leaf of a state belongs to, and how it is kept.

  Args:
    state: The state.
    stacks: The stacks of the parameters.
    kinds: The types of the state of `inner`, which is shown one layer of each
      leaf.
    full_kinds: The same where it is shown all layers.

  Returns:
    What each leaf belongs to, their types as this step is given them, and
    their layout.

  Raises:
    ValueError: If it was made for other parameters or other owners.
  """
  made_for_others = (
      f'State of `{stacks.reduction.caller}` must be made for these parameters,'
      ' this number of shards and these `param_specs`, by'
      ' `shard_transforms.init_state` and `shard_transforms.state_specs`, or'
      ' for `jax.pmap` by'
      ' `jax.pmap(tx.init, axis_name=...)(replicated_params)`, got '
  )
  if not isinstance(state, owned_leaves.OwnedLeaves):
    raise ValueError(f'{made_for_others}{type(state).__name__}.')
  leaves, treedef = jax.tree.flatten(
      state.leaves, is_leaf=owned_leaves.is_place
  )
  if treedef != jax.tree.structure(kinds):
    raise ValueError(f'{made_for_others}the tree {treedef}.')
  types, of, places = jax.tree.leaves(kinds), [], {}
  given = list(types)
  for i, leaf in enumerate(leaves):
    if owned_leaves.is_place(leaf):
      of.append(leaf.of)
      places[i] = leaf
    elif jnp.shape(leaf) == types[i].shape:
      of.append(dependence.SHARED)
      given[i] = jax.typeof(leaf)
    else:
      of.append(dependence.MIXED)
  layout = state_layout.layout_of(
      stacks, of, types, jax.tree.leaves(full_kinds)
  )
  if places != layout.places:
    different = [x for i, x in places.items() if x != layout.places.get(i)]
    raise ValueError(f'{made_for_others}{different[0]!r}.')
  rows = jax.tree.map(lambda x: (jnp.shape(x)[2:], x.dtype), state.stacks)
  expected = {name: (x.shape, x.dtype) for name, x in layout.kinds.items()}
  if rows != expected:
    raise ValueError(f'{made_for_others}the stacks {rows}, not {expected}.')
  return of, treedef.unflatten(given), layout


def _types(tree, axes):
  """Returns the types of a tree, each of which varies over some axes as well.

  JAX refuses a `cond` between an update and the old state if only one of them
  varies.

  Args:
    tree: A tree of types.
    axes: The mapped axes of each leaf.
  """
  leaves, treedef = jax.tree.flatten(tree)
  make = stacks_lib.type_maker()

  def typed(kind, axes):
    before = axes_lib.varying_axes(kind)
    over = before.union(axes)
    return kind if over == before else make(kind.shape, kind.dtype, over)

  return treedef.unflatten(map(typed, leaves, axes))


def _refusal(caller, problem):
  """Returns what is said of a transformation that mixes leaves."""
  return (
      f'`inner` of `{caller}` must treat each leaf of the parameters alone, but'
      f' {problem}. Use `optax.chain(cross_shard_mean(axis_name), inner)`, for'
      ' some parameters by `optax.partition`. To clip, put'
      ' `shard_transforms.clip_by_global_norm(max_norm, axis_name)` first. If'
      f' the check is wrong, say `{caller}(..., assume_leafwise=True)`.'
  )


def _check_types(results, given):
  """Checks that results have the trees and the shapes of what was given.

  Raises:
    ValueError: If they have not.
  """
  refused = '`inner` of `owned_update` must keep the types of what it is given'
  found, expected = jax.tree.structure(results), jax.tree.structure(given)
  if found != expected:
    raise ValueError(f'{refused}, got the tree {found} for {expected}.')
  number_of_state = 1
  for (path, x), y in zip(
      jax.tree.leaves_with_path(results), jax.tree.leaves(given), strict=True
  ):
    is_state = path[0].idx == number_of_state
    if x.shape != jnp.shape(y) or (is_state and x.dtype != y.dtype):
      raise ValueError(
          f'{refused}, got {x.dtype.name}{list(x.shape)} for'
          f' {y.dtype.name}{list(jnp.shape(y))} in its'
          f' {"state" if is_state else "updates"} at'
          f' {leaves_lib.name_of(path[1:])}.'
      )
