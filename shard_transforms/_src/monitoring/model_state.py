"""`unless_skipped`: model state is kept where `guard` skips a step."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax

from shard_transforms._src.base import states
from shard_transforms._src.transforms import guard

# The states of chains and of what runs `inner` in each step.
_STEPPING = (
    tuple,
    list,
    dict,
    optax.MaskedState,
    optax.InjectStatefulHyperparamsState,
)


def unless_skipped(state: optax.OptState, after: Any, before: Any) -> Any:
  """Returns model state after a step, or before it if `guard` skipped it.

  A batch with a NaN puts the NaN into the running mean of batch normalization,
  too, where it stays. The decision of `guard` must also hold for everything
  else that a step computes from its batch.

  Call it with the state that `update` returns. With several guards, all must
  have accepted the step. Put each `guard` around whatever may leave out a step,
  such as `drop_stale` and `tower_reduce`; that does not count as skipped. If
  `on_bad='exclude'` accepts a step, what a bad shard has computed for itself is
  still bad: reduce it over all shards before the gradient, or weigh it.

  Args:
    state: The state of the transformation, with that of a `guard` in it, after
      the step. Of flax `nnx.Optimizer`, `nnx.as_pure(optimizer.opt_state)`.
    after: Tree of arrays of any shapes and dtypes, as this step computes it.
    before: The same tree, as it was before the step.

  Returns:
    The tree `after`, or `before`, with each of its bits.

  Raises:
    ValueError: If there is no state of `guard`; a `guard` stands inside
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
  guards = list(_in_each_step(state))
  num_guards = sum(1 for _ in states.nodes(state, _is_guard))
  if not num_guards:
    raise ValueError(
        '`state` of `unless_skipped` must have the state of a `guard` in it,'
        f' got {type(state).__name__}. Of `nnx.Optimizer`, give'
        ' `nnx.as_pure(optimizer.opt_state)`.'
    )
  if len(guards) < num_guards:
    raise ValueError(
        '`state` of `unless_skipped` must be that of a `guard` that decides in'
        ' each step, got one inside a transformation that may leave out its'
        ' step, such as a window. Put `guard` around it.'
    )
  in_a_row = [jnp.max(x.consecutive_skipped) for x in guards]
  is_skipped = jnp.max(jnp.stack(in_a_row)) > 0
  return jax.tree.map(
      lambda new, old: jnp.where(is_skipped, old, new), after, before
  )


def _is_guard(node: Any) -> bool:
  return isinstance(node, guard.GuardState)


def _in_each_step(node: Any) -> Iterator[Any]:
  """Yields the states of the guards that decide in each step."""
  if _is_guard(node):
    yield node
  elif type(node) not in _STEPPING:
    return
  for part in jax.tree.leaves(node, is_leaf=lambda x: x is not node):
    if part is not node:
      yield from _in_each_step(part)


def _check_same_types(after, before):
  """Checks two model states.

  Raises:
    ValueError: If trees, shapes or dtypes differ.
  """

  def types(tree):
    return jax.tree.map(lambda x: (jnp.shape(x), jnp.result_type(x)), tree)

  if types(after) != types(before):
    raise ValueError(
        '`after` and `before` of `unless_skipped` must be the same tree of the'
        f' same shapes and dtypes, got {types(after)} and {types(before)}.'
    )
