"""A reduction that is watched: what goes in and comes out stays to the bit."""

from collections.abc import Hashable

import jax.numpy as jnp
import optax

from shard_transforms._src.base import weights
from shard_transforms._src.base import wrapper
from shard_transforms._src.reduction import reduction


def as_reduction(
    inner: optax.GradientTransformation | None,
    axes: tuple[Hashable, ...],
    caller: str,
) -> optax.GradientTransformationExtraArgs:
  """Returns what reduces the updates of shards; by default, their mean.

  Raises:
    TypeError: If it is no transformation.
  """
  if inner is not None:
    return wrapper.as_inner(inner, caller)
  mean = reduction.Reduction(caller, 'mean', axes)

  def update_fn(updates, state, params=None, *, weight=None, **extra_args):
    del params, extra_args
    return mean(updates, weight), state

  return optax.GradientTransformationExtraArgs(
      lambda params: optax.EmptyState(), update_fn
  )


def weight_of(weight, caller):
  """Returns how much a shard counts, float32 []; 1 without a weight.

  Raises:
    TypeError: If the weight is not a real number.
    ValueError: If it is not a scalar, or known to be negative.
  """
  return weights.as_weight(1.0 if weight is None else weight, (), caller)


def averaged(old, new, decay, where):
  """Returns a moving average with one more value, where it is to count."""
  return jnp.where(where, decay * old + (1 - decay) * new, old)
