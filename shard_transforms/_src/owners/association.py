"""What each leaf of a state belongs to: one parameter, none or several."""

from collections.abc import Callable
from collections.abc import Sequence
import contextlib
import dataclasses
import functools
import itertools
from typing import Any

import jax
from jax import core
import jax.numpy as jnp
import optax

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.owners import dependence
from shard_transforms._src.owners import layout as layout_lib
from shard_transforms._src.owners import leaf_program
from shard_transforms._src.owners import owned_leaves
from shard_transforms._src.owners import owners as owners_lib
from shard_transforms._src.state import specs


def trace_init(inner: optax.GradientTransformation, params: Any) -> Any:
  """Returns the program of `init`."""
  types = jax.tree.map(jax.typeof, params)
  return leaf_program.trace(inner.init, (), 1, types)


@dataclasses.dataclass(frozen=True)
class Association:
  """Reads from programs what belongs to what, and whether leaves are mixed.

  Attributes:
    inner: The transformation.
    owners: The owners.
    assume_leafwise: Whether it is assumed to treat each leaf alone.
  """

  inner: optax.GradientTransformationExtraArgs
  owners: owners_lib.Owners
  assume_leafwise: bool

  @property
  def same(self) -> tuple[Any, ...]:
    """The axes over whose shards what is reduced is the same."""
    # In groups, it differs between shards.
    reduction = self.owners.reduction
    return () if reduction.groups else reduction.axes

  def of_state(self, params: Any, kinds: Any) -> list[int]:
    """Returns what each leaf of a new state belongs to.

    Args:
      params: The parameters.
      kinds: The types of the state.

    Raises:
      ValueError: If that, or an update, mixes leaves.
    """
    known = self._by_place(params, kinds)
    of = [dependence.SHARED if x is None else x for x in known]
    trace = functools.partial(
        self.trace, self.inner.update, params, kinds, params
    )
    try:
      traced = trace(of)
    except (TypeError, KeyError, ValueError):
      # `inner` may need an extra argument, or updates of another tree than the
      # parameters. Only `update` gets these, so it checks `inner`.
      if not self.assume_leafwise:
        return of
      return [dependence.MIXED if x is None else x for x in known]
    found = self._depend(*traced, of)
    if (associated := found.associated(known)) != of:
      found = self._depend(*trace(associated), associated)
    self._check(found)
    return associated

  def _by_place(self, params, kinds):
    """Returns to what leaves of the state belong that are in its place."""
    numbers = jax.tree.unflatten(
        jax.tree.structure(params), self.owners.of(params)
    )
    # A state may have no place for each parameter, such as a list.
    with contextlib.suppress(AttributeError, IndexError, TypeError, ValueError):
      kinds = specs.map_with_params(
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
      updates: Whole updates.
      kinds: The types of the state.
      params: Whole parameters, if any.
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
      owned_params: Whether each shard has other parameters.
    """
    owners, same = self.owners, self.same
    cut = [leaves_lib.is_cut(x, 2) for x in jax.tree.leaves(updates)]
    given = _types(updates, cut, same, same)
    state = _types(kinds, map(owners.varies, of), owners.axes)
    params = _types(params, itertools.repeat(owned_params), owners.axes)
    num_shards = owners.reduction.num_shards()
    program = leaf_program.trace(update, same, num_shards, given, state, params)
    return program, (given, state)

  def _depend(self, program, given, of):
    """Returns what the results of a program depend on.

    Raises:
      ValueError: If they have other types than `given`, the updates and state.
    """
    _check_types(program.results, given)
    numbers = self.owners.of(given[0])
    return dependence.Dependence.find(
        program, [*numbers, *of], len(numbers), self.same
    )

  def _check(self, found):
    """Refuses an inner transformation that mixes leaves.

    Raises:
      ValueError: If it does, and nobody says otherwise.
    """
    problem = None if self.assume_leafwise else found.problem()
    if problem:
      raise ValueError(_refusal(self.owners.reduction.caller, problem))


def read_state(
    state: Any, owners: owners_lib.Owners, kinds: Any, first: int
) -> tuple[list[int], Any, layout_lib.Layout]:
  """Reads what each leaf of a state belongs to, and how it is kept.

  Args:
    state: The state.
    owners: The owners of the parameters.
    kinds: The types of the state of `inner`.
    first: The number of the first leaf in the layout.

  Returns:
    What each leaf belongs to, their types as this step is given them, and
    their layout.

  Raises:
    ValueError: If it was made for other parameters or other owners.
  """
  made_for_others = (
      f'State of `{owners.reduction.caller}` must be made for these parameters,'
      ' this number of shards and this `cost`, by'
      ' `shard_transforms.init_state` and `shard_transforms.state_specs`, or'
      ' for `jax.pmap` by'
      ' `jax.pmap(tx.init, axis_name=...)(replicated_params)`, got '
  )
  if not isinstance(state, owned_leaves.OwnedLeaves):
    raise ValueError(f'{made_for_others}{type(state).__name__}.')
  leaves, treedef = jax.tree.flatten(state.leaves, is_leaf=layout_lib.is_place)
  if treedef != jax.tree.structure(kinds):
    raise ValueError(f'{made_for_others}the tree {treedef}.')
  types, of, places = jax.tree.leaves(kinds), [], {}
  given = list(types)
  for i, leaf in enumerate(leaves):
    if layout_lib.is_place(leaf):
      of.append(leaf.of)
      places[first + i] = leaf
    elif jnp.shape(leaf) == types[i].shape:
      of.append(dependence.SHARED)
      given[i] = jax.typeof(leaf)
    else:
      of.append(dependence.MIXED)
  layout = owners.layout(of, types, first)
  if places != layout.places:
    different = [x for i, x in places.items() if x != layout.places.get(i)]
    raise ValueError(f'{made_for_others}{different[0]!r}.')
  rows = jax.tree.map(lambda x: (jnp.shape(x)[1:], x.dtype), state.rows)
  expected = {name: (x.shape, x.dtype) for name, x in layout.rows.items()}
  if rows != expected:
    raise ValueError(f'{made_for_others}the rows {rows}, not {expected}.')
  return of, treedef.unflatten(given), layout


def _types(tree, is_own, axes, ignored=()):
  """Returns the types of a tree in which what owners have varies over `axes`.

  JAX refuses a `cond` between an update and the old state if only one of them
  varies.

  Args:
    tree: A tree of arrays or types.
    is_own: Whether an owner has it, for each leaf.
    axes: The mapped axes.
    ignored: Those over which nothing else varies.
  """
  leaves, treedef = jax.tree.flatten(tree)

  # Trees have many leaves of few types, and tracing takes long.
  @functools.cache
  def typed(kind, is_own):
    before = axes_lib.varying_axes(kind)
    over = before.difference(ignored).union(axes if is_own else ())
    if over == before:
      return kind
    return jax.eval_shape(
        lambda: axes_lib.to_varying(jnp.zeros(kind.shape, kind.dtype), (*over,))
    )

  is_type = [isinstance(x, core.AbstractValue) for x in leaves]
  kinds = [
      x if known else jax.typeof(x)
      for x, known in zip(leaves, is_type, strict=True)
  ]
  return treedef.unflatten(map(typed, kinds, is_own))


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
