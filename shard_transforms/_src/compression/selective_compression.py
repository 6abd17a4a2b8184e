"""Means of trees over shards, with some leaves compressed."""

import abc
from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Sequence
import dataclasses
from typing import Any, NamedTuple

import chex
import jax
from jax import lax
import optax

from shard_transforms._src.base import arguments
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import counters
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import per_shard_state
from shard_transforms._src.reduction import leaf_sums


class Kinds(NamedTuple):
  """The classes of the state as a whole, and of its part for a leaf.

  Attributes:
    state: The state: `step`, and a tree for each field of `held`.
    held: The values that a shard keeps for a leaf.
    shared: The field of `held` that is the same on all shards, if any.
  """

  state: Any
  held: Any
  shared: str = ''


@dataclasses.dataclass(frozen=True)
class SelectiveCompression(abc.ABC):
  """The mean of a tree over shards, with some leaves compressed.

  The other leaves, and all of them during the warm-up, are reduced as they are.

  Attributes:
    options: The public name that errors show, and how leaves are reduced.
    warmup_steps: How many steps are not compressed.
    seed: The seed of random numbers.
  """

  options: leaf_sums.Reduction
  warmup_steps: int
  seed: int

  def __post_init__(self):
    arguments.as_at_least('warmup_steps', self.warmup_steps, 0)
    arguments.as_int('seed', self.seed)

  @property
  def caller(self) -> str:
    return self.options.caller

  @property
  def axes(self) -> tuple[Hashable, ...]:
    return self.options.axes

  @property
  @abc.abstractmethod
  def kinds(self) -> Kinds:
    """Returns the classes of the state."""

  @abc.abstractmethod
  def compresses(self, leaf: Any) -> bool:
    """Whether a leaf, which may be `None`, is compressed."""

  @abc.abstractmethod
  def _begin(self, param: jax.Array, position: int) -> Any:
    """Returns the values kept for a leaf before the first step."""

  @abc.abstractmethod
  def _check_kept(self, leaf: Any, kept: Any) -> None:
    """Checks that the values kept for a leaf were made for it.

    Raises:
      ValueError: If they were not.
    """

  @abc.abstractmethod
  def _compressed_mean(
      self,
      leaves: Sequence[jax.Array],
      others: Sequence[jax.Array],
      held: Sequence[Any],
      share: leaf_sums.Share,
      step: jax.Array,
  ) -> tuple[list[jax.Array], list[jax.Array], list[Any]]:
    """Returns the means of leaves and of others, and the next values kept."""

  def start(self, params: optax.Params) -> Any:
    """Returns the state before the first step.

    Raises:
      NameError: If an axis is not bound.
    """
    axes_lib.size(self.axes, self.caller)
    leaves, treedef = jax.tree.flatten(params)
    held = [
        self._begin(leaf, i) if self.compresses(leaf) else None
        for i, leaf in enumerate(leaves)
    ]
    return self._state(counters.zero(), treedef, held)

  def __call__(
      self,
      updates: optax.Updates,
      state: Any,
      weight: chex.Numeric | None = None,
  ) -> tuple[optax.Updates, Any]:
    """Returns the (weighted) mean of a tree over the shards, and the state.

    Raises:
      NameError: If an axis is not bound.
      TypeError: If a leaf carries no gradient, or the weight is not a number.
      ValueError: If a leaf is reduced already, the weight is not a scalar or is
        negative, or the state was made for other parameters or shards.
    """
    share = self._share(updates, weight)

    def mean(leaves, others, held):
      def plain(held):
        means = leaf_sums.reduce([*leaves, *others], share, self.options)
        return means[: len(leaves)], means[len(leaves) :], held

      def compressed(held):
        return self._compressed_mean(leaves, others, held, share, state.step)

      if not leaves:
        return plain(held)
      return self._after_warmup(state.step, compressed, plain, held)

    step = counters.add(state.step, 1)
    return self._map_leaves(mean, updates, state, step)

  def _share(self, updates, weight):
    """Checks the arguments, and returns how much the shard counts.

    Raises:
      TypeError: As `__call__`.
      ValueError: As `__call__`.
    """
    weight = leaf_sums.check(updates, weight, self.options)
    leaves_lib.check_per_shard(updates, self.axes, self.caller)
    with jax.named_scope(self.caller):
      return leaf_sums.share(weight, self.options)

  def _map_leaves(self, fn, tree, state, step):
    """Applies a function to the leaves; returns the tree and the new state.

    Args:
      fn: Takes the leaves that are compressed, all others, and the values kept
        for the former; returns a list of results for each of the three.
      tree: The leaves.
      state: The state before the step.
      step: The number of updates after the step.
    """
    leaves, treedef = jax.tree.flatten(tree, is_leaf=leaves_lib.is_none)
    held = self._held(tree, treedef, state)
    chosen, others = choose(leaves, self.compresses)
    with jax.named_scope(self.caller):
      compressed, plain, kept = fn(
          [leaves[i] for i in chosen],
          [leaves[i] for i in others],
          [held[i] for i in chosen],
      )
    for i, x in zip(chosen + others, compressed + plain, strict=True):
      leaves[i] = x
    for i, x in zip(chosen, kept, strict=True):
      held[i] = x
    return treedef.unflatten(leaves), self._state(step, treedef, held)

  def _after_warmup(self, step, compressed, plain, held):
    """Runs `compressed`, or during the warm-up `plain`."""
    if not self.warmup_steps:
      return compressed(held)
    return lax.cond(step < self.warmup_steps, plain, compressed, held)

  def _state(self, step, treedef, held):
    """Returns the state that keeps these values for the leaves."""
    trees = {
        name: treedef.unflatten([None if x is None else x[i] for x in held])
        for i, name in enumerate(self.kinds.held._fields)
    }
    trees |= per_shard_state.store(self._per_shard(trees), self.axes)
    return self.kinds.state(step, **trees)

  def _held(self, updates, treedef, state):
    """Returns the values that a state keeps for each leaf, checked.

    Raises:
      TypeError: If a leaf is complex where the parameter is real.
      ValueError: If the state was made for other parameters, another number of
        shards, or with other options.
    """
    trees = {name: getattr(state, name) for name in self.kinds.held._fields}
    own = self._per_shard(trees)
    trees |= per_shard_state.own(own, self.axes, self.caller)
    fields = list(trees.values())
    arguments.check_like(updates, fields[0], self.caller)
    held = []
    rows = map(treedef.flatten_up_to, (updates, *fields))
    for leaf, *kept in zip(*rows, strict=True):
      held.append(None if kept[0] is None else self.kinds.held(*kept))
      self._check_kept(leaf, held[-1])
    return held

  def _per_shard(self, trees):
    """Returns those of the trees by field that differ between shards."""
    return {k: tree for k, tree in trees.items() if k != self.kinds.shared}


def choose(
    leaves: Sequence[Any], is_chosen: Callable[[Any], bool]
) -> tuple[list[int], list[int]]:
  """Returns the positions of the chosen leaves, and of all others.

  Args:
    leaves: Leaves; those that are `None` are in neither list.
    is_chosen: Whether one is chosen.
  """
  found = [i for i, leaf in enumerate(leaves) if leaf is not None]
  chosen = [i for i in found if is_chosen(leaves[i])]
  return chosen, [i for i in found if not is_chosen(leaves[i])]
