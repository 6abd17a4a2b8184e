"""`delay_updates`: applies updates some steps later."""

import functools
from typing import NamedTuple

import chex
import jax
from jax import lax
import jax.numpy as jnp
import optax

from shard_transforms._src.base import arguments
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import states

_CALLER = 'delay_updates'


def _pending_rule(_, reduction):
  """Returns how pending updates keep their reduction over the shards."""
  if reduction in ('mean', 'sum'):
    return states.Rule(resize=reduction)
  reason = (
      f"`reduction` must be 'mean' or 'sum', got {reduction!r}: the updates"
      ' that are pending on each shard, at {name}, give the same result only if'
      ' it is known how shards are reduced. Give it to `place_state` or'
      ' `resize_state`.'
  )
  return states.Rule(resize='refuse', reason=reason)


class DelayUpdatesState(NamedTuple):
  """State of `delay_updates`.

  With `axis_name`, the leaves of `pending` have a leading axis, of length 1
  inside the mapped function and of the number of shards outside.

  Attributes:
    slot: Which of the pending updates is replaced next, int32 [].
    pending: The updates that are still to come, and the last one that came, a
      tree like the parameters, each leaf [steps + 1, ...]; `()` without delay.

  Examples:
    >>> import jax.numpy as jnp
    >>> import shard_transforms
    >>> state = shard_transforms.delay_updates(2).init(jnp.zeros(3))
    >>> print(state.pending.shape)
    (3, 3)
  """

  slot: jax.Array
  pending: optax.Updates

  rules = {'pending': states.Rule(resize=_pending_rule)}


def delay_updates(
    steps: int, *, axis_name: axes_lib.AxisName | None = None
) -> optax.GradientTransformationExtraArgs:
  r"""Replaces updates by those of some steps ago.

  .. math:: u_t \leftarrow u_{t - \text{steps}}

  and the first `steps` calls give zeros. Use it to simulate the staleness of an
  asynchronous run reproducibly; or to overlap a reduction with the computation
  of the next gradient::

    optax.chain(cross_shard_mean('data'), delay_updates(2), adam)  # Simulation.
    optax.chain(
        delay_updates(1, axis_name='data'), cross_shard_mean('data'), adam)

  Before a reduction, that is, with `axis_name`, the extra argument `weight` is
  refused: the reduction would combine it with the update of another step. After
  the reduction, it has been used.

  Updates are kept in the dtypes of the parameters. A leaf without a gradient in
  a call (`None` in its place) has none in the result of that call, and counts
  as zero later.

  Args:
    steps: By how many calls updates are late, at least 0. With 0, they pass
      unchanged.
    axis_name: The mapped axis, or a sequence of them, between whose shards the
      updates differ; those pending are then kept per shard (see `init_state`).
      `None` if updates are already the same on all shards.

  Returns:
    An `optax.GradientTransformationExtraArgs` with a `DelayUpdatesState`.

  Raises:
    NameError: In `init` and `update`, if an axis is not bound.
    TypeError: If `steps` is not an integer; in `update`, if a leaf is an
      integer or boolean, or the state is of another transformation.
    ValueError: If `steps` is negative; in `update`, if the tree is not the one
      that the state was made for, updates are already reduced although
      `axis_name` is given, or differ between shards although it is not, or
      `weight` comes before the reduction.

  Examples:
    >>> import jax.numpy as jnp
    >>> import shard_transforms
    >>> tx = shard_transforms.delay_updates(2)
    >>> state = tx.init(jnp.zeros(()))
    >>> for update in 1.0, 2.0, 3.0, 4.0:
    ...   updates, state = tx.update(jnp.float32(update), state)
    ...   print(updates)
    0.0
    0.0
    1.0
    2.0

  References:
    Agarwal and Duchi, Distributed Delayed Stochastic Optimization, 2011,
    https://arxiv.org/abs/1104.5525; Langford et al., Slow Learners are Fast,
    2009, https://arxiv.org/abs/0911.0491.
  """
  steps = arguments.as_at_least('steps', steps, 0)
  axes = axes_lib.optional_axes(axis_name)

  def init_fn(params):
    axes_lib.size(axes, _CALLER)
    start = functools.partial(_start, steps=steps, axes=axes)
    pending = jax.tree.map(start, params) if steps else ()
    return DelayUpdatesState(states.counter(), pending)

  def update_fn(updates, state, params=None, *, weight=None, **extra_args):
    del params, extra_args
    arguments.check_update(updates, state, DelayUpdatesState, axes, _CALLER)
    pending = states.own(state.pending, axes, _CALLER)
    _check_steps(pending, steps)
    if not steps:
      return updates, state
    if axes:
      _check_unweighted(weight)
    _check_like(updates, pending)
    put = functools.partial(_put, state.slot)
    pending = leaves_lib.tree_map(put, pending, updates)
    slot = (state.slot + 1) % (steps + 1)
    oldest = jax.tree.map(functools.partial(_take, slot), pending)
    after = DelayUpdatesState(slot, states.store(pending, axes))
    states.check_kept(state, after, _CALLER)
    return leaves_lib.tree_map(_like, updates, oldest), after

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _start(param, steps, axes):
  """Returns zeros for each step; `None` where there is no gradient."""
  dtype = leaves_lib.dtype_of(param)
  if not jnp.issubdtype(dtype, jnp.inexact):
    return None
  # Unlike `jnp.zeros`, these vary over the axes over which the parameter does.
  zeros = jnp.zeros_like(param, dtype=dtype)
  # With one slot more than steps, XLA writes in place: it reads another slot
  # than it writes, and after the write.
  return states.store(lax.broadcast(zeros, (steps + 1,)), axes)


def _take(slot, pending):
  """Returns one of the pending updates of a leaf."""
  return lax.dynamic_index_in_dim(pending, slot, keepdims=False)


def _put(slot, pending, update):
  """Returns the pending updates of a leaf with one of them replaced."""
  if pending is None:
    return None
  if update is None:
    update = jnp.zeros_like(pending[0])
  update = jnp.asarray(update, pending.dtype)
  return lax.dynamic_update_index_in_dim(pending, update, slot, 0)


def _like(update, oldest):
  """Returns the oldest update of a leaf, in the dtype of the current one."""
  if update is None or oldest is None:
    return update
  return oldest.astype(leaves_lib.dtype_of(update))


def _check_steps(pending, steps):
  """Checks that a state was made for this number of steps.

  Raises:
    ValueError: If it was not.
  """
  found = {leaf.shape[0] - 1 for leaf in jax.tree.leaves(pending)}
  if found - {steps}:
    raise ValueError(
        f'State of `{_CALLER}` must be made for {steps} steps, got one for'
        f' {min(found)}. Make it with `init`.'
    )


def _check_like(updates, pending):
  """Checks that updates fit those that are pending.

  Raises:
    TypeError: If a leaf is complex where the parameter is real.
    ValueError: If a tree or a shape differs, or a leaf is already reduced.
  """
  some = jax.tree.map(functools.partial(_take, 0), pending)
  arguments.check_like(updates, some, _CALLER)
  arguments.check_varies_with(updates, some, _CALLER)


def _check_unweighted(weight: chex.Numeric | None):
  """Checks that no weight meets the update of another step.

  Raises:
    ValueError: If one would.
  """
  if weight is not None:
    raise ValueError(
        '`weight` of `delay_updates` must come after the reduction, got one'
        ' before it, where it would meet the update of another step. Write'
        " `optax.chain(cross_shard_mean('data'), delay_updates(steps), ...)`:"
        ' the mean is delayed as its terms would be.'
    )
