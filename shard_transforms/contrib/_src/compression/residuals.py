"""States with residuals, their health check, and the compression error."""

import math
from typing import Any, NamedTuple, TypeGuard

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

from shard_transforms._src.base import states
from shard_transforms._src.state import fields


def _unflatten(leaf, like):
  """Joins flat slices into a leaf, without the padding."""
  if not _are_slices(jnp.shape(leaf), like.shape):
    return None
  return leaf.reshape(-1)[: math.prod(like.shape)].reshape(like.shape)


def _are_slices(shape, leaf_shape):
  """Whether a shape is [slices, 1, ..., 1, elements] for such a leaf."""
  if not leaf_shape or not math.prod(shape):
    return False
  # On one shard, the leading axis of the shards is the only additional axis.
  ranks = (
      {len(leaf_shape), len(leaf_shape) + 1}
      if leaf_shape[0] == 1
      else {len(leaf_shape) + 1}
  )
  elements = -(-math.prod(leaf_shape) // shape[0])
  slice_shape = (shape[0], *(1,) * (len(shape) - 2), elements)[: len(shape)]
  return len(shape) in ranks and shape == slice_shape


def _flatten(leaf, like):
  if leaf.shape == like.shape:
    return leaf
  flat = jnp.pad(leaf.ravel(), (0, math.prod(like.shape) - leaf.size))
  return lax.reshape(flat, like.shape)


# Each shard has a flat slice of each leaf, [slices, 1, ..., 1, elements], with
# zeros at its end.
_SLICES = fields.leaf_rule(_unflatten, _flatten)


def _problem(state: Any) -> str | None:
  """Describes the residuals on this process that are not finite, if any."""
  residuals = state.residual, getattr(state, 'server_residual', None)
  non_finite = {
      start + i
      for leaf in jax.tree.leaves(residuals)
      for start, piece in states.addressable_parts(leaf)
      for i, row in enumerate(piece)
      if not np.all(np.isfinite(row))
  }
  if not non_finite:
    return None
  return (
      f'The residuals of the shards {sorted(non_finite)} are not finite: a NaN'
      ' or infinity in an update has entered them, and will stay in all later'
      ' updates. Restore an earlier checkpoint, and wrap the compression in'
      ' `shard_transforms.guard`.'
  )


class CompressedMeanState(NamedTuple):
  """State of `compressed_mean`.

  Fields that differ between shards have a leading axis, of length 1 inside the
  mapped function and of the number of shards outside. The residuals of a leaf
  are `None` if the leaf is not compressed, or if `feedback` is `None`.

  Attributes:
    step: Number of updates, int32 [].
    residual: The part of the updates that each shard has not sent yet, a tree
      like the parameters, each leaf [1, ...], in float32 for leaves of fewer
      bits.
    server_residual: The part of the means of its slices that each owner has not
      sent yet, each leaf [1, 1, ..., 1, elements].
    update_norm: The norm of each leaf of each shard's last update that was not
      zero, float32 [1].

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import shard_transforms
    >>> from shard_transforms.contrib import compression
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

  rules = {
      'step': states.Rule(metric='same'),
      # Resizing preserves the mean of all residuals.
      'residual': states.Rule(resize='mean', health_check=_problem),
      'server_residual': _SLICES,
      'update_norm': states.Rule(resize='maximum'),
  }


class PowerSGDState(NamedTuple):
  """State of `power_sgd`.

  The residual and the sketch of a leaf that is not compressed are `None`.

  Attributes:
    step: Number of updates, int32 [].
    residual: The part of the updates that each shard has not sent yet, a tree
      like the parameters, each leaf [1, ...], in float32 for leaves of fewer
      bits. The leading axis has length 1 inside the mapped function, and the
      number of shards outside.
    sketch: The right factor of the last mean of each matrix, float32 [1,
      columns, rank], the same on all shards.
    update_norm: The norm of each leaf of each shard's last update that was not
      zero, float32 [1].

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import shard_transforms
    >>> from shard_transforms.contrib import compression
    >>> mesh = jax.make_mesh((8,), ('data',))
    >>> tx = compression.power_sgd('data', 2)
    >>> params = {'w': jnp.ones((20, 30)), 'b': jnp.ones(30)}
    >>> state = shard_transforms.init_state(tx, params, mesh)
    >>> print(state.residual['w'].shape, state.sketch['w'].shape)
    (8, 20, 30) (1, 30, 2)
  """

  step: jax.Array
  residual: Any
  sketch: Any
  update_norm: Any

  rules = {
      'step': states.Rule(metric='same'),
      'residual': states.Rule(resize='mean', health_check=_problem),
      'update_norm': states.Rule(resize='maximum'),
  }


def compression_error(state: optax.OptState) -> jax.Array:
  r"""Returns the norm of each shard's residual, relative to its last update.

  .. math:: \lVert e_i \rVert / \lVert u_i \rVert

  Here :math:`e_i` are the residuals of all states of `contrib.compression` in
  `state`, and :math:`u_i` the compressed leaves of the last update. If
  :math:`\delta` is the contraction of the compressor, the ratio settles at
  about :math:`\sqrt{1 - \delta} / (1 - \sqrt{1
  - \delta})` at most. If it grows from step to step, feedback cannot keep up:
  use a smaller learning rate, a longer warm-up or a compressor that sends more.

  Args:
    state: The optimizer state as returned by a training step, or inside a
      mapped function the state of one shard.

  Returns:
    A float32 array [number of shards]; 0 for a shard that has not sent an
    update.

  Raises:
    ValueError: If the state has no residuals, or it cannot be determined which
      norm belongs to which shard.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from shard_transforms.contrib import compression
    >>> from shard_transforms import monitoring
    >>> tx = compression.compressed_mean(
    ...     'data', compression.top_k(0.5, block=2), min_elements=1)
    >>> def step(update):
    ...   _, state = tx.update(update, tx.init(update))
    ...   return compression.compression_error(state)
    >>> updates = jnp.array([[4.0, 3.0, 0.0, 0.0], [4.0, 0.0, 0.0, 0.0]])
    >>> print(jax.vmap(step, axis_name='data')(updates)[:, 0])
    [0.6 0. ]
  """
  state_types = CompressedMeanState, PowerSGDState
  pairs = [
      pair
      for node in states.nodes(state, lambda x: isinstance(x, state_types))
      for pair in zip(
          *map(jax.tree.leaves, (node.residual, node.update_norm)), strict=True
      )
  ]
  if not pairs:
    raise ValueError(
        '`state` has no residuals of `contrib.compression`. Pass the state of'
        ' an optimizer that contains `compressed_mean` or'
        f' `power_sgd`, got {jax.tree.structure(state)}.'
    )
  # A leaf that is sharded over `Explicit` axes cannot be flattened.
  residual_squares = sum(
      jnp.square(x).sum(tuple(range(1, x.ndim))) for x, _ in pairs
  )
  update_squares = sum(
      jnp.square(_norms_by_shard(norms, x)).sum(1) for x, norms in pairs
  )
  # A shard that has not sent an update has no residual.
  ratio = residual_squares / jnp.where(update_squares > 0, update_squares, 1)
  return jnp.sqrt(ratio).astype(jnp.float32)


def _norms_by_shard(norms, like):
  """Returns the norms [shards, parts] of a leaf.

  Args:
    norms: The norms of the leaf, [shards] or [shards * size of a model axis],
      in the order of the mesh.
    like: The residual of the leaf, [shards, ...].

  Raises:
    ValueError: If the order of the norms is unknown.
  """
  if len(norms) == len(like):
    return norms.reshape(-1, 1)
  sharding, residual_sharding = (
      getattr(x, 'sharding', None) for x in (norms, like)
  )
  if not (_is_named(sharding) and _is_named(residual_sharding)):
    raise ValueError(
        f'`state` has {len(norms)} norms for {len(like)} shards, in an unknown'
        ' order, because its arrays are not placed on a mesh. If parameters are'
        ' sharded, call `compression_error` outside of `jax.jit`, on the state'
        ' that a training step returned.'
    )
  all_axes, shard_axes = map(_leading_axes, (sharding, residual_sharding))
  sizes = [sharding.mesh.shape[axis] for axis in all_axes]
  positions = [all_axes.index(axis) for axis in shard_axes]
  by_axes = jnp.moveaxis(norms.reshape(sizes), positions, range(len(positions)))
  return by_axes.reshape(len(like), -1)


def _is_named(sharding: Any) -> TypeGuard[jax.sharding.NamedSharding]:
  return isinstance(sharding, jax.sharding.NamedSharding)


def _leading_axes(sharding):
  """Returns the axes over which the first dimension is sharded."""
  entry = sharding.spec[0]
  return entry if isinstance(entry, tuple) else (entry,)
