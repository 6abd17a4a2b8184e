"""`check_health`: errors that traced code can only count."""

import jax
from jax import core
import optax

from shard_transforms._src.base import state_rules


def check_health(state: optax.OptState) -> None:
  """Raises if training has stalled or shards have diverged.

  Looks for the states of `guard` and `track_divergence` anywhere in `state`,
  and for those of yours that have a method `health_problem`; see
  `shard_transforms.state_rules.MonitoredState`. Waits for their counters, so
  call it now and then rather than in each step.

  Args:
    state: State of an optimizer, as a step returns it.

  Raises:
    RuntimeError: If a `guard` has skipped `max_consecutive` updates in a row,
      shards were found to hold different bits, or a state tells of a problem.
    TypeError: If it is called in traced code.
    ValueError: If there is nothing to check in `state`.

  Examples:
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import shard_transforms
    >>> tx = shard_transforms.guard(optax.adam(0.1), max_consecutive=2)
    >>> state = tx.init(jnp.zeros(()))
    >>> for update in 1.0, jnp.nan, jnp.nan:
    ...   shard_transforms.monitoring.check_health(state)
    ...   _, state = tx.update(jnp.asarray(update), state)
    >>> shard_transforms.monitoring.check_health(state)
    Traceback (most recent call last):
        ...
    RuntimeError: `guard` has skipped the last 2 updates, 1 to 2: ...
  """
  found = list(state_rules.nodes(state, _is_monitored))
  if not found:
    raise ValueError(
        '`state` must hold a `GuardState`, a `DivergenceState` or another that'
        f' has `health_problem`, got none in {jax.tree.structure(state)}.'
    )
  for node in found:
    if any(isinstance(leaf, core.Tracer) for leaf in jax.tree.leaves(node)):
      raise TypeError(
          '`check_health` must be called outside of traced code, on the state'
          ' that a compiled step has returned.'
      )
    if problem := node.health_problem():
      raise RuntimeError(problem)


def _is_monitored(node):
  return hasattr(node, 'health_problem')
