"""`unless_skipped`: model state is kept where `guard` skips a step."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from shard_transforms._src.base import states


def unless_skipped(state: optax.OptState, after: Any, before: Any) -> Any:
  """Returns model state after a step, or before it if `guard` skipped it.

  A batch with a NaN puts the NaN into the running mean of batch normalization,
  too, where it stays. Whatever else than its gradient a step computes from its
  batch must be kept by the decision of `guard`.

  Call it with the state that `update` returns. With several guards, all must
  have accepted the step. A step that `drop_stale` drops does not count as
  skipped. If `on_bad='exclude'` accepts a step, what a bad shard has computed
  for itself is still bad: reduce it over all shards before the gradient, or
  weigh it.

  Args:
    state: The state of the transformation, with that of a `guard` in it, after
      the step. Of flax `nnx.Optimizer`, `nnx.as_pure(optimizer.opt_state)`.
    after: Tree of arrays of any shapes and dtypes, as this step computes it.
    before: The same tree, as it was before the step.

  Returns:
    The tree `after`, or `before`, with each of its bits.

  Raises:
    ValueError: If there is no state of `guard`, or a `guard` stands inside
      `tower_reduce`: it decides at the end of a window, when the model state of
      a bad tower is already kept.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import shard_transforms
    >>> tx = shard_transforms.guard(optax.sgd(0.1))
    >>> state, mean = tx.init(jnp.zeros(2)), jnp.zeros(2)
    >>> for batch in jnp.array([[1.0, 3.0], [jnp.nan, 5.0]]):
    ...   _, state = tx.update(batch, state)
    ...   moved = 0.9 * mean + 0.1 * batch
    ...   mean = shard_transforms.unless_skipped(state, moved, mean)
    ...   print(mean)
    [0.1 0.3]
    [0.1 0.3]
  """
  guards = list(states.nodes(state, _is_guard))
  if not guards:
    raise ValueError(
        '`state` of `unless_skipped` must have the state of a `guard` in it,'
        f' got {type(state).__name__}. Of `nnx.Optimizer`, give'
        ' `nnx.as_pure(optimizer.opt_state)`.'
    )
  for window in states.nodes(state, _is_window):
    if any(states.nodes(window.inner_state, _is_guard)):
      raise ValueError(
          '`state` of `unless_skipped` must have `guard` around `tower_reduce`,'
          ' got it inside, where it decides at the end of a window: a bad tower'
          ' has changed the model state by then.'
      )
  in_a_row = [jnp.max(x.consecutive_skipped) for x in guards]
  is_skipped = jnp.max(jnp.stack(in_a_row)) > 0
  return jax.tree.map(
      lambda new, old: jnp.where(is_skipped, old, new), after, before
  )


def _is_guard(node: Any) -> bool:
  return hasattr(node, 'consecutive_skipped')


def _is_window(node: Any) -> bool:
  # That of one tower has no total.
  return hasattr(node, 'tower') and bool(jax.tree.leaves(node.total))
