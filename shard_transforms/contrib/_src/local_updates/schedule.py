"""The schedule of a round, and the division of leaves into fragments."""

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


class Actions(NamedTuple):
  """The actions of a step, the same on all shards.

  Attributes:
    sends: Whether each fragment is sent, bool [].
    mixes: Whether each fragment is mixed into local parameters, bool [].
    is_last: Whether the round ends, bool [].
  """

  sends: list[jax.Array]
  mixes: list[jax.Array]
  is_last: jax.Array


@dataclasses.dataclass(frozen=True)
class Schedule:
  """The schedule of the fragments in a round, with checked arguments.

  Attributes:
    every: The number of steps per round.
    delay: The number of steps between sending and mixing a fragment.
    num_fragments: The number of fragments.
  """

  every: int
  delay: int
  num_fragments: int

  def __post_init__(self):
    delay = arguments.as_at_least('delay', self.delay, 0)
    arguments.as_at_least('every', self.every, 1)
    first_end = self._ends()[0]
    if delay >= first_end:
      raise ValueError(
          f'`delay` of `local_updates` must be less than {first_end}, the'
          ' number of steps before the first fragment of a round is sent, got'
          f' {delay!r}. A fragment must be mixed before the next one is sent.'
      )

  def at(self, step: jax.Array) -> Actions:
    """Returns the actions of a step.

    Args:
      step: The number of previous steps in this round, int32 [].
    """
    # The length of a round may be reduced during a round.
    number = lax.rem(step, jnp.int32(self.every)) + 1
    return Actions(
        sends=[number == end - self.delay for end in self._ends()],
        mixes=[number == end for end in self._ends()],
        is_last=number == self.every,
    )

  def _ends(self):
    """Returns the step in which each fragment is mixed, counted from 1."""
    num = self.num_fragments
    return [-(-(i + 1) * self.every // num) for i in range(num)]


@dataclasses.dataclass(frozen=True)
class Fragments:
  """The division of the leaves of the parameters into fragments.

  Attributes:
    labels: The label of each leaf, a tree or prefix tree; `None` if leaves are
      distributed evenly.
    names: The labels in the order in which fragments are sent.
  """

  labels: Any
  names: tuple[Any, ...]

  @property
  def num(self) -> int:
    """The number of fragments."""
    return len(self.names)

  def indices(self, tree: Any) -> tuple[int, ...]:
    """Returns the index of the fragment of each leaf.

    Raises:
      ValueError: If there are fewer leaves than fragments, or the labels do not
        match the tree.
    """
    leaves = jax.tree.leaves(tree)
    # `optax.tree_utils.tree_map_params` calls `init` without leaves.
    if not leaves:
      return ()
    if self.labels is None:
      return _distribute([_num_bytes(leaf) for leaf in leaves], self.num)
    return tuple(map(self.names.index, _broadcast(self.labels, tree)))

  def split(self, tree: Any) -> list[Any]:
    """Returns one tree per fragment, with all other leaves masked."""
    if self.num == 1:
      return [tree]
    fragment_of = self.indices(tree)
    leaves, treedef = jax.tree.flatten(tree)
    return [
        treedef.unflatten(
            [
                leaf if fragment == leaf_fragment else optax.MaskedNode()
                for leaf, leaf_fragment in zip(leaves, fragment_of, strict=True)
            ]
        )
        for fragment in range(self.num)
    ]

  def join(self, parts: Sequence[Any], like: Any) -> Any:
    """Joins the trees of fragments; the inverse of `split`."""
    leaves = [iter(jax.tree.leaves(part)) for part in parts]
    fragment_of = self.indices(like)
    return jax.tree.structure(like).unflatten(
        [next(leaves[fragment]) for fragment in fragment_of]
    )


def as_fragments(fragments: Any) -> Fragments:
  """Checks and converts the `fragments` argument.

  Raises:
    TypeError: If it is neither an integer nor a tree of labels.
    ValueError: If it is less than 1.
  """
  scalar_types = (
      jax.Array | np.ndarray | np.generic | bool | float | int | str | None
  )
  if isinstance(fragments, scalar_types):
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


def _distribute(sizes, num):
  """Distributes leaves over fragments of similar sizes.

  Raises:
    ValueError: If there are fewer leaves than fragments.
  """
  if num > len(sizes):
    raise ValueError(
        f'{_FRAGMENTS} must be at most the number of leaves, {len(sizes)}, got'
        f' {num!r}, because leaves are not split.'
    )
  # In descending order, each leaf goes to the smallest fragment.
  loads = [(0, 0)] * num
  fragment_of = [0] * len(sizes)
  for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
    smallest = loads.index(min(loads))
    fragment_of[i] = smallest
    num_bytes, num_leaves = loads[smallest]
    loads[smallest] = num_bytes + sizes[i], num_leaves + 1
  return tuple(fragment_of)


def _broadcast(labels, tree):
  """Returns the label of each leaf of a tree.

  Raises:
    ValueError: If the labels do not match the tree, or a leaf has no label.
  """
  is_none = leaves_lib.is_none
  try:
    spread = jax.tree.broadcast(labels, tree, is_leaf=is_none)
  except ValueError as error:
    raise ValueError(
        f'{_FRAGMENTS} must be a tree like the parameters or a prefix of it,'
        f' got {jax.tree.structure(labels)} for {jax.tree.structure(tree)}.'
    ) from error
  label_of = dict(jax.tree.leaves_with_path(spread, is_leaf=is_none))
  paths = [path for path, _ in jax.tree.leaves_with_path(tree)]
  for path in paths:
    if label_of[path] is None:
      name = leaves_lib.name_of(path)
      raise ValueError(
          f'{_FRAGMENTS} must have a label for each leaf, got None at {name}.'
      )
  return [label_of[path] for path in paths]
