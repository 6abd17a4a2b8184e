"""Means of trees over shards, with some leaves compressed."""

import abc
from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Sequence
import dataclasses
from typing import Any

import chex
import jax
from jax import lax
import optax

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import counters
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import varying
from shard_transforms._src.reduction import leaf_sums
from shard_transforms._src.reduction import reduction_options


@dataclasses.dataclass(frozen=True)
class SelectiveCompression(abc.ABC):
  """The mean of a tree over shards, with some leaves compressed.

  The other leaves, and all of them during the warm-up, are reduced as they are.

  Attributes:
    options: The public name that errors show, and how leaves are reduced.
    warmup_steps: How many steps are not compressed.
    seed: The seed of random numbers.
  """

  options: reduction_options.ReductionOptions
  warmup_steps: int
  seed: int

  @property
  def caller(self) -> str:
    return self.options.caller

  @property
  def axes(self) -> tuple[Hashable, ...]:
    return self.options.axes

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
      TypeError: If a leaf carries no gradient, or the weight is no number.
      ValueError: If a leaf is reduced already, the weight is no scalar or
        negative, or the state was made for other parameters or shards.
    """
    share = self._share(updates, weight)

    def mean(leaves, others, held):
      return self._mean(leaves, others, held, share, state.step)

    step = counters.add(state.step, 1)
    return self._map_leaves(mean, updates, state, step)

  @abc.abstractmethod
  def compresses(self, leaf: Any) -> bool:
    """Whether a leaf, which may be `None`, is compressed."""

  @abc.abstractmethod
  def _begin(self, param: jax.Array, position: int) -> Any:
    """Returns what is kept of a leaf before the first step."""

  @abc.abstractmethod
  def _held(self, updates: Any, treedef: Any, state: Any) -> list[Any]:
    """Returns what a state keeps of each leaf, checked."""

  @abc.abstractmethod
  def _state(self, step: jax.Array, treedef: Any, held: Sequence[Any]) -> Any:
    """Returns the state that keeps this of each leaf."""

  @abc.abstractmethod
  def _compressed_mean(
      self,
      leaves: Sequence[jax.Array],
      others: Sequence[jax.Array],
      held: Sequence[Any],
      share: leaf_sums.Share,
      step: jax.Array,
  ) -> tuple[list[jax.Array], list[jax.Array], list[Any]]:
    """Returns the means of leaves and of others, and what is kept next."""

  def _share(self, updates, weight):
    """Checks the arguments, and returns how much the shard counts.

    Raises:
      TypeError: As `__call__`.
      ValueError: As `__call__`.
    """
    weight = leaf_sums.check(updates, weight, self.options)
    varying.check_per_shard(updates, self.axes, self.caller)
    with jax.named_scope(self.caller):
      return leaf_sums.share(weight, self.options)

  def _map_leaves(self, fn, tree, state, step):
    """Applies a function to the leaves; returns the tree and the new state.

    Args:
      fn: Takes leaves that are compressed, all others, and what is kept of the
        former; returns a list of results for each of the three.
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

  def _mean(self, leaves, others, held, share, step):
    """Returns compressed means, or plain means during the warm-up."""

    def plain(held):
      means = leaf_sums.reduce([*leaves, *others], share, self.options)
      return means[: len(leaves)], means[len(leaves) :], held

    def compressed(held):
      return self._compressed_mean(leaves, others, held, share, step)

    if not leaves:
      return plain(held)
    return self._after_warmup(step, compressed, plain, held)

  def _after_warmup(self, step, compressed, plain, held):
    """Runs `compressed`, or during the warm-up `plain`."""
    if not self.warmup_steps:
      return compressed(held)
    return lax.cond(step < self.warmup_steps, plain, compressed, held)


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


def by_field(treedef: Any, held: Sequence[Any], num_fields: int) -> list[Any]:
  """Returns a tree for each field of what is kept of each leaf."""
  return [
      treedef.unflatten([None if x is None else x[i] for x in held])
      for i in range(num_fields)
  ]
