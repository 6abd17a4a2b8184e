"""`local_updates`: local SGD and DiLoCo, with one average per round."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from shard_transforms._src.analysis import dependence_check
from shard_transforms._src.analysis import interpreter
from shard_transforms._src.analysis import primitives
from shard_transforms._src.base import arguments
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import jaxprs
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import states
from shard_transforms._src.base import weights
from shard_transforms._src.gates import branching
from shard_transforms.contrib._src import arguments as contrib_arguments
from shard_transforms.contrib._src.local_updates import local_state
from shard_transforms.contrib._src.local_updates import (
    outer_step as outer_step_lib,
)
from shard_transforms.contrib._src.local_updates import schedule as schedule_lib

_CALLER = local_state.CALLER
# The warning of `communication_report`.
_WRONG_GRADIENT = (
    'the gradient for `local_updates` was taken at `params`, which are constant'
    ' during a round, and not at the local parameters of each shard: take it at'
    ' `contrib.local_params(params, state)`.'
)


def local_updates(
    inner: optax.GradientTransformation,
    outer: optax.GradientTransformation,
    axis_name: axes_lib.AxisName,
    *,
    every: int,
    mixing: float = 0.0,
    fragments: Any = 1,
    delay: int = 0,
    assume_weighted: bool = False,
) -> optax.GradientTransformationExtraArgs:
  r"""Trains each shard locally, and moves the parameters once per round.

  In each call, a shard takes a local step: `inner` moves its local parameters
  :math:`x_i`, which are part of the state, without communication. The
  parameters :math:`T` that are passed to `update`, and for which it returns
  updates, are the anchor: the same on all shards, and constant during a round.
  At the end of the round, `outer` receives the difference between the anchor
  and the local parameters of each shard as a gradient, the pseudo-gradient:

  .. math:: T \leftarrow T + \text{outer}(T - x_i), \quad
     x_i \leftarrow m x_i + (1 - m) T

  with `mixing` :math:`m`; if it is 0, all shards continue from the anchor.
  `outer` contains the reduction and everything else that happens once per
  round, such as clipping or a `guard`::

    outer = optax.chain(
        cross_shard_mean('data'), optax.sgd(0.7, 0.9, nesterov=True))
    tx = local_updates(optax.adamw(4e-4), outer, 'data', every=20)  # DiLoCo.

  Take the gradient at `local_params(params, state)`. A gradient at `params` has
  the same type but is wrong. `params`, `apply_updates`, evaluation, averages
  and exports all refer to the anchor. The state differs between shards; see
  `init_state`.

  With the extra argument `weight`, one scalar per step, `outer` receives the
  total weight of the round, so that a `cross_shard_mean` in it weights shards
  by all of their tokens. A step of weight zero does not change its shard, and a
  round of total weight zero does not move the anchor. Pass a weight in every
  step or in none.

  A shard whose parameters are not finite at the end of a round restarts from
  the anchor, with a new state of `inner`. Exclude it from the mean with
  `guard(..., on_bad='exclude')` in `outer`; otherwise all shards become
  non-finite.

  Args:
    inner: The optimizer of each shard. It must not reduce over the axis.
    outer: The optimizer of the anchor, including the reduction over the axis.
    axis_name: The mapped axis, or a sequence of axes, between whose shards
      steps are local. Over other axes, `inner` may reduce in each step.
    every: The number of steps per round, at least 1.
    mixing: The fraction of its local parameters that a shard keeps when it
      receives the anchor, at least 0 and less than 1.
    fragments: The number of parts in which the leaves are sent, at equal
      distances over the round; leaves are distributed evenly by bytes. Or a
      tree of labels, integers or strings, that matches the parameters or a
      prefix tree: leaves with the same label are sent together, in the order of
      the labels.
    delay: The number of steps between sending a fragment, which moves the
      anchor, and updating the local parameters. It must be less than the number
      of steps before the first fragment of a round.
    assume_weighted: Whether to skip the check that `outer` uses `weight` in all
      sums over shards. Set it only if `outer` is refused although it uses the
      weight.

  Returns:
    An `optax.GradientTransformationExtraArgs` with a `LocalUpdatesState`, whose
    `update` takes the optional extra argument `weight`.

  Raises:
    NameError: In `init` and `update`, if an axis is not bound.
    TypeError: If an argument has the wrong type; in `update`, if a leaf is an
      integer or boolean, or the state is from another transformation.
    ValueError: If an argument has a wrong value; in `init`, if there are more
      fragments than leaves, labels do not match the parameters, `inner` or
      `outer` contains `local_updates`, or `inner` contains `master_weights` of
      16-bit parameters; in `update`, if updates are already reduced, the state
      is for other parameters or fragments, `params` are missing or differ
      between shards, `inner` communicates over the axis, or `outer` does not
      reduce over it.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import shard_transforms
    >>> outer = optax.chain(
    ...     shard_transforms.cross_shard_mean('data'), optax.sgd(1.0))
    >>> tx = shard_transforms.contrib.local_updates(
    ...     optax.sgd(0.5), outer, 'data', every=2)
    >>> def train(target):
    ...   params = jnp.zeros(())
    ...   state, seen = tx.init(params), []
    ...   for _ in range(4):
    ...     own = shard_transforms.contrib.local_params(params, state)
    ...     updates, state = tx.update(own - target, state, params)
    ...     params = optax.apply_updates(params, updates)
    ...     seen += [params]
    ...   return jnp.stack(seen)
    >>> print(jax.vmap(train, axis_name='data')(jnp.array([1.0, 3.0]))[0])
    [0.    1.5   1.5   1.875]

  References:
    Stich, Local SGD Converges Fast and Communicates Little, 2018,
    https://arxiv.org/abs/1805.09767.
    Douillard et al., DiLoCo: Distributed Low-Communication Training of Language
    Models, 2023, https://arxiv.org/abs/2311.08105; in fragments: Streaming
    DiLoCo with overlapping communication, 2025,
    https://arxiv.org/abs/2501.18512.
    Wang et al., SlowMo: Improving Communication-Efficient Distributed SGD with
    Slow Momentum, 2019, https://arxiv.org/abs/1910.00643.
  """
  inner = arguments.as_inner(inner, _CALLER)
  outer = arguments.as_inner(outer, _CALLER, 'outer')
  axes = axes_lib.as_axes(axis_name)
  mixing = float(contrib_arguments.as_decay('mixing', mixing))
  partition = schedule_lib.as_fragments(fragments)
  schedule = schedule_lib.Schedule(every, delay, partition.num)
  arguments.check_bool('assume_weighted', assume_weighted)
  outer_step = outer_step_lib.OuterStep(
      inner, outer, mixing, partition, axes, assume_weighted
  )

  def init_fn(params):
    axes_lib.check_bound(axes, _CALLER)
    own_params = local_state.trainable_params(params)
    inner_state = inner.init(own_params)
    outer_state = tuple(map(outer.init, partition.split(own_params)))
    local_state.check_not_nested((inner_state, outer_state))
    local_state.check_params_may_change(inner_state)
    return local_state.init_state(params, inner_state, outer_state, axes)

  def update_fn(updates, state, params=None, *, weight=None, **extra_args):
    _check_update(updates, state, params, axes)
    anchor = local_state.trainable_params(params)
    local_state.check_state(state, anchor, updates, partition, outer)
    if weight is not None:
      weight = weights.as_weight(weight, (), _CALLER)
    actions = schedule.at(state.step)
    updates, own_params, anchor = dependence_check.mark(
        updates, state.own_params, anchor, _WRONG_GRADIENT
    )
    own_params, inner_state, total_weight = states.without_shard_axis(
        (own_params, state.inner_state, state.total_weight), axes, _CALLER
    )
    own_params, inner_state = _local_step(
        inner, updates, inner_state, own_params, weight, axes, extra_args
    )
    total_weight += 1 if weight is None else weight.astype(total_weight.dtype)
    moved, outer_state = outer_step.send_fragments(
        actions.sends,
        state.outer_state,
        anchor,
        own_params,
        None if weight is None else total_weight,
        extra_args,
    )
    own_params, inner_state = outer_step.mix_fragments(
        actions.mixes, own_params, inner_state, anchor, moved
    )
    after = _after(
        state, actions, own_params, inner_state, total_weight, outer_state, axes
    )
    return local_state.replace_params(updates, moved), after

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _after(
    state, actions, own_params, inner_state, total_weight, outer_state, axes
):
  """Returns the state after a step."""
  total_weight = jnp.where(jnp.stack(actions.sends), 0, total_weight)
  own_params, inner_state, total_weight = states.with_shard_axis(
      (own_params, inner_state, total_weight), axes
  )
  after = local_state.LocalUpdatesState(
      step=jnp.where(actions.is_last, 0, state.step + 1),
      num_rounds=states.safe_add(state.num_rounds, actions.is_last),
      own_params=own_params,
      inner_state=inner_state,
      total_weight=total_weight,
      outer_state=outer_state,
  )
  states.check_stays_replicated(state, after, _CALLER)
  return after


def _local_step(
    inner, updates, inner_state, own_params, weight, axes, extra_args
):
  """Returns the local parameters and the inner state after a local step.

  Raises:
    ValueError: If `inner` communicates over the axes.
  """
  updates = jax.tree.map(_without_float0, updates)
  # JAX caches the jaxpr of a jitted function, and traces the function once.
  run = jax.jit(functools.partial(_update, inner, extra_args))
  traced = run.trace(updates, inner_state, own_params)
  if collective := _first_collective(traced.jaxpr.jaxpr, axes):
    raise ValueError(
        f'`inner` of `{_CALLER}` communicates over `axis_name`, {axes!r}, with'
        f' `{collective}`, but shards train locally during a round. Move'
        ' reductions over this axis, such as `cross_shard_mean` or `guard`'
        ' with `axis_name`, into `outer`.'
    )

  def step(before, updates, weight):
    own_params, state = before
    after = run(updates, state, own_params)
    if weight is not None:
      select_if_weighted = functools.partial(jnp.where, weight > 0)
      after = jax.tree.map(select_if_weighted, after, before)
    return (), after

  # Outside of a branch, XLA for TPUs fuses the step with surrounding changes of
  # shape: on v5e 2×4, 8 matrices of 1,024² with Adam then take twice the time
  # to compile, and 57 or 129 MB of temporary memory (JAX 0.10, 0.12) instead of
  # 49 or 54.
  state = own_params, inner_state
  return branching.run_when_due(
      jnp.array(True), step, state, updates, weight, caller=_CALLER
  )[1]


def _first_collective(jaxpr, axes):
  """Returns the name of the first collective over one of the axes, if any."""
  # Called in each trace; iterating over jaxprs directly is fast.
  for eqn in jaxprs.all_equations(jaxpr):
    name = interpreter.common_name(eqn.primitive.name)
    if name in primitives.SENDING and not set(axes).isdisjoint(
        interpreter.mapped_axes(eqn.params)
    ):
      return name
  return None


def _update(inner, extra_args, updates, state, own_params):
  updates, state = inner.update(updates, state, own_params, **extra_args)
  return (
      jax.tree.map(_add, own_params, updates, is_leaf=leaves_lib.is_none),
      state,
  )


def _add(param, update):
  if param is None or update is None:
    return param
  return (param + update).astype(param.dtype)


def _without_float0(update):
  return None if leaves_lib.is_float0(update) else update


def _check_update(updates, state, params, axes):
  """Checks the arguments of `update`, before any arithmetic.

  Raises:
    NameError: If an axis is not bound.
    TypeError: If the state is from another transformation, or a leaf is an
      integer or boolean.
    ValueError: If updates are already reduced, or parameters differ between
      shards.
  """
  try:
    arguments.check_update(
        updates, state, local_state.LocalUpdatesState, axes, _CALLER
    )
  except ValueError as error:
    raise ValueError(
        f'{error} For `{_CALLER}`, take the gradient at'
        ' `contrib.local_params(params, state)`, not at `params`.'
    ) from error
  _check_shared(params, axes)


def _check_shared(params, axes):
  """Checks that the parameters are the same on all shards.

  Raises:
    ValueError: If they are missing, or differ between shards.
  """
  if params is None:
    raise ValueError(
        f'`{_CALLER}` needs the parameters. Call `tx.update(updates, state,'
        ' params)`.'
    )
  for path, leaf in jax.tree.leaves_with_path(params):
    differing_axes = axes_lib.varying_axes(leaf).intersection(axes)
    if differing_axes:
      name = leaves_lib.name_of(path)
      raise ValueError(
          f'`params` of `{_CALLER}` must be the same on all shards, but {name}'
          f' differs along {sorted(differing_axes, key=str)}. Use'
          ' `local_params(params, state)` only for the gradient, and pass'
          ' `params` itself to `update` and `apply_updates`.'
      )
