"""`compression_error`: the size of residuals relative to updates."""

from typing import Any

import jax
import jax.numpy as jnp
import optax


def compression_error(state: optax.OptState) -> jax.Array:
  r"""Returns the norm of what each shard holds back, over that of its update.

  .. math:: \lVert e_i \rVert / \lVert u_i \rVert

  of the residuals and the compressed leaves of the updates of
  `shard_transforms.compression`, wherever they are in a state. With
  :math:`\delta` the contraction of a compressor, it settles at about
  :math:`\sqrt{1 - \delta} / (1 - \sqrt{1 - \delta})` at most. Feedback falls
  behind where it grows from step to step: take a smaller learning rate, a
  longer warm-up or a compressor that sends more.

  Args:
    state: A state that a step has returned, or one inside a mapped function,
      for its own shard.

  Returns:
    A float32 array [number of shards]; 0 where a shard has sent nothing yet.

  Raises:
    ValueError: If the state holds no residuals, or its arrays do not tell which
      norms are of which shard.

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
  found = [
      node.error_squares()
      for node in jax.tree.leaves(state, is_leaf=_tells_error)
      if _tells_error(node)
  ]
  held = [of_residual for of_residual, _ in found if of_residual is not None]
  sent = [of_update for _, of_update in found if of_update is not None]
  if not held:
    raise ValueError(
        '`state` must hold the residuals of `shard_transforms.compression`, got'
        f' none in {jax.tree.structure(state)}.'
    )
  total = sum(sent[1:], sent[0])
  ratio = sum(held[1:], held[0]) / jnp.where(total > 0, total, 1)
  return jnp.sqrt(jnp.where(total > 0, ratio, 0)).astype(jnp.float32)


def _tells_error(node: Any) -> bool:
  return hasattr(node, 'error_squares')
