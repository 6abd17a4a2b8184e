"""Rounds: in which steps the shards meet, and which part of the parameters."""

from collections.abc import Sequence
import dataclasses
import math
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

from shard_transforms._src.base import arguments
from shard_transforms._src.base import leaves as leaves_lib

_FRAGMENTS = '`fragments` of `local_updates`'


class Due(NamedTuple):
  """What happens in a step, the same on all shards.

  Attributes:
    sends: For each fragment, whether shards send it, bool [].
    mixes: For each fragment, whether shards take it over, bool [].
    is_last: Whether the round ends, bool [].
  """

  sends: list[jax.Array]
  mixes: list[jax.Array]
  is_last: jax.Array


@dataclasses.dataclass(frozen=True)
class Rounds:
  """When fragments meet; checked when it is made.

  Attributes:
    every: The number of steps of a round.
    delay: How many steps a fragment is sent before shards take it over.
    num_fragments: How many fragments there are.
  """

  every: int
  delay: int
  num_fragments: int

  def __post_init__(self):
    delay = arguments.as_at_least('delay', self.delay, 0)
    arguments.as_at_least('every', self.every, 1)
    apart = self._ends()[0]
    if delay >= apart:
      raise ValueError(
          '`delay` of `local_updates` must be less than the steps to the first'
          f' meeting of a round, {apart}, got {delay!r}: a fragment is taken'
          ' over before the next is.'
      )

  def at(self, step: jax.Array) -> Due:
    """Returns what happens in a step.

    Args:
      step: The number of steps of this round before it, int32 [].
    """
    # A round may become shorter after it began: the number stays within it.
    number = lax.rem(step, jnp.int32(self.every)) + 1
    return Due(
        sends=[number == end - self.delay for end in self._ends()],
        mixes=[number == end for end in self._ends()],
        is_last=number == self.every,
    )

  def _ends(self):
    """Returns in which step each fragment is taken over, counted from 1."""
    num = self.num_fragments
    return [-(-(i + 1) * self.every // num) for i in range(num)]


@dataclasses.dataclass(frozen=True)
class Fragments:
  """Fragments: which leaves of the parameters are sent together.

  Attributes:
    labels: The label of each leaf, a tree or prefix tree; `None` where leaves
      are spread evenly.
    names: The labels in the order in which fragments meet.
  """

  labels: Any
  names: tuple[Any, ...]

  @property
  def num(self) -> int:
    """The number of fragments."""
    return len(self.names)

  def of_leaves(self, tree: Any) -> tuple[int, ...]:
    """Returns the number of the fragment of each leaf.

    Raises:
      ValueError: If there are fewer leaves than fragments, or the labels do not
        fit the tree.
    """
    leaves = jax.tree.leaves(tree)
    # `optax.tree_utils.tree_map_params` calls `init` with no leaves.
    if not leaves:
      return ()
    if self.labels is None:
      return _spread([_num_bytes(leaf) for leaf in leaves], self.num)
    return tuple(map(self.names.index, _broadcast(self.labels, tree)))

  def split(self, tree: Any) -> list[Any]:
    """Returns the tree for each fragment, with all other leaves masked."""
    if self.num == 1:
      return [tree]
    numbers = self.of_leaves(tree)
    leaves, treedef = jax.tree.flatten(tree)
    return [
        treedef.unflatten(
            [
                leaf if number == of_leaf else optax.MaskedNode()
                for leaf, of_leaf in zip(leaves, numbers, strict=True)
            ]
        )
        for number in range(self.num)
    ]

  def join(self, parts: Sequence[Any], like: Any) -> Any:
    """Returns the tree that `split` has divided into `parts`."""
    leaves = [iter(jax.tree.leaves(part)) for part in parts]
    numbers = self.of_leaves(like)
    return jax.tree.structure(like).unflatten(
        [next(leaves[number]) for number in numbers]
    )


def as_fragments(fragments: Any) -> Fragments:
  """Returns the `fragments` argument of users, checked.

  Raises:
    TypeError: If it is neither an integer nor a tree of labels.
    ValueError: If it is less than 1.
  """
  kinds = jax.Array | np.ndarray | np.generic | bool | float | int | str | None
  if isinstance(fragments, kinds):
    num = arguments.as_at_least('fragments', fragments, 1)
    return Fragments(None, tuple(range(num)))
  labels = jax.tree.leaves(fragments)
  is_named = [isinstance(label, str) for label in labels]
  if not labels or not (all(is_named) or all(map(_is_int, labels))):
    raise TypeError(
        f'{_FRAGMENTS} must be an integer, or a tree of labels that are all'
        f' strings or all integers, got {fragments!r}.'
    )
  return Fragments(fragments, tuple(sorted(set(labels))))


def _is_int(label):
  return isinstance(label, int) and not isinstance(label, bool)


def _num_bytes(leaf):
  return math.prod(jnp.shape(leaf)) * leaves_lib.dtype_of(leaf).itemsize


def _spread(sizes, num):
  """Returns the fragment of each leaf, so that fragments have similar sizes.

  Raises:
    ValueError: If there are fewer leaves than fragments.
  """
  if num > len(sizes):
    raise ValueError(
        f'{_FRAGMENTS} must be at most the number of leaves, {len(sizes)}, got'
        f' {num!r}. A leaf is in one fragment.'
    )
  # Largest first, each to the smallest fragment so far.
  loads = [(0, 0)] * num
  found = [0] * len(sizes)
  for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
    least = loads.index(min(loads))
    found[i] = least
    num_bytes, num_leaves = loads[least]
    loads[least] = num_bytes + sizes[i], num_leaves + 1
  return tuple(found)


def _broadcast(labels, tree):
  """Returns the label of each leaf of a tree.

  Raises:
    ValueError: If the labels do not fit the tree, or leave out a leaf.
  """
  is_none = leaves_lib.is_none
  try:
    spread = jax.tree.broadcast(labels, tree, is_leaf=is_none)
  except ValueError as error:
    raise ValueError(
        f'{_FRAGMENTS} must have the tree of the parameters, or the head of it,'
        f' got {jax.tree.structure(labels)} for {jax.tree.structure(tree)}.'
    ) from error
  found = dict(jax.tree.leaves_with_path(spread, is_leaf=is_none))
  paths = [path for path, _ in jax.tree.leaves_with_path(tree)]
  for path in paths:
    if found[path] is None:
      name = leaves_lib.name_of(path)
      raise ValueError(
          f'{_FRAGMENTS} must have a label for each leaf, got None at {name}.'
      )
  return [found[path] for path in paths]
