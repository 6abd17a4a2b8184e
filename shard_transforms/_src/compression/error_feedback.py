"""Error feedback: the part that a step does not send is added to the next.

For the update u_i of shard i, its residual e_i, the residual E_j of the owner j
of a slice of each leaf, and a compressor C:

  p_i = u_i + e_i,  s_j = mean_i C(p_i)[j] + E_j,  result[j] = C(s_j)
  e_i = p_i - C(p_i),  E_j = s_j - C(s_j)

All results and all residuals add up to the means of all updates, but for
rounding in float32.
"""

import collections
from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Mapping
from collections.abc import Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import full_rules
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import state_rules
from shard_transforms._src.base import weights
from shard_transforms._src.compression import residuals
from shard_transforms._src.compression import two_phase
from shard_transforms._src.reduction import collectives
from shard_transforms._src.reduction import leaf_sums

# What a shard keeps of each leaf; `None` without feedback.
Kept = Sequence[jax.Array | None]


class CompressedMeanState(NamedTuple):
  """State of `compressed_mean`.

  What differs between shards has a leading axis, of length 1 inside the mapped
  function and of the number of shards outside. A leaf that is not compressed
  has `None` in place of its residuals; without feedback, all have.

  Attributes:
    step: Number of updates, int32 [].
    residual: The part of each shard's updates that it has not sent yet, a tree
      like the parameters, each leaf [1, ...], in float32 for leaves of fewer
      bits.
    server_residual: The same of the means of the slices that each shard owns,
      each leaf [1, 1, ..., 1, elements].
    update_norm: The norm of each leaf of each shard's last update that was not
      zero, float32 [1].

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import shard_transforms
    >>> from shard_transforms import compression
    >>> mesh = jax.make_mesh((8,), ('data',))
    >>> tx = compression.compressed_mean('data', compression.quantize(8))
    >>> params = {'w': jnp.ones((200, 300)), 'b': jnp.ones(300)}
    >>> state = shard_transforms.init_state(tx, params, mesh)
    >>> print(state.residual['w'].shape, state.server_residual['w'].shape)
    (8, 200, 300) (8, 1, 7500)
    >>> print(state.residual['b'])
    None
  """

  step: jax.Array
  residual: Any
  server_residual: Any
  update_norm: Any

  def resize_rules(
      self, reduction: state_rules.Reduction | None
  ) -> Mapping[str, state_rules.ResizeRule]:
    """Returns how `resize_state` converts its fields.

    The mean of all residuals stays as it is.
    """
    del reduction
    return {
        'residual': state_rules.ResizeRule('mean'),
        'update_norm': state_rules.ResizeRule('maximum'),
    }

  def full_rules(self) -> Mapping[str, full_rules.FullRule]:
    """Returns how `full_state` joins its slices."""
    return {'server_residual': full_rules.SLICES}

  def metric_rules(self) -> Mapping[str, state_rules.MetricRule]:
    """Returns how `metrics` reads its attributes."""
    return {'step': state_rules.MetricRule()}

  def health_problem(self) -> str | None:
    """Returns what `check_health` raises, if a residual is not finite."""
    return residuals.problem((self.residual, self.server_residual))

  def error_squares(self) -> tuple[jax.Array | None, jax.Array | None]:
    """Returns the two squares of `compression_error`, per shard."""
    return (
        residuals.squares(self.residual),
        residuals.norm_squares(self.update_norm, self.residual),
    )


# The state, and its tree that is the same on all shards.
KIND, SHARED = CompressedMeanState, ''


class Counting(NamedTuple):
  """Whether a shard counts in a step, and how much.

  Attributes:
    factor: The number by which its updates are multiplied in an unweighted
      mean, float32 [], or `None` where all shards count the same.
    is_any: Whether any shard counts, bool [], or `None`.
  """

  factor: jax.Array | None
  is_any: jax.Array | None

  @classmethod
  def of(cls, share: leaf_sums.Share, num_shards: int) -> 'Counting':
    """Returns the counting of a shard with this share."""
    if share.weight is None or share.total is None:
      return EVERYONE
    total = weights.safe_divisor(share.total)
    return cls(share.weight * num_shards / total, share.total > 0)

  def weigh(self, leaf: jax.Array) -> jax.Array:
    """Returns a leaf as it enters an unweighted mean, in 32 bits or more."""
    return weights.weighing(self.factor)(leaves_lib.as_accumulator(leaf))

  def keep(self, after: jax.Array, before: chex.Numeric) -> jax.Array:
    """Returns `after`, or `before` for a shard that does not count."""
    if self.factor is None:
      return after
    return jnp.where(self.factor > 0, after, before)

  def keep_of_any(self, after: jax.Array, before: chex.Numeric) -> jax.Array:
    """Returns `after`, or `before` where no shard counts."""
    if self.is_any is None:
      return after
    return jnp.where(self.is_any, after, before)


# All shards count the same.
EVERYONE = Counting(None, None)


def start(param: jax.Array, num_shards: int) -> tuple[jax.Array, ...]:
  """Returns what is kept of a leaf before the first step: zeros.

  They are in the order of the fields of the state, without `step`.
  """
  dtype = leaves_lib.accumulator_dtype(leaves_lib.dtype_of(param))
  length = two_phase.slice_length(param.shape, num_shards)
  flat = axes_lib.to_varying(
      jnp.zeros(length, jnp.float32), tuple(axes_lib.varying_axes(param))
  )
  return (
      jnp.zeros_like(param, dtype),
      flat.reshape((1,) * (param.ndim - 1) + (length,)),
      residuals.no_norm(param),
  )


