"""The types of sliced arrays, whole and in slices.

Programs are traced on types alone, which takes no memory for whole arrays.
"""

from collections.abc import Callable
from collections.abc import Hashable
import dataclasses
import math
from typing import Any

import jax
from jax import core
import jax.numpy as jnp

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import divisions
from shard_transforms._src.base import leaves as leaves_lib


@dataclasses.dataclass(frozen=True)
class Cutting:
  """How leaves are cut.

  Attributes:
    num_slices: The number of slices of a leaf for each axis.
    axes: The mapped axes over which only slices vary.
  """

  num_slices: tuple[int, ...]
  axes: tuple[Hashable, ...]

  def whole(self, tree: Any) -> Any:
    """Returns the types of whole leaves, typed as the slices are."""

    # They vary as slices do: JAX refuses a `cond` between an update and the old
    # state if only one of them varies.
    def zeros(leaf):
      varying = axes_lib.varying_axes(leaf).difference(self.axes)
      if leaves_lib.is_cut(leaf, math.prod(self.num_slices)):
        varying = varying.union(self.axes)
      zeros = jnp.zeros(jnp.shape(leaf), jnp.result_type(leaf))
      return axes_lib.to_varying(zeros, tuple(varying))

    is_number = jax.tree.map(lambda x: not leaves_lib.is_float0(x), tree)
    return _map_types(zeros, tree, is_number)

  def slices(self, tree: Any, distinct: bool = False) -> Any:
    """Returns the types of slices of those leaves that can be cut.

    Args:
      tree: Tree of types.
      distinct: Whether a leaf of one element, which is its own slice, gets two,
        so that each slice differs from its leaf.
    """

    def first(leaf):
      if distinct and leaf.size == 1:
        return jnp.concatenate([leaf, leaf], axis=-1)
      division = divisions.divide(leaf.shape, self.num_slices)
      return division.own(leaf, [0] * len(self.num_slices))

    return _map_types(first, tree, jax.tree.map(can_be_cut, tree))

  def varying(self, tree: Any, is_cut: Any) -> Any:
    """Returns the types of a tree in which some leaves vary as slices do.

    Args:
      tree: Tree of types.
      is_cut: Whether each leaf is sliced.
    """
    if math.prod(self.num_slices) == 1:
      return tree
    return _map_types(
        lambda leaf: axes_lib.to_varying(leaf, self.axes), tree, is_cut
    )


def can_be_cut(leaf: Any) -> bool:
  """Whether a leaf is sliced where there is more than one shard."""
  return leaves_lib.is_cut(leaf, num_slices=2)


def _map_types(fn: Callable[[Any], Any], tree: Any, is_chosen: Any) -> Any:
  """Returns a tree with the types of `fn` of the chosen leaves."""
  leaves, treedef = jax.tree.flatten(tree)
  types = [
      _type_of(leaf) if chosen else None
      for leaf, chosen in zip(leaves, jax.tree.leaves(is_chosen), strict=True)
  ]
  # Trees have many leaves of few types, and tracing takes long.
  distinct = list({kind: None for kind in types if kind is not None})
  made = jax.eval_shape(lambda arrays: list(map(fn, arrays)), distinct)
  by_type = dict(zip(distinct, made, strict=True))
  return treedef.unflatten(
      leaf if kind is None else by_type[kind]
      for leaf, kind in zip(leaves, types, strict=True)
  )


def _type_of(leaf):
  is_type = isinstance(leaf, core.AbstractValue | jax.ShapeDtypeStruct)
  return leaf if is_type else jax.typeof(leaf)
