"""The optimizer that each shard runs on the leaves that it owns, and its state.

Gradients reach their owners in rows, by one reduce-scatter; a `lax.switch` on
the shard's index unpacks them, runs the part of `inner` that its own leaves
need, and packs their updates, which an all-gather brings to all shards.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import dataclasses
import functools
from typing import Any

import chex
import jax
from jax import core
from jax import lax
import jax.numpy as jnp
import optax

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import states
from shard_transforms._src.owners import leaf_program
from shard_transforms._src.owners import owned_leaves
from shard_transforms._src.owners import owners as owners_lib
from shard_transforms._src.reduction import collectives
from shard_transforms._src.reduction import leaf_sums
from shard_transforms._src.reduction import sharded_reduction
from shard_transforms._src.state import specs


class OwnedInner:
  """A transformation that each shard runs on the leaves that it owns."""

  def __init__(
      self,
      inner: optax.GradientTransformationExtraArgs,
      reduction: sharded_reduction.ShardedReduction,
      cost: owners_lib.Cost | None = None,
      assume_leafwise: bool = False,
  ):
    self._inner = inner
    self._reduction = reduction
    self._cost = cost
    self._assume_leafwise = assume_leafwise
    # In groups, what is reduced differs between shards.
    self._same = () if reduction.groups else reduction.axes

  def init(self, params: optax.Params) -> owned_leaves.OwnedLeaves:
    """Returns the initial state, as each shard keeps it.

    Raises:
      ValueError: If it mixes leaves, or an axis of the mesh is not mapped.
    """
    self._reduction.check_mapped()
    # `optax.tree_utils.tree_map_params` calls `init` with an empty stand-in for
    # the parameters.
    if not jax.tree.leaves(params):
      return owned_leaves.OwnedLeaves(self._inner.init(params), jnp.zeros(0))
    owners = owners_lib.assign(params, (), self._reduction, self._cost)
    program = self._trace_init(params)
    of = self._find(owners, params, program.results)
    layout = owners.layout(of, jax.tree.leaves(program.results))
    run = _Run(program, of, owners, self._reduction)
    given = dict(enumerate(jax.tree.leaves(params)))
    (rows,), made = run.results([layout], given)
    return run.state(program.results, made, layout, rows)

  def update(
      self,
      updates: optax.Updates,
      weight: chex.Numeric | None,
      state: owned_leaves.OwnedLeaves,
      params: optax.Params | None,
      extra_args: Mapping[str, Any],
  ) -> tuple[optax.Updates, owned_leaves.OwnedLeaves]:
    """Returns the updates, the same on all shards, and the next state.

    Args:
      updates: Each shard's own.
      weight: How much the shard counts, if not the same.
      state: As `init` returns it.
      params: Whole parameters, if any.
      extra_args: The extra arguments of its `update`.

    Raises:
      NameError: If an axis is not bound.
      TypeError: If a leaf is an integer or boolean, or the weight is no number.
      ValueError: As `init`, or if the state was made for other parameters.
    """
    self._reduction.check_mapped()
    # It is a function of this call alone, for `inner` may close over what
    # differs between calls.
    update = functools.partial(self._inner.update, **extra_args)
    if not jax.tree.leaves(updates):
      updates, kept = update(updates, state.leaves, params)
      return updates, state._replace(leaves=kept)
    like = updates if params is None else params
    owners = owners_lib.assign(like, updates, self._reduction, self._cost)
    num_updates = len(jax.tree.leaves(updates))
    kinds = self._trace_init(like).results
    of, kinds, layout = owners_lib.read(
        state, owners, kinds, num_updates, self._reduction.caller
    )
    traced = self._trace_update(owners, update, updates, kinds, params, of)
    found = self._follow(owners, *traced, of)
    self._check(found)
    program = found.program
    run = _Run(program, found.of, owners, self._reduction)
    given, given_to = run.inputs(updates, weight, state, params, layout)
    given |= run.totals(found.belongs, self._same, given, given_to)
    types = jax.tree.leaves(program.results)[:num_updates]
    sent = owners.layout(found.of[:num_updates], types)
    (own, rows), made = run.results([sent, layout], given, given_to)
    made |= run.gathered(sent, own)
    updates = jax.tree.unflatten(
        jax.tree.structure(updates), (made[i] for i in range(num_updates))
    )
    return updates, run.state(kinds, made, layout, rows, num_updates)

  def _trace_init(self, like):
    types = jax.tree.map(jax.typeof, like)
    return leaf_program.trace(self._inner.init, (), 1, types)

  def _trace_update(self, owners, update, updates, kinds, params, of):
    """Returns the program of `update`, and the types of updates and state.

    Args:
      owners: The owners.
      update: The function.
      updates: Whole updates.
      kinds: The types of the state.
      params: Whole parameters, if any.
      of: What each leaf of the state belongs to.
    """
    cut = [leaves_lib.is_cut(x, 2) for x in jax.tree.leaves(updates)]
    given = _types(updates, cut, self._same, self._same)
    is_own = [number != leaf_program.SHARED for number in of]
    state = _types(kinds, is_own, owners.axes)
    params = jax.tree.map(jax.typeof, params)
    program = leaf_program.trace(
        update, self._same, owners.num_shards, given, state, params
    )
    return program, (given, state)

  def _follow(self, owners, program, given, of):
    """Returns what the results of a program depend on.

    Raises:
      ValueError: If they have other types than `given`, the updates and state.
    """
    _check_types(program.results, given)
    of_updates = owners.of(given[0])
    return leaf_program.Dependence.find(
        program, [*of_updates, *of], len(of_updates), self._same
    )

  def _find(self, owners, params, kinds):
    """Returns what each leaf of the state belongs to.

    Raises:
      ValueError: If that, or an update, mixes leaves.
    """
    known = self._find_by_place(owners, params, kinds)
    of = [leaf_program.SHARED if x is None else x for x in known]
    trace = functools.partial(
        self._trace_update, owners, self._inner.update, params, kinds, params
    )
    try:
      traced = trace(of)
    except (TypeError, KeyError, ValueError):
      # `inner` may need an extra argument, or updates of another tree than the
      # parameters. Only `update` gets these, so it checks `inner`.
      if not self._assume_leafwise:
        return of
      return [leaf_program.MIXED if x is None else x for x in known]
    found = self._follow(owners, *traced, of)
    if (associated := found.associated(known)) != of:
      of = associated
      found = self._follow(owners, *trace(of), of)
    self._check(found)
    return of

  def _find_by_place(self, owners, params, kinds):
    """Returns to what leaves of the state belong that are in its place."""
    numbers = jax.tree.unflatten(jax.tree.structure(params), owners.of(params))
    # A state may have no place for each parameter, such as a list.
    with contextlib.suppress(AttributeError, IndexError, TypeError, ValueError):
      kinds = specs.map_with_params(
          self._inner, lambda _, number: number, kinds, numbers
      )
    leaves = jax.tree.leaves(kinds)
    return [leaf if isinstance(leaf, int) else None for leaf in leaves]

  def _check(self, found):
    """Refuses an inner transformation that mixes leaves.

    Raises:
      ValueError: If it does, and nobody says otherwise.
    """
    problem = None if self._assume_leafwise else found.problem()
    if problem:
      raise ValueError(_refusal(self._reduction.caller, problem))


@dataclasses.dataclass(frozen=True)
class _Run:
  """A program. Each shard runs its part for the leaves that the shard owns.

  Attributes:
    program: The program.
    of: What each of its results belongs to.
    owners: The owners.
    reduction: How updates are reduced.
  """

  program: leaf_program.LeafProgram
  of: Sequence[int]
  owners: owners_lib.Owners
  reduction: sharded_reduction.ShardedReduction

  def results(self, layouts, given, given_to=lambda shard: {}):
    """Returns a shard's rows of each layout, and all other results by number.

    Args:
      layouts: How shards keep the results that have an owner.
      given: The inputs that all shards have, by number.
      given_to: Returns the inputs that a shard alone has.
    """
    mixed = self._where(leaf_program.MIXED)

    def own(shard):
      kept = [i for layout in layouts for i in layout.of_shard(shard)]
      made = self.program.run([*kept, *mixed], given | given_to(shard))
      rows = [layout.pack([shard], made) for layout in layouts]
      return rows, [made[i] for i in mixed]

    rows, apart = self._on_own_shard(own)
    made = self.program.run(self._where(leaf_program.SHARED), given)
    return rows, made | dict(zip(mixed, self._stored(apart), strict=True))

  def _where(self, wanted):
    return [i for i, number in enumerate(self.of) if number == wanted]

  def _on_own_shard(self, fn):
    """Returns `fn(shard)` of the shard that runs this, which must not send."""

    def branch(shard):
      return lambda: axes_lib.to_varying(fn(shard), self.owners.axes)

    if self.owners.num_shards == 1:
      return branch(0)()
    index = collectives.row_index(self.reduction.axes, self.reduction.groups)
    return lax.switch(index, list(map(branch, range(self.owners.num_shards))))

  def inputs(self, updates, weight, state, params, layout):
    """Returns the inputs of all shards, and a function to those of one."""
    first, axes = len(jax.tree.leaves(updates)), self.reduction.axes
    caller = self.reduction.caller
    given, layout_of_sent, sent = self._reduced(updates, weight)
    stored = jax.tree.leaves(state.leaves, is_leaf=owned_leaves.is_place)
    for i, leaf in enumerate(stored, first):
      if self.of[i] == leaf_program.MIXED:
        leaf = states.own(leaf, axes, caller)
      if not owned_leaves.is_place(leaf):
        given[i] = leaf
    given |= enumerate(jax.tree.leaves(params), first + len(stored))
    rows = states.own(state.rows, axes, caller)

    def given_to(shard):
      kept = layout.unpack([shard], rows)
      return layout_of_sent.unpack([shard], sent) | kept

    return given, given_to

  def _reduced(self, updates, weight):
    """Reduces updates, and sends rows of them to owners.

    Returns:
      The updates that all shards have, by number; the layout of the others; and
      the rows of this shard.
    """
    reduction, shards = self.reduction, range(self.owners.num_shards)
    weight = leaf_sums.check(updates, weight, reduction)
    leaves = jax.tree.leaves(updates)
    pairs = zip(self.of, reduction.sends_in_slices(leaves), strict=False)
    of = [number if cut else leaf_program.SHARED for number, cut in pairs]
    arrays = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in leaves]
    layout = self.owners.layout(of, arrays)
    others = [i for i in range(len(leaves)) if i not in layout.places]
    with jax.named_scope(reduction.caller):
      share = leaf_sums.share(weight, reduction)
      rows = layout.pack(shards, dict(enumerate(arrays)))
      rows = {name: x.reshape(len(shards), -1) for name, x in rows.items()}
      whole = leaf_sums.reduce([leaves[i] for i in others], share, reduction)
      own = leaf_sums.scatter(
          list(rows.values()), share, reduction, len(shards)
      )
    whole = dict(zip(others, whole, strict=True))
    return whole, layout, dict(zip(rows, own, strict=True))

  def totals(self, belongs, axes, given, given_to):
    """Returns the sums over all leaves that `inner` asks for, by number.

    Args:
      belongs: Returns the parameters to which a term of a sum belongs.
      axes: The mapped axes of the sums.
      given: As for `results`.
      given_to: As for `results`.
    """
    program, totals = self.program, {}
    for i, terms in enumerate(program.terms, program.num_inputs):
      kind = program.jaxpr.in_avals[i]

      def own_sum(shard, terms=terms, kind=kind):
        own = [x for x in terms if self.owners.has(shard, belongs(x))]
        made = program.run(own, given | totals | given_to(shard))
        zero = jnp.zeros(kind.shape, kind.dtype)
        summed = sum((x.astype(kind.dtype) for x in made.values()), start=0)
        return jnp.asarray(summed, kind.dtype) + zero

      totals[i] = collectives.psum(self._on_own_shard(own_sum), axes)
    return totals

  def gathered(self, layout, rows):
    """Returns the leaves of all shards by number, given the rows of one."""
    axes, groups = self.reduction.axes, self.reduction.groups
    with jax.named_scope(self.reduction.caller):
      whole = {
          name: collectives.gather(row, axes, groups).reshape(-1)
          for name, row in rows.items()
      }
    return layout.unpack(range(self.owners.num_shards), whole)

  def state(self, kinds, made, layout, rows, first=0):
    """Returns the state of a shard.

    Args:
      kinds: The types of the state of `inner`.
      made: Results by number, with the leaves that are not in rows.
      layout: Where the others are.
      rows: The rows.
      first: The number of the first leaf of the state.
    """
    treedef = jax.tree.structure(kinds)
    by_number = made | layout.places
    leaves = (by_number[first + i] for i in range(treedef.num_leaves))
    return owned_leaves.OwnedLeaves(
        treedef.unflatten(leaves), self._stored(rows)
    )

  def _stored(self, tree):
    return states.store(tree, self.reduction.axes)


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
      f'`inner` of `{caller}` must treat each leaf of the parameters alone,'
      ' because each shard updates those that it owns, but'
      f' {problem}. Keep such a transformation whole, as in'
      ' `optax.chain(cross_shard_mean(axis_name), inner)`: for all'
      ' parameters, or for some of them with `optax.partition`. To clip by'
      ' the global norm, put'
      ' `shard_transforms.clip_by_global_norm(max_norm, axis_name)` first'
      ' in `inner`. Or let what comes first see what is reduced:'
      ' `optax.chain(cross_shard_mean(axis_name), first,'
      f" {caller}(inner, axis_name, on_invariant='averaged'))`. If you know"
      ' that it treats each leaf alone, say'
      f' `{caller}(..., assume_leafwise=True)`.'
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
