"""Bad updates: those that are not finite, or whose norm is a spike."""

from collections.abc import Hashable
from collections.abc import Mapping
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
from shard_transforms._src.base import counters
from shard_transforms._src.base import leaves
from shard_transforms._src.base import partition_specs
from shard_transforms._src.base import state_rules
from shard_transforms._src.reduction import collectives
from shard_transforms._src.reduction import norms as norms_lib

_CALLER = 'guard'


class NormWindow(NamedTuple):
  """The norms of the last accepted updates, the same on all shards.

  Attributes:
    mean: The mean norm over the shards of each step, float32 [window].
    variance: The variance over the shards of each step, float32 [window].
    num_recorded: The number of steps so far, int32 [].
  """

  mean: jax.Array
  variance: jax.Array
  num_recorded: jax.Array

  @property
  def last_mean(self) -> jax.Array:
    """The mean norm of the last accepted step, float32 []; 0 at the start."""
    window = self.mean.shape[-1]
    slot = (jnp.max(self.num_recorded) - 1) % window
    return lax.dynamic_index_in_dim(self.mean, slot, axis=-1, keepdims=False)

  def limit(self, max_stds: chex.Numeric) -> jax.Array:
    """Returns the mean of the window plus so many standard deviations.

    Both are over all steps and their shards. Until the window is full, the
    limit is the largest finite number, so that an infinite norm is never
    recorded.
    """
    variance = self.variance.mean() + self.mean.var()
    bound = self.mean.mean() + max_stds * jnp.sqrt(variance)
    is_full = self.num_recorded >= self.mean.size
    # Constant norms must not be spikes because their mean is rounded.
    largest = jnp.finfo(jnp.float32).max
    return jnp.minimum(jnp.where(is_full, bound * (1 + 1e-6), largest), largest)

  def deviations(self, norm: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns a deviation and its square, each to be summed over the shards.

    Deviations from the last mean avoid the cancellation of plain squares.
    """
    deviation = norm - self.last_mean
    return deviation, deviation**2

  def record(
      self, deviations: Sequence[jax.Array], num_shards: jax.Array
  ) -> 'NormWindow':
    """Returns the window with its oldest step replaced by a new one.

    Args:
      deviations: The sums of `deviations` over shards, each float32 [].
      num_shards: The number of these shards, float32 [].
    """
    mean, mean_square = jnp.stack(deviations) / jnp.maximum(num_shards, 1)
    slot = self.num_recorded % self.mean.size
    return NormWindow(
        mean=self.mean.at[slot].set(self.last_mean + mean),
        variance=self.variance.at[slot].set(
            jnp.maximum(mean_square - mean**2, 0)
        ),
        num_recorded=counters.add(self.num_recorded, 1),
    )

  def metric_rules(self) -> Mapping[str, state_rules.MetricRule]:
    """Returns how `metrics` reads its attributes."""
    return {'last_mean': state_rules.MetricRule()}


# The empty window of a guard that records no norms.
Norms = NormWindow | tuple[()]


@dataclasses.dataclass(frozen=True)
class Limits:
  """Limits of the norm of an update, which are checked when it is made.

  Attributes:
    max_norm: The largest norm, or `None`.
    max_stds: The most standard deviations above the rolling mean, or `None`.
    window: The number of steps of the rolling mean.
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
    if self.max_stds is None:
      return ()
    return NormWindow(
        mean=jnp.zeros(self.window, jnp.float32),
        variance=jnp.zeros(self.window, jnp.float32),
        num_recorded=counters.zero(),
    )

  def check_fits(self, norms: Norms) -> None:
    """Checks that the window in a state was made for these limits.

    Raises:
      ValueError: If it was not.
    """
    found = norms.mean.size if isinstance(norms, NormWindow) else 0
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
    deviations: Those of its norm from the window, each float32 []; none without
      a window.
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
  # A norm reads all updates again, so it is computed only if needed.
  if limits.max_norm is not None or limits.max_stds is not None:
    specs = sharded if sliced else None
    norm = jnp.sqrt(norms_lib.sum_of_squares(updates, sliced, specs, _CALLER))
    if limits.max_norm is not None:
      is_healthy &= norm <= limits.max_norm
    if limits.max_stds is not None and isinstance(norms, NormWindow):
      is_healthy &= norm <= norms.limit(limits.max_stds)
      deviations = norms.deviations(norm)
  return Diagnosis(is_healthy, deviations)


def _sliced_over(
    updates: optax.Updates,
    axes: Sequence[Hashable],
    sharded: partition_specs.SpecTree,
) -> tuple[Hashable, ...]:
  """Returns the axes, other than those given, over which leaves are sliced."""
  found = frozenset[Hashable]()
  if sharded is not None:
    specs = jax.tree.leaves(sharded, is_leaf=partition_specs.is_spec)
    found = found.union(*map(partition_specs.axes_of, specs))
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
  # If an element is not finite, neither is the sum, in any order. The sum takes
  # half the time of a check of each element, which is needed only if the sum
  # overflows. (A maximum does not do: on CPU it ignores NaN.)
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
  # `jnp.isfinite` and `jnp.all` take several times longer to trace.
  flags = [
      lax.reduce_and(lax.is_finite(x), tuple(range(x.ndim))) for x in parts
  ]
  return functools.reduce(lax.bitwise_and, flags, jnp.asarray(True))
