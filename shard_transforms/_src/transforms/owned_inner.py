"""The optimizer that each shard runs on the leaves that it owns, and its state.

Gradients reach their owners in rows, by one reduce-scatter; a `lax.switch` on
the shard's index unpacks them, runs the part of `inner` that its own leaves
need, and packs their updates, which an all-gather brings to all shards.
"""

from collections.abc import Mapping
import contextlib
import functools
from typing import Any

import chex
import jax
from jax import lax
import jax.numpy as jnp
import optax

from shard_transforms._src.analysis import slice_types
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import per_shard_state
from shard_transforms._src.reduction import collectives
from shard_transforms._src.reduction import leaf_sums
from shard_transforms._src.reduction import sharded_reduction
from shard_transforms._src.state import specs
from shard_transforms._src.transforms import leaf_program
from shard_transforms._src.transforms import leafwise
from shard_transforms._src.transforms import owned_leaves
from shard_transforms._src.transforms import owners as owners_lib
from shard_transforms._src.transforms import sliced_inner


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
    sliced_inner.check_mapped(self._reduction)
    # `optax.tree_utils.tree_map_params` calls `init` with an empty stand-in for
    # the parameters.
    if not jax.tree.leaves(params):
      return owned_leaves.OwnedLeaves(self._inner.init(params), jnp.zeros(0))
    owners = self._owners(params)
    program = self._trace_init(params)
    of = self._find(owners, params, program.results)
    layout = owners.layout(of, jax.tree.leaves(program.results))
    given = dict(enumerate(jax.tree.leaves(params)))
    mixed = _where(of, leafwise.MIXED)

    def start(shard):
      numbers = [*layout.of_shard(shard), *mixed]
      made = program.run(numbers, given)
      return layout.pack(shard, made), [made[i] for i in mixed]

    rows, apart = self._on_own_shard(start, owners)
    kept = program.run(_where(of, leafwise.SHARED), given)
    kept |= dict(zip(mixed, self._stored(apart), strict=True))
    return self._state(program.results, kept, rows, layout)

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
    sliced_inner.check_mapped(self._reduction)
    # It is a function of this call alone, for `inner` may close over what
    # differs between calls.
    update = functools.partial(self._inner.update, **extra_args)
    if not jax.tree.leaves(updates):
      updates, kept = update(updates, state.leaves, params)
      return updates, state._replace(leaves=kept)
    like = updates if params is None else params
    owners = self._owners(like, updates)
    kinds = self._trace_init(like).results
    of, layout = owners_lib.read(state, owners, kinds, self._reduction.caller)
    kinds = owners_lib.kinds_of(state, kinds, of)
    task = self._trace_update(owners, update, updates, kinds, params, of)
    self._check(task)
    given, given_to = self._given(
        owners, task, updates, weight, state, params, layout
    )
    given |= self._totals(owners, task, given, given_to)
    return self._run(owners, task, updates, kinds, given, given_to, layout)

  def _owners(self, like, updates=()):
    """Returns the owners of parameters like these.

    Raises:
      ValueError: If some leaves differ between shards of another axis, and some
        do not.
    """
    axes = self._reduction.axes
    others = {
        axes_lib.varying_axes(leaf).difference(axes)
        for leaf in jax.tree.leaves((like, updates))
        if leaves_lib.is_cut(leaf, 2)
    }
    more = sorted(frozenset().union(*others), key=str)
    if len(others) > 1:
      raise ValueError(
          "`params` of `shard_update(..., slices='leaves')` must be whole on"
          f' each shard, got some leaves that vary over axes of {more!r}, as'
          ' slices do, and some that do not. Leave slices to'
          " `slices='elements'`, with `optax.partition`."
      )
    num_shards = self._reduction.num_slices()
    return owners_lib.Owners.of_params(
        like, num_shards, (*axes, *more), self._cost
    )

  def _trace_init(self, like):
    types = jax.tree.map(jax.typeof, like)
    return leaf_program.trace(self._inner.init, (), 1, types)

  def _trace_update(self, owners, update, updates, kinds, params, of):
    """Returns the program of `update`.

    Args:
      owners: The owners.
      update: The function.
      updates: Whole updates.
      kinds: The types of the state.
      params: Whole parameters, if any.
      of: What each leaf of the state belongs to.
    """
    given = slice_types.Cutting(2, self._same).whole(updates)
    is_own = [number != leafwise.SHARED for number in of.values()]
    state = slice_types.Cutting(2, owners.axes).varying(kinds, is_own)
    params = jax.tree.map(jax.typeof, params)
    program = leaf_program.trace(
        update, self._same, owners.num_shards, given, state, params
    )
    _check_types(program.results, (given, state))
    return leafwise.Leafwise.of(
        program, owners.of(updates), list(of.values()), self._same
    )

  def _find(self, owners, params, kinds):
    """Returns what each leaf of the state belongs to, by its number.

    Raises:
      ValueError: If that, or an update, mixes leaves.
    """
    known = self._find_by_place(owners, params, kinds)
    of = {i: leafwise.SHARED if x is None else x for i, x in known.items()}
    # What an extra argument is missing for, which only `update` has, raises one
    # of these errors, and is checked there.
    with contextlib.suppress(TypeError, KeyError):
      update = self._inner.update
      task = self._trace_update(owners, update, params, kinds, params, of)
      found = dict(enumerate(task.associated(list(known.values()))))
      if found != of:
        of = found
        task = self._trace_update(owners, update, params, kinds, params, of)
      self._check(task)
    return of

  def _find_by_place(self, owners, params, kinds):
    """Returns to what leaves of the state belong that are in its place."""
    numbers = jax.tree.unflatten(jax.tree.structure(params), owners.of(params))
    leaves = jax.tree.leaves(kinds)
    # A state that has no place for each parameter, such as a list of its own.
    with contextlib.suppress(AttributeError, IndexError, TypeError, ValueError):
      leaves = jax.tree.leaves(
          specs.map_with_params(
              self._inner, lambda _, number: number, kinds, numbers
          )
      )
    return {
        i: leaf if isinstance(leaf, int) else None
        for i, leaf in enumerate(leaves)
    }

  def _check(self, task):
    """Refuses an inner transformation that mixes leaves.

    Raises:
      ValueError: If it does, and nobody says otherwise.
    """
    problem = None if self._assume_leafwise else task.problem()
    if problem:
      caller = self._reduction.caller
      raise ValueError(
          f"`inner` of `{caller}(..., slices='leaves')` must treat each leaf of"
          ' the parameters alone, because each shard updates those that it'
          f' owns, but {problem}. Keep such a transformation whole, as in'
          ' `optax.chain(cross_shard_mean(axis_name), inner)`: for all'
          ' parameters, or for some of them with `optax.partition`. To clip by'
          ' the global norm, put'
          ' `shard_transforms.clip_by_global_norm(max_norm, axis_name)` first'
          ' in `inner`. Or let what comes first see what is reduced:'
          ' `optax.chain(cross_shard_mean(axis_name), first,'
          " shard_update(inner, axis_name, slices='leaves',"
          " on_invariant='averaged'))`. If you know that it treats each leaf"
          f' alone, say `{caller}(..., assume_leafwise=True)`.'
      )

  def _on_own_shard(self, fn, owners):
    """Returns `fn(shard)` of the shard that runs this, the same types on all.

    Args:
      fn: Takes the number of a shard; must not send.
      owners: The owners.
    """

    def branch(shard):
      return lambda: axes_lib.to_varying(fn(shard), owners.axes)

    if owners.num_shards == 1:
      return branch(0)()
    reduction = self._reduction
    index = collectives.row_index(reduction.axes, reduction.groups)
    return lax.switch(index, list(map(branch, range(owners.num_shards))))

  def _given(self, owners, task, updates, weight, state, params, layout):
    """Returns the inputs of all shards, and a function to those of one."""
    reduction, num_updates = self._reduction, len(task.update_of)
    whole, layout_of_sent, sent = self._reduce(owners, task, updates, weight)
    stored = jax.tree.leaves(state.leaves, is_leaf=owned_leaves.is_place)
    given = dict(whole)
    for i, leaf in enumerate(stored, num_updates):
      if task.state_of[i - num_updates] == leafwise.MIXED:
        leaf = per_shard_state.own(leaf, reduction.axes, reduction.caller)
      if not owned_leaves.is_place(leaf):
        given[i] = leaf
    first = num_updates + len(stored)
    given |= dict(enumerate(jax.tree.leaves(params), first))
    rows = per_shard_state.own(state.rows, reduction.axes, reduction.caller)

    def given_to(shard):
      kept = layout.unpack(shard, rows)
      return layout_of_sent.unpack(shard, sent) | {
          num_updates + i: x for i, x in kept.items()
      }

    return given, given_to

  def _reduce(self, owners, task, updates, weight):
    """Returns reduced updates, and the rows of those that are sent to owners.

    Returns:
      The updates that all shards have, by number; the layout of the others; and
      the rows of this shard.
    """
    reduction = self._reduction
    weight = leaf_sums.check(updates, weight, reduction)
    leaves = jax.tree.leaves(updates)
    is_sent = reduction.sends_in_slices(leaves)
    sent = {
        i: param
        for i, param in enumerate(task.update_of)
        if param >= 0 and is_sent[i]
    }
    layout = owners.layout(sent, list(map(_array, leaves)))
    with jax.named_scope(reduction.caller):
      share = leaf_sums.share(weight, reduction)
      rows = layout.pack_all(
          {i: _array(leaves[i]) for i in sent}, owners.num_shards
      )
      others = [i for i in range(len(leaves)) if i not in sent]
      whole = leaf_sums.reduce([leaves[i] for i in others], share, reduction)
      own = leaf_sums.scatter(
          list(rows.values()), share, reduction, owners.num_shards
      )
    whole = dict(zip(others, whole, strict=True))
    return whole, layout, dict(zip(rows, own, strict=True))

  def _totals(self, owners, task, given, given_to):
    """Returns the sums over all leaves that `inner` asks for, by number."""
    program, totals = task.program, {}
    for i, terms in enumerate(program.terms, program.num_inputs):
      kind = program.inputs()[i]

      def own_sum(shard, terms=terms, kind=kind):
        own = [x for x in terms if owners.has(shard, task.belongs(x))]
        made = program.run(own, given | totals | given_to(shard))
        summed = sum((x.astype(kind.dtype) for x in made.values()), start=0)
        return jnp.asarray(summed, kind.dtype) + jnp.zeros(
            kind.shape, kind.dtype
        )

      summed = self._on_own_shard(own_sum, owners)
      totals[i] = collectives.psum(summed, self._same)
    return totals

  def _run(self, owners, task, updates, kinds, given, given_to, layout):
    """Returns the updates on all shards, and the next state."""
    program, num_updates = task.program, len(task.update_of)
    of = dict(enumerate(task.update_of + task.state_of))
    results = jax.tree.leaves(program.results)
    sent = owners.layout(dict(enumerate(task.update_of)), results)
    mixed = _where(of, leafwise.MIXED)

    def step(shard):
      own_state = [num_updates + i for i in layout.of_shard(shard)]
      numbers = [*sent.of_shard(shard), *own_state, *mixed]
      made = program.run(numbers, given | given_to(shard))
      kept = {i: made[num_updates + i] for i in layout.of_shard(shard)}
      apart = [made[i] for i in mixed]
      return sent.pack(shard, made), layout.pack(shard, kept), apart

    own, rows, apart = self._on_own_shard(step, owners)
    made = program.run(_where(of, leafwise.SHARED), given)
    made |= dict(zip(mixed, self._stored(apart), strict=True))
    reduction = self._reduction
    with jax.named_scope(reduction.caller):
      gathered = {
          name: collectives.gather(row, reduction.axes, reduction.groups)
          for name, row in own.items()
      }
    made |= sent.unpack_all(gathered)
    treedef = jax.tree.structure(updates)
    updates = treedef.unflatten(made[i] for i in range(num_updates))
    kept = {i - num_updates: x for i, x in made.items() if i >= num_updates}
    return updates, self._state(kinds, kept, rows, layout)

  def _stored(self, tree):
    return per_shard_state.store(tree, self._reduction.axes)

  def _state(self, kinds, kept, rows, layout):
    """Returns the state of a shard.

    Args:
      kinds: The types of the state of `inner`.
      kept: Leaves that are not in rows, by number.
      rows: The rows.
      layout: What is in them.
    """
    leaves, treedef = jax.tree.flatten(kinds)
    by_number = dict(kept) | dict(layout.places)
    made = treedef.unflatten(by_number[i] for i in range(len(leaves)))
    return owned_leaves.OwnedLeaves(made, self._stored(rows))


def _check_types(results, given):
  """Checks that results have the trees and the shapes of what was given.

  Raises:
    ValueError: If they have not.
  """
  refused = '`inner` of `shard_update` must keep the types of what it is given'
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


def _where(of: Mapping[int, int], wanted: int) -> list[int]:
  return [i for i, number in of.items() if number == wanted]


def _array(leaf):
  return leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf)
