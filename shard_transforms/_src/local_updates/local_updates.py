"""`local_updates`: shards train on their own and average once a round."""

from collections.abc import Hashable
import dataclasses
from typing import Any

import chex
import jax.numpy as jnp
import optax

from shard_transforms._src.base import axes as axes_lib
from shard_transforms._src.base import counters
from shard_transforms._src.base import per_shard_state
from shard_transforms._src.base import weights
from shard_transforms._src.base import wrapper
from shard_transforms._src.local_updates import checks
from shard_transforms._src.local_updates import fragments as fragments_lib
from shard_transforms._src.local_updates import local_state
from shard_transforms._src.local_updates import local_steps
from shard_transforms._src.local_updates import meetings
from shard_transforms._src.local_updates import rounds as rounds_lib
from shard_transforms._src.tracing import gating
from shard_transforms._src.tracing import gradient_points
from shard_transforms._src.tracing import meeting_scopes

_CALLER = local_state.CALLER


def local_updates(
    inner: optax.GradientTransformation,
    outer: optax.GradientTransformation,
    axis_name: axes_lib.AxisName,
    *,
    every: rounds_lib.Every,
    mixing: chex.Numeric = 0.0,
    elastic: bool = False,
    fragments: Any = 1,
    delay: int = 0,
) -> optax.GradientTransformationExtraArgs:
  r"""Lets each shard train on its own, and moves the parameters once a round.

  In each call, a shard takes a step of its own: `inner` moves its own
  parameters :math:`x_i`, which the state holds, and nothing is sent. The
  parameters :math:`T` that `update` is given and gives updates for are the
  anchor, the same on all shards. It is constant during a round. Then `outer`
  gets the distance of each shard from it as a gradient, the pseudogradient:

  .. math:: T \\leftarrow T + \\text{outer}(T - x_i), \\quad
     x_i \\leftarrow m x_i + (1 - m) T

  with `mixing` :math:`m`; where that is 0, all shards continue from the anchor.
  `outer` holds the reduction, and what else is to be done once a round, such as
  clipping or a `guard`::

    outer = optax.chain(
        cross_shard_mean('data'), optax.sgd(0.7, 0.9, nesterov=True))
    tx = local_updates(optax.adamw(4e-4), outer, 'data', every=20)  # DiLoCo.

  Take the gradient at `local_params(params, state)` and not at `params`, which
  has the same type but is wrong. Both `params` and `apply_updates` are for the
  anchor, and so are evaluation, averages and exports. The state differs between
  shards: see `init_state`, and `update_and_apply` for the least memory traffic.

  With the extra argument `weight`, a scalar a step, `outer` is handed the sum
  over the steps of the round, so that a `cross_shard_mean` in it weighs shards
  by all of their tokens. A step of weight zero leaves a shard as it is; a round
  in which no shard has any, the anchor. Give it with every step or with none.

  A shard whose parameters are not finite when it takes over the anchor restarts
  from the anchor, with a new state of `inner`. Leave it out of the mean with
  `guard(..., on_bad='exclude')` as `outer`, or all shards are lost with it.

  Args:
    inner: The optimizer of each shard. It must not reduce over the axis.
    outer: The optimizer of the anchor, with the reduction over the axis in it.
    axis_name: The mapped axis, or a sequence of them, between whose shards
      steps are local. Over other axes, `inner` may reduce in each step.
    every: The number of steps of a round, at least 1; or a function that gives
      it for the number of the round, an int32 [] that is traced.
    mixing: How much of its own parameters a shard keeps, from 0 to 1.
    elastic: Whether shards move towards the anchor as it was before it moved.
    fragments: In how many parts the leaves are sent, at equal distances over
      the round; they are spread evenly by bytes. Or a tree of labels, integers
      or strings, like the parameters or a prefix of them: leaves of one label
      are sent together, in the order of the labels.
    delay: How many steps a fragment is sent, and the anchor moved, before
      shards take it over. Less than the steps to the first meeting of a round;
      in a round that `every` makes shorter, it is sent in the first step.

  Returns:
    An `optax.GradientTransformationExtraArgs` with a `LocalUpdatesState`, whose
    `update` takes the optional extra argument `weight`.

  Raises:
    NameError: In `init` and `update`, if an axis is not bound.
    TypeError: If an argument is of the wrong kind; in `update`, if a leaf is an
      integer or boolean, or the state is of another transformation.
    ValueError: If an argument has a wrong value; in `init`, if there are more
      fragments than leaves, labels do not fit, or `inner` or `outer` holds
      `local_updates`; in `update`, if updates are already reduced or are known
      to be the gradient at `params`, the state is for other parameters or
      fragments, `params` are missing or a shard's own, `inner` sends over the
      axis, or `outer` does not reduce over it.

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
    Zhang, Choromanska and LeCun, Deep learning with Elastic Averaging SGD,
    2014, https://arxiv.org/abs/1412.6651.
    Wang et al., SlowMo: Improving Communication-Efficient Distributed SGD with
    Slow Momentum, 2019, https://arxiv.org/abs/1910.00643.
  """
  task = _Task(
      inner=wrapper.as_inner(inner, _CALLER),
      outer=wrapper.as_inner(outer, _CALLER, 'outer'),
      axes=axes_lib.as_axes(axis_name),
      mixing=checks.as_mixing(mixing, elastic, delay),
      fragments=fragments_lib.as_fragments(fragments),
      known_every=None if callable(every) else every,
  )
  rounds = rounds_lib.Rounds(every, delay, task.fragments.num)

  def init_fn(params):
    axes_lib.size(task.axes, _CALLER)
    own = local_state.trained(params)
    inner_state = task.inner.init(own)
    outer_state = tuple(map(task.outer.init, task.fragments.split(own)))
    checks.check_not_nested((inner_state, outer_state))
    return local_state.start(params, inner_state, outer_state, task.axes)

  def step(gate, updates, state, params=None, *, weight=None, **extra_args):
    checks.check_update(updates, state, params, task.axes)
    anchor = local_state.trained(params)
    checks.check_state(state, anchor, updates, task.fragments, task.outer)
    checks.check_gradient_point(updates, params)
    if weight is not None:
      weight = weights.as_weight(weight, (), _CALLER)
    due = rounds.at(state.step, state.num_rounds)
    marked = gradient_points.mark(updates, state.own_params, anchor)
    updates, own_params, anchor = marked
    state = state._replace(own_params=own_params)
    state = task.step_alone(updates, state, weight, extra_args)
    moved, state = task.send(gate, due, state, anchor, weight, extra_args)
    if gate.applies:
      meeting = meetings.Anchor(anchor, moved, None)
    else:
      meeting = meetings.Anchor(anchor, anchor, moved)
    state = task.take_over(due, state, meeting)
    applied = local_state.replaced(params if gate.applies else updates, moved)
    return applied, state

  return gating.transformation(init_fn, step)


