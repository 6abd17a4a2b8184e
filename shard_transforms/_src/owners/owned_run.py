"""A step of the shards: each runs the program of `inner` for its own leaves.

Gradients reach their owners in rows. For a stack, whose leaves have equal
programs, an owner runs one of them on its row. For all others, a `lax.switch`
on the owner unpacks the rows, runs the part of `inner` that these leaves need,
and packs their updates, which an all-gather brings to all shards.
"""

import collections
from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
from typing import Any, NamedTuple

import chex
import jax
from jax import lax
import jax.numpy as jnp
import optax

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import per_shard_state
from shard_transforms._src.owners import dependence
from shard_transforms._src.owners import equal_programs
from shard_transforms._src.owners import layout as layout_lib
from shard_transforms._src.owners import leaf_program
from shard_transforms._src.owners import owned_leaves
from shard_transforms._src.owners import owners as owners_lib
from shard_transforms._src.reduction import collectives
from shard_transforms._src.reduction import leaf_sums


class Inputs(NamedTuple):
  """The inputs of a program, by their numbers.

  Attributes:
    shared: Those that all shards have.
    kept: How owners keep the others.
    rows: The rows of this shard, for each of `kept`.
  """

  shared: Mapping[int, jax.Array]
  kept: Sequence[layout_lib.Layout] = ()
  rows: Sequence[Mapping[str, jax.Array]] = ()

  def of_owner(self, owner: int) -> dict[int, jax.Array]:
    """Returns the inputs of an owner, if this shard is a copy of it."""
    found = dict(self.shared)
    for layout, rows in zip(self.kept, self.rows, strict=True):
      found |= layout.unpack([owner], rows)
    return found

  def stack(self, number: int) -> jax.Array | None:
    """Returns the stack in which this shard has an input, if it has one."""
    pairs = zip(self.kept, self.rows, strict=True)
    found = ((rows, layout.stack_of(number)) for layout, rows in pairs)
    return next((rows[name] for rows, name in found if name), None)


class Stack(NamedTuple):
  """A stack whose leaves have equal programs.

  Attributes:
    length: The number of leaves of an owner.
    outputs: The outputs of the program of the first leaf.
    inputs: For each input of its own that it reads, that of each leaf, those of
      an owner one behind the other.
  """

  length: int
  outputs: Sequence[int]
  inputs: Sequence[Sequence[int]]

  def reads_from(self, number: int) -> bool:
    """Whether it reads inputs from this number on."""
    return any(numbers[0] >= number for numbers in self.inputs)


