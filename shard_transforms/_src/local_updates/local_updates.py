"""`local_updates`: shards train on their own and average once a round."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from shard_transforms._src.analysis import gradient_points
from shard_transforms._src.analysis import shard_flow
from shard_transforms._src.base import arguments
from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import leaves as leaves_lib
from shard_transforms._src.base import states
from shard_transforms._src.base import weights
from shard_transforms._src.gates import gating
from shard_transforms._src.local_updates import local_state
from shard_transforms._src.local_updates import meetings
from shard_transforms._src.local_updates import rounds as rounds_lib

_CALLER = local_state.CALLER


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
  r"""Lets each shard train on its own, and moves the parameters once a round.

  In each call, a shard takes a step of its own: `inner` moves its own
  parameters :math:`x_i`, which the state holds, and nothing is sent. The
  parameters :math:`T` that `update` takes, and whose updates it returns, are
  the anchor: the same on all shards, and constant during a round. At its end
  `outer` gets the distance of each shard from the anchor as a gradient, the
  pseudogradient:

  .. math:: T \leftarrow T + \text{outer}(T - x_i), \quad
     x_i \leftarrow m x_i + (1 - m) T

  with `mixing` :math:`m`; if it is 0, all shards continue from the anchor.
  `outer` contains the reduction and everything else that is done once a round,
  such as clipping or a `guard`::

    outer = optax.chain(
        cross_shard_mean('data'), optax.sgd(0.7, 0.9, nesterov=True))
    tx = local_updates(optax.adamw(4e-4), outer, 'data', every=20)  # DiLoCo.

  Take the gradient at `local_params(params, state)` and not at `params`, which
  has the same type but is wrong. Both `params` and `apply_updates` are for the
  anchor, and so are evaluation, averages and exports. The state differs between
  shards: see `init_state`.

  With the extra argument `weight`, a scalar a step, `outer` gets the sum over
  the steps of the round, so that a `cross_shard_mean` in it weighs shards by
  all of their tokens. A step of weight zero does not change its shard, and a
  round without any weight does not move the anchor. Give it with every step or
  with none.

  A shard whose parameters are not finite when it takes over the anchor restarts
  from the anchor, with a new state of `inner`. Leave it out of the mean with
  `guard(..., on_bad='exclude')` as `outer`, or all shards are lost with it.

  Args:
    inner: The optimizer of each shard. It must not reduce over the axis.
    outer: The optimizer of the anchor, with the reduction over the axis in it.
    axis_name: The mapped axis, or a sequence of them, between whose shards
      steps are local. Over other axes, `inner` may reduce in each step.
    every: The number of steps of a round, at least 1.
    mixing: How much of its own parameters a shard keeps when it takes over the
      anchor, at least 0 and less than 1.
    fragments: In how many parts the leaves are sent, at equal distances over
      the round; they are spread evenly by bytes. Or a tree of labels, integers
      or strings, like the parameters or a prefix of them: leaves of one label
      are sent together, in the order of the labels.
    delay: How many steps after a fragment is sent, and the anchor moved, shards
      take it over. Less than the number of steps before the first meeting of a
      round.
    assume_weighted: Turns off the check that `outer` uses `weight` in all of
      its sums over shards. Set it if `outer` is refused although it does.

  Returns:
    An `optax.GradientTransformationExtraArgs` with a `LocalUpdatesState`, whose
    `update` takes the optional extra argument `weight`.

  Raises:
    NameError: In `init` and `update`, if an axis is not bound.
    TypeError: If an argument is of the wrong kind; in `update`, if a leaf is an
      integer or boolean, or the state is of another transformation.
    ValueError: If an argument has a wrong value; in `init`, if there are more
      fragments than leaves, labels do not fit, or `inner` or `outer` holds
      `local_updates`; in `update`, if updates are already reduced, the state is
      for other parameters or fragments, `params` are missing or a shard's own,
      `inner` sends over the axis, or `outer` does not reduce over it.

  Examples:
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import optax
    >>> import shard_transforms
    >>> outer = optax.chain(
    ...     shard_transforms.cross_shard_mean('data'), optax.sgd(1.0))
    >>> tx = shard_transforms.local_updates(
    ...     optax.sgd(0.5), outer, 'data', every=2)
    >>> def train(target):
    ...   params = jnp.zeros(())
    ...   state, seen = tx.init(params), []
    ...   for _ in range(4):
    ...     own = shard_transforms.local_params(params, state)
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
  mixing = float(arguments.as_decay('mixing', mixing))
  parts = rounds_lib.as_fragments(fragments)
  rounds = rounds_lib.Rounds(every, delay, parts.num)
  arguments.check_bool('assume_weighted', assume_weighted)
  meeting = meetings.Meeting(inner, outer, mixing, parts, axes, assume_weighted)

  def init_fn(params):
    axes_lib.size(axes, _CALLER)
    own = local_state.trained(params)
    inner_state = inner.init(own)
    outer_state = tuple(map(outer.init, parts.split(own)))
    local_state.check_not_nested((inner_state, outer_state))
    return local_state.start(params, inner_state, outer_state, axes)

  def update_fn(updates, state, params=None, *, weight=None, **extra_args):
    _check_update(updates, state, params, axes)
    anchor = local_state.trained(params)
    local_state.check_state(state, anchor, updates, parts, outer)
    if weight is not None:
      weight = weights.as_weight(weight, (), _CALLER)
    due = rounds.at(state.step)
    marked = gradient_points.mark(updates, state.own_params, anchor)
    updates, own, anchor = marked
    own, inner_state, total_weight = states.own(
        (own, state.inner_state, state.total_weight), axes, _CALLER
    )
    own, inner_state = _step_alone(
        inner, updates, inner_state, own, weight, axes, extra_args
    )
    total_weight += 1 if weight is None else weight.astype(total_weight.dtype)
    sent = anchor, own, None if weight is None else total_weight
    moved, outer_state = meeting.send_fragments(
        due.sends, state.outer_state, *sent, extra_args
    )
    own, inner_state = meeting.take_over(
        due.mixes, own, inner_state, anchor, moved
    )
    after = _after(
        state, due, own, inner_state, total_weight, outer_state, axes
    )
    return local_state.replaced(updates, moved), after

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _after(state, due, own, inner_state, total_weight, outer_state, axes):
  """Returns the state after a step."""
  total_weight = jnp.where(jnp.stack(due.sends), 0, total_weight)
  own, inner_state, total_weight = states.store(
      (own, inner_state, total_weight), axes
  )
  after = local_state.LocalUpdatesState(
      step=jnp.where(due.is_last, 0, state.step + 1),
      num_rounds=states.count(state.num_rounds, due.is_last),
      own_params=own,
      inner_state=inner_state,
      total_weight=total_weight,
      outer_state=outer_state,
  )
  states.check_kept(state, after, _CALLER)
  return after


