"""How trees are reduced over shards, as the user says it, checked."""

from collections.abc import Hashable
import dataclasses
from typing import ClassVar, Literal

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import groups as groups_lib
from shard_transforms._src.base import thresholds
from shard_transforms._src.base import weights
from shard_transforms._src.reduction import bucketing
from shard_transforms._src.reduction import tree_sums

OnInvariant = Literal['error', 'summed', 'averaged']
Algorithm = Literal['flat', 'hierarchical']


@dataclasses.dataclass(frozen=True)
class ReductionOptions:
  """How a tree is reduced over shards; checked when it is made.

  Attributes:
    caller: The public name that errors and profiles show.
    kind: `'mean'` or `'sum'`.
    axes: The mapped axes.
    groups: The partition of the shards that reduce among themselves, or `None`.
    on_invariant: How to read a leaf that is the same on all shards.
    bucket_bytes: The size of the buffers that small leaves share, or `'auto'`.
    algorithm: Whether several axes are summed over at once or level by level.
    order: `'tree'` for sums in the order of a balanced tree; `None` for any.
    in_slices: Whether leaves are scattered and gathered, in place of summed.
  """

  caller: str
  kind: weights.Kind
  axes: tuple[Hashable, ...]
  groups: groups_lib.Groups | None = None
  on_invariant: OnInvariant = 'error'
  bucket_bytes: int | str = 'auto'
  algorithm: Algorithm = 'flat'
  order: tree_sums.Order = None
  in_slices: ClassVar[bool] = False

  def __post_init__(self):
    if self.on_invariant not in ('error', 'summed', 'averaged'):
      raise ValueError(
          "`on_invariant` must be 'error', 'summed' or 'averaged', got"
          f' {self.on_invariant!r}.'
      )
    if self.algorithm not in ('flat', 'hierarchical'):
      raise ValueError(
          "`algorithm` must be 'flat' or 'hierarchical', got"
          f' {self.algorithm!r}.'
      )
    if self.algorithm == 'hierarchical' and len(self.axes) < 2:
      raise ValueError(
          "`algorithm='hierarchical'` must come with two axes or more, the fast"
          f' one last, got {self.axes!r}.'
      )
    if self.groups is not None and len(self.axes) > 1:
      raise ValueError(
          f'`groups` must come with one axis, got {self.axes!r}. Number the'
          ' shards along a mesh of one axis.'
      )
    bucketing.check_bucket_bytes(self.bucket_bytes)
    tree_sums.check_order(self.order)
    if self.order is not None:
      self._check_own_order()

  def _check_own_order(self):
    """Checks that nothing else decides in which order shards are summed."""
    even = self.groups is None or groups_lib.is_even(self.groups)
    for name, value, fits in (
        ('on_invariant', self.on_invariant, self.on_invariant == 'error'),
        ('algorithm', self.algorithm, self.algorithm == 'flat'),
        ('groups', self.groups, even),
    ):
      if not fits:
        raise ValueError(
            f'`{name}` of `{self.caller}` must not decide the order of a sum'
            f" with `order='tree'`, got {value!r}. Leave one of the two out;"
            ' groups must be of one size.'
        )

  def num_shards(self) -> int:
    """Returns the number of all shards, which `groups` must partition.

    Raises:
      NameError: If an axis is not bound.
      ValueError: If `groups` do not fit the axis.
    """
    num_shards = axes_lib.size(self.axes, self.caller)
    if self.groups is not None:
      groups_lib.check_size(self.groups, num_shards)
    if self.order is not None:
      summands = num_shards if self.groups is None else len(self.groups[0])
      tree_sums.check_power_of_two(
          f'The number of shards of `{self.caller}`', summands
      )
    return num_shards

  def levels(self) -> tuple[thresholds.Level, ...]:
    """Returns the steps in which leaves are packed where this is traced."""
    # A buffer would gather what is sharded over a mesh axis that is not mapped,
    # and under `vmap` nothing is sent.
    if not axes_lib.on_mapped_mesh(self.axes):
      return ()
    measured = thresholds.measured()
    buffers = measured.slice_buffers if self.in_slices else measured.buffers
    return bucketing.levels(self.bucket_bytes, buffers)