def mean(
    leaves: Sequence[jax.Array],
    held: CompressedMeanState,
    share: leaf_sums.Share,
    exchange: two_phase.Exchange,
) -> tuple[list[jax.Array], CompressedMeanState]:
  """Returns the compressed mean of real leaves, and what is kept next.

  A shard of weight zero sends zeros and keeps its residuals; a total weight of
  zero gives zeros.

  Args:
    leaves: This shard's leaves, none of them empty.
    held: For each field, what is kept of each leaf; `None` without feedback.
    share: How much the shard counts.
    exchange: How it sends.
  """
  counting = Counting.of(share, exchange.num_shards())
  values = [counting.weigh(leaf) for leaf in leaves]
  slices, residual = scatter(values, held.residual, counting, exchange)
  wholes, server = gather(
      slices, held.server_residual, values, counting, exchange
  )
  norms = map_kept(residuals.next_norm, held.update_norm, values)
  return wholes, CompressedMeanState(held.step, residual, server, norms)


def map_kept(
    fn: Callable[..., Any], kept: Kept, *lists: Sequence[Any]
) -> list[Any]:
  """Maps what is kept of leaves, and other lists; `None` where none is."""
  return [
      None if x is None else fn(x, *others)
      for x, *others in zip(kept, *lists, strict=True)
  ]


def scatter(
    values: Sequence[jax.Array],
    held: Kept,
    counting: Counting,
    exchange: two_phase.Exchange,
) -> tuple[list[jax.Array], list[Any]]:
  """Returns each shard's slices of the means, and its next residuals.

  Args:
    values: Leaves as they enter the mean.
    held: The residual of each.
    counting: Whether the shard counts.
    exchange: How it sends.

  Returns:
    Slices [1, ..., 1, elements] of as many axes as the leaves, with zeros
    behind the last element of a leaf; and the next residuals.
  """
  if exchange.num_shards() == 1:
    return flush(values, held, counting, exchange.axes)
  pending = _pending(values, held, counting.keep)

  def send(some):
    return exchange.scatter([pending[i] for i in some])

  def rest(before, whole, sent):
    rest = whole - sent.astype(whole.dtype)
    # A shard of weight zero has sent something if it encodes the sum of its
    # host: the error of that must not be lost.
    return counting.keep(rest, before + rest)

  slices, sent = _in_groups(send, pending)
  return slices, map_kept(rest, held, pending, sent)


def gather(
    slices: Sequence[jax.Array],
    held: Kept,
    like: Sequence[jax.Array],
    counting: Counting,
    exchange: two_phase.Exchange,
) -> tuple[list[jax.Array], list[Any]]:
  """Returns leaves as all shards decode them, and the owner's next residuals.

  Args:
    slices: Those that this shard owns.
    held: The residual of each.
    like: Arrays of the shapes of the leaves.
    counting: Whether any shard counts.
    exchange: How it sends.
  """
  if exchange.num_shards() == 1:
    return flush(slices, held, counting, exchange.axes)
  pending = _pending(slices, held, counting.keep_of_any)

  def send(some):
    shapes = [like[i].shape for i in some]
    return exchange.gather([pending[i] for i in some], shapes)

  wholes, rests = _in_groups(send, pending)

  def rest(before, rest):
    return counting.keep_of_any(rest, before)

  return wholes, map_kept(rest, held, rests)


def _pending(values, held, keep):
  """Returns values with their residuals; zeros where nothing counts."""
  return [
      keep(x if before is None else x + before, 0)
      for x, before in zip(values, held, strict=True)
  ]


def _in_groups(send, leaves):
  """Sends leaves together that vary over the same axes.

  A shared buffer would vary over all axes over which one of its leaves does.

  Args:
    send: Takes positions of leaves, and gives two arrays for each, in two
      lists.
    leaves: All of them.

  Returns:
    The two arrays of all leaves, in two lists.
  """
  groups = collections.defaultdict(list)
  for i, leaf in enumerate(leaves):
    groups[axes_lib.varying_axes(leaf)].append(i)
  found = {}
  for some in groups.values():
    found.update(zip(some, zip(*send(some), strict=True), strict=True))
  pairs = [found[i] for i in range(len(leaves))]
  return [first for first, _ in pairs], [second for _, second in pairs]


def flush(
    values: Sequence[jax.Array],
    held: Kept,
    counting: Counting,
    axes: tuple[Hashable, ...],
) -> tuple[list[jax.Array], list[Any]]:
  """Returns the results of a single shard: leaves and their residuals.

  Args:
    values: Leaves, as `Counting.weigh` returns them.
    held: The residual of each, of as many elements.
    counting: Whether the shard counts.
    axes: The mapped axes, on which there is one shard.

  Returns:
    The leaves with their residuals, and zeros in place of these.
  """
  wholes, after = [], []
  for value, before in zip(values, held, strict=True):
    if before is not None:
      pending = counting.keep(before.reshape(value.shape), 0)
      # Adding zero would turn a -0 into a 0.
      value = jnp.where(pending == 0, value, value + pending)
      before = counting.keep(jnp.zeros_like(before), before)
    # Unlike a sum, this keeps the sign of a zero too.
    wholes.append(collectives.gather(value, axes).reshape(value.shape))
    after.append(before)
  return wholes, after
