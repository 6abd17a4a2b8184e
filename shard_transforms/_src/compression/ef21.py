"""EF21: shards send the difference of their updates from an estimate.

For the update u_i of shard i, its estimate m_i, the residual E_j of the owner j
of a slice of each leaf, the last result u and a compressor C:

  d_i = u_i - m_i,  s_j = mean_i C(d_i)[j] + E_j,  u[j] = u[j] + C(s_j)
  m_i = m_i + C(d_i),  E_j = s_j - C(s_j)

so that the last result and the residual add up to the mean estimate.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shard_transforms._src.base import full_rules
from shard_transforms._src.base import state_rules
from shard_transforms._src.compression import error_feedback
from shard_transforms._src.compression import residuals
from shard_transforms._src.compression import two_phase
from shard_transforms._src.reduction import leaf_sums


class EF21State(NamedTuple):
  """State of `compressed_mean` with `feedback='ef21'`.

  What differs between shards has a leading axis, of length 1 inside the mapped
  function and of the number of shards outside. A leaf that is not compressed
  has `None` in its place.

  Attributes:
    step: Number of updates, int32 [].
    estimate: The estimate of each shard's updates, a tree like the parameters,
      each leaf [1, ...], in float32 for leaves of fewer bits.
    server_residual: The part of the mean estimate of the slices that each
      shard owns that it has not sent yet, each leaf [1, 1, ..., 1, elements].
    error_norm: The norm of the difference of each shard's estimate from its
      last update, float32 [1].
    update_norm: The norm of each leaf of each shard's last update that was not
      zero, float32 [1].
    mean: The last result, a tree like the parameters, the same on all shards.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import shard_transforms
    >>> from shard_transforms import compression
    >>> mesh = jax.make_mesh((8,), ('data',))
    >>> tx = compression.compressed_mean(
    ...     'data', compression.quantize(8), feedback='ef21')
    >>> state = shard_transforms.init_state(tx, jnp.ones((200, 300)), mesh)
    >>> print(state.estimate.shape, state.mean.shape)
    (8, 200, 300) (200, 300)
  """

  step: jax.Array
  estimate: Any
  server_residual: Any
  error_norm: Any
  update_norm: Any
  mean: Any

  def resize_rules(
      self, reduction: state_rules.Reduction | None
  ) -> Mapping[str, state_rules.ResizeRule]:
    """Returns how `resize_state` converts its fields.

    The mean of all estimates stays as it is.
    """
    del reduction
    return {
        'estimate': state_rules.ResizeRule('average'),
        'error_norm': state_rules.ResizeRule('maximum'),
        'update_norm': state_rules.ResizeRule('maximum'),
    }

  def full_rules(self) -> Mapping[str, full_rules.FullRule]:
    """Returns how `full_state` joins its slices."""
    return {'server_residual': full_rules.SLICES}

  def metric_rules(self) -> Mapping[str, state_rules.MetricRule]:
    """Returns how `metrics` reads its attributes."""
    return {'step': state_rules.MetricRule()}

  def health_problem(self) -> str | None:
    """Returns what `check_health` raises, if an estimate is not finite."""
    return residuals.problem((self.estimate, self.server_residual))

  def error_squares(self) -> tuple[jax.Array | None, jax.Array | None]:
    """Returns the two squares of `compression_error`, per shard."""
    return (
        residuals.norm_squares(self.error_norm, self.estimate),
        residuals.norm_squares(self.update_norm, self.estimate),
    )


# The state, and its tree that is the same on all shards.
KIND, SHARED = EF21State, 'mean'


def start(param: jax.Array, num_shards: int) -> tuple[jax.Array, ...]:
  """Returns what is kept of a leaf before the first step: zeros."""
  estimate, server_residual, norm = error_feedback.start(param, num_shards)
  mean = jnp.zeros_like(estimate)
  return estimate, server_residual, jnp.zeros_like(norm), norm, mean


def mean(
    leaves: Sequence[jax.Array],
    held: EF21State,
    share: leaf_sums.Share,
    exchange: two_phase.Exchange,
) -> tuple[list[jax.Array], EF21State]:
  """Returns the estimated mean of real leaves, and what is kept next.

  Args:
    leaves: This shard's leaves, none of them empty.
    held: For each field, what is kept of each leaf.
    share: How much the shard counts: as much as any other.
    exchange: How it sends.
  """
  del share
  if exchange.num_shards() == 1:
    # Without an estimate, the update of a single shard is exact.
    held = jax.tree.map(jnp.zeros_like, held)._replace(
        step=held.step, update_norm=held.update_norm
    )
  everyone = error_feedback.EVERYONE
  values = [everyone.weigh(leaf) for leaf in leaves]
  differences = list(map(operator.sub, values, held.estimate))
  nothing = list(map(jnp.zeros_like, differences))
  slices, rests = error_feedback.scatter(
      differences, nothing, everyone, exchange
  )
  changes, server_residual = error_feedback.gather(
      slices, held.server_residual, values, everyone, exchange
  )
  # Added to zero, -0.0 would lose its sign.
  means = [
      jnp.where(before == 0, change, before + change)
      for before, change in zip(held.mean, changes, strict=True)
  ]
  return means, EF21State(
      held.step,
      list(map(operator.sub, values, rests)),
      server_residual,
      list(map(residuals.norm, rests)),
      list(map(residuals.next_norm, held.update_norm, values)),
      means,
  )
