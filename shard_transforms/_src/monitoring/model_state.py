"""`unless_skipped`: keeping the model state when `guard` skips a step."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from shard_transforms._src.base import states
from shard_transforms._src.transforms import guard_state

# The states of chains, and of transformations that run `inner` in each step.
_RUN_EACH_STEP = (
    tuple,
    list,
    dict,
    optax.MaskedState,
    optax.InjectStatefulHyperparamsState,
)


def unless_skipped(state: optax.OptState, after: Any, before: Any) -> Any:
  """Returns the model state after a step, or before it if `guard` skipped it.

  A NaN in a batch also enters the running mean of batch normalization, and
  stays there. The decision of `guard` must therefore apply to everything else
  that a step computes from its batch.

  Pass the state that `update` returns. With several guards, all must have
  accepted the step. Put each `guard` around transformations that may leave out
  a step, such as `drop_stale` and `tower_reduce`; such a step does not count as
  skipped. If `on_bad='exclude'` accepts a step, local results of a bad shard
  are still bad: reduce them over all shards before the gradient, or weight
  them.

  Args:
    state: The state of the transformation after the step, which contains that
      of a `guard`. For flax `nnx.Optimizer`,
      `nnx.as_pure(optimizer.opt_state)`.
    after: The model state that this step computed, a tree of arrays.
    before: The model state before the step, a tree of the same types.

  Returns:
    The tree `after`, or `before`, with exactly the same bits.

  Raises:
    ValueError: If there is no state of a `guard`; a `guard` is inside
      `tower_reduce`, `drop_stale`, `local_updates` or another transformation
      that does not run it in each step; or the trees, shapes or dtypes of
      `after` and `before` differ.

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
  _check_same_types(after, before)
  guards = list(_guards_of_each_step(state))
  num_guards = sum(1 for _ in states.nodes(state, _is_guard))
  if not num_guards:
    raise ValueError(
        '`state` of `unless_skipped` does not contain the state of a `guard`,'
        f' got {type(state).__name__}. Wrap the optimizer in `guard`; for'
        ' `nnx.Optimizer`, pass `nnx.as_pure(optimizer.opt_state)`.'
    )
  if len(guards) < num_guards:
    raise ValueError(
        '`state` of `unless_skipped` has a `guard` inside a transformation'
        ' that may skip a step, such as `tower_reduce`. Put `guard` around'
        ' that transformation.'
    )
  in_a_row = [jnp.max(x.consecutive_skipped) for x in guards]
  is_skipped = jnp.max(jnp.stack(in_a_row)) > 0
  return jax.tree.map(
      lambda new, old: jnp.where(is_skipped, old, new), after, before
  )


def _is_guard(node: Any) -> bool:
  return isinstance(node, guard_state.GuardState)


def _guards_of_each_step(node: Any) -> Iterator[Any]:
  """Yields the states of the guards that decide in each step."""
  if _is_guard(node):
    yield node
  elif type(node) not in _RUN_EACH_STEP:
    return
  for part in jax.tree.leaves(node, is_leaf=lambda x: x is not node):
    if part is not node:
      yield from _guards_of_each_step(part)


def _check_same_types(after, before):
  """Checks two model states.

  Raises:
    ValueError: If trees, shapes or dtypes differ.
  """

  def types(tree):
    return [(jnp.shape(x), jnp.result_type(x)) for x in jax.tree.leaves(tree)]

  # Trees are not compared with `==`, because their nodes may not support it.
  has_same_tree = jax.tree.structure(after) == jax.tree.structure(before)
  if not has_same_tree or types(after) != types(before):
    shown = [
        jax.tree.map(lambda x: (jnp.shape(x), jnp.result_type(x)), tree)
        for tree in (after, before)
    ]
    raise ValueError(
        '`after` and `before` of `unless_skipped` must have the same trees,'
        f' shapes and dtypes, got {shown[0]} and {shown[1]}.'
    )
