"""A step of the shards: each runs the program of `inner` for its own leaves.

Gradients reach their owners in rows. For a stack, whose leaves have equal
programs, an owner runs one of them on its row. For all others, a `lax.switch`
on the owner unpacks the rows, runs the part of `inner` that these leaves need,
and packs their updates, which an all-gather brings to all shards.
"""

from collections.abc import Callable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from shard_transforms._src.base import states
from shard_transforms._src.owners import dependence
from shard_transforms._src.owners import inputs as inputs_lib
from shard_transforms._src.owners import layout as layout_lib
from shard_transforms._src.owners import leaf_program
from shard_transforms._src.owners import owned_leaves
from shard_transforms._src.owners import owners as owners_lib
from shard_transforms._src.reduction import collectives


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

  def with_totals(
      self,
      given: inputs_lib.Inputs,
      belongs: Callable[[int], set[int]],
      axes: tuple[Any, ...],
  ) -> inputs_lib.Inputs:
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

      # Each of the copies of an owner has it.
      is_first = owners.reduction.copy() == 0
      own = jnp.where(is_first, self.owners.on_own_shard(own_sum), 0)
      total = collectives.psum(own, axes)
      given = given._replace(shared={**given.shared, i: total})
    return given

  def results(
      self,
      layouts: Sequence[layout_lib.Layout],
      given: inputs_lib.Inputs,
      stacked: Mapping[int, jax.Array],
  ) -> tuple[list[dict[str, jax.Array]], dict[int, jax.Array]]:
    """Returns a shard's rows of each layout, and all other results by number.

    Args:
      layouts: How owners keep the results that have an owner.
      given: The inputs.
      stacked: The stacks of results that are made already, by number.
    """
    mixed = [i for i, x in enumerate(self.of) if x == dependence.MIXED]
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
      others, apart = self.owners.on_own_shard(own)
      rows = [{**x, **y} for x, y in zip(rows, others, strict=True)]
    kept = set(mixed).union(*(layout.places for layout in layouts))
    shared = [i for i in range(len(self.of)) if i not in kept]
    made = self.program.run(shared, given.shared)
    return rows, made | dict(zip(mixed, self._stored(apart), strict=True))

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
    return states.store(tree, self.owners.reduction.axes)