@dataclasses.dataclass(frozen=True)
class OwnedRun:
  """A program. Each shard runs its part for the leaves that the shard owns.

  Attributes:
    program: The program.
    of: What each of its results belongs to.
    owners: The owners.
  """

  program: leaf_program.LeafProgram
  of: Sequence[int]
  owners: owners_lib.Owners

  def inputs(
      self,
      updates: optax.Updates,
      weight: chex.Numeric | None,
      state: owned_leaves.OwnedLeaves,
      params: optax.Params | None,
      layout: layout_lib.Layout,
  ) -> Inputs:
    """Returns the inputs of the program; sends rows of updates to owners."""
    first, axes = len(jax.tree.leaves(updates)), self.owners.reduction.axes
    caller = self.owners.reduction.caller
    shared, layout_of_sent, sent = self._reduced(updates, weight)
    stored = jax.tree.leaves(state.leaves, is_leaf=layout_lib.is_place)
    for i, leaf in enumerate(stored, first):
      if self._is_mixed(i):
        leaf = per_shard_state.own(leaf, axes, caller)
      if not layout_lib.is_place(leaf):
        shared[i] = leaf
    shared |= enumerate(jax.tree.leaves(params), first + len(stored))
    rows = per_shard_state.own(state.rows, axes, caller)
    return Inputs(shared, (layout_of_sent, layout), (sent, rows))

  def _reduced(self, updates, weight):
    """Reduces updates, and sends rows of them to owners.

    Returns:
      The updates that all shards have, by number; the layout of the others; and
      the rows of this shard.
    """
    reduction, owners = self.owners.reduction, self.owners.all
    weight = leaf_sums.check(updates, weight, reduction)
    leaves = jax.tree.leaves(updates)
    pairs = zip(self.of, reduction.sends_in_slices(leaves), strict=False)
    of = [number if cut else dependence.SHARED for number, cut in pairs]
    arrays = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in leaves]
    layout = self.owners.layout(of, arrays)
    others = [i for i in range(len(leaves)) if i not in layout.places]
    with jax.named_scope(reduction.caller):
      share = leaf_sums.share(weight, reduction)
      rows = layout.pack(owners, dict(enumerate(arrays)))
      parts = [
          row.reshape(len(owners), *layout.rows[name].shape)
          for name, row in rows.items()
      ]
      own = leaf_sums.scatter(parts, share, reduction, len(owners))
      whole = leaf_sums.reduce([leaves[i] for i in others], share, reduction)
    whole = dict(zip(others, whole, strict=True))
    return whole, layout, dict(zip(rows, own, strict=True))

  def with_totals(
      self,
      given: Inputs,
      belongs: Callable[[int], set[int]],
      axes: tuple[Any, ...],
  ) -> Inputs:
    """Returns inputs with the sums over all leaves that `inner` asks for.

    Args:
      given: The other inputs.
      belongs: Returns the parameters to which a term of a sum belongs.
      axes: The mapped axes of the sums.
    """
    program, owners = self.program, self.owners
    for i, terms in enumerate(program.terms, program.num_inputs):
      kind = program.jaxpr.in_avals[i]

      def own_sum(owner, terms=terms, kind=kind, given=given):
        own = [x for x in terms if owners.adds(owner, belongs(x))]
        made = program.run(own, given.of_owner(owner))
        zero = jnp.zeros(kind.shape, kind.dtype)
        summed = sum((x.astype(kind.dtype) for x in made.values()), start=0)
        return jnp.asarray(summed, kind.dtype) + zero

      if len(owners.all) == 1:
        total = own_sum(-1)
      else:
        # Each of the copies of an owner has it.
        is_first = owners.reduction.copy() == 0
        own = jnp.where(is_first, self._on_own_shard(own_sum), 0)
        total = collectives.psum(own, axes)
      given = given._replace(shared={**given.shared, i: total})
    return given

  def results(
      self,
      layouts: Sequence[layout_lib.Layout],
      given: Inputs,
      stacks: Sequence[Stack] = (),
      program: leaf_program.LeafProgram | None = None,
  ) -> tuple[list[dict[str, jax.Array]], dict[int, jax.Array]]:
    """Returns a shard's rows of each layout, and all other results by number.

    Args:
      layouts: How owners keep the results that have an owner.
      given: The inputs.
      stacks: Those of them that are made by one program.
      program: The program of the stacks.
    """
    mixed = [i for i in range(len(self.of)) if self._is_mixed(i)]
    stacked = {}
    for stack in stacks:
      stacked |= self._run_stack(stack, given, program)
    rows = [
        {x.places[i].row: row for i, row in stacked.items() if i in x.places}
        for x in layouts
    ]

    def own(owner):
      kept = [
          i
          for layout, done in zip(layouts, rows, strict=True)
          for i in layout.of_owner(owner)
          if layout.places[i].row not in done
      ]
      made = self.program.run([*kept, *mixed], given.of_owner(owner))
      packed = [
          layout.pack([owner], made, done.keys())
          for layout, done in zip(layouts, rows, strict=True)
      ]
      return packed, [made[i] for i in mixed]

    apart = []
    if mixed or sum(map(len, rows)) < sum(len(x.rows) for x in layouts):
      others, apart = self._on_own_shard(own)
      rows = [{**x, **y} for x, y in zip(rows, others, strict=True)]
    kept = set(mixed).union(*(layout.places for layout in layouts))
    shared = [i for i in range(len(self.of)) if i not in kept]
    made = self.program.run(shared, given.shared)
    return rows, made | dict(zip(mixed, self._stored(apart), strict=True))

  def _run_stack(self, stack, given, program):
    """Returns the stacks that a program makes for each of the leaves of one."""

    def chosen(numbers):
      def own(owner):
        leaves, first = given.of_owner(owner), owner * stack.length
        own = numbers[first : first + stack.length]
        return jnp.stack([leaves[i] for i in own])

      return self._on_own_shard(own)

    def run(own):
      return program.run(stack.outputs, {**given.shared, **own})

    own = {
        numbers[0]: chosen(numbers) if kept is None else kept
        for numbers in stack.inputs
        for kept in [given.stack(numbers[0])]
    }
    if stack.length > 1:
      return jax.vmap(run)(own)
    made = run({i: lax.squeeze(x, (0,)) for i, x in own.items()})
    return {i: lax.expand_dims(x, (0,)) for i, x in made.items()}

  def stacks(self, layouts: Sequence[layout_lib.Layout]) -> list[Stack]:
    """Returns the stacks whose leaves have equal programs.

    Args:
      layouts: How owners keep the results that have an owner.
    """
    results = collections.defaultdict(list)
    for layout in layouts:
      for i in filter(layout.stack_of, layout.places):
        results[self.of[i]].append(i)
    given = collections.defaultdict(list)
    num_params = self.program.num_inputs - len(self.of)
    for i, param in enumerate((*self.of, *range(num_params))):
      given[param].append(i)
    parts, found = equal_programs.Parts.of(self.program.flat), []
    for params in self.owners.stacks:
      keys = [parts.key(results[param], given[param]) for param in params]
      (first, read), *others = keys
      if all(key == first for key, _ in others):
        own = [[given[param][k] for param in params] for k in sorted(read)]
        length = len(params) // len(self.owners.all)
        found.append(Stack(length, results[params[0]], own))
    return found

  def _is_mixed(self, number):
    of = self.of[number]
    return of == dependence.MIXED and self.owners.varies(of)

  def _on_own_shard(self, fn):
    """Returns `fn(owner)` of this shard's owner, which must not send."""

    def branch(owner):
      return lambda: axes_lib.to_varying(fn(owner), self.owners.axes)

    branches = list(map(branch, self.owners.all))
    if len(branches) == 1:
      return branches[0]()
    return lax.switch(self.owners.reduction.owner(), branches)

  def gathered(
      self, layout: layout_lib.Layout, rows: Mapping[str, jax.Array]
  ) -> dict[int, jax.Array]:
    """Returns the leaves of all owners by number, given the rows of one."""
    reduction = self.owners.reduction
    with jax.named_scope(reduction.caller):
      whole = reduction.gather_rows([*rows.values()])
    joined = [x.reshape(-1, *x.shape[2:]) for x in whole]
    return layout.unpack(self.owners.all, dict(zip(rows, joined, strict=True)))

  def state(
      self,
      kinds: Any,
      made: Mapping[int, jax.Array],
      layout: layout_lib.Layout,
      rows: Mapping[str, jax.Array],
      first: int = 0,
  ) -> owned_leaves.OwnedLeaves:
    """Returns the state of a shard.

    Args:
      kinds: The types of the state of `inner`.
      made: Results by number, with the leaves that are not in rows.
      layout: Where the others are.
      rows: The rows.
      first: The number of the first leaf of the state.
    """
    treedef = jax.tree.structure(kinds)
    by_number = {**made, **layout.places}
    leaves = (by_number[first + i] for i in range(treedef.num_leaves))
    return owned_leaves.OwnedLeaves(
        treedef.unflatten(leaves), self._stored(rows)
    )

  def _stored(self, tree):
    return per_shard_state.store(tree, self.owners.reduction.axes)
