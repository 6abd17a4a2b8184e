"""States with residuals, whether these are finite, and how large they are."""

import math
from typing import Any, NamedTuple, TypeGuard

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

from shard_transforms._src.base import full_rules
from shard_transforms._src.base import states


def _unflatten(leaf, like):
  """Returns the leaf of flat slices; padding after its end never counts."""
  if not _are_slices(jnp.shape(leaf), like.shape):
    return None
  return leaf.reshape(-1)[: math.prod(like.shape)].reshape(like.shape)


def _are_slices(shape, whole):
  """Whether a shape is [slices, 1, ..., 1, elements] of such a leaf."""
  if not whole or not math.prod(shape):
    return False
  # What has a leading axis of shards on one shard has no further one.
  ranks = {len(whole), len(whole) + 1} if whole[0] == 1 else {len(whole) + 1}
  elements = -(-math.prod(whole) // shape[0])
  kept = (shape[0], *(1,) * (len(shape) - 2), elements)[: len(shape)]
  return len(shape) in ranks and shape == kept


def _flatten(leaf, like):
  if leaf.shape == like.shape:
    return leaf
  flat = jnp.pad(leaf.ravel(), (0, math.prod(like.shape) - leaf.size))
  return lax.reshape(flat, like.shape)


# Each shard has a flat slice of each leaf, [slices, 1, ..., 1, elements]; zeros
# are at its end.
_SLICES = full_rules.rule(_unflatten, _flatten)


def _problem(state: Any) -> str | None:
  """Returns what is wrong if a residual of a shard here is not finite."""
  residuals = state.residual, getattr(state, 'server_residual', None)
  bad = {
      start + i
      for leaf in jax.tree.leaves(residuals)
      for start, piece in states.parts_here(leaf)
      for i, row in enumerate(piece)
      if not np.all(np.isfinite(row))
  }
  if not bad:
    return None
  return (
      f'The residuals of the shards {sorted(bad)} are not finite: a bad update'
      ' has reached them, and stays in all later ones. Go back to a checkpoint,'
      ' and put `shard_transforms.guard` around the compression.'
  )


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

  rules = {
      'step': states.Rule(metric='same'),
      # The mean of all residuals stays as it is.
      'residual': states.Rule(resize='mean', problem=_problem),
      'server_residual': _SLICES,
      'update_norm': states.Rule(resize='maximum'),
  }


class PowerSGDState(NamedTuple):
  """State of `power_sgd`.

  A leaf that is not compressed has `None` in place of its residual and sketch.

  Attributes:
    step: Number of updates, int32 [].
    residual: The part of each shard's updates that it has not sent yet, a tree
      like the parameters, each leaf [1, ...], in float32 for leaves of fewer
      bits: a leading axis, of length 1 inside the mapped function and of the
      number of shards outside.
    sketch: The right factor of the last mean of each matrix, float32 [1,
      columns, rank], the same on all shards.
    update_norm: The norm of each leaf of each shard's last update that was not
      zero, float32 [1].

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import shard_transforms
    >>> from shard_transforms import compression
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
      'residual': states.Rule(resize='mean', problem=_problem),
      'update_norm': states.Rule(resize='maximum'),
  }


def compression_error(state: optax.OptState) -> jax.Array:
  r"""Returns the norm of each shard's residual over the norm of its update.

  .. math:: \lVert e_i \rVert / \lVert u_i \rVert

  Here :math:`e_i` are the residuals that `shard_transforms.compression` keeps
  anywhere in the state, and :math:`u_i` the leaves of the last update that were
  compressed. With :math:`\delta` the contraction of a compressor, the ratio
  settles at about :math:`\sqrt{1 - \delta} / (1 - \sqrt{1 - \delta})` at most.
  If it grows from step to step, feedback falls behind: take a smaller learning
  rate, a longer warm-up or a compressor that sends more.

  Args:
    state: A state that a step has returned, or one inside a mapped function,
      for its own shard.

  Returns:
    A float32 array [number of shards]; 0 where a shard has sent nothing yet.

  Raises:
    ValueError: If the state holds no residuals, or its arrays do not tell which
      norm belongs to which shard.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> from shard_transforms import compression
    >>> from shard_transforms import monitoring
    >>> tx = compression.compressed_mean(
    ...     'data', compression.top_k(0.5, block=2), min_elements=1)
    >>> def step(update):
    ...   _, state = tx.update(update, tx.init(update))
    ...   return monitoring.compression_error(state)
    >>> updates = jnp.array([[4.0, 3.0, 0.0, 0.0], [4.0, 0.0, 0.0, 0.0]])
    >>> print(jax.vmap(step, axis_name='data')(updates)[:, 0])
    [0.6 0. ]
  """
  kinds = CompressedMeanState, PowerSGDState
  pairs = [
      pair
      for node in states.nodes(state, lambda x: isinstance(x, kinds))
      for pair in zip(
          *map(jax.tree.leaves, (node.residual, node.update_norm)), strict=True
      )
  ]
  if not pairs:
    raise ValueError(
        '`state` must hold the residuals of `shard_transforms.compression`, got'
        f' none in {jax.tree.structure(state)}.'
    )
  held = sum(jnp.square(x).reshape(len(x), -1).sum(1) for x, _ in pairs)
  sent = sum(jnp.square(_by_shard(norms, x)).sum(1) for x, norms in pairs)
  # Who has sent nothing yet holds nothing back.
  ratio = held / jnp.where(sent > 0, sent, 1)
  return jnp.sqrt(ratio).astype(jnp.float32)


def _by_shard(norms, like):
  """Returns the norms [shards, parts] of a leaf.

  Args:
    norms: Those of the leaf, [shards], or [shards times those of a model axis],
      in the order of the mesh.
    like: The residual of the leaf, [shards, ...].

  Raises:
    ValueError: If the order of norms of parts of a leaf cannot be told.
  """
  if len(norms) == len(like):
    return norms.reshape(-1, 1)
  sharding, of_shards = (getattr(x, 'sharding', None) for x in (norms, like))
  if not (_is_named(sharding) and _is_named(of_shards)):
    raise ValueError(
        '`state` must have arrays that are placed on a mesh where parameters'
        f' are sharded, got {len(norms)} norms for {len(like)} shards, in an'
        ' unknown order. Give it as a step has returned it, outside of'
        ' `jax.jit`.'
    )
  all_axes, shard_axes = map(_lead, (sharding, of_shards))
  sizes = [sharding.mesh.shape[axis] for axis in all_axes]
  places = [all_axes.index(axis) for axis in shard_axes]
  by_axes = jnp.moveaxis(norms.reshape(sizes), places, range(len(places)))
  return by_axes.reshape(len(like), -1)


def _is_named(sharding: Any) -> TypeGuard[jax.sharding.NamedSharding]:
  return isinstance(sharding, jax.sharding.NamedSharding)


def _lead(sharding):
  """Returns the axes over which the first dimension is sharded."""
  entry = sharding.spec[0]
  return entry if isinstance(entry, tuple) else (entry,)