@dataclasses.dataclass(frozen=True)
class _Task:
  """The parts of a step; see `local_updates`."""

  inner: optax.GradientTransformationExtraArgs
  outer: optax.GradientTransformationExtraArgs
  axes: tuple[Hashable, ...]
  mixing: meetings.Mixing
  fragments: fragments_lib.Fragments
  known_every: int | None

  def own(self, kept: Any) -> Any:
    """Takes a shard's own values out of the state."""
    return per_shard_state.own(kept, self.axes, _CALLER)

  def with_own(self, state, **own):
    """Returns a state with others in place of a shard's own values."""
    after = state._replace(
        **{name: per_shard_state.store(x, self.axes) for name, x in own.items()}
    )
    per_shard_state.check_kept(state, after, _CALLER)
    return after

  def step_alone(self, updates, state, weight, extra_args):
    """Returns the state after a shard's own step."""
    own, inner_state = local_steps.take(
        self.inner,
        updates,
        self.own(state.inner_state),
        self.own(state.own_params),
        weight,
        self.axes,
        extra_args,
    )
    total_weight = self.own(state.total_weight)
    total_weight += 1 if weight is None else weight
    return self.with_own(
        state,
        own_params=own,
        inner_state=inner_state,
        total_weight=total_weight,
    )

  def send(self, gate, due, state, anchor, weight, extra_args):
    """Returns the updates of the anchor, or the next anchor, and the state."""
    total_weight = self.own(state.total_weight)
    shared = self.fragments.split(anchor)
    own = self.fragments.split(self.own(state.own_params))
    sent = [
        meetings.send(
            gate,
            due.sends[i],
            self.outer,
            state.outer_state[i],
            shared[i],
            own[i],
            weight=None if weight is None else total_weight[i],
            axes=self.axes,
            extra_args=extra_args,
            scope=meeting_scopes.scope(i, self.known_every),
        )
        for i in range(self.fragments.num)
    ]
    moved, outer_state = zip(*sent, strict=True)
    total_weight = jnp.where(jnp.stack(due.sends), 0, total_weight)
    state = self.with_own(state, total_weight=total_weight)
    state = state._replace(outer_state=outer_state)
    return self.fragments.join(moved, anchor), state

  def take_over(self, due, state, anchor):
    """Returns the state after the shards have taken over what is due."""
    own, inner_state = meetings.take_over(
        due.mixes,
        self.fragments.of_leaves(anchor.before),
        self.mixing,
        self.inner,
        self.own(state.own_params),
        self.own(state.inner_state),
        anchor,
        self.axes,
    )
    state = self.with_own(state, own_params=own, inner_state=inner_state)
    return state._replace(
        step=jnp.where(due.is_last, 0, state.step + 1),
        num_rounds=counters.add(state.num_rounds, due.is_last),
    )
