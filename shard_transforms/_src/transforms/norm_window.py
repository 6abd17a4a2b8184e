"""A window of the norms of the last steps, and the limit for spikes."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import chex
import jax
from jax import lax
import jax.numpy as jnp

from shard_transforms._src.base import counters
from shard_transforms._src.base import state_rules


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

  def metric_rules(self) -> Mapping[str, state_rules.MetricRule]:
    """Returns how `metrics` reads its attributes."""
    return {'last_mean': state_rules.MetricRule()}


def start(window: int) -> NormWindow:
  """Returns an empty window of that many steps."""
  return NormWindow(
      mean=jnp.zeros(window, jnp.float32),
      variance=jnp.zeros(window, jnp.float32),
      num_recorded=counters.zero(),
  )


def limit(norms: NormWindow, max_stds: Any) -> jax.Array:
  """Returns the mean of a window plus so many standard deviations.

  Both are over all steps and their shards. Until the window is full, it is the
  largest finite number, so that an infinite norm is never recorded.
  """
  variance = norms.variance.mean() + norms.mean.var()
  bound = norms.mean.mean() + max_stds * jnp.sqrt(variance)
  is_full = norms.num_recorded >= norms.mean.size
  # Constant norms must not be spikes because their mean is rounded.
  largest = jnp.finfo(jnp.float32).max
  return jnp.minimum(jnp.where(is_full, bound * (1 + 1e-6), largest), largest)


def deviations(norms: NormWindow, norm: jax.Array) -> jax.Array:
  """Returns the deviation of a norm and its square, which are then summed.

  Deviations from a nearby number avoid the cancellation of plain squares.
  """
  apart = norm - norms.last_mean
  return jnp.stack([apart, apart**2])


def record(
    norms: NormWindow, total: jax.Array, num_shards: jax.Array
) -> NormWindow:
  """Returns the window with one more step instead of its oldest.

  Args:
    norms: The window.
    total: The sum of the `deviations` of shards, float32 [2].
    num_shards: How many they are, float32 [].
  """
  chex.assert_shape(total, (2,))
  mean, mean_square = total / jnp.maximum(num_shards, 1)
  slot = norms.num_recorded % norms.mean.size
  return NormWindow(
      mean=norms.mean.at[slot].set(norms.last_mean + mean),
      variance=norms.variance.at[slot].set(
          jnp.maximum(mean_square - mean**2, 0)
      ),
      num_recorded=counters.add(norms.num_recorded, 1),
  )
