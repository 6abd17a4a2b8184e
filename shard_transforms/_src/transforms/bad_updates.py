"""Bad updates: those that are not finite, or spikes."""

from collections.abc import Hashable
from collections.abc import Sequence
import functools
from typing import NamedTuple

import chex
import jax
from jax import lax
import jax.numpy as jnp
import optax

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves
from shard_transforms._src.base import partition_specs
from shard_transforms._src.reduction import collectives
from shard_transforms._src.reduction import norms as norms_lib
from shard_transforms._src.transforms import spike_rule
from shard_transforms._src.transforms import spikes as spikes_lib

_CALLER = 'guard'


class Diagnosis(NamedTuple):
  """The diagnosis of a shard's own update.

  Attributes:
    is_healthy: Whether it is finite and no spike, or one that is scaled down,
      bool [].
    spikes: What the rule of spikes says.
  """

  is_healthy: jax.Array
  spikes: spikes_lib.Judgement


def diagnose(
    updates: optax.Updates,
    value: chex.Numeric | None,
    state: spikes_lib.SpikeState | tuple[()],
    rule: spike_rule.SpikeRule | None,
    axes: tuple[Hashable, ...],
    sharded: partition_specs.SpecTree,
) -> Diagnosis:
  """Returns the diagnosis of a shard's update, over all of its slices.

  Args:
    updates: The update of this shard.
    value: Its loss.
    state: What is known of spikes so far.
    rule: The rule of spikes, or `None`.
    axes: The axes between whose shards updates differ.
    sharded: As in `guard`.

  Raises:
    NameError: If an axis is not bound.
    TypeError: If the rule looks at the loss, and `value` is no real number.
    ValueError: If `sharded` is missing, or contradicts the types; or `value` is
      not a scalar.
  """
  sliced = _sliced_over(updates, axes, sharded)
  if rule is None or not isinstance(state, spikes_lib.SpikeState):
    is_finite = _are_finite(updates, axes, sliced)
    return Diagnosis(is_finite, spikes_lib.no_signals())
  names = rule.names(updates)
  signals = []
  if 'norm' in rule.signals:
    # Elements that are not finite have a norm that is not, which is a spike.
    is_finite = jnp.asarray(True)
    specs = sharded if sliced else None
    numbers = rule.numbers(updates)
    squares = norms_lib.sums_of_squares(
        updates, numbers, sliced, specs, _CALLER
    )
    signals.append(leaves.as_dtype(jnp.sqrt(squares), jnp.float32))
  else:
    is_finite = _are_finite(updates, axes, sliced)
  if 'loss' in rule.signals:
    signals.append(jnp.reshape(_as_loss(value), 1))
  judgement = spikes_lib.judge(
      rule, state, jnp.concatenate(signals), names, is_finite
  )
  return Diagnosis(is_finite & ~judgement.is_bad, judgement)


def _as_loss(value):
  """Returns the loss of this shard, float32 [].

  Raises:
    TypeError: If it is missing, or not a real number.
    ValueError: If it is not a scalar.
  """
  name = '`value` of `guard`'
  dtype = leaves.dtype_of_number(value)
  if value is None or dtype is None or not jnp.issubdtype(dtype, jnp.floating):
    raise TypeError(
        f'{name} must be the loss, a real number, got {value!r}. Call'
        ' `tx.update(updates, state, params, value=loss)`, or leave the loss'
        ' out of `signals`.'
    )
  if jnp.shape(value):
    raise ValueError(
        f'{name} must be a scalar, got the shape {jnp.shape(value)}.'
    )
  return jnp.asarray(value, jnp.float32)


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
