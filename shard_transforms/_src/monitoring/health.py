"""`check_health`: what traced code has counted, raised outside of it."""

from collections.abc import Iterator
from typing import Any

import jax
from jax import core
import jax.numpy as jnp
import numpy as np
import optax

from shard_transforms._src.monitoring import divergence
from shard_transforms._src.transforms import guard

_STATES = (guard.GuardState, divergence.DivergenceState)


def check_health(state: optax.OptState) -> None:
  """Raises if a training run only seems to go on.

  Looks for the states of `guard` and `track_divergence` anywhere in `state`.
  Waits for their counters, so call it now and then rather than in each step.

  Args:
    state: State of an optimizer, as a step returns it.

  Raises:
    RuntimeError: If a `guard` has skipped `max_consecutive` updates in a row,
      or shards were found to hold different bits.
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
  found = list(_states_in(state))
  if not found:
    raise ValueError(
        '`state` must hold a `GuardState` or a `DivergenceState`, got none in'
        f' {jax.tree.structure(state)}.'
    )
  for node in found:
    if any(isinstance(leaf, core.Tracer) for leaf in jax.tree.leaves(node)):
      raise TypeError(
          '`check_health` must be called outside of traced code, on the state'
          ' that a compiled step has returned.'
      )
    if isinstance(node, guard.GuardState):
      _check_guard(node)
    else:
      _check_divergence(node)


def _states_in(tree: Any) -> Iterator[Any]:
  """Yields what can be checked, outermost first."""
  for node in jax.tree.leaves(tree, is_leaf=_is_checked):
    if _is_checked(node):
      yield node
      if isinstance(node, guard.GuardState):
        yield from _states_in(node.inner_state)


def _is_checked(node):
  return isinstance(node, (guard.GuardState, divergence.DivergenceState))


def _check_guard(state):
  num_skipped = _largest(state.consecutive_skipped)
  if num_skipped < _largest(state.max_consecutive):
    return
  num_updates = _largest(state.num_updates)
  first = num_updates - num_skipped
  raise RuntimeError(
      f'`guard` has skipped the last {num_skipped} updates, {first} to'
      f' {num_updates - 1}: training does not go on.{_bad_shards(state, first)}'
      ' Look at the data and the learning rate, and go back to a checkpoint'
      ' from before them.'
  )


def _check_divergence(state):
  if _largest(state.diverged_count):
    raise RuntimeError(
        'Shards must hold the same bits, but `track_divergence` found that they'
        f' differ in {_largest(state.diverged_count)} of its checks, first at'
        f' update {_largest(state.first_diverged_step)}. Go back to a'
        ' checkpoint from before it. If it comes again, something that differs'
        ' between shards gets into the parameters; else suspect the hardware.'
    )


def _bad_shards(state, first):
  """Says in words which shards were bad since an update."""
  found = sorted(
      {
          start + i
          for start, steps in _pieces(state.last_bad_step)
          for i, step in enumerate(np.ravel(steps))
          if step >= first
      }
  )
  if not found:
    return (
        ' No shard here was bad: all weights were zero, if none elsewhere was.'
    )
  if not jnp.ndim(state.last_bad_step):
    return ' They were not finite, or spikes.'
  return f' Not finite, or spikes, were those of the shards {found}.'


def _largest(x):
  return max(int(np.max(piece)) for _, piece in _pieces(x))


def _pieces(x):
  """Yields what of an array is on this process, each with where it starts."""
  if not isinstance(x, jax.Array):
    yield 0, np.asarray(x)
    return
  for shard in x.addressable_shards:
    start = shard.index[0].start if shard.index else 0
    yield start or 0, np.asarray(shard.data)
