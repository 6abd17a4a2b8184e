"""The diagnosis of a shard's own update, before all shards decide."""

from collections.abc import Hashable
from collections.abc import Sequence
import dataclasses
import functools
from typing import NamedTuple

import chex
import jax
from jax import lax
import jax.numpy as jnp
import optax

from shard_transforms._src.base import arguments
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves
from shard_transforms._src.base import partition_specs
from shard_transforms._src.reduction import collectives
from shard_transforms._src.reduction import norms as norms_lib
from shard_transforms._src.transforms import norm_window

_CALLER = 'guard'
# The empty window of a guard that records no norms.
Norms = norm_window.NormWindow | tuple[()]


@dataclasses.dataclass(frozen=True)
class Limits:
  """Limits of the norm of an update; checked when it is made.

  Attributes:
    max_norm: The largest norm, or `None`.
    max_stds: The most standard deviations above the rolling mean, or `None`.
    window: The number of steps that the mean is over.
  """

  max_norm: chex.Numeric | None
  max_stds: chex.Numeric | None
  window: int

  def __post_init__(self):
    arguments.as_at_least('window', self.window, 2)
    for name in ('max_norm', 'max_stds'):
      if (value := getattr(self, name)) is not None:
        arguments.as_positive(name, value)

  def start(self) -> Norms:
    """Returns an empty window of norms."""
    return () if self.max_stds is None else norm_window.start(self.window)

  def check_fits(self, norms: Norms) -> None:
    """Checks that the norms in a state are those of these limits.

    Raises:
      ValueError: If they are not.
    """
    found = norms.mean.size if isinstance(norms, norm_window.NormWindow) else 0
    expected = 0 if self.max_stds is None else self.window
    if found != expected:
      raise ValueError(
          f'State of `guard` must have the norms of {expected} steps for its'
          f' `max_stds` and `window`, got those of {found}. Make it with the'
          ' same options.'
      )


class Diagnosis(NamedTuple):
  """The diagnosis of a shard's own update.

  Attributes:
    is_healthy: Whether it is finite and within the limits, bool [].
    deviations: The two `norm_window.deviations` of its norm, each float32 [];
      none without a window.
  """

  is_healthy: jax.Array
  deviations: tuple[jax.Array, ...]


def diagnose(
    updates: optax.Updates,
    norms: Norms,
    limits: Limits,
    axes: tuple[Hashable, ...],
    sharded: partition_specs.SpecTree,
) -> Diagnosis:
  """Returns the diagnosis of a shard's update, over all of its slices.

  Args:
    updates: The update of this shard.
    norms: The norms so far.
    limits: The limits of its norm.
    axes: The axes between whose shards updates differ.
    sharded: As in `guard`.

  Raises:
    NameError: If an axis is not bound.
    ValueError: If `sharded` is missing, or contradicts the types.
  """
  sliced = _sliced_over(updates, axes, sharded)
  is_healthy = _are_finite(updates, axes, sliced)
  deviations = ()
  # A norm reads all updates once more; it is computed only if needed.
  if limits.max_norm is not None or limits.max_stds is not None:
    told = sharded if sliced else None
    norm = jnp.sqrt(norms_lib.sum_of_squares(updates, sliced, told, _CALLER))
    if limits.max_norm is not None:
      is_healthy &= norm <= limits.max_norm
    if isinstance(norms, norm_window.NormWindow):
      is_healthy &= norm <= norm_window.limit(norms, limits.max_stds)
      deviations = tuple(norm_window.deviations(norms, norm))
  return Diagnosis(is_healthy, deviations)


def _sliced_over(
    updates: optax.Updates,
    axes: Sequence[Hashable],
    sharded: partition_specs.SpecTree,
) -> tuple[Hashable, ...]:
  """Returns the axes, other than those given, over which leaves are sliced."""
  found = frozenset[Hashable]()
  if sharded is not None:
    told = jax.tree.leaves(sharded, is_leaf=partition_specs.is_spec)
    found = found.union(*map(partition_specs.axes_of, told))
  elif axes:
    found = found.union(*map(axes_lib.varying_axes, jax.tree.leaves(updates)))
    unknown = set(axes_lib.untracked_axes()).difference(axes)
    if unknown:
      raise ValueError(
          '`sharded` of `guard` must say which leaves are sliced over'
          f' {sorted(unknown, key=str)}, because JAX does not track it here,'
          ' got None. Give the `PartitionSpec`s of the leaves, or `P()` for'
          ' none.'
      )
  sliced = tuple(sorted(found.difference(axes), key=str))
  axes_lib.size(sliced, _CALLER)
  return sliced


def _are_finite(updates, axes, sliced):
  """Whether all elements of all slices are finite, bool []."""
  parts = [
      part
      for leaf in jax.tree.leaves(updates)
      if not leaves.is_float0(leaf)
      for part in _real_parts(jnp.asarray(leaf))
  ]
  if axes and axes_lib.unmapped_axes(axes):
    # In a branch, the compiler could insert a collective over these axes.
    finite = _each_is_finite(parts)
  else:
    finite = _sum_or_each_is_finite(parts)
  return collectives.total(jnp.float32(~finite), sliced) == 0


def _sum_or_each_is_finite(parts):
  # An element that is not finite makes the sum not finite, in any order. The
  # sum takes half the time of checking each element, which is needed only where
  # the sum overflows. (A maximum would do as well, but on CPU it ignores NaN.)
  total = functools.reduce(lax.add, map(_sum, parts), jnp.float32(0))
  return lax.cond(
      lax.is_finite(total),
      lambda total, _: lax.is_finite(total),
      lambda _, parts: _each_is_finite(parts),
      total,
      parts,
  )


def _real_parts(leaf):
  return [leaf.real, leaf.imag] if jnp.iscomplexobj(leaf) else [leaf]


def _sum(part):
  part = leaves.as_accumulator(part)
  total = lax.reduce_sum(part, tuple(range(part.ndim)))
  return leaves.as_dtype(total, jnp.float32)


def _each_is_finite(parts):
  # `jnp.isfinite` and `jnp.all` take several times as long to trace.
  flags = [
      lax.reduce_and(lax.is_finite(x), tuple(range(x.ndim))) for x in parts
  ]
  return functools.reduce(lax.bitwise_and, flags, jnp.asarray(True))