def _step_alone(inner, updates, inner_state, own, weight, axes, extra_args):
  """Returns a shard's own parameters after its own step, and its inner state.

  Raises:
    ValueError: If anything is sent over the axes.
  """
  updates = jax.tree.map(_without_float0, updates)
  # JAX caches the jaxpr of a jitted function: it is not traced again.
  run = jax.jit(functools.partial(_update, inner, extra_args))
  traced = run.trace(updates, inner_state, own)
  if sent := shard_flow.first_sent(traced.jaxpr.jaxpr, axes):
    raise ValueError(
        f'`inner` of `{_CALLER}` must not send over `axis_name`,'
        f' {axes!r}, got one with `{sent}` in it: shards go on by themselves'
        ' between two meetings. What reduces, such as `cross_shard_mean` or'
        ' `guard` with `axis_name`, belongs into `outer`.'
    )

  def step(before, updates, weight):
    own, state = before
    after = run(updates, state, own)
    if weight is not None:
      count = functools.partial(jnp.where, weight > 0)
      after = jax.tree.map(count, after, before)
    return (), after

  given = (own, inner_state), updates, weight
  # Outside of a loop, XLA for TPUs fuses it with changes of shape around it: on
  # v5e 2×4, 8 matrices of 1,024² with Adam then take twice the time to compile,
  # and 57 or 129 MB of temporary memory (JAX 0.10, 0.12) in place of 49 or 54.
  return gating.run_when_due(jnp.array(True), step, *given)[1]


def _update(inner, extra_args, updates, state, own):
  updates, state = inner.update(updates, state, own, **extra_args)
  return jax.tree.map(_add, own, updates, is_leaf=leaves_lib.is_none), state


def _add(param, update):
  if param is None or update is None:
    return param
  return (param + update).astype(param.dtype)


def _without_float0(update):
  return None if leaves_lib.is_float0(update) else update


def _check_update(updates, state, params, axes):
  """Checks what `update` is given, before any arithmetic.

  Raises:
    NameError: If an axis is not bound.
    TypeError: If the state is another one, or a leaf an integer or boolean.
    ValueError: If updates are already reduced, or parameters differ by shard.
  """
  try:
    arguments.check_update(
        updates, state, local_state.LocalUpdatesState, axes, _CALLER
    )
  except ValueError as error:
    raise ValueError(
        f'{error} For `{_CALLER}`, take the gradient at'
        ' `shard_transforms.local_params(params, state)`, not at `params`.'
    ) from error
  _check_shared(params, axes)


def _check_shared(params, axes):
  """Checks that the parameters are those that all shards share.

  Raises:
    ValueError: If they are missing, or a shard's own.
  """
  if params is None:
    raise ValueError(
        f'`params` of `{_CALLER}` must be the parameters, got None. Call'
        ' `tx.update(updates, state, params)`.'
    )
  for path, leaf in jax.tree.leaves_with_path(params):
    own = axes_lib.varying_axes(leaf).intersection(axes)
    if own:
      name = leaves_lib.name_of(path)
      raise ValueError(
          f'`params` of `{_CALLER}` must be the same on all shards, got {name},'
          f' which differs between them along {sorted(own, key=str)}. Only the'
          ' gradient is taken at `local_params(params, state)`: give `update`'
          ' and `apply_updates` the parameters themselves.'
      )
