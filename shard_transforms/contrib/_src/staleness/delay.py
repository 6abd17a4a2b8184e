"""`delay_updates`: updates that are applied some steps later."""

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
  """Returns the resize rule that preserves the reduction of pending updates."""
  if reduction in ('mean', 'sum'):
    return states.Rule(resize=reduction)
  reason = (
      f"`reduction` must be 'mean' or 'sum', got {reduction!r}, because the"
      ' conversion of the pending updates at {name} depends on how the updates'
      ' are reduced over the shards. Pass `reduction` to `shard_state` or'
      ' `resize_state`.'
  )
  return states.Rule(reason=reason)


class DelayUpdatesState(NamedTuple):
  """State of `delay_updates`.

  With `axis_name`, the leaves of `pending` have a leading axis, of length 1
  inside the mapped function and of the number of shards outside.

  Attributes:
    slot: The position of the pending update that is replaced next, int32 [].
    pending: The updates that are not applied yet, and the last applied one, a
      tree like the parameters, each leaf [steps + 1, ...]; `()` without delay.

  Examples:
    >>> import jax.numpy as jnp
    >>> import shard_transforms
    >>> state = shard_transforms.contrib.delay_updates(2).init(jnp.zeros(3))
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

  The first `steps` calls return zeros. Use it to simulate the staleness of an
  asynchronous run reproducibly, or to overlap a reduction with the computation
  of the next gradient::

    optax.chain(cross_shard_mean('data'), delay_updates(2), adam)  # Simulation.
    optax.chain(
        delay_updates(1, axis_name='data'), cross_shard_mean('data'), adam)

  Before a reduction, that is, with `axis_name`, the extra argument `weight` is
  refused, because the reduction would combine it with the update of another
  step. After the reduction, the weight has already been used.

  Updates are stored in the dtypes of the parameters. If the gradient of a leaf
  is `None` in a call, so is its result in that call, and the stored update is
  zero.

  Args:
    steps: The delay in calls, at least 0. With 0, updates pass unchanged.
    axis_name: The mapped axis, or a sequence of axes, between whose shards the
      updates differ; pending updates are then kept per shard (see
      `init_state`). `None` if updates are already the same on all shards.

  Returns:
    An `optax.GradientTransformationExtraArgs` with a `DelayUpdatesState`.

  Raises:
    NameError: In `init` and `update`, if an axis is not bound.
    TypeError: If `steps` is not an integer; in `update`, if a leaf is an
      integer or boolean, or the state is from another transformation.
    ValueError: If `steps` is negative; in `update`, if the state was created
      for another tree, updates are already reduced although `axis_name` is
      given, or differ between shards although it is not, or `weight` is given
      before the reduction.

  Examples:
    >>> import jax.numpy as jnp
    >>> import shard_transforms
    >>> tx = shard_transforms.contrib.delay_updates(2)
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
    axes_lib.check_bound(axes, _CALLER)
    init_pending = functools.partial(_init_pending, steps=steps, axes=axes)
    pending = jax.tree.map(init_pending, params) if steps else ()
    return DelayUpdatesState(states.counter(), pending)

  def update_fn(updates, state, params=None, *, weight=None, **extra_args):
    del params, extra_args
    arguments.check_update(updates, state, DelayUpdatesState, axes, _CALLER)
    pending = states.without_shard_axis(state.pending, axes, _CALLER)
    _check_steps(pending, steps)
    if not steps:
      return updates, state
    if axes:
      _check_unweighted(weight)
    _check_like(updates, pending)
    write = functools.partial(_write, state.slot)
    pending = leaves_lib.tree_map(write, pending, updates)
    slot = (state.slot + 1) % (steps + 1)
    oldest = jax.tree.map(functools.partial(_read, slot), pending)
    after = DelayUpdatesState(slot, states.with_shard_axis(pending, axes))
    states.check_stays_replicated(state, after, _CALLER)
    return leaves_lib.tree_map(_like, updates, oldest), after

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _init_pending(param, steps, axes):
  """Returns zeros for each step, or `None` if the leaf has no gradient."""
  dtype = leaves_lib.dtype_of(param)
  if not jnp.issubdtype(dtype, jnp.inexact):
    return None
  # Unlike `jnp.zeros`, these vary over the same axes as the parameter.
  zeros = jnp.zeros_like(param, dtype=dtype)
  # With one more slot than steps, XLA updates the buffer in place, because the
  # slot that is read is not the slot that is written before.
  return states.with_shard_axis(lax.broadcast(zeros, (steps + 1,)), axes)


def _read(slot, pending):
  """Returns the pending update of a leaf in a slot."""
  return lax.dynamic_index_in_dim(pending, slot, keepdims=False)


def _write(slot, pending, update):
  """Replaces the pending update of a leaf in a slot."""
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
  """Checks that a state was created for this number of steps.

  Raises:
    ValueError: If it was not.
  """
  state_steps = {leaf.shape[0] - 1 for leaf in jax.tree.leaves(pending)}
  if state_steps - {steps}:
    raise ValueError(
        f'`{_CALLER}` with {steps} steps got a state for {min(state_steps)}'
        ' steps. Create the state with `init` of this transformation.'
    )


def _check_like(updates, pending):
  """Checks that updates match the pending updates.

  Raises:
    TypeError: If a leaf is complex where the parameter is real.
    ValueError: If the tree or a shape differs, or a leaf is already reduced.
  """
  example = jax.tree.map(functools.partial(_read, 0), pending)
  arguments.check_like(updates, example, _CALLER)
  arguments.check_varies_with(updates, example, _CALLER)


def _check_unweighted(weight: chex.Numeric | None):
  """Checks that there is no weight before the reduction.

  Raises:
    ValueError: If there is one.
  """
  if weight is not None:
    raise ValueError(
        '`delay_updates` before a reduction got a `weight`, which the'
        ' reduction would combine with the update of another step. Delay the'
        " mean instead: `optax.chain(cross_shard_mean('data'),"
        ' delay_updates(steps), ...)`.'
    )
